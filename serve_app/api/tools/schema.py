"""Tools as OpenAI's clients offer them, and the calls that they send back.

Source: https://platform.openai.com/docs/api-reference/chat/create (tools, tool_choice)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

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
from serve_app.api.tools.offer import NO_TOOLS, ToolChoice, ToolOffer, make_offer
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

    @classmethod
    def of(
        cls,
        name: str,
        description: str | None,
        parameters: dict[str, Any] | None,
        strict: bool | None,
    ) -> Self:
        """Return a tool that another API offers in a shape of its own."""
        function = FunctionBody(
            name=name, description=description, parameters=parameters, strict=strict
        )
        return cls(type="function", function=function)


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

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        mode = self.type if self.allowed_tools is None else self.allowed_tools.mode
        return mode in ("required", "function")

    @property
    def names(self) -> frozenset[str] | None:
        """The functions that may be called; None allows all."""
        if self.allowed_tools is not None:
            return self.allowed_tools.names
        return None if self.function is None else frozenset({self.function.name})


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


def to_offer(
    tools: Sequence[ToolBody | HostedTool] | None,
    choice: ToolChoiceBody | None,
    parallel: bool | None,
    limits: LimitsConfig,
    model: ModelDescription,
    places: Sequence[str] = (),
) -> ToolOffer:
    """Return the functions that a request lets the model call.

    With `tool_choice: none` the prompt describes no tools, so that the model calls none; and with
    `allowed_tools` only those.

    Args:
        tools: The request's tools.
        choice: Whether a function must be called, and which.
        parallel: Whether an answer may hold several calls; None means yes.
        limits: The bounds on tools.
        model: The model.
        places: The place of each tool in the request; empty means `tools[0]` and so on.

    Raises:
        InvalidRequestError: The tools are refused, the model does not support tools, or a chosen
            function is not among them.
    """
    given = tools or ()
    left_out = tuple(tool.type for tool in given if isinstance(tool, HostedTool))
    functions = to_functions(given, limits, places)
    names = None if choice is None else choice.names
    unknown = sorted((names or frozenset()) - {function.name for function in functions})
    if unknown:
        kind = "function.name" if choice and choice.function else "allowed_tools.tools"
        raise InvalidRequestError(f"No tool is named {unknown[0]!r}.", f"tool_choice.{kind}")
    must_call = choice is not None and choice.must_call
    is_allowed = choice is not None and choice.allowed_tools is not None
    if is_allowed:
        functions = tuple(function for function in functions if function.name in (names or ()))
    if must_call and not functions:
        kind = " or allowed_tools with the mode 'required'" if is_allowed else ""
        raise InvalidRequestError(f"tool_choice 'required'{kind} needs tools.", "tool_choice")
    if (choice is not None and choice.type == "none") or not functions:
        return replace(NO_TOOLS, left_out=left_out)
    is_named = choice is not None and choice.function is not None
    wanted = ToolChoice(must_call, names, parallel is not False and not is_named)
    return replace(make_offer(functions, wanted, model), left_out=left_out)


def to_functions(
    tools: Sequence[ToolBody | HostedTool], limits: LimitsConfig, places: Sequence[str] = ()
) -> tuple[OfferedFunction, ...]:
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
    for at, tool in enumerate(tools):
        place = places[at] if places else f"tools[{at}]"
        if isinstance(tool, HostedTool):
            continue
        function = _to_function(tool.function, f"{place}.function")
        num_bytes += function.num_bytes
        if num_bytes > limits.max_tools_bytes:
            raise InvalidRequestError(
                f"The tools up to this one take more than {limits.max_tools_bytes} bytes "
                "(limits.max_tools_bytes). Shorten descriptions and schemas.",
                place,
            )
        if function.name in names:
            raise InvalidRequestError(
                f"Two tools are named {function.name!r}.", f"{place}.function.name"
            )
        names.add(function.name)
        functions.append(function)
    return tuple(functions)


def to_tool_calls(bodies: Sequence[ToolCallBody], param: str) -> tuple[ToolCall, ...]:
    """Return a message's calls after checking their ids.

    Args:
        bodies: The calls in the request.
        param: The place of the calls in the request.

    Raises:
        InvalidRequestError: Two calls have the same id.
    """
    ids: set[str] = set()
    for at, body in enumerate(bodies):
        if body.id in ids:
            raise InvalidRequestError("Two calls of one message have this id.", f"{param}[{at}].id")
        ids.add(body.id)
    return tuple(
        ToolCall(body.id, body.function.name, _to_arguments(body.function.arguments))
        for body in bodies
    )


def _to_function(body: FunctionBody, param: str) -> OfferedFunction:
    parameters = NO_PARAMETERS if body.parameters is None else body.parameters
    if parameters.get("type", "object") != "object":
        raise InvalidRequestError(
            "The schema of a function's arguments must be of type 'object'.",
            f"{param}.parameters.type",
        )
    schema = json.dumps(parameters, ensure_ascii=False)
    return OfferedFunction(
        Tool(body.name, body.description, schema), is_strict=body.strict is True, param=param
    )


def _to_arguments(text: str) -> str:
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
