"""A plan in words, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from kvjax.plan._arguments import Question
from kvjax.plan._deployment import Deployment, uneven
from kvjax.plan._estimate import Bytes
from kvjax.plan._hits import nearest
from kvjax.plan._plan import DevicePlan
from kvjax.plan._programs import Program
from pallas_kernels.measure.chips import GIB

PARTS = {
    "weights": "weights",
    "learned": "learned weights",
    "allocated": "KV allocated",
    "live": "  of it live",
    "index": "  of it index",
    "cached": "  of it cache",
    "padding": "layout padding",
    "temporary": "temporaries",
    "code": "program",
    "total": "total",
}
BESIDE_HOST = ("index", "cached")
"""Of these, what only a device has whose pages lie in host memory."""


def lines(question: Question, plan: DevicePlan) -> Iterator[str]:
    """What is printed."""
    case, chip, program = question.case, question.chip, plan.step.program
    mesh = f"{case.mesh!r}{', the mesh with the fewest bytes a device' if question.chosen else ''}"
    yield f"{question.model} under {case.policy!r} on {question.topology} ({plan.kind}), {mesh}"
    yield f"{case.rows} rows of {case.context} tokens{_shares(case)}, {case.dtype}{_weights(case)}"
    wheels = ", ".join(f"{name} {version}" for name, version in plan.wheels.items())
    depths = f"{case.spec.num_layers} layers extrapolated from {' and '.join(map(str, program.depths))}"
    if len(program.depths) == 1:
        depths = f"all {case.spec.num_layers} layers"
    yield f"compiled for, not run: {wheels}; kernels: {program.kernels}; {depths}"
    yield ""
    yield f"{'GiB a device':18} {'a step':>9} {'prefill':>9}"
    both = (plan.decoding, plan.reading)
    for field, name in PARTS.items():
        if field in BESIDE_HOST and not plan.decoding.host:
            continue
        cells = [f"{getattr(x, field) / GIB:9.3f}" if x else f"{'-':>9}" for x in both]
        yield f"{name:18} {' '.join(cells)}"
    if plan.decoding.host:
        yield f"{'in host memory':18} {plan.decoding.host / GIB:9.3f}"
        link = " ".join(f"{x.linked / GIB:9.3f}" if x else f"{'-':>9}" for x in both)
        yield f"{'over its link':18} {link}  at most, a step and a piece of the prompt"
        yield from _brought(question, plan)
    yield f"{'of':18} {chip.memory / GIB:9.3f} {chip.memory / GIB:9.3f}  {chip.remark}".rstrip()
    verdicts = ["fits" if x and x.total <= chip.memory else "too much" for x in both]
    yield f"{'':18} {verdicts[0]:>9} {verdicts[1]:>9}"
    for name, compiled in (("step", plan.step), ("prefill", plan.prefill)):
        if compiled is None or compiled.case.rows < case.rows:
            rows = f"it was compiled for {compiled.case.rows}" if compiled else "nor for one row a device"
            yield f"The compiler finds no room for the {name} of all rows; {rows}."
    yield ""
    yield "collectives of a step, a device:"
    yield from _collectives(program)
    how = "the whole prompts" if case.policy.whole_prompt else f"{case.chunk} tokens a row"
    yield f"of one layer of prefill, {how}:"
    yield from _collectives(plan.prefill.program if plan.prefill else None)
    yield ""
    yield from _roofline(question, plan)
    yield ""
    read = f"{plan.most_read} if all prompts are read at once"
    yield f"most rows at this context: {plan.most_rows}; {read}"
    whole = ", all its positions" if plan.longest == case.spec.max_positions else ""
    yield f"longest context of {case.rows} rows: {plan.longest}{whole}"
    if plan.decoding.total > chip.memory:
        yield f"does not fit. What would: {'; '.join(plan.remedies) or 'nothing that was tried'}"


def _brought(question: Question, plan: DevicePlan) -> Iterator[str]:
    hits = nearest(question.case)
    if hits is not None:
        brought = f"{hits.brings(plan.decoding.linked) / GIB:9.3f}"
        measured = f"{100 * hits.rate:.0f} % hits measured on the embedded model's text"
        yield f"{'':18} {brought} {'':9}  about, a step at the {measured} (cache {hits.ratio:g} x a choice)"


def _shares(case: Deployment) -> str:
    share = "" if case.share is None else f", share {case.share:g}"
    if case.imbalance > 1 and not uneven(case.policy):
        return f"{share} (no imbalance: this policy fills all heads equally)"
    return share + (f", fullest device {case.imbalance:g} x the mean" if case.imbalance > 1 else "")


def _collectives(program: Program | None) -> Iterator[str]:
    if program is None or not program.collectives:
        yield "  none"
        return
    for one, count in sorted(program.collectives.items(), key=lambda x: (-x[0].sent * x[1], x[0])):
        yield (
            f"  {count:4} {one.kind} of {one.nbytes:,} bytes among {one.devices} devices, "
            f"{one.sent * count / 1e6:.3f} MB sent"
        )


def _roofline(question: Question, plan: DevicePlan) -> Iterator[str]:
    least, chip = plan.roofline, question.chip
    yield (
        f"a step takes at least {1e3 * least.seconds:.2f} ms: {least.weights / 1e9:.2f} GB of weights and "
        f"{least.cache / 1e9:.2f} GB of keys and values at {chip.bandwidth / 1e9:.0f} GB/s, "
        f"{least.sent / 1e6:.2f} MB sent at {chip.links / 1e9:.0f} GB/s; latencies are not counted"
    )
    if least.walked > least.cache:
        walk = f"reads of {plan.step.program.kernels} walk whole pools, {least.walked / 1e9:.2f} GB"
        yield f"  {1e3 * least.compiled_seconds:.2f} ms as compiled: {walk}"
    yield f"  {question.case.rows / least.seconds:.0f} tokens a second at most, all rows together"


def _weights(case: Deployment) -> str:
    return f", weights {case.weight_dtype}" if case.weight_dtype else ""


def as_json(question: Question, plan: DevicePlan) -> dict[str, Any]:
    """The same as a JSON object; bytes are of one device."""
    case, chip, hits = question.case, question.chip, nearest(question.case)
    return {
        "model": question.model,
        "policy": repr(case.policy),
        "devices": question.topology,
        "kind": plan.kind,
        "mesh": repr(case.mesh),
        "rows": case.rows,
        "rows_each": case.device_rows,
        "context": case.context,
        "share": case.share,
        "imbalance": case.fullest,
        "dtype": case.dtype,
        "weight_dtype": case.weight_dtype,
        "layers": case.spec.num_layers,
        "compiled_layers": list(plan.step.program.depths),
        "compiled_rows": {"step": plan.step.case.rows, "prefill": plan.prefill and plan.prefill.case.rows},
        "kernels": plan.step.program.kernels,
        "memory": chip.memory,
        "step": _bytes(plan.decoding),
        "prefill": plan.reading and _bytes(plan.reading),
        "hits": hits and dataclasses.asdict(hits) | {"brought": hits.brings(plan.decoding.linked)},
        "fits": {
            name: x is not None and x.total <= chip.memory
            for name, x in (("step", plan.decoding), ("prefill", plan.reading))
        },
        "collectives": _counted(plan.step.program),
        "prefill_layer_collectives": _counted(plan.prefill.program) if plan.prefill else [],
        "roofline": dataclasses.asdict(plan.roofline),
        "most_rows": plan.most_rows,
        "most_rows_read_at_once": plan.most_read,
        "longest_context": plan.longest,
        "would_fit": plan.remedies,
        "compilers": plan.wheels,
        "note": "on paper: compiled for these devices, not run",
    }


def _bytes(held: Bytes) -> dict[str, int]:
    return dataclasses.asdict(held) | {"total": held.total}


def _counted(program: Program) -> list[dict[str, Any]]:
    return [
        dataclasses.asdict(one) | {"count": count, "sent": round(one.sent * count)}
        for one, count in sorted(program.collectives.items())
    ]
