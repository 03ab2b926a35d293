"""Tools as OpenAI's clients offer them, and the calls that they send back.

Source: https://platform.openai.com/docs/api-reference/chat/create (tools, tool_choice)
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from deployments.contract import ModelDescription, Tool, ToolCall
from deployments.errors import InvalidRequestError
from serve_app.api.body.cache_control import CacheControl
from serve_app.api.body.echoed_fields import IN_CALLS
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.body.wrong_type import wrong_type
from serve_app.api.structured.tool_grammar import OfferedFunction
from serve_app.api.tools.offer import NO_TOOLS, ToolChoice, ToolOffer, make_offer
from serve_app.config import MAX_NUM_TOOLS, LimitsConfig
from serve_app.http.json_route import decode_json

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]

MAX_CALL_ID_LENGTH = 256

MAX_ARGUMENTS_DEPTH = 64
"""Most levels of nested objects and lists in the arguments of an earlier call."""


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
    """A tool; all tools are functions."""

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


_CHOICE_RULE: Final[dict[str, Any]] = {
    "if": {"properties": {"type": {"const": "function"}}},
    "then": {
        "properties": {"function": {"not": {"type": "null"}}},
        "required": ["function"],
    },
    "else": {"properties": {"function": {"type": "null"}}},
}
"""The rule of `ToolChoiceBody._check_function` as a JSON schema."""


class ToolChoiceBody(StrictBody):
    """Whether a function must be called, and which."""

    model_config = ConfigDict(json_schema_extra=_CHOICE_RULE)

    type: Literal["none", "auto", "required", "function"]
    function: ChosenFunction | None = None

    @model_validator(mode="after")
    def _check_function(self) -> Self:
        if (self.type == "function") != (self.function is not None):
            raise PydanticCustomError(
                "tool_choice",
                "tool_choice names a function if its type is 'function', and only then.",
                {"field": "function"},
            )
        return self

    @property
    def name(self) -> str | None:
        """The function that must be called."""
        return self.function.name if self.function else None


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

Tools = Annotated[list[ToolBody], Field(max_length=MAX_NUM_TOOLS, fail_fast=True)]


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

    # Clients that join the deltas of a stream leave the index in.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"index": tuple(range(MAX_NUM_TOOLS))}
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
    tools: Sequence[ToolBody] | None,
    choice: ToolChoiceBody | None,
    parallel: bool | None,
    limits: LimitsConfig,
    model: ModelDescription,
) -> ToolOffer:
    """Return the functions that a request lets the model call.

    With `tool_choice: none` the prompt describes no tools, so that the model calls none.

    Raises:
        InvalidRequestError: The tools are refused, the model does not support tools, or the chosen
            function is not among them.
    """
    functions = to_functions(tools or (), limits)
    kind = choice.type if choice else "auto"
    name = choice.name if choice else None
    if name is not None and all(function.name != name for function in functions):
        raise InvalidRequestError(f"No tool is named {name!r}.", "tool_choice.function.name")
    if kind == "required" and not functions:
        raise InvalidRequestError("tool_choice 'required' needs tools.", "tool_choice")
    if kind == "none" or not functions:
        return NO_TOOLS
    wanted = ToolChoice(kind in ("required", "function"), name, parallel is not False)
    return make_offer(functions, wanted, model)


def to_functions(tools: Sequence[ToolBody], limits: LimitsConfig) -> tuple[OfferedFunction, ...]:
    """Return the functions that a request offers.

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
        function = _to_function(tool.function, f"tools[{at}].function")
        num_bytes += function.num_bytes
        if num_bytes > limits.max_tools_bytes:
            raise InvalidRequestError(
                f"The tools up to this one take more than {limits.max_tools_bytes} bytes "
                "(limits.max_tools_bytes). Shorten descriptions and schemas.",
                f"tools[{at}]",
            )
        if function.name in names:
            raise InvalidRequestError(
                f"Two tools are named {function.name!r}.", f"tools[{at}].function.name"
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
