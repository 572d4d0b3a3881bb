"""How a reader follows one decode step: from ``stream`` to the kernels in one direction, through few files.

``python tests/test_step_path.py`` prints the files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import kvjax
from kvjax import decode
from kvjax.decode import _loop
from kvjax.sampling import sampling

ROOT = Path(kvjax.__file__).parent
KERNELS = Path(__file__).parents[1] / "pallas_kernels"
MOST = 12
OPERATIONS = {"blockwise", "ragged_decode", "merge"}


def paths(model, policy: str, prompt: list[int]) -> tuple[dict[str, list[str]], list[str]]:
    """Of a step that is traced: kvjax's files on the stack at each operation's call, and all files entered.

    Properties do not count as files entered: nobody follows them.
    """
    chosen = kvjax.policy(policy)
    state, _ = decode.prefill(model, chosen, [prompt], context=64)
    state = decode.reserve(chosen, state, 1, 1)
    one = np.zeros(1, np.int32)
    rows = decode.DecodeRows(token=one, done=one > 0, left=one + 1, stops=one - 1, how=sampling(1))
    stacks: dict[str, list[str]] = {}
    entered: list[str] = []

    def called(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event != "call" or not (file.is_relative_to(ROOT) or file.is_relative_to(KERNELS)):
            return
        name = frame.f_code.co_name
        if file.is_relative_to(ROOT):
            if not isinstance(getattr(type(frame.f_locals.get("self")), name, None), property):
                entered.append(str(file.relative_to(ROOT)))
        elif file.name == "api.py" and name == file.parent.name:
            stack, at = [], frame.f_back
            while at is not None:
                caller = Path(at.f_code.co_filename)
                if caller.is_relative_to(ROOT) and (not stack or stack[-1] != str(caller.relative_to(ROOT))):
                    stack.append(str(caller.relative_to(ROOT)))
                at = at.f_back
            stacks.setdefault(name, stack[::-1])

    arguments = (model.network, chosen, 1, model.params, {}, state, rows)
    sys.setprofile(called)
    try:
        _loop.decode_steps.trace(*arguments)
    finally:
        sys.setprofile(None)
    return stacks, list(dict.fromkeys(entered))


def test_a_step_runs_through_few_files_and_never_returns_to_one():
    import tiny

    stacks, entered = paths(tiny.model(), "snapkv + ada(0.5)", tiny.prompt(40))
    assert set(stacks) >= OPERATIONS
    for operation, stack in stacks.items():
        assert len(set(stack)) == len(stack), f"{operation}: {stack} returns to a file"
    assert len({file for stack in stacks.values() for file in stack}) <= MOST
    assert len(entered) <= 26, entered


if __name__ == "__main__":
    ways, files = paths(kvjax.load(), "snapkv + ada(0.25)", list(range(5, 45)))
    for operation, way in ways.items():
        print(f"{operation:14}", " -> ".join(["decode/_generate.py", *way]))
    print(len(files), "files entered:", *files)
