"""What runs here, in one block to paste into a report: the first command on a new device.

  python -m kvjax.doctor           versions, devices, which kernel bodies are on record: seconds
  python -m kvjax.doctor --check   a minute more: a question to the model inside, per dtype and policy
  python -m kvjax.doctor --tune    three more, on a GPU or TPU: kvjax.tune, which switches bodies on

The block names no folder, host or user. The exit code is 1 where a check finds a wrong answer.
"""

from __future__ import annotations

import dataclasses
import platform
import re
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec

from kvjax import cli, tune
from kvjax.cli import option

OTHERS = ("jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "transformers")
"""Packages besides those that kvjax requires."""

EXTRAS = {
    "plot": "matplotlib",
    "serve": "fastapi",
    "eval": "lm_eval",
    "suites": "pyarrow",
    "gguf": "gguf",
    "docs": "mkdocs",
}
"""Of each extra a module that comes with it."""

POLICIES = ("full", "int8(8)", "snapkv(8) + uniform(0.5)", "window(64) + sinks(4)")
"""Under which the question is asked; the last one keeps the number, which stands near the end."""

DTYPES = ("float32", "bfloat16", "float16")

QUESTION = (
    "The old man walked slowly to the harbour, where the boats were lying in the morning light. The secret "
    "number for apple-river is 48213. What is the secret number for apple-river? The secret number for "
    "apple-river is"
)
ANSWER = "48213"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    check: bool = option(False, "ask the model in the package, per dtype and policy: about a minute")
    tune: bool = option(False, "check the Pallas bodies and choose their blocks: about three minutes")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> int:
    about = (__doc__ or "").splitlines()[0]
    options = cli.parse(Options, argv, prog="python -m kvjax.doctor", description=about)
    print("```text", flush=True)
    right = True
    try:
        for line in (*software(), *devices()):
            print(line, flush=True)
        if options.tune:
            for line in _tuned():
                print(line, flush=True)
        for line in kernels():
            print(line, flush=True)
        if options.check:
            for line, good in answers():
                print(line, flush=True)
                right = right and good
    finally:
        print("```", flush=True)
    return 0 if right else 1


# --- what is here --------------------------------------------------------------------------------


def software() -> Iterator[str]:
    """Versions, requirements that are not met, and extras that are not installed."""
    import kvjax

    system = f"{platform.system()} {platform.machine()}"
    yield f"kvjax {kvjax.__version__}, Python {platform.python_version()}, {system}"
    required = [need for need in metadata.requires("kvjax") or [] if "extra ==" not in need]
    names = [re.match(r"[\w.-]+", need)[0] for need in required]  # type: ignore[index]
    installed = {name: version for name in (*names, *OTHERS) if (version := _version(name))}
    yield ", ".join(f"{name} {version}" for name, version in installed.items())
    for need, name in zip(required, names):
        floor = re.search(r">=\s*([\d.]+)", need)
        if name not in installed:
            yield f"MISSING {need}: pip install '{need}'"
        elif floor and _numbers(installed[name]) < _numbers(floor[1]):
            yield f"TOO OLD {name} {installed[name]}: pip install '{need}'"
    absent = [extra for extra, module in EXTRAS.items() if find_spec(module) is None]
    if absent:
        yield f"extras not installed: {', '.join(absent)} (pip install 'kvjax[EXTRA]')"


def need(*extras: str) -> None:
    """Refuses to go on without what comes with some extras: for the first cells of a notebook.

    Raises:
      InputError: a module of one of them is not installed.
    """
    for extra in extras:
        if find_spec(EXTRAS[extra]) is None:
            raise cli.InputError(
                f"This needs {EXTRAS[extra]}, which the runtime does not have. Run: pip install "
                f"'kvjax[{extra}]' (of a checkout pip install -e '.[{extra}]')."
            )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])]


def devices() -> Iterator[str]:
    """What JAX computes on.

    Raises:
      InputError: JAX finds no device that it can use.
    """
    import jax

    try:
        here = jax.devices()
    except RuntimeError as error:  # a GPU or TPU that is taken, or a plugin that does not fit
        raise cli.InputError(
            f"JAX cannot use this machine's devices ({str(error).splitlines()[0]}). End what else uses "
            "them, or install JAX for them as its own page says; JAX_PLATFORMS=cpu takes the CPU."
        ) from error
    kinds: dict[str, list[jax.Device]] = {}
    for device in here:
        kinds.setdefault(device.device_kind, []).append(device)
    for kind, several in kinds.items():
        stats = several[0].memory_stats() or {}
        memory = f", {stats['bytes_limit'] / 2**30:.2f} GiB each" if "bytes_limit" in stats else ""
        yield f"devices: {len(several)} x {kind} ({several[0].platform}){memory}"
    if jax.process_count() > 1:
        yield f"processes: {jax.process_count()}"


def kernels() -> Iterator[str]:
    """Which bodies attention takes here: those on record for this kind of device."""
    import jax

    from pallas_kernels import dispatch, records
    from pallas_kernels.measure.work import OPERATIONS

    device = jax.devices()[0]
    if device.platform not in dispatch.PREFERRED:
        yield f"kernels: XLA's, as on every {device.platform}; the Pallas bodies are for GPUs and TPUs"
        return
    for operation in OPERATIONS:
        record = records.read(operation, device.device_kind)
        if record.get("agrees"):
            state = f"{record.get('impl', 'Pallas')}, checked with jax {record.get('jax', '?')}"
        elif "old" in record:
            state = f"XLA's: the record {record['old']}"
        else:
            state = "XLA's: " + ("a check disagrees" if record else "nothing on record")
        yield f"kernels: {operation:15} {state}"
    yield "python -m kvjax.tune checks them again"


def _tuned() -> Iterator[str]:
    """The lines of ``kvjax.tune``.

    Raises:
      InputError: as ``tune``: no GPU or TPU, or no folder for the records.
    """
    from pallas_kernels import dispatch, records

    home = records.own()
    if home is None:
        raise cli.InputError("--tune has no folder for its records: KVJAX_CACHE is off. Set KVJAX_CACHE=DIR.")
    measured = tune.measured(home, tune.MINUTES, None, ())
    dispatch.record.cache_clear()
    tune.bundle(home, measured)
    for operation, record in measured.items():
        yield f"tuned: {operation:15} {tune.state(record)}"


# --- does it compute what it should --------------------------------------------------------------


def answers(dtypes: Sequence[str] = DTYPES, policies: Sequence[str] = POLICIES) -> Iterator[tuple[str, bool]]:
    """(a line, is it right?) for each dtype and policy: the answer of the model inside, and its time."""
    import kvjax

    for dtype in dtypes:
        try:
            model = kvjax.load(dtype=dtype)
            ids = model.text.encode(QUESTION)
            for spec in policies:
                times = []
                for _ in range(2):  # the first time compiles
                    began = time.perf_counter()
                    run = kvjax.generate(model, spec, [ids], max_new_tokens=3)
                    said = model.text.decode(run.tokens[0])
                    times.append(time.perf_counter() - began)
                good = said.strip().startswith(ANSWER)
                live = kvjax.nbytes(run.state).total["live"]
                verdict = "right" if good else f"WRONG {said!r}"
                yield (
                    f"{dtype:9} {spec:26} {verdict}, {live:8,} bytes live, {times[1]:.3f} s "
                    f"({times[0]:.1f} with compiling)",
                    good,
                )
        except Exception as error:  # whatever the compiler or the device has to say belongs into the block
            yield f"{dtype:9} FAILED {type(error).__name__}: {str(error).splitlines()[0]:.200}", False


if __name__ == "__main__":
    cli.start(main)
