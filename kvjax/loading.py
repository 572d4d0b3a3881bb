"""Getting a model to run: the one that comes with the package, a folder, or one of the hub's."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvjax.sharding import mesh as meshes
from kvjax.sharding.consistency import check_consistent
from kvjax.sharding.head_order import Order, permuted, read_order
from kvjax.sharding.mesh import Mesh
from kvjax.types import Params
from kvjax.weights import fingerprint

if TYPE_CHECKING:
    from kvjax.models.decoder import Decoder
    from kvjax.models.spec import ModelSpec
    from kvjax.text import Text

EMBEDDED = "embedded"
"""The name of the model in ``kvjax/assets/embedded``."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A model in memory, as the decode loop takes it, with the tokenizer beside it.

    Attributes:
      name: the folder or hub id it was asked for by, or "embedded".
      spec: its static sizes.
      params: its weights, the tree of ``kvjax.models.decoder``.
      folder: where it was read from.
      heads: the order in which ``load`` laid its KV heads, and ``origin`` its fingerprint before; or None.
    """

    name: str
    spec: ModelSpec
    params: Params
    folder: Path
    heads: np.ndarray | None = None
    origin: str | None = None

    @functools.cached_property
    def network(self) -> Decoder:
        """The mathematics without the weights."""
        from kvjax.models.decoder import Decoder

        return Decoder(self.spec)

    @functools.cached_property
    def text(self) -> Text:
        """The tokenizer; read when first asked for.

        Raises:
          ValueError: the folder holds none, or a damaged one.
        """
        from kvjax.text import Text

        return Text.load(self.folder, self.spec)


def load(
    source: str | Path | None = None,
    dtype: str | None = None,
    *,
    mesh: Mesh | str | None = None,
    heads: Order | None = None,
) -> LanguageModel:
    """Reads a model.

    Args:
      source: a folder in Hugging Face's format, a hub id such as "Qwen/Qwen2.5-0.5B", or None for the
        small trained model inside the package (no network).
      dtype: "float32", "bfloat16" or "float16"; None leaves the weights as they are stored, the
        embedded ones as float32.
      mesh: devices to lay the weights on ("data=2,tensor=4", ``kvjax.mesh``); what is done with the model
        is then done there. One device by default.
      heads: [L, K], an order of each layer's KV heads, for a mesh whose devices would hold unequally much
        (``kvjax.metrics.balanced``). The model stays the same function, learned weights follow.

    Raises:
      MeshError: a mesh that cannot be made here, or does not divide the model's heads.
      ModelError: no such folder or hub model, or files that are damaged or of another kind.
      ValueError: an order that has not every KV head once in each layer.
    """
    from kvjax.models import hf

    where = meshes.mesh(mesh)
    if source is None:
        found = hf.load(embedded_folder(), dtype=dtype or "float32", mesh=where)
    else:
        found = hf.load(source, dtype=dtype, mesh=where)
    assert found.folder is not None  # noqa: S101  (hf.load always says where it read)
    name = EMBEDDED if source is None else str(source)
    model = LanguageModel(name=name, spec=found.spec, params=found.params, folder=found.folder)
    if heads is None:
        return model
    network = model.network
    order = read_order("load(heads=...)", heads, network.num_layers, network.num_kv_heads)
    check_consistent("load", where, {"the order of KV heads": order})
    laid = permuted(network.letters, model.params, order)
    return dataclasses.replace(model, params=laid, heads=order, origin=fingerprint(model))


def embedded_folder() -> Path:
    """The folder of the model inside the package.

    Raises:
      ModelError: this copy has none.
    """
    from kvjax.models.hf import ModelError

    folder = Path(str(importlib.resources.files("kvjax"))) / "assets" / "embedded"
    if not folder.is_dir():
        raise ModelError(
            "load() finds no embedded model: this copy of kvjax has no assets/embedded. Install the whole "
            "package, or give load() a model folder or hub id."
        )
    return folder
