"""Fits an answer's length into what a prompt leaves of the model's length.

The first words of a refusal are OpenAI's own. Clients know it by them, and by the code: they then
shorten the conversation, or ask a model that reads more.

Source: litellm's `ExceptionCheckers.is_error_str_context_window_exceeded`.
"""

from dataclasses import replace

from deployments.contract.errors import ContextLengthExceededError
from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage
from deployments.contract.sampling_params import SamplingParams
from deployments.generator.default_sampling import with_default_length


def fit_length(
    request: GenerationRequest,
    num_prompt_tokens: int,
    default_max_tokens: int | None,
    max_model_len: int,
) -> SamplingParams:
    """Return the sampling with a length that fits; a `max_tokens` of None takes all that is left.

    A `max_tokens` of more than that is lowered, or refused if the request says so. The same
    holds for `min_tokens`: an answer that fills the model's length ends, whatever its minimum.

    Args:
        request: The request.
        num_prompt_tokens: Tokens of its prompt.
        default_max_tokens: The most tokens of the answer if the request sets no limit.
        max_model_len: Most tokens of prompt and answer together.

    Raises:
        ContextLengthExceededError: The prompt leaves no room for an answer, or not enough for the
            length that was asked for. `param` names the prompt or the parameter.
    """
    sampling = request.sampling
    num_left = max_model_len - num_prompt_tokens
    if num_left < 1:
        raise _prompt_too_long(request, num_prompt_tokens, max_model_len)
    if max(sampling.max_tokens or 0, sampling.min_tokens) <= num_left:
        return with_default_length(sampling, default_max_tokens, num_left)
    if request.length_param is not None:
        raise _length_too_long(request, request.length_param, num_prompt_tokens, max_model_len)
    return replace(sampling, max_tokens=None)


def _prompt_too_long(
    request: GenerationRequest, num_prompt_tokens: int, max_model_len: int
) -> ContextLengthExceededError:
    prompt = prompt_field(request)
    return ContextLengthExceededError(
        f"This model's maximum context length is {max_model_len} tokens. However, your {prompt} "
        f"resulted in {num_prompt_tokens} tokens, and the answer needs at least one. Please reduce "
        f"the length of the {prompt}.",
        prompt,
    )


def require_images_fit(num_tokens: int, max_model_len: int) -> None:
    """Refuse images that leave no token for an answer, whatever the text beside them.

    Raises:
        ContextLengthExceededError: They take `max_model_len` tokens or more.
    """
    if num_tokens >= max_model_len:
        raise ContextLengthExceededError(
            f"This model's maximum context length is {max_model_len} tokens. However, the images "
            f"in your messages resulted in {num_tokens} tokens, and the answer needs at least one. "
            "Please send smaller or fewer images.",
            "messages",
        )


def _length_too_long(
    request: GenerationRequest, param: str, num_prompt_tokens: int, max_model_len: int
) -> ContextLengthExceededError:
    prompt, num_asked = prompt_field(request), request.sampling.max_tokens
    if num_asked is None:
        param, num_asked = "min_tokens", request.sampling.min_tokens
    return ContextLengthExceededError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{num_prompt_tokens + num_asked} tokens ({num_prompt_tokens} in the {prompt}, {num_asked} "
        f"in the completion). Please reduce the length of the {prompt}, or lower {param} to "
        f"{max_model_len - num_prompt_tokens}.",
        param,
    )


def prompt_field(request: GenerationRequest) -> str:
    """Return the name of the field that the prompt came in."""
    is_chat = any(isinstance(part, ChatMessage) for part in request.prompt)
    return "messages" if is_chat else "prompt"
