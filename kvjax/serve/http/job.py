"""One HTTP request at work: its tickets with the engine, their texts as they come, what they took."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from kvjax.engine import Engine, Event, KVUsage, Ticket
from kvjax.serve.http import errors
from kvjax.serve.http.plan import Plan
from kvjax.serve.http.service import Service
from kvjax.serve.http.writer import Piece, Writer


class Job:
    """The texts of one request.

    Attributes:
      id: as the client knows it.
      created: seconds since 1970.
      plan: what was asked.
      tickets: one a text.
    """

    def __init__(self, service: Service, plan: Plan, kind: str) -> None:
        """Submits everything, or nothing.

        Raises:
          What ``Engine.submit`` does.
        """
        self.id, self.created = f"{kind}-{uuid.uuid4().hex}", int(time.time())
        self.plan, self._service = plan, service
        self.tickets = submitted(service.engine, plan)
        self._writers = [self._writer(index) for index in range(len(plan.requests))]

    def _writer(self, index: int) -> Writer:
        plan, text = self.plan, self._service.model.text
        request = plan.requests[index]
        ends = () if request.ignore_eos else text.eos
        return Writer(
            text,
            after=list(request.prompt) if plan.continues else (),
            echo=plan.echoes[index],
            stops=plan.stops,
            ends=(*ends, *request.stop_tokens),
            logprobs=plan.logprobs is not None,
        )

    def cancel(self) -> None:
        """Frees the rows of texts that are not done, within one segment."""
        for ticket in self.tickets:
            if not ticket.done:
                ticket.cancel()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(index of the text, what was added to it), until all are complete.

        Raises:
          ApiError: what went wrong with one of them; the others are cancelled.
        """
        came: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
        pumps = [asyncio.create_task(_pump(i, ticket, came)) for i, ticket in enumerate(self.tickets)]
        try:
            while not all(writer.done for writer in self._writers):
                index, event = await came.get()
                writer = self._writers[index]
                if isinstance(event, Exception):
                    raise self._told(event)
                if writer.done:
                    continue  # what the engine wrote after a stop string
                piece = writer.step(event)
                if writer.done and event.finish_reason is None:
                    self.tickets[index].cancel()
                yield index, piece
        finally:
            for pump in pumps:
                pump.cancel()
            self.cancel()

    def _told(self, error: Exception) -> errors.ApiError:
        told = errors.of(error)
        if told.status_code == 500:
            self._service.log.fault("fault", error, request=self.id)
        return told

    # --- what it took ----------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage``, and ours of the cache; a prompt counts once for all its texts."""
        used = [ticket.usage for ticket in self.tickets]
        n = sum(request.draw == 0 for request in self.plan.requests)
        first = [use for use, request in zip(used, self.plan.requests) if request.draw == 0]
        assert len(first) == n  # noqa: S101
        prompt, written = sum(u.prompt_tokens for u in first), sum(w.tokens for w in self._writers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in first)},
            "kv": self._kv([use.kv for use in used if use.kv is not None]),
        }

    def _kv(self, rows: list[KVUsage]) -> dict[str, Any] | None:
        if not rows:
            return None
        found: dict[str, Any] = {
            "policy": repr(self.plan.requests[0].policy),
            "tokens_seen": sum(row.seen for row in rows),
            "tokens_kept": round(sum(row.kept for row in rows), 2),
            "bytes_live": sum(row.live for row in rows),
            "bytes_full": sum(row.full for row in rows),
        }
        if self.plan.layers:
            found["layers"] = np.sum([row.layers for row in rows], axis=0).astype(int).tolist()
        return found

    def notes(self) -> dict[str, Any]:
        """For the log: counts and names."""
        usage = self.usage()
        firsts = [first for ticket in self.tickets if (first := ticket.usage.first_token) is not None]
        return {
            "completion": self.id,
            "policy": repr(self.plan.requests[0].policy),
            "texts": len(self.tickets),
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "first_token": round(min(firsts), 4) if firsts else None,
            "ends": sorted({writer.finish or "left" for writer in self._writers}),
        }


def submitted(engine: Engine, plan: Plan) -> list[Ticket]:
    """A ticket for each request; where one is refused, the others are taken back.

    Raises:
      What ``Engine.submit`` does.
    """
    tickets: list[Ticket] = []
    try:
        for request in plan.requests:
            tickets.append(engine.submit(request))
    except BaseException:
        for ticket in tickets:
            ticket.cancel()
        raise
    return tickets


async def _pump(index: int, ticket: Ticket, came: asyncio.Queue[tuple[int, Event | Exception]]) -> None:
    try:
        async for event in ticket:
            came.put_nowait((index, event))
    except Exception as error:  # whoever waits hears of it
        came.put_nowait((index, error))


@dataclasses.dataclass
class Whole:
    """A text put together from its pieces."""

    text: list[str] = dataclasses.field(default_factory=list)
    tokens: list[Any] = dataclasses.field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        """One more."""
        self.text.append(piece.text)
        self.tokens += piece.tokens
        self.finish, self.stop_reason = piece.finish, piece.stop_reason


async def whole(job: Job) -> list[Whole]:
    """All texts of a job, complete.

    Raises:
      ApiError: as ``Job.pieces``.
    """
    found = [Whole() for _ in job.tickets]
    async for index, piece in job.pieces():
        found[index].add(piece)
    return found
