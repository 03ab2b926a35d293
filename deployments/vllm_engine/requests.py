"""A sequence on its way to vLLM and back: its parameters, and the deltas of what vLLM generates.

vLLM is given token ids and returns token ids. Text, stop strings and the bytes of tokens are made
here, by the embedded engine's own detokenizer, on the event loop: they take a few microseconds a
token. Needs no vLLM, so that a replica in front of servers of vLLM has none.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import PreTrainedTokenizerBase

from deployments.contract.output import FinishReason, TextDelta, TokenLogprobs
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.detokenizing.detokenizer import Detokenizer, decode_with
from deployments.engine.detokenizing.token_bytes import TokenBytes
from deployments.engine.sampling.logprobs import PositionLogprobs, PromptScores
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.vllm_engine.failures import UNUSABLE_LOGITS
from deployments.vllm_engine.moves import Handover

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

logger = logging.getLogger("ray.serve.raystream.replica")

REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
"""Why a sequence ended, by vLLM's name; any other is an error."""

NO_TOKEN: Final = "no token can be chosen: the logits are not finite"
UNDECODABLE: Final = "the tokens of this sequence can't be decoded to text"
BROKEN_GRAMMAR: Final = "the text can't continue as the request's grammar requires"

PROBE: Final = SamplingParams(temperature=0, max_tokens=1)
"""The parameters of a ping."""


class Codec:
    """What the deltas of all sequences of a model are made with.

    Attributes:
        token_bytes: The bytes of tokens.
        eos_token_ids: Tokens that end a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int]) -> None:
        """Prepare to decode with a model's tokenizer."""
        self.token_bytes = TokenBytes(tokenizer)
        self.eos_token_ids = eos_token_ids
        self._decode = {skips: decode_with(tokenizer, skips) for skips in (True, False)}

    def detokenizer(self, request: SequenceRequest) -> Detokenizer:
        """Return a sequence's detokenizer, which has read the tokens that were delivered.

        Raises:
            UndecodableError: Those can't be decoded.
        """
        params = request.params
        decode = self._decode[params.skip_special_tokens]
        detokenizer = Detokenizer(decode, params.stop, params.min_tokens, params.call_mark)
        detokenizer.feed(request.generated_token_ids)
        return detokenizer

    def stop_token_ids(self, request: SequenceRequest) -> frozenset[int]:
        """Return the tokens that end a sequence, the model's own included."""
        params = request.params
        # A grammar allows an EOS token only where the text may end, so it always ends the sequence.
        ignores_eos = params.ignore_eos and params.grammar is None
        return params.stop_token_ids | (frozenset() if ignores_eos else self.eos_token_ids)

    def fields(self, request: SequenceRequest, handed: Handover) -> dict[str, Any]:
        """Return the fields of vLLM's SamplingParams, but for a grammar.

        Args:
            request: The sequence.
            handed: How it is handed to this engine.
        """
        params = request.params
        return {
            **handed.fields,
            # One way to end for all tokens: vLLM delivers a stop token, and keeps EOS to itself.
            "ignore_eos": True,
            "stop_token_ids": sorted(self.stop_token_ids(request)),
            "detokenize": False,
            "logprobs": params.top_logprobs,
            "prompt_logprobs": params.prompt_logprobs,
        }


class Deltas:
    """Makes the deltas of one sequence from vLLM's outputs."""

    def __init__(self, request: SequenceRequest, codec: Codec) -> None:
        """Start before the first output.

        Raises:
            UndecodableError: See `Codec.detokenizer`.
        """
        self._request = request
        self._codec = codec
        self._stop_token_ids = codec.stop_token_ids(request)
        self._detokenizer = codec.detokenizer(request)
        self._is_first = True
        self._num_preemptions = 0

    def of(self, output: "RequestOutput") -> Iterator[TextDelta]:
        """Yield the deltas of an output; the last one of a sequence has a finish reason.

        Raises:
            UndecodableError: The tokens can't be decoded.
        """
        is_first, self._is_first = self._is_first, False
        self._note(output, is_first=is_first)
        if is_first and self._request.params.prompt_logprobs is not None:
            yield from self._of_prompt(output)
        (gained,) = output.outputs
        token_ids, reason = tuple(gained.token_ids), self._reason_of(gained)
        if self._request.params.max_tokens == 0 and reason in (
            FinishReason.STOP,
            FinishReason.LENGTH,
        ):
            token_ids, reason = (), FinishReason.LENGTH  # vLLM runs for at least one token
        text, is_stopped = self._detokenizer.advance(
            tuple(each for each in token_ids if each not in self._stop_token_ids),
            is_last=reason is not None,
        )
        is_failed = reason is FinishReason.ERROR
        num_cached = min(output.num_cached_tokens or 0, len(self._request.prompt_token_ids))
        if is_first and self._request.beginning is not None:
            self._request.beginning.note(num_cached)
        yield TextDelta(
            token_ids,
            text,
            FinishReason.STOP if is_stopped and not is_failed else reason,
            _why(gained) if is_failed else None,
            logprobs=self._logprobs_of(token_ids, gained),
            num_cached_tokens=num_cached if is_first else 0,
            stop=self._detokenizer.stopped_by,
            begun_s=output.metrics.scheduled_ts if is_first and output.metrics else None,
        )

    def _reason_of(self, gained: "CompletionOutput") -> FinishReason | None:
        if gained.finish_reason is None:
            return None
        return REASONS.get(gained.finish_reason, FinishReason.ERROR)

    def _note(self, output: "RequestOutput", *, is_first: bool) -> None:
        """Write what happened to the sequence into its journal."""
        journal, metrics = self._request.journal, output.metrics
        if journal is None or metrics is None:
            return
        if is_first:
            since_s = time.monotonic() - metrics.scheduled_ts
            journal.note_begun(time.time_ns() - int(1e9 * since_s))
        if metrics.num_preemptions > self._num_preemptions:
            self._num_preemptions = metrics.num_preemptions
            journal.preempted_ns.append(time.time_ns())

    def _logprobs_of(
        self, token_ids: Sequence[int], gained: "CompletionOutput"
    ) -> tuple[TokenLogprobs, ...]:
        num_top = self._request.params.top_logprobs
        if num_top is None or not token_ids or not gained.logprobs:
            return ()
        return tuple(
            entry
            for token_id, found in zip(token_ids, gained.logprobs, strict=True)
            for entry in self._codec.token_bytes.describe(
                token_id,
                PositionLogprobs(found[token_id].logprob, tuple(_likeliest(found, num_top))),
            )
        )

    def _of_prompt(self, output: "RequestOutput") -> Iterator[TextDelta]:
        """Yield the log-probabilities of the prompt; vLLM has all of them at once.

        vLLM's prompt may hold delivered tokens behind the request's own.
        """
        token_ids, num_sent = self._request.prompt_token_ids, self._request.num_prompt_logprobs
        if num_sent >= len(token_ids):
            return
        num_top = self._request.params.prompt_logprobs or 0
        first_id = None if num_sent else token_ids[0]
        begin = max(1, num_sent)
        found = [each or {} for each in (output.prompt_logprobs or ())][begin : len(token_ids)]
        scores = _scores(token_ids[begin:], found, num_top)
        for part in self._codec.token_bytes.describe_prompt(first_id, scores):
            yield TextDelta((), "", prompt_logprobs=(part,))


def _why(gained: "CompletionOutput") -> str:
    return NO_TOKEN if gained.stop_reason == UNUSABLE_LOGITS else BROKEN_GRAMMAR


def _likeliest(found: "Mapping[int, Logprob]", num_top: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens, likeliest first; `found` may hold the chosen one besides."""
    ranked = sorted(found.items(), key=lambda each: (each[1].rank or 0, each[0]))
    return [(token_id, each.logprob) for token_id, each in ranked[:num_top]]


def _scores(
    token_ids: Sequence[int], found: "Sequence[Mapping[int, Logprob]]", num_top: int
) -> PromptScores:
    """Return the log-probabilities of a prompt's tokens as the embedded engine has them."""
    num_top = min([num_top, *map(len, found)])
    rows = [
        [(token_id, each[token_id].logprob), *_likeliest(each, num_top)]
        for token_id, each in zip(token_ids, found, strict=True)
    ]
    ranks = [each[token_id].rank or 0 for token_id, each in zip(token_ids, found, strict=True)]
    size = (len(rows), 1 + num_top)
    return PromptScores(
        torch.tensor([[i for i, _ in row] for row in rows], dtype=torch.int32).reshape(size),
        torch.tensor([[p for _, p in row] for row in rows], dtype=torch.float32).reshape(size),
        torch.tensor(ranks, dtype=torch.int32),
    )
