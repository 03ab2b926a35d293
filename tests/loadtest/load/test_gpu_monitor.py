from loadtest.load.gpu_monitor import parse_sample
from tests.offenders import for_each


def test_a_line_of_nvidia_smi_is_parsed() -> None:
    assert parse_sample("1, 87, 40536, 612.30\n", 2.0004) == {
        "t_s": 2.0,
        "gpu": 1,
        "utilization_percent": 87.0,
        "memory_mib": 40536.0,
        "power_w": 612.3,
    }


def test_a_value_that_a_gpu_does_not_report_is_none() -> None:
    sample = parse_sample("0, [N/A], 12, [Not Supported]", 0.0)
    assert sample is not None
    assert (sample["utilization_percent"], sample["power_w"]) == (None, None)


@for_each("", "No devices were found", "a, b, c, d", "1, 2, 3")
def test_any_other_line_is_none(line: str) -> None:
    assert parse_sample(line, 0.0) is None
