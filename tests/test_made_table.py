import pytest

from tests.engine.model_table import TABLE as MODELS
from tests.k8s.alerts_table import TABLE as ALERTS
from tests.made_table import MadeTable
from tests.serve_app.api_reference import TABLES as API
from tests.serve_app.configuration_tables import TABLES as CONFIGURATION
from tests.serve_app.metrics_table import TABLE as METRICS

TABLES = [MODELS, METRICS, ALERTS, *API, *CONFIGURATION]


def test_the_tables_in_the_documents_are_what_make_table_writes() -> None:
    stale = [
        f"{table.path}, {table.name}"
        for table in TABLES
        if table.put_into(table.read()) != table.read()
    ]
    assert stale == [], "run `make table`"


def test_only_the_text_between_the_marks_is_replaced() -> None:
    table = MadeTable("some.md", "things", lambda: "new\n")
    text = f"a\n{table.begin}old{table.end}b\n"
    assert table.put_into(text) == f"a\n{table.begin}new\n{table.end}b\n"
    with pytest.raises(ValueError, match=r"some\.md lacks the lines"):
        table.put_into(f"a\n{table.begin}old\n")
