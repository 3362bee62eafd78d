"""A real browser without a window, spoken to over a pair of pipes (Chrome's DevTools protocol)."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page. Errors that its script raised, and what it tried to load, are kept."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out = to_browser
        self._in = from_browser
        self._rest = b""
        self._number = 0
        self._session = ""
        self._loaded = False
        self.errors: list[str] = []
        self.asked_for: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Returns when all that it loads at first is there."""
        self._loaded = False
        self._call("Page.navigate", url=url)
        end = time.monotonic() + ANSWER_SECONDS
        while not self._loaded:
            self._note(self._next(end))

    def value(self, script: str) -> Any:
        """What the expression is worth; a promise is waited for."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until the expression is true, looked at whenever the page is drawn."""
        self.value(
            f"new Promise(done => {{ const look = () => ({script}) ? done(true) : setTimeout(look, 50); look(); }})"
        )

    def picture(self) -> bytes:
        """The whole page as PNG."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _call(self, method: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + ANSWER_SECONDS
        while True:
            heard = self._next(end)
            if heard.get("id") == self._number:
                assert "error" not in heard, f"{method}: {heard['error']}"
                answer: dict[str, Any] = heard["result"]
                return answer
            self._note(heard)

    def _note(self, heard: dict[str, Any]) -> None:
        what, given = heard.get("method"), heard.get("params", {})
        if what == "Page.loadEventFired":
            self._loaded = True
        elif what == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(given["exceptionDetails"]))
        elif what == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(given["entry"]["text"])
        elif what == "Network.requestWillBeSent":
            self.asked_for.append(given["request"]["url"])

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser did not answer within {ANSWER_SECONDS:g} s"
            more = os.read(self._in, 1 << 16)
            assert more, "the browser ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        heard: dict[str, Any] = json.loads(line)
        return heard


@contextmanager
def browser_page(program: str) -> Iterator[Page]:
    """A page of a browser of its own, which ends with it."""
    with tempfile.TemporaryDirectory(prefix="kv-browser-", ignore_cleanup_errors=True) as profile:
        own_in, to_browser = os.pipe()
        from_browser, own_out = os.pipe()
        # The browser reads its descriptor 3 and writes to its 4; bash puts them there, from where neither is in the way.
        their_in, their_out = (fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (own_in, own_out))
        words = [program, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank"]
        with (Path(profile) / "log").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "bash", *words],
                pass_fds=(their_in, their_out),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for each in (own_in, own_out, their_in, their_out):
            os.close(each)
        try:
            yield Page(to_browser, from_browser)
        finally:
            os.close(to_browser)
            os.close(from_browser)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
