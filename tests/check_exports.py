"""Shows that transformers opens what kvjax saves: no tensor out of place, the goldens' logits within 2e-4.

Two environments, so two commands; ``make_golden.py`` says how the second one is made:

    python tests/check_exports.py write OUT               # kvjax loads every golden and saves it again
    gold/bin/python tests/check_exports.py open OUT       # transformers opens, runs and compares them all

Passed by all goldens under transformers 4.56.2, 5.2.0 and 5.23.0. Under transformers 4, ``--spell FILE``
also writes each model's config.json as that generation spells it (and runs the model by it):
tests/golden/transformers4.json was made so.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 2e-4
NEW_KEYS = ("rope_parameters", "dtype")
"""Keys of a config.json that transformers 4 does not know."""


def names() -> list[str]:
    """The goldens that are folders."""
    return sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


def write(out: Path) -> None:
    """Every golden through kvjax: loaded as float32 and saved."""
    from kvjax.models import hf

    for name in names():
        model = hf.load(GOLDEN / name, dtype="float32")
        hf.save(out / name, model.spec, model.params, dtype="float32")


def difference(model: Any, name: str) -> float:
    """The largest distance of a model's logits from its golden's."""
    import torch
    from make_golden import logits

    gold = np.load(GOLDEN / f"{name}.npz")
    ours = logits(model.eval(), *(torch.from_numpy(gold[key]).long() for key in ("tokens", "positions")))
    return float(np.abs(ours.numpy() - gold["logits"]).max())


def opened(folder: Path, config: Any = None) -> tuple[Any, list[str]]:
    """The model transformers makes of a folder, and its complaints."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager", output_loading_info=True
    )
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    return model, [f"{kind} {sorted(map(str, report[kind]))}" for kind in kinds if report[kind]]


def same_ids(model: Any, name: str) -> list[str]:
    """Complaints if generation would begin or end texts by other ids than the golden's."""
    wanted = json.loads((GOLDEN / name / "generation_config.json").read_text())
    keys = ("bos_token_id", "eos_token_id")
    read = {key: getattr(model.generation_config, key) for key in keys}
    return [f"{key} {read[key]}" for key in keys if read[key] != wanted.get(key)]


def older(folder: Path) -> Any:
    """The config of a folder from the keys that transformers 4 knows."""
    from transformers import AutoConfig

    config = json.loads((folder / "config.json").read_text())
    return AutoConfig.for_model(**{key: value for key, value in config.items() if key not in NEW_KEYS})


def open_all(out: Path, spell: Path | None) -> bool:
    """Opens, runs and compares every export; True if all agree."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    spelled: dict[str, Any] = {"transformers": transformers.__version__}
    good = True
    for name in names():
        model, faults = opened(out / name)
        faults += same_ids(model, name)
        distance = difference(model, name)
        if spell is not None:
            config = older(out / name)
            distance = max(distance, difference(opened(out / name, config)[0], name))
            spelled[name] = json.loads(config.to_json_string(use_diff=True))
        good = good and not faults and distance < TOLERANCE
        print(f"transformers {transformers.__version__}: {name}: {distance:.1e} {'; '.join(faults)}")
    if spell is not None and good:
        spell.write_text(json.dumps(spelled, indent=1, sort_keys=True) + "\n")
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=("write", "open"))
    parser.add_argument("out", type=Path, help="folder of the exports")
    parser.add_argument("--spell", type=Path, metavar="FILE", help="write the configs of transformers 4")
    arguments = parser.parse_args()
    if arguments.job == "write":
        write(arguments.out)
    else:
        sys.exit(not open_all(arguments.out, arguments.spell))
