from serve_app.metrics import ALL
from tests.serve_app.metrics_table import table


def test_the_table_has_a_line_for_each_metric() -> None:
    lines = table().splitlines()[2:]
    assert len(lines) == len(ALL)
    for metric in ALL.values():
        assert sum(f"`{metric.exposed_name}`" in line for line in lines) == 1
