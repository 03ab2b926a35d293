"""The engine with prefix reuse: its output must not depend on what it reused."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from transformers import PreTrainedModel

from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine.collector import Collector, image_request, random_prompt
from tests.engine.layouts import for_each_layout
from tests.engine.tiny_models import MODELS, VOCAB_SIZE, gemma3, generate, load, make_engine, qwen2

pytestmark = pytest.mark.slow

MakeModel = Callable[[], PreTrainedModel]
Prompt = tuple[int, ...]
ANSWER = SamplingParams(temperature=0, max_tokens=8)

for_all_models = pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)


def answer(make_model: MakeModel, prompt: Prompt) -> list[int]:
    """Answer with the stock model."""
    return generate(make_model, prompt, 8)


def num_cached(collector: Collector, name: str) -> int:
    """Return the count from a sequence's first delta; check that no other delta has one."""
    first, *others = collector.deltas[name]
    assert not any(delta.num_cached_tokens for delta in others)
    return first.num_cached_tokens


def talk(engine: Engine, make_model: MakeModel, num_conversations: int) -> Collector:
    """Run concurrent conversations of three turns with one system prompt, and check them."""
    random, collector = Random(1), Collector(engine)
    system = random_prompt(random, 18)
    prompts = {i: (*system, *random_prompt(random, 3 + i)) for i in range(num_conversations)}
    for turn in range(3):
        for i, prompt in prompts.items():
            engine.add(SequenceRequest(f"{i}.{turn}", prompt, ANSWER))
            collector.step()
        collector.run()
        for i, prompt in prompts.items():
            found = collector.token_ids(f"{i}.{turn}")
            assert found == answer(make_model, prompt), (i, turn)
            prompts[i] = (*prompt, *found, *random_prompt(random, 4))
    return collector


@for_all_models
def test_conversations_equal_generate_and_each_turn_starts_from_the_last(
    make_model: MakeModel,
) -> None:
    engine = make_engine(load(make_model), max_num_seqs=4)
    collector = talk(engine, make_model, num_conversations=3)
    for i in range(3):
        num_prompt_tokens = 18 + 3 + i
        for turn in (1, 2):
            # All but the answer's last token, which is never computed. If an answer was short,
            # another conversation may cover it, so its next turn starts elsewhere.
            answers = [len(collector.token_ids(f"{j}.{k}")) for j in range(3) for k in range(turn)]
            num_tokens = num_prompt_tokens + len(collector.token_ids(f"{i}.{turn - 1}"))
            assert min(answers) < 8 or num_cached(collector, f"{i}.{turn}") == num_tokens - 1
            num_prompt_tokens = num_tokens + 4


@for_each_layout
def test_more_conversations_than_places_equal_generate(make_model: MakeModel) -> None:
    talk(make_engine(load(make_model), max_num_seqs=2), make_model, num_conversations=4)


def test_without_prefix_caching_nothing_is_reused() -> None:
    engine = Engine(load(qwen2), EngineLimits(4, 96, 24, prefix_caching=False))
    collector = talk(engine, qwen2, num_conversations=3)
    assert not any(num_cached(collector, name) for name in collector.deltas)
    assert engine.stats.num_cached_tokens == 0


@for_each_layout
def test_a_burst_with_one_system_prompt_equals_generate(make_model: MakeModel) -> None:
    random = Random(2)
    system = random_prompt(random, 40)
    prompts = {f"s{i}": (*system, *random_prompt(random, i % 4)) for i in range(7)}
    collector = Collector(make_engine(load(make_model), max_num_seqs=3))
    for name, prompt in prompts.items():
        collector.engine.add(SequenceRequest(name, prompt, ANSWER))
    collector.run()
    for name, prompt in prompts.items():
        assert collector.token_ids(name) == answer(make_model, prompt), name


def test_a_burst_computes_its_common_prefix_once_and_the_counters_say_so() -> None:
    engine = make_engine(load(qwen2), max_num_seqs=4)
    prompt = random_prompt(Random(3), 50)
    collector = Collector(engine)
    for i in range(4):
        engine.add(SequenceRequest(f"s{i}", prompt, ANSWER))
    collector.run()
    assert [num_cached(collector, f"s{i}") for i in range(4)] == [0, 49, 49, 49]
    assert (engine.stats.num_prompt_tokens, engine.stats.num_cached_tokens) == (200, 147)


@for_each_layout
def test_copies_of_one_prompt_equal_generate_even_beyond_a_window(make_model: MakeModel) -> None:
    prompt, collector = random_prompt(Random(4), 37), Collector(make_engine(load(make_model)))
    for i in range(5):
        collector.engine.add(SequenceRequest(f"s{i}", prompt, ANSWER))
    collector.run()
    expected = answer(make_model, prompt)
    assert all(collector.token_ids(f"s{i}") == expected for i in range(5))
    assert num_cached(collector, "s1") == 36


@for_each_layout
def test_aborts_leave_prefixes_that_equal_generate(make_model: MakeModel) -> None:
    random = Random(5)
    system = random_prompt(random, 30)
    collector = Collector(make_engine(load(make_model)))
    for i in range(9):
        prompt = (
            *system[: random.choice([17, 30])],
            *random_prompt(random, random.choice([1, 25])),
        )
        collector.engine.add(SequenceRequest(f"v{i}", prompt, ANSWER))
        for _ in range(random.choice([1, 2, 4])):
            collector.step()
        collector.engine.abort(f"v{i}")
        follower = (*prompt, *random_prompt(random, 2))
        collector.engine.add(SequenceRequest(f"f{i}", follower, ANSWER))
        collector.step()
        if i % 2:
            collector.run()
            assert collector.token_ids(f"f{i}") == answer(make_model, follower), i


def test_sampled_tokens_are_the_same_with_and_without_reuse() -> None:
    random, loaded = Random(6), load(qwen2)
    system = random_prompt(random, 25)
    requests = [
        SequenceRequest(
            f"s{i}",
            (*system, *random_prompt(random, 5)),
            SamplingParams(temperature=1.0, seed=i, top_p=0.9, max_tokens=10),
        )
        for i in range(6)
    ]
    outputs = []
    for prefix_caching in (True, False):
        limits = EngineLimits(3, 96, 24, prefix_caching=prefix_caching)
        collector = Collector(Engine(loaded, limits))
        for request in requests:
            collector.engine.add(request)
            collector.step()
        collector.run()
        outputs.append([collector.token_ids(request.sequence_id) for request in requests])
        assert bool(collector.engine.stats.num_cached_tokens) is prefix_caching
    assert outputs[0] == outputs[1]


def test_a_resumed_sequence_reuses_a_prefix_and_counts_only_its_prompt() -> None:
    engine = make_engine(load(qwen2))
    prompt = random_prompt(Random(7), 30)
    expected = answer(qwen2, prompt)
    collector = Collector(engine)
    engine.add(SequenceRequest("whole", prompt, ANSWER))
    collector.run()
    engine.add(SequenceRequest("resumed", prompt, ANSWER, tuple(expected[:4])))
    collector.run()
    assert collector.token_ids("resumed") == expected[4:]
    assert num_cached(collector, "resumed") == 30


def test_the_same_placeholders_with_another_image_reuse_nothing() -> None:
    first = image_request("a", Random(8), 2)
    second = image_request("b", Random(9), 2)
    assert not torch.equal(first.model_inputs["pixel_values"], second.model_inputs["pixel_values"])
    second = SequenceRequest("b", first.prompt_token_ids, ANSWER, model_inputs=second.model_inputs)
    engine = make_engine(load(gemma3))
    collector = Collector(engine)
    for request in (first, second, SequenceRequest("text", first.prompt_token_ids, ANSWER)):
        engine.add(request)
        collector.run()
    assert collector.token_ids("b") == generate(
        gemma3, second.prompt_token_ids, 8, second.model_inputs
    )
    assert engine.stats.num_cached_tokens == 0


def test_a_prompt_that_yields_nan_spoils_no_other_with_the_same_prefix() -> None:
    loaded, poison = load(qwen2), VOCAB_SIZE - 1
    with torch.no_grad():
        loaded.model.get_parameter("model.embed_tokens.weight")[poison] = torch.nan
    good = tuple(token_id % 200 + 44 for token_id in random_prompt(Random(10), 30))
    bad = (*good[:20], poison, *good)
    collector = Collector(make_engine(loaded, max_num_seqs=2))
    # One is aborted before its NaN shows, the other fails while prompts with its prefix wait.
    collector.engine.add(SequenceRequest("aborted", bad, ANSWER))
    collector.step()
    collector.engine.abort("aborted")
    for name, prompt in (("bad", bad), ("good 1", good), ("good 2", good)):
        collector.engine.add(SequenceRequest(name, prompt, ANSWER))
        collector.step()
    collector.run()
    assert collector.finish_reason("bad") is FinishReason.ERROR
    for name in ("good 1", "good 2"):
        assert collector.token_ids(name) == answer(qwen2, good), name


@pytest.mark.parametrize("fails_at", range(1, 6))
@for_each_layout
def test_a_step_that_fails_half_way_is_repaired_even_if_it_overwrote_a_window(
    make_model: MakeModel, fails_at: int
) -> None:
    """A layer raises after its attention, which has already stored the step's tokens."""
    loaded, random = load(make_model), Random(11)
    prompts = {f"s{i}": random_prompt(random, length) for i, length in enumerate((3, 24, 60))}
    collector = Collector(make_engine(loaded))
    last = loaded.text_config.num_hidden_layers - 1
    names = (f"layers.{last}.mlp", f"h.{last}.mlp", f"layers.{last}.fc1")
    layer = next(m for name, m in loaded.model.named_modules() if name.endswith(names))
    num_steps, has_failed = 0, False

    def fail_once(*_: object) -> None:
        nonlocal has_failed
        if num_steps == fails_at and not has_failed:
            has_failed = True
            raise RuntimeError("out of memory")

    layer.register_forward_pre_hook(fail_once)
    for name, prompt in prompts.items():
        collector.engine.add(SequenceRequest(name, prompt, ANSWER))
    while collector.engine.has_work:
        num_steps += 1
        collector.step()
    assert has_failed
    for name, prompt in prompts.items():
        assert collector.token_ids(name) == answer(make_model, prompt), name
        assert collector.finish_reason(name) is not FinishReason.ERROR
