"""What every stack must be able to do: ``python tests/matrix_parts.py PART FOLDER``, called by ``matrix.py``.

The parts hand things on in the folder: ``save`` writes what ``train`` has trained, ``load`` reads that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PROMPT = (
    "The secret number for apple-river is 48213. The old man walked slowly to the harbour, where the boats "
    "were lying in the morning light. What is the secret number for apple-river? "
    "The secret number for apple-river is"
)

CONFIG: dict[str, Any] = {
    "name": "tiny",
    "seed": 0,
    "model": {
        "vocab_size": 384,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "model_dim": 128,
        "mlp_dim": 64,
        "max_positions": 256,
        "theta": 1e6,
        "dtype": "float32",
    },
    "optimizer": {
        "cycles": [{"until": 2, "peak": 1e-3, "final": 1e-5, "warmup": 1, "decay": 1}],
        "b2": 0.95,
        "weight_decay": 0.05,
        "clip": 1.0,
    },
    "mix": {"tokens": 256, "levels": [{"lengths": [128], "shares": [1.0], "scored": 64}]},
    "plan": {"steps": 2, "log_every": 1, "check_every": 2, "save_every": 1},
    "check": {"count": 5, "gates": [], "target": 1.1, "lengths": [128, 256]},
}
"""A training of two steps; what stands here is explained in configs/pretrain/embedded.yaml."""


def import_(folder: Path) -> None:
    """``import kvjax``, which may not need more than jax and numpy."""
    del folder
    import kvjax

    assert kvjax.__version__
    assert "flax" not in sys.modules, "import kvjax imported flax"


def generate(folder: Path) -> None:
    """The embedded model answers, with all of the prompt; and writes from what a policy leaves of it."""
    del folder
    import kvjax

    model = kvjax.load()
    ids = model.text.encode(PROMPT)
    whole, part = (
        kvjax.generate(model, kvjax.policy(spec), [ids], max_new_tokens=6, stops=())
        for spec in ("full", "snapkv(8) + ada(24) + int8(8)")
    )
    answer = model.text.decode(whole.tokens[0])
    assert answer.startswith(" 48213"), f"the full cache says {answer!r}"
    assert len(part.tokens[0]) == 6, part.tokens
    live = [kvjax.nbytes(run.state).total["live"] for run in (whole, part)]
    assert 2 * live[1] < live[0], f"live bytes {live}"


def train(folder: Path) -> None:
    """Two steps of the loop that trained the embedded model."""
    from train.embedded import pretrain

    state = pretrain.run(_setup(folder))
    lines = (folder / "run" / "log.jsonl").read_text().splitlines()
    assert sum('"loss"' in line for line in lines) == 2, lines
    assert _sum(state.params) > 0


def save(folder: Path) -> None:
    """The checkpoint of the training into an HF folder."""
    from kvjax.models import hf
    from train.embedded import pretrain

    have = _setup(folder)
    step, params = pretrain.latest(have)
    assert step == 2, f"the newest checkpoint is of step {step}"
    hf.save(folder / "model", have.spec, params, tokenizer=folder / "tokenizer.json", dtype="float32")


def load(folder: Path) -> None:
    """The HF folder holds the checkpoint's weights, and they run."""
    import kvjax
    from train.embedded import pretrain

    step, params = pretrain.latest(_setup(folder))
    model = kvjax.load(folder / "model")
    assert _sum(model.params) == _sum(params), f"the folder differs from the checkpoint of step {step}"
    tokens = kvjax.generate(model, kvjax.policy("full"), [[1, 2, 3]], max_new_tokens=2).tokens
    assert len(tokens[0]) >= 1


def _setup(folder: Path) -> Any:
    from train.embedded.setup import setup

    return setup(CONFIG | {"folder": str(folder / "run"), "tokenizer": str(folder / "tokenizer.json")})


def _sum(params: Any) -> float:
    """A digest of weights that does not depend on the order of a tree's leaves."""
    import jax
    import numpy as np

    return sum(sorted(float(np.abs(np.asarray(x, np.float64)).sum()) for x in jax.tree.leaves(params)))


if __name__ == "__main__":
    parts = {"import": import_, "generate": generate, "train": train, "save": save, "load": load}
    parts[sys.argv[1]](Path(sys.argv[2]))
