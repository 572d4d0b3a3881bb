"""The algebra: six places, the part that does nothing in each, and the Policy that joins them.

| place      | question                                                     | do nothing   |
|------------|--------------------------------------------------------------|--------------|
| admission  | may this token outlive the window? (asked on arrival)        | AdmitAll     |
| eviction   | when a stream is over target, which token goes? (lowest score) | KeepRecent |
| selection  | which slots does this read visit? (removes nothing)          | SelectAll    |
| storage    | how is a slot held?                                          | Native       |
| budget     | how many live slots may this layer, head, step have?         | Unlimited    |
| completion | what stands in for what a read leaves out?                   | Nothing      |

Parts are frozen values: ``repr`` is the name in results and parses back (``kvjax.policy(repr(p)) == p``).
Their structure is compiled in, their dials (budgets, thresholds) are given to a program when it runs. A part
declares in ``needs`` which quantities of a token it reads; the others are absent, so an undeclared read fails
while tracing and an unused quantity is never computed. Values a part keeps with every token it names in
``keeps``; they move wherever the token moves.

A module for each place holds its class and its part that does nothing; ``_policy`` joins them and refuses
pairs that exclude each other. Everybody else imports from here.
"""

from kvjax.algebra._admission import Admission, AdmitAll
from kvjax.algebra._arguments import Argument, Number, Switch, Whole
from kvjax.algebra._budget import Budget, Every, Frame, Unlimited, When
from kvjax.algebra._completion import Completion, Nothing, Visited
from kvjax.algebra._errors import PolicyError
from kvjax.algebra._eviction import Eviction, KeepRecent
from kvjax.algebra._observation import OBSERVABLE, Observation
from kvjax.algebra._part import Part
from kvjax.algebra._policy import PLACES, Policy
from kvjax.algebra._selection import Anchored, Picked, SelectAll, Selection
from kvjax.algebra._storage import Native, Storage
from kvjax.sharding.all_heads import HERE, AllHeads

__all__ = [
    "HERE",
    "OBSERVABLE",
    "PLACES",
    "Admission",
    "AdmitAll",
    "AllHeads",
    "Anchored",
    "Argument",
    "Budget",
    "Completion",
    "Every",
    "Eviction",
    "Frame",
    "KeepRecent",
    "Native",
    "Nothing",
    "Number",
    "Observation",
    "Part",
    "Picked",
    "Policy",
    "PolicyError",
    "SelectAll",
    "Selection",
    "Storage",
    "Switch",
    "Unlimited",
    "Visited",
    "When",
    "Whole",
]
