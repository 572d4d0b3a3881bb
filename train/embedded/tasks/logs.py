"""Logs and service dialogues: long stretches that follow a pattern, values that must be looked up.

A row's log has its own few line forms, hosts, users and jobs; a job's user, host and size are drawn when it
first appears and come back word for word in every later line of that job. A dialogue goes through the same
few turns for every customer and repeats that customer's words. Looked-up values have the weight of an
answer's tail. Fits from 128 tokens on.
"""

from __future__ import annotations

import numpy as np

from kvjax.eval.tasks.words import DECIMAL, pick
from train.embedded.tasks.pieces import Part, Row, held_out, join, stack
from train.embedded.tasks.values import CAPITALS, Draw
from train.rows import TEXT, Source

FITS = 128
KNOWN = 2.0
"""Loss weight of a value that stands earlier in the row."""

OPEN = (
    "job {job} of user {user} was queued on {host}",
    "accepted {job} from {user} at {host}",
    "request {job}: user={user} host={host}",
    "connection {job} opened by {user} through {host}",
)
LATER = (
    "job {job} is running on {host} for {user}",
    "{job}: still waiting for {host}, owner {user}",
    "progress {job} {percent} percent, user {user}",
    "{host} reports that {job} is healthy",
    "retry of {job} on {host} (user {user})",
    "checkpoint of {job} written to {host}",
    "request {job}: user={user} status=200",
    "{user} asked for the state of {job}",
)
DONE = (
    "job {job} of user {user} has finished on {host}",
    "closed {job} ({user}, {host})",
    "request {job}: user={user} host={host} done",
)
BEAT = (
    "heartbeat received from all nodes, nothing to do",
    "cleaning up temporary files: 0 files removed",
    "the scheduler has checked the queue and found it in order",
    "memory usage is normal, disk usage is normal",
    "synchronised the clock with the time server",
)

TURNS = (
    ("Good morning, this is the service desk. May I have your name, please?", "My name is {name}."),
    ("Thank you, {name}. What is your order number?", "The order number is {order}."),
    ("I have found order {order}. To which address should it go?", "Please send it to {town}."),
    ("So order {order} for {name} goes to {town}. Is that right?", "Yes, order {order} goes to {town}."),
    ("How would you like to pay, {name}?", "I will pay {price} in cash."),
    ("Very well. Is there anything else I can do for you today?", "No, thank you, that is all."),
    (
        "Thank you for calling, {name}. Order {order} will be sent to {town} for {price}.",
        "Thank you. Goodbye.",
    ),
)


def row(rng: np.random.Generator, source: Source, length: int) -> Row | None:
    """One row, a log or a dialogue."""
    draw = Draw(rng, lambda: source.word(rng), held_out(source))
    parts = (_log if rng.random() < 0.6 else _dialogue)(draw, length)
    ids, weight = join(source, parts)
    if len(ids) < length - 1:
        return None
    return stack((ids[: length - 1], weight[: length - 1]))


def _filled(form: str, values: dict[str, str], known: set[tuple[str, str]]) -> list[Part]:
    """The form's pieces; a value that stood before weighs more."""
    parts: list[Part] = []
    for i, piece in enumerate(form.replace("}", "{").split("{")):
        if i % 2 == 0:
            parts.append((piece, TEXT))
        else:
            fact = (piece, values[piece])
            parts.append((values[piece], KNOWN if fact in known else TEXT))
            known.add(fact)
    return [part for part in parts if part[0]]


def _log(d: Draw, length: int) -> list[Part]:
    rng = d.rng
    opened = d.one(OPEN)
    later = tuple(d.one(LATER) for _ in range(int(rng.integers(2, 5))))
    done, beat = d.one(DONE), d.one(BEAT)
    hosts = tuple(d.in_split(lambda: f"{d.words()}-{d.digits(1)}") for _ in range(int(rng.integers(2, 5))))
    users = tuple(d.name().lower() for _ in range(int(rng.integers(2, 6))))
    step, clock = d.one(("minute", "line", "none")), int(rng.integers(0, 1200))
    jobs: list[dict[str, str]] = []
    known: set[tuple[str, str]] = set()
    parts: list[Part] = []
    for number in range(length // 8 + 4):
        stamps = {"minute": f"{clock // 60 % 24:02}:{clock % 60:02} INFO ", "line": f"{number + 1}. "}
        clock += 1
        parts.append(("\n" + stamps.get(step, ""), TEXT))
        turn = rng.random()
        if not jobs or turn < 0.15:
            job = {"job": _job(d), "user": d.one(users), "host": d.one(hosts), "percent": d.digits(2)}
            jobs.append(job)
            parts += _filled(opened, job, known)
        elif turn < 0.7:
            job = jobs[int(rng.integers(len(jobs)))]
            parts += _filled(d.one(later), job | {"percent": d.digits(2)}, known)
        elif turn < 0.8 and len(jobs) > 1:
            parts += _filled(done, jobs.pop(int(rng.integers(len(jobs)))), known)
        else:
            parts.append((beat, TEXT))
    return parts


def _job(d: Draw) -> str:
    return d.in_split(lambda: d.one(CAPITALS) + "".join(d.one(DECIMAL) for _ in range(3)))


def _dialogue(d: Draw, length: int) -> list[Part]:
    agent, caller = d.one(("Agent", "Clerk", "Assistant")), d.one(("Caller", "Customer", "User"))
    turns = [turn for turn in TURNS if d.rng.random() < 0.8] or [TURNS[1]]
    parts: list[Part] = []
    while sum(len(text) for text, _ in parts) < 6 * length:
        values = {
            "name": f"{d.name()} {d.name()}", "order": _job(d), "town": d.name() + "ton",
            "price": f"{d.digits(2)} dollars",
        }  # fmt: skip
        known: set[tuple[str, str]] = set()
        for says, answers in turns:
            parts += [(f"\n{agent}: ", TEXT), *_filled(says, values, known)]
            parts += [(f"\n{caller}: ", TEXT), *_filled(answers, values, known)]
        parts.append(("\n", TEXT))
    return parts


def samples(rng: np.random.Generator, words: tuple[str, ...], count: int) -> list[str]:
    """Logs and dialogues as text to train a tokenizer on."""
    draw = Draw(rng, lambda: pick(rng, words), False)
    make = (_log, _dialogue)
    return ["".join(text for text, _ in make[i % 2](draw, 128)) for i in range(count)]
