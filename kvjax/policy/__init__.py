"""The algebra: six places, the part that does nothing in each, and the Policy that joins them.

| place      | question                                                     | do nothing   |
|------------|--------------------------------------------------------------|--------------|
| admission  | may this token outlive the window? (asked on arrival)        | AdmitAll     |
| eviction   | when a stream is over target, who goes? (a score, higher stays) | KeepRecent |
| selection  | which slots does this read visit? (removes nothing)          | SelectAll    |
| storage    | how is a slot held?                                          | Native       |
| budget     | how many live slots may this layer, head, step have?         | Unlimited    |
| completion | what stands in for what a read leaves out?                   | Nothing      |

Parts are frozen, hashable values: equal policies compile once, and ``repr`` is the name in results and
parses back (``kvjax.policy(repr(p)) == p``). A part declares in ``needs`` which quantities of a token it
reads; the others are absent, so an undeclared read fails while tracing and an unused quantity is never
computed. Values a part keeps with every token it names in ``keeps``; they move wherever the token moves.

A module for each place holds its class and its part that does nothing; ``joined`` is the Policy, ``legal``
the pairs it refuses. Everybody else imports from here.
"""

from kvjax.policy.admission import Admission, AdmitAll
from kvjax.policy.budget import Budget, Every, Frame, Unlimited, When
from kvjax.policy.completion import Completion, Nothing, Visited
from kvjax.policy.errors import PolicyError
from kvjax.policy.eviction import Eviction, KeepRecent
from kvjax.policy.joined import PLACES, Policy
from kvjax.policy.observation import OBSERVABLE, Observation
from kvjax.policy.part import Part
from kvjax.policy.selection import Picked, SelectAll, Selection
from kvjax.policy.storage import Native, Storage

__all__ = [
    "OBSERVABLE",
    "PLACES",
    "Admission",
    "AdmitAll",
    "Budget",
    "Completion",
    "Every",
    "Eviction",
    "Frame",
    "KeepRecent",
    "Native",
    "Nothing",
    "Observation",
    "Part",
    "Picked",
    "Policy",
    "PolicyError",
    "SelectAll",
    "Selection",
    "Storage",
    "Unlimited",
    "Visited",
    "When",
]
