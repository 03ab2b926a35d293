"""Text generators that write down what they do; some requests kill the one on raystream's engine.

The request's id says how: `kill-encoding-...` kills the process that encodes its prompt, and
`kill-at-40-...` the process whose engine samples its 40th token. With `raise-at-40-...` the engine
raises an error there, with `end-at-40-...` its thread ends, and with `hang-at-40-...` it waits for
ever; these three spare an answer that has moved. `slow-...` makes each of its steps take longer.
`held-NAME-...` does so until a test releases NAME, and nearly stops the engine once it has run for
some tokens. Where the server chooses the id, the last message may begin with `held-NAME-`, which
slows the steps down as well, but never stops them. Everything else is the shipped generator's.
"""

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from deployments.contract.errors import RaystreamError
from deployments.contract.generation import GenerationEvent, GenerationRequest
from deployments.contract.messages import ChatMessage, TextPart
from deployments.contract.output import TextDelta
from deployments.engine.engine import Engine
from deployments.engine.invariants import InvariantError
from deployments.generator.placed_engine import PlacedEngine
from deployments.generator.prompt_encoder import EncodedPrompt, PromptEncoder
from deployments.generator_replica import GeneratorReplica
from deployments.text_generator import TextGenerator
from tests.faults.served.replicas import FOLDER, RELEASED, USED_MEMORY

REPORT_INTERVAL_S = 0.02
STEPS_BETWEEN_CHECKS = 64
"""`Engine.check` looks at every holder of memory, which would slow each step down."""

SLOW_STEP_S = 0.02

NUM_QUICK_STEPS = 100
"""Steps of a held sequence at a replica that take no longer than that."""

HELD_STEP_S = 1.0
"""How long each later one takes if the engine has nothing else to do: so the sequence outlasts
whatever a test waits for. A step of five seconds would pass for one that hangs."""

_SLOW = "slow-"
_HELD = re.compile(r"held-(\w+)-")
_KILL_ENCODING = "kill-encoding-"
_FAULT_AT = re.compile(r"(kill|raise|end|hang)-at-(\d+)-")


class Watched(GeneratorReplica):
    """Writes to a folder which process runs which request, and how many sequences it holds.

    - `runs/REQUEST_ID` gets a line with the process's id for each call;
    - `replicas/PROCESS_ID` holds the latest counts as JSON, and exists once the model is loaded.
    """

    def _start(self) -> None:
        self._folder = Path(os.environ[FOLDER])
        super()._start()
        self._is_over = threading.Event()
        threading.Thread(target=self._report, name="report", daemon=True).start()

    def _stop(self) -> None:
        if hasattr(self, "_is_over"):
            self._is_over.set()
        super()._stop()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[list[GenerationEvent]]:
        with (self._folder / "runs" / request.request_id).open("a") as file:
            file.write(f"{os.getpid()}\n")
        async for events in super().generate(request):
            yield events

    def _report(self) -> None:
        """Write the counts at regular intervals; a replica that is stopped or dead writes none."""
        path = self._folder / "replicas" / str(os.getpid())
        draft = self._folder / f"{os.getpid()}.draft"
        while not self._is_over.wait(REPORT_INTERVAL_S):
            stats, admission = self._engine.stats, self._admission
            counts = {
                "num_sequences": stats.num_running + stats.num_waiting,
                "num_permits": admission.num_running + admission.num_waiting,
            }
            draft.write_text(json.dumps(counts))
            draft.replace(path)


class FragileGenerator(Watched, TextGenerator):
    """A replica of raystream's engine, which writes two more kinds of files.

    - `faults/REQUEST_ID` exists once the request has made its engine hang, end or raise;
    - `broken/PROCESS_ID` holds the invariant that its engine has broken.

    How much of the machine's memory is in use, the file `used_memory` says.
    """

    def _start(self) -> None:
        self._num_resumed: dict[str, int] = {}
        self._asked: dict[str, str] = {}  # how the last message of a request begins
        self._num_steps_of: Counter[str] = Counter()  # the steps of each sequence
        super()._start()
        facts = self._facts
        self._encoder = FragileEncoder(
            facts.tokenizer, facts.processor, self._spec.entry.reasoning_parser
        )

    @staticmethod
    def _used_memory() -> float:
        path = Path(os.environ[FOLDER], USED_MEMORY)
        return float(path.read_text()) if path.exists() else 0.0

    def _place(self) -> PlacedEngine:
        placed = super()._place()
        engine = placed.engine
        step, num_steps = engine.step, 0
        num_tokens: dict[str, int] = {}

        def fragile_step() -> list[tuple[str, TextDelta]]:
            nonlocal num_steps
            deltas = step()
            num_steps += 1
            if num_steps % STEPS_BETWEEN_CHECKS == 0 or not engine.has_work:
                self._check(engine)
            if any(self._is_slow(name) for name, _ in deltas):
                time.sleep(SLOW_STEP_S)
            self._hold([name for name, _ in deltas])
            for name, delta in deltas:
                if found := _FAULT_AT.match(name):
                    request_id = name.rpartition("-")[0]
                    resumed = self._num_resumed[request_id]
                    num_tokens[name] = num_tokens.get(name, resumed) + len(delta.token_ids)
                    if num_tokens[name] >= int(found[2]):
                        if found[1] == "kill":
                            die()
                        if not resumed:
                            (self._folder / "faults" / request_id).touch()
                            fail(found[1])
            return deltas

        engine.step = fragile_step  # type: ignore[method-assign] # a fault
        return placed

    def _is_slow(self, name: str) -> bool:
        return name.startswith(_SLOW) or self._is_held(name)

    def _is_held(self, name: str) -> bool:
        held = _HELD.match(name) or _HELD.match(self._asked.get(name.rpartition("-")[0], ""))
        return held is not None and not (self._folder / RELEASED / held[1]).exists()

    def _hold(self, names: Sequence[str]) -> None:
        """Wait while all that runs is held, until the engine has a command or for `HELD_STEP_S`."""
        self._num_steps_of.update(names)
        until_s = time.monotonic() + HELD_STEP_S
        while (
            names
            and all(_HELD.match(name) and self._is_held(name) for name in names)
            and min(self._num_steps_of[name] for name in names) > NUM_QUICK_STEPS
            and not self._engine._thread._commands
            and time.monotonic() < until_s
        ):
            time.sleep(SLOW_STEP_S)

    def _check(self, engine: Engine) -> None:
        try:
            engine.check()
        except InvariantError as error:
            (self._folder / "broken" / str(os.getpid())).write_text(str(error))
            raise

    async def generate(self, request: GenerationRequest) -> AsyncIterator[list[GenerationEvent]]:
        self._num_resumed[request.request_id] = len(request.generated_token_ids)
        match request.prompt:
            case (*_, ChatMessage(parts=(TextPart(text), *_))) if _HELD.match(text):
                self._asked[request.request_id] = text
        async for events in super().generate(request):
            yield events


class FragileEncoder(PromptEncoder):
    """Kills its process at a certain request."""

    def encode(self, requests: Sequence[GenerationRequest]) -> list[EncodedPrompt | RaystreamError]:
        """Encode requests together, or die."""
        if any(request.request_id.startswith(_KILL_ENCODING) for request in requests):
            die()
        return super().encode(requests)


def fail(how: str) -> None:
    """Fail as a request's id asks."""
    if how == "hang":
        threading.Event().wait()
    raise SystemExit if how == "end" else ZeroDivisionError("a bug in a step")


def die() -> None:
    """End this process as the system's memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)
