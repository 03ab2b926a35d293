"""Anthropic's messages on the wire: the fields of requests, answers and events.

Source: https://docs.claude.com/en/api/messages
Source: https://docs.claude.com/en/api/messages-count-tokens
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    RootModel,
    Tag,
)

from deployments.contract.descriptions import ModelDescription
from deployments.contract.errors import InvalidRequestError
from deployments.contract.messages import TemplatePairs
from deployments.contract.sampling_params import MAX_NUM_STOPS
from serve_app.api.body.cache_control import CacheControl
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.conversation import Conversation
from serve_app.api.generation_body import GenerationBody, GrammarMaker
from serve_app.api.messages.content_schema import MessageTurns, Texts, add_system
from serve_app.api.openai.template_schema import effort_kwargs
from serve_app.api.structured.json_schema_grammar import LENIENT, json_schema_grammar
from serve_app.api.structured.tool_grammar import OfferedFunction
from serve_app.api.tools.hosted import ANTHROPIC_HOSTED, AnthropicHostedTool, ToolTypes
from serve_app.api.tools.offer import ToolChoice, ToolOffer
from serve_app.api.tools.schema import (
    FunctionName,
    ToolList,
    offered_function,
    placed,
    to_offer,
)
from serve_app.config import LimitsConfig

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesTool(StrictBody):
    """A function that the model may call."""

    type: Literal["custom"] | None = Field(
        default=None, description="Tools that run at Anthropic have other types."
    )
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] = Field(
        description="The JSON schema of the arguments, which are an object."
    )
    strict: bool | None = Field(
        default=None, description="Make every call of this function valid by the schema."
    )
    cache_control: CacheControl = None

    # Hints: accepted, but no answer depends on them.
    defer_loading: bool | None = Field(
        default=None, description="Accepted, but not read: the prompt describes all tools."
    )
    eager_input_streaming: bool | None = Field(
        default=None, description="Accepted, but not read: a call is sent once it is whole."
    )
    input_examples: list[dict[str, Any]] | None = Field(
        default=None, description="Accepted, but the model does not see them."
    )

    def offered(self, place: str) -> OfferedFunction:
        """Return the function of the tool at a place; see `offered_function`."""
        return offered_function(
            self.name, self.description, self.input_schema, self.strict, place, "input_schema"
        )


TOOL_TYPES: Final = ToolTypes(
    ("custom",), ANTHROPIC_HOSTED, "offer a tool with an input_schema, which the client runs itself"
)

OfferedTool = Annotated[
    Annotated[MessagesTool, Tag("custom")] | Annotated[AnthropicHostedTool, Tag("hosted")],
    Discriminator(TOOL_TYPES.kind_of),
    BeforeValidator(TOOL_TYPES.check),
]


class CallingChoice(StrictBody):
    """A choice with which the model may call."""

    disable_parallel_tool_use: bool | None = Field(
        default=None, description="True: an answer ends with its first call."
    )

    @property
    def is_parallel(self) -> bool:
        """Whether an answer may hold several calls."""
        return self.disable_parallel_tool_use is not True


class AutoChoice(CallingChoice):
    """The model may call tools."""

    type: Literal["auto"]

    def chosen(self) -> ToolChoice:
        """Return the choice."""
        return ToolChoice(is_parallel=self.is_parallel)


class AnyChoice(CallingChoice):
    """The model must call a tool."""

    type: Literal["any"]

    def chosen(self) -> ToolChoice:
        """Return the choice."""
        return ToolChoice(must_call=True, is_parallel=self.is_parallel)


class NamedChoice(CallingChoice):
    """The model must call this tool."""

    type: Literal["tool"]
    name: FunctionName

    def chosen(self) -> ToolChoice:
        """Return the choice."""
        return ToolChoice(True, frozenset({self.name}), False, names_param="tool_choice.name")


class NoChoice(StrictBody):
    """The model must not call tools."""

    type: Literal["none"]

    def chosen(self) -> ToolChoice:
        """Return the choice."""
        return ToolChoice(forbids=True)


class Thinking(StrictBody):
    """Whether the model reasons."""

    type: Literal["adaptive", "enabled", "disabled"] = Field(
        description="disabled turns reasoning off and enabled turns it on, if the model's chat "
        "template can. adaptive leaves it to the template."
    )
    budget_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of the reasoning; after these, the answer begins. Without effect "
        "if the model does not reason, or its reasoning is not separated from its answers. Where a "
        "grammar binds an answer on channels, it is not enforced, and X-Raystream-Warning says so.",
    )
    display: Literal["summarized", "omitted"] | None = Field(
        default=None,
        description="omitted leaves the text of the reasoning out of the answer; the signature "
        "carries it to the next turn. summarized and null give it as the model wrote it.",
    )


class JsonOutput(StrictBody):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(
        alias="schema",
        description="A keyword that can't be enforced is left out, and the header "
        "X-Raystream-Warning names it. The rest of the schema is always enforced.",
    )


class OutputConfig(StrictBody):
    """The form of the answer, and the effort that the model makes."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None,
        description="Given to the model's chat template. If that has no setting for reasoning, the "
        "header X-Raystream-Warning says so.",
    )
    format: JsonOutput | None = None


class Metadata(StrictBody):
    """Bookkeeping of the client."""

    user_id: str | None = Field(default=None, description="Accepted, but neither kept nor read.")


class PromptFields(GenerationBody):
    """The fields that the prompt is made of."""

    messages: MessageTurns = Field(
        description="The last is the user's: an answer always begins a turn."
    )
    system: Texts | None = Field(default=None, description="Instructions before the conversation.")
    tools: ToolList[OfferedTool] | None = Field(
        default=None, description="The functions that the model may call."
    )
    tool_choice: (
        Annotated[AutoChoice | AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")]
        | None
    ) = Field(default=None, description="Whether the model must call a tool, and which.")
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    context_management: dict[str, Any] | None = Field(
        default=None, description="Accepted, but not read: a conversation is read as it is sent."
    )

    def to_prompts(self, limits: LimitsConfig) -> Sequence[Conversation]:
        """Return the conversation.

        Raises:
            InvalidRequestError: The last message is the assistant's.
        """
        if self.messages[-1].role == "assistant":
            raise InvalidRequestError(
                "The last message is the assistant's, but no answer continues a message here. End "
                "with the user's.",
                f"messages[{len(self.messages) - 1}].role",
            )
        conversation = Conversation()
        add_system(self.system or [], conversation, "system", "system")
        for at, message in enumerate(self.messages):
            message.add_to(conversation, f"messages[{at}]")
        return (conversation,)

    def to_offer(self, limits: LimitsConfig, model: ModelDescription) -> ToolOffer:
        """Return the functions that the model may call; see `tools.schema.to_offer`.

        Raises:
            InvalidRequestError: They are refused; or a tool must be called, but there is none.
        """
        chosen = self.tool_choice
        if isinstance(chosen, AnyChoice) and not self.tools:
            raise InvalidRequestError("tool_choice 'any' needs tools.", "tool_choice")
        choice = ToolChoice() if chosen is None else chosen.chosen()
        return to_offer(placed(self.tools), choice, limits, model)

    def to_template_kwargs(self, model: ModelDescription) -> TemplatePairs:
        """Return values for the chat template: those of `thinking` and of the effort."""
        config = self.output_config
        effort = None if config is None else config.effort
        given = effort_kwargs(effort, model, "output_config.effort")
        match None if self.thinking is None else self.thinking.type:
            case "disabled":
                given |= effort_kwargs("none", model, "thinking")
            case "enabled" if "enable_thinking" in model.template_parameters:
                given["enable_thinking"] = True
        return tuple(given.items())


class MessagesRequest(PromptFields):
    """A request for the assistant's next message."""

    max_tokens: int = Field(
        ge=1,
        description="Most tokens of the answer. More than the model's length leaves means all that "
        "it leaves, unless the server's configuration refuses that.",
    )
    stream: bool | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(fail_fast=True, max_length=MAX_NUM_STOPS),
        ]
        | None
    ) = Field(default=None, description="Strings that end the text; the text does not hold them.")
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 means greedy decoding."
    )
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, description="0 and -1 keep all tokens.")
    metadata: Metadata | None = None

    @property
    def max_reasoning_tokens(self) -> int | None:
        """Most tokens of the reasoning, which only `enabled` bounds; None sets no limit."""
        thinking = self.thinking
        return thinking.budget_tokens if thinking and thinking.type == "enabled" else None

    @property
    def omits_thinking(self) -> bool:
        """Whether the answer tells its reasoning only in signatures."""
        return self.thinking is not None and self.thinking.display == "omitted"

    stop_param: ClassVar[str] = "stop_sequences"
    format_param: ClassVar[str] = "output_config.format"

    def grammar_maker(self) -> GrammarMaker | None:
        """Return what makes the grammar of the text; see `GenerationBody`."""
        output = None if self.output_config is None else self.output_config.format
        if output is None:
            return None
        return lambda settings: json_schema_grammar(
            output.schema_, settings, self.format_param, LENIENT
        )

    def sampling(self) -> Mapping[str, Any]:
        """Return the parameters of `SamplingParams` by name; see `GenerationBody`."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "stop": None if self.stop_sequences is None else tuple(self.stop_sequences),
        }


class AnswerText(BaseModel):
    """A block of text."""

    type: Literal["text"] = "text"
    text: str


class AnswerThinking(BaseModel):
    """A block of the model's reasoning."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = Field(description="Says nothing: reasoning is not signed here.")


class AnswerToolUse(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = Field(
        description="The arguments. If max_tokens has cut them: as much as had arrived."
    )


AnswerBlock = Annotated[AnswerText | AnswerThinking | AnswerToolUse, Field(discriminator="type")]


class OutputTokensDetails(BaseModel):
    """How many of the answer's tokens are reasoning."""

    thinking_tokens: int = Field(description="Tokens of the reasoning, its marks included.")


class MessagesUsage(BaseModel):
    """Tokens, counted by the replica; the prompt's are divided by whether they were computed."""

    input_tokens: int = Field(description="Tokens of the prompt that were computed.")
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = Field(
        description="Tokens of the prompt that were reused from an earlier request."
    )
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None = Field(
        default=None,
        exclude_if=lambda details: details is None,
        description="Absent if the model's reasoning is not separated from its answers.",
    )


class Message(BaseModel):
    """A whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = Field(description="Null only where a stream begins.")
    stop_sequence: str | None = Field(description="The stop sequence that ended the text.")
    usage: MessagesUsage


class TokenCount(BaseModel):
    """The tokens of a prompt."""

    input_tokens: int


class _Event(BaseModel):
    """Events only document themselves: plain dictionaries are written, for speed."""

    model_config = ConfigDict(extra="forbid")


class MessageStart(_Event):
    """The first event: the message without its content."""

    type: Literal["message_start"]
    message: Message


class ContentBlockStart(_Event):
    """A block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class TextGain(_Event):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingGain(_Event):
    """More reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureGain(_Event):
    """The end of the reasoning."""

    type: Literal["signature_delta"]
    signature: str


class InputGain(_Event):
    """The arguments of a call, as JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(_Event):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[
        TextGain | ThinkingGain | SignatureGain | InputGain, Field(discriminator="type")
    ]


class ContentBlockStop(_Event):
    """A block ends."""

    type: Literal["content_block_stop"]
    index: int


class StopDelta(_Event):
    """Why the message has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(_Event):
    """The end of the content, with the usage of the whole message."""

    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessagesUsage


class PlainEvent(_Event):
    """An event that says nothing more."""

    type: Literal["ping", "message_stop"]


class MessagesEvent(
    RootModel[
        Annotated[
            MessageStart
            | ContentBlockStart
            | ContentBlockDelta
            | ContentBlockStop
            | MessageDelta
            | PlainEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """An event of a streamed message."""
