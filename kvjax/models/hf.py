"""Models in Hugging Face's folder format and in GGUF files, without torch or transformers.

    model = load("path/or/hub-id", dtype="bfloat16")
    logits = decoder.dense_logits(model.spec, model.params, tokens)
    save("export", model.spec, model.params, tokenizer=model.folder)

Folders are read and written, GGUF files read. Families: ``kvjax.models.families``. Whatever in a folder or
file would change the mathematics is read or refused, never skipped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.models import gguf_config, gguf_text, packages
from kvjax.models.decoder import Decoder
from kvjax.models.gguf_file import GgufWeights, Header, is_gguf, read_header
from kvjax.models.hf_config import (
    ModelError,
    eos_value,
    read_config,
    stated_blocks,
    stated_dtype,
    write_config,
)
from kvjax.models.hf_files import TensorFile, open_folder, read_json, stamp
from kvjax.models.hf_weights import OnValues, read_weights, write_weights
from kvjax.models.quantised import refuse
from kvjax.models.spec import ModelSpec
from kvjax.sharding.consistency import check_consistent
from kvjax.sharding.mesh import ONE, Mesh, mesh_of
from kvjax.types import DTYPES, WEIGHT_DTYPES, Params

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Model", "ModelError", "load", "read_spec", "save"]

# Only these are fetched: repositories also hold the same weights in other formats.
_WANTED = ["config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"]
_TOKENIZER = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model in memory.

    Attributes:
      spec: its static sizes.
      params: its weights, the tree of ``kvjax.models.decoder``.
      folder: the folder or GGUF file it was read from (of a hub id the local snapshot), tokenizer included;
        or None.
    """

    spec: ModelSpec
    params: Params
    folder: Path | None = None

    @property
    def network(self) -> Decoder:
        """The mathematics of the spec: what the decode loop takes, beside ``params``."""
        return Decoder(self.spec).on(mesh_of(self.params))


def load(
    source: str | Path,
    *,
    dtype: str | None = None,
    mesh: Mesh = ONE,
    weight_dtype: str | None = None,
    on_values: OnValues | None = None,
) -> Model:
    """Reads a model folder, a GGUF file, or a model of the hub through the cache of huggingface_hub.

    Tensors are read one at a time. An ``lm_head.weight`` stored with a tied model is accepted if it
    equals the embedding; buffers of old checkpoints and the vision of a gemma3 are ignored; everything
    else must fit.

    Args:
      source: a folder; a GGUF file; "package:NAME" for the GGUF file in an installed package; or a hub id
        such as "Qwen/Qwen2.5-0.5B" (offline if cached already).
      dtype: "float32", "bfloat16" or "float16" to cast to; None for the dtype config.json names,
        else the one the file stores; of a GGUF file bfloat16.
      mesh: devices to shard the weights over, one tensor at a time; each process reads its part.
      weight_dtype: "int8" or "int4" to quantise matrices to (``kvjax.models.quantised``); embedding and head
        have 8 bits in both. ``dtype`` is then that of all else.
      on_values: called with each matrix before it is quantised.

    Raises:
      MeshError: a mesh that does not divide the model's heads or experts; other files in other processes.
      ModelError: no such folder or hub model, an unsupported family or option, files that are
        missing or damaged, tensors that do not fit the config.
    """
    _check_dtype(f"load({str(source)!r}, dtype={dtype!r})", dtype, (None, *DTYPES))
    if weight_dtype not in (None, *WEIGHT_DTYPES):
        raise ModelError(
            f"load({str(source)!r}, weight_dtype={weight_dtype!r}) names no such weights. Give one of "
            f"{', '.join(WEIGHT_DTYPES)}, or leave it out."
        )
    place = _place_of(source)
    spec, stored, config, header = _read_spec(place)
    dtype = dtype or stored
    heads, kv_heads, experts = spec.num_heads, spec.num_kv_heads, spec.num_experts
    mesh.check(f"load({str(source)!r})", heads=heads, kv_heads=kv_heads, experts=experts)
    files: Sequence[TensorFile]
    if header is None:
        blocks = stated_blocks(config, str(place / "config.json"))
        if blocks is not None and weight_dtype is not None:
            raise ModelError(
                f"load({str(source)!r}, weight_dtype={weight_dtype!r}) would quantise weights that are FP8 "
                "already. Leave weight_dtype (--weight-dtype) out, or take the bfloat16 checkpoint."
            )
        files = open_folder(place, spec, blocks)
    else:
        files = [GgufWeights(header, spec, "float32" if weight_dtype else str(dtype))]
    if mesh.across:
        given = {"the config": config, "the weights": stamp(files), "the dtype": str(dtype)}
        check_consistent("load", mesh, given | {"the weight_dtype": str(weight_dtype)})
    params = read_weights(place, files, spec, dtype, mesh, weight_dtype, on_values)
    return Model(spec=spec, params=params, folder=place)


def read_spec(source: str | Path) -> tuple[ModelSpec, str | None]:
    """A model's sizes, and the dtype its config.json names; of the hub nothing but the config is fetched.

    Args:
      source: as in ``load``.

    Raises:
      ModelError: as ``load``, but for the weights.
    """
    return _read_spec(_place_of(source, _WANTED[:2]))[:2]


def read_outline(source: str | Path) -> tuple[ModelSpec, str | None, Path]:
    """``read_spec``, and the place with the tokenizer beside the config; weights are not fetched.

    Raises:
      ModelError: as ``load``, but for the weights.
    """
    place = _place_of(source, (*_WANTED[:2], *_TOKENIZER))
    return *_read_spec(place)[:2], place


def _read_spec(folder: Path) -> tuple[ModelSpec, str | None, dict[str, Any], Header | None]:
    """Sizes, the dtype that is named, the config they are from, and the header of a GGUF file."""
    if folder.is_file():
        header = read_header(folder)
        config = gguf_config.read_config(header)
        return read_config(config, {}, str(folder)), config["dtype"], config, header
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(
            f"{folder} holds no config.json, so it is no model in HF format. Give the folder that "
            "`save_pretrained` or kvjax's save() wrote."
        )
    config = read_json(file)
    generation = folder / "generation_config.json"
    spec = read_config(config, read_json(generation) if generation.is_file() else {}, str(file))
    return spec, stated_dtype(config, str(file)), config, None


def save(
    folder: str | Path,
    spec: ModelSpec,
    params: Params,
    *,
    tokenizer: str | Path | None = None,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5 * 10**9,
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes a folder that kvjax, transformers 4 and transformers 5 open alike.

    The folder appears complete or not at all: everything is written beside it and renamed.
    transformers 5's AutoTokenizer splits the text of every qwen2 folder by Qwen2's own rules (NFC, then
    its regular expression); a tokenizer of another make opens there as PreTrainedTokenizerFast.

    Args:
      folder: must not exist, or be empty.
      spec: the model's sizes.
      params: its weights; must fit the spec.
      tokenizer: a tokenizer.json or a folder with one; its companions (config, chat template) are
        copied too, and a tokenizer_config.json is written if there is none. Or a GGUF file.
      dtype: of the stored weights: "float32", "bfloat16" or "float16".
      max_shard_bytes: a file of weights grows no larger, unless one tensor does.
      metadata: notes for the header of every safetensors file.

    Raises:
      ModelError: params that do not fit, a spec the format cannot express, a folder in use, a
        tokenizer that is missing or larger than the vocabulary.
    """
    folder = Path(folder)
    call = f"save({str(folder)!r}, ...)"
    _check_dtype(f"save({str(folder)!r}, dtype={dtype!r})", dtype, DTYPES)
    if max_shard_bytes < 1:
        raise ModelError(f"save(max_shard_bytes={max_shard_bytes}) leaves no room; give bytes from 1.")
    refuse(params, call)
    notes = metadata or {}
    if not all(isinstance(text, str) for pair in notes.items() for text in pair):
        raise ModelError(f"save(metadata={notes!r}) must map strings to strings; write other values as JSON.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{call} will not replace what is there. Remove it first or choose another folder.")
    config = write_config(spec, dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    try:
        part.mkdir()
        _write_json(part / "config.json", config)
        ids = {"bos_token_id": spec.bos, "eos_token_id": eos_value(spec.eos)}
        _write_json(part / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
        if tokenizer is not None:
            _copy_tokenizer(part, spec, Path(tokenizer))
        write_weights(part, spec, params, dtype, max_shard_bytes, notes)
        os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _place_of(source: str | Path, wanted: Sequence[str] = (*_WANTED, *_TOKENIZER)) -> Path:
    """The folder or the file."""
    if isinstance(source, str) and source.startswith(packages.PREFIX):
        return packages.model_file(source)
    path = Path(source)
    if path.exists():
        return path
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source):
        raise ModelError(
            f"load({str(source)!r}) is not a folder, a file, or a hub id of the form "
            "'owner/name'. Check the path."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=[*wanted]))
    except Exception as error:
        # The hub client raises its own, its HTTP library's and the system's errors, and they change.
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"load({source!r}) finds no such folder and could not fetch it from the hub "
            f"({type(error).__name__}: {reason}). Check the name, the network and, for gated models, "
            "HF_TOKEN; or give a local folder."
        ) from error


def _check_dtype(call: str, dtype: str | None, allowed: tuple[str | None, ...]) -> None:
    if dtype not in allowed:
        raise ModelError(f"{call} names no dtype of weights. Give one of {', '.join(DTYPES)}.")


def _copy_tokenizer(part: Path, spec: ModelSpec, source: Path) -> None:
    from tokenizers import Tokenizer

    if is_gguf(source):
        text = gguf_text.read_text(read_header(source))
        _check_ids(text.tokenizer, spec, source)
        text.tokenizer.save(str(part / "tokenizer.json"))
        template = {} if text.template is None else {"chat_template": text.template}
        _write_tokenizer_config(
            part, spec, {**text.special_tokens, "add_bos_token": text.add_bos, **template}
        )
        return
    home = source if source.is_dir() else source.parent
    file = source / "tokenizer.json" if source.is_dir() else source
    if not file.is_file():
        raise ModelError(
            f"save(tokenizer={str(source)!r}) finds no {file.name}; give a tokenizer.json or its folder."
        )
    try:
        tok = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the tokenizers package raises Exception itself
        raise ModelError(
            f"save(tokenizer={str(source)!r}) reads {file.name}, which is damaged or no tokenizer ({error}). "
            "Give a tokenizer.json as the tokenizers package saves it."
        ) from error
    _check_ids(tok, spec, source)
    for name in _TOKENIZER[1:]:
        if (home / name).is_file():
            shutil.copyfile(home / name, part / name)
    shutil.copyfile(file, part / "tokenizer.json")
    if not (part / "tokenizer_config.json").exists():
        named: dict[str, Any] = {
            "bos_token": None if spec.bos is None else tok.id_to_token(spec.bos),
            "eos_token": tok.id_to_token(spec.eos[0]) if spec.eos else None,
        }
        _write_tokenizer_config(part, spec, named)


def _check_ids(tok: Tokenizer, spec: ModelSpec, source: Path) -> None:
    highest = max(tok.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= spec.vocab_size:
        raise ModelError(
            f"save(tokenizer={str(source)!r}) has ids up to {highest}, the model embeds {spec.vocab_size}. "
            "Give the tokenizer the model was trained with."
        )


def _write_tokenizer_config(part: Path, spec: ModelSpec, named: dict[str, Any]) -> None:
    # This class takes tokenizer.json as it is; the family's own would rebuild it by other rules.
    fixed = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": spec.max_positions}
    _write_json(part / "tokenizer_config.json", {**fixed, "clean_up_tokenization_spaces": False, **named})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
