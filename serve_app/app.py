"""The composition root: builds the Serve application from `args:` in serve_config.yaml.

Each model gets a deployment named after it; one ingress takes the requests for all of them.
"""

from pathlib import Path

import ray
from ray import serve
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.serve import Application

from deployments.model_spec import ModelSpec
from deployments.text_classifier import TextClassifier
from deployments.text_generator import TextGenerator
from serve_app.backends.model_router import PATH as MODEL_ROUTER
from serve_app.config import (
    INGRESS_NAME,
    LEDGER_NAME,
    PROJECT_ROOT,
    AppConfig,
    AuthConfig,
    ModelConfig,
)
from serve_app.ingress import Ingress, listening_host
from serve_app.keys.api_keys import KeyRing, load_api_keys
from serve_app.keys.ledger import KeyLedger
from serve_app.middleware.auth import require_protection

MIN_ONGOING_REQUESTS = 512
"""Ray's routers must not hold a burst back: the model's replica queues and refuses requests."""

UNAUTHENTICATED_RAY = (
    "Ray asks for no token: anyone who can reach one of its ports, or a replica's, can run code on "
    "this machine. Set RAY_AUTH_MODE=token on every node before Ray starts, with the same token on "
    "each (`ray get-auth-token --generate` makes one; a RayService needs only `authOptions: {mode: "
    "token}`). If others can't reach these ports, write "
    "`auth: {allow_unauthenticated_ray: true}`"
)


class UnauthenticatedRayError(Exception):
    """Ray runs without token authentication."""


def build(args: AppConfig) -> Application:
    """Compose the graph that `import_path` names.

    Raises:
        ApiKeysError: The API keys can't be read.
        UnauthenticatedRayError: Ray asks for no token.
        UnprotectedServerError: Others can reach the server, and it has no keys.
    """
    require_ray_token(args.auth)
    keys = load_api_keys(args.auth, PROJECT_ROOT)
    host = listening_host()
    # Checked before any model loads. If Serve has not started yet, the ingress checks it.
    if host is not None:
        require_protection(host, keys is not None, args.auth.allow_anonymous)
    num_gpus = _num_cluster_gpus()
    specs = {model.id: resolve(model, num_cluster_gpus=num_gpus) for model in args.models}
    handles = {model.id: _bind(model, specs[model.id]) for model in args.models}
    num_ongoing = max(MIN_ONGOING_REQUESTS, args.ongoing_requests)
    ledger = _bind_ledger(keys, num_ongoing) if keys is not None and keys.limited else None
    ingress = serve.deployment(name=INGRESS_NAME, max_ongoing_requests=num_ongoing)(Ingress)
    return ingress.bind(args, handles, keys, ledger, list(specs.values()))


def require_ray_token(auth: AuthConfig) -> None:
    """Refuse to serve on a Ray without token authentication, unless the owner allows that.

    A replica unpickles what other replicas send to its port, so only Ray's token tells them from
    strangers. Permission to serve HTTP without keys is not a permission for this.

    Raises:
        UnauthenticatedRayError: Ray asks for no token.
    """
    # The mode that a replica's server reads, too. Ray passes it to all processes of a node.
    if not (auth.allow_unauthenticated_ray or is_token_auth_enabled()):
        raise UnauthenticatedRayError(UNAUTHENTICATED_RAY)


def _bind_ledger(keys: KeyRing, num_ongoing: int) -> Application:
    """Bind the ledger: one replica, since counts must be kept in one place."""
    deployment = serve.deployment(
        name=LEDGER_NAME,
        num_replicas=1,
        max_ongoing_requests=num_ongoing,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2,
    )(KeyLedger)
    return deployment.bind(keys.limited)


def _bind(model: ModelConfig, spec: ModelSpec) -> Application:
    deployment = serve.deployment(
        name=model.deployment_name,
        max_ongoing_requests=max(MIN_ONGOING_REQUESTS, model.ongoing_requests()),
        ray_actor_options={"num_cpus": model.num_cpus, "num_gpus": spec.num_gpus},
        request_router_config={"request_router_class": MODEL_ROUTER},
    )(TextGenerator if model.task == "generate" else TextClassifier)
    return deployment.bind(spec)


def _num_cluster_gpus() -> float:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call] # Ray leaves it untyped
    return resources.get("GPU", 0.0)


def resolve(model: ModelConfig, *, num_cluster_gpus: float) -> ModelSpec:
    """Return what a model's replicas need to know.

    Args:
        model: The model's entry.
        num_cluster_gpus: GPUs that the cluster has now. If its GPU nodes are added only later,
            `num_gpus: auto` would wrongly mean 0; such a cluster needs a number.
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
        reasoning_parser=model.reasoning_parser,
    )


def _resolve_source(source: str) -> str:
    """Return the absolute path of a folder here or in the project; else the hub id unchanged."""
    for folder in (Path(source), PROJECT_ROOT / source):
        if folder.is_dir():
            return str(folder.resolve())
    return source
