"""What clients send to `/v1/responses`: the fields of a request; `answer_schema` has the answer's.

Source: https://platform.openai.com/docs/api-reference/responses
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
)

from deployments.contract.descriptions import ModelDescription
from deployments.contract.messages import TemplatePairs
from serve_app.api.body.priority import Priority
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.body.wrong_type import wrong_type
from serve_app.api.conversation import Conversation
from serve_app.api.generation_body import GenerationBody, GrammarMaker
from serve_app.api.openai.template_schema import ReasoningEffort, effort_kwargs
from serve_app.api.responses.input_schema import Input, InputItem, whole_name
from serve_app.api.structured.response_format import (
    JsonObjectFormat,
    NamedSchema,
    TextFormat,
    to_grammar,
)
from serve_app.api.structured.tool_grammar import OfferedFunction
from serve_app.api.tools.hosted import (
    OPENAI_HOSTED,
    OpenAiHostedTool,
    ToolTypes,
)
from serve_app.api.tools.offer import ToolChoice, ToolOffer
from serve_app.api.tools.schema import (
    FunctionName,
    FunctionOrHosted,
    FunctionParameters,
    FunctionStrict,
    Placed,
    ToolList,
    offered_function,
    to_offer,
)
from serve_app.config import LimitsConfig


class FunctionTool(StrictBody):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: FunctionParameters = None
    strict: FunctionStrict = None

    defer_loading: bool | None = Field(
        default=None, description="Accepted, but not read: the prompt describes all tools."
    )

    def offered(self, place: str) -> OfferedFunction:
        """Return the function of the tool at a place; see `offered_function`."""
        return offered_function(self.name, self.description, self.parameters, self.strict, place)


FUNCTIONS_ONLY: Final = ToolTypes(("function",), None, "a namespace holds functions")


class NamespaceTool(StrictBody):
    """Functions that share a name, which the model sees in front of theirs."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = Field(
        default=None, description="Accepted, but the model does not see it."
    )
    tools: ToolList[Annotated[FunctionTool, BeforeValidator(FUNCTIONS_ONLY.check)]]


TOOL_TYPES: Final = ToolTypes(
    ("function", "namespace"), OPENAI_HOSTED, "offer a function, which the client calls itself"
)

OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OpenAiHostedTool, Tag("hosted")],
    Discriminator(TOOL_TYPES.kind_of),
    BeforeValidator(TOOL_TYPES.check),
]


class NamedFunction(StrictBody):
    """A function that must be called, or may be."""

    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(StrictBody):
    """The functions that may be called; the model does not see the others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: ToolList[FunctionOrHosted[NamedFunction]]

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions."""
        return frozenset(tool.name for tool in self.tools if isinstance(tool, NamedFunction))


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=16),
]
"""As at OpenAI: 16 pairs of short texts. All three events with the whole response repeat them."""

PreviousId = Annotated[str, Field(min_length=1, max_length=128)]

ChoiceMode = Literal["none", "auto", "required"]
ChoiceObject = Annotated[NamedFunction | AllowedFunctions, Field(discriminator="type")]


def _check_choice(choice: Any) -> Any:
    if not isinstance(choice, str | dict | None):
        raise wrong_type("'none', 'auto', 'required' or an object")
    return choice


Included = Literal[
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""What no answer here lacks: reasoning comes as text, and the other items never come."""


class SchemaFormat(NamedSchema):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    description: str | None = Field(
        default=None,
        max_length=1024,
        description="Repeated in the answer, but the model does not see it.",
    )


class TextConfig(StrictBody):
    """The form of the answer's text."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None


class ReasoningConfig(StrictBody):
    """How the model reasons."""

    effort: ReasoningEffort | None = Field(
        default=None,
        description="Given to the model's chat template. If that has no setting for reasoning, the "
        "header X-Raystream-Warning says so.",
    )


class ResponsesStreamOptions(StrictBody):
    """What a stream holds besides the answer."""


class ResponsesRequest(GenerationBody):
    """A request for the next response of a conversation."""

    input: Input = Field(description="The user's text, or the items of the conversation.")
    instructions: str | None = Field(
        default=None, description="Instructions before the conversation."
    )
    max_output_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of the answer. More than the model's length leaves means all that "
        "it leaves, unless the server's configuration refuses that.",
    )
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 means greedy decoding."
    )
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: ToolList[OfferedTool] | None = Field(
        default=None, description="The functions that the model may call."
    )
    tool_choice: (
        Annotated[
            ChoiceMode | ChoiceObject,
            BeforeValidator(_check_choice, json_schema_input_type=ChoiceMode | ChoiceObject),
        ]
        | None
    ) = Field(default=None, description="Whether the model must call a function, and which.")
    parallel_tool_calls: bool | None = Field(
        default=None, description="False: an answer ends with its first call."
    )
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    priority: Priority = None

    previous_response_id: PreviousId | None = Field(
        default=None,
        description="A stored response. Its conversation goes before the input, but for its "
        "instructions.",
    )
    background: bool | None = Field(
        default=None,
        description="True: answer at once with a response that is queued, and go on without the "
        "client. Ask for it again by its id, or read its events.",
    )
    store: bool | None = Field(
        default=None,
        description="Whether to keep the response, its input included, for `GET "
        "/v1/responses/{response_id}` and `previous_response_id`. Null does as "
        "`jobs.store_responses_by_default` says, and without `jobs.folder` nothing is kept. The "
        "answer says whether it is.",
    )

    # Bookkeeping: accepted, but no answer depends on it.
    metadata: Metadata | None = Field(
        default=None, description="Repeated in the answer, and kept with it."
    )
    include: list[Included] | None = Field(
        default=None,
        description="Accepted, but changes nothing: reasoning is told as text, and the server runs "
        "no tools. For log-probabilities, ask /v1/chat/completions.",
    )
    client_metadata: dict[str, Any] | None = Field(
        default=None, description="Accepted, but neither kept nor read."
    )
    user: str | None = Field(default=None, description="Accepted, but neither kept nor read.")
    safety_identifier: str | None = Field(
        default=None, description="Accepted, but neither kept nor read."
    )
    prompt_cache_key: str | None = Field(
        default=None,
        description="Accepted, but not read: prompts with a common beginning are found without it.",
    )

    _history: tuple[InputItem, ...] = PrivateAttr(default=())

    def after(self, history: Sequence[InputItem]) -> Self:
        """Return the request with the conversation that it goes on from."""
        following = self.model_copy()
        following._history = tuple(history)
        return following

    @property
    def asked_priority(self) -> int | None:
        """The priority that the request names."""
        return self.priority

    @property
    def renamed(self) -> Mapping[str, str]:
        """The fields that errors about the messages and the format name."""
        return {**super().renamed, "messages": "input"}

    def to_prompts(self, limits: LimitsConfig) -> Sequence[Conversation]:
        """Return the conversation."""
        conversation = Conversation()
        if self.instructions:
            conversation.turn("system", "instructions").add_text(self.instructions)
        for at, item in enumerate(self._history):
            item.add_to(conversation, f"previous_response_id[{at}]")
        for at, item in enumerate(self.input):
            item.add_to(conversation, f"input[{at}]")
        return (conversation,)

    def to_offer(self, limits: LimitsConfig, model: ModelDescription) -> ToolOffer:
        """Return the functions that the model may call; see `tools.schema.to_offer`."""
        return to_offer(list(self._tools()), self._chosen(), limits, model)

    def _tools(self) -> Iterator[Placed]:
        """Yield each tool with its place; those of a namespace by their whole names.

        Raises:
            InvalidRequestError: A name is too long.
        """
        for at, tool in enumerate(self.tools or ()):
            place = f"tools[{at}]"
            if not isinstance(tool, NamespaceTool):
                yield place, tool
                continue
            for within, function in enumerate(tool.tools):
                where = f"{place}.tools[{within}]"
                name = whole_name(tool.name, function.name, f"{where}.name")
                yield where, function.model_copy(update={"name": name})

    @property
    def namespaced(self) -> Mapping[str, tuple[str, str]]:
        """The namespace and the own name of each function in a namespace, by its whole name."""
        return {
            whole_name(tool.name, function.name, "tools"): (tool.name, function.name)
            for tool in self.tools or ()
            if isinstance(tool, NamespaceTool)
            for function in tool.tools
        }

    def _chosen(self) -> ToolChoice:
        is_parallel = self.parallel_tool_calls is not False
        match self.tool_choice:
            case NamedFunction(name=name):
                return ToolChoice(True, frozenset({name}), False, names_param="tool_choice.name")
            case AllowedFunctions() as allowed:
                return ToolChoice(
                    allowed.mode == "required",
                    allowed.names,
                    is_parallel,
                    hides_others=True,
                    names_param="tool_choice.tools",
                )
            case mode:
                return ToolChoice(mode == "required", None, is_parallel, forbids=mode == "none")

    def to_template_kwargs(self, model: ModelDescription) -> TemplatePairs:
        """Return values for the chat template by which the model makes the effort."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return tuple(effort_kwargs(effort, model, "reasoning.effort").items())

    format_param: ClassVar[str] = "text.format"

    @property
    def length_param(self) -> str:
        """The name of the field that holds the most tokens of the answer."""
        return "max_output_tokens"

    def grammar_maker(self) -> GrammarMaker | None:
        """Return what makes the grammar of the text; see `GenerationBody`."""
        wanted = None if self.text is None else self.text.format
        if wanted is None:
            return None
        return lambda settings: to_grammar(wanted, settings, self.format_param)

    def sampling(self) -> Mapping[str, Any]:
        """Return the parameters of `SamplingParams` by name; see `GenerationBody`."""
        return {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
