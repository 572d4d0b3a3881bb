"""Loads a model: the one in the package, a folder, a GGUF file, one of the hub, or a Flax module."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import jax
import numpy as np
from jax.sharding import NamedSharding

from kvjax.sharding import mesh as meshes
from kvjax.sharding.consistency import check_consistent
from kvjax.sharding.head_order import Order, in_order, permuted, read_order
from kvjax.sharding.mesh import Mesh, mesh_of
from kvjax.types import DTYPES, Params
from kvjax.weights import fingerprint, sampled_signs

if TYPE_CHECKING:
    from kvjax.models.decoder import Decoder
    from kvjax.models.own import OwnNetwork
    from kvjax.models.spec import ModelSpec
    from kvjax.text import Text

EMBEDDED = "embedded"
"""The name of the model in ``kvjax/assets/embedded``."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A model in memory, as the decode loop takes it, with the tokenizer beside it.

    Attributes:
      name: the folder, file, package or hub id it was loaded by, "embedded", or the class of a Flax module.
      spec: its static sizes.
      params: its weights, the tree of ``kvjax.models.decoder``.
      folder: the folder or the GGUF file it was read from; None for a Flax module.
      heads: the order of its KV heads if ``load`` changed it, else None.
      origin: its fingerprint before that, or None.
      tokenizer: what ``load`` was given for a Flax module, or None.
      copied: bytes of ``params`` that are copies of a Flax module's arrays; the others are shared with it.
      weight_dtype: what its weights were quantised to, or None.
      signs: of the file's values of quantised weights, for ``fingerprint``, by the weight's path.
    """

    name: str
    spec: ModelSpec
    params: Params
    folder: Path | None = None
    heads: np.ndarray | None = None
    origin: str | None = None
    tokenizer: Text | None = None
    copied: int = 0
    weight_dtype: str | None = None
    signs: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def network(self) -> Decoder:
        """The mathematics without the weights."""
        from kvjax.models.decoder import Decoder

        return Decoder(self.spec).on(mesh_of(self.params))

    @functools.cached_property
    def text(self) -> Text:
        """The tokenizer; read when first asked for.

        Raises:
          ValueError: the folder or file holds none, a damaged one, or one of an unknown kind; a Flax module
            without a tokenizer.
        """
        from kvjax.text import Text

        if self.folder is None:
            return _own_text(self.name, self.tokenizer)
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OwnModel:
    """A Flax module of the user's own, as the decode loop takes it.

    Attributes:
      name: of its class.
      network: its mathematics.
      params: its arrays, shared.
      tokenizer: what ``load`` was given, or None.
      folder: None: it was not read from one.
    """

    name: str
    network: OwnNetwork
    params: Params
    tokenizer: Text | None = None
    folder: None = None

    @property
    def text(self) -> Text:
        """The tokenizer; raises ModelError where ``load`` was given none."""
        return _own_text(self.name, self.tokenizer)


def outline(source: str | None, dtype: str | None = None) -> tuple[LanguageModel, str]:
    """A model without its weights, which are neither fetched nor read: sizes and tokenizer; and its dtype.

    Args:
      source, dtype: as in ``load``, but no module.

    Raises:
      ModelError: as ``load``, but for the weights.
    """
    from kvjax.models import hf

    spec, stored, place = hf.read_outline(embedded_folder() if source is None else source)
    model = LanguageModel(name=EMBEDDED if source is None else source, spec=spec, params={}, folder=place)
    return model, dtype or ("float32" if source is None else stored) or "float32"


def _own_text(name: str, tokenizer: Text | None) -> Text:
    if tokenizer is None:
        from kvjax.models.hf_config import ModelError

        raise ModelError(
            f"model.text: this {name} was loaded without a tokenizer. Load it with kvjax.load(model, "
            "tokenizer=FOLDER), a folder with its tokenizer.json, or work with token ids."
        )
    return tokenizer


@overload
def load(
    source: str | Path | None = None,
    dtype: str | None = None,
    *,
    tokenizer: str | Path | Text | None = None,
    mesh: Mesh | str | None = None,
    heads: Order | None = None,
    weight_dtype: str | None = None,
) -> LanguageModel: ...


@overload
def load(
    source: Any,
    dtype: str | None = None,
    *,
    tokenizer: str | Path | Text | None = None,
    mesh: Mesh | str | None = None,
    heads: Order | None = None,
    weight_dtype: str | None = None,
) -> Any: ...


def load(
    source: Any = None,
    dtype: str | None = None,
    *,
    tokenizer: str | Path | Text | None = None,
    mesh: Mesh | str | None = None,
    heads: Order | None = None,
    weight_dtype: str | None = None,
) -> Any:
    """Reads a model.

    Args:
      source: a folder in Hugging Face's format; a GGUF file; "package:NAME" for the GGUF file in an installed
        Python package; a hub id such as "Qwen/Qwen2.5-0.5B"; or None for the small trained model inside kvjax
        (no network). Or a Flax NNX module in memory: a Llama3, Qwen2, Qwen3 or Gemma3 of google-tunix, or a
        module of your own (docs/flax.md). Its arrays are shared where they are laid as ours; a warning says
        how many bytes are copied.
      dtype: "float32", "bfloat16" or "float16"; None leaves the weights as they are stored, those of a GGUF
        file as bfloat16, the embedded ones as float32.
      tokenizer: of a Flax module: a folder with tokenizer.json, or a ``kvjax.text.Text``.
      mesh: devices to shard the weights over ("data=2,tensor=4", ``kvjax.mesh``); caches of the model live
        there too. One device by default. Of a module of your own every device has all weights, but for arrays
        that lie on this mesh already: they stay as they are cut.
      heads: [L, K], an order of each layer's KV heads, for a mesh whose devices would otherwise hold unequal
        shares (``kvjax.metrics.balanced``). The model computes the same; learned weights are reordered with
        it.
      weight_dtype: "int8" or "int4" to quantise matrices to while they are read, so that less memory holds
        the model; embedding and head have 8 bits in both, activations and cache stay ``dtype``.

    Returns:
      A ``LanguageModel``; of a module of your own an ``OwnModel``.

    Raises:
      MeshError: a mesh that needs other devices, or does not divide the model's heads.
      ModelError: no such folder, file, package or hub model, or files that are damaged or of another kind; a
        Flax module that is neither; ``weight_dtype`` beside a checkpoint that is quantised, or a module.
      ValueError: an order that does not have every KV head once in each layer.
    """
    from kvjax.models import hf

    target = meshes.mesh(mesh)
    signs = _Signs()
    if source is not None and not isinstance(source, str | Path):
        if weight_dtype is not None:
            raise hf.ModelError(
                f"load({type(source).__name__}(...), weight_dtype={weight_dtype!r}) would copy a module's "
                "arrays, which are shared. Save the model in Hugging Face's format and load that folder."
            )
        module = _load_module(source, dtype, tokenizer, target)
        if heads is None:
            return module
        if isinstance(module, OwnModel):
            raise hf.ModelError(
                f"load({module.name}(...), heads=...) cannot reorder the heads of a module of yours. Load it "
                "without heads."
            )
        model = module
    else:
        if tokenizer is not None:
            raise hf.ModelError(
                f"load({str(source)!r}, tokenizer=...): this model has its tokenizer beside it. Leave it "
                "out; it is for Flax modules."
            )
        if source is None:
            source, name, dtype = embedded_folder(), EMBEDDED, dtype or "float32"
        else:
            name = str(source)
        if weight_dtype is not None and heads is not None:
            signs.order = _order(heads, hf.read_spec(source)[0])
        read = hf.load(source, dtype=dtype, mesh=target, weight_dtype=weight_dtype, on_values=signs.take)
        model = LanguageModel(
            name=name,
            spec=read.spec,
            params=read.params,
            folder=read.folder,
            weight_dtype=weight_dtype,
            signs=signs.read,
        )
    if heads is None:
        return model
    order = _order(heads, model.spec)
    check_consistent("load", target, {"the order of KV heads": order})
    reordered = permuted(model.network.letters, model.params, order)
    origin = fingerprint(model)
    return dataclasses.replace(model, params=reordered, heads=order, origin=origin, signs=signs.reordered)


def _order(heads: Order, spec: ModelSpec) -> np.ndarray:
    return read_order("load(heads=...)", heads, spec.num_layers, spec.num_kv_heads)


class _Signs:
    """Signs of the values of weights that are about to be quantised, for the fingerprint.

    Attributes:
      order: of the KV heads, if they are reordered; or None.
      read: by the weight's path, as the file has them.
      reordered: the same of weights in that order.
    """

    def __init__(self) -> None:
        self.order: np.ndarray | None = None
        self.read: dict[str, np.ndarray] = {}
        self.reordered: dict[str, np.ndarray] = {}

    def take(self, path: tuple[str | int, ...], values: np.ndarray) -> None:
        from kvjax.models.decoder import LETTERS
        from kvjax.models.layout import INPUTS_FIRST

        key, name = "".join(f"[{part!r}]" for part in path), str(path[-1])
        axes = INPUTS_FIRST.get(name, range(values.ndim))
        self.read[key] = self.reordered[key] = sampled_signs(values, axes)
        axis = next((at for at, letter in enumerate(LETTERS[name]) if letter in "KN"), None)
        if self.order is not None and axis is not None:
            of_layer = self.order[int(path[1])]
            self.reordered[key] = sampled_signs(in_order(values, of_layer, axis), axes)


def _load_module(
    module: Any, dtype: str | None, tokenizer: str | Path | Text | None, mesh: Mesh
) -> LanguageModel | OwnModel:
    """A Flax module in memory."""
    from kvjax.models import tunix
    from kvjax.models.hf_config import ModelError

    name, spec, shared = type(module).__name__, None, set[int]()
    if dtype not in (None, *DTYPES):
        raise ModelError(
            f"load({name}(...), dtype={dtype!r}) names no dtype. Give one of {', '.join(DTYPES)}."
        )
    if tunix.is_tunix(module):
        spec, params, shared = tunix.read(module)
    else:
        from kvjax.models import own

        network, params = own.read(module)
    if dtype is not None:
        floating = lambda x: jax.numpy.issubdtype(x.dtype, jax.numpy.floating)  # noqa: E731
        params = jax.tree.map(lambda x: x.astype(dtype) if floating(x) and x.dtype != dtype else x, params)
    if spec is None:
        if mesh != meshes.ONE:
            mesh.check(f"load({name}(...))", heads=network.num_heads, kv_heads=network.num_kv_heads)
            there = lambda x: isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh.grid  # noqa: E731
            params = jax.tree.map(lambda x: x if there(x) else mesh.put(x), params)
        return OwnModel(name=name, network=network, params=params, tokenizer=_read_text(tokenizer))
    leaves = jax.tree.leaves(params)
    copied, whole = sum(x.nbytes for x in leaves if id(x) not in shared), sum(x.nbytes for x in leaves)
    if copied:
        warnings.warn(
            f"load({name}(...)) copies {copied:,} of {whole:,} bytes, whose layout or dtype is another one; "
            "the others are shared.",
            stacklevel=3,
        )
    said = getattr(module.config, "rope_theta", None)
    if said is not None and spec.rope.theta != said:
        warnings.warn(
            f"load({name}(...)): the module turns by rope_theta {spec.rope.theta:g}, its config says "
            f"{said:g}. kvjax computes what the module computes.",
            stacklevel=3,
        )
    text = _read_text(tokenizer)
    if text is not None:
        spec = dataclasses.replace(spec, bos=text.bos, eos=tuple(text.eos))
    model = LanguageModel(name=name, spec=spec, params=params, tokenizer=text, copied=copied)
    if mesh != meshes.ONE:
        mesh.check(f"load({name}(...))", heads=spec.num_heads, kv_heads=spec.num_kv_heads)
        params = mesh.put(params, mesh.of_model(model.network, params))
        model = dataclasses.replace(model, params=params)
    return model


def _read_text(tokenizer: str | Path | Text | None) -> Text | None:
    """The tokenizer of a folder, with the ids that the configs beside it begin and end texts by."""
    from kvjax.text import Ends, Text

    if tokenizer is None or isinstance(tokenizer, Text):
        return tokenizer
    folder, ids = Path(tokenizer), dict[str, Any]()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            ids |= {k: v for k, v in json.loads((folder / name).read_text()).items() if v is not None}
    ends = ids.get("eos_token_id", [])
    eos = tuple(ends) if isinstance(ends, list) else (ends,)
    return Text.load(folder, Ends(ids.get("bos_token_id"), eos))


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
