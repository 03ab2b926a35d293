"""KV memory that nothing holds goes back to the operating system, and nothing that is held does."""

import mmap
import platform
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import pytest
from transformers import PreTrainedModel

from deployments.contract.sampling_params import SamplingParams
from deployments.engine import idle_memory
from deployments.engine.engine import Engine
from deployments.engine.engine_thread import EngineThread
from deployments.engine.idle_memory import KEPT_S, IdleMemory
from deployments.engine.limits import EngineLimits
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.plan.kv_layout import Extent
from tests.engine.collector import Collector, random_prompt
from tests.engine.layouts import for_each_layout
from tests.engine.tiny_models import generate, load, qwen2
from tests.hand_clock import HandClock

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux", reason="other systems take pages only when they need them"
)

MakeModel = Callable[[], PreTrainedModel]

LENGTH = 640
"""The most tokens of a sequence; fewer where a model has fewer positions."""
BLOCK_SIZE = mmap.PAGESIZE // 32
"""Tokens of a block that fills a page: one has 32 bytes in the tiny models."""
ANSWER = SamplingParams(temperature=0, max_tokens=6)
DEADLINE_S = 20


class Rested:
    """An engine with blocks of whole pages, and a clock that says when memory goes back."""

    def __init__(self, make_model: MakeModel = qwen2, *, prefix_caching: bool = True) -> None:
        loaded = load(make_model)
        self.length = min(LENGTH, loaded.text_config.max_position_embeddings)
        # A step's tokens are few enough for a prompt to take several.
        limits = EngineLimits(
            3, self.length, self.length // 5, prefix_caching=prefix_caching, block_size=BLOCK_SIZE
        )
        self.clock = HandClock()
        self.engine = Engine(loaded, limits)
        self.kv = self.engine._kv
        self.extents = self.engine._scheduler.table.extents
        self.engine._idle_memory = IdleMemory(self.kv, self.extents, self.clock)
        self.collector = Collector(self.engine)

    def answer(self, name: str, prompt: tuple[int, ...]) -> list[int]:
        self.engine.add(SequenceRequest(name, prompt, ANSWER))
        self.collector.run()
        return self.collector.token_ids(name)

    def rest(self) -> None:
        """Let time pass until nothing is left to give back."""
        while (wait_s := self.engine.give_back_memory()) is not None:
            self.clock.now_s += wait_s

    @property
    def free(self) -> list[tuple[int, Extent]]:
        """The gaps of each group."""
        return [(i, gap) for i, pool in enumerate(self.extents.pools) for gap in pool._gaps()]

    def written(self, group: int, blocks: Extent) -> bool:
        """Return whether a layer has anything but zeros in these blocks."""
        size = self.kv.layout.block_size
        tokens = slice(blocks.first * size, blocks.end * size)
        layers = [layer for layer, own in enumerate(self.kv.groups) if own == group]
        return any(bool(self.kv.keys[layer][tokens].any()) for layer in layers)


@for_each_layout
def test_a_conversation_goes_on_from_its_prefix_after_all_free_memory_was_given_back(
    make_model: MakeModel,
) -> None:
    rested, random = Rested(make_model), Random(4)
    prompt = random_prompt(random, rested.length // 4)
    first = rested.answer("first", prompt)
    endless = replace(ANSWER, ignore_eos=True)
    rested.engine.add(
        SequenceRequest("aborted", random_prompt(random, rested.length * 3 // 4), endless)
    )
    for _ in range(3):
        rested.collector.step()
    rested.engine.abort("aborted")
    assert any(rested.written(*each) for each in rested.free)
    rested.rest()
    assert not any(rested.written(*each) for each in rested.free)
    longer = (*prompt, *first, *random_prompt(random, 5))
    assert rested.answer("next", longer) == generate(make_model, longer, 6)
    assert rested.collector.deltas["next"][0].num_cached_tokens >= len(prompt)
    other = random_prompt(random, rested.length // 2)
    assert rested.answer("last", other) == generate(make_model, other, 6)
    rested.rest()
    assert rested.answer("again", longer) == generate(make_model, longer, 6)


def test_memory_stays_with_what_runs_and_with_what_was_freed_just_now() -> None:
    rested, random = Rested(prefix_caching=False), Random(5)
    held = replace(ANSWER, max_tokens=200, ignore_eos=True)
    prompt = random_prompt(random, 100)
    rested.engine.add(SequenceRequest("held", prompt, held))
    rested.collector.step()
    rested.engine.add(SequenceRequest("short", random_prompt(random, 100), ANSWER))
    while "short" in rested.engine._sequences:
        rested.collector.step()
    group, gap = rested.free[-1]
    assert rested.written(group, gap)

    rested.engine.give_back_memory()
    rested.clock.now_s += KEPT_S
    rested.engine.give_back_memory()
    rested.clock.now_s += KEPT_S - 1
    rested.engine.give_back_memory()
    assert rested.written(group, gap)

    rested.clock.now_s += 1
    rested.rest()
    assert not rested.written(group, gap)
    rested.collector.run()
    assert rested.collector.token_ids("held") == generate(qwen2, prompt, 200)


def test_little_goes_back_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_memory, "BYTES_AT_ONCE", 1)
    rested = Rested(prefix_caching=False)
    rested.answer("s", random_prompt(Random(6), 300))
    parts: list[Extent] = []
    monkeypatch.setattr(rested.kv, "give_back", lambda group, blocks: parts.append(blocks))
    rested.rest()
    assert len(parts) == -(-306 // BLOCK_SIZE)
    assert {part.num_blocks for part in parts} == {1}
    assert len({part.first for part in parts}) == len(parts)
    num_parts = len(parts)
    rested.rest()
    assert len(parts) == num_parts


def test_a_gpu_s_memory_stays_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    rested = Rested(prefix_caching=False)
    rested.answer("s", random_prompt(Random(6), 300))
    monkeypatch.setattr(rested.kv, "_reserved", None)
    assert rested.engine.give_back_memory() is None


@pytest.fixture
def start() -> Iterator[Callable[[Engine], EngineThread]]:
    threads: list[EngineThread] = []

    def start(engine: Engine) -> EngineThread:
        threads.append(EngineThread(lambda: engine, lambda deltas: None))
        threads[-1].start().result(DEADLINE_S)
        return threads[-1]

    yield start
    for thread in threads:
        thread.stop()


def test_an_idle_thread_gives_all_back_and_then_sleeps(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[Engine], EngineThread]
) -> None:
    monkeypatch.setattr(idle_memory, "KEPT_S", 0.001)
    rested = Rested(prefix_caching=False)
    rested.engine._idle_memory = IdleMemory(rested.kv, rested.extents)
    is_done, give_back = threading.Event(), rested.engine.give_back_memory

    def note() -> float | None:
        wait_s = give_back()
        if wait_s is None and rested.engine.stats.num_steps:
            is_done.set()
        return wait_s

    monkeypatch.setattr(rested.engine, "give_back_memory", note)
    thread = start(rested.engine)
    thread.add(SequenceRequest("s", random_prompt(Random(7), 300), ANSWER))
    assert is_done.wait(DEADLINE_S)
    assert thread.stats.num_steps > 0
    assert not any(rested.written(*each) for each in rested.free)
