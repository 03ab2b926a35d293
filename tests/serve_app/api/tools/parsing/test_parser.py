import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deployments.contract.formats.tool_call_format import (
    FORMATS,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    ToolCallFormat,
)
from serve_app.api.tools.parsing.events import (
    ArgumentsGained,
    CallBroken,
    CallCut,
    CallEnded,
    CallStarted,
    Event,
    Text,
)
from serve_app.api.tools.parsing.object_scanner import MAX_DEPTH, ObjectScanner
from serve_app.api.tools.parsing.parser import ToolCallParser
from tests.offenders import for_each

NAMES = frozenset({"f", "get_weather"})
IN_TEXT = {name: known for name, known in FORMATS.items() if not known.has_channels}
"""Formats whose calls are objects in the text; `test_channels` has the other one."""
ALL = pytest.mark.parametrize("known", IN_TEXT.values(), ids=IN_TEXT)

Call = tuple[str, str]


def parse(
    known: ToolCallFormat, pieces: list[str], max_calls: int | None = None
) -> tuple[str, list[Call]]:
    return put_together(events(known, pieces, max_calls))


def put_together(told: list[Event]) -> tuple[str, list[Call]]:
    """Return the text and the calls of an answer; a broken call becomes text."""
    text, calls = "", list[Call]()
    for event in told:
        match event:
            case Text(gained) | CallBroken(_, gained):
                text += gained
            case CallStarted(_, name):
                begun, arguments = name, ""
            case ArgumentsGained(_, gained):
                arguments += gained
            case CallEnded() | CallCut():
                calls.append((begun, arguments))
    return text, calls


def events(known: ToolCallFormat, pieces: list[str], max_calls: int | None = None) -> list[Event]:
    parser = ToolCallParser(known, NAMES, max_calls)
    return [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]


def split(text: str, places: list[int]) -> list[str]:
    cuts = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(cuts)]


def written(known: ToolCallFormat, calls: list[Call]) -> str:
    """Return calls as the model family's chat template writes them."""
    bodies = [
        f'{known.call[0]}{{"name": "{name}", "{known.arguments_key}": {arguments}}}{known.call[1]}'
        for name, arguments in calls
    ]
    return known.block[0] + known.separator.join(bodies) + known.block[1] if bodies else ""


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.builds(
    lambda value, ensure_ascii: json.dumps(value, ensure_ascii=ensure_ascii),
    st.dictionaries(st.text() | st.sampled_from(["</tool_call>", "}", '"']), JSON, max_size=3),
    st.booleans(),
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), max_size=3)
PLACES = st.lists(st.integers(min_value=0), max_size=12)
AROUND = st.text() | st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>\n",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [",
        "[TOOL",
        "[",
        "]",
        ", ",
        "<",
    ]
)
FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "<tool", "_call>", "{", "}",
            '"', "\\", ",", ";", ":", " ", "\n", '"name": "f"', '"name": "h"', '"arguments": {',
            '"parameters": {}', '"arguments": 3', '{"name": "f", "arguments": {"a": 1}}', "1", "é",
            "🙂", "text", "NaN", '"arguments": "{}"',
        ]
    )
    | st.text(max_size=3),
    max_size=20,
).map("".join)  # fmt: skip


@ALL
@given(calls=CALLS, places=PLACES)
def test_calls_are_found_however_their_text_is_cut(
    known: ToolCallFormat, calls: list[Call], places: list[int]
) -> None:
    assert parse(known, split(written(known, calls), places)) == ("", calls)


@pytest.mark.slow
@pytest.mark.parametrize("known", [HERMES, MISTRAL], ids=lambda known: known.name)
@given(calls=CALLS, before=AROUND, behind=AROUND, places=PLACES)
@example(calls=[("f", "{}")], before="[TOOL_CALLS]", behind="", places=[])
def test_text_around_calls_is_kept(
    known: ToolCallFormat, calls: list[Call], before: str, behind: str, places: list[int]
) -> None:
    if not calls:
        return
    text = before + written(known, calls) + behind
    rest = behind if behind.strip() else ""
    assert parse(known, split(text, places)) == (before.rstrip() + rest, calls)


@ALL
@given(text=FRAGMENTS, places=PLACES)
def test_parsing_does_not_depend_on_how_text_is_cut_and_loses_nothing(
    known: ToolCallFormat, text: str, places: list[int]
) -> None:
    content, calls = parse(known, [text])
    assert parse(known, split(text, places)) == (content, calls)
    assert parse(known, list(text)) == (content, calls)
    assert calls or content == text
    assert all(name in NAMES for name, _ in calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@ALL
@pytest.mark.parametrize("must_call", [True, False])
@given(text=FRAGMENTS, places=PLACES)
def test_where_a_text_is_cut_off_does_not_depend_on_its_pieces(
    known: ToolCallFormat, must_call: bool, text: str, places: list[int]
) -> None:
    def cut(pieces: list[str]) -> tuple[str, list[Call]]:
        parser = ToolCallParser(known, NAMES, must_call=must_call)
        told = [event for piece in pieces for event in parser.feed(piece)]
        told += parser.finish(is_cut=True)
        assert all(not isinstance(event, CallCut) for event in told[:-1])
        return put_together(told)

    content, calls = cut([text])
    assert cut(split(text, places)) == (content, calls)
    assert cut(list(text)) == (content, calls)
    assert all(name in NAMES for name, _ in calls)


@ALL
@given(text=FRAGMENTS, places=PLACES)
def test_events_of_calls_come_in_order(known: ToolCallFormat, text: str, places: list[int]) -> None:
    running: int | None = None
    num_started = 0
    for event in events(known, split(text, places)):
        match event:
            case CallStarted(index, _):
                assert (running, index) == (None, num_started)
                running, num_started = index, num_started + 1
            case ArgumentsGained(index, gained):
                assert index == running
                assert gained
            case CallEnded(index) | CallBroken(index, _):
                assert index == running
                running = None
            case Text(told):
                assert told
                assert running is None
    assert running is None


def joined(told: list[Event]) -> list[Event]:
    """Return events with adjacent texts, and adjacent gains of arguments, put together."""
    found: list[Event] = []
    for event in told:
        match (found[-1] if found else None), event:
            case Text(before), Text(text):
                found[-1] = Text(before + text)
            case ArgumentsGained(index, before), ArgumentsGained(_, text):
                found[-1] = ArgumentsGained(index, before + text)
            case _:
                found.append(event)
    return found


@ALL
@given(text=FRAGMENTS, places=PLACES)
@example(text='<tool_call>{"name": "f", "arguments": {"a": ]} <tool_call>', places=[])
@example(text='<tool_call>{"name": "f", "arguments": {"a": "\n"}}', places=[])
@example(text='[TOOL_CALLS] [{"name": "f", "arguments": {}, "name": "h"}]', places=[50])
def test_a_stream_that_is_cut_elsewhere_has_the_same_events_also_of_broken_calls(
    known: ToolCallFormat, text: str, places: list[int]
) -> None:
    expected = joined(events(known, list(text)))
    assert joined(events(known, [text])) == expected
    assert joined(events(known, split(text, places))) == expected


CALL = '{"name": "f", "arguments": {"a": 1}}'


@for_each(
    ("Hello.", "Hello.", []),
    ("a < b <tool", "a < b <tool", []),
    (f"<tool_call>\n{CALL}\n</tool_call>", "", ['{"a": 1}']),
    (f"Look.\n<tool_call>{CALL}</tool_call>\n", "Look.", ['{"a": 1}']),
    (f"<tool_call>{CALL}</tool_call> and <tool_call>{CALL}", " and", ['{"a": 1}'] * 2),
    (f"<tool_call>{CALL}</tool", "", ['{"a": 1}']),
    (f"<tool_call>{CALL} oh", " oh", ['{"a": 1}']),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", ['{"a": 1}']),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", ['{"a": 1}']),
)
def test_hermes(text: str, content: str, arguments: list[str]) -> None:
    assert parse(HERMES, list(text)) == (content, [("f", a) for a in arguments])


@for_each(
    '{"name": "f", "arguments": {"a": }}',
    '{"name": "f", "arguments": {"a": 1',
    '{"name": "f", "arguments": {"a": "\n"}}',
    '{"name": "f", "arguments": {"a": [1}}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": {}, "name": "get_weather"}',
    '{"name": "f", "arguments": {}, "arguments": {"b": 1}}',
    '{"name": "f"}',
    '{"name": "unknown", "arguments": {}}',
    '{"name": 3, "arguments": {}}',
    '{"name": "f", "arguments": ' + '{"a": ' * 100 + "1" + "}" * 101,
    '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
    "no object",
    "",
)
def test_an_invalid_call_is_text_and_the_next_call_is_found(call: str) -> None:
    text = f"<tool_call>\n{call}\n</tool_call>\n"
    assert parse(HERMES, list(text)) == (text, [])
    if call.endswith("1"):
        return  # a call without an end has no next call
    text += f"<tool_call>{CALL}</tool_call>"
    content, calls = parse(HERMES, list(text))
    assert content == f"<tool_call>\n{call}\n</tool_call>"
    assert calls == [("f", '{"a": 1}')]


@for_each(
    ('{"name": "f", "parameters": {"a": 1}}', "", 1),
    ('\n{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', "", 2),
    ('{"name": "f", "parameters": {}} Done.', " Done.", 1),
    ('{"name": "f", "parameters": {}}; Done.', "; Done.", 1),
    ('Here: {"name": "f", "parameters": {}}', 'Here: {"name": "f", "parameters": {}}', 0),
    ('{"answer": 42}', '{"answer": 42}', 0),
)
def test_llama_calls_only_at_the_beginning(text: str, content: str, num_calls: int) -> None:
    told, calls = parse(LLAMA3_JSON, list(text))
    assert (told, len(calls)) == (content, num_calls)


@for_each(
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}]', "", 1),
    ('[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "123456789"}] x', " x", 1),
    ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, 3]', ", 3]", 1),
    ("[TOOL_CALLS] none", "[TOOL_CALLS] none", 0),
    ("[TOOL", "[TOOL", 0),
)
def test_mistral(text: str, content: str, num_calls: int) -> None:
    told, calls = parse(MISTRAL, list(text))
    assert (told, len(calls)) == (content, num_calls)


def test_arguments_are_reported_as_they_arrive() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.feed("On it. <tool") == [Text("On it.")]
    assert parser.feed('_call>{"name": "f", "argu') == []
    assert parser.feed('ments": {"a"') == [CallStarted(0, "f"), ArgumentsGained(0, '{"a"')]
    assert parser.feed(": 1}") == [ArgumentsGained(0, ": 1}")]
    assert parser.feed("}\n</tool_call>") == [CallEnded(0)]
    assert parser.finish() == []


def test_a_broken_call_is_taken_back_and_the_rest_is_text() -> None:
    pieces = ['<tool_call>{"name": "f", "arguments": {"a": ', "]", " more"]
    assert events(HERMES, pieces) == [
        CallStarted(0, "f"),
        ArgumentsGained(0, '{"a": '),
        CallBroken(0, '<tool_call>{"name": "f", "arguments": {"a": '),
        Text("]"),
        Text(" more"),
    ]


def test_after_max_calls_nothing_is_reported() -> None:
    text = f"Look. <tool_call>{CALL}</tool_call> and <tool_call>{CALL}</tool_call>"
    assert parse(HERMES, list(text), max_calls=1) == ("Look.", [("f", '{"a": 1}')])


def test_a_broken_call_does_not_count_towards_max_calls() -> None:
    text = f"<tool_call>no</tool_call><tool_call>{CALL}</tool_call>"
    assert parse(HERMES, [text], max_calls=1) == ("<tool_call>no</tool_call>", [("f", '{"a": 1}')])


def test_the_cost_of_repeated_opening_marks_is_bounded_by_the_depth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_looks = 0
    look = ObjectScanner._next

    def counted(self: ObjectScanner, text: str) -> Any:
        nonlocal num_looks
        num_looks += 1
        return look(self, text)

    monkeypatch.setattr(ObjectScanner, "_next", counted)
    num_marks = 2000
    parser = ToolCallParser(HERMES, NAMES)
    told = parser.feed('<tool_call>{"' * num_marks) + parser.finish()
    assert "".join(event.text for event in told if isinstance(event, Text)) == (
        '<tool_call>{"' * num_marks
    )
    assert num_looks < 4 * MAX_DEPTH * num_marks


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud83d"}', '"{\\"a\\": \\"\\ud83d\\"}"'], ids=["object", "string"]
)
def test_half_a_surrogate_pair_stays_escaped(arguments: str) -> None:
    text = f'<tool_call>{{"arguments": {arguments}, "name": "f"}}</tool_call>'
    assert parse(HERMES, [text]) == ("", [("f", '{"a": "\\ud83d"}')])
