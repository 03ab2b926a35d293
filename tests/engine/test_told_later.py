"""On a GPU, texts are told while the next step runs; here a CPU's engine is made to do so."""

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest

from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.recovery.step_recovery import StepOutcome
from deployments.engine.scheduling.scheduler import StepPlan
from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine.collector import (
    GREEDY,
    Collector,
    penalized_requests,
    random_prompt,
    run_staggered,
    sampled_requests,
)
from tests.engine.faults import make_undecodable
from tests.engine.tiny_models import load, make_engine, qwen2


def requests() -> list[SequenceRequest]:
    """Return requests that end by their length, an EOS token or a stop string."""
    random = Random(3)
    given = [*sampled_requests(random), *penalized_requests(random)]
    given = [replace(request, sequence_id=f"r{i}") for i, request in enumerate(given)]
    scored = SamplingParams(temperature=0, max_tokens=9, top_logprobs=2, prompt_logprobs=1)
    return [*given, SequenceRequest("scored", random_prompt(random, 20), scored)]


def test_the_same_is_told_of_each_sequence() -> None:
    expected = run_staggered(make_engine(load(qwen2)), requests())
    found = run_staggered(make_engine(load(qwen2)), requests(), tells_later=True)
    assert found.deltas.keys() == expected.deltas.keys()
    for name, deltas in expected.deltas.items():
        assert [replace(delta, begun_s=None) for delta in found.deltas[name]] == [
            replace(delta, begun_s=None) for delta in deltas
        ]


def test_a_text_is_told_between_the_launch_of_the_next_step_and_the_wait_for_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, events = engine_with(requests()[:2]), list[str]()
    run, complete = engine._recovery.run, engine._complete

    def launched(plan: StepPlan) -> StepOutcome:
        events.append("launch")
        return run(plan)

    def completed(*given: object, **options: object) -> object:
        events.append("wait")
        return complete(*given, **options)  # type: ignore[arg-type] # passed on as they come

    monkeypatch.setattr(engine._recovery, "run", launched)
    monkeypatch.setattr(engine, "_complete", completed)
    engine.deliver = lambda deltas: events.append(f"tell {len(deltas)}")
    for _ in range(4):
        engine.step()
    # The first step's tokens are their sequences' first, so they are told at once.
    assert events == ["launch", "wait"] * 2 + ["launch", "tell 2", "wait"] * 2


def engine_with(given: Iterable[SequenceRequest]) -> Engine:
    engine = make_engine(load(qwen2))
    engine._runs_by_itself = True
    for request in given:
        engine.add(request)
    return engine


def names(deltas: Iterable[tuple[str, TextDelta]]) -> list[str]:
    return [name for name, _ in deltas]


def test_first_and_last_tokens_and_those_of_texts_with_a_stop_string_do_not_wait() -> None:
    plain = replace(GREEDY, max_tokens=3, ignore_eos=True)
    engine = engine_with(
        [
            SequenceRequest("plain", (60, 61, 62), plain),
            SequenceRequest("stop", (60, 61, 62), replace(plain, stop=("never",))),
        ]
    )
    later: list[list[str]] = []
    engine.deliver = lambda deltas: later.append(names(deltas))
    at_once = [names(engine.step()) for _ in range(3)]
    assert at_once == [["plain", "stop"], ["stop"], ["plain", "stop"]]
    assert later == [["plain"]]
    assert not engine.has_work


def test_without_somebody_to_deliver_to_each_step_returns_all_its_deltas() -> None:
    engine = engine_with([SequenceRequest("s", (60, 61, 62), replace(GREEDY, ignore_eos=True))])
    assert [names(engine.step()) for _ in range(3)] == [["s"]] * 3


def test_what_was_not_told_before_an_abort_is_told_to_nobody() -> None:
    request = SequenceRequest("s", (60, 61, 62), replace(GREEDY, ignore_eos=True))
    engine = engine_with([request])
    told: list[tuple[str, TextDelta]] = []
    engine.deliver = told.extend
    for _ in range(2):
        engine.step()
    engine.abort("s")
    assert not engine.has_work
    engine.step()
    assert told == []
    collector = Collector(engine, tells_later=True)
    engine.add(request)
    collector.run()
    expected = run_staggered(make_engine(load(qwen2)), [request])
    assert collector.token_ids("s") == expected.token_ids("s")
    assert collector.text("s") == expected.text("s")


def test_an_undecodable_token_ends_its_sequence_alone_while_the_next_step_runs() -> None:
    given = [
        SequenceRequest(f"s{i}", random_prompt(Random(i), 4 + i), replace(GREEDY, ignore_eos=True))
        for i in range(4)
    ]
    expected = run_staggered(make_engine(load(qwen2)), given)
    bad_id = expected.token_ids("s1")[4]
    loaded = load(qwen2)
    make_undecodable(loaded, [bad_id])
    found = run_staggered(make_engine(loaded), given, tells_later=True)
    for name in expected.deltas:
        whole = expected.token_ids(name)
        if bad_id not in whole:
            assert found.token_ids(name) == whole
            continue
        assert found.token_ids(name) == whole[: whole.index(bad_id)]
        assert found.finish_reason(name) is FinishReason.ERROR
        assert [delta.error is None for delta in found.deltas[name]].count(False) == 1
