"""One training loop: resumable to the bit, for models, gates and rankers alike.

Batch i of level l is a pure function (``train.data``), the optimiser state and the level are in the
checkpoint, so a run killed at any step and started again continues with the losses it would have
had. The log is JSON lines, one object a line; lines past the restored step are dropped.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grain.python as grain
import jax
import optax
import orbax.checkpoint as ocp
from tqdm import tqdm

from kvjax.types import Params, pytree
from train.mesh import Layout

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Loss = Callable[[Params, dict[str, Any]], "tuple[Array, dict[str, Array]]"]
"""``loss(params, batch) -> (scalar, metrics)``. Bind frozen weights with ``jax.tree_util.Partial``: its
arguments are traced, not baked into the program."""


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What a checkpoint holds besides the step and the level.

    Attributes:
      params: trained leaves.
      opt: the optax state.
    """

    params: Params
    opt: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a check decides.

    Attributes:
      metrics: written to the log.
      level: curriculum level from here on.
      stop: whether the run is done.
    """

    metrics: dict[str, float]
    level: int
    stop: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """When things happen, in steps unless said otherwise.

    Attributes:
      steps: the run's length.
      log_every, check_every, save_every: cadence; each also falls on the last step.
      keep: checkpoints kept.
      seconds: wall clock of this process after which it saves and returns, unchecked; None is no limit.
      workers: processes that make batches ahead; with 0 a thread of this one does. The batches are the same.
    """

    steps: int
    log_every: int = 20
    check_every: int = 250
    save_every: int = 250
    keep: int = 2
    seconds: float | None = None
    workers: int = 0


class Checkpoints:
    """Atomic checkpoints in ``folder/checkpoints``: a half-written one is never seen by ``latest``.

    ``read_only`` is for looking into the folder of a run that is still going.
    """

    def __init__(self, folder: Path, keep: int, *, read_only: bool = False):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep, enable_async_checkpointing=False, read_only=read_only
        )
        self._manager = ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)

    def save(self, step: int, state: State, level: int) -> None:
        """Writes the state after ``step`` updates."""
        if step in self._manager.all_steps():
            return
        tree = {"params": state.params, "opt": jax.tree.leaves(state.opt)}
        book = {"step": step, "level": level}
        items = ocp.args.Composite(state=ocp.args.StandardSave(tree), book=ocp.args.JsonSave(book))
        self._manager.save(step, args=items)
        self._manager.wait_until_finished()

    def latest(self, like: State) -> tuple[int, State, int] | None:
        """(step, state, level) of the newest checkpoint, or None; ``like`` gives shapes and structure."""
        step = self._manager.latest_step()
        if step is None:
            return None
        tree = {"params": like.params, "opt": jax.tree.leaves(like.opt)}
        abstract = jax.tree.map(_placed, tree)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), book=ocp.args.JsonRestore())
        found = self._manager.restore(step, args=items)
        opt = jax.tree.unflatten(jax.tree.structure(like.opt), found["state"]["opt"])
        return step, State(params=found["state"]["params"], opt=opt), int(found["book"]["level"])

    def close(self) -> None:
        """Ends the manager's threads."""
        self._manager.close()


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and place of a leaf; without one the first device, wherever the checkpoint's arrays lay."""
    shape: jax.ShapeDtypeStruct = ocp.utils.to_shape_dtype_struct(leaf)
    if shape.sharding is not None:
        return shape
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=here)


def latest(
    folder: Path, params: Params, optimizer: optax.GradientTransformation, layout: Layout
) -> tuple[int, Params] | None:
    """(step, trained leaves) of the newest checkpoint of a run, or None; ``params`` as it began with."""
    if not (folder / "checkpoints").is_dir():
        return None
    saved = Checkpoints(folder, keep=0, read_only=True)
    found = saved.latest(layout.settle(State(params=params, opt=optimizer.init(params))))
    saved.close()
    return None if found is None else (found[0], found[1].params)


class Log:
    """JSON lines in ``folder/log.jsonl``; of several processes the first writes."""

    def __init__(self, folder: Path, step: int):
        self._path = folder / "log.jsonl"
        if jax.process_index():
            return
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        self._path.write_text("".join(line + "\n" for line in kept))

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line."""
        if jax.process_index() == 0:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")


Watch = Callable[[Params], "dict[str, Array]"]
"""What of the gradient is logged besides its norm."""


def make_step(
    optimizer: optax.GradientTransformation, where: Any = None, watch: Watch = lambda _: {}
) -> Callable[..., Any]:
    """The jitted update ``(loss, state, batch) -> (state, metrics)``; the state's buffers are reused.

    Args:
      optimizer: as in ``train``.
      where: shardings of the new state, those of the old one; None leaves them to the compiler, which may
        choose others and then compiles the next step again.
      watch: adds to the metrics.
    """

    def step(loss: Any, state: State, batch: dict[str, Any]) -> tuple[State, dict[str, Float[Array, ""]]]:
        (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(state.params, batch)
        update, opt = optimizer.update(grad, state.opt, state.params)
        params = optax.apply_updates(state.params, update)
        return State(params=params, opt=opt), {
            "loss": value,
            "grad_norm": optax.global_norm(grad),
            **watch(grad),
            **metrics,
        }

    return jax.jit(step, donate_argnums=1, out_shardings=(where, None))


def train(
    *,
    params: Params,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    batches: Callable[[int], grain.MapDataset],
    folder: Path,
    plan: Plan,
    check: Callable[[Params, int, int], Verdict] | None = None,
    layout: Layout | None = None,
    watch: Watch = lambda _: {},
) -> State:
    """Trains from ``folder``'s newest checkpoint, or from ``params`` where there is none.

    Args:
      params: initial leaves; also the structure a checkpoint is read into.
      optimizer: schedules count its own updates, so changing one between runs changes what follows.
      loss: see ``Loss``.
      batches: level -> dataset whose element i is the batch of step i.
      folder: gets ``checkpoints/`` and ``log.jsonl``.
      plan: cadence.
      check: ``(params, step, level) -> Verdict`` every ``plan.check_every`` steps.
      layout: where arrays live, for a step over a mesh; ``params`` lie on it already.
      watch: see ``make_step``.

    Returns:
      The last state; also saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved = Checkpoints(folder, plan.keep)
    state = State(params=jax.tree.map(jax.numpy.array, params), opt=optimizer.init(params))
    if layout is not None:
        state = layout.settle(state)
    step, level = 0, 0
    if (found := saved.latest(state)) is not None:
        step, state, level = found
    where = None if layout is None else jax.tree.map(lambda leaf: leaf.sharding, state)
    log, began, update = Log(folder, step), time.monotonic(), make_step(optimizer, where, watch)
    partial = loss if isinstance(loss, jax.tree_util.Partial) else jax.tree_util.Partial(loss)
    stream = _stream(batches(level), step, plan.workers)
    first = jax.process_index() == 0
    bar = tqdm(total=plan.steps, initial=step, unit="step", mininterval=5, disable=not first)
    stop = step >= plan.steps
    while not stop:
        batch = next(stream)
        state, metrics = update(partial, state, batch if layout is None else layout.batch(batch))
        step += 1
        bar.update()
        late = plan.seconds is not None and _agreed(time.monotonic() - began > plan.seconds)
        stop = step >= plan.steps or late
        if step % plan.log_every == 0 or stop:
            numbers = {name: float(value) for name, value in metrics.items()}
            log.write({"step": step, "level": level, **_clock(), **numbers})
            bar.set_postfix(loss=f"{numbers['loss']:.3f}", level=level)
        # Not where the clock ends a leg: a level it opened would open elsewhere than in a run of one piece.
        if check is not None and (step % plan.check_every == 0 or step >= plan.steps):
            verdict = check(state.params, step, level)
            log.write({"step": step, "level": level, **_clock(), **verdict.metrics})
            if first:
                tqdm.write(json.dumps({"step": step, "level": level, **verdict.metrics}))
            stop = stop or verdict.stop
            if verdict.level != level:
                level = verdict.level
                stream = _stream(batches(level), step, plan.workers)
        if step % plan.save_every == 0 or stop:
            saved.save(step, state, level)
    bar.close()
    saved.close()
    return state


def _agreed(late: bool) -> bool:
    """What the first process' clock says, in all: they stop at one step."""
    if jax.process_count() == 1:
        return late
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(late))


CLOCK = ("time", "user", "resident")
"""What two runs of the same numbers log apart."""


def _clock() -> dict[str, float]:
    """Wall clock, and of this process so far seconds of processor time and the most memory it held, MiB."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return {
        "time": round(time.time(), 2),
        "user": round(used.ru_utime, 2),
        "resident": round(used.ru_maxrss / unit),
    }


def _stream(dataset: grain.MapDataset, step: int, workers: int) -> Iterator[dict[str, Any]]:
    """The dataset from element ``step`` on, made a few ahead."""
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    ahead = dataset[step:].to_iter_dataset(options)
    if workers:
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # grain's workers read absl's flags, which no kvjax program parses
        ahead = ahead.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return iter(ahead)
