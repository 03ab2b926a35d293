import io

import pytest
from rich.console import Console

from serve_app.commands.user.chat import screens
from serve_app.commands.user.chat.screens import (
    MARGIN,
    PlainScreen,
    TerminalScreen,
    end_of_finished_blocks,
    harmless,
    markdown,
)
from tests.offenders import for_each

HEIGHT = 12
MARKDOWN = """\
# Joining

Join *two* paths:

- one
- two

```python
os.path.join("a", "b")
```

| a | b |
|---|---|
| 1 | 2 |

The end.
"""


class Terminal(io.StringIO):
    """Keeps what is written; counts the lines that each drawing holds."""

    def isatty(self) -> bool:
        return True


def console() -> Console:
    return Console(file=Terminal(), force_terminal=True, width=40, height=HEIGHT)


def plain_screen(output: io.StringIO, notices: io.StringIO) -> PlainScreen:
    return PlainScreen(output, notices)


def drawn(console: Console) -> str:
    assert isinstance(console.file, Terminal)
    return console.file.getvalue()


@pytest.fixture(autouse=True)
def draw_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "INTERVAL_S", 0.0)


@for_each("\x1b[2J", "\x07", "\x9b1m", "\x7f", "\u202e", "\r")
def test_what_commands_a_terminal_is_replaced(control: str) -> None:
    assert control not in harmless(f"a{control}b")
    assert harmless("a\tb\r\nc ü 🙂") == "a\tb\nc ü 🙂"


def test_what_markdown_decodes_is_harmless_too() -> None:
    terminal = console()
    terminal.print(markdown("a&#x1b;[2J&#x202e;b ![d&#x9b;](e)"))
    written = drawn(terminal)
    assert "\N{REPLACEMENT CHARACTER}" in written
    assert not any(control in written for control in ("\x1b[2J", "\u202e", "\x9b"))


def test_a_block_is_finished_when_the_next_one_begins() -> None:
    assert end_of_finished_blocks("") == 0
    assert end_of_finished_blocks("One\nparagraph.\n") == 0
    assert end_of_finished_blocks("One.\n\nTwo") == len("One.\n\n")
    assert end_of_finished_blocks("- a\n\n- b") == 0  # one list
    assert end_of_finished_blocks("```\na\n\nb") == 0
    assert end_of_finished_blocks("# Head\n- a\n\ntext") == len("# Head\n- a\n\n")


def test_finished_blocks_never_change_while_the_text_grows() -> None:
    shown = ""
    for i in range(len(MARKDOWN) + 1):
        finished = MARKDOWN[: end_of_finished_blocks(MARKDOWN[:i])]
        assert finished.startswith(shown)
        shown = finished
    assert shown == MARKDOWN[: MARKDOWN.index("The end.")]


def test_an_answer_is_printed_once_however_it_was_cut() -> None:
    console_ = console()
    with TerminalScreen(console_) as screen:
        for letter in MARKDOWN:
            screen.add(letter, is_reasoning=False)
    whole = Console(file=Terminal(), force_terminal=True, width=40)
    with TerminalScreen(whole) as screen:
        screen.add(MARKDOWN, is_reasoning=False)
    assert visible_lines(drawn(console_)) == visible_lines(drawn(whole))


def visible_lines(written: str) -> list[str]:
    """Return the lines that a terminal shows in the end: erased lines are written over."""
    lines, row, column = [""], 0, 0
    i = 0
    while i < len(written):
        if written.startswith("\x1b[", i):
            end = next(j for j in range(i + 2, len(written)) if written[j].isalpha())
            number, kind = written[i + 2 : end], written[end]
            if kind == "A":
                row -= int(number or 1)
            elif kind == "K":
                lines[row] = "" if number == "2" else lines[row][:column]
            i = end
        elif written[i] == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif written[i] == "\r":
            column = 0
        else:
            lines[row] = lines[row][:column] + written[i] + lines[row][column + 1 :]
            column += 1
        i += 1
    assert row >= 0
    return [line.rstrip() for line in lines if line.strip()]


def test_a_block_that_is_higher_than_the_screen_is_drawn_by_its_last_lines() -> None:
    console_ = console()
    with TerminalScreen(console_) as screen:
        for i in range(40):
            screen.add(f"- line {i}\n", is_reasoning=False)
            latest = drawn(console_).rpartition("\x1b[2K")[2]
            assert latest.count("\n") <= HEIGHT - MARGIN + 1
        assert "line 39" in latest
        assert "line 3 " not in latest
    assert "line 0" in drawn(console_).rpartition("\x1b[2K")[2]  # at the end, all of it


def test_a_huge_block_is_drawn_without_reading_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "MAX_DRAWN", 100)
    console_ = console()
    with TerminalScreen(console_) as screen:
        screen.add("a" * 10_000, is_reasoning=False)
        assert drawn(console_).count("a") < 300


def test_a_model_s_escape_sequences_reach_no_terminal() -> None:
    console_ = console()
    with TerminalScreen(console_) as screen:
        screen.add("\x1b]0;title\x07 **bold** [link](https://example.org)", is_reasoning=False)
        screen.notice("\x1b[2Jmoved")
    assert "\x1b]" not in drawn(console_)
    assert "\x1b[2J" not in drawn(console_)
    assert "https://example.org" in drawn(console_)


def test_a_notice_is_shown_until_the_text_goes_on() -> None:
    console_ = console()
    with TerminalScreen(console_) as screen:
        assert "waiting for the first token" in drawn(console_)
        screen.add("Join", is_reasoning=False)
        screen.notice("waiting")
        assert "waiting" in drawn(console_).rpartition("\x1b[2K")[2]
        screen.add("ed", is_reasoning=False)
        assert "waiting" not in drawn(console_).rpartition("\x1b[2K")[2]


def test_reasoning_stands_before_the_answer() -> None:
    console_ = console()
    with TerminalScreen(console_) as screen:
        screen.add("Hm.", is_reasoning=True)
        screen.add("Yes.", is_reasoning=False)
    assert visible_lines(drawn(console_)) == ["Hm.", "Yes."]


def test_without_a_terminal_the_text_is_passed_on_as_it_is() -> None:
    output, notices = io.StringIO(), io.StringIO()
    screen = plain_screen(output, notices)
    screen.notice("moved")
    screen.add("Hm", is_reasoning=True)
    screen.add("**a**\x1b[1m", is_reasoning=False)
    screen.end()
    assert output.getvalue() == "**a**\x1b[1m\n"
    assert notices.getvalue() == "moved\n"


def test_a_terminal_that_gets_plain_text_is_not_commanded_either() -> None:
    output = Terminal()
    screen = PlainScreen(output, io.StringIO())
    screen.add("a\x1b[1m\n", is_reasoning=False)
    screen.end()
    assert output.getvalue() == "a\N{REPLACEMENT CHARACTER}[1m\n"
