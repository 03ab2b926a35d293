"""Requests and answers as bytes, for what HTTP clients hide."""

import asyncio

import h11

LOCALHOST = "127.0.0.1"
DEADLINE_S = 30


def head(
    method: str = "GET",
    path: str = "/version",
    version: str = "1.1",
    *lines: bytes,
    length: int = 0,
) -> bytes:
    """Return the head of a request that asks the server to close the connection."""
    start = f"{method} {path} HTTP/{version}\r\nHost: x\r\nConnection: close\r\n".encode()
    told = [b"Content-Type: application/json", b"Content-Length: %d" % length] if length else []
    return start + b"".join(line + b"\r\n" for line in (*lines, *told)) + b"\r\n"


async def exchange(port: int, request: bytes, address: str = LOCALHOST) -> bytes:
    """Send bytes and return all bytes up to the server's end of the connection."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(address, port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer


def parsed(answer: bytes, method: str = "GET") -> tuple[h11.Response, bytes]:
    """Return an answer and its body as a client reads them; the connection ends with them."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(answer)
    client.receive_data(b"")
    response = client.next_event()
    assert isinstance(response, h11.Response), response
    body = b""
    while isinstance(event := client.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    return response, body


def values(response: h11.Response, name: bytes) -> list[bytes]:
    return [value for key, value in response.headers if key == name]
