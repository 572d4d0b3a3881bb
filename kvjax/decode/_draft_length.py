"""How many tokens are drafted at a time: what a draft can gain, and a choice that follows what is measured.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding, https://arxiv.org/abs/2211.17192,
section 3.3; here a draft step costs d and verification v plain steps, since both read a cache.
"""

from __future__ import annotations


def gain(accepted: float, length: int, draft: float, verify: float) -> float:
    """How many times as fast as plain decoding drafts of ``length`` tokens are, (1 - a^(k+1)) / ((1 - a)(k d + v)).

    Args:
      accepted: a, the share of drafted tokens that are accepted, of those that follow accepted ones.
      length: k, tokens drafted before each verification; with 0 a round is a plain step that costs v.
      draft, verify: d and v, the time of a draft step and of verification over that of a plain step.
    """
    written = sum(accepted**i for i in range(length + 1))  # of a round, the token that verification draws included
    return written / (length * draft + verify)


def best_length(accepted: float, draft: float, verify: float, most: int) -> int:
    """The length of 0 .. ``most`` that gains most; 0 where none gains. Of equal ones the shortest."""
    gains = [1.0, *(gain(accepted, k, draft, verify) for k in range(1, most + 1))]
    return max(range(most + 1), key=gains.__getitem__)
