"""The parts of a text's way, and which functions belong to each.

A sample is a thread's stack. It belongs to the part of its innermost function that any rule knows:
what a function calls, such as the JSON decoder, is the caller's part. The event loops' own frames
belong to no part, so that is where a stack ends up of which nothing else is known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Role = Literal["HAProxy", "ingress", "replica", "Ray"]
"""What a process of the server does."""

HAND_OVERS: Final = "event loops, hand-overs between threads"
PRODUCTS: Final = "products of weights"
FORWARD: Final = "the rest of the forward pass"
UNSEEN: Final[Mapping[Role, str]] = {
    "HAProxy": "all",
    "ingress": "threads without Python",
    "replica": "the forward pass on OpenMP's other threads",
    "Ray": "all",
}
"""The part of threads without a stack of Python's."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Functions that belong to a part.

    Attributes:
        part: The part's name.
        path: What the path of their file contains.
        functions: Their names; empty for all of the file.
    """

    part: str
    path: str
    functions: frozenset[str] = frozenset()


def _rules(part: str, *paths: str, only: Sequence[str] = ()) -> tuple[Rule, ...]:
    return tuple(Rule(part, path, frozenset(only)) for path in paths)


INGRESS: Final = (
    *_rules("message out", "/token_channels.py", only=("call", "_gather", "_send_gathered")),
    *_rules("message out", "/pooling_wire.py", only=("encode_call", "_text")),
    *_rules("message back", "/token_channels.py", "/pooling_wire.py", "/channel/wire.py"),
    *_rules("JSON in and validation", "/serve_app/http/json_route.py", "/schema.py", "/fastapi/"),
    *_rules("JSON out", "/serve_app/api/"),
    *_rules("admission and routing", "/serve_app/backends/", "/contract/claims/"),
    *_rules("middleware and access log", "/serve_app/middleware/", "/serve_app/http/"),
    *_rules("middleware and access log", "/serve_app/metrics.py", "/telemetry/"),
    *_rules(HAND_OVERS, "/serve/_private/replica.py", only=("_run_user_code_event_loop",)),
    *_rules("HTTP: Ray Serve around the application", "/ray/serve/"),
    *_rules("HTTP: uvicorn, starlette", "/uvicorn/", "/starlette/"),
)

REPLICA: Final = (
    *_rules("message in", "/channel/server.py", only=("data_received", "_hear")),
    *_rules("message in", "/channel/calls.py", only=("hear",)),
    *_rules("message in", "/pooling_wire.py", only=("decode_call", "_request", "_input")),
    *_rules("message out", "/channel/", "/pooling_wire.py"),
    *_rules("gathering before the tokenizer", "/ray/serve/batching.py"),
    *_rules("tokenizing", "/pooling/text_encoder.py"),
    *_rules("admission, queue and lanes", "/pooling/request_queue.py", "/pooling/lanes.py"),
    *_rules("admission, queue and lanes", "/pooling/micro_batches.py", "/contract/claims/"),
    *_rules("metrics", "/telemetry/", "/replica/metrics.py"),
    # What launches kernels (`compute/cpu/jit`) has no rule, so that they are their callers' part.
    *_rules(PRODUCTS, "/compute/cpu/linear/", "/compute/merged_linear.py"),
    *_rules(FORWARD, "/compute/cpu/attention/", "/compute/cpu/fusion/", "/compute/traced_model/"),
    *_rules(FORWARD, "/pooling/packed_attention.py", "/pooling/traced_backbone.py"),
    *_rules(FORWARD, "/transformers/models/"),
    *_rules("packing and copies", "/pooling/packed_backbone.py", "/pooling/pooling_model.py"),
    *_rules("the replica around these", "/pooling/", "/pooler_replica.py", "/model_replica.py"),
    *_rules(HAND_OVERS, "/serve/_private/replica.py", only=("_run_user_code_event_loop",)),
    *_rules("Ray Serve and its heartbeats", "/ray/"),
)

RULES: Final[Mapping[Role, Sequence[Rule]]] = {
    "HAProxy": (),
    "ingress": INGRESS,
    "replica": REPLICA,
    "Ray": (),
}


@dataclass(frozen=True, slots=True)
class Frame:
    """A function on a stack.

    Attributes:
        function: Its name, without its class.
        path: Its file.
    """

    function: str
    path: str


def part_of(role: Role, stack: Sequence[Frame]) -> str:
    """Return the part that a stack belongs to.

    Args:
        role: What the process does.
        stack: The frames, outermost first.
    """
    for frame in reversed(stack):
        for rule in RULES[role]:
            if rule.path in frame.path and (not rule.functions or frame.function in rule.functions):
                return rule.part
    return HAND_OVERS


def parts_of(role: Role) -> list[str]:
    """Return a role's parts, in the order of its rules."""
    return list(dict.fromkeys([*(rule.part for rule in RULES[role]), HAND_OVERS]))
