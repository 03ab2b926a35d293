"""Mistakes in pods: what they may do, how they start, and how they leave."""

from tests.k8s.mistakes.mistake import container_of, group_of, mistake, template_of
from tests.k8s.rules import pods
from tests.k8s.rules.rendering import Rendering


@mistake(
    "a capability: the namespace refuses the pod", "cpu", pods.pods_satisfy_the_restricted_standard
)
def _privileges(r: Rendering) -> None:
    container_of(r, "workers")["securityContext"]["capabilities"] = {"add": ["NET_ADMIN"]}


@mistake("a pod that may run as root", "cpu", pods.pods_satisfy_the_restricted_standard)
def _root(r: Rendering) -> None:
    template_of(r, "head")["spec"]["securityContext"].pop("runAsNonRoot")


@mistake("an autoscaler that can write to its image", "cpu", pods.root_file_systems_are_read_only)
def _writable_root(r: Rendering) -> None:
    r.cluster["autoscalerOptions"]["securityContext"].pop("readOnlyRootFilesystem")


@mistake(
    "a read-only pod without /tmp: Ray does not start", "cpu", pods.ray_can_write_where_it_must
)
def _no_temp_folder(r: Rendering) -> None:
    container = container_of(r, "workers")
    container["volumeMounts"] = [m for m in container["volumeMounts"] if m["mountPath"] != "/tmp"]


@mistake(
    "a worker with Kubernetes's token",
    "gpu-single",
    pods.only_those_who_ask_kubernetes_have_its_token,
)
def _token_of_kubernetes(r: Rendering) -> None:
    template_of(r, "gpu-workers")["spec"].pop("automountServiceAccountToken")


@mistake("a tag in place of a digest", "eks", pods.images_are_named_by_digest)
def _tag_for_digest(r: Rendering) -> None:
    container_of(r, "workers")["image"] = "registry.example.com/raystream:latest"


@mistake(
    "a probe of /ready: one model that sleeps takes all pods away",
    "cpu",
    pods.probes_are_left_to_kuberay,
)
def _probe_of_models(r: Rendering) -> None:
    container_of(r, "workers")["readinessProbe"] = {"httpGet": {"path": "/ready", "port": 8000}}


@mistake(
    "preStop: ray stop, which cuts the streams",
    "cpu",
    pods.worker_has_time_to_drain_before_it_is_killed,
)
def _ray_stop(r: Rendering) -> None:
    hook = {"exec": {"command": ["ray", "stop"]}}
    container_of(r, "workers")["lifecycle"]["preStop"] = hook


@mistake(
    "a grace period shorter than the drain",
    "gpu-multi",
    pods.worker_has_time_to_drain_before_it_is_killed,
)
def _short_grace(r: Rendering) -> None:
    template_of(r, "gpu-workers")["spec"]["terminationGracePeriodSeconds"] = 60


@mistake(
    "an old cluster that goes after KubeRay's minute",
    "cpu",
    pods.worker_has_time_to_drain_before_it_is_killed,
)
def _short_deletion_delay(r: Rendering) -> None:
    r.service["spec"].pop("rayClusterDeletionDelaySeconds")


@mistake("a pod without a limit on memory: it takes the node's", "cpu", pods.containers_have_bounds)
def _no_limit_on_memory(r: Rendering) -> None:
    container_of(r, "workers")["resources"]["limits"].pop("memory")


@mistake(
    "a budget by maxUnavailable: every eviction is refused", "cpu", pods.budgets_cover_the_pods
)
def _max_unavailable(r: Rendering) -> None:
    spec = r.named("PodDisruptionBudget")["raystream-workers"]["spec"]
    spec["maxUnavailable"] = spec.pop("minAvailable")


@mistake(
    "a /dev/shm smaller than what Ray takes for objects, which go to disk",
    "gpu-single",
    pods.shared_memory_holds_ray_s_object_store,
)
def _objects_on_disk(r: Rendering) -> None:
    group_of(r, "gpu-workers")["rayStartParams"].pop("object-store-memory")


@mistake(
    "variables of all services of the namespace, some of which Ray would read",
    "cpu",
    pods.no_variables_of_other_services,
)
def _service_links(r: Rendering) -> None:
    template_of(r, "head")["spec"].pop("enableServiceLinks")


@mistake(
    "GPU workers without serve.env: they drain for 30 s",
    "gpu-multi",
    pods.ray_containers_get_serve_env,
)
def _no_serve_env(r: Rendering) -> None:
    container_of(r, "gpu-workers")["envFrom"] = []


@mistake(
    "a setting of base's workers that GPU workers did not get",
    "gpu-multi",
    pods.worker_groups_keep_base_s_settings,
)
def _only_one_group_changed(r: Rendering) -> None:
    container_of(r, "workers")["lifecycle"]["preStop"]["sleep"]["seconds"] = 5


@mistake(
    "a variable of base's workers that GPU workers did not get",
    "gpu-multi",
    pods.worker_groups_keep_base_s_settings,
)
def _variable_of_one_group(r: Rendering) -> None:
    container_of(r, "workers")["env"].append({"name": "OMP_NUM_THREADS", "value": "1"})


@mistake("GPU workers that may all be in one zone", "gpu-multi", pods.workers_are_spread)
def _one_zone(r: Rendering) -> None:
    template_of(r, "gpu-workers")["spec"].pop("topologySpreadConstraints")


@mistake(
    "workers as important as the head: nodes may go to them first",
    "cpu",
    pods.priority_is_the_head_s_first,
)
def _equal_priorities(r: Rendering) -> None:
    template_of(r, "workers")["spec"]["priorityClassName"] = "raystream-head"
