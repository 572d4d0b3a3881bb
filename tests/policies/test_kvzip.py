"""KVzip against float64 NumPy: a whole pass over the prompt and each piece behind it, and what stays."""

from __future__ import annotations

import functools
import shutil
import types
from typing import Any

import jax
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode, metrics
from kvjax.algebra import PolicyError
from kvjax.decode import RequestError
from kvjax.policies.kvzip import FIRST_PIECE, LATER_PIECE, KVzip

LENGTHS = (45, 21, 6)
PROMPTS = [tiny.prompt(n, seed) for seed, n in enumerate(LENGTHS)]
ASK = (5, 7, 9)


def softmax(s: np.ndarray) -> np.ndarray:
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def layers(tokens: list[int]) -> list[dict[str, np.ndarray]]:
    """Of each layer, queries, keys, values [T, N or K, H], the attention input and W_o; in float64."""
    model = tiny.model()
    spec, p = model.network.spec, jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.norm_eps) * weight

    half = spec.head_dim // 2
    turn = np.exp(1j * np.arange(len(tokens))[:, None] * spec.rope.theta ** (-np.arange(half) / half))[
        :, None
    ]

    def rotate(x: np.ndarray) -> np.ndarray:
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    x, seen = p["embed"][np.asarray(tokens)], []
    for w in p["layers"]:
        y = norm(x, w["attn_norm"])
        q, k = (rotate(np.einsum("td,nhd->tnh", y, w[name])) for name in ("wq", "wk"))
        v = np.einsum("td,nhd->tnh", y, w["wv"])
        seen.append({"q": q, "k": k, "v": v, "hidden": y, "wo": w["wo"]})
        out = np.zeros(q.shape)
        for n in range(spec.num_heads):
            s = q[:, n] @ k[:, n // spec.groups].T / np.sqrt(spec.head_dim)
            out[:, n] = (
                softmax(np.where(np.tri(len(tokens), dtype=bool), s, -np.inf)) @ v[:, n // spec.groups]
            )
        x = x + np.einsum("tnh,dnh->td", out, w["wo"])
        y = norm(x, w["mlp_norm"])
        gate = y @ w["w_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["w_up"].T)) @ w["w_down"].T
    return seen


def scores(prompt: list[int], size: int, sinks: int, output: bool) -> np.ndarray:
    """[L, K, T]."""
    spec, t = tiny.model().network.spec, len(prompt)
    best = np.zeros((spec.num_layers, spec.num_kv_heads, t))
    for begin in range(0, t, size):
        end = min(begin + size, t)
        piece = [*ASK, *prompt[begin:end]]
        for index, seen in enumerate(layers([*prompt, *piece])):
            at = [*range(min(sinks, begin)), *range(begin, end), *range(t, t + len(piece))]
            for n in range(spec.num_heads):
                head = n // spec.groups
                s = seen["q"][t:, n] @ seen["k"][at, head].T / np.sqrt(spec.head_dim)
                own = len(at) - len(piece)
                s[:, own:] = np.where(np.tri(len(piece), dtype=bool), s[:, own:], -np.inf)
                share = softmax(s)
                if output:
                    share /= np.linalg.norm(seen["hidden"][t:], axis=1)[:, None]
                    share *= np.linalg.norm(seen["v"][at, head] @ seen["wo"][:, n].T, axis=1)
                most = share[:, own - (end - begin) : own].max(axis=0)
                best[index, head, begin:end] = np.maximum(best[index, head, begin:end], most)
    best[:, :, :sinks] = np.inf
    return best


def kept(policy: str, weights: Any = None) -> np.ndarray:
    """Which tokens stay [L, B, K, T]."""
    options: dict[str, Any] = {"context": tiny.CONTEXT, "page": tiny.PAGE, "weights": weights}
    state, _ = kvjax.prefill(tiny.model(), policy, PROMPTS, **options)
    bits = np.array(metrics.present(state))
    for layer, cache in enumerate(state.layers):  # the ring holds the newest, kept or not
        at = tiny.places(state.length, cache.ring.window)
        for row in range(len(LENGTHS)):
            bits[layer, row][:, at[row][at[row] >= 0]] = np.asarray(cache.ring.admit)[row][:, at[row] >= 0]
    return bits


@pytest.mark.parametrize(("size", "sinks", "output"), [(100, 4, False), (16, 3, False), (16, 3, True)])
def test_the_tokens_that_received_most_attention_stay(size, sinks, output):
    bits = kept(f"kvzip({size}, sinks={sinks}, output={output}, instruction={ASK}) + uniform(13)")
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS)):
        right = scores(prompt, size, sinks, output)
        for index in np.ndindex(*right.shape[:2]):
            order = np.argsort(-right[index], kind="stable")
            assert length <= 13 or right[index][order[12]] - right[index][order[13]] > 1e-6, "a close call"
            assert np.flatnonzero(bits[index[0], row, index[1]]).tolist() == sorted(order[:13])


def test_what_a_reading_is_cut_to_is_what_a_prefill_keeps():
    """At two budgets, of which the second does not feed the pieces again; a prompt's other pieces are fed."""
    reading = decode.read_full(tiny.model(), PROMPTS, context=tiny.CONTEXT)
    cut = functools.partial(decode.cut, tiny.model(), reading=reading, page=tiny.PAGE)
    eviction = f"kvzip(16, sinks=3, instruction={ASK})"
    for policy in (f"{eviction} + uniform(13)", f"{eviction} + uniform(9)"):
        direct, first = kvjax.prefill(tiny.model(), policy, PROMPTS, context=tiny.CONTEXT, page=tiny.PAGE)
        state, logits = cut(policy)
        np.testing.assert_array_equal(metrics.present(state), metrics.present(direct))
        np.testing.assert_allclose(logits, first, atol=1e-4)
        assert [*reading.replayed] == [kvjax.policy(policy).eviction]
    ((known, scores),) = reading.replayed.items()
    reading.replayed[known] = [-x for x in scores]
    assert (metrics.present(cut(policy)[0]) != metrics.present(direct)).any()
    cut(f"kvzip(100, sinks=3, instruction={ASK}) + uniform(13)")
    assert len(reading.replayed) == 2


def test_the_peak_is_the_full_cache_and_a_piece():
    policy = f"kvzip(16, instruction={ASK}) + uniform(13)"
    state, _ = kvjax.prefill(tiny.model(), policy, [tiny.prompt(120)], context=192, page=tiny.PAGE)
    network, tokens = tiny.model().network, 128  # the size class of the prompt
    slot = 2 * network.head_dim * 4
    full = network.num_layers * network.num_kv_heads * tokens * (slot + 4)
    piece = network.num_kv_heads * 64 * slot
    live, allocated = np.asarray(state.peak)
    assert full + piece <= live <= 1.5 * (full + piece)
    assert live < allocated


# --- words ----------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one token a letter."""

    answer_begin = "\n"

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        assert not bos
        return [ord(letter) for letter in text]


def test_instructions_are_the_papers():
    prompt = np.arange(20, dtype=np.int32)
    first, second = KVzip(12).pieces(prompt, Letters())
    say = Letters().encode
    assert first.tokens.tolist() == [*say(FIRST_PIECE, bos=False), *say("\n", bos=False), *range(12)]
    lead = [*range(4, 12)]  # the last eight tokens before it
    assert second.tokens.tolist() == [*say(LATER_PIECE, bos=False), *lead, ord("\n"), *range(12, 20)]
    assert (second.begin, second.end) == (12, 20)
    (own,) = KVzip(instruction="Again:").pieces(prompt, Letters())
    assert own.tokens.tolist() == [*say("Again:\n", bos=False), *range(20)]
    (ids,) = KVzip(instruction=(3, 4)).pieces(prompt, None)
    assert ids.tokens.tolist() == [3, 4, *range(20)]


@pytest.mark.parametrize("call", ["prefill", "cut", "submit"])
def test_a_model_without_a_tokenizer_is_told_to_give_ids(call):
    with pytest.raises(PolicyError, match=r"no tokenizer beside it\. Give the instruction as token ids"):
        ask(call, "kvzip + uniform(0.5)", tiny.prompt(20))


def test_a_folder_without_a_tokenizer_takes_ids(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    model = kvjax.load(tmp_path / "bare")
    state, _ = kvjax.prefill(model, f"kvzip(instruction={ASK}) + uniform(0.5)", [PROMPTS[0]])
    assert metrics.live_slots(state).sum() < model.network.num_layers * 2 * len(PROMPTS[0])
    with pytest.raises(PolicyError, match="no tokenizer beside it"):
        kvjax.prefill(model, "kvzip + uniform(0.5)", [PROMPTS[0]])


@pytest.mark.parametrize("call", ["prefill", "cut", "submit"])
def test_what_exceeds_the_positions_is_refused_with_the_numbers(call):
    policy = f"kvzip(100, instruction={ASK}) + uniform(0.5)"
    with pytest.raises(
        RequestError, match="row 0 needs 263 positions, for a prompt of 160 tokens, 3 of .* 100"
    ):
        ask(call, policy, tiny.prompt(160))


def test_an_instruction_of_another_vocabulary_is_refused():
    with pytest.raises(RequestError, match="has the token id 61 at 1, the model knows 0 to 60"):
        ask("prefill", "kvzip(instruction=(5, 61)) + uniform(0.5)", tiny.prompt(20))


def ask(call: str, policy: str, prompt: list[int]) -> None:
    from kvjax.engine import Engine, Request

    if call == "prefill":
        kvjax.prefill(tiny.model(), policy, [prompt])
    elif call == "cut":
        reading = types.SimpleNamespace(prompts=(np.asarray(prompt, np.int32),))
        decode.cut(tiny.model(), policy, reading)
    else:
        with Engine(tiny.model(), max_rows=1, context=192, chunk=16, page=tiny.PAGE) as engine:
            engine.submit(Request(prompt=prompt, policy=policy, max_new_tokens=2))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kvzip + uniform(64, every_step)", "ranks only the tokens of a prompt"),
        ("kvzip + gvote", "keys and values are all that is left, but gvote.* reads hidden and q and q_last"),
        ("write_gate + kvzip + uniform(0.5)", "reads hidden|hides tokens|reads k_pre"),
        ("window(8) + kvzip + uniform(0.5)", "hides tokens while a prompt is read"),
        ("kvzip(instruction='') + uniform(0.5)", "is not a valid instruction. Give a text"),
        ("kvzip(instruction=[5]) + uniform(0.5)", "is not a valid instruction"),
    ],
)
def test_what_a_second_pass_cannot_serve_is_refused(spec, message):
    with pytest.raises(PolicyError, match=message):
        kvjax.policy(spec)
