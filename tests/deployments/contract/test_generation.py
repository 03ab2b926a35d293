import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from deployments.contract.descriptions import (
    ModelDescription,
    PoolerDescription,
    ReasoningDescription,
)
from deployments.contract.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    ModelChangedError,
    OverloadedError,
    OverloadReason,
)
from deployments.contract.formats.reasoning_format import PromptReasoning
from deployments.contract.generation import (
    Accepted,
    ChannelAddress,
    GenerationRequest,
    Refused,
    RequestGroup,
    StreamKey,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.contract.messages import ChatMessage, ImagePart, TextPart, Tool, ToolCall
from deployments.contract.output import FinishReason, TextDelta, TokenLogprob, TokenLogprobs
from deployments.contract.pooling import Pooled, PooledText, PoolingRequest
from deployments.contract.sampling_params import ReasoningTokens, SamplingParams
from tests.offenders import for_each
from tests.serve_app.fake_pooler import as_row

SAMPLING = SamplingParams(
    max_tokens=3, temperature=0.5, seed=7, stop=("x",), stop_token_ids=frozenset({4})
)
MESSAGE = ChatMessage("user", (TextPart("look"), ImagePart(b"\x89PNG")))
LIKELY = TokenLogprob(1, b"t", -0.5)
MESSAGES = [
    GenerationRequest("r", (MESSAGE,), SAMPLING, (8, 9)),
    GenerationRequest("r", "plain", SAMPLING),
    GenerationRequest("r", (1, 2), SAMPLING),
    GenerationRequest("r", "one of", SAMPLING, group=RequestGroup("g", 3, is_first=True)),
    RequestGroup("g", 3, is_first=False),
    Accepted(12, "replica"),
    GenerationRequest("r", "plain", SAMPLING, default_max_tokens=16),
    TokenizeRequest((MESSAGE,), True, False, True),
    GenerationRequest("r", (MESSAGE,), SAMPLING, template_kwargs=(("enable_thinking", False),)),
    Accepted(12, "replica", PromptReasoning.BEGUN),
    ReasoningDescription("qwen3", ReasoningTokens(1, 2)),
    TokenizedPrompt((1, 2), ("a", "b")),
    Accepted(12),
    Accepted(12, channel=ChannelAddress("10.0.0.7", 4000, b"SECRET")),
    StreamKey("ingress", 7),
    ChannelAddress("10.0.0.7", 4000, b"SECRET", uses_tls=True),
    TextDelta((1, 2), "text"),
    TextDelta((), "", FinishReason.ERROR, "it failed"),
    TextDelta((1,), "t", logprobs=(TokenLogprobs(LIKELY, (LIKELY,)),)),
    ModelDescription("m", 1, 128, accepts_images=True, default_sampling=SAMPLING),
    PoolingRequest("r", ("one", "two"), truncate=True),
    Pooled((PooledText(as_row((0.25, 0.75)), 12, is_truncated=True),), "replica"),
    PoolerDescription("m", 1, 128, ("human", "machine"), is_multi_label=False),
]


@for_each(*MESSAGES)
def test_a_message_arrives_unchanged(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


REFUSALS = [
    Refused(OverloadedError("full", None, 3, OverloadReason.TOKENS), "replica", is_full=True),
    Refused(ContextLengthExceededError("too long", "messages"), "replica"),
    Refused(ModelChangedError("another", None, 1)),
]


@for_each(*REFUSALS)
def test_a_refusal_arrives_with_the_whole_error(value: Refused) -> None:
    arrived = pickle.loads(pickle.dumps(value))
    assert type(arrived.error) is type(value.error)
    assert vars(arrived.error) == vars(value.error)
    assert (arrived.replica_id, arrived.is_full) == (value.replica_id, value.is_full)


@for_each(*MESSAGES, *REFUSALS)
def test_a_message_is_immutable(value: object) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(value, type(value).__slots__[0], None)  # type: ignore[attr-defined] # slotted


def test_an_image_is_not_printed_into_logs() -> None:
    assert "PNG" not in repr(MESSAGES[0])


ASSISTANT_CALL = ChatMessage("assistant", (), (ToolCall("c", "f", '{"a": "SECRET"}'),))


@for_each(
    GenerationRequest("r", "SECRET", SAMPLING),
    PoolingRequest("r", ("SECRET",)),
    GenerationRequest("r", (ASSISTANT_CALL,), SAMPLING, tools=(Tool("f", "SECRET", '"SECRET"'),)),
    ASSISTANT_CALL,
    TextPart("SECRET"),
    Accepted(12, channel=ChannelAddress("10.0.0.7", 4000, b"SECRET")),
    TokenizeRequest("SECRET"),
    GenerationRequest("r", "", SAMPLING, template_kwargs=(("name", "SECRET"),)),
    TokenizedPrompt((1,), ("SECRET",)),
    Refused(InvalidRequestError("the template does not read 'SECRET'")),
)
def test_a_client_s_text_is_not_printed_into_logs(value: object) -> None:
    assert "SECRET" not in repr(value)
