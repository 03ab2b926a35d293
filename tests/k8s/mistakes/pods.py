"""Mistakes in pods: what they may do, how they start, and how they leave."""

from tests.k8s.mistakes.mistake import Mistake, container_of, group_of, template_of
from tests.k8s.rules import pods
from tests.k8s.rules.rendering import Rendering


def _privileges(r: Rendering) -> None:
    container_of(r, "workers")["securityContext"]["capabilities"] = {"add": ["NET_ADMIN"]}


def _root(r: Rendering) -> None:
    template_of(r, "head")["spec"]["securityContext"].pop("runAsNonRoot")


def _writable_root(r: Rendering) -> None:
    r.cluster["autoscalerOptions"]["securityContext"].pop("readOnlyRootFilesystem")


def _no_temp_folder(r: Rendering) -> None:
    container = container_of(r, "workers")
    container["volumeMounts"] = [m for m in container["volumeMounts"] if m["mountPath"] != "/tmp"]


def _token_of_kubernetes(r: Rendering) -> None:
    template_of(r, "gpu-workers")["spec"].pop("automountServiceAccountToken")


def _tag_for_digest(r: Rendering) -> None:
    container_of(r, "workers")["image"] = "registry.example.com/raystream:latest"


def _probe_of_models(r: Rendering) -> None:
    container_of(r, "workers")["readinessProbe"] = {"httpGet": {"path": "/ready", "port": 8000}}


def _ray_stop(r: Rendering) -> None:
    hook = {"exec": {"command": ["ray", "stop"]}}
    container_of(r, "workers")["lifecycle"]["preStop"] = hook


def _short_grace(r: Rendering) -> None:
    template_of(r, "gpu-workers")["spec"]["terminationGracePeriodSeconds"] = 60


def _short_deletion_delay(r: Rendering) -> None:
    r.service["spec"].pop("rayClusterDeletionDelaySeconds")


def _no_limit_on_memory(r: Rendering) -> None:
    container_of(r, "workers")["resources"]["limits"].pop("memory")


def _max_unavailable(r: Rendering) -> None:
    spec = r.named("PodDisruptionBudget")["raystream-workers"]["spec"]
    spec["maxUnavailable"] = spec.pop("minAvailable")


def _objects_on_disk(r: Rendering) -> None:
    group_of(r, "gpu-workers")["rayStartParams"].pop("object-store-memory")


def _service_links(r: Rendering) -> None:
    template_of(r, "head")["spec"].pop("enableServiceLinks")


def _no_serve_env(r: Rendering) -> None:
    container_of(r, "gpu-workers")["envFrom"] = []


def _only_one_group_changed(r: Rendering) -> None:
    container_of(r, "workers")["lifecycle"]["preStop"]["sleep"]["seconds"] = 5


def _variable_of_one_group(r: Rendering) -> None:
    container_of(r, "workers")["env"].append({"name": "OMP_NUM_THREADS", "value": "1"})


def _one_zone(r: Rendering) -> None:
    template_of(r, "gpu-workers")["spec"].pop("topologySpreadConstraints")


def _equal_priorities(r: Rendering) -> None:
    template_of(r, "workers")["spec"]["priorityClassName"] = "raystream-head"


MISTAKES = (
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
        "a /dev/shm smaller than what Ray takes for objects, which go to disk",
        "gpu-single", _objects_on_disk, pods.shared_memory_holds_ray_s_object_store,
    ),
    Mistake(
        "variables of all services of the namespace, some of which Ray would read",
        "cpu", _service_links, pods.no_variables_of_other_services,
    ),
    Mistake(
        "GPU workers without serve.env: they drain for 30 s",
        "gpu-multi", _no_serve_env, pods.ray_containers_get_serve_env,
    ),
    Mistake(
        "a setting of base's workers that GPU workers did not get",
        "gpu-multi", _only_one_group_changed, pods.worker_groups_keep_base_s_settings,
    ),
    Mistake(
        "a variable of base's workers that GPU workers did not get",
        "gpu-multi", _variable_of_one_group, pods.worker_groups_keep_base_s_settings,
    ),
    Mistake(
        "GPU workers that may all be in one zone",
        "gpu-multi", _one_zone, pods.workers_are_spread,
    ),
    Mistake(
        "workers as important as the head: nodes may go to them first",
        "cpu", _equal_priorities, pods.priority_is_the_head_s_first,
    ),
)  # fmt: skip
