"""Loads a model: the one in the package, a folder, a GGUF file, or one of the hub."""

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
      name: the folder, file, package or hub id it was loaded by, or "embedded".
      spec: its static sizes.
      params: its weights, the tree of ``kvjax.models.decoder``.
      folder: the folder or the GGUF file it was read from.
      heads: the order of its KV heads if ``load`` changed it, else None.
      origin: its fingerprint before that, or None.
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
          ValueError: the folder or file holds none, a damaged one, or one of an unknown kind.
        """
        from kvjax.text import Text

        if self.folder.is_file():
            from kvjax.models.gguf_file import read_header
            from kvjax.models.gguf_text import read_text

            read = read_text(read_header(self.folder))
            return Text(
                read.tokenizer,
                bos=self.spec.bos if read.add_bos else None,
                eos=self.spec.eos,
                template=read.template,
                special_tokens=read.special_tokens,
                place=f"the chat template in {self.folder}",
            )
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
      source: a folder in Hugging Face's format; a GGUF file; "package:NAME" for the GGUF file in an installed
        Python package; a hub id such as "Qwen/Qwen2.5-0.5B"; or None for the small trained model inside kvjax
        (no network).
      dtype: "float32", "bfloat16" or "float16"; None leaves the weights as they are stored, those of a GGUF
        file as bfloat16, the embedded ones as float32.
      mesh: devices to shard the weights over ("data=2,tensor=4", ``kvjax.mesh``); caches of the model live
        there too. One device by default.
      heads: [L, K], an order of each layer's KV heads, for a mesh whose devices would otherwise hold unequal
        shares (``kvjax.metrics.balanced``). The model computes the same; learned weights are reordered with
        it.

    Raises:
      MeshError: a mesh that needs other devices, or does not divide the model's heads.
      ModelError: no such folder, file, package or hub model, or files that are damaged or of another kind.
      ValueError: an order that does not have every KV head once in each layer.
    """
    from kvjax.models import hf

    target = meshes.mesh(mesh)
    if source is None:
        hf_model = hf.load(embedded_folder(), dtype=dtype or "float32", mesh=target)
    else:
        hf_model = hf.load(source, dtype=dtype, mesh=target)
    assert hf_model.folder is not None  # hf.load always sets it
    name = EMBEDDED if source is None else str(source)
    model = LanguageModel(name=name, spec=hf_model.spec, params=hf_model.params, folder=hf_model.folder)
    if heads is None:
        return model
    network = model.network
    order = read_order("load(heads=...)", heads, network.num_layers, network.num_kv_heads)
    check_consistent("load", target, {"the order of KV heads": order})
    reordered = permuted(network.letters, model.params, order)
    return dataclasses.replace(model, params=reordered, heads=order, origin=fingerprint(model))


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
            "package, or give load() a model folder, GGUF file or hub id."
        )
    return folder
