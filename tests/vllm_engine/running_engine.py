"""The adapter around AsyncLLM on a tiny model, and readers of its sequences."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from deployments.contract.claims import Claim
from deployments.contract.generation import GenerationRequest
from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.contract.output import EngineStats, FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.admission.admission import Admission
from deployments.generator.admission.engine_run import EngineRun
from deployments.generator.text_engine import EngineFacts
from deployments.vllm_engine.engine import VllmEngine
from deployments.vllm_engine.logs import EngineLogs
from tests.vllm_engine.parameter_sets import PROMPT, tiny_model_folder

DEADLINE_S = 60


@dataclass
class RunningEngine:
    """An engine, what it told at its start, and the figures of each step."""

    engine: VllmEngine
    facts: EngineFacts
    seen: list[EngineStats]

    async def run(
        self, params: SamplingParams, given: tuple[int, ...] = (), **request: Any
    ) -> "Gains":
        """Run one sequence to its end."""
        gains = Gains()
        with self.running(gains, params, given, **request):
            async with asyncio.timeout(DEADLINE_S):
                await gains.ended.wait()
        return gains

    @contextmanager
    def running(
        self, gains: "Gains", params: SamplingParams, given: tuple[int, ...] = (), **request: Any
    ) -> Iterator[None]:
        """Run one sequence while the block lasts."""
        name = self.engine.unique_id("r")
        sequence = SequenceRequest(
            name,
            **{"prompt_token_ids": PROMPT, **request},
            params=params,
            generated_token_ids=given,
            is_resumed=bool(given),
            goes_first=bool(given),
        )
        self.engine.validate(sequence)
        sequence = self.engine.compile_grammar(sequence)
        with self.engine.running(sequence, gains.take):
            yield

    @contextmanager
    def admitted(
        self,
        admission: Admission,
        gains: "Gains",
        params: SamplingParams,
        priority: int,
        given: tuple[int, ...] = (),
    ) -> Iterator[None]:
        """Run one sequence in its turns, as a replica does, while the block lasts."""
        request = GenerationRequest(
            "r", "", params, given, bool(given), claim=Claim(priority), may_park=True
        )
        sequence = self.engine.compile_grammar(
            SequenceRequest(
                self.engine.unique_id("r"), PROMPT, params, given, is_resumed=request.is_resumed
            )
        )
        limits = self.facts.limits
        with admission.permit(request) as permit:
            num_planned_tokens = limits.num_planned_tokens(sequence)
            admission.weigh(permit, limits.max_num_tokens(sequence), num_planned_tokens)
            run = EngineRun(
                self.engine,
                request,
                sequence,
                gains.take,
                flush=lambda: None,
                on_begun=partial(admission.note_begun, permit),
                on_late=partial(admission.park_late, permit),
            )
            with closing(run), admission.turns(permit, run):
                yield

    async def until_idle(self) -> None:
        """Wait until vLLM runs nothing."""
        async with asyncio.timeout(DEADLINE_S):
            while self.engine.stats.num_running:
                await self.engine.ping()


@dataclass
class Gains:
    """The deltas of a sequence."""

    deltas: list[TextDelta] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, delta: TextDelta) -> None:
        """Take a delta."""
        assert not self.ended.is_set(), "a delta came after the last"
        self.deltas.append(delta)
        self.begun.set()
        if delta.finish_reason is not None:
            self.ended.set()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens."""
        return tuple(each for delta in self.deltas for each in delta.token_ids)

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def last(self) -> TextDelta:
        """The last delta."""
        return self.deltas[-1]

    @property
    def reason(self) -> FinishReason | None:
        """Why the sequence has ended."""
        return self.last.finish_reason


def spec(**changes: Any) -> ModelSpec:
    """Return the spec of a small replica of the tiny model."""
    values: dict[str, Any] = {
        "id": "tiny",
        "source": str(tiny_model_folder()),
        "engine": "vllm",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 2**26,
        "engine_args": {"enforce_eager": True},
    }
    config = ModelConfig(**{**values, **changes})
    return ModelSpec(config, config.source, 0.0)


@contextmanager
def started(**changes: Any) -> Iterator[RunningEngine]:
    """Start an engine for the block; that takes about ten seconds of CPU time."""
    logs = EngineLogs()
    logs.prepare()
    seen: list[EngineStats] = []
    engine = VllmEngine(spec(**changes), logs, seen.append, on_cpu=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            # EngineCore compiles what it would in a server.
            patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
            facts = engine.start()
        yield RunningEngine(engine, facts, seen)
    finally:
        engine.stop()
