"""A server in the shape of Hugging Face's hub that serves a folder as one repository, slowly.

Run by itself it prints its address, for HF_ENDPOINT:

    python -m tests.hub_server FOLDER BYTES_PER_S
"""

import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.threaded_server import answering

COMMIT = "a" * 40
CHUNK_BYTES = 16 * 1024
RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class HubServer(ThreadingHTTPServer):
    """Serves every repository's id from one folder."""

    daemon_threads = True

    def __init__(self, folder: Path, bytes_per_s: float = float("inf")) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = folder
        self.bytes_per_s = bytes_per_s
        self.downloaded: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def files(self) -> dict[str, Path]:
        return {
            path.relative_to(self.folder).as_posix(): path
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }


class Answer(BaseHTTPRequestHandler):
    server: HubServer

    def do_HEAD(self) -> None:  # http.server's name
        self.do_GET()

    def do_GET(self) -> None:  # http.server's name
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            listed = [
                {"type": "file", "path": name, "oid": _etag(file), "size": file.stat().st_size}
                for name, file in self.server.files.items()
            ]
            if "/tree/" in path:
                self._json(listed)
            else:
                siblings = [{"rfilename": each["path"]} for each in listed]
                self._json({"id": "org/model", "sha": COMMIT, "siblings": siblings})
            return
        _, _, name = path.partition("/resolve/")
        self._file(name.partition("/")[2])

    def _json(self, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _file(self, name: str) -> None:
        file = self.server.files.get(name)
        part = RANGE.fullmatch(self.headers.get("Range", ""))
        self.send_response(404 if file is None else 206 if part else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        if file is None:
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes()
        if part:  # of headers, to learn how many weights there are
            content = content[int(part[1]) : int(part[2] or len(content)) + 1]
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.downloaded.append(name)
        for start in range(0, len(content), CHUNK_BYTES):
            chunk = content[start : start + CHUNK_BYTES]
            self.wfile.write(chunk)
            time.sleep(len(chunk) / self.server.bytes_per_s)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def serving_hub(folder: Path) -> Iterator[HubServer]:
    """Serve a folder as a repository while the context is open."""
    server = HubServer(folder)
    with answering(server):
        yield server


if __name__ == "__main__":
    hub = HubServer(Path(sys.argv[1]), float(sys.argv[2]))
    sys.stdout.write(f"{hub.url}\n")
    sys.stdout.flush()
    hub.serve_forever()
