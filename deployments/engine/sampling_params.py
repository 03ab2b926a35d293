"""How the next token of a sequence is chosen, and when the sequence ends.

Owns the parameters' meaning and bounds. Holds no tensors and imports no torch, because the ingress,
which has neither, makes these objects too.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from deployments.engine.random_numbers import MAX_SEED, derive_seed

MAX_NUM_STOPS = 16
MAX_NUM_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_NUM_TOP_LOGPROBS = 20
MAX_PENALTY = 2.0
GRAMMAR_PARAM = "response_format"
"""Clients know of no grammar; this is the field that they ask for one by."""
MAX_GRAMMAR_LENGTH = 2**20
"""Characters of a serialized grammar, far beyond what a client's schema may come to."""
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
"""Multiplied by this, a logit that is anywhere near to sense is still finite in float32."""


class InvalidParameterError(ValueError):
    """A sampling parameter lies outside its bounds; `param` names it."""

    def __init__(self, message: str, param: str) -> None:
        """Keep the message for people and the parameter's name for programs."""
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        """Return the message alone."""
        return self.message


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one sequence; `sampler` says in which order they work.

    Attributes:
        max_tokens: Most tokens to generate; None means as many as the model's length leaves.
        min_tokens: Before so many tokens were generated, no token that would end the sequence is
            chosen, and a stop string that is complete by then is ordinary text. One that a later
            token completes ends the text, also where it began earlier. So it is in vLLM.
        temperature: Divides the logits; 0 means greedy.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches top_p.
        min_p: Keep the tokens that are at least this part as probable as the likeliest; 0 keeps
            all.
        repetition_penalty: Divides the positive logits of tokens that stand in the prompt or in
            the output, and multiplies the negative ones. 1 changes nothing.
        presence_penalty: Taken from the logits of tokens that stand in the output.
        frequency_penalty: Taken from them once for each time that they stand there.
        logit_bias: Pairs of a token id and what is added to its logit, from -100 to 100.
        seed: Keys the random numbers together with the position, so that a sequence's tokens
            depend neither on its neighbours nor on where the sequence was resumed.
        stop: Strings that end the text; none of them is part of it.
        stop_token_ids: Token ids that end the sequence beside the model's own.
        ignore_eos: Go on past the model's end-of-sequence tokens. A grammar allows none of them
            before its text is whole, and then it ends all the same.
        top_logprobs: How many of the likeliest tokens to tell at each position, beside the chosen
            one, with their log-probabilities; None tells nothing.
        skip_special_tokens: Whether special tokens add nothing to the text.
        grammar: What the text must be, as llguidance serializes it (`LLMatcher.grammar_from_*`).
            Whatever else is asked for, only tokens that the grammar allows are chosen, and the
            sequence ends where the grammar does. None allows any text.

    Raises:
        InvalidParameterError: A value is out of bounds.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False
    top_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Refuse values out of bounds by name."""
        self._check_length()
        self._check_choice()
        self._check_logit_bias()
        self._require(0 <= self.seed <= MAX_SEED, "seed", f"from 0 to {MAX_SEED}")
        self._require(len(self.stop) <= MAX_NUM_STOPS, "stop", f"at most {MAX_NUM_STOPS} strings")
        self._require(all(self.stop), "stop", "strings that are not empty")
        self._require(
            min(self.stop_token_ids, default=0) >= 0, "stop_token_ids", "ids of 0 or more"
        )
        self._require_between(self.top_logprobs or 0, "top_logprobs", 0, MAX_NUM_TOP_LOGPROBS)
        length = 1 if self.grammar is None else len(self.grammar)
        self._require(
            1 <= length <= MAX_GRAMMAR_LENGTH,
            GRAMMAR_PARAM,
            f"a grammar of 1 to {MAX_GRAMMAR_LENGTH} characters",
        )

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on which tokens the sequence holds."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @property
    def token_ids(self) -> Mapping[str, Collection[int]]:
        """The token ids that the parameters name, by the parameter's name."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": [token_id for token_id, _ in self.logit_bias],
        }

    def of_choice(self, index: int) -> "SamplingParams":
        """Return the parameters of the `index`-th answer to one request: another seed."""
        return self if index == 0 else replace(self, seed=derive_seed(self.seed, index))

    def _check_length(self) -> None:
        self._require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        self._require(self.min_tokens >= 0, "min_tokens", "0 or more")
        self._require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens, which is {self.max_tokens}",
        )

    def _check_choice(self) -> None:
        self._require_between(self.temperature, "temperature", 0, 2)
        self._require(self.top_k >= 0, "top_k", "0 (off) or more")
        self._require(0 < self.top_p <= 1, "top_p", "above 0, at most 1")
        self._require_between(self.min_p, "min_p", 0, 1)
        self._require_between(
            self.repetition_penalty,
            "repetition_penalty",
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._require_between(getattr(self, name), name, -MAX_PENALTY, MAX_PENALTY)

    def _check_logit_bias(self) -> None:
        self._require(
            len(self.logit_bias) <= MAX_NUM_LOGIT_BIASES,
            "logit_bias",
            f"of at most {MAX_NUM_LOGIT_BIASES} tokens",
        )
        token_ids = {token_id for token_id, _ in self.logit_bias}
        self._require(len(token_ids) == len(self.logit_bias), "logit_bias", "one for each token")
        self._require(min(token_ids, default=0) >= 0, "logit_bias", "by ids of 0 or more")
        for _, bias in self.logit_bias:
            self._require_between(bias, "logit_bias", -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)

    def _require_between(self, value: float, param: str, low: float, high: float) -> None:
        # NaN lies between no two numbers, so it is refused too.
        self._require(low <= value <= high, param, f"from {low:g} to {high:g}")

    def _require(self, holds: bool, param: str, bounds: str) -> None:
        if not holds:
            raise InvalidParameterError(f"{param} must be {bounds}", param)
