"""`make k8s`: writes what k8s/ takes from other files.

kustomize reads no file outside its own folder, so k8s/base holds copies of the root's
serve_config.yaml and serve.env. They differ from these only in the values named here, which a
cluster needs. The overlays with GPUs get configurations of their own (see `gpu_configs`), and the
component `monitoring` the alerts in the Prometheus operator's form. A test refuses stale files.
They have no comments; see the files that they are made from.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from k8s.gpu_configs import OVERLAYS, on_gpus
from serve_app.config import INGRESS_NAME
from serve_app.shipped_files import parse_env

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "k8s" / "base"
K8S = ROOT / "k8s"
MONITORING = K8S / "components" / "monitoring"
ALERTS = MONITORING / "alerts" / "raystream.yaml"
HEADER = "# Made by `make k8s` from the file of this name in the project's root: edit that one.\n"

# Every pod runs a proxy, which the Service reaches by the pod's address.
HOST = "0.0.0.0"
# How long the streams of a replica that ends may continue.
STREAMS_S = 240
# How long Ray waits for a node that drains. Without time beyond that of the streams, Serve ends a
# replica there before its successor runs. terminationGracePeriodSeconds in rayservice.yaml is 30 s
# longer: 10 for the pod's preStop, 20 for Ray to end.
DRAIN_S = STREAMS_S + 60

# Other hosts reach a cluster's Service, so its requests need keys: rayservice.yaml mounts them.
API_KEYS_FILE = "/etc/raystream/api-keys/keys.yaml"

ENV_ON_CLUSTER = {
    # For `ray start`, which drains its node when the pod gets SIGTERM.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S),
    # Longer than a load balancer needs to learn that the pod is leaving.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "30",
}


GPU_HEADER = (
    "# Made by `make k8s` from the root's serve_config.yaml and k8s/gpu_configs.py: edit those.\n"
)
RULES_HEADER = "# Made by `make k8s` from alerts/raystream.yaml: edit that one.\n"


def main() -> None:
    """Write all files."""
    for path, text in generated_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def generated_files() -> dict[Path, str]:
    """Return the text of each generated file, by its path."""
    return {
        **{BASE / name: text for name, text in base_files().items()},
        **{
            K8S / "overlays" / name / "serve_config.yaml": GPU_HEADER
            + _dump(on_gpus(_config(), overlay))
            for name, overlay in OVERLAYS.items()
        },
        MONITORING / "prometheus-rule.yaml": prometheus_rule(),
    }


def prometheus_rule() -> str:
    """Return the alerts as the Prometheus operator's kind."""
    alerts = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "raystream"},
        "spec": alerts,
    }
    return RULES_HEADER + yaml.safe_dump(manifest, sort_keys=False, width=100)


def _config() -> dict[str, Any]:
    text = (ROOT / "serve_config.yaml").read_text(encoding="utf-8")
    return on_cluster(yaml.safe_load(text))


def _dump(config: Mapping[str, Any]) -> str:
    text: str = yaml.dump(config, Dumper=_NoAliases, sort_keys=False)
    return text


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def base_files() -> dict[str, str]:
    """Return the text of each generated file of k8s/base, by file name."""
    env = parse_env((ROOT / "serve.env").read_text(encoding="utf-8"))
    return {
        "serve_config.yaml": HEADER + _dump(_config()),
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
                    deployment_on_cluster(deployment) for deployment in application["deployments"]
                ],
            }
            for application in config["applications"]
        ],
    }


def deployment_on_cluster(deployment: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deployment with time for its streams, and with a model's replicas kept apart.

    Then a worker that is lost takes one replica of a model. Ingresses may share a worker, since a
    roll-out starts the next one before it stops the old one.
    """
    apart = {} if deployment["name"] == INGRESS_NAME else {"max_replicas_per_node": 1}
    return {**deployment, **apart, "graceful_shutdown_timeout_s": STREAMS_S}


def auth_on_cluster(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `auth` section: keys from the Secret, unless the root's file needs none."""
    if args["auth"]["allow_anonymous"]:
        return dict(args["auth"])
    return {**args["auth"], "api_keys_file": API_KEYS_FILE}


def format_env(env: Mapping[str, str]) -> str:
    """Write KEY=VALUE lines."""
    return "".join(f"{key}={value}\n" for key, value in env.items())


if __name__ == "__main__":
    main()
