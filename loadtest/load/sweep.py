"""A whole run: its levels one after the other, their files, and whoever watches."""

import gc
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from loadtest.apis.build import build_api
from loadtest.apis.by_path import ApiName
from loadtest.apis.contract import Api, Call, UnsuitableCallError
from loadtest.config import GpuSampling, RunConfig
from loadtest.gpu import has_nvidia_smi, watched_gpus
from loadtest.images import read_images
from loadtest.load.asker import Asker
from loadtest.load.level import Level
from loadtest.load.plan import LevelPlan
from loadtest.load.plans import plans_of
from loadtest.load.published_config import published_config
from loadtest.load.stop import Stop
from loadtest.machine import describe_machine
from loadtest.model_lookup import first_model
from loadtest.observer import Observer
from loadtest.questions import SHIPPED, Question, read_questions
from loadtest.record import LevelRecord
from loadtest.run_clock import Clock
from loadtest.run_files import RunFiles
from loadtest.sender import Sender, Target
from loadtest.stamped_http import stamped_session
from loadtest.watchdog import TimeLimits

_WITHOUT_MODEL = frozenset({ApiName.CUSTOM, ApiName.TEXT_GENERATION, ApiName.CLASSIFY})
"""These have a model of their own unless they are told another."""


@dataclass(frozen=True, slots=True)
class Material:
    """What is asked, read before the first request is sent."""

    questions: tuple[Question, ...]
    image_urls: tuple[str, ...]


def read_material(config: RunConfig) -> Material:
    """Read the questions and the images, and try whether the API takes them.

    Raises:
        ValueError: There are none, the API has no place for them, or there is nothing to watch
            GPUs with.
    """
    if config.gpu is GpuSampling.ON and not has_nvidia_smi():
        raise ValueError("--gpu on: there is no nvidia-smi to watch with; say --gpu auto")
    questions = read_questions(config.data or SHIPPED)
    image_urls = read_images(config.images) if config.images is not None else ()
    api = build_api(config, model=None)
    image_url = image_urls[0] if image_urls else None
    for number, question in enumerate(questions, 1):
        try:
            api.body(Call(question.text, question.messages, image_url))
        except UnsuitableCallError as error:
            raise ValueError(f"question {number} of {config.data}: {error}") from None
    return Material(questions, image_urls)


class Sweep:
    """Runs all levels of a configuration."""

    def __init__(
        self,
        config: RunConfig,
        material: Material,
        observer: Observer,
        stop: Stop,
        clock: Clock,
    ) -> None:
        """Prepare it; nothing is sent or written yet."""
        self._config = config
        self._material = material
        self._observer = observer
        self._stop = stop
        self._clock = clock
        self._levels: list[LevelRecord] = []

    async def run(self, directory: Path) -> None:
        """Send everything; the results lie in the directory, whatever happens.

        Raises:
            FileExistsError: The directory holds a run already.
        """
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(stamped_session(self._clock))
            model = await self._model(session)
            published = published_config(self._config, model)
            files = RunFiles(directory, published, describe_machine())
            stack.callback(files.close)
            gpus = await self._watch_gpus(stack)
            sender = self._sender(session, build_api(self._config, model))
            await self._run_levels(sender, files, gpus)

    async def _run_levels(
        self, sender: Sender, files: RunFiles, gpus: Sequence[dict[str, Any]]
    ) -> None:
        asker = self._asker()
        for plan in plans_of(self._config):
            if self._stop.draining.is_set():
                break
            self._announce(plan)
            level = Level(plan, sender, asker, self._stop, self._clock, files.add)
            self._levels.append(await level.run(lambda begun: self._save(files, begun)))
            self._save(files)
        status = "stopped" if self._stop.draining.is_set() else "finished"
        files.write_summary(status, self._levels, gpus)

    def _save(self, files: RunFiles, *begun: LevelRecord) -> None:
        files.write_summary("running", [*self._levels, *begun])

    def _announce(self, plan: LevelPlan) -> None:
        # A full collection over everything that was ever imported would be a lag of its own.
        gc.collect()
        gc.freeze()
        self._observer.level_started(
            plan.title,
            self._clock(),
            num_requests=plan.num_counted,
            duration_s=plan.duration_s,
        )

    async def _model(self, session: aiohttp.ClientSession) -> str | None:
        config = self._config
        if config.model is not None or config.resolved_api() in _WITHOUT_MODEL:
            return config.model
        return await first_model(session, self._target())

    def _target(self) -> Target:
        config = self._config
        return Target(URL(config.url), config.headers(), config.secrets())

    def _sender(self, session: aiohttp.ClientSession, api: Api) -> Sender:
        config = self._config
        limits = TimeLimits(config.timeout, config.first_token_timeout, config.stall_timeout)
        return Sender(session, self._target(), api, limits, self._clock, self._observer)

    def _asker(self) -> Asker:
        config = self._config
        return Asker(
            self._material.questions,
            order=config.order,
            seed=config.seed,
            num_users=config.users,
            image_urls=self._material.image_urls,
            nonce=uuid.uuid4().hex[:8] if config.unique else None,
        )

    async def _watch_gpus(self, stack: AsyncExitStack) -> Sequence[dict[str, Any]]:
        wanted = self._config.gpu
        if wanted is GpuSampling.ON or (wanted is GpuSampling.AUTO and has_nvidia_smi()):
            return await stack.enter_async_context(watched_gpus(self._clock))
        return ()
