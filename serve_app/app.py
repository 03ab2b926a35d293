"""The composition root: from `args:` in serve_config.yaml to the Serve application.

One deployment for each model, named after it, and one ingress in front of all.
"""

from pathlib import Path

import ray
from ray import serve
from ray.serve import Application

from deployments.model_spec import ModelSpec
from deployments.text_generator import TextGenerator
from serve_app.config import INGRESS_NAME, AppConfig, ModelConfig
from serve_app.ingress import Ingress

MAX_ONGOING_REQUESTS = 512
"""The engine queues, not Ray's router, so this only bounds what a replica holds in memory."""

PROJECT_ROOT = Path(__file__).resolve().parent.parent


def build(args: AppConfig) -> Application:
    """Compose the graph that `import_path` names."""
    handles = {model.id: _bind(model) for model in args.models}
    return serve.deployment(name=INGRESS_NAME)(Ingress).bind(args, handles)


def _bind(model: ModelConfig) -> Application:
    spec = resolve(model, num_cluster_gpus=_num_cluster_gpus())
    deployment = serve.deployment(
        name=model.deployment_name,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": model.num_cpus, "num_gpus": spec.num_gpus},
    )(TextGenerator)
    return deployment.bind(spec)


def _num_cluster_gpus() -> float:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call] # Ray leaves it untyped
    return resources.get("GPU", 0.0)


def resolve(model: ModelConfig, *, num_cluster_gpus: float) -> ModelSpec:
    """Return what a model's replicas are told.

    Args:
        model: The model's entry.
        num_cluster_gpus: GPUs of the cluster as it is now; on a cluster that has yet to add its
            GPU nodes, `num_gpus: auto` would wrongly mean 0, so write a number there.
    """
    num_gpus = model.num_gpus
    if num_gpus == "auto":
        num_gpus = model.gpu_share if num_cluster_gpus and model.device != "cpu" else 0.0
    return ModelSpec(
        id=model.id,
        source=_resolve_source(model.source),
        revision=model.revision,
        dtype=model.dtype,
        device=model.device,
        num_gpus=num_gpus,
        num_threads=None if model.num_threads == "auto" else model.num_threads,
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs,
        max_batched_tokens=model.max_batched_tokens,
        prefix_caching=model.prefix_caching,
        quantization=model.quantization,
        cuda_graphs=model.cuda_graphs,
        tool_call_parser=model.tool_call_parser,
    )


def _resolve_source(source: str) -> str:
    """Return a folder's absolute path, from the working directory or the project; else a hub id."""
    for folder in (Path(source), PROJECT_ROOT / source):
        if folder.is_dir():
            return str(folder.resolve())
    return source
