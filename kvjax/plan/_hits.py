"""How much of what a step chooses of host memory the device's cache has: rates of the embedded model.

Nobody knows them before a model reads its texts. ``studies.hits`` measured them on the embedded model; a plan
names the nearest one beside the most that a step can bring.
"""

from __future__ import annotations

import dataclasses
import json
import math

from kvjax import loading
from kvjax.plan._deployment import Deployment


@dataclasses.dataclass(frozen=True)
class Hits:
    """A measured rate.

    Attributes:
      rate: of the units that reads asked for, those that the device's cache had.
      ratio: the size of that cache, of what one read chooses at most.
    """

    rate: float
    ratio: float

    def brings(self, chosen: int) -> int:
        """Bytes that a step brings of those it chooses."""
        return round(chosen * (1 - self.rate))


def nearest(case: Deployment) -> Hits | None:
    """The rate of the same kind of selection, at the nearest unit and then the nearest size of the cache.

    None: nothing lies in host memory, or no selection of this kind was measured.
    """
    selection, context = case.policy.selection, case.context
    near = (case.policy.near(context, layer) for layer in range(case.spec.num_layers))
    held = next(filter(None, near), None)
    path = loading.embedded_folder() / "hits.json"
    if held is None or not path.is_file():
        return None
    ratio = held.units / selection.most_units(context)

    def distance(row: dict[str, float]) -> tuple[float, float]:
        return abs(math.log(row["unit"] / held.unit)), abs(math.log(row["ratio"] / ratio))

    rows = [row for row in json.loads(path.read_text()) if row["selection"] == selection.name]
    best = min(rows, key=distance, default=None)
    return best and Hits(best["hits"], best["ratio"])
