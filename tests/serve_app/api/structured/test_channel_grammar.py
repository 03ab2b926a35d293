"""Grammars of answers on channels: which messages each takes, and in which order."""

import json

import pytest

from deployments.contract.errors import InvalidRequestError
from deployments.contract.formats.tool_call_format import OPENAI
from deployments.contract.messages import Tool
from serve_app.api.structured.answer_grammar import GrammarSettings
from serve_app.api.structured.channel_grammar import ChannelGrammar, after_reasoning
from serve_app.api.structured.json_schema_grammar import json_schema_grammar
from serve_app.api.structured.tool_grammar import OfferedFunction
from serve_app.config import LimitsConfig
from tests.offenders import every
from tests.serve_app.api.chat.test_channels import ids_of_marks, takes

SETTINGS = GrammarSettings(LimitsConfig())
MARKS = ids_of_marks()
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm.\n{NEXT}"
REMARK = f"<|channel|>commentary<|message|>I look.{NEXT}"
FINAL = "<|channel|>final<|message|>"
ROME, DAY = '{"city": "Rome"}', '{"day": 1}'
COLOR = json_schema_grammar({"enum": ["red"]}, SETTINGS, "response_format").text


def function(name: str, key: str, value: object) -> OfferedFunction:
    schema = {"type": "object", "properties": {key: {"enum": [value]}}, "required": [key]}
    tool = Tool(name, None, json.dumps({**schema, "additionalProperties": False}))
    return OfferedFunction(tool, True, name, f"{name}.parameters")


FUNCTIONS = (function("get", "city", "Rome"), function("get_day", "day", 1))


def call(name: str, arguments: str) -> str:
    return f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}"


def call_named_late(name: str, arguments: str) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return header + arguments


CALLS = [
    write(name, arguments)
    for write in (call, call_named_late)
    for name, arguments in (("get", ROME), ("get_day", DAY))
]
OTHER_ARGUMENTS = [call("get", DAY), call_named_late("get_day", ROME), call("get", "")]
OTHER_FUNCTION = [call("get_time", ROME), call_named_late("ge", ROME)]
HALF = ["", THOUGHT, REMARK, CALLS[0][:-1], THOUGHT.removesuffix(NEXT), FINAL.removesuffix(">")]


def grammars() -> ChannelGrammar:
    return ChannelGrammar(OPENAI, SETTINGS, max_calls=1)


def check(grammar: str, taken: list[str], refused: list[str]) -> None:
    for case in every([*((text, True) for text in taken), *((text, False) for text in refused)]):
        with case as (text, is_taken):
            assert takes(grammar, text, MARKS) == is_taken


def test_a_forced_answer_is_one_call_after_any_reasoning() -> None:
    check(
        grammars().forced(FUNCTIONS, MARKS),
        [before + each for each in CALLS for before in ("", THOUGHT, THOUGHT * 2)],
        [*OTHER_ARGUMENTS, *OTHER_FUNCTION, *HALF, f"{FINAL}Hi", REMARK + CALLS[0], CALLS[0] * 2],
    )


def test_an_allowed_call_fits_its_schema_and_any_other_answer_is_taken() -> None:
    before = ("", THOUGHT, REMARK, REMARK + THOUGHT)
    check(
        grammars().allowed(FUNCTIONS, MARKS),
        [text + each for each in (*CALLS, f"{FINAL}Hi\n", FINAL) for text in before],
        [*OTHER_ARGUMENTS, *OTHER_FUNCTION, *HALF, "Hi", f"{FINAL}Hi{NEXT}"],
    )


def test_a_call_or_a_text_of_another_grammar_is_taken_and_no_other_text() -> None:
    check(
        grammars().alternative_to(COLOR)(FUNCTIONS, MARKS),
        [*CALLS, REMARK + CALLS[0], f'{FINAL}"red"', f'{THOUGHT}{REMARK}{FINAL}"red"'],
        [*OTHER_ARGUMENTS, *OTHER_FUNCTION, *HALF, f"{FINAL}red", f'{FINAL}"blue"', '"red"'],
    )


def test_the_text_of_another_grammar_comes_after_any_reasoning() -> None:
    check(
        after_reasoning(COLOR, MARKS, "response_format"),
        [f'{FINAL}"red"', f'{THOUGHT}{THOUGHT}{FINAL}"red"'],
        [*CALLS, *HALF, f"{FINAL}Hi", f'{REMARK}{FINAL}"red"', f'{FINAL}"red"<|end|>', '"red"'],
    )


def test_without_the_ids_of_all_marks_a_text_s_grammar_is_refused_with_advice() -> None:
    for missing in OPENAI.marks:
        known = {mark: token_id for mark, token_id in MARKS.items() if mark != missing}
        with pytest.raises(InvalidRequestError, match="tool_call_parser: openai") as raised:
            after_reasoning(COLOR, known, "guided_json")
        assert raised.value.param == "guided_json"
