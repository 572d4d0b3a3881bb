"""Errors of the engine, as its callers see them."""

from __future__ import annotations

from kvjax.errors import UserError


class EngineError(UserError):
    """Something between a request and its tokens; what is wrong with the request itself is a
    ``kvjax.decode.RequestError``, ``kvjax.PolicyError`` or ``kvjax.weights.WeightsError``."""


class QueueFull(EngineError):  # noqa: N818  (what happened, not what broke)
    """The queue is full.

    Attributes:
      retry_after: seconds to wait before the next attempt, at least 1.
    """

    def __init__(self, waiting: int, retry_after: float, what: str = "requests wait") -> None:
        super().__init__(
            f"{waiting} {what} already, and the queue takes no more. Ask again in {retry_after:.0f} s."
        )
        self.retry_after = retry_after


class TooManyStructures(EngineError):  # noqa: N818
    """A client brings more policy structures that have to be compiled than it may.

    Attributes:
      retry_after: seconds to wait before the next one, at least 1.
    """

    def __init__(self, most: int, retry_after: float) -> None:
        super().__init__(
            f"{most} policies of other structures were compiled for this client within a minute, as many as "
            f"may be. Ask again in {retry_after:.0f} s, or ask for a policy that runs already."
        )
        self.retry_after = retry_after


class MemoryFull(EngineError):  # noqa: N818
    """What others hold leaves no KV memory for this request, which would fit alone."""


class Draining(EngineError):  # noqa: N818
    """The engine finishes what it has begun and takes nothing new."""


class EngineDead(EngineError):  # noqa: N818
    """The engine failed, or was closed; its cause is the fault. Everything it held is lost."""


class ContextNotFound(EngineError):  # noqa: N818
    """No context of that name is held."""


class ContextExists(EngineError):  # noqa: N818
    """A context of that name is held already."""


class ContextMismatch(EngineError):  # noqa: N818
    """A context was read under another policy or with other weights than the request has."""
