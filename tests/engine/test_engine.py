from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import SamplingParams
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.limits import InvalidSequenceError, SequenceTooLongError
from deployments.engine.model.runner import ModelRunner
from deployments.engine.scheduling.scheduler import StepPlan
from deployments.engine.scheduling.sequence import Beginning, SequenceRequest
from deployments.engine.scheduling.step_pace import MIN_TOKENS, StepPace
from tests.engine.collector import (
    GREEDY,
    image_request,
    random_prompt,
    run_one,
    run_staggered,
    sampled_requests,
)
from tests.engine.tiny_models import (
    EOS_TOKEN_ID,
    IMAGE_SIZE,
    VOCAB_SIZE,
    byte_tokenizer,
    gemma3,
    generate,
    load,
    make_engine,
    qwen2,
)


def test_images_change_the_answer() -> None:
    random = Random(6)
    first, second = image_request("a", random, 1), image_request("b", random, 1)
    second = SequenceRequest("b", first.prompt_token_ids, GREEDY, model_inputs=second.model_inputs)
    collector = run_staggered(make_engine(load(gemma3)), [first, second])
    assert collector.token_ids("a") != collector.token_ids("b")


def test_a_bound_on_stalls_cuts_prompts_beside_running_sequences_and_changes_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[tuple[int, int]] = []
    run = ModelRunner.run

    def spied(self: ModelRunner, plan: StepPlan) -> Any:
        sizes.append((len(plan.decode), plan.num_tokens - len(plan.decode)))
        return run(self, plan)

    monkeypatch.setattr(ModelRunner, "run", spied)
    random = Random(7)
    requests = [SequenceRequest(f"{i}", random_prompt(random, 60), GREEDY) for i in range(3)]
    loaded = load(qwen2)
    plain = run_staggered(make_engine(loaded, budget=128), requests)
    assert max(num_prompt for num_decode, num_prompt in sizes if num_decode) > MIN_TOKENS
    sizes.clear()
    note = StepPace.note

    def noted(self: StepPace, num_decode_rows: int, num_prompt_tokens: int, _: float) -> None:
        # A token of a prompt seems to cost so much that the bound is soon at its least.
        note(self, num_decode_rows, num_prompt_tokens, 1e-3 + num_prompt_tokens)

    monkeypatch.setattr(StepPace, "note", noted)
    paced = run_staggered(make_engine(loaded, budget=128, max_stall_s=0.1), requests)
    assert max(num_prompt for num_decode, num_prompt in sizes if num_decode) == MIN_TOKENS
    for request in requests:
        assert paced.token_ids(request.sequence_id) == plain.token_ids(request.sequence_id)


def test_abort_frees_the_place_at_once() -> None:
    engine = make_engine(load(qwen2), max_num_seqs=1)
    engine.add(SequenceRequest("a", (50, 51), GREEDY))
    engine.add(SequenceRequest("b", (52,), GREEDY))
    engine.step()
    engine.abort("a")
    engine.abort("never seen")
    assert [name for name, _ in engine.step()] == ["b"]
    assert engine.stats.num_running == 1


def test_a_resumed_sequence_that_returns_is_counted_once() -> None:
    engine = make_engine(load(qwen2))
    resumed = SequenceRequest("a", (50, 51), GREEDY, (52,), is_resumed=True)
    engine.add(resumed)
    engine.abort("a")
    engine.add(replace(resumed, sequence_id="b", is_return=True))
    assert engine.stats.num_resumed == 1


def test_a_beginning_is_noted_with_what_was_cached_then() -> None:
    engine = make_engine(load(qwen2))
    request = SequenceRequest("a", tuple(range(40, 72)), GREEDY)
    first, second = Beginning(), Beginning()
    engine.add(replace(request, beginning=first))
    assert first.num_cached_tokens is None
    while not engine.step():
        assert first.num_cached_tokens == 0
    engine.abort("a")
    engine.add(replace(request, sequence_id="b", beginning=second))
    engine.step()
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 31, "all but the last, which gives the next token"


def test_sampled_tokens_are_the_same_alone_and_in_a_batch() -> None:
    loaded, requests = load(qwen2), sampled_requests(Random(21))
    together = run_staggered(make_engine(loaded), requests)
    for request in requests:
        alone = run_staggered(make_engine(loaded), [request])
        name = request.sequence_id
        assert together.token_ids(name) == alone.token_ids(name)
        assert together.text(name) == alone.text(name)


@pytest.mark.parametrize("num_generated", [1, 6, 11])
def test_a_resumed_sequence_continues_as_if_uninterrupted(num_generated: int) -> None:
    loaded = load(qwen2)
    for request in sampled_requests(Random(22)):
        name = request.sequence_id
        whole = run_staggered(make_engine(loaded), [request])
        done = whole.deltas[name][:num_generated]
        resumed = run_staggered(
            make_engine(loaded),
            [
                SequenceRequest(
                    name,
                    request.prompt_token_ids,
                    request.params,
                    tuple(i for delta in done for i in delta.token_ids),
                )
            ],
        )
        assert resumed.deltas[name] == whole.deltas[name][num_generated:]


def test_a_resumed_sequence_with_images_continues_as_if_uninterrupted() -> None:
    loaded, request = load(gemma3), image_request("i", Random(23), 2)
    whole = run_staggered(make_engine(loaded), [request])
    resumed = run_staggered(
        make_engine(loaded),
        [
            SequenceRequest(
                "i",
                request.prompt_token_ids,
                GREEDY,
                tuple(whole.token_ids("i")[:5]),
                request.model_inputs,
            )
        ],
    )
    assert resumed.deltas["i"] == whole.deltas["i"][5:]


def test_max_tokens_ends_by_length() -> None:
    collector = run_one(SamplingParams(temperature=0, max_tokens=3))
    assert len(collector.token_ids("s")) == 3
    assert collector.finish_reason("s") is FinishReason.LENGTH


def test_without_max_tokens_the_model_length_ends_the_text() -> None:
    collector = run_one(SamplingParams(temperature=0, ignore_eos=True))
    assert len(collector.token_ids("s")) == 96 - 3
    assert collector.finish_reason("s") is FinishReason.LENGTH


def test_a_stop_token_ends_the_text_and_is_counted_but_not_shown() -> None:
    free = run_one(SamplingParams(temperature=0, max_tokens=6)).token_ids("s")
    params = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=frozenset({free[3]}))
    collector = run_one(params)
    stopped_at = free.index(free[3])
    assert collector.token_ids("s") == free[: stopped_at + 1]
    assert collector.text("s") == byte_tokenizer().decode(
        free[:stopped_at], skip_special_tokens=True
    )
    assert collector.finish_reason("s") is FinishReason.STOP


@pytest.mark.parametrize(("skips", "text"), [(True, ""), (False, "<special3><special3>")])
def test_special_tokens_are_shown_on_request(skips: bool, text: str) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=2, logit_bias=((5, 100.0),), skip_special_tokens=skips
    )
    assert run_one(params).text("s") == text


def test_a_stop_string_ends_the_text_before_itself() -> None:
    whole = run_one(SamplingParams(temperature=0, max_tokens=12)).text("s")
    stop = whole[4:6]
    collector = run_one(SamplingParams(temperature=0, max_tokens=12, stop=(stop,)))
    assert collector.text("s") == whole[: whole.index(stop)]
    assert collector.deltas["s"][-1].stop == stop
    assert collector.finish_reason("s") is FinishReason.STOP


def test_the_models_own_eos_ends_the_text_unless_it_is_ignored() -> None:
    model = load(qwen2)
    first = run_one(SamplingParams(temperature=0, max_tokens=4)).token_ids("s")[1]
    loaded = type(model)(model.model, model.tokenizer, None, frozenset({first, EOS_TOKEN_ID}))
    for ignore_eos, reason in [(False, FinishReason.STOP), (True, FinishReason.LENGTH)]:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=ignore_eos)
        collector = run_staggered(make_engine(loaded), [SequenceRequest("s", (60, 61, 62), params)])
        assert collector.finish_reason("s") is reason


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (SequenceRequest("s", (), GREEDY), InvalidSequenceError, "empty"),
        (SequenceRequest("s", (50,) * 97, SamplingParams()), SequenceTooLongError, "has 97 tokens"),
        (SequenceRequest("s", (50,) * 96, SamplingParams()), SequenceTooLongError, "has 96 tokens"),
        (SequenceRequest("s", (50,) * 90, GREEDY), SequenceTooLongError, "max_tokens is 12"),
        (SequenceRequest("s", (VOCAB_SIZE,), GREEDY), InvalidSequenceError, "from 0 to 299"),
        (SequenceRequest("s", (-1,), GREEDY), InvalidSequenceError, "from 0 to 299"),
    ],
)
def test_a_sequence_that_cannot_run_is_refused_before_admission(
    request_: SequenceRequest, error: type[Exception], says: str
) -> None:
    engine = make_engine(load(qwen2))
    with pytest.raises(error, match=says):
        engine.add(request_)
    assert not engine.has_work


def test_an_id_in_use_is_refused() -> None:
    engine = make_engine(load(qwen2))
    engine.add(SequenceRequest("s", (50,), GREEDY))
    with pytest.raises(InvalidSequenceError, match="exists"):
        engine.add(SequenceRequest("s", (51,), GREEDY))


def test_only_a_sequence_that_breaks_the_model_fails() -> None:
    random = Random(31)
    good = [SequenceRequest(f"g{i}", random_prompt(random, 9), GREEDY) for i in range(4)]
    bad = image_request("bad", random, 1)
    more_images_than_places = {
        **bad.model_inputs,
        "pixel_values": torch.zeros(2, 3, IMAGE_SIZE, IMAGE_SIZE),
    }
    bad = SequenceRequest("bad", bad.prompt_token_ids, GREEDY, model_inputs=more_images_than_places)
    collector = run_staggered(make_engine(load(gemma3)), [good[0], bad, *good[1:]])
    assert collector.deltas["bad"][-1].error == "the model failed on this sequence"
    for request in good:
        expected = generate(gemma3, request.prompt_token_ids, 12)
        assert collector.token_ids(request.sequence_id) == expected


def test_non_finite_logits_end_only_their_sequence_whose_memory_is_used_again() -> None:
    loaded, poison = load(qwen2), 299
    with torch.no_grad():
        loaded.model.get_parameter("model.embed_tokens.weight")[poison] = torch.nan
    good = [SequenceRequest(f"g{i}", (50 + i, 60), GREEDY) for i in range(4)]
    clean = run_staggered(make_engine(loaded, max_num_seqs=2), good)
    bad = SequenceRequest("bad", (50, poison, 51), GREEDY)
    collector = run_staggered(make_engine(loaded, max_num_seqs=2), [good[0], bad, *good[1:]])
    assert "not finite" in (collector.deltas["bad"][-1].error or "")
    assert {name: collector.token_ids(name) for name in clean.deltas} == {
        name: clean.token_ids(name) for name in clean.deltas
    }


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.slow
@pytest.mark.parametrize("max_model_len", [2, 3, 96])
def test_the_shortest_model_length_warms_up_and_holds_a_prompt_and_a_token(
    max_model_len: int,
) -> None:
    engine = make_engine(load(qwen2), max_num_seqs=1, max_model_len=max_model_len, budget=1)
    engine.warm_up()
    prompt = (60,) * (max_model_len - 1)
    params = SamplingParams(temperature=0, ignore_eos=True)
    collector = run_staggered(engine, [SequenceRequest("s", prompt, params)])
    assert collector.token_ids("s") == generate(qwen2, prompt, 1)
    assert collector.finish_reason("s") is FinishReason.LENGTH


@pytest.mark.slow
def test_warm_up_leaves_the_engine_empty() -> None:
    engine = make_engine(load(gemma3))
    engine.warm_up()
    assert not engine.has_work


@pytest.mark.slow
def test_after_its_warm_up_the_engine_runs_the_traced_model() -> None:
    loaded = load(qwen2)
    engine = make_engine(loaded)
    engine.warm_up()
    loaded.model.forward = broken
    collector = run_staggered(engine, [SequenceRequest("s", (60, 61, 62), GREEDY)])
    assert collector.token_ids("s") == generate(qwen2, (60, 61, 62), 12)


def test_warm_up_refuses_attention_that_the_engine_does_not_support() -> None:
    loaded = load(qwen2)
    attention = loaded.model.get_submodule("model.layers.0.self_attn")
    stock = attention.forward
    attention.forward = lambda *args, **kwargs: stock(*args, position_bias=30.0, **kwargs)
    with pytest.raises(UnsupportedModelError, match=r"biases on positions \(position_bias\)"):
        make_engine(loaded).warm_up()


def test_the_memory_of_a_prompt_that_yields_nan_is_used_again_without_harm() -> None:
    loaded, poison = load(qwen2), 299
    with torch.no_grad():
        loaded.model.get_parameter("model.embed_tokens.weight")[poison] = torch.nan
    engine = make_engine(loaded, max_num_seqs=1)
    engine.add(SequenceRequest("poison", (50,) * 15 + (poison,) + (50,) * 40, GREEDY))
    engine.step()
    engine.abort("poison")
    good = SequenceRequest("good", (60, 61, 62), GREEDY)
    collector = run_staggered(engine, [good])
    assert collector.token_ids("good") == generate(qwen2, (60, 61, 62), 12)


@pytest.mark.slow
def test_a_step_that_fails_for_every_sequence_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(load(qwen2))
    engine.warm_up()
    monkeypatch.setattr("deployments.engine.model.traced_forward.store_and_attend", broken)
    before = engine.stats.num_steps
    engine.add(SequenceRequest("s", (60,), GREEDY))
    assert [delta.finish_reason for _, delta in engine.step()] == [FinishReason.ERROR]
    assert engine.stats.num_steps == before


def test_a_resumed_sequence_that_has_all_its_tokens_is_refused() -> None:
    engine = make_engine(load(qwen2))
    params = SamplingParams(max_tokens=3)
    with pytest.raises(InvalidSequenceError, match="max_tokens is 3"):
        engine.add(SequenceRequest("s", (60,), params, (61, 62, 63)))
