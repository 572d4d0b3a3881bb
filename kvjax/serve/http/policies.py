"""Which policies and learned weights a request may ask for."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from kvjax import catalogue
from kvjax.algebra import Policy
from kvjax.loading import LanguageModel
from kvjax.serve.http.errors import ApiError
from kvjax.serve.http.log import Log
from kvjax.weights import chosen, is_auto, shipped, sources

KNOWN = 64
"""Arguments of ``auto`` that are remembered."""


class Policies:
    """Makes sense of ``kv_policy`` and ``kv_weights``.

    An allowed policy stands for its structure: another budget or threshold compiles nothing and shares its
    lane. The default's structure is always allowed.

    What ``auto(...)`` stands for on this model is looked up once for each argument.

    Attributes:
      default: of requests that name none.
      allowed: in one-string form, for messages and the page; None allows all.
    """

    def __init__(
        self, model: LanguageModel, default: str | Policy, allowed: Sequence[str | Policy] | None, log: Log
    ) -> None:
        """Raises PolicyError where ``auto(...)`` has nothing to choose by."""
        self._model, self._log = model, log
        self._known: collections.OrderedDict[str, Policy] = collections.OrderedDict()
        self.default = self._meant(default)
        every = [self.default, *(self._meant(one) for one in allowed or ())]
        self.allowed = None if allowed is None else list(dict.fromkeys(map(repr, every)))
        self._structures = None if allowed is None else {policy.structure for policy in every}

    def policy(self, asked: str | None) -> Policy:
        """The policy of a request.

        Raises:
          PolicyError: one that cannot be built.
          ApiError: 403 for one that is not allowed.
        """
        if asked is None:
            return self.default
        found = self._meant(asked)
        if self._structures is not None and found.structure not in self._structures:
            raise ApiError(
                403,
                f"kv_policy {asked!r} is not among the policies of this server, at any budget: "
                f"{'; '.join(self.allowed or [])}. Ask for one of them.",
                code="policy_not_allowed",
                param="kv_policy",
            )
        return found

    def _meant(self, asked: str | Policy) -> Policy:
        """The policy on this model."""
        if not isinstance(asked, str) or not is_auto(asked):
            return catalogue.policy(asked)
        if asked not in self._known:
            self._known[asked], said = chosen(asked, self._model)
            self._log("note", text=said)
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return self._known[asked]

    def weights(self, policy: Policy, asked: Mapping[str, str] | None) -> dict[str, str] | None:
        """The weights of a request: names of what the model ships; files are the operator's to name.

        Raises:
          ApiError: 400 for what is no shipped name.
          WeightsError: for a part that the policy does not have, or that learns nothing.
        """
        if asked is None:
            return None
        sources(policy, asked)
        for part in policy.learned:
            names, name = shipped(self._model, part), asked.get(part.name)
            if name is not None and name not in names:
                raise ApiError(
                    400,
                    f"kv_weights: the model ships no {name!r} for {part.name}. "
                    f"Name one of: {', '.join(names) or '(it ships none)'}.",
                    code="invalid_weights",
                    param="kv_weights",
                )
        return {part.name: asked[part.name] for part in policy.learned if part.name in asked} or None
