"""Writes `report.html`: findings, figures, charts, and the configuration.

The page is one file that works offline. It contains plotly's script; a Content-Security-Policy
forbids all other scripts and all loading. Text from the server is treated as hostile and escaped.
"""

import base64
import hashlib
import json
from collections import Counter
from html import escape
from importlib.resources import files
from typing import Any

from loadtest.analysis.run_results import Analysis
from loadtest.report.chart import Chart
from loadtest.report.charts import make_charts
from loadtest.report.summary_table import columns

MAX_MESSAGES = 20
MAX_MESSAGE_CHARS = 300


def render_page(analysis: Analysis) -> str:
    """Return the whole page."""
    # Of the extra `bench`: the commands that write no page run without it.
    from plotly.offline import get_plotlyjs

    charts = make_charts(analysis)
    scripts = (get_plotlyjs(), _resource("draw.js"))
    title = f"Load test of {analysis.run.configuration.get('url', 'a server')}"
    sections = (
        _opening(title, analysis),
        _findings(analysis),
        _figures(analysis),
        *(_chart(chart) for chart in charts),
        _messages(analysis),
        _settings("Configuration", analysis.run.configuration),
        _settings("Load tester's machine", analysis.run.machine),
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">
<meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{_resource("report.css")}</style>
</head>
<body>
{"".join(sections)}
<script type="application/json" id="charts">{_embedded(charts)}</script>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""


def _resource(name: str) -> str:
    return files("loadtest.report").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: tuple[str, ...]) -> str:
    """Return a policy that allows these scripts by hash, and nothing from elsewhere.

    Source: https://www.w3.org/TR/CSP3/. Plotly sets styles itself and exports images as blobs.
    """
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    )


def _embedded(charts: list[Chart]) -> str:
    """Return the charts as JSON that can't close its script element."""
    drawn = [
        {
            "name": chart.name,
            "traces": [trace for trace in chart.traces if trace["x"]],
            "layout": chart.layout,
        }
        for chart in charts
    ]
    return json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _opening(title: str, analysis: Analysis) -> str:
    run = analysis.run
    facts = [
        f"model {run.configuration['model']}" if run.configuration.get("model") else "",
        f"API {run.configuration['api']}" if run.configuration.get("api") else "",
        f"started {run.header.started_at}" if run.header.started_at else "",
        f"{len(run.records):,} requests",
        analysis.results.status,
    ]
    about = " · ".join(escape(text) for text in facts if text)
    return f'<h1>{escape(title)}</h1>\n<p class="about">{about}</p>\n'


def _findings(analysis: Analysis) -> str:
    lines = [f"<li>{escape(sentence)}</li>" for sentence in analysis.results.findings]
    for sentence in analysis.results.verdict.sentences:
        kind = "failed" if sentence.startswith("FAILED") else "passed"
        lines.append(f'<li class="{kind}">{escape(sentence)}</li>')
    return f'<ul class="findings">\n{"".join(lines)}</ul>\n' if lines else ""


def _figures(analysis: Analysis) -> str:
    levels = analysis.results.results
    shown = columns(levels)
    head = "".join(
        f'<th title="{escape(column.meaning)}">{escape(column.title)}</th>' for column in shown
    )
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(column.value(level))}</td>" for column in shown) + "</tr>\n"
        for level in levels
    )
    meanings = "".join(
        f"<dt>{escape(column.title)}</dt><dd>{escape(column.meaning)}</dd>" for column in shown
    )
    return f"""<h2>Figures per level</h2>
<div class="scroll"><table class="figures"><thead><tr>{head}</tr></thead>
<tbody>{rows}</tbody></table></div>
<details><summary>What the columns mean</summary><dl>{meanings}</dl>
<p>Percentiles are of successes sent in the window; p99 needs at least 100 of them.</p></details>
"""


def _chart(chart: Chart) -> str:
    return (
        f"<h2>{escape(chart.title)}</h2>\n<p>{escape(chart.text)}</p>\n"
        f'<div class="chart" id="{escape(chart.name)}"></div>\n'
    )


def _messages(analysis: Analysis) -> str:
    """List the messages of failed requests, the most common first."""
    messages = Counter(
        (record.error.value, record.http_status, (record.error_message or "")[:MAX_MESSAGE_CHARS])
        for record in analysis.run.records
        if record.error
    )
    if not messages:
        return "<h2>Errors by kind</h2>\n<p>No request failed.</p>\n"
    others = len(messages) - MAX_MESSAGES
    left_out = f"; {others:,} rarer ones are not shown" if others > 0 else ""
    rows = "".join(
        f"<tr><td>{count:,}</td><td>{escape(kind)}</td><td>{status or ''}</td>"
        f"<td>{escape(message)}</td></tr>\n"
        for (kind, status, message), count in messages.most_common(MAX_MESSAGES)
    )
    return f"""<h2>Messages of failed requests</h2>
<p>The most common first, including warm-up and cancelled requests{left_out}.</p>
<div class="scroll"><table class="plain"><thead><tr><th>requests</th><th>kind</th>
<th>HTTP status</th><th>message</th></tr></thead><tbody>{rows}</tbody></table></div>
"""


def _settings(title: str, settings: dict[str, Any]) -> str:
    if not settings:
        return ""
    lines = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{escape(_written(value))}</dd>"
        for name, value in settings.items()
        if value is not None
    )
    return f"<h2>{escape(title)}</h2>\n<dl>{lines}</dl>\n"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
