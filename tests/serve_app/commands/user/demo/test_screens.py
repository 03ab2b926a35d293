import io
import re
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console

from serve_app.client.chat_client import Usage
from serve_app.commands.user.demo.screens import PANEL_LINES, DemoScreen, panels, part_to_show
from serve_app.commands.user.demo.streams import QUESTIONS, DemoStream, Pause

MAX_SVG_BYTES = 150_000


def stream(*, num_words: int = 400, pause_at: int | None = None, is_over: bool) -> DemoStream:
    text = " ".join(f"word{i}" for i in range(num_words))
    pauses = [] if pause_at is None else [Pause(text.index(f"word{pause_at} "), pause_at, 0.61)]
    finish = "stop" if is_over else None
    return DemoStream(QUESTIONS[0], "chatcmpl-1", text, Usage(5, num_words), finish, pauses)


def shown(each: DemoStream) -> str:
    text = part_to_show(each, 30)
    assert len(text.plain.split("\n")) <= PANEL_LINES
    return text.plain


def test_a_running_stream_shows_its_end() -> None:
    assert "word399" in shown(stream(is_over=False))
    assert "moved" not in shown(stream(pause_at=20, is_over=False))
    assert shown(stream(num_words=1, is_over=False)) == "word0"


def test_a_complete_stream_shows_where_it_paused() -> None:
    told = shown(stream(pause_at=20, is_over=True)).replace("\xa0", " ")
    assert "moved, 0.61 s" in told
    assert re.search(r"word19\s+moved, 0.61 s\s+word20", told)
    assert "word399" in shown(stream(is_over=True))


def test_streams_stand_side_by_side() -> None:
    streams = [stream(is_over=False), stream(is_over=True), DemoStream(QUESTIONS[1])]
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(panels(streams, 120))
    lines = captured.get().splitlines()
    assert len(lines) == PANEL_LINES + 4
    assert all(line.count("│") == 6 for line in lines[1:-1])
    assert "400 tokens, complete" in lines[-1]
    assert "waiting" in lines[2]


def test_without_a_terminal_there_are_only_the_lines() -> None:
    output = io.StringIO()
    screen = DemoScreen(Console(file=output, width=20), is_plain=True)
    screen.tell("a line that is longer than 20 columns", "bold")
    with screen.during([stream(is_over=False)], stay=True):
        screen.tell("killed")
    assert output.getvalue() == "a line that is longer than 20 columns\nkilled\n"


def test_the_picture_holds_lines_and_streams_is_small_and_asks_no_other_host(
    tmp_path: Path,
) -> None:
    screen = DemoScreen(Console(file=io.StringIO()), is_plain=True)
    screen.tell("before")
    with screen.during([stream(is_over=True)], stay=False):
        pass
    with screen.during([stream(pause_at=20, is_over=True)] * 3, stay=True):
        screen.tell("killed")
    screen.tell("3 of 3 equal")
    file = tmp_path / "demo.svg"
    screen.save_svg(file)
    texts = [each.text for each in ElementTree.parse(file).iter() if each.tag.endswith("}text")]
    told = " ".join(text or "" for text in texts).replace("\xa0", " ")
    assert told.index("before") < told.index("killed") < told.index("moved, 0.61 s")
    assert told.index("moved, 0.61 s") < told.index("3 of 3 equal")
    assert len(file.read_bytes()) < MAX_SVG_BYTES
    urls = set(re.findall(r"https?://[^\"' )]+", file.read_text()))
    assert urls == {"http://www.w3.org/2000/svg"}
