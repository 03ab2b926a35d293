"""The replica of Ray Serve that runs the ingress: its actor, and what it asks Serve and Ray.

`Ingress` gathers the application's parts from the handles that `app` has bound, and from what only
an actor knows; `ingress` composes the application of them.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from fastapi import FastAPI
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client

from deployments.contract.gen_ai_spans import ModelSpans
from deployments.contract.model_spec import ModelSpec
from deployments.contract.telemetry.tracing import SpanKind, open_tracer
from deployments.replica.ray_metrics import RayMetrics
from deployments.replica.start_board import read_starts
from serve_app.backends.key_ledger import HandleLedger
from serve_app.backends.models.cluster_state import serve_replicas
from serve_app.backends.models.devices import DeviceSources
from serve_app.backends.models.serve_scaling import ServeScaling
from serve_app.backends.models.snapshots import (
    PATIENCE_S,
    IngressReport,
    ModelSource,
    Snapshots,
)
from serve_app.backends.replicas.handles import Handle, ask_all
from serve_app.backends.replicas.replica_departures import STOPPING
from serve_app.backends.replicas.replica_reports import HandleReports
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from serve_app.keys.api_keys import KeyRing
from serve_app.metrics import IngressMetrics
from serve_app.middleware.auth import require_protection
from serve_app.served_models import ApplicationDescription, HandleModels

logger = logging.getLogger("ray.serve")
own_logger = logging.getLogger("ray.serve.raystream.ingress")


class Announcement(Protocol):
    """What tells users that the server is ready."""

    def is_ready(self) -> bool:
        """Ask the server whether it is; this may take seconds."""
        ...

    def text(self, after_s: float) -> str:
        """Return the lines; `after_s` is how long the start took, in seconds."""
        ...


async def announce(announcement: Announcement, poll_s: float = 1.0) -> None:
    """Log an announcement once the server is ready.

    If it is at once, another ingress serves already, and has told so.
    """
    began_s = time.monotonic()
    is_ready = await asyncio.to_thread(announcement.is_ready)
    if is_ready:
        return
    while not is_ready:
        await asyncio.sleep(poll_s)
        is_ready = await asyncio.to_thread(announcement.is_ready)
    own_logger.info(announcement.text(time.monotonic() - began_s))


@serve.ingress()
class Ingress:
    """Runs the application inside a Serve replica.

    Serve asks for the application after it has made the replica, so the application is never
    pickled. The application must be the outermost object: Serve adds handlers to it.
    """

    def __init__(
        self,
        config: AppConfig,
        handles: Mapping[str, Handle],
        keys: KeyRing | None = None,
        ledger: Handle | None = None,
        specs: Sequence[ModelSpec] = (),
        announcement: Announcement | None = None,
    ) -> None:
        """Wrap the handles that the composition root has bound.

        Args:
            config: The whole configuration.
            handles: One for each model id.
            keys: The keys that let requests in; None lets every request in.
            ledger: Bound if keys have limits.
            specs: What the replicas know of models that may sleep. Their deployments have our
                router, which tells whether a replica runs.
            announcement: What to log once the server is ready; None if another says so.

        Raises:
            UnprotectedServerError: Others can reach the server, and it has no keys.
        """
        host = listening_host()
        assert host is not None, "a replica runs under a controller"
        require_protection(host, keys is not None, config.auth.allow_anonymous)
        logger.info("serving %s; GET /, GET /docs, POST /v1/chat/completions", ", ".join(handles))
        self._config = config
        self._specs = specs
        context = serve.get_replica_context()
        metrics = IngressMetrics(handles, context.deployment, context.replica_id.unique_id)
        self._ray_metrics = RayMetrics(metrics.store)
        tracer = open_tracer(
            config.tracing.settings, "raystream-ingress", context.replica_id.unique_id
        )

        def spans_of(id_: str) -> ModelSpans | None:
            return None if tracer is None else ModelSpans(tracer, id_, SpanKind.CLIENT)

        models = HandleModels.of(config, handles, specs, context.app_name, spans_of)
        self._snapshots = Snapshots(
            metrics.store.snapshot,
            {
                id_: ModelSource(
                    partial(ask_all, handle, "read_metrics", PATIENCE_S),
                    models.replicas.get(id_),
                )
                for id_, handle in handles.items()
            },
            partial(ask_all, _own_handle(context), "read_metrics", PATIENCE_S),
        )
        self._parts = AppParts(
            config=config,
            generators=models.generators,
            classifiers=models.classifiers,
            embedders=models.embedders,
            replicas=models.replicas,
            departures=models.departures,
            shares=models.shares,
            describe_files=models.describe_files,
            keys=keys,
            host=host,
            ledger=None if ledger is None else HandleLedger(ledger),
            metrics=metrics,
            snapshots=self._snapshots,
            ask_states=models.ask_states,
            devices=DeviceSources(
                {
                    id_: HandleReports(handle, models.running[id_]).ask
                    for id_, handle in handles.items()
                },
                read_starts=partial(asyncio.to_thread, read_starts, context.app_name),
            ),
            scaling=ServeScaling(
                context.app_name,
                {handle.deployment_name: models.running[id_] for id_, handle in handles.items()},
            ),
            serve_echoes_id=True,
            tracer=tracer,
            is_stopping=partial(_is_stopping, context),
            on_shutdown=[models.aclose, partial(asyncio.to_thread, self._ray_metrics.close)],
            watches=[
                *models.watches,
                *([] if announcement is None else [partial(announce, announcement)]),
            ],
        )

    async def describe_application(self) -> ApplicationDescription:
        """Return what another process needs to reach the models as this one does."""
        return ApplicationDescription(self._config, tuple(self._specs))

    async def read_metrics(self) -> IngressReport:
        """Return this ingress's metrics, and what it remembers of replicas that are gone."""
        return self._snapshots.report()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application that this replica serves."""
        return build_app(self._parts)


def _own_handle(context: serve.context.ReplicaContext) -> Handle:
    """Return a handle to all replicas of the ingress."""
    return serve.get_deployment_handle(context.deployment, context.app_name)


async def _is_stopping(context: serve.context.ReplicaContext) -> bool:
    """Return whether Serve stops this replica of the ingress. It tells a replica nothing of that.

    Raises:
        Exception: The controller does not answer.
    """
    states = (await serve_replicas(context.app_name, context.deployment)).states
    # A controller that has been restarted knows no replica at first.
    return bool(states) and states.get(context.replica_id.unique_id, STOPPING) == STOPPING


def listening_host() -> str | None:
    """Return the host that Serve's proxies listen on; None while Serve does not run.

    An application can't see the `http_options` of its own configuration file. Only a private
    function of Ray returns them; a Ray version without it fails at import, so we would notice.
    """
    options = listening_options()
    return None if options is None else str(options.host)


def listening_options() -> HTTPOptions | None:
    """Return Serve's options for HTTP; None while Serve does not run. See `listening_host`."""
    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config
