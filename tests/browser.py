"""A headless Chromium, spoken to over its DevTools protocol; it can reach nothing else."""

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DEADLINE_S = 60
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-port=0", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded")


class Tab:
    """A page in the browser, and what it complained of or asked the network for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        self.requested: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and note the events that come before its answer."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    result: dict[str, Any] = message["result"]
                    return result
                self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        is_error = params.get("type") in ("error", "warning", "assert")
        if method in COMPLAINTS or (method == "Runtime.consoleAPICalled" and is_error):
            self.complaints.append(str(params))
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    async def open(self, path: Path, width: int, height: int = 900) -> None:
        """Open a file with the network switched off, and wait until it says that it is drawn."""
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Network.emulateNetworkConditions",
            offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1,
        )  # fmt: skip
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        await self.call("Page.navigate", url=path.as_uri())
        await self.evaluate(
            "new Promise(done => { const look = () => document.body && document.body.dataset.drawn"
            " ? done(true) : requestAnimationFrame(look); look(); })"
        )

    async def evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript; promises are awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def screenshot(self) -> bytes:
        """Draw the whole page as PNG."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


@asynccontextmanager
async def opened_tab(profile: Path) -> AsyncIterator[Tab]:
    """Start Chromium with a profile of its own, hand out a tab, and end it."""
    assert CHROMIUM, "chromium is not installed"
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        port = await asyncio.wait_for(_port(process), DEADLINE_S)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/json") as answer,
        ):
            (page,) = [p for p in await answer.json() if p["type"] == "page"]
            url = page["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await process.communicate()


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr
    async for line in process.stderr:
        if line.startswith(b"DevTools listening on"):
            return int(line.split(b":")[2].split(b"/")[0])
    raise AssertionError("chromium ended before it listened")
