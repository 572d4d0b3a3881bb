"""``GET /metrics``, for Prometheus, and ``GET /v1/kv/{id}``: what the cache of one request holds."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, core, generate_latest

import kvjax
from kvjax.engine import BUCKETS, LENGTHS, EngineDead, Inspection, Lengths, Seconds
from kvjax.serve.http.errors import ApiError
from kvjax.serve.http.service import Service, service_of

router = APIRouter()


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Counts and gauges in Prometheus' text format; of a dead engine only that it is dead.

    Does not wait for the engine: what a long program does must not hide the numbers.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(service_of(request)))
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


class _Collector:
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[core.Metric]:
        """All metrics, with the model's name on every sample."""
        for family in self._families():
            family.samples = [
                sample._replace(labels={"model": self._service.name} | sample.labels)
                for sample in family.samples
            ]
            yield family

    def _families(self) -> Iterator[core.Metric]:
        """Converts one snapshot of the engine."""
        service = self._service
        policy = repr(service.policies.default)
        about = {"version": kvjax.__version__, "model": service.name, "policy": policy}
        yield core.InfoMetricFamily("kvjax", "What is served", value=about)
        responses = core.CounterMetricFamily(
            "kvjax_http_responses",
            "Responses; status 0: the client left before there was one",
            labels=["method", "route", "status"],
        )
        for labels, count in sorted(service.responses.copy().items()):
            responses.add_metric(labels, count)
        yield responses
        up = "1 while the engine lives"
        try:
            now = service.engine.metrics(wait=False)
        except EngineDead:
            yield core.GaugeMetricFamily("kvjax_engine_up", up, value=0)
            return
        yield core.GaugeMetricFamily("kvjax_engine_up", up, value=1)
        for name, what, value in (
            ("num_requests_waiting", "Requests that wait", now.queued),
            ("num_requests_reading", "Requests whose prompt is being read", now.reading),
            ("num_requests_running", "Texts that are being written", now.running),
            ("kv_memory_bytes", "Most bytes of all caches", now.kv_memory),
            ("kv_allocated_bytes", "Bytes of all caches on the device", now.kv_allocated),
            ("contexts_host_bytes", "Bytes of contexts in the host's memory", now.contexts_resting),
            ("kv_kept_ratio", "Kept of what ended texts were fed, over layers and heads", now.admitted_ratio),
        ):
            yield core.GaugeMetricFamily(f"kvjax_{name}", what, value=value)
        for name, what, value in (
            ("prompt_tokens", "Tokens read from prompts", now.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens that did not have to be read", now.cached_tokens),
            ("generation_tokens", "New tokens", now.completion_tokens),
            ("drafted_tokens", "Tokens drafted for texts with kv_draft", now.drafted_tokens),
            ("accepted_tokens", "Of these, those that stand in the text", now.accepted_tokens),
            ("preemptions", "Texts put back to wait", now.preempted),
            ("contexts_to_host", "Contexts that went to the host's memory", now.contexts_to_host),
            ("contexts_from_host", "Contexts that came back to be continued", now.contexts_from_host),
            ("kv_tokens_seen", "(token, layer, KV head) triples fed to texts that ended", now.tokens_seen),
            ("kv_tokens_kept", "Of these, those still held at the end", now.tokens_kept),
            ("kv_tokens_evicted", "Of these, those rejected or evicted", now.tokens_evicted),
        ):
            yield core.CounterMetricFamily(f"kvjax_{name}", what, value=value)
        ended = core.CounterMetricFamily("kvjax_requests", "Texts that ended", labels=["reason"])
        for reason, count in sorted(now.requests.items()):
            ended.add_metric([reason], count)
        yield ended
        for field, name, what in (
            ("rows", "rows", "texts that are being written"),
            ("max_rows", "places", "rows of the batch, used or not"),
            ("live", "live_bytes", "bytes of live slots"),
            ("allocated", "allocated_bytes", "bytes on the device"),
            ("pages", "pages", "pages of its pools"),
            ("pages_used", "pages_used", "pages in use"),
            ("slots", "slots", "live slots"),
        ):
            family = core.GaugeMetricFamily(
                f"kvjax_lane_{name}", f"Of a running batch: {what}", labels=["lane", "weights"]
            )
            lanes = collections.Counter[tuple[str, str]]()
            for batch in now.batches:
                lanes[batch.policy, batch.weights] += getattr(batch, field)
            for lane, value in lanes.items():
                family.add_metric(lane, value)
            yield family
        for name, what, seconds in (
            ("time_to_first_token", "From a request to its first token", now.time_to_first_token),
            ("inter_token_latency", "Between two tokens of a text", now.between_tokens),
            ("pause", "A running text waited for a prompt or a new batch", now.pauses),
            ("request_queue_time", "From a request to the beginning of its prompt", now.queue_time),
            ("e2e_request_latency", "From a request to its end, whatever the reason", now.total_time),
        ):
            yield _histogram(f"{name}_seconds", what, BUCKETS, seconds)
        for name, what, lengths in (
            ("prompt", "Tokens of the prompt of a text that ended", now.prompt_lengths),
            ("generation", "New tokens of a text that ended", now.completion_lengths),
        ):
            yield _histogram(f"request_{name}_tokens", what, LENGTHS, lengths)


def _histogram(name: str, what: str, bounds: Sequence[float], values: Seconds | Lengths) -> core.Metric:
    histogram = core.HistogramMetricFamily(f"kvjax_{name}", what)
    buckets = [(str(float(bound)), float(count)) for bound, count in zip(bounds, values.buckets)]
    histogram.add_metric([], [*buckets, ("+Inf", float(values.count))], values.sum)
    return histogram


# --- the cache of one request --------------------------------------------------------------------


@router.get("/v1/kv/{id}")
async def kv(request: Request, id: str, choice: int = 0) -> JSONResponse:
    """What the cache of a request with ``kv_watch`` holds now; after its end, what it held then."""
    service = service_of(request)
    tickets = service.watched.get(id)
    if tickets is None or not 0 <= choice < len(tickets):
        raise ApiError(
            404,
            f"There is no request {id!r} with choice {choice} to show. Send kv_watch=true with the request; "
            "only the newest of those are remembered.",
            code="not_watched",
        )
    ticket = tickets[choice]
    done = ticket.done  # before the cache is read: a client may take what it then gets as the last
    progress = await asyncio.to_thread(service.engine.progress, ticket)
    inspection = await asyncio.to_thread(service.engine.inspect, ticket)
    cache = None if inspection is None else _describe(service, inspection)
    counts = {"prompt_tokens": ticket.prompt_tokens, "read_tokens": progress.read}
    reply = {"id": id, "choice": choice, "done": done, "stage": progress.stage}
    return JSONResponse(reply | counts | {"cache": cache})


def _describe(service: Service, inspection: Inspection) -> dict[str, Any]:
    return {
        "seen": inspection.seen,
        "tokens": [service.token_text(int(token)) for token in inspection.tokens],
        "streams": [
            [{"ring": runs(h.ring), "pages": runs(h.pages), "codes": runs(h.codes)} for h in layer]
            for layer in inspection.heads
        ],
        "completed": list(inspection.completed),
        "bytes": {"live": inspection.live, "allocated": inspection.allocated, "full": inspection.full},
    }


def runs(positions: np.ndarray) -> list[int]:
    """Ascending positions as runs of neighbours: ``[first, count, first, count, …]``."""
    positions = np.asarray(positions, np.int64)
    if not len(positions):
        return []
    starts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
    counts = np.diff([*starts, len(positions)])
    return np.stack([positions[starts], counts], axis=1).ravel().tolist()
