"""Runs a whole sweep: its levels one after another, their files, and the observer."""

import gc
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from loadtest.client.clock import Clock
from loadtest.client.contract import Api
from loadtest.client.observer import Observer
from loadtest.client.sender import Sender, Target
from loadtest.client.stamped_http import stamped_session
from loadtest.client.watchdog import TimeLimits
from loadtest.config.choices import GpuSampling
from loadtest.config.run_config import RunConfig
from loadtest.load.api import build_api, model_of
from loadtest.load.gpu_monitor import has_nvidia_smi, watched_gpus
from loadtest.load.inputs import Inputs
from loadtest.load.level import Level
from loadtest.load.plan import DEFAULT_QUEUES, LevelPlan, plans_of
from loadtest.load.question_sampler import QuestionSampler
from loadtest.load.stop import Stop
from loadtest.results.machine import describe_machine
from loadtest.results.record import LevelRecord
from loadtest.results.redaction import redacted_body, redacted_headers, redacted_url
from loadtest.results.run_files import RunFiles


class Sweep:
    """Runs all levels of a configuration."""

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        observer: Observer,
        stop: Stop,
        clock: Clock,
    ) -> None:
        self._config = config
        self._inputs = inputs
        self._observer = observer
        self._stop = stop
        self._clock = clock
        self._levels: list[LevelRecord] = []

    async def run(self, directory: Path) -> None:
        """Send all requests; write the results to the directory, even if the run is cut off.

        Raises:
            FileExistsError: The directory already holds a run.
        """
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(stamped_session(self._clock))
            model = await model_of(self._config, session, self._target())
            published = published_config(self._config, model)
            files = RunFiles(directory, published, describe_machine())
            stack.callback(files.close)
            gpus = await self._watch_gpus(stack)
            sender = self._sender(session, build_api(self._config, model))
            await self._run_levels(sender, files, gpus)

    async def _run_levels(
        self, sender: Sender, files: RunFiles, gpus: Sequence[dict[str, Any]]
    ) -> None:
        sampler = self._sampler()
        for plan in plans_of(self._config):
            if self._stop.draining.is_set():
                break
            self._announce(plan)
            level = Level(plan, sender, sampler, self._stop, self._clock, files.add)
            self._levels.append(await level.run(lambda begun: self._save(files, begun)))
            self._save(files)
        status = "stopped" if self._stop.draining.is_set() else "finished"
        files.write_summary(status, self._levels, gpus)

    def _save(self, files: RunFiles, *begun: LevelRecord) -> None:
        files.write_summary("running", [*self._levels, *begun])

    def _announce(self, plan: LevelPlan) -> None:
        # A full garbage collection during the level would delay its requests.
        gc.collect()
        gc.freeze()
        self._observer.level_started(
            plan.title,
            self._clock(),
            num_requests=plan.num_counted,
            duration_s=plan.duration_s,
        )

    def _target(self) -> Target:
        config = self._config
        return Target(URL(config.url), config.headers(), config.secrets())

    def _sender(self, session: aiohttp.ClientSession, api: Api) -> Sender:
        config = self._config
        limits = TimeLimits(config.timeout, config.first_token_timeout, config.stall_timeout)
        return Sender(session, self._target(), api, limits, self._clock, self._observer)

    def _sampler(self) -> QuestionSampler:
        config = self._config
        return QuestionSampler(
            self._inputs.questions,
            order=config.order,
            seed=config.seed,
            num_users=config.users,
            image_urls=self._inputs.image_urls,
            nonce=uuid.uuid4().hex[:8] if config.unique else None,
        )

    async def _watch_gpus(self, stack: AsyncExitStack) -> Sequence[dict[str, Any]]:
        wanted = self._config.gpu
        if wanted is GpuSampling.ON or (wanted is GpuSampling.AUTO and has_nvidia_smi()):
            return await stack.enter_async_context(watched_gpus(self._clock))
        return ()


def published_config(config: RunConfig, model: str | None) -> dict[str, Any]:
    """Return the configuration for the results: with defaults, without secrets.

    Args:
        config: The run's configuration.
        model: The model that requests name, whether configured or looked up.
    """
    plan = plans_of(config)[0]
    return {
        **config.model_dump(mode="json"),
        "url": redacted_url(config.url),
        "body": redacted_body(config.body),
        "header": redacted_headers(config.header),
        "api": str(config.resolved_api()),
        "model": model,
        "queues": None if config.rate is not None else list(config.queues or DEFAULT_QUEUES),
        "loops": plan.num_loops,
        "requests": plan.num_requests,
    }
