"""Many clients at once against ``python -m kvjax.serve http``: what they were answered, what was left behind.

python tests/serving/load_clients.py --clients 64 --seconds 300 --out results/serve/load.json

Starts a server of its own on the embedded model. Every client asks again and again, each time under one of
six policies, streamed; one in ten goes away in the middle. Exits 1 unless nothing but 429 was refused, every
text was complete, every page came back and the server's memory stayed where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

POLICIES = (
    "full",
    "window(64) + sinks(4)",
    "snapkv(16) + uniform(0.25)",
    "knorm + uniform(64, every_step)",
    "int8(16)",
    "wg-kv",
)
PROMPT = "The old man walked slowly to the harbour, where the boats were lying in the morning light. "


def start(words: list[str]) -> tuple[subprocess.Popen, str]:
    """A server, and its address once it is ready."""
    command = [sys.executable, "-m", "kvjax.serve", "http", "--port", "0", *words]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    url = ""
    for line in child.stderr:
        url = url or json.loads(line).get("url", "")
        if json.loads(line)["event"] == "ready":
            # A full pipe would hold up the server.
            threading.Thread(target=collections.deque, args=(child.stderr, 0), daemon=True).start()
            return child, url
    raise RuntimeError("the server ended before it was ready")


async def client(url: str, number: int, end: float, ends: collections.Counter) -> None:
    """One of them, until the end."""
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=900) as http:  # on a machine that is busy, too
        while time.monotonic() < end:
            policy, leaves = draw.choice(POLICIES), draw.random() < 0.1
            body = {
                "prompt": PROMPT * draw.randint(1, 8),
                "max_tokens": draw.randint(8, 48),
                "temperature": 1,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
                "kv_policy": policy,
            }
            try:
                ends[await one(http, body, leaves)] += 1
            except httpx.HTTPError as error:
                ends[f"broken: {type(error).__name__}"] += 1
            if ends["429"] and draw.random() < 0.5:
                await asyncio.sleep(0.5)


async def one(http: httpx.AsyncClient, body: dict[str, Any], leaves: bool) -> str:
    """How one request ended."""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                await asyncio.sleep(random.uniform(0.5, 1.5))
            return str(answer.status_code)
        last: dict[str, Any] = {}
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                whole = last.get("usage") and last["usage"]["completion_tokens"] == body["max_tokens"]
                return "complete" if whole else f"broken: {json.dumps(last.get('error'))}"
            if line:
                last = json.loads(line.removeprefix("data: "))
                if leaves:
                    return "left"
    return "broken: no end"


def gauge(text: str, name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(float(x) for x in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def resident(pid: int) -> int:
    """Bytes of the process in memory (Linux)."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match
    return int(match[1]) * 1024


async def watch(url: str, pid: int, end: float, seen: list[dict[str, float]]) -> None:
    """Looks at the server every five seconds."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        begun = time.monotonic()
        while time.monotonic() < end:
            text = (await http.get("/metrics")).text
            now = {
                "second": round(time.monotonic() - begun, 1),
                "resident": resident(pid),
                "running": gauge(text, "kvjax_num_requests_running"),
                "pages_used": gauge(text, "kvjax_lane_pages_used"),
                "allocated": gauge(text, "kvjax_lane_allocated_bytes"),
            }
            seen.append(now)
            await asyncio.sleep(5)


async def load(url: str, pid: int, clients: int, seconds: float) -> dict[str, Any]:
    """The whole run."""
    ends: collections.Counter[str] = collections.Counter()
    seen: list[dict[str, float]] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        for policy in POLICIES:  # every lane is compiled once, and has its memory
            body = {"prompt": PROMPT * 8, "max_tokens": 48, "ignore_eos": True, "kv_policy": policy}
            (await http.post("/v1/completions", json=body)).raise_for_status()
        end = time.monotonic() + seconds
        await asyncio.gather(
            watch(url, pid, end, seen), *(client(url, number, end, ends) for number in range(clients))
        )
        for _ in range(100):
            text = (await http.get("/metrics")).text
            if not gauge(text, "kvjax_num_requests_running") and not gauge(text, "kvjax_lane_pages_used"):
                break
            await asyncio.sleep(0.2)
    return {
        "clients": clients,
        "seconds": seconds,
        "policies": POLICIES,
        "ends": dict(ends),
        "generated_tokens": gauge(text, "kvjax_generation_tokens_total"),
        "pages_used_at_the_end": gauge(text, "kvjax_lane_pages_used"),
        "resident_at_the_end": resident(pid),
        "seen": seen,
    }


def judged(run: dict[str, Any]) -> list[str]:
    """What is wrong with it."""
    wrong = [f"{n} x {end}" for end, n in run["ends"].items() if end not in ("complete", "left", "429")]
    if run["pages_used_at_the_end"]:
        wrong.append(f"{run['pages_used_at_the_end']:.0f} pages were not given back")
    third = len(run["seen"]) // 3
    early, late = (
        max(x["resident"] for x in run["seen"][a:b]) for a, b in ((third, 2 * third), (-third, None))
    )
    if late > 1.05 * early:
        wrong.append(f"memory grew from {early / 2**20:.0f} to {late / 2**20:.0f} MiB")
    return wrong


def main() -> int:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*", help="more words for the server's command line")
    arguments = parser.parse_args()
    child, url = start(["--context", "1024", "--log", "json", *arguments.words])
    # The log goes on; a full pipe would stop the server.
    drain = subprocess.Popen(["cat"], stdin=child.stderr, stdout=subprocess.DEVNULL)
    try:
        run = asyncio.run(load(url, child.pid, arguments.clients, arguments.seconds))
        child.terminate()
        code = child.wait(90)
    finally:
        child.kill()
        drain.wait()
    run["exit_code"], run["wrong"] = code, judged(run)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(run, indent=1) + "\n")
    print(json.dumps({k: v for k, v in run.items() if k != "seen"}, indent=1))
    return 1 if run["wrong"] or code else 0


if __name__ == "__main__":
    sys.exit(main())
