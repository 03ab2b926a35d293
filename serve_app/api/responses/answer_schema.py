"""What clients get of `/v1/responses`: the response, its output, and its events.

Source: https://platform.openai.com/docs/api-reference/responses
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from serve_app.api.responses.schema import ChoiceMode, Metadata, ResponsesRequest
from serve_app.api.tools.hosted import HostedTool

Status = Literal["in_progress", "completed", "incomplete", "failed"]
"""What has become of an item, or of a response that its client waits for."""

ResponseStatus = Status | Literal["queued", "cancelled"]
"""The same, or that of a response in the background."""


class OutputText(BaseModel):
    """A part of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[None] = []


class OutputReasoningText(BaseModel):
    """A part of the reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(BaseModel):
    """The model's text."""

    type: Literal["message"] = "message"
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoning(BaseModel):
    """The model's reasoning."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    status: Status
    summary: list[None] = []
    content: list[OutputReasoningText]


class OutputCall(BaseModel):
    """A call of a function."""

    type: Literal["function_call"] = "function_call"
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | None = Field(
        default=None,
        exclude_if=lambda name: name is None,
        description="The namespace that the function was offered in.",
    )
    arguments: str = Field(
        description="A JSON object, as text; its beginning, if max_output_tokens has cut it."
    )


OutputItem = Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]


class InputTokensDetails(BaseModel):
    """How many of the prompt's tokens were cached."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponsesTokensDetails(BaseModel):
    """How many of the answer's tokens are reasoning."""

    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    """Tokens, counted by the replica."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ResponsesTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(BaseModel):
    """Why a response has failed."""

    code: Literal["server_error"] = "server_error"
    message: str


class ResponseBody(BaseModel):
    """A response, whole or as far as a stream has come."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    model: str
    output: list[OutputItem] = []
    usage: ResponsesUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    truncation: Literal["disabled"] = "disabled"
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    parallel_tool_calls: bool
    tool_choice: ChoiceMode | dict[str, Any]
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: Metadata

    @classmethod
    def begin(
        cls,
        id_: str,
        created_at: int,
        model_id: str,
        asked: ResponsesRequest,
        *,
        is_stored: bool = False,
    ) -> "ResponseBody":
        """Return a response without output, which repeats the request's settings."""
        choice = asked.tool_choice
        offered = [tool for tool in asked.tools or () if not isinstance(tool, HostedTool)]
        tools = [tool.model_dump() for tool in offered]
        form = None if asked.text is None else asked.text.format
        told = {"type": "text"} if form is None else form.model_dump(by_alias=True)
        effort = None if asked.reasoning is None else asked.reasoning.effort
        return cls(
            id=id_,
            created_at=created_at,
            status="queued" if asked.background else "in_progress",
            model=model_id,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            tool_choice=choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
            tools=tools,
            text={"format": told},
            reasoning={"effort": effort, "summary": None},
            metadata=asked.metadata or {},
            store=is_stored,
            background=bool(asked.background),
            previous_response_id=asked.previous_response_id,
        )


class _Event(BaseModel):
    """Events only document themselves: plain dictionaries are written, for speed."""

    model_config = ConfigDict(extra="forbid")

    sequence_number: int


class ResponseEvent(_Event):
    """The response begins, or ends."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseBody


class ItemEvent(_Event):
    """An item begins, or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(_Event):
    """A part of an item begins, or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: Annotated[OutputText | OutputReasoningText, Field(discriminator="type")]


class TextEvent(_Event):
    """More text."""

    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[None]


class TextDoneEvent(_Event):
    """The whole text."""

    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[None]


class ReasoningEvent(_Event):
    """More reasoning."""

    type: Literal["response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDoneEvent(_Event):
    """The whole reasoning."""

    type: Literal["response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsEvent(_Event):
    """The arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(_Event):
    """The whole arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


class ResponsesEvent(
    RootModel[
        Annotated[
            ResponseEvent
            | ItemEvent
            | PartEvent
            | TextEvent
            | TextDoneEvent
            | ReasoningEvent
            | ReasoningDoneEvent
            | ArgumentsEvent
            | ArgumentsDoneEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """An event of a streamed response."""
