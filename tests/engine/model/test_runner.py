from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.attention.attention import ATTENTION_NAME
from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.attention.step_reads import Starts
from deployments.engine.model.loader import LoadedModel
from deployments.engine.model.runner import ModelRunner, StepLogits, _TrimmedCache
from deployments.engine.scheduling.scheduler import DecodeRow, PrefillChunk, StepPlan
from deployments.engine.scheduling.sequence import Sequence, SequenceRequest
from deployments.plan.model_shape import windows_of
from tests.engine.attention.extents import make_cache
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


def runner(loaded: LoadedModel) -> tuple[ModelRunner, list[Starts]]:
    """Return a runner, and extents for three sequences."""
    shape = KVShape.of(loaded.text_config, torch.float32)
    kv, starts = make_cache(shape, [30] * 3, max_model_len=64, block_size=4)
    return ModelRunner(loaded.model, kv, 3, max_batched_tokens=64, has_kernels=True), starts


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


def whole(seq: Sequence, starts: Starts) -> StepPlan:
    return StepPlan((), (PrefillChunk(seq, starts, 0, len(seq.token_ids)),))


def run_whole(loaded: LoadedModel, seq: Sequence) -> StepLogits | None:
    made, starts = runner(loaded)
    return made.run(whole(seq, starts[0]))


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
    made, starts = runner(load(make_model))
    first, second = sequence(*range(50, 70)), sequence(80, 81, 82)
    assert made.run(StepPlan((), (PrefillChunk(first, starts[2], 0, 7),))) is None
    chunks = PrefillChunk(first, starts[2], 7, 20), PrefillChunk(second, starts[0], 0, 3)
    mixed = made.run(StepPlan((), chunks))
    assert mixed is not None
    assert mixed.sequences == (first, second)
    for seq in (first, second):
        seq.num_computed_tokens = len(seq.token_ids)
        seq.append(90)
    rows = DecodeRow(first, starts[2]), DecodeRow(second, starts[0])
    decoded = made.run(StepPlan(rows, ()))
    for result, length in ((mixed, -1), (decoded, None)):
        for seq, row in zip((first, second), logits(result), strict=True):
            expected = stock_logits(make_model, seq.token_ids[:length])[0]
            torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_images", [0, 1])
def test_a_plan_that_runs_again_gives_the_same_logits(num_images: int) -> None:
    made, starts = runner(load(gemma3))
    plan = whole(sequence(*range(50, 62), num_images=num_images), starts[2])
    first = logits(made.run(plan))
    assert torch.equal(logits(made.run(plan)), first)
    seq = plan.prefill[0].sequence
    seq.num_computed_tokens = len(seq.token_ids)
    seq.append(70)
    decode = StepPlan((DecodeRow(seq, starts[2]),), ())
    again = logits(made.run(decode))
    assert again.isfinite().all()
    assert torch.equal(logits(made.run(decode)), again)


def test_the_logits_are_float32_and_only_of_sequences_that_are_due() -> None:
    made, starts = runner(load(gemma3))
    image, text, unfinished = sequence(50, num_images=1), sequence(60), sequence(*range(50, 60))
    chunks = (
        PrefillChunk(image, starts[0], 0, len(image.token_ids)),
        PrefillChunk(text, starts[1], 0, 1),
        PrefillChunk(unfinished, starts[2], 0, 4),
    )
    result = made.run(StepPlan((), chunks))
    assert result is not None
    assert result.sequences == (text, image)
    assert result.logits.shape == (2, 300)
    assert result.logits.dtype == torch.float32


def test_an_image_that_fails_leaves_the_language_model_on_the_kv_cache() -> None:
    loaded = load(gemma3)
    bad = sequence(50, 51, num_images=2)  # the prompt has tokens for one
    with pytest.raises((ValueError, RuntimeError)):
        run_whole(loaded, bad)
    assert loaded.text_config._attn_implementation == ATTENTION_NAME
    good = sequence(*range(50, 60))
    expected = stock_logits(gemma3, good.token_ids)
    torch.testing.assert_close(logits(run_whole(loaded, good)), expected, rtol=1e-3, atol=1e-3)


def test_a_model_that_ignores_logits_to_keep_is_refused() -> None:
    loaded = load(qwen2)
    stock = loaded.model.forward

    def forward(**arguments: object) -> object:
        return stock(**{**arguments, "logits_to_keep": 0})

    loaded.model.forward = forward
    with pytest.raises(ValueError, match="logits_to_keep"):
        run_whole(loaded, sequence(50, 51))


def test_an_empty_plan_gives_no_logits() -> None:
    made, _ = runner(load(qwen2))
    assert made.run(StepPlan((), ())) is None


def test_the_cache_of_an_image_prompt_holds_no_more_than_its_windows_take() -> None:
    config = load(gemma3).model.config.get_text_config()
    cache, tokens = _TrimmedCache(config=config), torch.randn(1, 2, 300, 8)
    for layer, window in enumerate(windows_of(config)):
        seen, _ = cache.update(tokens, tokens, layer)
        assert torch.equal(seen, tokens)  # its own queries see all
        kept = cache.layers[layer].keys  # type: ignore[union-attr] # a layer with attention
        assert isinstance(kept, torch.Tensor)
        assert kept.untyped_storage().nbytes() == kept.nbytes
        num_kept = 300 if window is None else window - 1
        assert torch.equal(kept, tokens[:, :, 300 - num_kept :])
