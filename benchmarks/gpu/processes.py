"""Measures what two processes do to each other, and what one hands to the other.

Each answers what its parent asks, so that the parent says when it goes on.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu.rates import Load, open_engine, step
from benchmarks.gpu.shapes import GEMMA3_12B, QWEN_05B, QWEN_7B, TINY, Shape, build
from deployments.contract.sampling_params import SamplingParams
from deployments.device.device import CpuDevice, CudaDevice
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.scheduling.sequence import SequenceRequest

SHARE = 0.4
GIB = 2**30
NUM_SEQS, NUM_TOKENS, NUM_BEFORE = 24, 32, 13
"""Answers that move, their tokens, and those that the first process makes."""

DTYPES = (torch.float32, torch.bfloat16)
NUM_STEPS = 30
TURNS: Mapping[str, Shape] = {shape.name: shape for shape in (QWEN_7B, GEMMA3_12B)}
"""Models that take turns on the device, each with a plan for most of it."""


class Child:
    """A process of this module."""

    def __init__(self, what: str, device: torch.device) -> None:
        # A fork has all packages at once. That is fine where the parent has not touched the device,
        # but on a CPU the parent's own arithmetic has threads, which a fork would lack.
        forks = device.type == "cuda"
        context = get_context("fork") if forks else get_context("forkserver")
        self._asking, answering = context.Pipe()
        self._process = context.Process(target=_serve, args=(what, device, answering))
        self._process.start()
        answering.close()

    def ask(self, asked: object = None) -> Any:
        """Ask, and return the answer.

        Raises:
            RuntimeError: The process has ended.
        """
        self._asking.send(asked)
        try:
            return self._asking.recv()
        except EOFError:
            self._process.join()
            why = f"a process ended with status {self._process.exitcode}; see the log"
            raise RuntimeError(why) from None

    def end(self) -> None:
        """End it; what it holds of the device is free after that."""
        self._process.kill()
        self._process.join()
        self._asking.close()


@contextmanager
def child(what: str, device: torch.device) -> Iterator[Child]:
    """Run a process of this module as long as the block runs."""
    started = Child(what, device)
    try:
        yield started
    finally:
        started.end()


def neighbours(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield what a process with a share decodes, before and while another fills its own share."""
    with child("steps", device) as steps, child("fill", device) as fill:
        alone = steps.ask()
        yield {"what": "step of a process with a share of 0.4, ms", "is": alone["ms"]}
        filled = fill.ask()
        yield {
            "what": "another allocates until it fails, GiB",
            "is": f"{filled['gib']} of {filled['share_gib']} in its share; {filled['error']}",
        }
        beside = steps.ask()
        yield {"what": "step beside the full share, ms", "is": beside["ms"]}
        yield {"what": "in use on the device with both, GiB", "is": beside["used_gib"]}


def moves(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield how many answers are equal if a second process goes on after a first one has ended."""
    none: list[Any] = [[[]] * NUM_SEQS] * (2 * len(_dtypes(device)))
    with child("answers", device) as first_process:
        begun = first_process.ask({"given": none, "num_tokens": NUM_BEFORE})
    with child("answers", device) as second_process:
        moved = second_process.ask({"given": begun, "num_tokens": NUM_TOKENS})
        whole = second_process.ask({"given": none, "num_tokens": NUM_TOKENS})
    for i, dtype in enumerate(_dtypes(device)):
        for j, what in enumerate(("greedy", "seeded")):
            of_kind = [each[2 * i + j] for each in (whole, begun, moved)]
            pairs = zip(*of_kind, strict=True)
            equal = sum(one == [*first, *rest] for one, first, rest in pairs)
            yield {
                "dtype": str(dtype).removeprefix("torch."),
                "answers": what,
                "moved after": f"{NUM_BEFORE} of {NUM_TOKENS} tokens",
                "equal to those of one process": f"{equal} of {NUM_SEQS}",
            }


def _dtypes(device: torch.device) -> Sequence[torch.dtype]:
    """Return the types to try; on a CPU one is enough to check that it runs."""
    return DTYPES if device.type == "cuda" else DTYPES[:1]


class _Answers:
    """Goes on with answers, with a tiny model for each type."""

    def __init__(self, device: torch.device) -> None:
        self._engines = []
        for dtype in _dtypes(device):
            limits = EngineLimits(NUM_SEQS, 512, 128, prefix_caching=False)
            engine = Engine(build(replace(TINY, dtype=dtype), device), limits)
            engine.warm_up()
            self._engines.append(engine)

    def __call__(self, asked: Any) -> Any:
        """Return the tokens that come after those that are given, for each type and kind."""
        return [
            _run(engine, asked["given"][2 * i + j], asked["num_tokens"], is_seeded=j == 1)
            for i, engine in enumerate(self._engines)
            for j in range(2)
        ]


def _run(
    engine: Engine, given: Sequence[Sequence[int]], num_tokens: int, *, is_seeded: bool
) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in given]
    for i, before in enumerate(given):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        if is_seeded:
            params = replace(params, temperature=0.8, top_p=0.9, repetition_penalty=1.05, seed=i)
        prompt = tuple(2 + (37 * i + 11 * j) % 500 for j in range(3 + 7 * i))
        request = SequenceRequest(str(i), prompt, params, tuple(before), goes_first=bool(before))
        engine.add(request)
    while engine.has_work:
        for name, delta in engine.step():
            answers[int(name)] += delta.token_ids
    return answers


class _Steps:
    """Decodes a model of Qwen2-0.5B's shape in its share, whenever it is asked."""

    def __init__(self, device: torch.device) -> None:
        _claim(device)
        self._device = device
        loaded = build(TINY if device.type == "cpu" else QWEN_05B, device)
        self._load = Load(8, 64, 16 + 3 * NUM_STEPS)
        self._vocab_size: int = loaded.text_config.vocab_size
        self._engine = open_engine(loaded, self._load, cuda_graphs=True)
        self._num_asked = 0

    def __call__(self, asked: Any) -> Any:
        self._num_asked += 1
        params = SamplingParams(temperature=0, max_tokens=self._load.num_tokens, ignore_eos=True)
        for i, prompt in enumerate(self._load.prompts(self._vocab_size)):
            self._engine.add(SequenceRequest(f"{self._num_asked}-{i}", tuple(prompt), params))
        while self._engine.stats.num_running < self._load.num_seqs:
            step(self._engine)
        for _ in range(8):
            step(self._engine)
        seconds = [step(self._engine) for _ in range(NUM_STEPS)]
        while self._engine.has_work:
            step(self._engine)
        used = 0
        if self._device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            used = total_bytes - free_bytes
        return {
            "ms": round(1000 * statistics.median(seconds), 2),
            "used_gib": round(used / GIB, 2),
        }


def _fill(device: torch.device) -> Any:
    """Allocate until it fails, or on a CPU until some blocks are there; keep all of it."""
    _claim(device)
    on_gpu = device.type == "cuda"
    total = torch.cuda.mem_get_info()[1] if on_gpu else 64 * 2**20
    block = 256 * 2**20 if on_gpu else 2**20
    error = "no error"
    while on_gpu or len(_HELD) * block < SHARE * total:
        try:
            _HELD.append(torch.zeros(block, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError as raised:
            error = str(raised).splitlines()[0][:90]
            break
    return {
        "gib": round(len(_HELD) * block / GIB, 2),
        "share_gib": round(SHARE * total / GIB, 2),
        "error": error,
    }


_HELD: list[torch.Tensor] = []


def _claim(device: torch.device) -> None:
    (CudaDevice() if device.type == "cuda" else CpuDevice()).enforce_share(SHARE)


def _turns(name: str, device: torch.device) -> Callable[[Any], Any]:
    # Imported here: it needs psutil, which a machine with torch and transformers may lack.
    from benchmarks.gpu.turns import TurnTaker

    return TurnTaker(name, device)


def _serve(what: str, device: torch.device, asked: Connection) -> None:
    """Answer until the parent ends it."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    made: Mapping[str, Callable[[torch.device], Callable[[Any], Any]]] = {
        "answers": _Answers,
        "steps": _Steps,
        "fill": lambda device: lambda asked: _fill(device),
        **{name: partial(_turns, name) for name in TURNS},
    }
    answer = made[what](device)
    with suppress(EOFError):
        while True:
            asked.send(answer(asked.recv()))
