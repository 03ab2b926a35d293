"""`make k8s`: writes k8s/base's copies of the root's serve_config.yaml and serve.env.

kustomize reads no file outside its own folder, so k8s/base holds copies. They differ from the
root's files only in the values named here, which a cluster needs. A test refuses stale copies. The
copies have no comments; see the root's files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "k8s" / "base"
HEADER = "# Made by `make k8s` from the file of this name in the project's root: edit that one.\n"

# Every pod runs a proxy, which the Service reaches by the pod's address.
HOST = "0.0.0.0"
# How long a draining replica's streams may continue. terminationGracePeriodSeconds in
# rayservice.yaml is 30 s longer: 10 for the pod's preStop, 20 for Ray to end.
DRAIN_S = 240

# Other hosts reach a cluster's Service, so its requests need keys: rayservice.yaml mounts them.
API_KEYS_FILE = "/etc/raystream/api-keys/keys.yaml"

ENV_ON_CLUSTER = {
    # For `ray start`, which drains its node when the pod gets SIGTERM.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S),
    # Longer than a load balancer needs to learn that the pod is leaving.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "30",
}


def main() -> None:
    """Write both copies."""
    for name, text in base_files().items():
        (BASE / name).write_text(text, encoding="utf-8")


def base_files() -> dict[str, str]:
    """Return the text of each generated file of k8s/base, by file name."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    env = parse_env((ROOT / "serve.env").read_text(encoding="utf-8"))
    return {
        "serve_config.yaml": HEADER + yaml.safe_dump(on_cluster(config), sort_keys=False),
        "serve.env": HEADER + format_env({**env, **ENV_ON_CLUSTER}),
    }


def on_cluster(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Serve configuration with a cluster's values."""
    return {
        **config,
        "http_options": {**config["http_options"], "host": HOST},
        "applications": [
            {
                **application,
                "args": {**application["args"], "auth": auth_on_cluster(application["args"])},
                "deployments": [
                    {**deployment, "graceful_shutdown_timeout_s": DRAIN_S}
                    for deployment in application["deployments"]
                ],
            }
            for application in config["applications"]
        ],
    }


def auth_on_cluster(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `auth` section: keys from the Secret, unless the root's file needs none."""
    if args["auth"]["allow_anonymous"]:
        return dict(args["auth"])
    return {**args["auth"], "api_keys_file": API_KEYS_FILE}


def parse_env(text: str) -> dict[str, str]:
    """Read KEY=VALUE lines, ignoring blank lines and comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return dict(line.split("=", maxsplit=1) for line in lines)


def format_env(env: Mapping[str, str]) -> str:
    """Write KEY=VALUE lines."""
    return "".join(f"{key}={value}\n" for key, value in env.items())


if __name__ == "__main__":
    main()
