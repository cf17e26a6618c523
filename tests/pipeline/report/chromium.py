"""A headless Chromium for tests, driven by the DevTools protocol over two pipes: no package, no port."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
# The browser reads commands from descriptor 3 and writes to 4.
TRAMPOLINE = (
    "import fcntl, os, sys; read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]); "
    "os.dup2(read, 3); os.dup2(write, 4); os.execvp(sys.argv[3], sys.argv[3:])"
)


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Page:
    """One tab. Everything the browser reports on it is kept in `events`."""

    def __init__(self, browser: str, profile: Path) -> None:
        ours_read, theirs_write = os.pipe()
        theirs_read, ours_write = os.pipe()
        trampoline = [sys.executable, "-c", TRAMPOLINE, str(theirs_read), str(theirs_write)]
        self.process = subprocess.Popen(
            [*trampoline, browser, *OPTIONS, f"--user-data-dir={profile}"],
            pass_fds=(theirs_read, theirs_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_read)
        os.close(theirs_write)
        self.output = os.fdopen(ours_read, "rb", buffering=0)
        self.input = os.fdopen(ours_write, "wb", buffering=0)
        self.numbers, self.waiting = itertools.count(1), b""
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command; what else arrives meanwhile goes to `events`."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        self.input.write(json.dumps(message).encode() + b"\0")
        while (received := self._receive()).get("id") != number:
            self.events.append(received)
        if "error" in received:
            raise RuntimeError(f"{method}: {received['error']}")
        return received["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.waiting:
            chunk = self.output.read(1 << 16)
            if not chunk:
                raise RuntimeError("the browser ended")
            self.waiting += chunk
        message, _, self.waiting = self.waiting.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int, height: int, scheme: str = "light", media: str = "screen") -> None:
        """Loads `path` and waits for it; `scheme` is what the reader prefers, light or dark."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def point_at(self, selector: str) -> tuple[float, float]:
        """The middle of the first such element, scrolled into view."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({found}.getBoundingClientRect())"
        )
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        return box[0], box[1]

    def click(self, selector: str) -> None:
        """A real click at that place: what lies over the element would get it."""
        x, y = self.point_at(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])

    def complaints(self) -> list[str]:
        """Errors of scripts, and what the page's security policy refused."""
        wanted = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in wanted]

    def requested(self) -> list[str]:
        """Every address the page asked for but itself and data inside it."""
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith(("file:", "data:"))]

    def close(self) -> None:
        with suppress(OSError, RuntimeError):
            self.session = None
            self.send("Browser.close")
        deadline = time.monotonic() + 10
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.input.close()
        self.output.close()
