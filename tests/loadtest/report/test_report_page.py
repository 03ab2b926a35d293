import json
import re
from pathlib import Path

import pytest

from loadtest.report.report_files import write_all
from loadtest.results.record import ErrorKind, LevelRecord
from tests.browser import Tab, opened_tab
from tests.loadtest.made_runs import made_request, sweep, write_run

HOSTILE = '</script><script>document.body.dataset.owned="yes"</script><img src=x onerror="owned()">'


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of a sweep with errors, whose server sends hostile messages."""
    levels = sweep((1, 2, 4), loops=12)
    errors = [
        made_request(
            1000 + number, level=2, sent_s=levels[2][0].started_s + number, num_events=2,
            error=kind, error_message=HOSTILE,
        )
        for number, kind in enumerate(ErrorKind)
    ]  # fmt: skip
    levels[2] = (levels[2][0], [*levels[2][1], *errors])
    path = tmp_path_factory.mktemp("run")
    configuration = {"model": HOSTILE, "slo": ["ttft:300"], "max_error_rate": 0.5}
    write_run(path / "run", levels, configuration)
    write_all(path / "run")
    return path / "run"


def test_the_page_contains_the_findings_and_figures(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["findings"][0] in page
    for level in summary["results"]:
        assert f"<td>{level['title']}</td>" in page


def test_text_from_the_server_is_escaped(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    assert HOSTILE not in page
    assert "<img" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert "&lt;/script&gt;&lt;script&gt;" in page


def test_nothing_is_loaded_from_elsewhere(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    around_scripts = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert re.findall(r'(?:src|href)="(?!data:)', around_scripts) == []
    assert "default-src 'none'" in page


@pytest.mark.parametrize("num_records", [0, 1])
def test_a_nearly_empty_run_has_a_page(tmp_path: Path, num_records: int) -> None:
    level = LevelRecord(index=0, num_queues=1, started_s=0, warm_s=0, ended_s=1)
    run = write_run(tmp_path / "run", [(level, [made_request()] * num_records)])
    write_all(run)
    assert "1 user" in (run / "report.html").read_text()


async def open_drawn(tab: Tab, path: Path) -> None:
    """Open a report, and wait until it says that it is drawn."""
    await tab.navigate(path.as_uri(), width=1280)
    await tab.page.wait_for_selector("body[data-drawn]", state="attached")


@pytest.mark.slow
@pytest.mark.browser
async def test_a_browser_without_network_draws_every_chart_without_errors(run_dir: Path) -> None:
    async with opened_tab(offline=True) as tab:
        await open_drawn(tab, run_dir / "report.html")
        assert tab.complaints == []
        assert tab.foreign("file:", "data:") == []
        drawn = await tab.evaluate(
            "[...document.querySelectorAll('.chart')].map("
            "chart => [chart.id, chart.querySelectorAll('.main-svg').length > 0])"
        )
        assert drawn == [
            [name, True] for name in ("load", "time-lines", "distributions", "errors", "stalls")
        ]
        unknown = await tab.evaluate(
            "JSON.parse(document.getElementById('charts').textContent).flatMap("
            "chart => Plotly.validate(chart.traces, chart.layout) || []).map(found => found.msg)"
        )
        assert unknown == []
        assert await tab.evaluate("document.body.dataset.owned || 'untouched'") == "untouched"
        assert not await tab.evaluate("document.body.scrollWidth > window.innerWidth")


@pytest.mark.slow
@pytest.mark.browser
async def test_an_open_loop_with_gpus_and_without_success_is_drawn(tmp_path: Path) -> None:
    level = LevelRecord(
        index=0, num_queues=None, rate_per_s=2, started_s=0, warm_s=0, deadline_s=5, ended_s=6
    )
    failed = [
        made_request(n, queue=None, sent_s=n / 2, num_events=0, error=ErrorKind.CONNECT)
        for n in range(10)
    ]
    run = write_run(tmp_path / "run", [(level, failed)])
    gpus = [
        {"t_s": t, "gpu": 0, "utilization_percent": 5.0, "memory_mib": 9.0, "power_w": None}
        for t in range(5)
    ]
    document = json.loads((run / "summary.json").read_text()) | {"gpus": gpus}
    (run / "summary.json").write_text(json.dumps(document))
    write_all(run)
    async with opened_tab(offline=True) as tab:
        await open_drawn(tab, run / "report.html")
        assert tab.complaints == []
        names = await tab.evaluate("[...document.querySelectorAll('.chart')].map(c => c.id)")
        assert names == ["time-lines", "distributions", "errors", "stalls", "gpus"]
