import re
from pathlib import Path

import pytest
import yaml

from k8s.make_base import BASE, MONITORING
from serve_app.commands.check.check import find_problems
from serve_app.config import AuthConfig
from serve_app.keys.api_keys import ApiKeysError, load_api_keys
from tests.k8s.manifests import ROOT, find_faults, parse
from tests.k8s.renderings import COMBINATIONS, COMPONENTS, NAMES, OVERLAYS, rendering_of
from tests.k8s.rules import ALL

pytestmark = pytest.mark.kubectl

K8S = ROOT / "k8s"


def test_api_server_would_accept_every_manifest() -> None:
    faults = [
        f"{name}: {fault}"
        for name in NAMES
        for manifest in rendering_of(name).manifests
        for fault in find_faults(manifest)
    ]
    assert faults == []


def test_every_rendering_keeps_every_rule() -> None:
    faults = [
        f"{name}, {rule.__name__}: {fault}"
        for name in NAMES
        for rule in ALL
        for fault in rule(rendering_of(name))
    ]
    assert faults == []


def test_each_overlay_serves_its_own_configuration_or_base_s() -> None:
    others = []
    for folder in OVERLAYS:
        built_on = {"gke": "gpu-multi", "eks": "gpu-single"}.get(folder.name, folder.name)
        own = folder.parent / built_on / "serve_config.yaml"
        source = own if own.exists() else BASE / "serve_config.yaml"
        text = rendering_of(folder.name).service["spec"]["serveConfigV2"]
        if text != source.read_text(encoding="utf-8"):
            others.append(f"{folder.name} does not serve {source}")
    assert others == []


def test_every_component_is_part_of_a_tested_rendering() -> None:
    used = {name for _, components in COMBINATIONS.values() for name in components}
    texts = [(overlay / "kustomization.yaml").read_text("utf-8") for overlay in OVERLAYS]
    used |= {name for text in texts for name in re.findall(r"components/([\w-]+)", text)}
    assert {folder.name for folder in COMPONENTS} - used == set()


def test_two_renderings_at_once_have_names_of_their_own() -> None:
    for name in NAMES:
        keys = [(each["kind"], each["metadata"]["name"]) for each in rendering_of(name).manifests]
        assert len(keys) == len(set(keys)), name


def test_namespace_asks_for_restricted_pods() -> None:
    (namespace,) = parse((K8S / "namespace.yaml").read_text(encoding="utf-8"))
    assert find_faults(namespace) == []
    assert namespace["metadata"]["name"] == "raystream"
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_a_head_that_may_fail_may_be_evicted() -> None:
    found = rendering_of("head-ha")
    assert "raystream-head" not in found.named("PodDisruptionBudget")
    assert "raystream-head" in rendering_of("cpu").named("PodDisruptionBudget")
    redis = found.cluster["gcsFaultToleranceOptions"]
    assert redis["redisAddress"].startswith(("redis://", "rediss://"))


def test_api_keys_as_shipped_open_no_door(tmp_path: Path) -> None:
    (secret,) = rendering_of("cpu+api-keys").of_kind("Secret")
    assert secret["metadata"]["name"] == "raystream-api-keys"
    (tmp_path / "keys.yaml").write_bytes((K8S / "components/api-keys/keys.yaml").read_bytes())
    with pytest.raises(ApiKeysError):
        load_api_keys(AuthConfig(api_keys_file=str(tmp_path / "keys.yaml")), tmp_path, {})


def test_grafana_and_prometheus_find_their_files() -> None:
    found = rendering_of("cpu+monitoring")
    boards = found.named("ConfigMap")["raystream-dashboards"]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert set(boards["data"]) == {path.name for path in (MONITORING / "dashboards").iterdir()}
    (rules,) = found.of_kind("PrometheusRule")
    alerts = yaml.safe_load((MONITORING / "alerts" / "raystream.yaml").read_text("utf-8"))
    assert rules["spec"] == alerts


def test_models_are_not_counted_twice_by_the_two_scrapes() -> None:
    (monitor,) = rendering_of("cpu+monitoring").of_kind("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (relabeling,) = endpoint["metricRelabelings"]
    assert relabeling["action"] == "drop"
    assert re.fullmatch(relabeling["regex"], "ray_vllm_num_requests_waiting")
    assert re.fullmatch(relabeling["regex"], "ray_raystream_streams_moved_total")
    assert not re.fullmatch(relabeling["regex"], "ray_node_mem_used")


def test_readme_names_every_overlay_and_component() -> None:
    text = (K8S / "README.md").read_text(encoding="utf-8")
    for folder in [*OVERLAYS, *COMPONENTS]:
        assert folder.name in text, folder


# The checks themselves.


def test_kind_without_a_schema_is_a_fault() -> None:
    manifest = {"apiVersion": "ray.io/v2", "kind": "RayService", "metadata": {"name": "x"}}
    assert any("no schema" in fault for fault in find_faults(manifest))


def test_repeated_key_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="repeated"):
        parse("kind: A\nkind: B\n")


def test_mistyped_key_in_the_serve_configuration_is_found() -> None:
    text = rendering_of("base").service["spec"]["serveConfigV2"]
    (problem,) = find_problems(text.replace("autoscaling_config", "autoscaling_confg", 1))
    assert "did you mean 'autoscaling_config'?" in problem
