"""A model's chat template, which renders messages and tools as the prompt's text.

Templates take plain dicts, with the arguments of calls as objects. Rendering probes at the start
shows in which form a template reads a message's content (`message_content`), which turns it refuses
(`role_alternation`), and what else it supports. A template never comes from a request.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from jinja2 import TemplateError
from jinja2.defaults import DEFAULT_NAMESPACE
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils.chat_template_utils import _get_template_variables

from deployments.compute.tokenizer_files import special_tokens
from deployments.contract.errors import InvalidRequestError
from deployments.contract.formats.reasoning_format import (
    OPENAI_GPTOSS,
    QWEN3,
    PromptReasoning,
    ReasoningFormat,
)
from deployments.contract.formats.tool_call_format import FORMATS, ToolCallFormat
from deployments.contract.messages import ChatMessage, TemplateValue, TextPart, Tool, ToolCall
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.generator.message_content import (
    IMAGE_FORMS,
    PROBE_CALL,
    PROBE_ID,
    PROBE_NAME,
    PROBE_TOOL,
    QUESTION,
    TEXT_FORMS,
    TEXTS,
    TEXTS_AND_IMAGE,
    Content,
    ContentForm,
    conversations,
    shows_texts,
)
from deployments.generator.role_alternation import FILLERS, RefusedTurns, find_refused, put

TEMPLATE_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""The Python exceptions of a template that can't handle a tool's schema, or a parameter's value."""

SET_BY_THE_RENDERER: Final = frozenset(
    {"messages", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE}
)
"""Names that a template reads but a request can't set; `apply_chat_template` has more of them."""

ROLES: Final = ("user", "system", "assistant", "tool")
"""In the order in which their forms are found: other roles' probes hold a user's message."""

NO_VALUES: Final[Mapping[str, TemplateValue]] = MappingProxyType({})

BROKEN = '{"key": "val'
BROKEN_CALL = ChatMessage(
    "assistant", (), tool_calls=(ToolCall(PROBE_ID, PROBE_NAME, json.dumps(BROKEN)),)
)


Forms = Mapping[str, ContentForm]
"""The form in which the content of each role's messages is given."""


class ChatTemplate:
    """Renders conversations for one model.

    Attributes:
        accepts_tools: Whether the template can offer tools to the model.
        image_placeholders: The tokens that stand for an image in a rendered text; more than one if
            the template and the processor write different ones.
        places_images: Whether a user's message with an image becomes a text with one placeholder.
        parameters: The names that the template reads and a request may set, sorted.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None
    ) -> None:
        """Use the processor's template, or the tokenizer's if the processor has none.

        Args:
            tokenizer: The model's tokenizer.
            processor: The model's processor; None means that the model takes no images.

        Raises:
            UnsupportedModelError: The template shows a user's text in no form of the content.
        """
        has_own = processor is not None and processor.chat_template is not None
        self._renderer: Any = processor if has_own else tokenizer
        self._image_token: str | None = getattr(processor, "image_token", None)
        # Gemma's template writes one token per image, and its processor another one per patch;
        # other models have only one of them.
        names = {getattr(side, "image_token", None) for side in (tokenizer, processor)}
        self.image_placeholders = frozenset(name for name in names if name)
        self._writes_broken_calls = True
        self._has_channels = False
        self.parameters = self._find_parameters(tokenizer)
        self._candidates = TEXT_FORMS if processor is None else IMAGE_FORMS
        plain = self._find_forms(())
        # A template of several may be chosen only where tools are offered.
        self._forms: Mapping[bool, Forms] = {
            False: plain,
            True: {**plain, **self._find_forms((PROBE_TOOL,))},
        }
        if self.exists and "user" not in plain:
            raise UnsupportedModelError(self._refusal())
        self._refused: Mapping[bool, RefusedTurns] = {
            bool(tools): find_refused(partial(self._probe, tools=tools))
            for tools in ((), (PROBE_TOOL,))
        }
        self.places_images = processor is not None and self._places_images(plain)
        answer = ChatMessage("assistant", (TextPart(PROBE_ID),))
        final = f"{OPENAI_GPTOSS.start}final<|message|>{PROBE_ID}"
        self._has_channels = final in self._probe((QUESTION, answer, QUESTION), ())
        self.accepts_tools = PROBE_NAME in self._probe((QUESTION,), (PROBE_TOOL,))
        # Some templates go through the arguments one by one, which fails on a text.
        written = self._probe((QUESTION, BROKEN_CALL), (PROBE_TOOL,))
        self._writes_broken_calls = BROKEN in written.replace('\\"', '"')

    @property
    def exists(self) -> bool:
        """Whether the model has a template at all."""
        return self._renderer.chat_template is not None

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, TemplateValue] = NO_VALUES,
    ) -> str:
        """Return the prompt's text, with the start of the answer if `add_generation_prompt`.

        Turns that the template refuses as they are, or would drop, are put as it takes them.

        Args:
            messages: The conversation.
            tools: The functions to offer.
            add_generation_prompt: Whether the text ends with the start of the answer.
            template_kwargs: Values for `parameters`; None leaves a parameter unset.

        Raises:
            InvalidRequestError: There is no template, it does not support tools, it does not read a
                parameter, or it rejects these messages.
        """
        if not self.exists:
            raise InvalidRequestError(
                "This model has no chat template. Send a plain prompt instead of messages.",
                "messages",
            )
        if tools and not self.accepts_tools:
            raise InvalidRequestError("This model's chat template does not support tools.", "tools")
        self._check_parameters(template_kwargs)
        try:
            return self._write(messages, tools, add_generation_prompt, template_kwargs)
        except TemplateError as error:
            raise InvalidRequestError(
                f"The model's chat template rejects the messages: {error}", "messages"
            ) from error
        except TEMPLATE_FAILURES as error:
            if not tools and not template_kwargs:
                raise
            field = "tools" if tools else "chat_template_kwargs"
            remedy = "Simplify their parameters" if tools else "Check the types of the values"
            raise InvalidRequestError(
                f"The model's chat template can't render these {field}. {remedy}.", field
            ) from error

    def _write(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, TemplateValue],
    ) -> str:
        """Return the prompt of the messages as they are, or else put as the template takes them.

        Raises:
            TemplateError: It takes them in no way; the error is about the messages as they are.
        """
        write = partial(
            self._apply,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        found = self._refused[bool(tools)]
        turns = put(messages, found.dropped, FILLERS[0])
        try:
            return write(turns)
        except (TemplateError, *TEMPLATE_FAILURES):
            for filler in FILLERS:
                changed = put(turns, found.refused, filler)
                if changed == turns:
                    break
                with suppress(TemplateError, *TEMPLATE_FAILURES):
                    return write(changed)
            raise

    def find_tool_call_format(self) -> ToolCallFormat | None:
        """Return the format in which the template writes a call; None if it is unknown."""
        written = _without_space(self._probe((QUESTION, PROBE_CALL), (PROBE_TOOL,)))
        return next((f for f in FORMATS.values() if _probe_call(f) in written), None)

    def find_reasoning_format(self) -> ReasoningFormat | None:
        """Return how the template marks reasoning; None if it knows no reasoning.

        A template that knows reasoning begins it at the end of the prompt, or drops it from an
        earlier answer. One that writes earlier answers on the channel `final` knows it, too.
        """
        if self._has_channels:
            return OPENAI_GPTOSS
        begins = QWEN3.at_end_of(self._probe((QUESTION,), ())) is PromptReasoning.BEGUN
        marked = f"{QWEN3.start}\n{PROBE_NAME}\n{QWEN3.end}\n\n{PROBE_ID}"
        earlier = ChatMessage("assistant", (TextPart(marked),))
        told = self._probe((QUESTION, earlier, QUESTION), ())
        return QWEN3 if begins or (PROBE_ID in told and PROBE_NAME not in told) else None

    def probes(self) -> list[str]:
        """Return short conversations of each kind as texts; "" where the template fails.

        They hold the tokens that the template writes around messages.
        """
        return [
            self._probe(messages, tools)
            for tools in ((), (PROBE_TOOL,))
            for role in ROLES
            for messages in conversations(role, TEXTS)
        ]

    def _find_forms(self, tools: Sequence[Tool]) -> dict[str, ContentForm]:
        """Return the form of each role's content that the template reads; none of other roles."""
        found: dict[str, ContentForm] = {}
        for role in ROLES:
            shown = [form for form in self._candidates if self._shows(role, form, found, tools)]
            with_image = [
                form for form in shown if self._places_images({**found, role: form}, role, tools)
            ]
            if shown:
                found[role] = (with_image or shown)[0]
        return found

    def _shows(self, role: str, form: ContentForm, known: Forms, tools: Sequence[Tool]) -> bool:
        forms = {**dict.fromkeys(ROLES, form), **known, role: form}
        return any(
            shows_texts(self._probe(messages, tools, forms))
            for messages in conversations(role, TEXTS)
        )

    def _places_images(self, forms: Forms, role: str = "user", tools: Sequence[Tool] = ()) -> bool:
        """Return whether an image of a message becomes one placeholder, and no text is lost."""
        for messages in conversations(role, TEXTS_AND_IMAGE):
            text = self._probe(messages, tools, forms)
            if shows_texts(text) and sum(map(text.count, self.image_placeholders)) == 1:
                return True
        return False

    def _refusal(self) -> str:
        """Return why the template can't be used; its own error, if it raises one."""
        try:
            self._apply((QUESTION,), (), forms=dict.fromkeys(ROLES, self._candidates[0]))
        except (TemplateError, *TEMPLATE_FAILURES) as error:
            reason = " ".join(str(error).split())
        else:
            reason = "it leaves the text out"
        return (
            "the model's chat template shows a user's text neither from a string nor from parts "
            f"({reason}); mend the template, or remove it to serve plain prompts only"
        )

    def _find_parameters(self, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
        templates = self._renderer.chat_template or {}
        texts = templates.values() if isinstance(templates, dict) else (templates,)
        try:
            names = frozenset[str]().union(*map(_get_template_variables, texts))
        except TemplateError:  # a broken template reads nothing, and fails when it is used
            return ()
        arguments = inspect.signature(self._renderer.apply_chat_template).parameters
        own_tokens = {*tokenizer.special_tokens_map, *tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
        return tuple(sorted(names - SET_BY_THE_RENDERER - own_tokens - {*arguments}))

    def _check_parameters(self, template_kwargs: Mapping[str, TemplateValue]) -> None:
        unknown = sorted(template_kwargs.keys() - {*self.parameters})
        if unknown:
            known = ", ".join(self.parameters)
            remedy = f"A request may set: {known}." if known else "Leave chat_template_kwargs out."
            raise InvalidRequestError(
                f"This model's chat template does not read {unknown[0]!r}. {remedy}",
                f"chat_template_kwargs.{unknown[0]}",
            )

    def _probe(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool], forms: Forms | None = None
    ) -> str:
        """Return a rendered probe; an empty text if the template fails."""
        if not self.exists:
            return ""
        try:
            return self._apply(messages, tools, forms=forms)
        except (TemplateError, *TEMPLATE_FAILURES):
            return ""

    def _apply(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, TemplateValue] = NO_VALUES,
        forms: Forms | None = None,
    ) -> str:
        forms = self._forms[bool(tools)] if forms is None else forms
        given: dict[str, Any] = {
            name: value for name, value in template_kwargs.items() if value is not None
        }
        text = self._renderer.apply_chat_template(
            [self._message(message, forms) for message in messages],
            tools=[_tool(tool, self._has_channels) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **given,
        )
        return str(text)

    def _message(self, message: ChatMessage, forms: Forms) -> dict[str, Any]:
        """Return a message as templates take it; they test for keys, so absent values get none."""
        form = forms.get(message.role, self._candidates[0])
        content = form.write(message.parts, self._image_token)
        rendered: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            rendered["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            rendered["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            rendered["name"] = message.name
        if message.reasoning_content is not None:
            rendered["reasoning_content"] = message.reasoning_content
            if self._has_channels:
                rendered |= _on_channels(message.reasoning_content, message, content)
        return rendered

    def _call(self, call: ToolCall) -> dict[str, Any]:
        """Return a call; broken arguments stay a text, or none if the template can't write that."""
        arguments = json.loads(call.arguments)
        if isinstance(arguments, str) and not self._writes_broken_calls:
            arguments = {}
        function = {"name": call.name, "arguments": arguments}
        return {"id": call.id, "type": "function", "function": function}


def choose_tool_call_format(parser: str, template: ChatTemplate) -> ToolCallFormat | None:
    """Return how the model writes calls; None if tools are off or the format is unknown.

    Args:
        parser: auto detects the format from the template; none turns tools off; otherwise the
            name of a format.
        template: The model's template.
    """
    if parser == "auto":
        return template.find_tool_call_format()
    return FORMATS.get(parser)


def special_marks(
    tokenizer: PreTrainedTokenizerBase, known: ToolCallFormat | None
) -> tuple[tuple[str, int], ...]:
    """Return the format's marks that are special tokens, with their ids."""
    special = special_tokens(tokenizer)
    ids: dict[str, Any] = {
        mark: tokenizer.convert_tokens_to_ids(mark)
        for mark in (known.marks if known else ())
        if mark in special
    }
    return tuple(ids.items())


def _on_channels(reasoning: str, message: ChatMessage, content: Content) -> dict[str, Any]:
    """Return the keys of a message with reasoning that a template with channels reads.

    Such a template writes either the content or the reasoning before a call, and refuses both.
    """
    if not message.tool_calls or not isinstance(content, str) or not content:
        return {"thinking": reasoning}
    return {"thinking": f"{reasoning}\n{content}", "content": ""}


def _tool(tool: Tool, needs_description: bool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None or needs_description:
        function["description"] = tool.description or ""
    function["parameters"] = json.loads(tool.parameters)
    return {"type": "function", "function": function}


def _probe_call(known: ToolCallFormat) -> str:
    """Return the probe's call as a format writes it, up to the end of the arguments."""
    if known.has_channels:
        return f"to=functions.{PROBE_NAME}<|channel|>commentary"
    opening = _without_space(known.block[0] + known.call[0])
    head = f'{{"name":"{PROBE_NAME}","{known.arguments_key}":'
    return opening + head + '{"key":"value"}'


def _without_space(text: str) -> str:
    return "".join(text.split())
