"""A run's config with its data read: model sizes, tokenizer, texts, key words."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models import module
from kvjax.models.spec import ModelSpec, Rope
from kvjax.types import Params
from train import rows, start, text

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A config with its data read.

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
    """Reads the texts, the tokenizer (trained at the first call) and the token arrays (cached)."""
    corpus = text.corpus(text.data_folder(), seed=config["seed"])
    size = config["model"]["vocab_size"]
    tokenizer = text.load_tokenizer(Path(config["tokenizer"]), corpus.train, size)
    train, held, books = sources(corpus, tokenizer, Path(config["folder"]).parent / "cache")
    return Setup(
        config=config,
        spec=model_spec(config["model"]),
        tokenizer=tokenizer,
        train=train,
        held=held,
        books=books,
    )


def sources(
    corpus: text.Corpus, tokenizer: Tokenizer, cache: Path | None
) -> tuple[rows.Source, rows.Source, rows.Source]:
    """Training text and key words; the held-out haystack and key words; held-out books."""
    # Raw text and the same text without line breaks: haystacks come in both forms.
    both = corpus.train + tuple(text.unwrap(book) for book in corpus.train)
    tokens = text.token_array(tokenizer, both, cache)
    essays = text.token_array(tokenizer, (text.unwrap(corpus.essays),), cache)
    books = text.token_array(tokenizer, corpus.held, cache)
    return (
        rows.make_source(tokenizer, tokens, corpus.words, held_out=False),
        rows.make_source(tokenizer, essays, corpus.words, held_out=True),
        rows.make_source(tokenizer, books, corpus.words, held_out=True),
    )


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


def initial(spec: ModelSpec, seed: int, spread: float = 0.0) -> Params:
    """Fresh weights with the constructed start."""
    drawn = module.leaves(module.Decoder(spec, rngs=nnx.Rngs(params=seed)))
    return start.construct(spec, drawn, seed, spread=spread)


def round_to(params: Params, dtype: str) -> Params:
    """Params as they are stored in ``dtype``, back in float32: what the exported file computes."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype).astype(jnp.float32), params)
