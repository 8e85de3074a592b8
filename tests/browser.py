# SPDX-License-Identifier: Apache-2.0
"""A page in real headless Chromium, over its DevTools protocol: what it logs, asks the network for and shows."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The browser's path; `SPLITBENCH_CHROMIUM` names another one than those on PATH."""
    given = os.environ.get("SPLITBENCH_CHROMIUM")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Seen:
    """What a browser saw of a page.

    Attributes:
        problems: console errors and warnings, exceptions, failed loads.
        requests: addresses that are neither the page itself nor data inside it.
        answers: results of the expressions, in order.
        picture: PNG of the whole page.
    """

    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    picture: bytes = b""


def look(
    page: Path, *, width: int = 1280, height: int = 900, dark: bool = False, ask: tuple[str, ...] = ()
) -> Seen:
    """Open a page from disk and look at it.

    Args:
        page: an HTML file.
        width, height: of the window in CSS pixels; below 600 it is a phone's.
        dark: whether the reader prefers dark colours.
        ask: JavaScript expressions to evaluate when all is loaded.
    """
    browser = find_chromium()
    assert browser is not None
    folder = Path(tempfile.mkdtemp(prefix="sb-chromium-"))
    process = subprocess.Popen(
        [
            *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *(
                "--hide-scrollbars",
                "--no-first-run",
                "--disable-extensions",
                "--disable-background-networking",
            ),
            *("--remote-debugging-port=0", "--remote-debugging-address=127.0.0.1"),
            *(f"--user-data-dir={folder}", "about:blank"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(folder)},  # its own temporary folders outlive a SIGTERM
    )
    try:
        return asyncio.run(_look(folder, process, page, width, height, dark, ask))
    finally:
        process.terminate()
        process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


async def _look(
    folder: Path,
    process: subprocess.Popen[bytes],
    page: Path,
    width: int,
    height: int,
    dark: bool,
    ask: tuple[str, ...],
) -> Seen:
    port_file = folder / "DevToolsActivePort"
    deadline = time.monotonic() + 60
    while not (port_file.exists() and len(port_file.read_text().splitlines()) > 1):
        assert process.poll() is None, "the browser ended"
        assert time.monotonic() < deadline, "the browser does not start"
        await asyncio.sleep(0.05)
    port = int(port_file.read_text().splitlines()[0])
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
            target = next(entry for entry in await answer.json() if entry["type"] == "page")
        async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            return await _Tab(socket).visit(page, width, height, dark, ask)


class _Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.number = 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        await self.socket.send_str(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(await self.socket.receive_str(timeout=60))
            if message.get("id") == self.number:
                assert "error" not in message, message
                return dict(message["result"])
            self.events.append(message)

    async def until(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(json.loads(await self.socket.receive_str(timeout=60)))

    async def visit(self, page: Path, width: int, height: int, dark: bool, ask: tuple[str, ...]) -> Seen:
        for domain in ("Page", "Network", "Log", "Runtime"):
            await self.call(f"{domain}.enable")
        phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        address = page.resolve().as_uri()
        await self.call("Page.navigate", url=address)
        await self.until("Page.loadEventFired")
        seen = Seen()
        # Pictures inside the page are decoded when they are wanted: want them now.
        decode = "Promise.all([...document.images].map(i => i.decode().then(() => 1, e => String(e))))"
        for expression in (decode, *ask):
            result = await self.call(
                "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
            )
            assert "exceptionDetails" not in result, result
            seen.answers.append(result["result"].get("value"))
        seen.problems += [str(found) for found in seen.answers.pop(0) if found != 1]
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        seen.picture = base64.b64decode(shot["data"])
        for event in self.events:
            self._note(event, seen, address)
        return seen

    @staticmethod
    def _note(event: dict[str, Any], seen: Seen, address: str) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            seen.problems.append(str(params["exceptionDetails"]["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            seen.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            seen.problems.append(str(params["entry"]["text"]))
        elif method == "Network.requestWillBeSent":
            url = str(params["request"]["url"])
            if url != address and not url.startswith("data:"):
                seen.requests.append(url)
