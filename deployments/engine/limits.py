"""The limits of an engine, and the check that a sequence fits into them."""

from dataclasses import dataclass

from deployments.contract.sampling_params import MAX_NUM_PROMPT_LOGPROBS, InvalidParameterError
from deployments.engine.scheduling.sequence import SequenceRequest, num_planned_tokens
from deployments.plan.kv_layout import BLOCK_SIZE, KVLayout


class InvalidSequenceError(ValueError):
    """The sequence can't be served as requested."""


class SequenceTooLongError(InvalidSequenceError):
    """Prompt and answer are longer than the model's length."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits on what an engine holds.

    Attributes:
        max_num_seqs: Most sequences that run at once.
        max_model_len: Most tokens of prompt and answer together.
        max_batched_tokens: Most tokens in one step.
        max_stall_s: How long a step with tokens of prompts may keep running sequences waiting, in
            seconds, as far as that can be foretold; None for as long as it takes.
        prefix_caching: Whether sequences share the keys and values of common prefixes. If so, a
            client can tell from its time to first token whether another client's prompt began
            like its own.
        cuda_graphs: Whether decode steps on a GPU are captured and launched as a whole.
        kv_blocks: Blocks of each group of layers; None for as many as max_num_seqs sequences of
            full length need.
        block_size: Tokens of a block.
    """

    max_num_seqs: int
    max_model_len: int
    max_batched_tokens: int
    max_stall_s: float | None = None
    prefix_caching: bool = True
    cuda_graphs: bool = True
    kv_blocks: tuple[int, ...] | None = None
    block_size: int = BLOCK_SIZE

    def layout(self, capacities: tuple[int, ...]) -> KVLayout:
        """Return the KV memory for groups of layers with these capacities, see `KVLayout`."""
        one = KVLayout(capacities, (), self.block_size).blocks_for(self.max_model_len)
        blocks = self.kv_blocks or tuple(self.max_num_seqs * number for number in one)
        return KVLayout(capacities, blocks, self.block_size)

    def max_num_tokens(self, request: SequenceRequest) -> int:
        """Return the most tokens that a sequence can reach, its prompt included."""
        max_tokens = request.params.max_tokens
        if max_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, len(request.prompt_token_ids) + max_tokens)

    def num_planned_tokens(self, request: SequenceRequest) -> int:
        """Return how many tokens a sequence gets memory for when it begins to run."""
        num_tokens = len(request.prompt_token_ids) + len(request.generated_token_ids)
        return num_planned_tokens(request.params, num_tokens, self.max_num_tokens(request))

    def check(self, request: SequenceRequest, vocab_size: int) -> None:
        """Refuse a sequence that could not run.

        Raises:
            SequenceTooLongError: Prompt and answer are longer than the model's length.
            InvalidSequenceError: The prompt is empty, or a token id is out of range.
            InvalidParameterError: A parameter names a token id that is out of range, or asks for
                log-probabilities of a prompt with images, or for too many.
        """
        num_tokens = len(request.prompt_token_ids) + len(request.generated_token_ids)
        max_model_len = self.max_model_len
        if not request.prompt_token_ids:
            raise InvalidSequenceError("the prompt is empty; give at least one token")
        if num_tokens >= max_model_len:
            raise SequenceTooLongError(
                f"the prompt has {num_tokens} tokens, but the model's length is {max_model_len} "
                "tokens, at least one of them for the answer; shorten the prompt"
            )
        max_tokens = request.params.max_tokens or 0
        if 0 < max_tokens <= len(request.generated_token_ids):
            raise InvalidSequenceError(
                f"max_tokens is {max_tokens}, but {len(request.generated_token_ids)} tokens were "
                "generated already; raise max_tokens"
            )
        if len(request.prompt_token_ids) + max_tokens > max_model_len:
            raise SequenceTooLongError(
                f"the prompt has {len(request.prompt_token_ids)} tokens and max_tokens is "
                f"{max_tokens}, but the model's length is {max_model_len} tokens; shorten the "
                "prompt or lower max_tokens"
            )
        if request.params.prompt_logprobs is not None:
            _check_prompt_logprobs(request, request.params.prompt_logprobs)
        token_ids = (*request.prompt_token_ids, *request.generated_token_ids)
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            raise InvalidSequenceError(f"token ids must be from 0 to {vocab_size - 1}")
        for param, named in request.params.token_ids.items():
            if max(named, default=0) >= vocab_size:
                raise InvalidParameterError(
                    f"{param} names token {max(named)}, but the model's token ids are from 0 to "
                    f"{vocab_size - 1}",
                    param,
                )


def _check_prompt_logprobs(request: SequenceRequest, num_top: int) -> None:
    """Refuse log-probabilities of a prompt that can't be computed, or are too many.

    Raises:
        InvalidParameterError: See `EngineLimits.check`.
    """
    if request.model_inputs:
        raise InvalidParameterError(
            "prompt_logprobs is not supported for a prompt with images; leave one of them out",
            "prompt_logprobs",
        )
    num_tokens = len(request.prompt_token_ids)
    if num_tokens * (1 + num_top) > MAX_NUM_PROMPT_LOGPROBS:
        raise InvalidParameterError(
            f"the prompt has {num_tokens} tokens, and {1 + num_top} log-probabilities of each are "
            f"{num_tokens * (1 + num_top)}; at most {MAX_NUM_PROMPT_LOGPROBS} are reported. Ask "
            "for fewer of the likeliest tokens, or shorten the prompt",
            "prompt_logprobs",
        )
