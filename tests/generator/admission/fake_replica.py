"""Admission in front of an engine that does nothing, for tests of who waits, runs and is parked."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from deployments.contract.claims import Claim
from deployments.contract.generation import GenerationRequest
from deployments.contract.sampling_params import SamplingParams
from deployments.generator.admission.admission import Admission, AdmissionLimits
from deployments.plan.kv_layout import KVLayout

if TYPE_CHECKING:
    from deployments.generator.admission.permit import Permit

LAYOUT = KVLayout(capacities=(100,), num_blocks=(10,), block_size=10)

MADE: list["Replica"] = []
"""All that the running test has made; `conftest.py` ends what is left in them."""


class Engine:
    """The sequences in it, in the order of their turns."""

    def __init__(self) -> None:
        self.num_entered = 0
        self.begun: set[str] = set()
        self.turns: dict[str, tuple[bool, int]] = {}  # as `Sequence.turn`, by name


class FakeRun:
    """A sequence that notes what becomes of it."""

    may_park = True

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self.may_yield = True
        self.is_parked = self.is_aborted = False

    @property
    def is_parkable(self) -> bool:
        return self.may_park

    @property
    def is_in(self) -> bool:
        return self.name in self.engine.turns

    @property
    def has_begun(self) -> bool:
        return self.name in self.engine.begun

    def enter(self, *, goes_first: bool) -> None:
        assert not self.is_in
        self.engine.num_entered += 1
        self.engine.turns[self.name] = not goes_first, self.engine.num_entered

    def leave(self) -> None:
        self.engine.turns.pop(self.name, None)

    def note_turn(self, *, is_running: bool) -> None:
        pass

    def park(self) -> None:
        self.leave()
        self.is_parked = True

    def abort(self) -> None:
        self.leave()
        self.is_aborted = True


class Replica:
    """Admission in front of an engine that does nothing."""

    def __init__(
        self,
        max_num_seqs: int = 8,
        max_queued: int = 9,
        layout: KVLayout = LAYOUT,
        max_queued_tokens: int | None = None,
    ) -> None:
        MADE.append(self)
        self.now_s = 1000.0
        self.engine = Engine()
        limits = AdmissionLimits(max_num_seqs, max_queued, max_queued_tokens)
        self.counted = Admission(limits, layout, lambda: self.now_s, priority_aging_s=60)
        self.permits: dict[str, Permit] = {}
        self.runs: dict[str, FakeRun] = {}
        self.stacks: dict[str, ExitStack] = {}

    def add(self, name: str, priority: int = 0, num_tokens: int = 10, **fields: Any) -> FakeRun:
        """Let a sequence come and be accepted."""
        self.come(name, priority, **fields)
        return self.accept(name, num_tokens)

    def come(
        self,
        name: str,
        priority: int = 0,
        *,
        tenant: str = "",
        weight: float = 1,
        waited_s: float = 0,
        **fields: Any,
    ) -> None:
        """Let a sequence come, whose prompt is encoded from now on; `fields` are its request's."""
        claim = Claim(priority, tenant, weight, waited_s)
        request = GenerationRequest(name, "hi", SamplingParams(), claim=claim, **fields)
        with ExitStack() as stack:
            self.permits[name] = stack.enter_context(self.counted.permit(request))
            self.stacks[name] = stack.pop_all()

    def accept(self, name: str, num_tokens: int = 10) -> FakeRun:
        """Accept a sequence that has come; if it is refused, it leaves."""
        permit, run = self.permits[name], FakeRun(name, self.engine)
        with self.stacks.pop(name) as stack:
            self.counted.weigh(permit, num_tokens, num_tokens)
            stack.enter_context(self.counted.turns(permit, run))
            self.stacks[name] = stack.pop_all()
        self.runs[name] = run
        return run

    def end(self, name: str) -> None:
        self.stacks.pop(name).close()

    @property
    def running(self) -> str:
        return "".join(name for name in self.stacks if self.permits[name].is_running)

    @property
    def inside(self) -> str:
        """What is in the engine, in the order of its turns."""
        return "".join(sorted(self.engine.turns, key=self.engine.turns.__getitem__))

    @property
    def parked(self) -> str:
        """Those that were parked, by name."""
        return "".join(sorted(name for name, run in self.runs.items() if run.is_parked))

    def end_all(self) -> None:
        for name in list(self.stacks):
            self.end(name)
        assert self.counted.num_running == self.counted.num_waiting == 0
        assert not self.engine.turns
