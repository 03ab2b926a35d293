"""Mistakes in names, and secrets in wrong places."""

from tests.k8s.mistakes.mistake import container_of, in_config, mistake, template_of
from tests.k8s.rules import references
from tests.k8s.rules.rendering import Rendering


@mistake("the hub's token in a server's environment", "gpu-shared", references.secrets_come_by_file)
def _secret_in_environment(r: Rendering) -> None:
    key = {"secretKeyRef": {"name": "raystream-hf-token", "key": "token"}}
    container_of(r, "gpu-workers")["env"].append({"name": "HF_TOKEN", "valueFrom": key})


@mistake(
    "the hub's token in the servers' pods",
    "gpu-single",
    references.only_the_download_has_the_hub_s_token,
)
def _hub_s_token_for_all(r: Rendering) -> None:
    secret = {"secretName": "raystream-hf-token", "defaultMode": 0o440}
    template_of(r, "gpu-workers")["spec"]["volumes"].append({"name": "hf-token", "secret": secret})


@mistake("a volume whose claim is missing", "gpu-single", references.pods_name_what_exists)
def _no_claim(r: Rendering) -> None:
    r.manifests.remove(r.named("PersistentVolumeClaim")["raystream-models"])


@mistake("a ConfigMap without its hash", "cpu", references.pods_name_what_exists)
def _env_renamed(r: Rendering) -> None:
    container_of(r, "workers")["envFrom"][0]["configMapRef"]["name"] = "raystream-serve-env"


@mistake(
    "a policy for a Gateway that is not there",
    "incremental-upgrade",
    references.policies_have_a_target,
)
def _policy_of_another_gateway(r: Rendering) -> None:
    policy = r.named("BackendTrafficPolicy")["raystream-streams"]
    policy["spec"]["targetRefs"][0]["name"] = "raystream"


@mistake("a route to the head", "cpu+gateway", references.routes_lead_to_kuberay_s_service)
def _wrong_service(r: Rendering) -> None:
    (route,) = r.of_kind("HTTPRoute")
    route["spec"]["rules"][0]["backendRefs"][0]["name"] = "raystream-head-svc"


@mistake(
    "each pod's /metrics scraped: every figure counts twice",
    "cpu+monitoring",
    references.one_target_shows_all_models,
)
def _each_pod_scraped(r: Rendering) -> None:
    (config,) = r.of_kind("ScrapeConfig")
    config["spec"]["staticConfigs"][0]["targets"] = ["raystream-0:8000", "raystream-1:8000"]


in_config(
    "requests without keys",
    "cpu",
    "allow_anonymous: false",
    "allow_anonymous: true",
    references.requests_need_keys_from_a_secret,
)
