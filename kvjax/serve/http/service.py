"""What the routes share: the model, the engine, the limits, and what may be asked for."""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import TYPE_CHECKING

from fastapi import Request

from kvjax.engine import Engine, Ticket
from kvjax.loading import LanguageModel
from kvjax.serve.http.errors import ApiError
from kvjax.serve.http.keeping import Keeper
from kvjax.serve.http.log import Log
from kvjax.serve.http.policies import Policies
from kvjax.serve.http.spelling import Spelling

if TYPE_CHECKING:
    from kvjax.serve.http.arguments import Options

WATCHED = 64
"""Requests whose cache can be looked at; an older one makes room for a newer one."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Service:
    """One server.

    Attributes:
      model, engine, options, policies, log: what it serves, and how.
      name: of the model, as clients say it.
      spell: how single tokens are written.
      started: seconds since 1970.
      keeper: of held contexts on disk.
      draining: nothing new is taken; what runs may end.
      watched: requests that asked for ``kv_watch``, by id.
    """

    model: LanguageModel
    engine: Engine
    options: Options
    policies: Policies
    log: Log
    name: str
    spell: Spelling
    keeper: Keeper
    started: int = dataclasses.field(default_factory=lambda: int(time.time()))
    draining: bool = False
    watched: collections.OrderedDict[str, list[Ticket]] = dataclasses.field(
        default_factory=collections.OrderedDict
    )

    def watch(self, name: str, tickets: list[Ticket]) -> None:
        """Lets the cache of a request be looked at, text by text."""
        self.watched[name] = tickets
        while len(self.watched) > WATCHED:
            self.watched.popitem(last=False)

    def check_model(self, name: str | None) -> None:
        """Refuses a model that is not the one.

        Raises:
          ApiError: 404.
        """
        if name not in (None, self.name):
            raise ApiError(
                404,
                f"There is no model {name!r} here. Ask for {self.name!r}.",
                code="model_not_found",
                param="model",
            )

    def check_open(self) -> None:
        """Refuses what is new while the server is on its way out.

        Raises:
          ApiError: 503.
        """
        if self.draining:
            raise ApiError(
                503,
                "The server is being shut down and takes nothing new. Ask another one.",
                code="draining",
                headers={"Retry-After": "5", "Connection": "close"},
            )


def of(request: Request) -> Service:
    """The service behind a request."""
    service: Service = request.app.state.service
    return service
