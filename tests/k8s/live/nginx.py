"""A real nginx with the directives that ingress-nginx makes of our Ingress's annotations.

Source: https://kubernetes.github.io/ingress-nginx/user-guide/nginx-configuration/annotations/
"""

import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from serve_app.commands.server_environment import free_ports
from tests.k8s.manifests import ROOT
from tests.programs import path_of
from tests.ray.serve_run import wait_until
from tests.serve_app.tls_server import certify

COMPONENT = ROOT / "k8s" / "components" / "ingress-nginx" / "ingress.yaml"
PREFIX = "nginx.ingress.kubernetes.io/"
PROGRAM = path_of("nginx")
LOCALHOST = "127.0.0.1"
DEADLINE_S = 30

# The directive for each annotation, and the unit that the controller adds. A test that meets
# another annotation fails.
DIRECTIVES: Final[Mapping[str, tuple[str, str]]] = {
    "proxy-buffering": ("proxy_buffering", ""),
    "proxy-read-timeout": ("proxy_read_timeout", "s"),
    "proxy-send-timeout": ("proxy_send_timeout", "s"),
    "proxy-connect-timeout": ("proxy_connect_timeout", "s"),
    "proxy-http-version": ("proxy_http_version", ""),
    "proxy-body-size": ("client_max_body_size", ""),
    "proxy-next-upstream": ("proxy_next_upstream", ""),
    "proxy-next-upstream-tries": ("proxy_next_upstream_tries", ""),
}


def component_directives() -> dict[str, str]:
    """Return nginx's directives for the annotations of k8s/components/ingress-nginx."""
    annotations = yaml.safe_load(COMPONENT.read_text(encoding="utf-8"))["metadata"]["annotations"]
    directives = {}
    for name, value in annotations.items():
        directive, unit = DIRECTIVES[name.removeprefix(PREFIX)]
        directives[directive] = f"{value}{unit}"
    return directives


@dataclass(frozen=True, slots=True)
class Nginx:
    """A running nginx."""

    port: int  # for HTTP/1.1
    tls_port: int  # for HTTP/2, and HTTP/1.1 for clients that don't ask for it
    log: Path  # its errors


@contextmanager
def nginx(folder: Path, ports: Sequence[int], directives: Mapping[str, str]) -> Iterator[Nginx]:
    """Run an nginx in front of servers on this machine, asked in turn, until the block ends."""
    assert PROGRAM is not None
    folder.mkdir(exist_ok=True)
    port, tls_port = free_ports(2)
    running = Nginx(port, tls_port, folder / "error.log")
    certificate, key = certify(folder, "raystream.example.com")
    path = folder / "nginx.conf"
    path.write_text(_configuration(folder, running, ports, directives, certificate, key))
    command = [PROGRAM, "-p", str(folder), "-e", str(running.log), "-c", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _listens(port) or process.poll() is not None, DEADLINE_S)
        assert process.poll() is None, running.log.read_text()
        yield running
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOCALHOST, port)) == 0


def _configuration(
    folder: Path,
    running: Nginx,
    ports: Sequence[int],
    directives: Mapping[str, str],
    certificate: Path,
    key: Path,
) -> str:
    temporary = "".join(
        f"    {kind}_temp_path {folder / kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    servers = "".join(f"        server {LOCALHOST}:{port};\n" for port in ports)
    proxy = "".join(f"            {name} {value};\n" for name, value in directives.items())
    # One process, which also needs no other user. `Connection` as in the controller's template.
    return f"""
daemon off;
master_process off;
pid {folder / "nginx.pid"};
events {{}}
http {{
    access_log off;
{temporary}    upstream pods {{
{servers}    }}
    server {{
        listen {LOCALHOST}:{running.port};
        listen {LOCALHOST}:{running.tls_port} ssl http2;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        location / {{
            proxy_pass http://pods;
            proxy_set_header Host $http_host;
            proxy_set_header Connection "";
{proxy}        }}
    }}
}}
"""
