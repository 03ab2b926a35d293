"""The composition root: from `args:` in serve_config.yaml to the Serve application.

One deployment for each model, named after it, and one ingress in front of all.
"""

from pathlib import Path

import ray
from ray import serve
from ray.serve import Application

from deployments.model_spec import ModelSpec
from deployments.text_classifier import TextClassifier
from deployments.text_generator import TextGenerator
from serve_app.api_keys import KeyRing, load_api_keys
from serve_app.auth import require_closed_door
from serve_app.config import INGRESS_NAME, LEDGER_NAME, PROJECT_ROOT, AppConfig, ModelConfig
from serve_app.ingress import Ingress, listening_host
from serve_app.key_ledger import KeyLedger

MIN_ONGOING_REQUESTS = 512
"""The model's replica queues and refuses, not Ray's routers: a burst shall reach it whole."""


def build(args: AppConfig) -> Application:
    """Compose the graph that `import_path` names.

    Raises:
        ApiKeysError: The API keys can't be read.
        OpenDoorError: Serve listens where others reach it, and nothing keeps them out.
    """
    keys = load_api_keys(args.auth, PROJECT_ROOT)
    host = listening_host()
    # Before any model loads. Where Serve is yet to start, the ingress itself finds out.
    if host is not None:
        require_closed_door(host, keys is not None, args.auth.allow_anonymous)
    handles = {model.id: _bind(model) for model in args.models}
    num_ongoing = max(MIN_ONGOING_REQUESTS, args.ongoing_requests)
    ledger = _bind_ledger(keys, num_ongoing) if keys is not None and keys.limited else None
    ingress = serve.deployment(name=INGRESS_NAME, max_ongoing_requests=num_ongoing)(Ingress)
    return ingress.bind(args, handles, keys, ledger)


def _bind_ledger(keys: KeyRing, num_ongoing: int) -> Application:
    """Bind the ledger: one replica, since what it counts must be counted in one place."""
    deployment = serve.deployment(
        name=LEDGER_NAME,
        num_replicas=1,
        max_ongoing_requests=num_ongoing,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2,
    )(KeyLedger)
    return deployment.bind(keys.limited)


def _bind(model: ModelConfig) -> Application:
    spec = resolve(model, num_cluster_gpus=_num_cluster_gpus())
    deployment = serve.deployment(
        name=model.deployment_name,
        max_ongoing_requests=max(MIN_ONGOING_REQUESTS, model.ongoing_requests()),
        ray_actor_options={"num_cpus": model.num_cpus, "num_gpus": spec.num_gpus},
    )(TextGenerator if model.task == "generate" else TextClassifier)
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
        max_queued_requests=model.max_queued_requests,
        max_queued_tokens=model.max_queued_tokens,
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
