"""Parameters that control how the next token is chosen and when a sequence ends.

Owns the parameters' meaning and bounds. Imports no torch, because the ingress, which lacks it,
creates these objects, too.

The random numbers of sampling are stateless, keyed by seed and position: a sequence's number at a
position is the same in every batch, on every replica and after every interruption.

Source: the output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, 2014).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

MAX_SEED = 2**63 - 1
MAX_NUM_STOPS = 16
MAX_NUM_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_NUM_TOP_LOGPROBS = 20
MAX_NUM_PROMPT_LOGPROBS = 2**17
"""Log-probabilities that are reported for one prompt, and in the answers to one request. Each takes
about 80 bytes of the answer."""
MAX_PENALTY = 2.0
GRAMMAR_PARAM = "response_format"
"""The request field behind `grammar`: clients don't know grammars, so errors name this field."""
MAX_GRAMMAR_LENGTH = 2**20
"""Characters of a serialized grammar; far above what a client's schema can produce."""
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
"""Any plausible logit multiplied by this is still finite in float32."""

_MASK64 = 2**64 - 1


class InvalidParameterError(ValueError):
    """A sampling parameter is out of bounds; `param` names it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        """Return the message without the parameter."""
        return self.message


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """The tokens around the reasoning at the beginning of a text.

    Attributes:
        start: The token before it.
        end: The token after it.
        has_begun: Whether the prompt has already begun it. If not, the text has reasoning only if
            its first token is `start`.
        max_tokens: Most tokens of the reasoning, the marks not counted; after these, only `end` may
            come. None sets no limit.
        channel: The token after `start` that makes it reasoning; None if `start` alone does. With
            it, reasoning may begin again later, the token after `channel` is a mark, too, and
            there is no grammar: one of an answer on channels holds the reasoning itself.
    """

    start: int
    end: int
    has_begun: bool = False
    max_tokens: int | None = None
    channel: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one sequence; `sampling.sampler` defines the order of operations.

    Attributes:
        max_tokens: Most tokens to generate; None means up to the model's length. With 0 the
            sequence ends once its prompt is computed.
        min_tokens: Until this many tokens are generated, no token that would end the sequence is
            chosen, and a stop string completed by then is ordinary text. A stop string completed by
            a later token ends the text, even if it began earlier. vLLM does the same.
        temperature: Divides the logits; 0 means greedy.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches top_p.
        min_p: Keep the tokens with at least min_p times the probability of the likeliest; 0 keeps
            all.
        repetition_penalty: Divides the positive logits of tokens in the prompt or the output, and
            multiplies their negative logits. 1 changes nothing.
        presence_penalty: Subtracted from the logits of tokens in the output.
        frequency_penalty: Subtracted from the logits of tokens in the output, once per occurrence.
        logit_bias: Pairs of a token id and a value from -100 to 100 to add to its logit.
        seed: Keys the random numbers together with the position, so that a sequence's tokens
            depend neither on the batch nor on where the sequence was resumed.
        stop: Strings that end the text; the text excludes them.
        call_mark: The mark before each call of a tool, if the grammar binds calls; stop strings do
            not apply inside these. Empty: a text that begins with `{` is calls to its end. None:
            stop strings apply everywhere.
        stop_token_ids: Token ids that end the sequence, in addition to the model's own.
        ignore_eos: Continue past the model's end-of-sequence tokens. No effect with a grammar,
            which allows them only where the text is complete and always ends there.
        top_logprobs: How many of the likeliest tokens to report at each position, in addition to
            the chosen one, with their log-probabilities; None reports none.
        prompt_logprobs: How many of the likeliest tokens to report at each position of the prompt,
            in addition to the prompt's own one, with their log-probabilities; None reports none.
        skip_special_tokens: Whether special tokens add nothing to the text.
        grammar: The grammar of the text, as llguidance serializes it (`LLMatcher.grammar_from_*`).
            It overrides all other parameters: only tokens that it allows are chosen, and the
            sequence ends where the grammar does. None allows any text.
        reasoning: The marks of reasoning that may come before the text of the grammar and is not
            bound by it; None if the grammar holds from the first token. Without a grammar, only
            their limit has an effect.

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
    call_mark: str | None = None
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: str | None = field(default=None, repr=False)
    reasoning: ReasoningTokens | None = None

    def __post_init__(self) -> None:
        """Refuse values out of bounds, naming the parameter."""
        self._check_length()
        self._check_choice()
        self._check_logit_bias()
        self._require(0 <= self.seed <= MAX_SEED, "seed", "from 0 to {}", MAX_SEED)
        self._require(len(self.stop) <= MAX_NUM_STOPS, "stop", "at most {} strings", MAX_NUM_STOPS)
        self._require(all(self.stop), "stop", "strings that are not empty")
        self._require(
            min(self.stop_token_ids, default=0) >= 0, "stop_token_ids", "ids of 0 or more"
        )
        for name in ("top_logprobs", "prompt_logprobs"):
            self._require_between(getattr(self, name) or 0, name, 0, MAX_NUM_TOP_LOGPROBS)
        length = 1 if self.grammar is None else len(self.grammar)
        self._require(
            1 <= length <= MAX_GRAMMAR_LENGTH,
            GRAMMAR_PARAM,
            "a grammar of 1 to {} characters",
            MAX_GRAMMAR_LENGTH,
        )

    @property
    def needs_matcher(self) -> bool:
        """Whether the text so far decides which tokens may come next."""
        has_budget = self.reasoning is not None and self.reasoning.max_tokens is not None
        return self.grammar is not None or has_budget

    @property
    def has_penalties(self) -> bool:
        """Whether the next token depends on which tokens the sequence holds."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @property
    def token_ids(self) -> Mapping[str, Collection[int]]:
        """The token ids in the parameters, by parameter name."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": [token_id for token_id, _ in self.logit_bias],
        }

    def of_choice(self, index: int) -> "SamplingParams":
        """Return the parameters of the `index`-th answer to a prompt.

        Only the seed differs, and the prompt's log-probabilities come with the first answer.
        """
        if index == 0:
            return self
        return replace(self, seed=derive_seed(self.seed, index), prompt_logprobs=None)

    def _check_length(self) -> None:
        self._require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "0 or more")
        self._require(self.min_tokens >= 0, "min_tokens", "0 or more")
        self._require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            "at most max_tokens, which is {}",
            self.max_tokens,
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
            "a map of at most {} tokens",
            MAX_NUM_LOGIT_BIASES,
        )
        token_ids = {token_id for token_id, _ in self.logit_bias}
        self._require(
            len(token_ids) == len(self.logit_bias), "logit_bias", "one value for each token"
        )
        self._require(min(token_ids, default=0) >= 0, "logit_bias", "keyed by ids of 0 or more")
        for _, bias in self.logit_bias:
            self._require_between(bias, "logit_bias", -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)

    def _require_between(self, value: float, param: str, low: float, high: float) -> None:
        # NaN fails every comparison, so it is refused, too.
        self._require(low <= value <= high, param, "from {:g} to {:g}", low, high)

    def _require(self, holds: bool, param: str, bounds: str, *figures: object) -> None:
        """Raise if a bound does not hold.

        Args:
            holds: Whether it does.
            param: The parameter.
            bounds: What it must be.
            figures: Put into `bounds`, only for the error: every request passes here.
        """
        if not holds:
            raise InvalidParameterError(f"{param} must be {bounds.format(*figures)}", param)


def uniform(seed: int, position: int) -> float:
    """Return the random number for (seed, position), uniform in [0, 1)."""
    return (_mix64(_mix64(seed) + position) >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of the `index`-th answer to a request; the first answer keeps `seed`.

    Consecutive seeds would collide: answer 1 of seed 7 would equal answer 0 of seed 8.
    """
    # Positions are never negative, so `uniform` uses none of these numbers.
    return seed if index == 0 else _mix64(_mix64(seed) - index) & MAX_SEED


def _mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
