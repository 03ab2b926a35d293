"""The Serve configurations of the overlays with GPUs, made from the root's serve_config.yaml.

An overlay serves other models than the root's file, and pins them to nodes by their label
`node-kind`; all other settings are the root's. `make k8s` writes the files (see `make_base`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from deployments.contract.model_spec import ModelConfig
from serve_app.vllm_environment import runtime_env_of

TEMPLATES: Final = {"generate": "pydoc-chat", "classify": "pydoc-detector"}
"""The root's model whose settings a model of each task takes over."""

VLLM_FOLDER: Final = "/opt/vllm"
"""Where an image that was built with `VLLM` has vLLM's environment."""

INGRESS_KIND: Final = "cpu"
"""The nodes of the ingresses: a GPU node without one can leave when its streams have moved."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of an overlay.

    Attributes:
        id: The name that clients use.
        source: Its repository on the hub.
        revision: The commit that is served.
        task: Whether it generates or classifies.
        num_gpus: Its share of a GPU. Always a number: `auto` means none while no GPU node runs.
        config: The file of tests/hub_configs that holds its configuration.
        max_replicas: How many replicas there may be.
        target_waiting_tokens: One more replica each time this many tokens wait; None: the root's.
        tensor_parallel_size: GPUs that vLLM divides the model among; None: raystream's own engine.
    """

    id: str
    source: str
    revision: str
    task: str
    num_gpus: float
    config: str
    max_replicas: int = 1
    target_waiting_tokens: int | None = None
    tensor_parallel_size: int | None = None


@dataclass(frozen=True, slots=True)
class GpuOverlay:
    """What an overlay serves, and on which GPUs.

    Attributes:
        node_kind: The label of its GPU workers.
        gpu_memory: What `raystream plan` is told: the memory that such a card has at least.
        models: Its models.
        num_gpus: The GPUs of each worker.
    """

    node_kind: str
    gpu_memory: str
    models: tuple[Model, ...]
    num_gpus: int = 1


QWEN: Final = Model(
    id="qwen2.5-7b-instruct",
    source="Qwen/Qwen2.5-7B-Instruct",
    revision="a09a35458c702b33eeacc393d103063234e8bc28",
    task="generate",
    num_gpus=1,
    config="qwen2.5-7b-instruct",
)
GEMMA: Final = Model(
    id="gemma-3-12b-it",
    source="google/gemma-3-12b-it",
    revision="96b6f1eccf38110c56df3a15bffe176da04bfd80",
    task="generate",
    num_gpus=0.85,
    config="gemma-3-12b-it",
)
RADAR: Final = Model(
    id="radar-vicuna-7b",
    source="TrustSafeAI/RADAR-Vicuna-7B",
    revision="4ff1f23a69a36aa1df47b0933be6279f1b896c9b",
    task="classify",
    num_gpus=0.1,
    config="radar-vicuna-7b",
)
# One more replica for about 220 texts of 300 characters, 75 tokens each.
RADAR_ALONE: Final = replace(RADAR, num_gpus=1, max_replicas=4, target_waiting_tokens=16_384)

QWEN_DIVIDED: Final = replace(QWEN, num_gpus=2, tensor_parallel_size=2)
QWEN_SCALED: Final = replace(QWEN, max_replicas=4)

OVERLAYS: Final[Mapping[str, GpuOverlay]] = {
    "gpu-single": GpuOverlay("gpu-48gb", "44GiB", (QWEN,)),
    "gpu-shared": GpuOverlay("gpu-48gb", "44GiB", (GEMMA, RADAR)),
    "inference-gateway": GpuOverlay("gpu-48gb", "44GiB", (QWEN_SCALED,)),
    "gpu-multi": GpuOverlay("a100-40gb", "39GiB", (RADAR_ALONE,)),
    "gpu-vllm": GpuOverlay("gpu-2x24gb", "22GiB", (QWEN_DIVIDED,), num_gpus=2),
}
"""By the name of the folder. Other overlays with GPUs build on one of these."""


def on_gpus(config: Mapping[str, Any], overlay: GpuOverlay) -> dict[str, Any]:
    """Return the cluster's configuration with an overlay's models in place of the root's."""
    (application,) = config["applications"]
    entries = {entry["id"]: entry for entry in application["args"]["models"]}
    deployments = {each["name"]: each for each in application["deployments"]}
    models = [_entry(entries[TEMPLATES[model.task]], model) for model in overlay.models]
    return {
        **config,
        "applications": [
            {
                **application,
                "args": {**application["args"], "models": models},
                "deployments": [
                    _ingress(deployments["Ingress"]),
                    *(
                        _deployment(deployments[TEMPLATES[model.task]], model, overlay.node_kind)
                        for model in overlay.models
                    ),
                ],
            }
        ],
    }


def _entry(template: Mapping[str, Any], model: Model) -> dict[str, Any]:
    return {
        **template,
        "id": model.id,
        "source": model.source,
        "revision": model.revision,
        "device": "cuda",
        "num_gpus": model.num_gpus,
        "num_cpus": 1,
        **_engine(model),
    }


def _engine(model: Model) -> dict[str, Any]:
    if model.tensor_parallel_size is None:
        return {}
    return {
        "engine": "vllm",
        "engine_python": VLLM_FOLDER,
        "engine_args": {"tensor_parallel_size": model.tensor_parallel_size},
        "num_threads": 1,  # `auto` would be the cores of the machine that writes this file
    }


def _ingress(template: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **template,
        "max_replicas_per_node": 1,
        "autoscaling_config": {
            **template["autoscaling_config"],
            "min_replicas": 2,
            "max_replicas": 4,
        },
        "ray_actor_options": {"num_cpus": 1, "label_selector": {"node-kind": INGRESS_KIND}},
    }


def _deployment(template: Mapping[str, Any], model: Model, node_kind: str) -> dict[str, Any]:
    scaling = template["autoscaling_config"]
    kwargs = scaling["policy"]["policy_kwargs"]
    if model.target_waiting_tokens is not None:
        kwargs = {**kwargs, "target_waiting_tokens": model.target_waiting_tokens}
    return {
        **template,
        "name": model.id,
        "autoscaling_config": {
            **scaling,
            "max_replicas": model.max_replicas,
            "policy": {**scaling["policy"], "policy_kwargs": kwargs},
        },
        "ray_actor_options": {
            "num_cpus": 1,
            "num_gpus": model.num_gpus,
            "label_selector": {"node-kind": node_kind},
            **_runtime_env(model),
        },
        # A second replica would need a second card, or a second share of this one.
        "max_surge_percent": 0,
        # vLLM's check may wait for a token of its engine.
        **({} if model.tensor_parallel_size is None else {"health_check_timeout_s": 10}),
    }


def _runtime_env(model: Model) -> dict[str, Any]:
    """Return vLLM's environment, which `ray_actor_options` would otherwise take away."""
    if model.tensor_parallel_size is None:
        return {}
    entry = {"id": model.id, "source": model.source, **_engine(model)}
    return {"runtime_env": runtime_env_of(ModelConfig.model_validate(entry))}
