"""How the next token of a sequence is chosen, and when the sequence ends.

Owns the parameters' meaning and bounds. Holds no tensors and imports no torch, because the ingress,
which has neither, makes these objects too.
"""

from dataclasses import dataclass, field
from math import isfinite

MAX_SEED = 2**63 - 1
MAX_NUM_STOPS = 16


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
    """Sampling and stopping of one sequence.

    Attributes:
        max_tokens: Most tokens to generate; None means as many as the model's length leaves.
        temperature: Divides the logits; 0 means greedy.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches top_p.
        seed: Keys the random numbers together with the position, so that a sequence's tokens
            depend neither on its neighbours nor on where the sequence was resumed.
        stop: Strings that end the text; none of them is part of it.
        stop_token_ids: Token ids that end the sequence beside the model's own.
        ignore_eos: Go on past the model's end-of-sequence tokens.

    Raises:
        InvalidParameterError: A value is out of bounds.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of bounds by name."""
        self._require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        self._require(
            isfinite(self.temperature) and 0 <= self.temperature <= 2, "temperature", "from 0 to 2"
        )
        self._require(self.top_k >= 0, "top_k", "0 (off) or more")
        self._require(isfinite(self.top_p) and 0 < self.top_p <= 1, "top_p", "above 0, at most 1")
        self._require(0 <= self.seed <= MAX_SEED, "seed", f"from 0 to {MAX_SEED}")
        self._require(len(self.stop) <= MAX_NUM_STOPS, "stop", f"at most {MAX_NUM_STOPS} strings")
        self._require(all(self.stop), "stop", "strings that are not empty")

    def _require(self, holds: bool, param: str, bounds: str) -> None:
        if not holds:
            raise InvalidParameterError(f"{param} must be {bounds}", param)
