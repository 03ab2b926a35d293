from io import StringIO
from pathlib import Path

from rich.console import Console

from loadtest.summary_table import render
from tests.loadtest.analysis.figures import results_of
from tests.loadtest.made_runs import sweep


def printed(tmp_path: Path, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width)
    render(results_of(tmp_path, sweep((1, 2))), console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def test_a_level_is_a_row_where_there_is_room(tmp_path: Path) -> None:
    head, _, first, second, *_ = printed(tmp_path, 250)
    assert "TTFT p95, ms" in head
    assert first.startswith("1 user ")
    assert second.startswith("2 users ")


def test_on_a_narrow_terminal_a_level_is_a_column_and_nothing_is_cut(tmp_path: Path) -> None:
    lines = printed(tmp_path, 80)
    assert lines[0].split() == ["load", "┃", "1", "user", "┃", "2", "users"]
    assert any(line.startswith("TTFT p95, ms ") for line in lines)
    assert not any("…" in line for line in lines)
