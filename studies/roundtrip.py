"""What storing costs: the relative error of keys and values of real texts, stored and read back.

python -m studies.roundtrip --policy int8 --policy int4

Per layer, for keys and for values: the Frobenius norm of (read back - exact) over that of exact, over all
rows, KV heads and tokens. Stored is what a full cache holds after reading the texts: keys after RoPE, in the
model's own dtype. Layers with a sliding window of their own are left out: no storage part acts there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cli, decode
from kvjax.algebra import Policy, SelectAll, Storage
from kvjax.cache import pages as paging
from kvjax.cache import pool
from kvjax.cache.ring import Entry
from kvjax.catalogue import policy as parse_policy
from kvjax.eval import tasks
from kvjax.eval.arguments import add_model
from kvjax.eval.commands import model_of, single
from kvjax.eval.measure import runner
from kvjax.eval.measure.store import about
from kvjax.eval.tasks.data import find
from kvjax.eval.tasks.sample import Samples
from kvjax.types import Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class WriteMode:
    """How tokens come into pages.

    Attributes:
      name: for tables.
      page: slots of a page, which share their scales; None for one page a KV head.
      grown: token by token, each of which may grow the scales, instead of all at once.
    """

    name: str
    page: int | None
    grown: bool


WRITE_MODES = (
    WriteMode("pages, a prompt at once", decode.PAGE, False),
    WriteMode("pages, token by token", decode.PAGE, True),
    WriteMode("one scale a head and channel", None, False),
)
"""As prompts and as generated tokens are stored here; and the paper's one scale for the whole text."""


@dataclasses.dataclass(frozen=True)
class Error:
    """Relative error of a storage, by layer."""

    storage: str
    way: str
    k: tuple[float, ...]
    v: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean([*self.k, *self.v]))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def read_back(
    k: Float[Array, "B K T H"], v: Float[Array, "B K T H"], storage: Storage, page: int, grown: bool
) -> tuple[Float[Array, "B K T H"], Float[Array, "B K T H"]]:
    """What a read sees of T tokens a KV head after they were stored in pages of ``page`` slots."""
    rows, heads, t, dim = k.shape
    entries, chooser = -(-t // page), SelectAll()
    pages = pool.empty(
        pages=rows * heads * entries,
        size=page,
        rows=rows,
        heads=heads,
        lists=1,
        entries=entries,
        **storage.layout(page, dim, k.dtype),
        meta=(),
        summary={},
    )

    def put(pages: paging.Pages, start: Any, count: int) -> paging.Pages:
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=count, axis=2)
        pos = jnp.broadcast_to(start + jnp.arange(count), (rows, count))
        new = Entry(k=cut(k), v=cut(v), pos=pos, admit=jnp.ones((rows, heads, count), bool), meta={})
        return paging.append(pages, storage, chooser, new, jnp.zeros((rows, heads, count), jnp.int32))

    pages = jax.lax.fori_loop(0, t, lambda i, p: put(p, i, 1), pages) if grown else put(pages, 0, t)
    at = jnp.arange(t)
    return storage.read(pages, pages.table[:, :, 0, at // page], at % page)


def exact(model: Weighted, samples: Samples) -> list[tuple[Array, Array]]:
    """Keys and values of each layer that takes a policy, [B, K, T, H]; texts are cut to the shortest."""
    texts = [[*e.context, *e.question, *e.prefix, *e.answer] for _, e in samples]
    t = min(map(len, texts))
    state, _ = decode.prefill(
        model, Policy(), [text[:t] for text in texts], context=decode.bucket(t, model.network.max_positions)
    )
    own = [layer.ring for layer, window in zip(state.layers, model.network.windows) if window is None]
    return [(ring.k[:, :, :t], ring.v[:, :, :t]) for ring in own]  # position p is in slot p


def errors(layers: list[tuple[Array, Array]], storages: Sequence[Storage]) -> list[Error]:
    """Every storage in every way it can be written."""

    def error(back: Array, exact: Array) -> float:
        exact = exact.astype(jnp.float32)
        return float(jnp.linalg.norm(back.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))

    measured = []
    for storage in storages:
        for mode in WRITE_MODES:
            k, v = [], []
            for layer in layers:
                back = read_back(*layer, storage, mode.page or layer[0].shape[2], mode.grown)
                k.append(error(back[0], layer[0]))
                v.append(error(back[1], layer[1]))
            measured.append(Error(storage.name, mode.name, tuple(k), tuple(v)))
    return measured


def markdown(measured: Sequence[Error]) -> str:
    """One line a storage and way of writing: means over layers, and the worst layer."""
    lines = ["| storage | written | K | V | mean | worst layer |", "|---|---|---|---|---|---|"]
    for e in measured:
        numbers = np.mean(e.k), np.mean(e.v), e.mean, max(*e.k, *e.v)
        lines.append(f"| `{e.storage}` | {e.way} | " + " | ".join(f"{x:.2%}" for x in numbers) + " |")
    return "\n".join(lines)


def as_json(measured: Sequence[Error]) -> list[dict[str, Any]]:
    """The same with every layer."""
    return [dataclasses.asdict(e) | {"mean": e.mean} for e in measured]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the errors; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.roundtrip", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--task",
        type=cli.words,
        default=["ppl_books"],
        help="whose texts (default: ppl_books)",
        metavar="NAME",
    )
    cli.add(parser, "--policy", action="append", help="its storage; several times (default: int8, int4)")
    add_model(parser)
    parser.add_argument("--lengths", type=cli.numbers(64), default=[512], help="default: 512")
    parser.add_argument("--samples", type=cli.whole(1), default=8, help="texts (default: 8)")
    cli.add(parser, "--json", help="as JSON, with every layer")
    values = vars(parser.parse_args(words))
    data = find()
    storages = [parse_policy(spec).storage for spec in values["policy"] or ("int8", "int4")]
    task, length = (
        single(tasks.named(values["task"], data)[0], "--task"),
        single(values["lengths"], "--lengths"),
    )
    model = model_of(values)
    samples = runner.draw(task, model, data, length=length, seed=0, count=values["samples"])
    layers = exact(model, samples)
    measured = errors(layers, storages)
    if not values["json"]:
        print(markdown(measured))
        return
    rows, _, tokens, _ = layers[0][0].shape
    facts = {"study": "roundtrip", "task": task.name, "rows": rows, "tokens": tokens, "page": decode.PAGE}
    print(json.dumps({**about(model, data), **facts, "errors": as_json(measured)}, indent=1))


if __name__ == "__main__":
    cli.start(main)
