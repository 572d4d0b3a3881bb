"""NumPy float64 attention, written from the definitions and independent of the package."""

from __future__ import annotations

import numpy as np


def attend(q, k, v, see, scale, softcap=None):
    """One head: q [T, H], k, v [S, H], see [T, S] -> (out [T, H], lse [T], p [T, S]); empty = (0, -inf)."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    p, lse, seen = np.zeros(see.shape), np.full(len(q), -np.inf), np.flatnonzero(see.any(axis=0))
    s = q @ k[seen].T * scale
    s = np.where(see[:, seen], s if softcap is None else softcap * np.tanh(s / softcap), -np.inf)
    some = np.flatnonzero(see.any(axis=1))
    lse[some] = np.logaddexp.reduce(s[some], axis=1)
    p[np.ix_(some, seen)] = np.exp(s[some] - lse[some, None])
    return p[:, seen] @ v[seen], lse, p


def blockwise(q, k, v, *, q_pos, k_pos, window=None, admit=None, scale=None, softcap=None):
    """(out [B, N, T, H], lse [B, N, T], p [B, N, T, S])."""
    (b, n, t, h), heads, s = q.shape, k.shape[1], k.shape[2]
    scale = h**-0.5 if scale is None else scale
    q_pos, k_pos = np.asarray(q_pos), np.asarray(k_pos)
    out, lse, p = np.zeros((b, n, t, h)), np.zeros((b, n, t)), np.zeros((b, n, t, s))
    for row in range(b):
        i, j = q_pos[row][:, None], k_pos[row][None, :]
        for head in range(n):
            see = (i >= 0) & (j >= 0) & (j <= i)
            if window is not None:
                near = i - j < window
                if admit is not None:
                    near = near | np.asarray(admit)[row, head // (n // heads)][None, :]
                see = see & near
            kv = head // (n // heads)
            out[row, head], lse[row, head], p[row, head] = attend(
                q[row, head], k[row, kv], v[row, kv], see, scale, softcap
            )
    return out, lse, p


def codes(pool):
    """A pool as float64; a byte of uint8 holds two codes of 4 bits, channel c low and c + H / 2 high."""
    if pool.dtype != np.uint8:
        return pool.astype(np.float64)
    nibbles = np.concatenate([pool & 15, pool >> 4], axis=-1).astype(np.float64)
    return np.where(nibbles > 7, nibbles - 16, nibbles)


def ragged(
    q, k_pages, v_pages, *, table, length, scales=None, pages=None, slots=None, scale=None, softcap=None
):
    """(out [B, N, T, H], lse [B, N, T], mass [B, N, M, S]), following each KV head's list by hand."""
    (b, n, t, h), size, (heads, m) = q.shape, k_pages.shape[1], table.shape[1:]
    scale = h**-0.5 if scale is None else scale
    k_pages, v_pages = (codes(np.asarray(x)) for x in (k_pages, v_pages))
    if scales is not None:
        k_pages = k_pages * np.asarray(scales, np.float64)[:, 0][:, None, :]
        v_pages = v_pages * np.asarray(scales, np.float64)[:, 1][:, None, :]
    table, length = np.asarray(table), np.asarray(length)
    out, lse, mass = np.zeros((b, n, t, h)), np.zeros((b, n, t)), np.zeros((b, n, m, size))
    for row in range(b):
        for head in range(n):
            kv = head // (n // heads)
            places = []
            for place in range(int(length[row, kv])):
                page, slot = divmod(place, size)
                if pages is not None:
                    at = np.flatnonzero(np.asarray(pages)[row, kv] == page)
                    if len(at) == 0 or (slots is not None and not np.asarray(slots)[row, kv, at[0], slot]):
                        continue
                places.append((page, slot))
            k = np.array([k_pages[table[row, kv, a], s] for a, s in places]).reshape(-1, h)
            v = np.array([v_pages[table[row, kv, a], s] for a, s in places]).reshape(-1, h)
            everything = np.ones((t, len(places)), bool)
            out[row, head], lse[row, head], p = attend(q[row, head], k, v, everything, scale, softcap)
            for (a, s), x in zip(places, p.sum(0)):
                mass[row, head, a, s] = x
    return out, lse, mass
