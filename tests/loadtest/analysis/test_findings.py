from pathlib import Path

import pytest

from loadtest.results.record import ErrorKind, LevelRecord, RequestRecord, TokenSource
from tests.loadtest.analysis.figures import results_of
from tests.loadtest.made_runs import made_level, made_request, sweep


def found(text: str, findings: tuple[str, ...]) -> bool:
    return any(text in sentence for sentence in findings)


def test_capacity_is_the_heaviest_load_within_the_objectives(tmp_path: Path) -> None:
    levels = sweep((1, 2, 4), loops=20)
    findings = results_of(tmp_path, levels, slo=["ttft:300"]).findings
    assert findings[0] == "Capacity: 2 users within ttft 300 ms; at 4 ttft p95 is 472 ms."


def test_capacity_says_that_the_queue_grows_if_more_load_only_adds_waiting(tmp_path: Path) -> None:
    first = made_level(8, loops=20, ttft_s=0.5, gap_s=0.1)
    second = made_level(
        16, index=1, started_s=first[0].ended_s + 1, loops=20, ttft_s=2.3, gap_s=0.1
    )
    findings = results_of(tmp_path, [first, second], slo=["ttft:2000"]).findings
    assert findings[0].startswith("Capacity: 8 users within ttft 2000 ms; at 16 the queue grows")


def test_capacity_says_if_no_heavier_load_was_tried(tmp_path: Path) -> None:
    findings = results_of(tmp_path, sweep((1, 2)), slo=["ttft:9000"]).findings
    assert findings[0] == "Capacity: 2 users within ttft 9000 ms; no heavier load was tried."


def test_capacity_says_if_no_load_met_the_objectives(tmp_path: Path) -> None:
    findings = results_of(tmp_path, sweep((1, 2)), slo=["ttft:10"]).findings
    assert findings[0].startswith("Capacity: not even 1 user within ttft 10 ms: ttft p95 is")


def test_a_load_whose_requests_fail_is_beyond_capacity(tmp_path: Path) -> None:
    levels = sweep((1, 2))
    failed = [record.model_copy(update={"error": ErrorKind.HTTP_5XX}) for record in levels[1][1]]
    findings = results_of(tmp_path, [levels[0], (levels[1][0], failed)], slo=["ttft:900"]).findings
    assert findings[0] == "Capacity: 1 user within ttft 900 ms; at 2 requests fail (100%)."


def test_without_objectives_the_server_is_full_when_output_stops_growing(tmp_path: Path) -> None:
    first = made_level(4, loops=10, ttft_s=0.5)
    second = made_level(8, index=1, started_s=50, loops=10, ttft_s=1.5)
    findings = results_of(tmp_path, [first, second]).findings
    assert findings[0].startswith("The server is full at 4 users (")
    assert "with 3.0 times the TTFT" in findings[0]


@pytest.mark.parametrize(
    ("lag_ms", "cpu_share", "is_reported"),
    [
        ((1.0,) * 200, 0.2, False),
        ((1.0,) * 190 + (80.0,) * 10, 0.2, True),
        ((1.0,) * 9, 0.95, True),
    ],
)
def test_a_run_that_measures_the_client_says_so(
    tmp_path: Path, lag_ms: tuple[float, ...], cpu_share: float, is_reported: bool
) -> None:
    level = made_level(2, lag_ms=lag_ms, cpu_share=cpu_share)
    findings = results_of(tmp_path, [level]).findings
    assert found("this run measures the client", findings) is is_reported


def test_a_very_short_level_does_not_measure_the_client(tmp_path: Path) -> None:
    level = made_level(1, loops=1, ttft_s=0.01, gap_s=0.001, cpu_share=0.99)
    assert not found("measures the client", results_of(tmp_path, [level]).findings)


def test_lag_does_not_matter_if_latencies_are_much_larger(tmp_path: Path) -> None:
    level = made_level(2, lag_ms=(8.0,) * 200, ttft_s=2.0, gap_s=0.5)
    assert not found("measures the client", results_of(tmp_path, [level]).findings)


def test_errors_are_reported_by_kind_with_the_server_s_message(tmp_path: Path) -> None:
    level, records = made_level(2, loops=4)
    records[0] = records[0].model_copy(
        update={"error": ErrorKind.TRUNCATED, "error_message": "cut\x1b[31m off"}
    )
    findings = results_of(tmp_path, [(level, records)]).findings
    assert 'At 2 users 1 of 8 requests failed: 1 truncated. Most often: "cut [31m off".' in findings


def test_the_token_source_is_named(tmp_path: Path) -> None:
    level = made_level(1, source=TokenSource.CHUNKS)
    assert found("The server sent no token counts", results_of(tmp_path, [level]).findings)


def test_mixed_token_sources_are_reported(tmp_path: Path) -> None:
    level, records = made_level(1)
    records.append(made_request(99, sent_s=0.2, source=TokenSource.EVENTS))
    assert found("in different ways", results_of(tmp_path, [(level, records)]).findings)


def test_an_open_loop_that_piles_up_is_reported(tmp_path: Path) -> None:
    level = LevelRecord(
        index=0, num_queues=None, rate_per_s=4, started_s=0, warm_s=0, deadline_s=30, ended_s=60
    )
    records = [
        made_request(number, queue=None, sent_s=number / 4, ttft_s=0.1 + number / 4)
        for number in range(120)
    ]
    findings = results_of(tmp_path, [(level, records)]).findings
    assert found("At 4 requests/s the queue grows:", findings)
    steady = [made_request(number, queue=None, sent_s=number / 4) for number in range(120)]
    assert not found("queue grows", results_of(tmp_path / "b", [(level, steady)]).findings)


def test_requests_that_were_sent_late_are_reported(tmp_path: Path) -> None:
    level = LevelRecord(
        index=0, num_queues=None, rate_per_s=4, started_s=0, warm_s=0, deadline_s=9, ended_s=9
    )
    records = [made_request(n, queue=None, sent_s=n / 4, delay_s=0.5) for n in range(30)]
    assert found("ms (p95) late", results_of(tmp_path, [(level, records)]).findings)


def test_a_short_steady_state_is_reported(tmp_path: Path) -> None:
    level, records = made_level(4, loops=1)
    late = made_request(99, queue=0, sent_s=5.0, ttft_s=10.0)
    assert found(
        "all users were busy for only", results_of(tmp_path, [(level, [*records, late])]).findings
    )


def test_a_limit_that_held_users_back_is_reported(tmp_path: Path) -> None:
    level, records = made_level(2)
    held_back = level.model_copy(update={"num_queues": 4})
    findings = results_of(tmp_path, [(held_back, records)]).findings
    assert found("at most 2 were in flight at once, so check --max-inflight", findings)
    assert not found("--max-inflight", results_of(tmp_path / "b", [(level, records)]).findings)


def test_an_early_end_is_the_first_finding(tmp_path: Path) -> None:
    findings = results_of(tmp_path, [made_level(1)], status="stopped").findings
    assert "stopped before its end" in findings[0]
    crashed = results_of(tmp_path / "b", [made_level(1)], status="running")
    assert "The tool ended before" in crashed.findings[0]
    assert crashed.status == "interrupted"


def test_a_single_load_is_reported_with_its_rates_and_ttft(tmp_path: Path) -> None:
    level = made_level(2, loops=10, ttft_s=0.5, gap_s=0.05, num_events=11)
    findings = results_of(tmp_path, [level]).findings
    assert findings[0] == "2 users: 1.94 answers/s, 21.3 tokens/s, TTFT 522 ms (p95 545 ms)."


@pytest.mark.parametrize("is_unique", [True, False])
def test_cached_prompts_are_reported_and_the_remedy_only_if_it_was_not_taken(
    tmp_path: Path, is_unique: bool
) -> None:
    level, records = made_level()
    records = [record.model_copy(update={"cached_tokens": 10}) for record in records]
    findings = results_of(tmp_path, [(level, records)], unique=is_unique).findings
    assert found("The server took up to 50% of the prompt tokens from its cache", findings)
    assert found("use --unique", findings) != is_unique
    assert found("their prompts begin alike", findings) == is_unique


def test_what_answers_had_besides_their_api_is_reported_once(tmp_path: Path) -> None:
    levels = sweep((1, 2), loops=4)
    odd = [(level, [_odd(record) for record in records]) for level, records in levels]
    findings = results_of(tmp_path, odd).findings
    assert [sentence for sentence in findings if "read past" in sentence] == [
        "Of 12 answers some had what the API does not have: 12 with a chunk without choices, 6 "
        "with an event named ping. It was read past; a strict client may fail at it."
    ]
    assert not found("read past", results_of(tmp_path / "clean", levels).findings)


def _odd(record: RequestRecord) -> RequestRecord:
    pings = ("an event named ping",) if record.index % 2 else ()
    return record.model_copy(update={"oddities": (*pings, "a chunk without choices")})
