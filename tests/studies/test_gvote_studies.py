"""GVote's studies on the tiny model: what they call kept a prefill keeps, and their numbers hang together."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from eval_rows import changed, row

import kvjax
from kvjax import decode, metrics
from kvjax.algebra import Observation
from kvjax.policies.gvote import Votes
from studies.gvote import commands, proxy, shares, tables

TEXT = tiny.prompt(120, 4)
PROMPT = TEXT[: 120 - proxy.FUTURE]
PS, COUNTS = (0.6, 0.9), (1, 3)


@pytest.fixture(scope="module")
def agreement():
    return proxy.agreement_of(tiny.model(), TEXT, ps=PS, counts=COUNTS, ahead=8, seed=5)


def test_what_is_kept_is_what_a_prefill_keeps(agreement):
    # The study's second half sees the prompt's keys alone, as the first half of the text gives them.
    reading = decode.read_full(tiny.model(), [PROMPT], context=128)
    for i, p in enumerate(PS):
        policy = kvjax.policy(f"gvote({p}, samples=3, ahead=8)")
        state, _ = decode.cut(tiny.model(), policy, reading, page=8, seeds=5)
        kept = np.asarray(metrics.present(state))[:, 0, :, : len(PROMPT)].sum(axis=-1)
        voted = agreement.kept[:, :, i, COUNTS.index(3)] * len(PROMPT)
        assert (np.abs(kept - voted) <= 1.01).all()  # the ring holds the newest, named or not
        assert kept.max() > 5


def test_more_voters_and_a_wider_nucleus_hold_more(agreement):
    for values in (agreement.kept, agreement.held):
        assert (np.diff(values, axis=-1) >= -1e-6).all()
        assert (np.diff(values, axis=-2) >= -1e-6).all()
    assert ((agreement.overlap > 0) & (agreement.overlap <= 1 + 1e-5)).all()
    assert ((agreement.usage > 0) & (agreement.usage < 1)).all()
    assert (np.abs(agreement.r) <= 1 + 1e-5).all()


def test_the_picture_is_drawn_from_the_file(agreement, tmp_path):
    pytest.importorskip("matplotlib")
    heads = {n: getattr(agreement, n).tolist() for n in ("overlap", "usage", "r")}
    (tmp_path / "proxy_x_1.json").write_text(json.dumps({"by_layer_and_head": heads}))
    (file,) = commands.draw(tmp_path)
    assert file.stat().st_size > 5_000


def softmax(s):
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def fewest(share, p):
    """How many of the largest hold p."""
    return int((np.cumsum(np.sort(share)[::-1]) < p).sum()) + 1


def largest(s, count):
    return np.isin(np.arange(len(s)), np.argsort(-s, kind="stable")[:count])


def test_every_figure_of_the_proxy_is_numpys():
    """Two KV heads of two query heads each; drawn queries are those of ``voters``."""
    random, (heads, groups, length, h, future) = np.random.default_rng(3), (2, 2, 23, 8, 5)
    k, hidden = random.standard_normal((heads, length, h)), random.standard_normal((length, 6))
    last = random.standard_normal((heads * groups, h))
    queries = 1.5 * random.standard_normal((future, heads * groups, h))
    queries[:, 0] *= 3  # heads of one group that hold unequally much
    weight = np.float32(random.standard_normal((6, heads * groups, h)))
    project = jax.tree_util.Partial(lambda w, x: jnp.einsum("bsd,dnh->bsnh", x, w), weight)
    padded = np.concatenate([k, np.full((heads, 4, h), 9.0)], axis=1)
    seen = Observation(
        pos=jnp.asarray([[*range(length), -1, -1, -1, -1]]),
        total=jnp.asarray([length]),
        layer=0,
        layers=1,
        values={"k": jnp.asarray(padded, jnp.float32)[None], "q_last": jnp.asarray(last, jnp.float32)[None],
                "hidden": jnp.asarray(np.pad(hidden, ((0, 4), (0, 0))), jnp.float32)[None]},
        project=project,
        seeds=jnp.asarray([7], jnp.uint32),
    )  # fmt: skip
    ballot, counts, ps = Votes(samples=4, ahead=3), (1, 3, 4), (0.6, 0.9)
    voters = np.asarray(ballot.voters(seen), np.float64)[:, 0]
    actual = proxy._compared(ballot, seen, jnp.asarray(queries, jnp.float32), counts, jnp.asarray(ps))
    for n in range(heads * groups):
        keys = k[n // groups] / np.sqrt(h)
        drawn, true = voters[:, n] @ keys.T, softmax(queries[:, n] @ keys.T)
        inside = np.stack([largest(s, fewest(softmax(s), ps[0])) for s in drawn])
        np.testing.assert_allclose(actual.overlap[n], (inside @ true.mean(axis=0)).mean(), rtol=1e-4)
        np.testing.assert_allclose(actual.usage[n], inside.mean(), rtol=1e-5)
        r = [np.corrcoef(softmax(a), b)[0, 1] for a in drawn for b in true]
        np.testing.assert_allclose(actual.r[n], np.mean(r), rtol=1e-3, atol=1e-4)
    for head in range(heads):
        keys = k[head] / np.sqrt(h)
        for (i, p), (j, count) in [(a, b) for a in enumerate(ps) for b in enumerate(counts)]:
            kept, mass = np.zeros(length, bool), []
            for n in range(head * groups, (head + 1) * groups):
                b = fewest(softmax(keys @ last[n]), p)
                for voter in voters[:count, n]:
                    kept |= largest(keys @ voter, b)
                mass.append(softmax(queries[:, n] @ keys.T).mean(axis=0))
            np.testing.assert_allclose(actual.kept[head, i, j], kept.mean(), rtol=1e-5)
            held = min(share[kept].sum() for share in mass)
            np.testing.assert_allclose(actual.held[head, i, j], held, rtol=1e-4)


def test_the_p_of_a_share_is_where_a_growing_function_reaches_it():
    p, reached = shares.solve(lambda p: p**2, 0.3)
    assert abs(p - 0.3**0.5) < 2e-3
    assert reached == p**2
    assert shares.solve(lambda p: 0.5 + p / 100, 0.2)[0] < 0.01, "the nearest, where none is that small"


def test_tables_tell_ranking_from_counting_and_count_tasks_alike():
    def at(policy, task, scores, heads):
        shown = row(policy, scores, told=True, protocol="aware")
        return changed(shown, cell={"task": task}, heads=heads, kept_fraction=float(np.mean(heads)))

    rows = [
        at("gvote(0.95, samples=64) + uniform(0.3)", "niah", [1.0] * 4, [[0.3, 0.3]]),
        at("gvote(0.95, samples=64) + uniform(0.3)", "vt", [0.0] * 8, [[0.3, 0.3]]),
        at("gvote(0.95)", "niah", [1.0, 0.0], [[0.2, 0.6]]),
        at("gvote(0.95)", "vt", [1.0, 1.0], [[0.4, 0.8]]),
    ]
    lines = list(tables.text(rows))
    who, counted = (lines.index(f"### {title}") for title in (tables.WHO, tables.COUNTED))
    assert "`gvote(0.95, samples=64) + uniform(0.3)` | 30.0 | 50.0 (" in "\n".join(lines[who:counted])
    assert "| `gvote(0.95)` | 50.0 | 75.0 (" in lines[counted + 2]
    assert lines[-1].endswith("| `gvote(0.95)` | 30 70 |")
