"""The keys that every trainer's config has: what is trained, on which frozen model, for how long."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import jax

from kvjax import cli
from kvjax.cli import option, whole
from kvjax.models.spec import ModelSpec
from train import loop
from train.config import REQUIRED, ConfigError, count

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel


PYTHON = "python:"
"""A source that begins so is a function's name."""


def published_spec(config: str | dict[str, Any]) -> ModelSpec:
    """The model's sizes that a config names, or writes out as a config.json does."""
    from kvjax.models import published
    from kvjax.models.hf_config import read_config as read

    return published.spec(config) if isinstance(config, str) else read(config, {}, "model.config")


FileDtype = Literal["float32", "float16"]
"""Of the numbers in an exported file."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of what reads a model and writes weights."""
    parser.add_argument("--model", metavar="DIR|FILE|HUB_ID", help="instead of the config's model.source")
    parser.add_argument(
        "--export-dtype", choices=("float32", "float16"), default="float32", help="of the exported numbers"
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """The options of every trainer beside its own."""
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the newest checkpoint's weights")
    add_options(parser)


def command_line(
    parser: argparse.ArgumentParser,
    words: Sequence[str] | None,
    read: Callable[[argparse.Namespace], Any],
    run: Callable[[Any], object],
    export: Callable[[Any, Path, Any], None],
) -> int:
    """A trainer's command line: it trains, or with ``--export FILE`` writes what was trained.

    Args:
      parser: with the trainer's own options.
      words: of the command line; None for the process' own.
      read: settings by the options; ``run`` and ``export`` take them.
      run, export: of the trainer.

    Returns:
      The exit code: 0, 2 for bad input.
    """

    def command(words: Sequence[str]) -> None:
        add_training_options(parser)
        args = parser.parse_args(words)
        settings = read(args)
        if args.export is not None:
            export(settings, args.export, args.export_dtype)
        else:
            run(settings)

    return cli.run(command, words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The keys that every trainer's config has."""

    name: str = option(REQUIRED, "of the config")
    seed: int = option(REQUIRED, "of what is trained and of batches", type=whole(0))
    folder: Path = option(REQUIRED, "of checkpoints and log")
    source: str = option(
        REQUIRED,
        'the backbone: "embedded", a folder or a hub id; or "python:PACKAGE.MODULE:FUNCTION", which makes a '
        "Flax module (docs/flax.md)",
        flag="model.source",
    )
    tokenizer: Path | None = option(
        None, "of a Flax module: a folder with tokenizer.json", flag="model.tokenizer"
    )
    dtype: Literal["float32", "bfloat16"] = option("float32", "of the backbone's weights", flag="model.dtype")
    spec: ModelSpec | None = option(
        None, "the backbone's sizes; None to ask the source", flag="model.config", type=published_spec
    )
    plan: loop.Cadence = option(REQUIRED, "steps, and when things happen")

    def __post_init__(self) -> None:
        """Raises ConfigError: a run of no steps."""
        count(self.plan.steps, "plan.steps")

    def of(self, source: str | None) -> Self:
        """The settings with another model than the config names; None leaves it."""
        if source in (None, self.source):
            return self
        return dataclasses.replace(self, source=source, spec=None)

    def model(self) -> LanguageModel:
        """The frozen backbone in the config's dtype, in the host's memory.

        Raises:
          ModelError: no such model.
          ConfigError: no such function; the config writes out another model than its source holds.
        """
        from kvjax import loading

        with jax.default_device(jax.local_devices(backend="cpu")[0]):  # one chip may be too small for it
            if self.source.startswith(PYTHON):
                return loading.load(self._module(), self.dtype, tokenizer=self.tokenizer)  # type: ignore[no-any-return]
            model = loading.load(None if self.source == loading.EMBEDDED else self.source, dtype=self.dtype)
        if self.spec is not None:
            written = dataclasses.replace(self.spec, bos=model.spec.bos, eos=model.spec.eos)
            if written != model.spec:
                raise ConfigError(
                    f"model.config in the config describes another model than {self.source} holds. Correct "
                    "or remove it."
                )
        return model

    def _module(self) -> Any:
        """What the source's function makes."""
        module, _, function = self.source.removeprefix(PYTHON).partition(":")
        try:
            return getattr(importlib.import_module(module), function)()
        except (ImportError, AttributeError) as reason:
            raise ConfigError(
                f"model.source: {self.source!r} in the config cannot be called: {reason}. Write "
                "python:PACKAGE.MODULE:FUNCTION, with the package on PYTHONPATH."
            ) from reason
