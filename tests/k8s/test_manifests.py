import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.make_base import API_KEYS_FILE, BASE, DRAIN_S, parse_env
from serve_app.commands.check import find_problems
from tests.k8s.manifests import ROOT, Manifest, find_faults, parse, pods_of, render

pytestmark = pytest.mark.kubectl

OVERLAYS = sorted((ROOT / "k8s" / "overlays").iterdir())
FOLDERS = [BASE, *OVERLAYS]


def _name(folder: Path) -> str:
    return str(folder.relative_to(ROOT))


each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=_name)
each_overlay = pytest.mark.parametrize("folder", OVERLAYS, ids=_name)


def of_kind(folder: Path, kind: str) -> list[Manifest]:
    return [manifest for manifest in parse(render(folder)) if manifest["kind"] == kind]


def ray_service(folder: Path) -> Manifest:
    (manifest,) = of_kind(folder, "RayService")
    return manifest


def cluster(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = ray_service(folder)["spec"]["rayClusterConfig"]
    return config


def containers(folder: Path) -> list[dict[str, Any]]:
    return [c for pod in pods_of(ray_service(folder)) for c in pod["spec"]["containers"]]


@each_folder
def test_api_server_would_accept_every_manifest(folder: Path) -> None:
    assert [fault for manifest in parse(render(folder)) for fault in find_faults(manifest)] == []


@each_folder
def test_serve_configuration_is_the_base_copy_and_has_no_problem(folder: Path) -> None:
    text = ray_service(folder)["spec"]["serveConfigV2"]
    assert find_problems(text) == []
    assert text == (BASE / "serve_config.yaml").read_text(encoding="utf-8")


@each_folder
def test_serve_listens_on_an_address_that_service_and_kubelet_reach(folder: Path) -> None:
    config = yaml.safe_load(ray_service(folder)["spec"]["serveConfigV2"])
    assert config["proxy_location"] == "EveryNode"
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8000}


@each_folder
def test_every_ray_container_gets_the_environment_of_serve_env(folder: Path) -> None:
    _, env = sorted(of_kind(folder, "ConfigMap"), key=lambda m: "-env-" in m["metadata"]["name"])
    assert env["data"] == parse_env((BASE / "serve.env").read_text(encoding="utf-8"))
    source = [{"configMapRef": {"name": env["metadata"]["name"]}}]
    assert [container["envFrom"] for container in containers(folder)] == [source] * len(
        containers(folder)
    )


@each_folder
def test_pods_run_unprivileged(folder: Path) -> None:
    for pod in pods_of(ray_service(folder)):
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"]
        assert context["runAsUser"] == 1000
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["enableServiceLinks"] is False
    for container in [*containers(folder), cluster(folder)["autoscalerOptions"]]:
        context = container["securityContext"]
        assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@each_folder
def test_requests_need_keys_from_a_secret(folder: Path) -> None:
    config = yaml.safe_load(ray_service(folder)["spec"]["serveConfigV2"])
    auth = config["applications"][0]["args"]["auth"]
    assert auth == {
        "api_keys_file": API_KEYS_FILE,
        "allow_anonymous": False,
        "allow_unauthenticated_ray": False,
    }
    for pod in pods_of(ray_service(folder)):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["api-keys"]["secret"]["secretName"] == "raystream-api-keys"
        assert not volumes["api-keys"]["secret"].get("optional", False)
        for container in pod["spec"]["containers"]:
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert mounts["api-keys"]["mountPath"] == str(Path(API_KEYS_FILE).parent)
            assert mounts["api-keys"]["readOnly"] is True


@each_folder
def test_probes_are_left_to_kuberay(folder: Path) -> None:
    probes = {"livenessProbe", "readinessProbe", "startupProbe"}
    assert not any(probes & container.keys() for container in containers(folder))


@each_folder
def test_worker_has_time_to_drain_before_it_is_killed(folder: Path) -> None:
    _, *workers = pods_of(ray_service(folder))
    for pod in workers:
        (container,) = pod["spec"]["containers"]
        wait_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["spec"]["terminationGracePeriodSeconds"] >= wait_s + DRAIN_S + 20


@each_folder
def test_only_the_serve_port_is_open_to_others(folder: Path) -> None:
    (policy,) = of_kind(folder, "NetworkPolicy")
    open_to_all = [rule["ports"] for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert open_to_all == [[{"protocol": "TCP", "port": 8000}]]


@each_folder
def test_budgets_and_policy_select_the_pods(folder: Path) -> None:
    budgets = {m["metadata"]["name"]: m for m in of_kind(folder, "PodDisruptionBudget")}
    (policy,) = of_kind(folder, "NetworkPolicy")
    head, *workers = pods_of(ray_service(folder))
    assert _selects(budgets["raystream-head"]["spec"]["selector"], head)
    assert _selects(policy["spec"]["podSelector"], head)
    for worker in workers:
        assert _selects(budgets["raystream-workers"]["spec"]["selector"], worker)
        assert not _selects(budgets["raystream-head"]["spec"]["selector"], worker)
        assert _selects(policy["spec"]["podSelector"], worker)


def _selects(selector: dict[str, Any], pod: Manifest) -> bool:
    return bool(selector["matchLabels"].items() <= pod["metadata"]["labels"].items())


@each_folder
def test_budgets_have_a_number_because_ray_clusters_have_no_scale(folder: Path) -> None:
    for budget in of_kind(folder, "PodDisruptionBudget"):
        assert isinstance(budget["spec"]["minAvailable"], int)


# The rules by which KubeRay refuses a RayService that the API server has accepted.
# Source: kuberay, ray-operator/controllers/ray/utils/validation.go


@each_folder
def test_name_leaves_room_for_kuberays_suffixes(folder: Path) -> None:
    assert re.fullmatch("[a-z]([-a-z0-9]{0,45}[a-z0-9])?", ray_service(folder)["metadata"]["name"])


@each_folder
def test_upgrade_starts_a_new_cluster_and_lets_old_streams_finish(folder: Path) -> None:
    spec = ray_service(folder)["spec"]
    assert spec["upgradeStrategy"] == {"type": "NewCluster"}
    assert spec["rayClusterDeletionDelaySeconds"] > DRAIN_S
    assert spec["excludeHeadPodFromServeSvc"] is True


@each_folder
def test_ray_is_new_enough_for_token_authentication(folder: Path) -> None:
    assert cluster(folder)["authOptions"] == {"mode": "token"}
    major, minor, _ = map(int, cluster(folder)["rayVersion"].split("."))
    assert (major, minor) >= (2, 52)


@each_folder
def test_ray_version_is_the_locked_one(folder: Path) -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert re.search(rf"^ray=={re.escape(cluster(folder)['rayVersion'])}\b", lock, re.MULTILINE)


@each_folder
def test_pods_of_autoscaler_v2_never_restart(folder: Path) -> None:
    assert cluster(folder)["enableInTreeAutoscaling"] is True
    assert cluster(folder)["autoscalerOptions"]["version"] == "v2"
    for pod in pods_of(ray_service(folder)):
        assert pod["spec"].get("restartPolicy", "Never") == "Never"
    names = {env["name"] for container in containers(folder) for env in container.get("env", [])}
    assert "RAY_enable_autoscaler_v2" not in names


@each_folder
def test_resources_and_labels_are_where_kuberay_reads_them(folder: Path) -> None:
    for group in (cluster(folder)["headGroupSpec"], *cluster(folder)["workerGroupSpecs"]):
        assert "resources" not in group
        assert "labels" not in group["rayStartParams"]
        assert not group.get("suspend", False)


@each_folder
def test_head_runs_no_replica_and_names_no_service(folder: Path) -> None:
    head = cluster(folder)["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "headService" not in head


@each_folder
def test_ports_have_the_names_that_kuberay_expects(folder: Path) -> None:
    for container in containers(folder):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert (ports["serve"], ports["metrics"]) == (8000, 8080)


@each_overlay
def test_overlay_sizes_each_worker_and_keeps_the_bases_settings(folder: Path) -> None:
    base_containers = {container["name"]: container for container in containers(BASE)}
    for group in cluster(folder)["workerGroupSpecs"]:
        assert 1 <= group["minReplicas"] <= group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
        assert container.items() >= base_containers["ray-worker"].items()


def _mistyped_key(manifest: Manifest) -> None:
    manifest["spec"]["rayClusterDeletionDelaySecond"] = 1


def _text_for_a_number(manifest: Manifest) -> None:
    manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplicas"] = "two"


def _mistyped_pod_key(manifest: Manifest) -> None:
    pod = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    pod["containers"][0]["enviromentFrom"] = []


def _missing_group_name(manifest: Manifest) -> None:
    del manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["groupName"]


@pytest.mark.parametrize(
    "spoil", [_mistyped_key, _text_for_a_number, _mistyped_pod_key, _missing_group_name]
)
def test_planted_mistake_in_the_ray_service_is_found(spoil: Callable[[Manifest], None]) -> None:
    manifest = ray_service(BASE)
    spoil(manifest)
    assert find_faults(manifest)


def test_mistyped_key_of_a_core_kind_is_found() -> None:
    (policy,) = of_kind(BASE, "NetworkPolicy")
    policy["spec"]["ingres"] = policy["spec"].pop("ingress")
    assert any("ingres" in fault for fault in find_faults(policy))


def test_kind_without_a_schema_is_a_fault() -> None:
    manifest = {"apiVersion": "ray.io/v2", "kind": "RayService", "metadata": {"name": "x"}}
    assert any("no schema" in fault for fault in find_faults(manifest))


def test_repeated_key_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="repeated"):
        parse("kind: A\nkind: B\n")


def test_mistyped_key_in_the_serve_configuration_is_found() -> None:
    text = ray_service(BASE)["spec"]["serveConfigV2"]
    (problem,) = find_problems(text.replace("autoscaling_config", "autoscaling_confg", 1))
    assert "did you mean 'autoscaling_config'?" in problem
