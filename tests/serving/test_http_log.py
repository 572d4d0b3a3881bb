"""The log: whoever reads it may stop, and nobody is held up."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("fastapi", reason="pip install 'kvjax[serve]'")

from kvjax.serve.http.log import Log


def lines(content: bytes) -> list[dict]:
    return [json.loads(line) for line in content.splitlines()]


def test_lines_come_in_the_order_of_their_events():
    written: list[bytes] = []
    log = Log(written.append)
    for number in range(100):
        log("event", number=number)
    assert log.flush(10)
    assert [line["number"] for line in lines(b"".join(written))] == list(range(100))


def test_a_reader_who_stops_holds_up_nobody_and_is_told_what_he_missed():
    free, written = threading.Event(), []

    def write(line: bytes) -> None:
        assert free.wait(60)
        written.append(line)

    log, begun = Log(write, size=10), time.monotonic()
    for number in range(1000):
        log("event", number=number)
    assert time.monotonic() - begun < 10
    assert not log.flush(0.1)
    free.set()
    while not log.flush(10):
        time.sleep(0.01)
    log("event", number=1000)
    assert log.flush(10)
    number = 0
    for line in lines(b"".join(written)):
        if line["event"] == "event":
            assert line["number"] == number
        number += line.get("lost", 1)
    assert number == 1001
    assert len(written) < 30


def test_a_stream_that_breaks_breaks_nothing_else():
    written: list[bytes] = []

    def write(line: bytes) -> None:
        if b"first" in line:
            raise BrokenPipeError
        written.append(line)

    log = Log(write)
    log("first")
    log("second")
    assert log.flush(10)
    assert [line["event"] for line in lines(b"".join(written))] == ["second"]


def test_warnings_of_libraries_go_into_the_log_without_their_values():
    written: list[bytes] = []
    log = Log(written.append)
    with log.library_warnings():
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request: %s", "secret")
    assert log.flush(10)
    (line,) = lines(b"".join(written))
    assert (line["event"], line["logger"]) == ("warning", "uvicorn.error")
    assert line["text"] == "Invalid HTTP request: %s"


FULL = """
from kvjax.serve.http.log import stderr_log
log = stderr_log()
for number in range(3000):
    log("event", text="x" * 100)
print(log.flush(0.2))
"""


def test_a_process_whose_log_nobody_reads_ends():
    read, write = os.pipe()
    try:
        process = subprocess.run(
            [sys.executable, "-c", FULL], stderr=write, stdout=subprocess.PIPE, timeout=60, text=True
        )
    finally:
        os.close(read)
        os.close(write)
    assert (process.returncode, process.stdout) == (0, "False\n")
