"""The rules by which KubeRay refuses a RayService that the API server has accepted.

Source: kuberay, ray-operator/controllers/ray/utils/validation.go and controllers/ray/common/pod.go
"""

import re
from collections.abc import Iterator

from tests.k8s.manifests import ROOT
from tests.k8s.rules.rendering import Rendering, Rule, env_of, ray_container

MAX_NAME_LENGTH = 47
REDIS_VARIABLES = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}
ALPHA = {"networkPolicy", "tlsOptions", "historyServerOptions"}
LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")


def name_leaves_room_for_suffixes(r: Rendering) -> Iterator[str]:
    name = r.service["metadata"]["name"]
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > MAX_NAME_LENGTH:
        yield f"the RayService's name {name!r}"


def groups_are_valid(r: Rendering) -> Iterator[str]:
    for group in (r.cluster["headGroupSpec"], *r.cluster["workerGroupSpecs"]):
        name = group.get("groupName", "head")
        if "resources" in group and {"num-cpus", "num-gpus"} & group["rayStartParams"].keys():
            yield f"{name}: resources are given twice"
        if "labels" in group["rayStartParams"]:
            yield f"{name}: rayStartParams.labels; labels belong to the group"
        if group.get("suspend"):
            yield f"{name}: a group can't be suspended under the autoscaler"
        for key, value in group.get("labels", {}).items():
            if not (LABEL_KEY.fullmatch(key) and LABEL_VALUE.fullmatch(value)):
                yield f"{name}: label {key}={value}"
    for group in r.cluster["workerGroupSpecs"]:
        if not 0 <= group["minReplicas"] <= group["maxReplicas"]:
            yield f"{group['groupName']}: minReplicas {group['minReplicas']}"


def authentication_is_by_ray_s_token(r: Rendering) -> Iterator[str]:
    if r.cluster.get("authOptions") != {"mode": "token"}:
        yield f"authOptions: {r.cluster.get('authOptions')}"
    major, minor, _ = map(int, r.cluster["rayVersion"].split("."))
    if (major, minor) < (2, 52):
        yield f"rayVersion {r.cluster['rayVersion']} knows no token"


def ray_version_is_the_locked_one(r: Rendering) -> Iterator[str]:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    version = r.cluster["rayVersion"]
    if not re.search(rf"^ray=={re.escape(version)}\b", lock, re.MULTILINE):
        yield f"rayVersion {version} is not in requirements.lock"


def pods_of_autoscaler_v2_never_restart(r: Rendering) -> Iterator[str]:
    options = r.cluster.get("autoscalerOptions", {})
    if not r.cluster.get("enableInTreeAutoscaling") or options.get("version") != "v2":
        yield "the in-tree autoscaler v2 is off"
    for pod in r.ray_pods:
        if pod["spec"].get("restartPolicy", "Never") != "Never":
            yield f"{pod['metadata']['name']}: restartPolicy"
        if "RAY_enable_autoscaler_v2" in env_of(ray_container(pod)):
            yield f"{pod['metadata']['name']}: RAY_enable_autoscaler_v2 beside autoscalerOptions"


def head_runs_no_replica_and_names_no_service(r: Rendering) -> Iterator[str]:
    head = r.cluster["headGroupSpec"]
    if head["rayStartParams"].get("num-cpus") != "0":
        yield "the head offers CPUs"
    if "headService" in head:
        yield "headService"
    if r.service["spec"].get("excludeHeadPodFromServeSvc") is not True:
        yield "the head is in the Service"


def upgrade_is_one_that_kuberay_takes(r: Rendering) -> Iterator[str]:
    strategy = r.service["spec"]["upgradeStrategy"]
    options = strategy.get("clusterUpgradeOptions")
    if strategy["type"] == "NewCluster":
        if options is not None:
            yield "clusterUpgradeOptions of another strategy"
    elif strategy["type"] != "NewClusterWithIncrementalUpgrade":
        yield f"upgradeStrategy {strategy['type']}"
    elif options is None or not options.get("gatewayClassName"):
        yield "an incremental upgrade without gatewayClassName"
    else:
        surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent", -1)
        if not 0 <= step <= surge <= 100 or options.get("intervalSeconds", 0) <= 0:
            yield f"clusterUpgradeOptions {options}"


def redis_is_named_in_one_place(r: Rendering) -> Iterator[str]:
    redis = REDIS_VARIABLES & env_of(ray_container(r.head)).keys()
    params = {"redis-password", "redis-username"} & r.cluster["headGroupSpec"][
        "rayStartParams"
    ].keys()
    if redis | params:
        yield f"{redis | params}: gcsFaultToleranceOptions is their place"
    if "ray.io/ft-enabled" in r.service["metadata"].get("annotations", {}):
        yield "ray.io/ft-enabled"
    options = r.cluster.get("gcsFaultToleranceOptions")
    if options is not None and "valueFrom" not in options.get("redisPassword", {}):
        yield "the password of Redis is in the manifest"


def base_needs_no_feature_gate(r: Rendering) -> Iterator[str]:
    for key in ALPHA & r.cluster.keys():
        yield f"{key} is alpha"
    if "backend" in r.cluster.get("gcsFaultToleranceOptions", {}):
        yield "gcsFaultToleranceOptions.backend is alpha"


def autoscaler_shares_the_head_s_logs(r: Rendering) -> Iterator[str]:
    mounts = {m["mountPath"]: m["name"] for m in ray_container(r.head)["volumeMounts"]}
    if mounts.get("/tmp/ray") != "ray-logs":
        yield "the head's /tmp/ray is not the volume that KubeRay gives the autoscaler"


def ports_have_the_names_that_kuberay_expects(r: Rendering) -> Iterator[str]:
    for pod in r.ray_pods:
        ports = {port["name"]: port["containerPort"] for port in ray_container(pod)["ports"]}
        if (ports.get("serve"), ports.get("metrics")) != (8000, 8080):
            yield f"{pod['metadata']['name']}: ports {ports}"


RULES: tuple[Rule, ...] = (
    name_leaves_room_for_suffixes,
    groups_are_valid,
    authentication_is_by_ray_s_token,
    ray_version_is_the_locked_one,
    pods_of_autoscaler_v2_never_restart,
    head_runs_no_replica_and_names_no_service,
    upgrade_is_one_that_kuberay_takes,
    redis_is_named_in_one_place,
    base_needs_no_feature_gate,
    autoscaler_shares_the_head_s_logs,
    ports_have_the_names_that_kuberay_expects,
)
