"""The values that a request gives to the parameters of the model's chat template.

A template itself never comes from a request. The replica refuses names that its template does not
read.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.contract.descriptions import ModelDescription
from deployments.contract.errors import InvalidRequestError
from deployments.contract.messages import TemplatePairs, TemplateValue
from serve_app.api.body.wrong_type import wrong_type
from serve_app.api.conversation import Conversation
from serve_app.api.generation_body import GenerationBody
from serve_app.api.openai.prompt_schema import Messages, conversation_of
from serve_app.config import LimitsConfig
from serve_app.http.request_record import note_warnings

MAX_NUM_KWARGS: Final = 16
MAX_KWARG_NAME_LENGTH: Final = 64
MAX_KWARG_LENGTH: Final = 1024
MAX_KWARG_NUMBER: Final = 1_000_000

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_PLAIN: Final = (
    f"true, false, null, a number between -{MAX_KWARG_NUMBER} and {MAX_KWARG_NUMBER}, or a string "
    f"of at most {MAX_KWARG_LENGTH} characters"
)
_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {
            "type": "object",
            "maxProperties": MAX_NUM_KWARGS,
            "propertyNames": {"maxLength": MAX_KWARG_NAME_LENGTH},
            "additionalProperties": {
                "anyOf": [
                    {"type": ["boolean", "null"]},
                    {
                        "type": "number",
                        "minimum": -MAX_KWARG_NUMBER,
                        "maximum": MAX_KWARG_NUMBER,
                    },
                    {"type": "string", "maxLength": MAX_KWARG_LENGTH},
                ]
            },
        },
        {"type": "null"},
    ]
}


def _check(given: Any) -> Any:
    """Refuse all but a small mapping of names to plain values."""
    if not isinstance(given, dict):
        return given
    if len(given) > MAX_NUM_KWARGS:
        raise PydanticCustomError(
            "template_kwargs",
            "chat_template_kwargs must hold at most {max} values.",
            {"max": MAX_NUM_KWARGS},
        )
    if any(len(name) > MAX_KWARG_NAME_LENGTH for name in given):
        raise PydanticCustomError(
            "template_kwargs",
            "The names in chat_template_kwargs must have at most {max} characters.",
            {"max": MAX_KWARG_NAME_LENGTH},
        )
    wrong = next((name for name, value in given.items() if not _is_plain(value)), None)
    if wrong is not None:
        raise wrong_type(_PLAIN, wrong)
    return given


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_KWARG_LENGTH
    if isinstance(value, int | float):
        return abs(value) <= MAX_KWARG_NUMBER
    return value is None


TemplateKwargs = Annotated[
    dict[str, TemplateValue] | None, BeforeValidator(_check), WithJsonSchema(_SCHEMA)
]

TEMPLATE_KWARGS_DESCRIPTION: Final = (
    "Values for the parameters that the model's own chat template reads, such as Qwen3's "
    "enable_thinking. A name that it does not read is refused."
)


class PromptOrMessages(GenerationBody):
    """A prompt, or messages for the model's chat template; exactly one of the two."""

    prompt: str | None = None
    messages: Messages | None = Field(
        default=None, description="Rendered by the model's chat template."
    )
    chat_template_kwargs: TemplateKwargs = Field(
        default=None, description=f"With messages: {TEMPLATE_KWARGS_DESCRIPTION}"
    )

    one_of: ClassVar[tuple[str, ...]] = ("prompt", "messages")

    def to_prompts(self, limits: LimitsConfig) -> Sequence[Conversation | str]:
        """Return the prompt, or the conversation."""
        return (conversation_of(self.messages or []) if self.prompt is None else self.prompt,)

    def to_template_kwargs(self, model: ModelDescription) -> TemplatePairs:
        """Return values for the chat template.

        Raises:
            InvalidRequestError: There are values, but no messages, so no template is used.
        """
        given = self.chat_template_kwargs or {}
        if given and self.messages is None:
            raise InvalidRequestError(
                "chat_template_kwargs has no effect without messages. Send both, or neither.",
                "chat_template_kwargs",
            )
        return tuple(given.items())


def effort_kwargs(
    effort: ReasoningEffort | None, model: ModelDescription, param: str
) -> dict[str, TemplateValue]:
    """Return the values for the chat template by which a model reasons with this effort.

    If the template has no setting for reasoning, there are none, and the warning header says so.
    `none` is silent where the model does not reason anyway.

    Args:
        effort: The effort; None leaves it to the template.
        model: The model.
        param: The request's field that holds the effort.
    """
    if effort is None:
        return {}
    wanted = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    known = wanted.keys() & {*model.template_parameters}
    if not known and (effort != "none" or model.reasoning is not None):
        warning = f"{param}: the chat template of {model.id!r} has no setting for reasoning"
        note_warnings((warning,))
    return {name: wanted[name] for name in sorted(known)}
