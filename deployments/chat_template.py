"""A model's own chat template: from messages and tools to the prompt's text.

Templates take plain dicts, with the arguments of calls as objects. What a template knows is found
by what it does: it renders a probe tool and a probe call at the start. A template never comes from
a request.
"""

import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from deployments.contract import ChatMessage, TextPart, Tool, ToolCall
from deployments.errors import InvalidRequestError
from deployments.tool_call_format import FORMATS, ToolCallFormat

PROBE_NAME = "probe_of_tools"
PROBE_ID = "probe0001"
"""Mistral's templates insist on nine letters and digits."""

STUMBLES = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""What a template raises in Python's ways over schemas that it was not made for."""

PROBE_TOOL = Tool(PROBE_NAME, "A probe.", '{"type": "object", "properties": {}}')
QUESTION = ChatMessage("user", (TextPart("?"),))
PROBE_CALL = ChatMessage(
    "assistant", (), tool_calls=(ToolCall(PROBE_ID, PROBE_NAME, '{"key": "value"}'),)
)


class ChatTemplate:
    """Renders conversations for one model.

    Attributes:
        accepts_tools: Whether the template tells the model of tools.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None
    ) -> None:
        """Take the template of the processor, which has parts in its messages, or the tokenizer's.

        Args:
            tokenizer: The text side of a model.
            processor: None means that the model takes no images.
        """
        self._renderer = processor or tokenizer
        self._has_parts = processor is not None
        self.accepts_tools = PROBE_NAME in self._probe((QUESTION,), (PROBE_TOOL,))

    @property
    def exists(self) -> bool:
        """Whether the model has a template at all."""
        return self._renderer.chat_template is not None

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt's text, up to where the answer begins if that is to be added.

        Raises:
            InvalidRequestError: There is no template, it knows no tools, or it refuses these
                messages.
        """
        if not self.exists:
            raise InvalidRequestError(
                "this model has no chat template; send a plain prompt instead of messages",
                "messages",
            )
        if tools and not self.accepts_tools:
            raise InvalidRequestError("this model's chat template knows no tools", "tools")
        try:
            return self._apply(messages, tools, add_generation_prompt)
        except TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refused the messages: {error}", "messages"
            ) from error
        except STUMBLES as error:
            if not tools:
                raise
            raise InvalidRequestError(
                "the model's chat template can't show these tools to the model; "
                "simplify their parameters",
                "tools",
            ) from error

    def find_tool_call_format(self) -> ToolCallFormat | None:
        """Return the format in which the template writes an assistant's call, if it is known."""
        written = _without_space(self._probe((QUESTION, PROBE_CALL), (PROBE_TOOL,)))
        return next((f for f in FORMATS.values() if _probe_call(f) in written), None)

    def _probe(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
        """Return what the template makes of a probe; nothing if it can't."""
        if not self.exists:
            return ""
        try:
            return self._apply(messages, tools)
        except (TemplateError, *STUMBLES):
            return ""

    def _apply(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        add_generation_prompt: bool = True,
    ) -> str:
        text = self._renderer.apply_chat_template(
            [self._message(message) for message in messages],
            tools=[_tool(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return str(text)

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        """Return a message as templates know it; they ask which keys there are."""
        rendered: dict[str, Any] = {"role": message.role, "content": self._content(message)}
        if message.tool_calls:
            rendered["tool_calls"] = [_call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            rendered["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            rendered["name"] = message.name
        return rendered

    def _content(self, message: ChatMessage) -> str | list[dict[str, str]]:
        """Return a text, or parts if the model has images."""
        if not self._has_parts:
            return "".join(part.text for part in message.parts if isinstance(part, TextPart))
        return [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.parts
        ]


def choose_tool_call_format(parser: str, template: ChatTemplate) -> ToolCallFormat | None:
    """Return how the model writes calls; None if tools are off or the format is unknown.

    Args:
        parser: auto asks the template; none turns tools off; else a format's name.
        template: The model's.
    """
    if parser == "auto":
        return template.find_tool_call_format()
    return FORMATS.get(parser)


def special_marks(
    tokenizer: PreTrainedTokenizerBase, known: ToolCallFormat | None
) -> tuple[tuple[str, int], ...]:
    """Return the format's marks that are special tokens, with their ids.

    Text that is decoded as usual does not show them.
    """
    special = set(tokenizer.all_special_tokens) | {
        str(added) for added in tokenizer.added_tokens_decoder.values() if added.special
    }
    ids: dict[str, Any] = {
        mark: tokenizer.convert_tokens_to_ids(mark)
        for mark in (known.marks if known else ())
        if mark in special
    }
    return tuple(ids.items())


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = json.loads(tool.parameters)
    return {"type": "function", "function": function}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _probe_call(known: ToolCallFormat) -> str:
    """Return the probe's call as a format writes it, up to the end of the arguments."""
    opening = _without_space(known.block[0] + known.call[0])
    head = f'{{"name":"{PROBE_NAME}","{known.arguments_key}":'
    return opening + head + '{"key":"value"}'


def _without_space(text: str) -> str:
    return "".join(text.split())
