"""A headless Chromium that a test drives over its debugging pipe; no driver and no network is needed."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """One page of the browser, by the Chrome DevTools protocol: JSON objects, each ended by a NUL."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = os.fdopen(read, "rb", 0), os.fdopen(write, "wb", 0)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.errors: list[str] = []
        self.requested: list[str] = []

    def open(self, url: str, *, width: int, height: int, dark: bool) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def close(self) -> None:
        self._read.close()
        self._write.close()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression: str, *, timeout_s: float = 60.0) -> Any:
        """The expression's value, once it is true."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.1)
        raise AssertionError(
            f"not within {timeout_s:.0f} s: {expression}; the page: {self.evaluate('document.body.innerText')[:500]}"
        )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, code: int, text: str = "", modifiers: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=modifiers,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def screenshot(self, file: Path) -> None:
        file.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        self._write.write(
            json.dumps({"id": number, "method": method, "params": parameters, **session}).encode() + b"\0"
        )
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = self._read.read(2**16)
            assert piece, "Chromium ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(f"{parameters['entry'].get('url')}: {parameters['entry']['text']}")
        elif event["method"] == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Tab]:
    """A tab; the browser is gone when the block ends."""
    to_browser, from_browser = os.pipe(), os.pipe()

    pipes = (to_browser[0], from_browser[1])
    command = [
        # Chromium reads from 3 and writes to 4. A shell moves them: a function before exec would make Python fork.
        *("bash", "-c", f'exec "$@" 3<&{pipes[0]} 4>&{pipes[1]}', "bash"),
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
        "--disable-background-networking",
        "about:blank",
    ]
    process = subprocess.Popen(command, pass_fds=pipes, stderr=subprocess.DEVNULL)
    for end in pipes:
        os.close(end)
    tab = Tab(from_browser[0], to_browser[1])
    try:
        yield tab
    finally:
        tab.close()
        process.terminate()
        process.wait(10)
