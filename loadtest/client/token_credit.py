"""How an answer's tokens are credited to its content events, and who has counted them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadtest.record import TokenSource


@dataclass(frozen=True, slots=True)
class TokenCredit:
    """The tokens of each content event, and where the count comes from."""

    tokens: tuple[int, ...]
    source: TokenSource


def credit(
    num_output_tokens: int | None,
    so_far: Sequence[int | None],
    counts: Sequence[int | None],
) -> TokenCredit:
    """Return the tokens of each content event, by the best source there is.

    Args:
        num_output_tokens: The server's count for the whole answer, if it gave one.
        so_far: For each content event the server's count up to it, if it came with the event.
        counts: For each content event the server's count for it alone.
    """
    if not so_far:
        return TokenCredit((), TokenSource.CHUNKS)
    if num_output_tokens is not None:
        return TokenCredit(_by_usage(num_output_tokens, so_far), TokenSource.USAGE)
    if all(count is not None for count in counts):
        return TokenCredit(tuple(count or 0 for count in counts), TokenSource.EVENTS)
    return TokenCredit((1,) * len(so_far), TokenSource.CHUNKS)


def _by_usage(num_output_tokens: int, so_far: Sequence[int | None]) -> tuple[int, ...]:
    told = [count for count in so_far if count is not None]
    is_told = len(told) == len(so_far) and told == sorted(told) and told[-1] <= num_output_tokens
    if not is_told:
        return spread(num_output_tokens, len(so_far))
    # Tokens behind the last text, as the one that ends the answer, belong to the last event.
    ends = [*told[:-1], num_output_tokens]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def spread(num_tokens: int, num_events: int) -> tuple[int, ...]:
    """Return a token for the first event and the others evenly over the others.

    Without the server's word the first event counts as one token; so it does for TPOT.
    """
    first = min(1, num_tokens)
    if num_events == 1:
        return (num_tokens,)
    rest, num_rest = num_tokens - first, num_events - 1
    ends = [rest * k // num_rest for k in range(num_rest + 1)]
    return (first, *(end - start for start, end in pairwise(ends)))
