"""The lines that say that a server is ready: where it is, and a request to try.

`raystream serve` shows them itself; under `serve run` the ingress does, which `serve_app.app` gives
the announcement.
"""

import http.client
import json
import os
import shlex
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from deployments.contract.model_spec import ModelConfig
from deployments.plan.checkpoint import CONFIG_FILE, lacks_chat_template, read_json
from serve_app.commands.run.start_screen import StartScreen
from serve_app.commands.server_environment import TOKEN_FILE
from serve_app.gpu_shares import to_spec

QUESTION: Final = "What does os.path.join do?"
BEGINNING: Final = "The capital of France is"
"""What a model without a chat template goes on with."""
TEXTS: Final = ("os.path.join joins parts of a path.", "json.dumps writes JSON.")
NO_HAPROXY: Final = (
    "Warning: HAProxy does not stand in front, which costs tokens per second, and some lost "
    "connections go unnoticed. `raystream serve FILE` starts it; before `serve run`: "
    "set -a; . ./serve.env; export RAY_SERVE_HAPROXY_BINARY_PATH=$(command -v raystream-haproxy)"
)
POLL_S: Final = 0.5
ANSWER_TIMEOUT_S: Final = 30


class StartFailedError(Exception):
    """Serve gave the application up; the text says why."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a user needs to know about a server that is ready.

    Attributes:
        url: Where the application answers, without a slash at the end.
        models: The models of the configuration.
        needs_key: Whether requests need a key.
        dashboard_url: Ray's dashboard; None if it does not run.
        logs: The folder of Serve's log files.
        has_proxy: Whether programs such as curl would ask a proxy for the server.
        has_haproxy: Whether HAProxy stands in front.
        is_driven: Whether Ctrl-C where this is shown stops the server.
    """

    url: str
    models: Sequence[ModelConfig]
    needs_key: bool
    dashboard_url: str | None
    logs: str
    has_proxy: bool = False
    has_haproxy: bool = True
    is_driven: bool = True

    def is_ready(self) -> bool:
        """Return whether the server answers, with every model loaded."""
        return is_ready(self.url)

    def text(self, after_s: float) -> str:
        """Return the lines; `after_s` is how long the start took, in seconds."""
        return "\n".join(
            [
                "",
                f"raystream is ready after {after_s:.0f} s: {self.url}",
                "Models: " + ", ".join(f"{model.id} ({model.task})" for model in self.models),
                "Try:" + (" (with one of your keys in place of KEY)" if self.needs_key else ""),
                self.request(),
                *self._pages(),
                f"Logs, with a line of JSON for each request: {self.logs}",
                *([] if self.has_haproxy else [NO_HAPROXY]),
                *(["Ctrl-C stops the server."] if self.is_driven else []),
                "",
            ]
        )

    def request(self) -> str:
        """Return a curl command that asks the first model, or the first that generates."""
        body: dict[str, object]
        generator = next((model for model in self.models if model.task == "generate"), None)
        if generator is None:
            first = self.models[0]
            if _ranks(first):
                body = {"model": first.id, "query": QUESTION, "documents": list(TEXTS)}
                return self._curl("", "/v1/rerank", body)
            path = "/v1/classify" if first.task == "classify" else "/v1/embeddings"
            return self._curl("", path, {"model": first.id, "input": QUESTION})
        if _is_base(generator):
            body = {"model": generator.id, "stream": True, "prompt": BEGINNING, "max_tokens": 32}
            return self._curl("-N ", "/v1/completions", body)
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": generator.id, "stream": True, "messages": messages}
        return self._curl("-N ", "/v1/chat/completions", body)

    def _curl(self, options: str, path: str, body: dict[str, object]) -> str:
        # The certificate is hardly ever for this machine's own address, such as 127.0.0.1.
        options += "-k " if self.url.startswith("https:") else ""
        options += "--noproxy '*' " if self.has_proxy else ""
        key = "    -H 'Authorization: Bearer KEY' \\\n" if self.needs_key else ""
        return (
            f"  curl {options}{self.url}{path} -H 'Content-Type: application/json' \\\n"
            f"{key}    -d {shlex.quote(json.dumps(body))}"
        )

    def _pages(self) -> list[str]:
        pages = [f"The page to chat, search and watch: {self.url}/"]
        if not self.needs_key:  # a browser has no key to send there
            pages.append(f"The API's description: {self.url}/docs")
        if self.dashboard_url is not None:
            pages.append(
                f"Ray's dashboard: {self.dashboard_url} "
                f"(`{_print_token()}` prints the token that it asks for)"
            )
        return pages


def _print_token() -> str:
    """Return the command that prints Ray's token, wherever the shell is."""
    program = Path(sys.executable).with_name("ray")
    file = os.environ.get(TOKEN_FILE)
    return f"{f'{TOKEN_FILE}={file} ' if file else ''}{program} get-auth-token"


def _is_base(model: ModelConfig) -> bool:
    """Return whether a model generates and its files, which are loaded now, have no template."""
    return lacks_chat_template(to_spec(model, 0).source, model.revision)


def _ranks(model: ModelConfig) -> bool:
    """Return whether a classifier has one label: it says how well two texts fit."""
    config = read_json(to_spec(model, 0).source, model.revision, CONFIG_FILE)
    return model.task == "classify" and len(config.get("id2label") or (None, None)) == 1


def local_url(host: str, port: int, route_prefix: str, *, has_tls: bool = False) -> str:
    """Return the address at which this machine reaches an application."""
    with suppress(ValueError):  # a name
        address = ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    authority = f"[{host}]" if ":" in host else host
    scheme = "https" if has_tls else "http"
    return f"{scheme}://{authority}:{port}{route_prefix.rstrip('/')}"


def is_ready(url: str) -> bool:
    """Return whether every model of this machine's own server is loaded, as `GET /ready` says."""
    parts = urlsplit(url)
    connection = _connection(parts.scheme, parts.hostname or "", parts.port)
    try:
        connection.request("GET", f"{parts.path}/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _connection(scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=ANSWER_TIMEOUT_S)
    context = ssl.create_default_context()
    # The certificate is for the name by which clients know the server, and its issuer may be known
    # to them alone. We ask our own server on this machine, send no secret and trust nothing in the
    # answer but its status, so there is nothing that a check would protect.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=ANSWER_TIMEOUT_S, context=context)


def wait_until_ready(
    announcement: Announcement,
    pending: Callable[[], Sequence[str]],
    screen: StartScreen,
    *,
    poll_s: float = POLL_S,
) -> None:
    """Wait until a server is ready; the screen shows what is awaited.

    There is no deadline: a model may have to be downloaded first.

    Args:
        announcement: Names the server.
        pending: Returns what has not started yet, and raises StartFailedError if it never will.
            While it returns something, the server is not asked.
        screen: Shows what is awaited.
        poll_s: Seconds between two questions.

    Raises:
        StartFailedError: The server will not get ready.
    """
    while (awaited := pending()) or not announcement.is_ready():
        screen.awaited = awaited or ("GET /ready",)
        time.sleep(poll_s)
