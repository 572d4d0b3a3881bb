"""Reads a pretraining config and its data: model sizes, tokenizer, texts, key words, initial weights."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from flax import nnx

from kvjax.models import module
from kvjax.models.spec import ModelSpec, Rope
from kvjax.types import Params
from train import rows, text
from train.embedded import start, start_many
from train.embedded.tasks import facts, logs

if TYPE_CHECKING:
    from tokenizers import Tokenizer


FORMS: dict[str, Callable[..., Params]] = {"one": start.construct, "many": start_many.construct}
"""Constructed starts by their name in a config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A config and its data.

    Attributes:
      config: the YAML tree.
      spec: the model.
      tokenizer: BPE, trained on the training text.
      train: training text and key words.
      held: the held-out haystack and key words.
      books: held-out books for bits per byte.
    """

    config: dict[str, Any]
    spec: ModelSpec
    tokenizer: Tokenizer
    train: rows.Source
    held: rows.Source
    books: rows.Source


def setup(config: dict[str, Any]) -> Setup:
    """Reads the texts, the tokenizer (trained in the first call) and the token arrays (cached)."""
    corpus = text.corpus(text.data_folder(), seed=config["seed"])
    size = config["model"]["vocab_size"]
    tokenizer = text.load_tokenizer(
        Path(config["tokenizer"]), _tokenizer_texts(config, corpus), size, _digits(config)
    )
    train, held, books = rows.sources(corpus, tokenizer, Path(config["folder"]).parent / "cache")
    return Setup(
        config=config,
        spec=model_spec(config["model"]),
        tokenizer=tokenizer,
        train=train,
        held=held,
        books=books,
    )


def read(path: Path, sets: Sequence[str] = (), folder: Path | None = None) -> dict[str, Any]:
    """A config file with changes.

    Args:
      path: YAML.
      sets: changes, ``section.name=value``; the value is YAML, a number in the path is an index of a list.
      folder: of the run and its tokenizer, instead of the config's.

    Raises:
      ValueError: a change of a key that the config does not have.
    """
    config = yaml.safe_load(path.read_text())
    for change in sets:
        name, _, value = change.partition("=")
        *parents, key = [int(part) if part.isdigit() else part for part in name.split(".")]
        try:
            section = functools.reduce(lambda tree, part: tree[part], parents, config)
            section[key] = yaml.safe_load(value)
        except (KeyError, IndexError, TypeError) as reason:
            raise ValueError(
                f"--set {change!r} names no place in {path}: {reason}. Write section.name=value."
            ) from None
    if folder is not None:
        config |= {"folder": str(folder), "tokenizer": str(folder / "tokenizer.json")}
    return config


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``read``."""
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="changes of the config")
    parser.add_argument("--folder", type=Path, help="of the run, instead of the config's")


def _digits(config: dict[str, Any]) -> int:
    return int(config.get("text", {}).get("digits", 1))


def _tokenizer_texts(config: dict[str, Any], corpus: text.Corpus) -> Iterator[str]:
    """The tokenizer's training text: the books and, by the config, facts, logs and dialogues."""
    yield from corpus.train
    if tasks := config.get("text", {}).get("tasks", 0):
        words = tuple(word for word in corpus.words if not text.held_out_word(word))
        rng = np.random.default_rng(config["seed"])
        yield from facts.samples(rng, words, tasks)
        yield from logs.samples(rng, words, tasks // 20)
    # Every number of that many digits must be met often enough to become a token.
    count = _digits(config)
    numbers = [f"{n:0{size}}" for size in range(2, count + 1) for n in range(10**size)]
    yield from [" ".join(numbers)] * config.get("text", {}).get("numbers", 0)


def model_spec(sizes: dict[str, Any]) -> ModelSpec:
    """The config's model as a Qwen2 spec with tied embeddings."""
    names = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "model_dim", "mlp_dim")
    return ModelSpec(
        family="qwen2",
        max_positions=sizes["max_positions"],
        rope=Rope(theta=float(sizes["theta"])),
        qkv_bias=True,
        tied=True,
        bos=text.BOS,
        eos=(text.EOS,),
        **{name: sizes[name] for name in names},
    )


def initial(
    spec: ModelSpec,
    seed: int,
    spread: float = 0.0,
    form: str = "one",
    ahead: int = 0,
    counts: np.ndarray | None = None,
) -> Params:
    """Fresh weights with the constructed start.

    Args:
      spec: the model.
      seed: of every draw.
      spread: noise on the inputs of constructed query heads.
      form: "one" copying KV head (``start``) or "many" (``start_many``).
      ahead: matrices of the look-ahead loss (``pretrain.make_quick_loss``), the leaf ``ahead`` [A, D, D] that
        inference and export leave out; 0 is none.
      counts: [V], of tokens in the text, for the second form.
    """
    random = module.leaves(module.Decoder(spec, rngs=nnx.Rngs(params=seed)))
    frequencies = {} if counts is None or form == "one" else {"counts": counts}
    built = FORMS[form](spec, random, seed, spread=spread, **frequencies)
    return built | {"ahead": jnp.tile(jnp.eye(spec.model_dim), (ahead, 1, 1))} if ahead else built


def initial_of(config: dict[str, Any], text: np.ndarray | None = None) -> Params:
    """The config's initial weights; token frequencies are those of the ids ``text``."""
    model = config["model"]
    form, ahead = model.get("start", "one"), config.get("loss", {}).get("ahead", 0)
    counts = None if text is None else np.bincount(text, minlength=model["vocab_size"])
    return initial(model_spec(model), config["seed"], model.get("spread", 0.0), form, ahead, counts)


def round_to(params: Params, dtype: str) -> Params:
    """Params rounded to ``dtype`` and back to float32, as an exported file stores them."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype).astype(jnp.float32), params)
