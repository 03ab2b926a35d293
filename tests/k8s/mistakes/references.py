"""Mistakes in names, and secrets in wrong places."""

from tests.k8s.mistakes.mistake import Mistake, container_of, replace_in_config, template_of
from tests.k8s.rules import references
from tests.k8s.rules.rendering import Rendering


def _keys_left_out(r: Rendering) -> None:
    replace_in_config(r, "allow_anonymous: false", "allow_anonymous: true")


def _secret_in_environment(r: Rendering) -> None:
    key = {"secretKeyRef": {"name": "raystream-hf-token", "key": "token"}}
    container_of(r, "gpu-workers")["env"].append({"name": "HF_TOKEN", "valueFrom": key})


def _hub_s_token_for_all(r: Rendering) -> None:
    secret = {"secretName": "raystream-hf-token", "defaultMode": 0o440}
    template_of(r, "gpu-workers")["spec"]["volumes"].append({"name": "hf-token", "secret": secret})


def _no_claim(r: Rendering) -> None:
    r.manifests.remove(r.named("PersistentVolumeClaim")["raystream-models"])


def _env_renamed(r: Rendering) -> None:
    container_of(r, "workers")["envFrom"][0]["configMapRef"]["name"] = "raystream-serve-env"


def _policy_of_another_gateway(r: Rendering) -> None:
    policy = r.named("BackendTrafficPolicy")["raystream-streams"]
    policy["spec"]["targetRefs"][0]["name"] = "raystream"


def _wrong_service(r: Rendering) -> None:
    (route,) = r.of_kind("HTTPRoute")
    route["spec"]["rules"][0]["backendRefs"][0]["name"] = "raystream-head-svc"


def _each_pod_scraped(r: Rendering) -> None:
    (config,) = r.of_kind("ScrapeConfig")
    config["spec"]["staticConfigs"][0]["targets"] = ["raystream-0:8000", "raystream-1:8000"]


MISTAKES = (
    Mistake(
        "requests without keys",
        "cpu", _keys_left_out, references.requests_need_keys_from_a_secret,
    ),
    Mistake(
        "the hub's token in a server's environment",
        "gpu-shared", _secret_in_environment, references.secrets_come_by_file,
    ),
    Mistake(
        "the hub's token in the servers' pods",
        "gpu-single", _hub_s_token_for_all, references.only_the_download_has_the_hub_s_token,
    ),
    Mistake(
        "a volume whose claim is missing", "gpu-single", _no_claim, references.pods_name_what_exists
    ),
    Mistake(
        "a ConfigMap without its hash", "cpu", _env_renamed, references.pods_name_what_exists
    ),
    Mistake(
        "a policy for a Gateway that is not there",
        "incremental-upgrade", _policy_of_another_gateway, references.policies_have_a_target,
    ),
    Mistake(
        "a route to the head",
        "cpu+gateway", _wrong_service, references.routes_lead_to_kuberay_s_service,
    ),
    Mistake(
        "each pod's /metrics scraped: every figure counts twice",
        "cpu+monitoring", _each_pod_scraped, references.one_target_shows_all_models,
    ),
)  # fmt: skip
