"""The text of each sequence that an engine holds, as it grows by a token at a time."""

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from deployments.engine.detokenizer import Detokenizer, UndecodableError, decode_with
from deployments.engine.engine_limits import InvalidSequenceError
from deployments.engine.output import FinishReason, TextDelta
from deployments.engine.sampler import Sampled
from deployments.engine.sequence import Sequence, SequenceRequest
from deployments.engine.token_bytes import TokenBytes


class Transcripts:
    """A detokenizer for each sequence, from its arrival to its end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start with no sequence."""
        # By whether special tokens are skipped.
        self._decode = {skips: decode_with(tokenizer, skips) for skips in (True, False)}
        self._token_bytes = TokenBytes(tokenizer)
        self._detokenizers: dict[str, Detokenizer] = {}

    @property
    def sequence_ids(self) -> Collection[str]:
        """The sequences that have a text."""
        return self._detokenizers.keys()

    def open(self, request: SequenceRequest) -> None:
        """Begin a sequence's text, behind the tokens that were generated elsewhere.

        Raises:
            InvalidSequenceError: Those tokens make no text.
        """
        params = request.params
        decode = self._decode[params.skip_special_tokens]
        detokenizer = Detokenizer(decode, params.stop, params.min_tokens)
        try:
            detokenizer.feed(request.generated_token_ids)
        except UndecodableError as error:
            raise InvalidSequenceError("the generated tokens make no text") from error
        self._detokenizers[request.sequence_id] = detokenizer

    def write(self, sequence: Sequence, sampled: Sampled, reason: FinishReason | None) -> TextDelta:
        """Write a sequence's newest token.

        Args:
            sequence: The sequence; it has the token already.
            sampled: The token.
            reason: Why it ends the sequence; None if it does not, by itself or by its place.

        Returns:
            What the sequence gained. A stop string that the token completes is its finish reason.

        Raises:
            UndecodableError: The sequence's tokens make no text.
        """
        token_id = sampled.token_id
        is_text = token_id not in sequence.stop_token_ids
        detokenizer = self._detokenizers[sequence.sequence_id]
        text, is_stopped = detokenizer.advance(
            (token_id,) if is_text else (), is_last=reason is not None
        )
        return TextDelta(
            (token_id,),
            text,
            FinishReason.STOP if is_stopped else reason,
            logprobs=self._token_bytes.describe(token_id, sampled.logprobs),
            num_cached_tokens=sequence.num_cached_tokens if sequence.num_new_tokens == 1 else 0,
        )

    def close(self, sequence_id: str) -> None:
        """Forget a sequence that has ended."""
        del self._detokenizers[sequence_id]
