"""Tools as OpenAI's clients offer them, and the calls that they send back.

Source: https://platform.openai.com/docs/api-reference/chat/create (tools, tool_choice)
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from deployments.contract.descriptions import ModelDescription
from deployments.contract.errors import InvalidRequestError
from deployments.contract.messages import Tool, ToolCall
from serve_app.api.body.cache_control import CacheControl
from serve_app.api.body.echoed_fields import IN_CALLS
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.body.wrong_type import wrong_type
from serve_app.api.structured.tool_grammar import OfferedFunction
from serve_app.api.tools.hosted import OPENAI_TYPES, HostedTool, OpenAiHostedTool
from serve_app.api.tools.offer import ToolChoice, ToolOffer, make_offer
from serve_app.config import MAX_NUM_TOOLS, LimitsConfig
from serve_app.http.json_route import decode_json

MAX_NAME_LENGTH: Final = 128
"""Characters of a function's name: Anthropic's limit, and twice OpenAI's."""

FunctionName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_-]{{1,{MAX_NAME_LENGTH}}}$")]

MAX_CALL_ID_LENGTH = 256

MAX_ARGUMENTS_DEPTH = 64
"""Most levels of nested objects and lists in the arguments of an earlier call."""


ToolT = TypeVar("ToolT")

FunctionOrHosted = Annotated[
    Annotated[ToolT, Tag("function")] | Annotated[OpenAiHostedTool, Tag("hosted")],
    Discriminator(OPENAI_TYPES.kind_of),
    BeforeValidator(OPENAI_TYPES.check),
]
"""A function in some shape, or a tool that only OpenAI's own server runs."""

ToolList = Annotated[list[ToolT], Field(max_length=MAX_NUM_TOOLS, fail_fast=True)]
"""As many tools as a request may have, in some shape."""

NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


FunctionParameters = Annotated[
    dict[str, Any] | None,
    Field(description="The JSON schema of the arguments, which are an object. Null: no arguments."),
]
FunctionStrict = Annotated[
    bool | None, Field(description="Make every call of this function valid by the schema.")
]


class FunctionBody(StrictBody):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: FunctionParameters = None
    strict: FunctionStrict = None
    cache_control: CacheControl = None


class ToolBody(StrictBody):
    """A tool that the client runs; all of these are functions."""

    type: Literal["function"]
    function: FunctionBody
    cache_control: CacheControl = None

    def offered(self, place: str) -> OfferedFunction:
        """Return the function of the tool at a place; see `offered_function`."""
        function = self.function
        return offered_function(
            function.name,
            function.description,
            function.parameters,
            function.strict,
            f"{place}.function",
        )


class ChosenFunction(StrictBody):
    """The name of an offered function."""

    name: FunctionName


class AllowedTool(StrictBody):
    """One of the functions that may be called."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(StrictBody):
    """The tools that may be called; the model does not see the others."""

    mode: Literal["auto", "required"]
    tools: ToolList[FunctionOrHosted[AllowedTool]]

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions."""
        return frozenset(tool.function.name for tool in self.tools if isinstance(tool, AllowedTool))


def _named_only_by(kind: str) -> dict[str, Any]:
    return {
        "if": {"properties": {"type": {"const": kind}}},
        "then": {"properties": {kind: {"not": {"type": "null"}}}, "required": [kind]},
        "else": {"properties": {kind: {"type": "null"}}},
    }


_CHOICE_RULE: Final[dict[str, Any]] = {
    "allOf": [_named_only_by("function"), _named_only_by("allowed_tools")]
}
"""The rule of `ToolChoiceBody._check_named` as a JSON schema."""


class ToolChoiceBody(StrictBody):
    """Whether a function must be called, and which."""

    model_config = ConfigDict(json_schema_extra=_CHOICE_RULE)

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _check_named(self) -> Self:
        for name in ("function", "allowed_tools"):
            if (self.type == name) != (getattr(self, name) is not None):
                raise PydanticCustomError(
                    "tool_choice",
                    "tool_choice holds {field} if its type is {kind}, and only then.",
                    {"field": name, "kind": repr(name)},
                )
        return self

    def chosen(self, parallel: bool | None) -> ToolChoice:
        """Return the choice; `parallel` says whether an answer may hold several calls."""
        is_parallel = parallel is not False
        match self.type:
            case "function" if self.function is not None:
                names = frozenset({self.function.name})
                param = "tool_choice.function.name"
                return ToolChoice(True, names, is_parallel=False, names_param=param)
            case "allowed_tools" if self.allowed_tools is not None:
                return ToolChoice(
                    self.allowed_tools.mode == "required",
                    self.allowed_tools.names,
                    is_parallel,
                    hides_others=True,
                    names_param="tool_choice.allowed_tools.tools",
                )
            case mode:
                return ToolChoice(mode == "required", None, is_parallel, forbids=mode == "none")


def _as_object(choice: Any) -> Any:
    if not isinstance(choice, str | dict | None):
        raise wrong_type("'none', 'auto', 'required' or an object")
    return {"type": choice} if isinstance(choice, str) else choice


ToolChoiceField = Annotated[
    ToolChoiceBody,
    BeforeValidator(
        _as_object,
        json_schema_input_type=Literal["none", "auto", "required"] | ToolChoiceBody,
    ),
]

OfferedTool = FunctionOrHosted[ToolBody]
Tools = ToolList[OfferedTool]


def _as_text(arguments: Any) -> Any:
    """Return a call's arguments as text; some clients keep them as the object that they read."""
    match arguments:
        case None:
            return ""
        case dict():
            return json.dumps(arguments, ensure_ascii=False)
        case str():
            return arguments
        case _:
            raise wrong_type("a string or an object")


class CalledFunctionBody(StrictBody):
    """The function that was called, and its arguments."""

    name: FunctionName
    arguments: Annotated[
        str, BeforeValidator(_as_text, json_schema_input_type=str | dict[str, Any] | None)
    ] = Field(
        default="",
        description="A JSON object, as text. Arguments that a limit cut, or that are wrong "
        "otherwise, are taken as they stand.",
    )
    parsed_arguments: Any = Field(
        default=None,
        description="Accepted, but not read: what the openai package has read from the arguments.",
    )

    echoed: ClassVar[frozenset[str]] = IN_CALLS


class ToolCallBody(StrictBody):
    """A call that the assistant has made, as an answer reported it."""

    id: str = Field(min_length=1, max_length=MAX_CALL_ID_LENGTH)
    type: Literal["function"] | None = "function"
    function: CalledFunctionBody
    cache_control: CacheControl = None

    echoed: ClassVar[frozenset[str]] = IN_CALLS


class CalledFunction(BaseModel):
    """The function that the model calls, and its arguments."""

    name: str
    arguments: str = Field(description="A JSON object, as text.")


class AnswerToolCall(BaseModel):
    """A call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @classmethod
    def of(cls, call: ToolCall) -> "AnswerToolCall":
        """Return a call as answers report it."""
        return cls(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))


def chosen(choice: ToolChoiceBody | None, parallel: bool | None) -> ToolChoice:
    """Return a request's choice; null leaves it to the model. See `ToolChoiceBody.chosen`."""
    return (
        ToolChoice(is_parallel=parallel is not False) if choice is None else choice.chosen(parallel)
    )


class FunctionTool(Protocol):
    """A function in the shape of some API."""

    def offered(self, place: str) -> OfferedFunction:
        """Return the function of the tool at a place; see `offered_function`."""
        ...


Placed = tuple[str, FunctionTool | HostedTool]
"""A tool with its place in the request."""


def placed(tools: Iterable[FunctionTool | HostedTool] | None) -> list[Placed]:
    """Return the tools of the field `tools`."""
    return [(f"tools[{at}]", tool) for at, tool in enumerate(tools or ())]


def to_offer(
    tools: Sequence[Placed], choice: ToolChoice, limits: LimitsConfig, model: ModelDescription
) -> ToolOffer:
    """Return the functions that a request lets the model call.

    If the choice forbids calls, the prompt describes no tools, so that the model calls none.

    Args:
        tools: The request's tools.
        choice: Whether a function must be called, and which.
        limits: The bounds on tools.
        model: The model.

    Raises:
        InvalidRequestError: The tools are refused, the model does not support tools, or a chosen
            function is not among them.
    """
    left_out = tuple(tool.type for _, tool in tools if isinstance(tool, HostedTool))
    functions = to_functions(tools, limits)
    names = choice.names
    unknown = sorted((names or frozenset()) - {function.name for function in functions})
    if unknown:
        raise InvalidRequestError(f"No tool is named {unknown[0]!r}.", choice.names_param)
    if choice.hides_others:
        functions = tuple(function for function in functions if function.name in (names or ()))
    if choice.must_call and not functions:
        kind = " or allowed_tools with the mode 'required'" if choice.hides_others else ""
        raise InvalidRequestError(f"tool_choice 'required'{kind} needs tools.", "tool_choice")
    if choice.forbids or not functions:
        return ToolOffer(left_out=left_out)
    return replace(make_offer(functions, choice, model), left_out=left_out)


def to_functions(tools: Sequence[Placed], limits: LimitsConfig) -> tuple[OfferedFunction, ...]:
    """Return the functions that a request offers; see `to_offer`.

    Raises:
        InvalidRequestError: There are too many functions, they are too large, two have the same
            name, or the arguments of one are not an object.
    """
    if len(tools) > limits.max_num_tools:
        raise InvalidRequestError(
            f"The request offers {len(tools)} tools; at most {limits.max_num_tools} are accepted "
            "(limits.max_num_tools).",
            "tools",
        )
    functions: list[OfferedFunction] = []
    names: set[str] = set()
    num_bytes = 0
    for place, tool in tools:
        if isinstance(tool, HostedTool):
            continue
        function = tool.offered(place)
        num_bytes += function.num_bytes
        if num_bytes > limits.max_tools_bytes:
            raise InvalidRequestError(
                f"The tools up to this one take more than {limits.max_tools_bytes} bytes "
                "(limits.max_tools_bytes). Shorten descriptions and schemas.",
                place,
            )
        if function.name in names:
            raise InvalidRequestError(
                f"Two tools are named {function.name!r}.", f"{function.param}.name"
            )
        names.add(function.name)
        functions.append(function)
    return tuple(functions)


def offered_function(
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    strict: bool | None,
    place: str,
    schema_field: str = "parameters",
) -> OfferedFunction:
    """Return a function that a request offers.

    Args:
        name: Its name.
        description: What it does.
        parameters: The JSON schema of its arguments; None: it has none.
        strict: Whether every call must be valid by the schema.
        place: Where its fields are in the request.
        schema_field: The field that holds the schema.

    Raises:
        InvalidRequestError: The arguments are not an object.
    """
    schema: Mapping[str, Any] = NO_PARAMETERS if parameters is None else parameters
    schema_param = f"{place}.{schema_field}"
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(
            "The schema of a function's arguments must be of type 'object'.", f"{schema_param}.type"
        )
    tool = Tool(name, description, json.dumps(schema, ensure_ascii=False))
    return OfferedFunction(tool, strict is True, place, schema_param)


def to_arguments(text: str) -> str:
    """Return a call's arguments as JSON: an object, or broken arguments as one string.

    A call that a limit cut is in the history of its conversation, which could not go on if it were
    refused. An empty text means no arguments.
    """
    if not text.strip():
        return "{}"
    try:
        is_object = isinstance(decode_json(text.encode(), MAX_ARGUMENTS_DEPTH), dict)
    except (InvalidRequestError, UnicodeEncodeError):
        is_object = False
    return text if is_object else json.dumps(text, ensure_ascii=False)
