"""Turns that the APIs allow, before templates that take them and templates that refuse them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.errors import InvalidRequestError
from deployments.contract.messages import ChatMessage, ImagePart, TextPart, Tool, ToolCall
from deployments.generator.chat_template import ChatTemplate
from deployments.generator.role_alternation import KINDS, find_refused, put
from tests.engine.tiny_models import byte_tokenizer
from tests.generator import tiny_processor
from tests.offenders import every

ROOT: Final = Path(__file__).parents[2]
WRITE: Final = (
    "[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls %}(call {{ call.function.arguments | tojson }})"
    "{% endfor %}{% endfor %}"
)
LENIENT: Final = "{% for message in messages %}" + WRITE
NO_SYSTEM: Final = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('no system turns') }}{% endif %}" + WRITE
)
DROPS_SYSTEM: Final = "{% for message in messages if message.role != 'system' %}" + WRITE
SHIPPED: Final = (ROOT / "models/pydoc-chat/chat_template.jinja").read_text()
GEMMA: Final = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + WRITE
)
MISTRAL: Final = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% set ns = namespace(index=0) %}"
    "{% for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{% if m.role == 'system' or (m.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endfor %}"
    "{% for message in messages %}" + WRITE
)
NOT_EMPTY: Final = MISTRAL.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if not message.content and not message.tool_calls %}"
    "{{ raise_exception('a turn must have content') }}{% endif %}",
)
"""Counts as Mistral's do, and takes no empty turn, as the newer ones."""
TEMPLATES: Final = {
    "lenient": LENIENT,
    "without system": NO_SYSTEM,
    "dropping system": DROPS_SYSTEM,
    "shipped": SHIPPED,
    "mistral": MISTRAL,
    "not empty": NOT_EMPTY,
}


def template_of(text: str) -> ChatTemplate:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer, None)


MADE: Final = {name: template_of(text) for name, text in TEMPLATES.items()}


def told(role: Literal["system", "user", "assistant"], text: str) -> ChatMessage:
    return ChatMessage(role, (TextPart(text),))


def calling(argument: str) -> ChatMessage:
    call = ToolCall("abcdefgh1", "get", json.dumps({"a": argument}))
    return ChatMessage("assistant", (), (call,))


def result(text: str) -> ChatMessage:
    return ChatMessage("tool", (TextPart(text),), (), "abcdefgh1", "get")


def render(text: str, *turns: ChatMessage) -> str:
    return template_of(text).render(turns, add_generation_prompt=False)


SYSTEM, ANSWER, CALL, RESULT = (told("system", "S"), told("assistant", "A"), calling("C"),
                                result("R"))  # fmt: skip
FIRST, SECOND = told("user", "U"), told("user", "V")


@pytest.mark.parametrize(
    ("text", "turns", "prompt"),
    [
        (GEMMA, (FIRST, SECOND), "[user]U\n\nV"),
        (GEMMA, (FIRST, ANSWER, ANSWER, SECOND), "[user]U[assistant]A\n\nA[user]V"),
        (GEMMA, (ANSWER, FIRST), "[user][assistant]A[user]U"),
        (GEMMA, (SYSTEM, ANSWER, FIRST), "[system]S[user][assistant]A[user]U"),
        (GEMMA, (SYSTEM, told("system", "T"), FIRST), "[system]S\n\nT[user]U"),
        (SHIPPED.replace("{{- bos_token -}}", ""), (SYSTEM,),
         "<start_of_turn>user\nS<end_of_turn>\n"),
        (GEMMA, (FIRST, ANSWER, SYSTEM), "[user]U[assistant]A[user]S"),
        (GEMMA, (FIRST, SYSTEM, ANSWER, SECOND), "[user]U\n\nS[assistant]A[user]V"),
        (GEMMA, (SYSTEM, FIRST, ANSWER, SYSTEM, SECOND),
         "[system]S[user]U[assistant]A[user]S\n\nV"),
        (NO_SYSTEM, (SYSTEM, FIRST), "[user]S[user]U"),
        (DROPS_SYSTEM, (SYSTEM, FIRST, SYSTEM), "[user]S[user]U[user]S"),
        (MISTRAL, (FIRST, CALL, RESULT, SECOND),
         '[user]U[assistant](call {"a": "C"})[tool]R[assistant][user]V'),
        (MISTRAL, (FIRST, CALL, SECOND), '[user]U[assistant](call {"a": "C"})[assistant][user]V'),
        (NOT_EMPTY, (FIRST, CALL, RESULT, SECOND),
         '[user]U[assistant](call {"a": "C"})[tool]R[assistant].[user]V'),
        (NOT_EMPTY, (ANSWER, FIRST), "[user].[assistant]A[user]U"),
    ],
)  # fmt: skip
def test_turns_that_a_template_refuses_are_put_as_it_takes_them(
    text: str, turns: tuple[ChatMessage, ...], prompt: str
) -> None:
    assert render(text, *turns) == prompt


def test_only_what_a_template_refuses_is_changed() -> None:
    conversation = (SYSTEM, ANSWER, FIRST, SECOND, CALL, RESULT, SECOND, ANSWER, ANSWER)
    prompt = (
        '[system]S[assistant]A[user]U[user]V[assistant](call {"a": "C"})[tool]R'
        "[user]V[assistant]A[assistant]A"
    )
    assert render(LENIENT, *conversation) == prompt
    assert render(NO_SYSTEM, *conversation) == prompt.replace("[system]", "[user]")
    one_after_the_other = (FIRST, CALL, RESULT, ANSWER, SECOND)
    assert render(MISTRAL, *one_after_the_other) == render(LENIENT, *one_after_the_other)


def test_a_call_stays_before_the_text_that_followed_it() -> None:
    conversation = (FIRST, CALL, ANSWER, SECOND)
    assert render(GEMMA, *conversation) == (
        '[user]U[assistant](call {"a": "C"})[user][assistant]A[user]V'
    )
    assert render(GEMMA, FIRST, ANSWER, CALL) == '[user]U[assistant]A(call {"a": "C"})'


def test_an_answer_s_reasoning_stays_before_its_text() -> None:
    reasoned = ChatMessage("assistant", (TextPart("B"),), reasoning_content="thought")
    wants = find_refused(lambda _: "").refused
    joined = put((FIRST, reasoned, ANSWER), wants, "")
    assert joined[1:] == (
        ChatMessage("assistant", (TextPart("B\n\nA"),), (), None, None, "thought"),
    )
    assert put((FIRST, ANSWER, reasoned), wants, "") == (FIRST, ANSWER, told("user", ""), reasoned)


def test_images_keep_their_places_among_joined_texts() -> None:
    processor = tiny_processor.gemma3_processor()
    processor.chat_template = tiny_processor.CHAT_TEMPLATE.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}",
        1,
    ).replace("{{ part.text }}", "{{ part.text | trim }}")
    template = ChatTemplate(processor.tokenizer, processor)
    image = ImagePart(b"")
    shown = ChatMessage("user", (TextPart("a"), image, TextPart("b")))
    more = ChatMessage("user", (TextPart("c"), image))
    prompt = template.render([shown, more, more], add_generation_prompt=False)
    assert prompt == ("<special1>user\na<special3>b\n\nc<special3>c<special3><special2>"), (
        "a template that trims parts leaves the blank line between texts"
    )


def test_what_remains_refused_has_the_template_s_error_about_the_turns_as_they_are() -> None:
    picky = LENIENT.replace(
        "%}", "%}{% if message.content == 'U' %}{{ raise_exception('no U') }}{% endif %}", 1
    )
    for turns in ((FIRST,), (FIRST, SECOND)):
        with pytest.raises(InvalidRequestError) as refused:
            render(picky, *turns)
        assert refused.value.message == "The model's chat template rejects the messages: no U"
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render(GEMMA, FIRST, CALL, RESULT)


def test_an_error_of_the_template_s_arithmetic_refuses_turns_as_any_other() -> None:
    text = "{% for message in messages %}{{ 1 // (messages | length - 2) and '' }}" + WRITE
    assert render(text, told("user", "A"), told("user", "B")).endswith("A\n\nB")


def test_turns_for_tools_are_put_as_the_template_for_tools_takes_them() -> None:
    tool = Tool("get", "Gets.", '{"type": "object"}')
    template = template_of({"default": LENIENT, "tool_use": GEMMA + "{{ tools | tojson }}"})  # type: ignore[arg-type] # of several
    assert template.render([FIRST, SECOND]) == "[user]U[user]V"
    assert template.render([FIRST, SECOND], [tool]).startswith("[user]U\n\nV")


BLOCKS: Final = st.lists(
    st.sampled_from(["system", "user", "assistant", "call", "calls"]), min_size=1, max_size=8
)
MARK: Final = re.compile(r"\d+x")


def conversation_of(blocks: Sequence[str]) -> list[ChatMessage]:
    """Return a conversation whose contents are `0x`, `1x`, `2x` and so on."""
    turns: list[ChatMessage] = []
    count = 0
    for block in blocks:
        match block:
            case "call" | "calls":
                num_results = 2 if block == "calls" else 1
                turns.append(calling(f"{count}x"))
                turns += [result(f"{count + 1 + at}x") for at in range(num_results)]
                count += 1 + num_results
            case "system" | "user" | "assistant":
                turns.append(told(block, f"{count}x"))
                count += 1
    return turns


@given(blocks=BLOCKS)
def test_every_conversation_has_all_its_contents_in_order(blocks: Sequence[str]) -> None:
    turns = conversation_of(blocks)
    expected = [f"{at}x" for at in range(len(turns))]
    for case in every(MADE.items()):
        with case as (_name, template):
            assert MARK.findall(template.render(turns)) == expected


@given(blocks=BLOCKS)
def test_a_template_that_takes_all_turns_gets_them_untouched(blocks: Sequence[str]) -> None:
    turns = conversation_of(blocks)
    written = "".join(f"[{turn.role}]{_content(turn)}" for turn in turns)
    assert MADE["lenient"].render(turns) == written


def _content(turn: ChatMessage) -> str:
    texts = "".join(part.text for part in turn.parts if isinstance(part, TextPart))
    return texts + "".join(f"(call {call.arguments})" for call in turn.tool_calls)


def test_users_in_a_row_are_joined_for_a_template_that_writes_only_the_last() -> None:
    last_only = (
        "{% for message in messages %}"
        "{% if loop.last or messages[loop.index].role != message.role %}"
        "[{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}"
    )
    prompt = render(last_only, told("user", "A"), told("user", "B"))
    assert prompt == "[user]A\n\nB"


def test_each_kind_of_turns_has_a_probe_that_shows_it() -> None:
    """Each probe holds the turns that its kind changes, so that a template is asked about them."""
    for kind in KINDS:
        for probe in kind.probes:
            assert kind.put(probe, "") != probe
            assert kind.put(kind.put(probe, ""), "") == kind.put(probe, "")
