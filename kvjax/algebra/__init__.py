"""The algebra: six places, the part that does nothing in each, and the Policy that joins them.

| place      | question                                                                   | does nothing |
|------------|----------------------------------------------------------------------------|--------------|
| admission  | may this token outlive the window? (asked on arrival)                      | AdmitAll     |
| eviction   | a KV head is over its target: which token goes? (the one of lowest score)  | KeepRecent   |
| selection  | which slots does this read visit? (removes nothing)                        | SelectAll    |
| storage    | how is a slot stored?                                                      | Native       |
| budget     | how many live slots may each KV head of a layer have at this step?         | Unlimited    |
| completion | what stands in for the tokens that a read leaves out?                      | Nothing      |

Parts are frozen values: ``repr`` is the name in results and parses back (``kvjax.policy(repr(p)) == p``).
A part's structure is compiled in; its hyperparameters (budgets, thresholds) are passed to the program at
each run. ``needs`` declares which quantities of a token a part reads. Other quantities are absent, so an
undeclared read fails while tracing, and an unused quantity is never computed. ``keeps`` names the values that
a part stores with every token; they move wherever the token moves.

Each place has a module with its class and the part that does nothing; ``_policy`` joins the parts and refuses
pairs that exclude each other. Other packages import from here.
"""

from kvjax.algebra._admission import Admission, AdmitAll
from kvjax.algebra._arguments import MOST, Argument, Number, OfPlace, Switch, Whole
from kvjax.algebra._budget import Budget, Every, Frame, Unlimited, When
from kvjax.algebra._completion import Completion, Nothing, Visited
from kvjax.algebra._errors import PolicyError
from kvjax.algebra._eviction import FIRST, Eviction, KeepRecent
from kvjax.algebra._observation import OBSERVABLE, Observation
from kvjax.algebra._part import Part
from kvjax.algebra._policy import PLACES, Policy
from kvjax.algebra._replay import Piece, Replay, Tokenizer
from kvjax.algebra._selection import Anchored, Picked, SelectAll, Selection
from kvjax.algebra._storage import Native, Storage
from kvjax.algebra._wrapper import Held, Ranking, Runs, Wrapper, places, run_means
from kvjax.sharding.all_heads import HERE, AllHeads

__all__ = [
    "FIRST",
    "HERE",
    "MOST",
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
    "Held",
    "KeepRecent",
    "Native",
    "Nothing",
    "Number",
    "Observation",
    "OfPlace",
    "Part",
    "Picked",
    "Piece",
    "Policy",
    "PolicyError",
    "Ranking",
    "Replay",
    "Runs",
    "SelectAll",
    "Selection",
    "Storage",
    "Switch",
    "Tokenizer",
    "Unlimited",
    "Visited",
    "When",
    "Whole",
    "Wrapper",
    "places",
    "run_means",
]
