"""Credits an answer's tokens to its content events, by the best count available."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadtest.results.record import TokenSource


@dataclass(frozen=True, slots=True)
class TokenCredit:
    """The tokens of each content event, and the source of the count."""

    tokens: tuple[int, ...]
    source: TokenSource


def credit(
    num_output_tokens: int | None,
    so_far: Sequence[int | None],
    counts: Sequence[int | None],
) -> TokenCredit:
    """Return the tokens of each content event, by the best source available.

    Args:
        num_output_tokens: The server's count for the whole answer, if it sent one.
        so_far: For each content event, the server's count up to it, if sent with the event.
        counts: For each content event, the server's count of its own tokens.
    """
    if not so_far:
        return TokenCredit((), TokenSource.CHUNKS)
    if num_output_tokens is not None:
        return TokenCredit(_by_usage(num_output_tokens, so_far), TokenSource.USAGE)
    if all(count is not None for count in counts):
        return TokenCredit(tuple(count or 0 for count in counts), TokenSource.EVENTS)
    return TokenCredit((1,) * len(so_far), TokenSource.CHUNKS)


def _by_usage(num_output_tokens: int, so_far: Sequence[int | None]) -> tuple[int, ...]:
    known = [count for count in so_far if count is not None]
    is_complete = len(known) == len(so_far)
    is_usable = is_complete and known == sorted(known) and known[-1] <= num_output_tokens
    if not is_usable:
        return spread(num_output_tokens, len(so_far))
    # Tokens after the last text, such as the end-of-sequence token, go to the last event.
    ends = [*known[:-1], num_output_tokens]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def spread(num_tokens: int, num_events: int) -> tuple[int, ...]:
    """Credit one token to the first event, and spread the rest evenly over the others.

    TPOT also counts the first event as one token if the server gives no count for it.
    """
    first = min(1, num_tokens)
    if num_events == 1:
        return (num_tokens,)
    rest, num_rest = num_tokens - first, num_events - 1
    ends = [rest * k // num_rest for k in range(num_rest + 1)]
    return (first, *(end - start for start, end in pairwise(ends)))
