"""What pooled requests and their answers look like in a channel's frames.

Each frame is a map of one entry: the number of the call, which the ingress chooses, and the
request, or nil when its client has left; in the other direction, the answer. The replica's last
frame, before it stops, is an empty map: calls without an answer won't be finished.

    call    = {number: request}
    request = [request id, texts, truncate, most tokens, most tokens of a text, number of whole
               texts, operation, elapsed seconds, claim, trace]
    text    = string, [string, string] for a pair, or an array of token ids
    answer  = {number: [number of open calls, replica id, texts]}
            | {number: [number of open calls, replica id, error, is full]}
            | {number: [number of open calls, replica id]} of a model without a turn
            | {number: [number of open calls, error]}
    error   = [name of its class, its arguments]
"""

from dataclasses import astuple, dataclass
from typing import Any, Final

from deployments.contract import errors
from deployments.contract.channel.wire import WireError, decode_value, encode_frame
from deployments.contract.claims import Claim
from deployments.contract.errors import OverloadedError, OverloadReason, RaystreamError
from deployments.contract.generation import Refused
from deployments.contract.pooling import (
    Asleep,
    Pooled,
    PooledText,
    PoolingAnswer,
    PoolingInput,
    PoolingRequest,
    TextPair,
)
from deployments.contract.telemetry.tracing import TraceContext

MAX_CALL_BYTES: Final = 256 * 1024
"""The most bytes of a request's frame. Compared with reading so many, Serve's call costs little,
and a replica's socket is not kept from the frames behind it."""

MAX_NUM_TEXTS: Final = 256
"""The most texts of a request: their vectors must fit into a frame."""

GOODBYE: Final = encode_frame({})
"""Says that the replica stops."""


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """A replica's answer to one call.

    Attributes:
        num_calls: Calls that are open at the replica, of all ingresses; without this one.
        outcome: The answer, or the error that the replica has raised.
    """

    num_calls: int
    outcome: PoolingAnswer | RaystreamError


def encode_call(number: int, request: PoolingRequest) -> bytes | None:
    """Return the frame that sends a request; None if it is too large for a channel."""
    if len(request.texts) > MAX_NUM_TEXTS:
        return None
    trace = request.trace
    frame = encode_frame(
        {
            number: (
                request.request_id,
                [_text(each) for each in request.texts],
                request.truncate,
                request.max_num_tokens,
                request.max_text_tokens,
                request.num_whole,
                request.operation,
                request.elapsed_s,
                astuple(request.claim),
                None if trace is None else astuple(trace),
            )
        }
    )
    return frame if len(frame) <= MAX_CALL_BYTES else None


def encode_departure(number: int) -> bytes:
    """Return the frame which says that the client of a call has left."""
    return encode_frame({number: None})


def decode_call(payload: bytes) -> tuple[int, PoolingRequest | None]:
    """Return a call's number and its request; None if its client has left.

    Raises:
        WireError: It is malformed.
    """
    try:
        ((number, fields),) = decode_value(payload).items()
        return int(number), None if fields is None else _request(*fields)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise WireError("this is no call") from error


def encode_answer(number: int, answer: CallAnswer) -> bytes:
    """Return the frame that answers a call."""
    outcome: tuple[object, ...]
    match answer.outcome:
        case Pooled():
            rows = [(each.row, each.num_tokens, each.is_truncated) for each in answer.outcome.texts]
            outcome = answer.outcome.replica_id, rows
        case Refused():
            refused = answer.outcome
            outcome = refused.replica_id, _error(refused.error), refused.is_full
        case Asleep():
            outcome = (answer.outcome.replica_id,)
        case RaystreamError():
            outcome = (_error(answer.outcome),)
    return encode_frame({number: (answer.num_calls, *outcome)})


def decode_answer(payload: bytes) -> tuple[int, CallAnswer] | None:
    """Return the number of the call that is answered, and the answer; None: the replica stops.

    Raises:
        WireError: It is malformed.
    """
    try:
        answers = decode_value(payload)
        if not answers:
            return None
        ((number, (num_calls, *outcome)),) = answers.items()
        return int(number), CallAnswer(int(num_calls), _outcome(*outcome))
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise WireError("this is no answer") from error


def _text(text: PoolingInput) -> object:
    return (text.first, text.second) if isinstance(text, TextPair) else text


def _input(text: Any) -> PoolingInput:
    match text:
        case str():
            return text
        case (str(first), str(second)):
            return TextPair(first, second)
        case tuple() if all(isinstance(each, int) for each in text):
            return text
    raise ValueError("this is no text")


def _request(
    request_id: str,
    texts: tuple[Any, ...],
    truncate: bool,
    max_num_tokens: int | None,
    max_text_tokens: int | None,
    num_whole: int,
    operation: Any,
    elapsed_s: float,
    claim: tuple[Any, ...],
    trace: tuple[Any, ...] | None,
) -> PoolingRequest:
    return PoolingRequest(
        request_id,
        tuple(map(_input, texts)),
        truncate,
        max_num_tokens,
        max_text_tokens,
        num_whole,
        operation,
        trace=None if trace is None else TraceContext(*trace),
        elapsed_s=elapsed_s,
        claim=Claim(*claim),
    )


def _outcome(first: Any, rest: Any = None, is_full: bool | None = None) -> Any:
    if rest is None:
        return Asleep(first) if isinstance(first, str) else _raised(*first)
    if is_full is None:
        return Pooled(tuple(PooledText(*each) for each in rest), first)
    return Refused(_raised(*rest), first, is_full)


def _error(error: RaystreamError) -> tuple[object, ...]:
    return type(error).__name__, error.args


def _raised(name: str, args: tuple[Any, ...]) -> Any:
    """Return the error of a class's name; one of an unknown class is a `RaystreamError`."""
    kind = getattr(errors, name, None)
    if kind is OverloadedError:
        message, param, retry_after_s, reason = args
        return OverloadedError(message, param, retry_after_s, OverloadReason(reason))
    if isinstance(kind, type) and issubclass(kind, RaystreamError):
        return kind(*args)
    return RaystreamError(*args[:3])
