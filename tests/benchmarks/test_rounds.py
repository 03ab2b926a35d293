import json
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.serving import rounds
from benchmarks.serving.rounds import NUM_TOKENS, Server, cpu_s, figures, wait_until_idle
from benchmarks.serving.stream_client import Answer

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\n' % NUM_TOKENS


def test_a_message_has_the_time_of_its_last_byte() -> None:
    first, second = event("a"), event("b")
    reads = [(1.0, HEAD + first[:9]), (2.0, first[9:]), (3.0, second + END)]
    assert [time_s for time_s, _ in Answer(0.5, reads).messages()] == [2.0, 3.0]


def test_gaps_lie_between_reads_with_text_and_never_between_answers() -> None:
    together = event("b") + event("c")
    one = [(1.0, HEAD), (1.5, event("a")), (1.6, together), (1.9, event("d")), (2.0, USAGE + END)]
    two = [(5.0, HEAD + event("a")), (5.2, event("b") + USAGE + END)]
    result = figures([Answer(1.0, one), Answer(4.0, two)], sent_s=1.0, used_cpu_s=0.5)
    assert result.gap_p50 == pytest.approx(200)  # of 100, 200 and 300
    assert result.ttft_p50 == pytest.approx(750)  # of 500 and 1000
    assert result.ttft_p95 == pytest.approx(975)
    assert result.tokens_per_s == pytest.approx(2 * NUM_TOKENS / 4.2)
    assert result.cpu_us_per_token == pytest.approx(0.5e6 / (2 * NUM_TOKENS))


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 503 Service Unavailable\r\n\r\nbusy",
        HEAD + event("a"),
        HEAD + event("a") + b'data: {"error": {"message": "broken"}}\n\n' + END,
    ],
    ids=["refused", "cut", "error"],
)
def test_an_answer_that_is_not_whole_stops_the_benchmark(raw: bytes) -> None:
    with pytest.raises(RuntimeError):
        list(Answer(0.0, [(1.0, raw)]).messages())


def test_a_server_that_computes_without_requests_stops_the_benchmark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "IDLE_CORES", 0.01)
    code = "input()\nwhile True: pass"
    with psutil.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        servers = [Server("waits, then spins", 1, process)]
        try:
            wait_until_idle(servers)
            monkeypatch.setattr(rounds, "IDLE_DEADLINE_S", 1)
            process.stdin.write(b"\n")
            process.stdin.flush()
            begun_s, deadline_s = cpu_s(process), time.monotonic() + 60
            while cpu_s(process) <= begun_s:
                assert time.monotonic() < deadline_s, "it does not spin"
                time.sleep(0.01)
            with pytest.raises(RuntimeError, match="still computes"):
                wait_until_idle(servers)
        finally:
            process.kill()
