"""A headless Chromium driven through its own protocol, over two pipes: nothing but the browser is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TURN = """
import os, sys
for end, far in zip(sys.argv[1:3], (90, 91)):
    os.dup2(int(end), far)
os.dup2(90, 3)
os.dup2(91, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""The protocol listens on 3 and speaks on 4. A process of its own puts the pipes there: between fork and
exec nothing of ours may run, since JAX has threads."""

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def find_browser() -> str | None:
    """The browser of this machine; KVJAX_CHROMIUM names another."""
    return os.environ.get("KVJAX_CHROMIUM") or next((x for n in NAMES if (x := shutil.which(n))), None)


class Tab:
    """A page in the browser.

    Attributes:
      errors: what went wrong in it, with its policy about what it may load.
      requested: addresses of its requests.
    """

    def __init__(self, write: Any, read: Any) -> None:
        self._write, self._read = write, read
        self._id, self._session = 0, ""
        self.errors: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """One command of the protocol and its result; what the page complains of is kept."""
        self._id += 1
        session = {"sessionId": self._session} if self._session else {}
        command = {"id": self._id, "method": method, "params": params} | session
        self._write.write(json.dumps(command).encode() + b"\0")
        self._write.flush()
        while True:
            message = self._message()
            if message.get("id") == self._id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._hear(message)

    def _message(self) -> Any:
        data = bytearray()
        while (byte := self._read.read(1)) not in (b"\0", b""):
            data += byte
        return json.loads(bytes(data))

    def _hear(self, message: Any) -> None:
        what, params = message.get("method"), message.get("params", {})
        if what == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        if what == "Runtime.exceptionThrown":
            self.errors.append(
                params["exceptionDetails"].get("exception", {}).get("description", "exception")
            )
        if what == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} ({params['entry'].get('url')})")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        evaluated = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in evaluated:
            raise RuntimeError(evaluated["exceptionDetails"]["exception"].get("description"))
        return evaluated["result"].get("value")

    def until(self, script: str, seconds: float = 60) -> Any:
        """Waits for an expression to be true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                page_text = self.run("document.body.innerText")
                raise TimeoutError(f"{script} in {seconds} s; the page says: {page_text}")
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        """Goes there."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState == 'complete' && location.href != 'about:blank'")

    def key(self, name: str, code: int, modifiers: int = 0, text: str = "") -> None:
        """Presses a key."""
        how = {"key": name, "windowsVirtualKeyCode": code, "modifiers": modifiers, "code": name}
        self.call("Input.dispatchKeyEvent", type="keyDown", **how | ({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **how)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Of the window, and its colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def screenshot(self, file: Path | None = None) -> bytes:
        """The whole page as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        content = base64.b64decode(shot["data"])
        if file is not None:
            file.write_bytes(content)
        return content


@contextlib.contextmanager
def tab(browser: str, profile: Path) -> Iterator[Tab]:
    """A browser with one page; it ends with the block."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    words = [browser, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    child = subprocess.Popen(
        [sys.executable, "-c", TURN, str(to_read), str(from_write), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(to_read, from_write),
    )
    os.close(to_read)
    os.close(from_write)
    try:
        with os.fdopen(to_write, "wb") as write, os.fdopen(from_read, "rb") as read:
            yield Tab(write, read)
    finally:
        child.kill()
        child.wait()
