from collections.abc import Sequence

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from benchmarks.costs.__main__ import cpu_table
from benchmarks.costs.cpu_time import Part, divided, samples_in
from benchmarks.costs.hops import HOPS, Collector, medians_ms
from benchmarks.costs.parts import FORWARD, HAND_OVERS, PRODUCTS, RULES, Frame, Role, part_of
from benchmarks.serving.old_checkout import ROOT
from deployments.contract.gen_ai_spans import TIME_IN_QUEUE

LOOP = "run_forever (/python/asyncio/base_events.py:593)"
USER_LOOP = "_run_user_code_event_loop (/site-packages/ray/serve/_private/replica.py:3749)"
DECODE = "decode (/python/json/decoder.py:332)"
READ = "decode_json (/main/serve_app/http/json_route.py:119)"
SEND = "Channel.call (/main/serve_app/backends/replicas/token_channels.py:265)"
POOL = "HandleBackend._pool (/main/serve_app/backends/replicas/handle_backend.py:251)"


KERNEL = "launch (/main/deployments/compute/cpu/jit/launch.py:80)"
LINEAR = "SmallBatchLinear.forward (/main/deployments/compute/cpu/linear/small_batch_linear.py:88)"
BACKBONE = "TracedBackbone.__call__ (/main/deployments/pooling/traced_backbone.py:104)"
NORM = "layer_norm (/main/deployments/compute/cpu/fusion/ops.py:184)"


def stack(*texts: str) -> list[Frame]:
    split = [text.removesuffix(")").rpartition(":")[0].split(" (") for text in texts]
    return [Frame(function.rpartition(".")[-1], path) for function, path in split]


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        ([USER_LOOP, LOOP], HAND_OVERS),
        ([LOOP], HAND_OVERS),
        ([USER_LOOP, LOOP, READ, DECODE], "JSON in and validation"),
        ([USER_LOOP, LOOP, POOL], "admission and routing"),
        ([USER_LOOP, LOOP, POOL, SEND], "message out"),
    ],
)
def test_a_stack_belongs_to_the_innermost_function_that_is_known(
    frames: Sequence[str], part: str
) -> None:
    assert part_of("ingress", stack(*frames)) == part


def test_a_kernel_belongs_to_what_launches_it() -> None:
    assert part_of("replica", stack(BACKBONE, LINEAR, KERNEL)) == PRODUCTS
    assert part_of("replica", stack(BACKBONE, NORM, KERNEL)) == FORWARD
    assert part_of("replica", stack(BACKBONE)) == FORWARD


@pytest.mark.parametrize("role", ["ingress", "replica"])
def test_every_rule_for_our_code_names_files_and_functions_that_exist(role: Role) -> None:
    files = [path for room in ("serve_app", "deployments") for path in (ROOT / room).rglob("*.py")]
    foreign = ("/ray/", "/serve/_private/", "/uvicorn/", "/starlette/", "/fastapi/")
    for rule in RULES[role]:
        if rule.path.startswith((*foreign, "/transformers/")):
            continue
        texts = [path.read_text("utf-8") for path in files if rule.path in str(path)]
        assert texts, rule
        for function in rule.functions:
            assert any(f"def {function}(" in text for text in texts), rule


STACKS = f"""\
thread (11): MainThread;{LOOP} 30
thread (11): MainThread;{LOOP};{READ};{DECODE} 60
thread (11): MainThread;{LOOP};{READ} 10
thread (12): Thread-1;{USER_LOOP};{LOOP};{POOL} 5
no stack
"""


def test_threads_are_divided_as_their_stacks_are() -> None:
    samples = samples_in("ingress", STACKS)
    assert samples[11] == {HAND_OVERS: 30, "JSON in and validation": 70}
    assert samples[12] == {"admission and routing": 5}
    used: dict[tuple[Role, int], float] = {
        ("ingress", 11): 2.0,
        ("ingress", 12): 1.0,
        ("ingress", 13): 0.5,
        ("HAProxy", 20): 0.25,
    }
    parts = divided(used, {"ingress": samples})
    assert parts == {
        ("ingress", HAND_OVERS): pytest.approx(0.6),
        ("ingress", "JSON in and validation"): pytest.approx(1.4),
        ("ingress", "admission and routing"): pytest.approx(1.0),
        ("ingress", "threads without Python"): pytest.approx(0.5),
        ("HAProxy", "all"): pytest.approx(0.25),
    }
    assert sum(parts.values()) == pytest.approx(sum(used.values()))


def test_the_table_has_a_row_for_each_part_that_took_time_and_their_sum() -> None:
    one: dict[Part, float] = {("replica", PRODUCTS): 30.0, ("HAProxy", "all"): 0.2}
    many: dict[Part, float] = {("replica", PRODUCTS): 28.0, ("Ray", "all"): 0.001}
    table = cpu_table("title", {1: one, 32: many})
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["HAProxy", "replica", "all"]
    assert columns[2:] == [["0.200", "30.000", "30.200"], ["0.000", "28.000", "28.001"]]
    assert [column.header for column in table.columns][2:] == ["1 user", "32 users"]


def spans(trace: int, start_ns: int, *ends: tuple[int, int], waited_s: float) -> list[Span]:
    """Return a request's spans; `ends` are from `start_ns` on, outermost first."""
    wait = KeyValue(key=TIME_IN_QUEUE, value=AnyValue(double_value=waited_s))
    return [
        Span(
            trace_id=trace.to_bytes(16),
            start_time_unix_nano=start_ns + begin,
            end_time_unix_nano=start_ns + end,
            attributes=[wait] if index == 2 else [],
        )
        for index, (begin, end) in enumerate(ends)
    ]


def test_the_hops_of_a_request_lie_between_its_spans() -> None:
    collector = Collector()
    clients: dict[str, tuple[int, int]] = {}
    for number in (1, 2, 3):
        start_ns, ms = 10**12 * number, 10**6 * number
        request, call, work = (2 * ms, 36 * ms), (5 * ms, 31 * ms), (9 * ms, 25 * ms)
        made = spans(number, start_ns, request, call, work, waited_s=0.005 * number)
        of_scope = ScopeSpans(spans=made[::-1])  # each ends before the one above it
        body = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[of_scope])])
        collector.take(body.SerializeToString())
        clients[f"{number:032x}"] = start_ns, start_ns + 44 * ms
    collector.wait_for(clients)
    medians = medians_ms(clients, collector.by_trace)
    assert list(medians) == list(HOPS)
    assert list(medians.values()) == pytest.approx([4, 6, 8, 10, 22, 12, 10, 16])
