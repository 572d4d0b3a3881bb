"""``GET /metrics``: what the engine counts, as Prometheus reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

import kvjax
from kvjax.engine import BUCKETS, BatchMetrics, EngineDead, Metrics, Seconds
from kvjax.serve.http.service import Service, of

router = APIRouter()


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """In Prometheus' text format."""
    text = await asyncio.to_thread(exposition, of(request))
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def exposition(service: Service) -> bytes:
    """All of it; of a dead engine only that it is dead."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(service))
    return generate_latest(registry)


class _Collector:
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """One snapshot."""
        service = self._service
        about = {
            "version": kvjax.__version__,
            "model": service.name,
            "policy": repr(service.policies.default),
        }
        yield InfoMetricFamily("kvjax", "What is served", value=about)
        try:
            now = service.engine.metrics()
        except EngineDead:
            yield GaugeMetricFamily("kvjax_engine_up", "1 while the engine lives", value=0)
            return
        yield GaugeMetricFamily("kvjax_engine_up", "1 while the engine lives", value=1)
        yield from _gauges(now)
        yield from _counters(now)
        yield from _batches(now.batches)
        for name, what, seconds in (
            ("time_to_first_token", "From a request to its first token", now.time_to_first_token),
            ("inter_token_latency", "Between two tokens of a text", now.between_tokens),
            ("pause", "A running text waited for a prompt or a new batch", now.pauses),
        ):
            yield _histogram(f"kvjax_{name}_seconds", what, seconds)


def _gauges(now: Metrics) -> Iterator[Metric]:
    for name, what, value in (
        ("num_requests_waiting", "Requests that wait", now.queued),
        ("num_requests_reading", "Requests whose prompt is being read", now.reading),
        ("num_requests_running", "Texts that are being written", now.running),
        ("kv_memory_bytes", "Most bytes of all caches", now.kv_memory),
        ("kv_allocated_bytes", "Bytes of all caches on the device", now.kv_allocated),
        ("kv_kept_ratio", "Kept of what ended texts were fed, over layers and heads", now.admitted_ratio),
    ):
        yield GaugeMetricFamily(f"kvjax_{name}", what, value=value)


def _counters(now: Metrics) -> Iterator[Metric]:
    for name, what, value in (
        ("prompt_tokens", "Tokens read from prompts", now.prompt_tokens),
        ("cached_prompt_tokens", "Prompt tokens that did not have to be read", now.cached_tokens),
        ("generation_tokens", "New tokens", now.completion_tokens),
        ("preemptions", "Rows put back to wait", now.preempted),
        ("kv_tokens_seen", "(token, layer, KV head) triples fed to texts that ended", now.tokens_seen),
        ("kv_tokens_kept", "Of these, those still held at the end", now.tokens_kept),
        ("kv_tokens_evicted", "Of these, those rejected or evicted", now.tokens_evicted),
    ):
        yield CounterMetricFamily(f"kvjax_{name}", what, value=value)
    ended = CounterMetricFamily("kvjax_requests", "Texts that ended", labels=["reason"])
    for reason, count in sorted(now.requests.items()):
        ended.add_metric([reason], count)
    yield ended


def _batches(batches: tuple[BatchMetrics, ...]) -> Iterator[Metric]:
    fields = {
        "rows": "Texts that are being written",
        "max_rows": "Most rows",
        "live": "Bytes of live slots",
        "allocated": "Bytes on the device",
        "pages": "Pages of its pools",
        "pages_used": "Pages that heads own",
        "slots": "Live slots of all heads",
    }
    for field, what in fields.items():
        unit = "_bytes" if field in ("live", "allocated") else ""
        name = f"kvjax_lane_{'places' if field == 'max_rows' else field}{unit}"
        family = GaugeMetricFamily(name, f"Of a running batch: {what.lower()}", labels=["lane"])
        for batch in batches:
            family.add_metric([batch.policy], getattr(batch, field))
        yield family


def _histogram(name: str, what: str, seconds: Seconds) -> Metric:
    family = HistogramMetricFamily(name, what)
    buckets = [(str(bound), float(count)) for bound, count in zip(BUCKETS, seconds.buckets)]
    family.add_metric([], [*buckets, ("+Inf", float(seconds.count))], seconds.sum)
    return family
