"""What the traces of one request take, in this process: ingress, call, replica and engine.

Without Ray, HAProxy and a client the CPU time of a request is small and steady, so the small part
of its traces shows. The engine's thread is left out: it has the same work with and without traces,
but for a note of the time, and varies most. Requests are short and ask for 2 tokens: the traces of
long ones cost the same, but for a short function call in two processes for each delta. The baseline
is the same application without a tracer, on the same replica.
"""

import asyncio
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.types import ASGIApp

from benchmarks.streaming import MODEL
from deployments.contract.gen_ai_spans import ModelSpans
from deployments.contract.tracing import SpanKind, Tracer, TracingSettings, open_tracer
from raystream.local_handle import LocalHandle
from serve_app.backends.replicas.generation import HandleGenerationBackend
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.local_replica import local_generator

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

REQUESTS_PER_STREAM: Final = 4
"""In one round."""

PATH: Final = "/v1/chat/completions"
BODY: Final = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "temperature": 0,
    "max_tokens": 2,
    "ignore_eos": True,
    "stream": True,
}

ON, OFF, AGAIN = "with traces", "without", "without, again"


async def measured_requests(
    model: Path, otlp_endpoint: str, num_streams: int, num_turns: int
) -> list[dict[str, float]]:
    """Return the CPU time of a request in us, by what it was measured with, for each turn.

    Args:
        model: The folder with the model.
        otlp_endpoint: The collector's URL; it must be another process.
        num_streams: How many requests run at once.
        num_turns: How often each is measured.
    """
    settings = TracingSettings(otlp_endpoint)
    sizes = {"max_num_seqs": num_streams, "max_queued_requests": num_streams}
    turns = []
    with local_generator(
        model, **sizes, max_model_len=1024, num_threads=1, tracing=settings
    ) as replica:
        tracer = open_tracer(settings, "raystream-ingress", "i")
        assert tracer is not None
        assert replica._tracer is not None
        tracers = (tracer, replica._tracer)
        async with application(replica, tracer) as traced, application(replica, None) as plain:
            apps = {ON: traced, OFF: plain, AGAIN: plain}
            for _ in range(num_turns + 1):  # the first warms up
                order = random.sample([*apps], len(apps))
                turns.append(
                    {name: await _cpu_us(apps[name], num_streams, tracers) for name in order}
                )
    return turns[1:]


@asynccontextmanager
async def application(replica: object, tracer: Tracer | None) -> AsyncIterator[ASGIApp]:
    """Build the ingress's application before a replica in this process."""
    spans = None if tracer is None else ModelSpans(tracer, MODEL, SpanKind.CLIENT)
    async with AsyncExitStack() as stack:
        if tracer is not None:
            stack.push_async_callback(asyncio.to_thread, tracer.close)
        handle = cast("DeploymentHandle[Any]", LocalHandle(replica))
        backend = HandleGenerationBackend(handle, spans=spans)
        await stack.enter_async_context(aclosing(backend))
        config = AppConfig.model_validate({"models": [{"id": MODEL, "source": "nowhere"}]})
        yield build_app(AppParts(config, {MODEL: backend}, tracer=tracer))


async def _cpu_us(app: ASGIApp, num_streams: int, tracers: Sequence[Tracer]) -> float:
    """Send requests in a closed loop.

    Returns:
        The CPU time of one in us, with the export of its spans and without the engine's thread.
    """
    gc.collect()
    began_s = _cpu_s()
    await asyncio.gather(*(_stream(app) for _ in range(num_streams)))
    for tracer in tracers:
        await asyncio.to_thread(tracer.provider.force_flush)
    return 1e6 * (_cpu_s() - began_s) / (REQUESTS_PER_STREAM * num_streams)


def _cpu_s() -> float:
    """Return the CPU seconds of this process's threads but the engine's."""
    (engine,) = (each for each in threading.enumerate() if each.name == "engine")
    assert engine.ident is not None, "it runs"
    clock = time.pthread_getcpuclockid(engine.ident)
    return time.process_time() - time.clock_gettime(clock)


async def _stream(app: ASGIApp) -> None:
    for _ in range(REQUESTS_PER_STREAM):
        await _ask(app)


async def _ask(app: ASGIApp) -> None:
    """Send a request and read its answer to the end.

    Raises:
        RuntimeError: It is not a whole stream.
    """
    async with AsgiCall(app, PATH, BODY) as call:
        await call.end()
    if b"data: [DONE]" not in call.body:
        raise RuntimeError(call.body[-500:].decode())
