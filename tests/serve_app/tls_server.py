"""A TLS server on 127.0.0.1 with a name of our choice, and a resolver that points to it."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiohttp.abc import AbstractResolver, ResolveResult
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class FixedResolver(AbstractResolver):
    """Resolves every name to these addresses, and records the names."""

    def __init__(self, port: int, addresses: Sequence[str] = ("127.0.0.1",)) -> None:
        self.asked: list[str] = []
        self._port = port
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=self._port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        pass


@dataclass
class TlsServer:
    """The server's port, and what it received."""

    port: int = 0
    heads: list[bytes] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)


def certify(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the files of a self-signed certificate for a host's name, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


@asynccontextmanager
async def tls_server(
    certificate: Path, key: Path, answers: Callable[[str], bytes | None]
) -> AsyncIterator[TlsServer]:
    """Serve complete answers, head and body, by path; None never answers."""
    server = TlsServer()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.sni_callback = lambda _socket, name, _context: server.names.append(name)
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            server.heads.append(head)
            text = answers(head.split(b" ")[1].decode())
            if text is None:
                await ended.wait()
            else:
                writer.write(text)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has disconnected, as some tests intend
        finally:
            writer.transport.abort()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    server.port = listener.sockets[0].getsockname()[1]
    async with listener:
        try:
            yield server
        finally:
            ended.set()
