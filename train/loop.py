"""The training loop of all trainers: a run that was stopped continues with the losses it would have had.

Batch i of a curriculum level depends on its seed, level and i alone, and a checkpoint holds the optimiser
state and the level. The log is JSON lines; lines past the restored step are dropped.
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
from train.config import ConfigError
from train.mesh import Layout

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Loss = Callable[[Params, dict[str, Any]], "tuple[Array, dict[str, Array]]"]
"""``loss(params, batch) -> (scalar, metrics)``. Bind frozen weights with ``jax.tree_util.Partial``, which
makes them arguments of the program instead of constants."""

GradientMetrics = Callable[[Params], "dict[str, Array]"]
"""What is logged of a gradient besides its norm."""


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """Trained leaves and the optax state."""

    params: Params
    opt: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a check.

    Attributes:
      metrics: written to the log.
      level: curriculum level from here on.
      stop: whether the run is done.
    """

    metrics: dict[str, float]
    level: int
    stop: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
    """The length of a run and how often it logs, checks and saves, in steps.

    Attributes:
      steps: the run's length.
      log_every, check_every, save_every: each also happens at the last step.
      keep: checkpoints kept.
      seconds: wall-clock limit of this process, after which it saves and returns without a check; or None.
      workers: processes that prepare batches; with 0 a thread of this process does. The batches are the same.
      check_first: also check what is untrained, as step 0.
    """

    steps: int
    log_every: int = 20
    check_every: int = 250
    save_every: int = 250
    keep: int = 2
    seconds: float | None = None
    workers: int = 0
    check_first: bool = False


class Checkpoints:
    """Atomic checkpoints in ``folder/checkpoints``; ``read_only`` if another process may be writing them."""

    def __init__(self, folder: Path, keep: int, *, read_only: bool = False):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep, enable_async_checkpointing=False, read_only=read_only
        )
        self._manager = ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)

    def save(self, step: int, state: State, level: int) -> None:
        if step in self._manager.all_steps():
            return
        tree = {"params": state.params, "opt": jax.tree.leaves(state.opt)}
        book = {"step": step, "level": level}
        items = ocp.args.Composite(state=ocp.args.StandardSave(tree), book=ocp.args.JsonSave(book))
        self._manager.save(step, args=items)
        self._manager.wait_until_finished()

    def latest(self, like: State) -> tuple[int, State, int] | None:
        """(step, state, level) of the newest checkpoint, with the structure of ``like``; or None."""
        step = self._manager.latest_step()
        if step is None:
            return None
        tree = {"params": like.params, "opt": jax.tree.leaves(like.opt)}
        abstract = jax.tree.map(_with_sharding, tree)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), book=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        opt = jax.tree.unflatten(jax.tree.structure(like.opt), restored["state"]["opt"])
        return step, State(params=restored["state"]["params"], opt=opt), int(restored["book"]["level"])

    def close(self) -> None:
        self._manager.close()


def _with_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and sharding of a leaf: its own, or the first device, whatever the checkpoint was saved on."""
    shape: jax.ShapeDtypeStruct = ocp.utils.to_shape_dtype_struct(leaf)
    if shape.sharding is not None:
        return shape
    first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=first)


def latest(
    folder: Path, params: Params, optimizer: optax.GradientTransformation, layout: Layout
) -> tuple[int, Params]:
    """(step, trained leaves) of the newest checkpoint of a run.

    Args:
      folder: of the run.
      params: leaves of the same shapes, such as the run's initial ones.
      optimizer: of the run.
      layout: of the restored leaves.

    Raises:
      ConfigError: the folder has no checkpoint.
    """
    restored = None
    if (folder / "checkpoints").is_dir():
        checkpoints = Checkpoints(folder, keep=0, read_only=True)
        restored = checkpoints.latest(layout.settle(State(params=params, opt=optimizer.init(params))))
        checkpoints.close()
    if restored is None:
        raise ConfigError(f"{folder} has no checkpoint. Train first: the same command without --export.")
    return restored[0], restored[1].params


class Log:
    """JSON lines in ``folder/log.jsonl``, written by the first process."""

    def __init__(self, folder: Path, step: int):
        self._path = folder / "log.jsonl"
        if jax.process_index():
            return
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        self._path.write_text("".join(line + "\n" for line in kept))

    def write(self, record: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def make_step(
    optimizer: optax.GradientTransformation,
    shardings: Any = None,
    gradient_metrics: GradientMetrics = lambda _: {},
) -> Callable[..., Any]:
    """The jitted update ``(loss, state, batch) -> (state, metrics)``; the state's buffers are reused.

    Args:
      optimizer: as in ``train``.
      shardings: of the new state, equal to those of the old one. With None the compiler may choose others,
        and then the next step is compiled again.
      gradient_metrics: added to the metrics.
    """

    def step(loss: Any, state: State, batch: dict[str, Any]) -> tuple[State, dict[str, Float[Array, ""]]]:
        (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(state.params, batch)
        update, opt = optimizer.update(grad, state.opt, state.params)
        params = optax.apply_updates(state.params, update)
        return State(params=params, opt=opt), {
            "loss": value,
            "grad_norm": optax.global_norm(grad),
            **gradient_metrics(grad),
            **metrics,
        }

    return jax.jit(step, donate_argnums=1, out_shardings=(shardings, None))


def train(
    *,
    params: Params,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    batches: Callable[[int], grain.MapDataset],
    folder: Path,
    plan: Cadence,
    check: Callable[[Params, int, int], Verdict] | None = None,
    layout: Layout | None = None,
    gradient_metrics: GradientMetrics = lambda _: {},
) -> State:
    """Trains from ``folder``'s newest checkpoint, or from ``params`` where there is none.

    Args:
      params: initial leaves; a checkpoint is read into their structure.
      optimizer: its schedules count updates, so changing one between two runs changes what follows.
      loss: see ``Loss``.
      batches: level -> dataset whose element i is the batch of step i.
      folder: gets ``checkpoints/`` and ``log.jsonl``.
      plan: length of the run and cadence.
      check: ``(params, step, level) -> Verdict`` every ``plan.check_every`` steps.
      layout: shardings for a step over a mesh; ``params`` are on it already.
      gradient_metrics: see ``make_step``.

    Returns:
      The last state; also saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder, plan.keep)
    state = State(params=jax.tree.map(jax.numpy.array, params), opt=optimizer.init(params))
    if layout is not None:
        state = layout.settle(state)
    step, level = 0, 0
    if (restored := checkpoints.latest(state)) is not None:
        step, state, level = restored
    shardings = None if layout is None else jax.tree.map(lambda leaf: leaf.sharding, state)
    log, start = Log(folder, -1 if restored is None else step), time.monotonic()
    update = make_step(optimizer, shardings, gradient_metrics)
    partial = loss if isinstance(loss, jax.tree_util.Partial) else jax.tree_util.Partial(loss)
    upcoming = _prefetched(batches(level), step, plan.workers)
    first_process = jax.process_index() == 0
    bar = tqdm(total=plan.steps, initial=step, unit="step", mininterval=5, disable=not first_process)
    if check is not None and plan.check_first and restored is None:
        log.write({"step": 0, "level": level, **_clock(), **check(state.params, 0, level).metrics})
    stop = step >= plan.steps
    while not stop:
        batch = next(upcoming)
        state, metrics = update(partial, state, batch if layout is None else layout.batch(batch))
        step += 1
        bar.update()
        out_of_time = plan.seconds is not None and _by_first_process(time.monotonic() - start > plan.seconds)
        stop = step >= plan.steps or out_of_time
        if step % plan.log_every == 0 or stop:
            numbers = {name: float(value) for name, value in metrics.items()}
            log.write({"step": step, "level": level, **_clock(), **numbers})
            bar.set_postfix(loss=f"{numbers['loss']:.3f}", level=level)
        # No check where the time limit ends the process: an uninterrupted run would open its level elsewhere.
        if check is not None and (step % plan.check_every == 0 or step >= plan.steps):
            verdict = check(state.params, step, level)
            log.write({"step": step, "level": level, **_clock(), **verdict.metrics})
            if first_process:
                tqdm.write(json.dumps({"step": step, "level": level, **verdict.metrics}))
            stop = stop or verdict.stop
            if verdict.level != level:
                level = verdict.level
                upcoming = _prefetched(batches(level), step, plan.workers)
        if step % plan.save_every == 0 or stop:
            checkpoints.save(step, state, level)
    bar.close()
    checkpoints.close()
    return state


def _by_first_process(out_of_time: bool) -> bool:
    """The first process' value in all processes, so that they stop at the same step."""
    if jax.process_count() == 1:
        return out_of_time
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(out_of_time))


CLOCK = ("time", "user", "resident")
"""The fields of the log in which two equal runs differ."""


def _clock() -> dict[str, float]:
    """Wall-clock time, and this process' processor time in seconds and peak memory in MiB."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return {
        "time": round(time.time(), 2),
        "user": round(used.ru_utime, 2),
        "resident": round(used.ru_maxrss / unit),
    }


def _prefetched(dataset: grain.MapDataset, step: int, workers: int) -> Iterator[dict[str, Any]]:
    """The dataset from element ``step`` on, prepared in the background."""
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    ahead = dataset[step:].to_iter_dataset(options)
    if workers:
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # grain's workers read absl's flags, which no kvjax program parses
        ahead = ahead.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return iter(ahead)
