"""Tools as OpenAI's clients offer them, and the calls of tools that they send back.

Source: https://platform.openai.com/docs/api-reference/chat/create (tools, tool_choice)
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from deployments.contract import ModelDescription, Tool, ToolCall
from deployments.errors import InvalidRequestError
from serve_app.api.json_route import decode_json
from serve_app.api.offered_function import OfferedFunction
from serve_app.api.strict_body import StrictBody
from serve_app.api.tool_offer import NO_TOOLS, ToolChoice, ToolOffer, make_offer
from serve_app.config import MAX_NUM_TOOLS, LimitsConfig

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]

MAX_CALL_ID_LENGTH = 256

MAX_ARGUMENTS_DEPTH = 64
"""Objects and lists inside one another, in the arguments of an earlier call."""


NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class FunctionBody(StrictBody):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="The JSON schema of the arguments, an object; null: it has none."
    )
    strict: bool | None = Field(
        default=None, description="Calls of this function always fit the schema."
    )


class ToolBody(StrictBody):
    """A tool; all are functions."""

    type: Literal["function"]
    function: FunctionBody


class ChosenFunction(StrictBody):
    """The name of one of the functions."""

    name: FunctionName


_CHOICE_RULE: Final[dict[str, Any]] = {
    "if": {"properties": {"type": {"const": "function"}}},
    "then": {
        "properties": {"function": {"not": {"type": "null"}}},
        "required": ["function"],
    },
    "else": {"properties": {"function": {"type": "null"}}},
}
"""What `ToolChoiceBody._check_function` holds, as a JSON schema."""


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
                "tool_choice names a function where its type is 'function', and nowhere else.",
                {"field": "function"},
            )
        return self

    @property
    def name(self) -> str | None:
        """The function that must be called."""
        return self.function.name if self.function else None


def _as_object(choice: Any) -> Any:
    return {"type": choice} if isinstance(choice, str) else choice


ToolChoiceField = Annotated[
    ToolChoiceBody,
    BeforeValidator(
        _as_object,
        json_schema_input_type=Literal["none", "auto", "required"] | ToolChoiceBody,
    ),
]

Tools = Annotated[list[ToolBody], Field(max_length=MAX_NUM_TOOLS, fail_fast=True)]


class CalledFunctionBody(StrictBody):
    """What was called."""

    name: FunctionName
    arguments: str = Field(description="An object, as JSON.")


class ToolCallBody(StrictBody):
    """A call that the assistant has made, as an answer told of it."""

    id: str = Field(min_length=1, max_length=MAX_CALL_ID_LENGTH)
    type: Literal["function"] = "function"
    function: CalledFunctionBody

    # What is left when the deltas of a stream are put together.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"index": tuple(range(MAX_NUM_TOOLS))}


class CalledFunction(BaseModel):
    """What the model calls."""

    name: str
    arguments: str = Field(description="An object, as JSON.")


class AnswerToolCall(BaseModel):
    """A call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @classmethod
    def of(cls, call: ToolCall) -> "AnswerToolCall":
        """Return a call as an answer tells of it."""
        return cls(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))


def to_offer(
    tools: Sequence[ToolBody] | None,
    choice: ToolChoiceBody | None,
    parallel: bool | None,
    limits: LimitsConfig,
    model: ModelDescription,
) -> ToolOffer:
    """Return what a request lets the model call.

    With `tool_choice: none` the model is told of no tools, so that it calls none.

    Raises:
        InvalidRequestError: The tools are refused, the model can't be told of them, or the choice
            is none of them.
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
    """Return the functions that were offered.

    Raises:
        InvalidRequestError: There are too many, they are too large, or two have one name; or the
            arguments of one are no object.
    """
    if len(tools) > limits.max_num_tools:
        raise InvalidRequestError(
            f"The request offers {len(tools)} tools; at most {limits.max_num_tools} are taken "
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
                "(limits.max_tools_bytes); shorten descriptions and schemas.",
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
    """Return the calls of a message, their arguments checked.

    Args:
        bodies: The calls as they came.
        param: Where in the request they stand.

    Raises:
        InvalidRequestError: Arguments are not an object in JSON, or two calls have one id.
    """
    ids: set[str] = set()
    for at, body in enumerate(bodies):
        if body.id in ids:
            raise InvalidRequestError("Two calls have this id.", f"{param}[{at}].id")
        ids.add(body.id)
    return tuple(
        ToolCall(
            body.id,
            body.function.name,
            _to_arguments(body.function.arguments, f"{param}[{at}].function.arguments"),
        )
        for at, body in enumerate(bodies)
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


def _to_arguments(text: str, param: str) -> str:
    """Return a call's arguments as JSON; nothing at all stands for none.

    Raises:
        InvalidRequestError: They are not an object in JSON.
    """
    if not text.strip():
        return "{}"
    try:
        arguments = decode_json(text.encode(), MAX_ARGUMENTS_DEPTH)
    except (InvalidRequestError, UnicodeEncodeError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError("A call's arguments must be an object in JSON.", param)
    return text
