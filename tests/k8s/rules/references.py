"""Rules for names: what a manifest names exists, and secrets stay where they belong."""

import re
from collections.abc import Iterator

from k8s.make_base import API_KEYS_FILE
from tests.k8s.manifests import Manifest
from tests.k8s.rules.rendering import Rendering, Rule, containers_of

SERVICE = "raystream-serve-svc"
"""KubeRay makes it."""

GATEWAY = "raystream-gateway"
"""KubeRay makes it for incremental upgrades."""

MADE_BY_HAND = {
    "raystream-api-keys", "raystream-hf-token", "raystream-metrics-key", "raystream-redis",
    "raystream-tls",
}  # fmt: skip
"""Secrets that README.md makes: manifests hold none."""

_A_SECRET = re.compile(r"hf_[A-Za-z0-9]{16}|rs-[A-Za-z0-9_-]{16}|sk-[A-Za-z0-9_-]{16}")
_SECRET_WORD = re.compile(r"TOKEN$|PASSWORD|API_KEY|SECRET", re.IGNORECASE)


def pods_name_what_exists(r: Rendering) -> Iterator[str]:
    for pod in r.pods:
        name, spec = pod["metadata"]["name"], pod["spec"]
        for volume in spec.get("volumes", ()):
            if missing := _missing_of(r, volume):
                yield f"{name}: {missing}"
        for container in containers_of(pod):
            for missing in _missing_of_container(r, pod, container):
                yield f"{name}: {missing}"
        priority = spec.get("priorityClassName")
        if priority is not None and priority not in r.named("PriorityClass"):
            yield f"{name}: no PriorityClass {priority}"
        account = spec.get("serviceAccountName")
        if account is not None and account not in r.named("ServiceAccount"):
            yield f"{name}: no ServiceAccount {account}"


def _missing_of_container(r: Rendering, pod: Manifest, container: Manifest) -> Iterator[str]:
    volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())}
    for mount in container.get("volumeMounts", ()):
        if mount["name"] not in volumes:
            yield f"no volume {mount['name']}"
    for source in container.get("envFrom", ()):
        if source["configMapRef"]["name"] not in r.named("ConfigMap"):
            yield f"no ConfigMap {source['configMapRef']['name']}"


def _missing_of(r: Rendering, volume: Manifest) -> str | None:
    if "configMap" in volume and volume["configMap"]["name"] not in r.named("ConfigMap"):
        return f"no ConfigMap {volume['configMap']['name']}"
    if "secret" in volume:
        secret = volume["secret"]["secretName"]
        return None if secret in MADE_BY_HAND | r.named("Secret").keys() else f"no Secret {secret}"
    claim = volume.get("persistentVolumeClaim")
    if claim is not None and claim["claimName"] not in r.named("PersistentVolumeClaim"):
        return f"no PersistentVolumeClaim {claim['claimName']}"
    return None


def routes_lead_to_kuberay_s_service(r: Rendering) -> Iterator[str]:
    for ingress in r.of_kind("Ingress"):
        paths = [path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
        for service in (path["backend"]["service"] for path in paths):
            if (service["name"], service["port"].get("number")) != (SERVICE, 8000):
                yield f"Ingress: {service}"
    for route in r.of_kind("HTTPRoute"):
        for parent in route["spec"]["parentRefs"]:
            if parent["name"] not in r.named("Gateway"):
                yield f"HTTPRoute: no Gateway {parent['name']}"
        backends = (each for rule in route["spec"]["rules"] for each in rule["backendRefs"])
        yield from (f"HTTPRoute: {each}" for each in backends if not _is_backend(r, each))


def one_target_shows_all_models(r: Rendering) -> Iterator[str]:
    """GET /metrics of any pod shows all replicas: of two targets each figure would count twice."""
    for config in r.of_kind("ScrapeConfig"):
        targets = [target for each in config["spec"]["staticConfigs"] for target in each["targets"]]
        if targets != [f"{SERVICE}.raystream.svc:8000"]:
            yield f"ScrapeConfig: {targets}"


def _is_backend(r: Rendering, backend: Manifest) -> bool:
    if backend.get("kind") == "InferencePool":
        return backend["name"] in r.named("InferencePool")
    return (backend["name"], backend.get("port")) == (SERVICE, 8000)


def policies_have_a_target(r: Rendering) -> Iterator[str]:
    is_incremental = r.service["spec"]["upgradeStrategy"]["type"] != "NewCluster"
    made = {("Service", SERVICE), *([("Gateway", GATEWAY)] if is_incremental else [])}
    known = made | {(each["kind"], each["metadata"]["name"]) for each in r.manifests}
    for policy in r.of_kind("BackendTrafficPolicy", "GCPBackendPolicy", "HealthCheckPolicy"):
        spec = policy["spec"]
        for target in spec.get("targetRefs", [spec.get("targetRef")]):
            if (target["kind"], target["name"]) not in known:
                yield f"{policy['kind']}: no {target['kind']} {target['name']}"


def secrets_come_by_file(r: Rendering) -> Iterator[str]:
    """Redis's password is the exception: KubeRay passes it on by environment."""
    for pod in r.pods:
        for container in containers_of(pod):
            where = f"{pod['metadata']['name']}, {container['name']}"
            for variable in container.get("env", ()):
                is_secret = "secretKeyRef" in variable.get("valueFrom", {})
                if is_secret or _SECRET_WORD.search(variable["name"]):
                    yield f"{where}: {variable['name']} is a secret in the environment"
            if any("secretRef" in source for source in container.get("envFrom", ())):
                yield f"{where}: a whole Secret in the environment"
        for volume in pod["spec"].get("volumes", ()):
            if "secret" in volume and volume["secret"].get("defaultMode") != 0o440:
                yield f"{pod['metadata']['name']}: others can read {volume['name']}"
    for each in r.manifests:
        if found := _A_SECRET.search(str({**each, "metadata": None})):
            yield f"{each['kind']} {each['metadata']['name']} holds a key: {found[0][:6]}..."


def requests_need_keys_from_a_secret(r: Rendering) -> Iterator[str]:
    auth = r.application["args"]["auth"]
    expected = {
        "api_keys_file": API_KEYS_FILE,
        "allow_anonymous": False,
        "trusted_gateway": False,
        "allow_unauthenticated_ray": False,
    }
    if auth != expected:
        yield f"auth: {auth}"
    folder = API_KEYS_FILE.rpartition("/")[0]
    for pod in r.ray_pods:
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {m["mountPath"]: m for m in pod["spec"]["containers"][0]["volumeMounts"]}
        mount = mounts.get(folder, {})
        secret = volumes.get(mount.get("name", ""), {}).get("secret", {})
        if secret.get("secretName") != "raystream-api-keys" or secret.get("optional"):
            yield f"{pod['metadata']['name']}: no keys at {folder}"
        if mount.get("readOnly") is not True:
            yield f"{pod['metadata']['name']}: keys can be written"


def only_the_download_has_the_hub_s_token(r: Rendering) -> Iterator[str]:
    for pod in r.pods:
        secrets = {
            v["secret"]["secretName"] for v in pod["spec"].get("volumes", ()) if "secret" in v
        }
        name = pod["metadata"]["name"]
        if "raystream-hf-token" in secrets and name != "raystream-download":
            yield f"{name}: has the hub's token"


RULES: tuple[Rule, ...] = (
    pods_name_what_exists,
    routes_lead_to_kuberay_s_service,
    one_target_shows_all_models,
    policies_have_a_target,
    secrets_come_by_file,
    requests_need_keys_from_a_secret,
    only_the_download_has_the_hub_s_token,
)
