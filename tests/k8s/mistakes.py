"""Mistakes that people make in such manifests, each with the check that must catch it.

A mistake is a small edit of a rendering. `test_mistakes` plants them one at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.k8s.manifests import Manifest
from tests.k8s.rules import kuberay, network, pods, references, serving, streams
from tests.k8s.rules.rendering import Rendering, Rule


@dataclass(frozen=True, slots=True)
class Mistake:
    """A planted mistake.

    Attributes:
        name: What was done wrong, and what would happen.
        where: The rendering that it is planted in.
        plant: Makes it.
        rule: What must catch it; None: the API server's schemas.
    """

    name: str
    where: str
    plant: Callable[[Rendering], None]
    rule: Rule | None


def _cluster(r: Rendering) -> dict[str, Any]:
    return r.cluster


def _template(r: Rendering, group: str) -> Manifest:
    """Return the pod template of `head` or of a worker group."""
    groups = {each["groupName"]: each for each in r.cluster["workerGroupSpecs"]}
    found: Manifest = {"head": r.cluster["headGroupSpec"], **groups}[group]["template"]
    return found


def _container(r: Rendering, group: str) -> dict[str, Any]:
    container: dict[str, Any] = _template(r, group)["spec"]["containers"][0]
    return container


def _replace_in_config(r: Rendering, old: str, new: str) -> None:
    text = r.service["spec"]["serveConfigV2"]
    assert old in text, old
    text = text.replace(old, new, 1)
    r.service["spec"]["serveConfigV2"] = text
    r.named("ConfigMap")["raystream-serve-config"]["data"]["serve_config.yaml"] = text


def _mistyped_key(r: Rendering) -> None:
    r.service["spec"]["rayClusterDeletionDelaySecond"] = r.service["spec"].pop(
        "rayClusterDeletionDelaySeconds"
    )


def _mistyped_pod_key(r: Rendering) -> None:
    _container(r, "head")["enviromentFrom"] = []


def _text_for_a_number(r: Rendering) -> None:
    _cluster(r)["workerGroupSpecs"][0]["minReplicas"] = "two"


def _mistyped_policy_key(r: Rendering) -> None:
    policy = r.named("NetworkPolicy")["raystream"]
    policy["spec"]["ingres"] = policy["spec"].pop("ingress")


def _mistyped_route_key(r: Rendering) -> None:
    (route,) = r.of_kind("HTTPRoute")
    route["spec"]["rules"][0]["backendRef"] = route["spec"]["rules"][0].pop("backendRefs")


def _mistyped_scaling_key(r: Rendering) -> None:
    _replace_in_config(r, "autoscaling_config", "autoscaling_confg")


def _dashboard_open(r: Rendering) -> None:
    policy = r.named("NetworkPolicy")["raystream"]
    policy["spec"]["ingress"][0]["ports"].append({"protocol": "TCP", "port": 8265})


def _operator_from_anywhere(r: Rendering) -> None:
    policy = r.named("NetworkPolicy")["raystream"]
    policy["spec"]["ingress"][2]["from"] = [{"namespaceSelector": {}}]


def _policy_of_other_pods(r: Rendering) -> None:
    _template(r, "gpu-workers")["metadata"]["labels"].pop("app.kubernetes.io/part-of")


def _no_token(r: Rendering) -> None:
    _cluster(r)["authOptions"]["mode"] = "disabled"


def _keys_left_out(r: Rendering) -> None:
    _replace_in_config(r, "allow_anonymous: false", "allow_anonymous: true")


def _secret_in_environment(r: Rendering) -> None:
    key = {"secretKeyRef": {"name": "raystream-hf-token", "key": "token"}}
    _container(r, "gpu-workers")["env"].append({"name": "HF_TOKEN", "valueFrom": key})


def _privileges(r: Rendering) -> None:
    _container(r, "workers")["securityContext"]["capabilities"] = {"add": ["NET_ADMIN"]}


def _root(r: Rendering) -> None:
    _template(r, "head")["spec"]["securityContext"].pop("runAsNonRoot")


def _writable_root(r: Rendering) -> None:
    _cluster(r)["autoscalerOptions"]["securityContext"].pop("readOnlyRootFilesystem")


def _no_temp_folder(r: Rendering) -> None:
    container = _container(r, "workers")
    container["volumeMounts"] = [m for m in container["volumeMounts"] if m["mountPath"] != "/tmp"]


def _logs_not_shared(r: Rendering) -> None:
    for mount in _container(r, "head")["volumeMounts"]:
        if mount["mountPath"] == "/tmp/ray":
            mount["name"] = "tmp"


def _token_of_kubernetes(r: Rendering) -> None:
    _template(r, "gpu-workers")["spec"].pop("automountServiceAccountToken")


def _tag_for_digest(r: Rendering) -> None:
    _container(r, "workers")["image"] = "registry.example.com/raystream:latest"


def _probe_of_models(r: Rendering) -> None:
    _container(r, "workers")["readinessProbe"] = {"httpGet": {"path": "/ready", "port": 8000}}


def _ray_stop(r: Rendering) -> None:
    hook = {"exec": {"command": ["ray", "stop"]}}
    _container(r, "workers")["lifecycle"]["preStop"] = hook


def _short_grace(r: Rendering) -> None:
    _template(r, "gpu-workers")["spec"]["terminationGracePeriodSeconds"] = 60


def _objects_on_disk(r: Rendering) -> None:
    (group,) = (g for g in r.cluster["workerGroupSpecs"] if g["groupName"] == "gpu-workers")
    group["rayStartParams"].pop("object-store-memory")


def _worker_with_a_way_out(r: Rendering) -> None:
    spec = r.named("NetworkPolicy")["raystream-offline"]["spec"]
    spec["podSelector"]["matchExpressions"][0]["values"] = ["worker"]


def _no_time_for_a_successor(r: Rendering) -> None:
    _replace_in_config(r, "graceful_shutdown_timeout_s: 240", "graceful_shutdown_timeout_s: 300")


def _short_deletion_delay(r: Rendering) -> None:
    r.service["spec"].pop("rayClusterDeletionDelaySeconds")


def _max_unavailable(r: Rendering) -> None:
    spec = r.named("PodDisruptionBudget")["raystream-workers"]["spec"]
    spec["maxUnavailable"] = spec.pop("minAvailable")


def _head_with_cpus(r: Rendering) -> None:
    _cluster(r)["headGroupSpec"]["rayStartParams"].pop("num-cpus")


def _head_only(r: Rendering) -> None:
    _replace_in_config(r, "proxy_location: EveryNode", "proxy_location: HeadOnly")


def _auto_gpus(r: Rendering) -> None:
    _replace_in_config(r, "num_gpus: 1\n      gpu_share", "num_gpus: auto\n      gpu_share")


def _no_such_kind_of_node(r: Rendering) -> None:
    _replace_in_config(r, "node-kind: a100-40gb", "node-kind: a100-80gb")


def _too_much_for_a_card(r: Rendering) -> None:
    _replace_in_config(
        r, "num_gpus: 0.1\n      label_selector", "num_gpus: 0.2\n      label_selector"
    )


def _no_toleration(r: Rendering) -> None:
    _template(r, "gpu-workers")["spec"].pop("tolerations")


def _branch_for_commit(r: Rendering) -> None:
    _replace_in_config(r, "revision: 4ff1f23a69a36aa1df47b0933be6279f1b896c9b", "revision: main")


def _online_servers(r: Rendering) -> None:
    container = _container(r, "gpu-workers")
    container["env"] = [each for each in container["env"] if each["name"] != "HF_HUB_OFFLINE"]


def _way_out(r: Rendering) -> None:
    r.named("NetworkPolicy")["raystream-offline"]["spec"]["egress"].append({})


def _no_claim(r: Rendering) -> None:
    r.manifests.remove(r.named("PersistentVolumeClaim")["raystream-models"])


def _env_renamed(r: Rendering) -> None:
    _container(r, "workers")["envFrom"][0]["configMapRef"]["name"] = "raystream-serve-env"


def _nginx_buffers(r: Rendering) -> None:
    annotations = r.named("Ingress")["raystream"]["metadata"]["annotations"]
    annotations.pop("nginx.ingress.kubernetes.io/proxy-buffering")


def _nginx_gives_up(r: Rendering) -> None:
    annotations = r.named("Ingress")["raystream"]["metadata"]["annotations"]
    annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"] = "60"


def _no_policy_for_streams(r: Rendering) -> None:
    r.manifests.remove(r.named("BackendTrafficPolicy")["raystream-streams"])


def _policy_of_another_gateway(r: Rendering) -> None:
    policy = r.named("BackendTrafficPolicy")["raystream-streams"]
    policy["spec"]["targetRefs"][0]["name"] = "raystream"


def _thirty_seconds(r: Rendering) -> None:
    (policy,) = r.of_kind("GCPBackendPolicy")
    policy["spec"]["default"].pop("timeoutSec")


def _wrong_service(r: Rendering) -> None:
    (route,) = r.of_kind("HTTPRoute")
    route["spec"]["rules"][0]["backendRefs"][0]["name"] = "raystream-head-svc"


def _no_gateway_class(r: Rendering) -> None:
    r.service["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]["gatewayClassName"] = ""


def _redis_twice(r: Rendering) -> None:
    _container(r, "head")["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"})


def _each_pod_scraped(r: Rendering) -> None:
    (config,) = r.of_kind("ScrapeConfig")
    config["spec"]["staticConfigs"][0]["targets"] = ["raystream-0:8000", "raystream-1:8000"]


def _prometheus_kept_out(r: Rendering) -> None:
    r.manifests.remove(r.named("NetworkPolicy")["raystream-metrics"])


def _two_replicas_in_a_pod(r: Rendering) -> None:
    _replace_in_config(
        r, "num_gpus: 1\n      label_selector", "num_gpus: 0.5\n      label_selector"
    )


def _hub_s_token_for_all(r: Rendering) -> None:
    secret = {"secretName": "raystream-hf-token", "defaultMode": 0o440}
    _template(r, "gpu-workers")["spec"]["volumes"].append({"name": "hf-token", "secret": secret})


def _ingress_on_a_gpu_node(r: Rendering) -> None:
    _replace_in_config(r, "node-kind: cpu", "node-kind: a100-40gb")


def _sixty_seconds(r: Rendering) -> None:
    annotations = r.named("Ingress")["raystream"]["metadata"]["annotations"]
    annotations.pop("alb.ingress.kubernetes.io/load-balancer-attributes")


def _timeout_of_a_route(r: Rendering) -> None:
    (route,) = r.of_kind("HTTPRoute")
    route["spec"]["rules"][0]["timeouts"]["request"] = "5m"


def _no_limit_on_memory(r: Rendering) -> None:
    _container(r, "workers")["resources"]["limits"].pop("memory")


def _port_renamed(r: Rendering) -> None:
    for port in _container(r, "workers")["ports"]:
        if port["name"] == "serve":
            port["name"] = "http"


MISTAKES = (
    # What the API server's strict decoding would refuse.
    Mistake("a mistyped key of the RayService", "cpu", _mistyped_key, None),
    Mistake("a mistyped key of a pod", "cpu", _mistyped_pod_key, None),
    Mistake("a word for a number", "cpu", _text_for_a_number, None),
    Mistake("a mistyped key of a core kind", "cpu", _mistyped_policy_key, None),
    Mistake("a mistyped key of a route", "cpu+gateway", _mistyped_route_key, None),
    # What no API server checks.
    Mistake(
        "a mistyped key in serveConfigV2: Ray ignores it",
        "cpu", _mistyped_scaling_key, serving.serve_configuration_has_no_problem,
    ),
    Mistake(
        "the dashboard open to all: others run code",
        "cpu", _dashboard_open, network.only_the_serve_port_is_open_to_others,
    ),
    Mistake(
        "any pod taken for the operator",
        "cpu", _operator_from_anywhere, network.only_the_serve_port_is_open_to_others,
    ),
    Mistake(
        "GPU pods that no network policy selects",
        "gpu-multi", _policy_of_other_pods, network.policies_select_every_ray_pod,
    ),
    Mistake(
        "Ray without a token", "cpu", _no_token, kuberay.authentication_is_by_ray_s_token
    ),
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
        "a capability: the namespace refuses the pod",
        "cpu", _privileges, pods.pods_satisfy_the_restricted_standard,
    ),
    Mistake(
        "a pod that may run as root", "cpu", _root, pods.pods_satisfy_the_restricted_standard
    ),
    Mistake(
        "an autoscaler that can write to its image",
        "cpu", _writable_root, pods.root_file_systems_are_read_only,
    ),
    Mistake(
        "a read-only pod without /tmp: Ray does not start",
        "cpu", _no_temp_folder, pods.ray_can_write_where_it_must,
    ),
    Mistake(
        "a head whose logs the autoscaler can't share",
        "cpu", _logs_not_shared, kuberay.autoscaler_shares_the_head_s_logs,
    ),
    Mistake(
        "a worker with Kubernetes's token",
        "gpu-single", _token_of_kubernetes, pods.only_those_who_ask_kubernetes_have_its_token,
    ),
    Mistake(
        "a tag in place of a digest", "eks", _tag_for_digest, pods.images_are_named_by_digest
    ),
    Mistake(
        "a probe of /ready: one model that sleeps takes all pods away",
        "cpu", _probe_of_models, pods.probes_are_left_to_kuberay,
    ),
    Mistake(
        "preStop: ray stop, which cuts the streams",
        "cpu", _ray_stop, pods.worker_has_time_to_drain_before_it_is_killed,
    ),
    Mistake(
        "a grace period shorter than the drain",
        "gpu-multi", _short_grace, pods.worker_has_time_to_drain_before_it_is_killed,
    ),
    Mistake(
        "replicas that may take as long as the node's drain: Serve ends them at once",
        "cpu", _no_time_for_a_successor, serving.replicas_drain_while_their_successors_start,
    ),
    Mistake(
        "an old cluster that goes after KubeRay's minute",
        "cpu", _short_deletion_delay, pods.worker_has_time_to_drain_before_it_is_killed,
    ),
    Mistake(
        "a pod without a limit on memory: it takes the node's",
        "cpu", _no_limit_on_memory, pods.containers_have_bounds,
    ),
    Mistake(
        "a budget by maxUnavailable: every eviction is refused",
        "cpu", _max_unavailable, pods.budgets_cover_the_pods,
    ),
    Mistake(
        "replicas on the head",
        "cpu", _head_with_cpus, kuberay.head_runs_no_replica_and_names_no_service,
    ),
    Mistake(
        "a port by another name than KubeRay looks for",
        "cpu", _port_renamed, kuberay.ports_have_the_names_that_kuberay_expects,
    ),
    Mistake(
        "proxy_location HeadOnly: workers never get ready",
        "cpu", _head_only, serving.serve_listens_where_service_and_kubelet_reach_it,
    ),
    Mistake(
        "num_gpus: auto where GPU nodes start from zero: the model runs on a CPU",
        "gke", _auto_gpus, serving.models_on_gpus_say_how_much_and_which,
    ),
    Mistake(
        "a label that no group has: the model waits for ever",
        "gke", _no_such_kind_of_node, serving.deployments_find_nodes_with_their_label,
    ),
    Mistake(
        "shares that exceed the card",
        "gpu-shared", _too_much_for_a_card, serving.cards_hold_the_models_that_are_put_on_them,
    ),
    Mistake(
        "GPU pods that the nodes' taint keeps away",
        "eks", _no_toleration, serving.gpu_pods_tolerate_the_taint_of_gpu_nodes,
    ),
    Mistake(
        "an ingress on a GPU node, which its streams hold while it drains",
        "gpu-multi", _ingress_on_a_gpu_node, serving.ingresses_stay_off_gpu_nodes,
    ),
    Mistake(
        "weights by a branch's name",
        "gpu-multi", _branch_for_commit, serving.weights_are_pinned_and_read_from_the_cache,
    ),
    Mistake(
        "servers that ask the hub",
        "gpu-single", _online_servers, serving.weights_are_pinned_and_read_from_the_cache,
    ),
    Mistake(
        "servers that reach the internet",
        "gpu-single", _way_out, network.servers_with_a_cache_of_models_have_no_way_out,
    ),
    Mistake(
        "a /dev/shm smaller than what Ray takes for objects, which go to disk",
        "gpu-single", _objects_on_disk, pods.shared_memory_holds_ray_s_object_store,
    ),
    Mistake(
        "a policy of the way out that leaves GPU workers out",
        "gpu-single", _worker_with_a_way_out,
        network.servers_with_a_cache_of_models_have_no_way_out,
    ),
    Mistake(
        "a volume whose claim is missing", "gpu-single", _no_claim, references.pods_name_what_exists
    ),
    Mistake(
        "a ConfigMap without its hash", "cpu", _env_renamed, references.pods_name_what_exists
    ),
    Mistake(
        "an nginx that collects the answer",
        "cpu+ingress-nginx", _nginx_buffers, streams.nginx_passes_events_on_and_waits,
    ),
    Mistake(
        "an nginx that gives up after a minute",
        "cpu+ingress-nginx", _nginx_gives_up, streams.nginx_passes_events_on_and_waits,
    ),
    Mistake(
        "a gateway without a policy for streams",
        "incremental-upgrade", _no_policy_for_streams, streams.gateways_have_a_policy_for_streams,
    ),
    Mistake(
        "a policy for a Gateway that is not there",
        "incremental-upgrade", _policy_of_another_gateway, references.policies_have_a_target,
    ),
    Mistake(
        "Google's 30 s for an answer",
        "gke", _thirty_seconds, streams.gateways_have_a_policy_for_streams,
    ),
    Mistake(
        "Amazon's 60 s without a byte",
        "eks", _sixty_seconds, streams.amazon_s_load_balancer_waits,
    ),
    Mistake(
        "a route that cuts answers after five minutes",
        "cpu+gateway", _timeout_of_a_route, streams.routes_set_no_timeout,
    ),
    Mistake(
        "a route to the head",
        "cpu+gateway", _wrong_service, references.routes_lead_to_kuberay_s_service,
    ),
    Mistake(
        "an incremental upgrade without a Gateway",
        "incremental-upgrade", _no_gateway_class, kuberay.upgrade_is_one_that_kuberay_takes,
    ),
    Mistake(
        "Redis named twice: KubeRay refuses the service",
        "head-ha", _redis_twice, kuberay.redis_is_named_in_one_place,
    ),
    Mistake(
        "each pod's /metrics scraped: every figure counts twice",
        "cpu+monitoring", _each_pod_scraped, references.one_target_shows_all_models,
    ),
    Mistake(
        "Prometheus kept out by the network policy",
        "cpu+monitoring", _prometheus_kept_out, network.prometheus_reaches_what_is_scraped,
    ),
    Mistake(
        "two replicas in a pod of the endpoint picker",
        "inference-gateway", _two_replicas_in_a_pod, serving.a_picker_s_pod_is_one_replica,
    ),
)  # fmt: skip
