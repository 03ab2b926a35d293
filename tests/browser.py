"""Controls a headless Chromium over its DevTools protocol; it reaches only this machine."""

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
    "--hide-scrollbars", "--remote-debugging-port=0",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded")


class Tab:
    """A browser page, with its errors and warnings and the URLs it requested."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        self.requested: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; record the events that arrive before its answer."""
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

    async def open(self, path: Path, width: int) -> None:
        """Open a file without a network, and wait until it reports that it is drawn."""
        await self.call("Network.enable")
        await self.call(
            "Network.emulateNetworkConditions",
            offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1,
        )  # fmt: skip
        await self.navigate(path.as_uri(), width)
        await self.evaluate(
            "new Promise(done => { const look = () => document.body && document.body.dataset.drawn"
            " ? done(true) : requestAnimationFrame(look); look(); })"
        )

    async def navigate(self, url: str, width: int, height: int = 900) -> None:
        """Open a page, recording what it requests and its complaints."""
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript; promises are awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def screenshot(self) -> bytes:
        """Return the whole page as PNG."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


@asynccontextmanager
async def opened_tab(profile: Path) -> AsyncIterator[Tab]:
    """Start Chromium with a profile of its own, yield a tab, and end Chromium."""
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
