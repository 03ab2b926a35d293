import pytest

from deployments.contract.errors import ContextLengthExceededError
from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, TextPart
from deployments.contract.sampling_params import SamplingParams
from deployments.generator.context_length import fit_length

HI = (ChatMessage("user", (TextPart("hi"),)),)


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "num_prompt_tokens", "fitted"),
    [
        (5, 0, 90, 5),
        (10, 0, 90, 10),
        (11, 0, 90, None),
        (4096, 0, 1, None),
        (4096, 20, 99, None),
        (None, 20, 99, None),
        (None, 0, 99, None),
        (None, 0, 50, 16),
    ],
)
def test_a_length_beyond_the_model_s_is_lowered_to_what_the_prompt_leaves(
    max_tokens: int | None, min_tokens: int, num_prompt_tokens: int, fitted: int | None
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    request = GenerationRequest("r", HI, sampling)
    found = fit_length(request, num_prompt_tokens, 16, 100)
    assert (found.max_tokens, found.min_tokens) == (fitted, min_tokens)


@pytest.mark.parametrize(
    ("prompt", "param", "length_param", "num_tokens"),
    [
        (HI, "messages", None, 100),
        (HI, "messages", "max_tokens", 101),
        ("hi", "prompt", "max_tokens", 100),
        ((1, 2), "prompt", None, 5000),
    ],
)
def test_a_prompt_without_room_for_an_answer_is_refused_in_openai_s_words(
    prompt: tuple[ChatMessage, ...] | str | tuple[int, ...],
    param: str,
    length_param: str | None,
    num_tokens: int,
) -> None:
    request = GenerationRequest("r", prompt, SamplingParams(), length_param=length_param)
    with pytest.raises(ContextLengthExceededError) as caught:
        fit_length(request, num_tokens, None, 100)
    assert caught.value.param == param
    assert str(caught.value).startswith(
        "This model's maximum context length is 100 tokens. However, your "
        f"{param} resulted in {num_tokens} tokens"
    )
    assert f"reduce the length of the {param}" in str(caught.value)


@pytest.mark.parametrize(
    ("sampling", "param", "num_asked"),
    [
        (SamplingParams(max_tokens=11), "max_completion_tokens", 11),
        (SamplingParams(max_tokens=30, min_tokens=30), "max_completion_tokens", 30),
        (SamplingParams(min_tokens=11), "min_tokens", 11),
    ],
)
def test_a_length_beyond_the_model_s_is_refused_by_the_client_s_name_if_it_is_not_lowered(
    sampling: SamplingParams, param: str, num_asked: int
) -> None:
    request = GenerationRequest("r", HI, sampling, length_param="max_completion_tokens")
    with pytest.raises(ContextLengthExceededError) as caught:
        fit_length(request, 90, None, 100)
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
    assert str(caught.value) == (
        "This model's maximum context length is 100 tokens. However, you requested "
        f"{90 + num_asked} tokens (90 in the messages, {num_asked} in the completion). Please "
        f"reduce the length of the messages, or lower {param} to 10."
    )
