from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from deployments.engine.attention.attention import ATTENTION_NAME
from deployments.engine.attention.kv_slots import KVShape, KVSlots
from deployments.engine.model.loader import LoadedModel
from deployments.engine.model.runner import ModelRunner, StepLogits
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.scheduling.scheduler import DecodeRow, PrefillChunk, StepPlan
from deployments.engine.scheduling.sequence import Sequence, SequenceRequest
from tests.engine.tiny_models import (
    IMAGE_SIZE,
    IMAGE_TOKEN_ID,
    MODELS,
    TOKENS_PER_IMAGE,
    gemma3,
    load,
    qwen2,
)

MakeModel = Callable[[], PreTrainedModel]


def runner(loaded: LoadedModel) -> ModelRunner:
    kv = KVSlots(
        KVShape.of(loaded.text_config, torch.float32),
        num_slots=3,
        max_model_len=64,
        device=torch.device("cpu"),
    )
    return ModelRunner(loaded.model, kv)


def sequence(*token_ids: int, num_computed: int = 0, num_images: int = 0) -> Sequence:
    image = [5, *[IMAGE_TOKEN_ID] * TOKENS_PER_IMAGE, 6] if num_images else []
    prompt = (*image, *token_ids)
    model_inputs = {
        "pixel_values": torch.ones(num_images, 3, IMAGE_SIZE, IMAGE_SIZE),
        "token_type_ids": torch.tensor([[int(i == IMAGE_TOKEN_ID) for i in prompt]]),
    }
    request = SequenceRequest(
        "s", prompt, SamplingParams(), model_inputs=model_inputs if num_images else {}
    )
    made = Sequence(request, max_model_len=64, eos_token_ids=frozenset())
    made.num_computed_tokens = num_computed
    return made


def whole(seq: Sequence, slot: int) -> StepPlan:
    return StepPlan((), (PrefillChunk(seq, slot, 0, len(seq.token_ids)),))


def logits(result: StepLogits | None) -> torch.Tensor:
    assert result is not None
    return result.logits


def stock_logits(make_model: MakeModel, token_ids: list[int]) -> torch.Tensor:
    model = make_model().train(mode=False)
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([token_ids]))
    last: torch.Tensor = output.logits[0, -1:]
    return last


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_prefill_in_chunks_and_decode_give_the_stock_models_logits(make_model: MakeModel) -> None:
    run = runner(load(make_model)).run
    first, second = sequence(*range(50, 70)), sequence(80, 81, 82)
    assert run(StepPlan((), (PrefillChunk(first, 0, 0, 7),))) is None
    mixed = run(StepPlan((), (PrefillChunk(first, 0, 7, 20), PrefillChunk(second, 1, 0, 3))))
    assert mixed is not None
    assert mixed.sequences == (first, second)
    for seq in (first, second):
        seq.num_computed_tokens = len(seq.token_ids)
        seq.append(90)
    decoded = run(StepPlan((DecodeRow(first, 0), DecodeRow(second, 1)), ()))
    for result, length in ((mixed, -1), (decoded, None)):
        for seq, row in zip((first, second), logits(result), strict=True):
            expected = stock_logits(make_model, seq.token_ids[:length])[0]
            torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_images", [0, 1])
def test_a_plan_that_runs_again_gives_the_same_logits(num_images: int) -> None:
    run = runner(load(gemma3)).run
    plan = whole(sequence(*range(50, 62), num_images=num_images), 2)
    first = logits(run(plan))
    assert torch.equal(logits(run(plan)), first)
    seq = plan.prefill[0].sequence
    seq.num_computed_tokens = len(seq.token_ids)
    seq.append(70)
    decode = StepPlan((DecodeRow(seq, 2),), ())
    assert torch.equal(logits(run(decode)), logits(run(decode)))


def test_the_logits_are_float32_and_only_of_sequences_that_are_due() -> None:
    run = runner(load(gemma3)).run
    image, text, unfinished = sequence(50, num_images=1), sequence(60), sequence(*range(50, 60))
    result = run(
        StepPlan(
            (),
            (
                PrefillChunk(image, 0, 0, len(image.token_ids)),
                PrefillChunk(text, 1, 0, 1),
                PrefillChunk(unfinished, 2, 0, 4),
            ),
        )
    )
    assert result is not None
    assert result.sequences == (text, image)
    assert result.logits.shape == (2, 300)
    assert result.logits.dtype == torch.float32


def test_an_image_that_fails_leaves_the_language_model_on_slots() -> None:
    loaded = load(gemma3)
    bad = sequence(50, 51, num_images=2)  # the prompt has tokens for one
    with pytest.raises((ValueError, RuntimeError)):
        runner(loaded).run(whole(bad, 0))
    assert loaded.text_config._attn_implementation == ATTENTION_NAME
    good = sequence(*range(50, 60))
    expected = stock_logits(gemma3, good.token_ids)
    torch.testing.assert_close(
        logits(runner(loaded).run(whole(good, 0))), expected, rtol=1e-3, atol=1e-3
    )


def test_a_model_that_ignores_logits_to_keep_is_refused() -> None:
    loaded = load(qwen2)
    stock = loaded.model.forward

    def forward(**arguments: object) -> object:
        return stock(**{**arguments, "logits_to_keep": 0})

    loaded.model.forward = forward
    with pytest.raises(ValueError, match="logits_to_keep"):
        runner(loaded).run(whole(sequence(50, 51), 0))


def test_an_empty_plan_gives_no_logits() -> None:
    assert runner(load(qwen2)).run(StepPlan((), ())) is None
