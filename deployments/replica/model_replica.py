"""ModelReplica: starts and stops a replica, whatever its model does.

A replica is one process with one model on one device, or on a share of one. A replica that finds
that it can't serve again ends its process. Its memory is watched from before the model is loaded
until the replica ends.
"""

import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final, Protocol, TypeVar
from uuid import uuid4

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from transformers.utils import logging as transformers_logging

from deployments.autoscaling import ReplicaLoad
from deployments.channel.calls import Calls
from deployments.channel.server import ChannelServer
from deployments.contract.channel.tls import TlsFiles
from deployments.contract.descriptions import Footprint
from deployments.contract.errors import ReplicaUnavailableError
from deployments.contract.gen_ai_spans import ModelSpans
from deployments.contract.model_spec import ModelSpec
from deployments.contract.telemetry.memory_report import MemoryUse, MemoryWarning, Watched
from deployments.contract.telemetry.metric_store import Metric, MetricStore, Snapshot
from deployments.contract.telemetry.metric_table import ANY_REPLICA, STARTED
from deployments.contract.telemetry.start_progress import StartPhase, StartProgress
from deployments.contract.telemetry.tracing import SpanKind, open_tracer
from deployments.contract.unsupported_model import UnsupportedModelError, reason_of
from deployments.contract.user_config import given_settings
from deployments.device.device import MemoryDevice
from deployments.device.memory_readers import memory_reader, unshared_bytes
from deployments.device.monitor import MemoryMonitor
from deployments.plan import cgroup
from deployments.plan.memory_budget import GIB, DeviceMemoryError
from deployments.plan.replica_report import (
    LightSleep,
    MemoryPlan,
    ReplicaReport,
    ReplicaState,
    SleepState,
    Waits,
    WorkCounts,
)
from deployments.plan.start_times import note_start, note_wake
from deployments.replica.assigned_device import open_assigned_device
from deployments.replica.deep_sleep import DeepSleep, MemoryPressure
from deployments.replica.light_sleep import LightSleeper, Sleeper, TurnEnd
from deployments.replica.metrics import MemoryMetrics, ReplicaMetrics
from deployments.replica.own_actor import end_own_actor, is_actor
from deployments.replica.own_card import wait_for_share
from deployments.replica.own_scaling import graceful_shutdown_timeout_s, is_pinned, is_stopped
from deployments.replica.own_turn import OwnTurn
from deployments.replica.ray_metrics import RayMetrics, own_deployment
from deployments.replica.start_board import StartBoard
from deployments.replica.start_phases import StartPhases

T = TypeVar("T")

logger = logging.getLogger("ray.serve.raystream.replica")
"""Below Serve's logger, whose own INFO lines do not reach the terminal of `make serve`."""


RECENT_S: Final = 5.0
"""How long a model counts as used after a request."""


PASSING: Final = (OSError, RuntimeError, MemoryError, DeviceMemoryError, RayError)
"""Errors that the next attempt to start may not meet: of memory, devices, disks and networks."""


SHORT_OF: Final = {
    Watched.DEVICE: "all processes on its node use {used:.2f} of {limit:.2f} GiB ({device}). Run "
    "fewer models or replicas there, or lower max_num_seqs or max_model_len",
    Watched.SHARE: "its allocator holds {used:.2f} of the {limit:.2f} GiB of its share ({device}). "
    "Raise num_gpus (or gpu_share), or lower max_batched_tokens",
}
"""What the log says when memory gets short."""


class ModelFacts(Protocol):
    """What is known of a model that is ready to run."""

    @property
    def memory(self) -> MemoryPlan:
        """The sizes of the replica, and how its memory was divided."""
        ...

    @property
    def num_parameters(self) -> int:
        """All weights; tied ones count once."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the type of the weights, or how they are quantized."""
        ...

    @property
    def num_threads(self) -> int:
        """The number of compute threads."""
        ...

    @property
    def summary(self) -> str:
        """A short description of the model for the log."""
        ...

    @property
    def attention(self) -> str | None:
        """How attention reads keys and values, in words; None if the engine does not say."""
        ...


class ModelReplica:
    """One model on its share of a device, a thread that tokenizes, and channels to ingresses.

    A subclass starts its model in `_start`, stops it in `_stop`, applies settings in `_apply`, and
    says how it is in `_check_health` and `_is_dead`.
    """

    _facts: ModelFacts
    """Set by `_start`."""
    _metrics: ReplicaMetrics
    """Set by `_start`."""
    _sleeper: LightSleeper
    """Set by `_start`."""
    _deep_sleep: DeepSleep
    """Set with `_sleeper`."""
    _fingerprint: str | None = None
    _refused_user_config: str | None = None
    """Why the last `user_config` was refused; None if it applies."""
    _table: tuple[Metric, ...] = ANY_REPLICA
    """The definitions of the replica's metrics."""

    def __init__(
        self,
        spec: ModelSpec,
        open_device: Callable[[ModelSpec], MemoryDevice] = open_assigned_device,
        end_process: Callable[[], None] = end_own_actor,
    ) -> None:
        """Load the model onto its share of the device and warm it up.

        Args:
            spec: The model.
            open_device: Returns the device for the model.
            end_process: Ends this process, if that may be.

        Raises:
            UnsupportedModelError: The model can't be served, or any error that the next attempt
                would meet, too; one line says why.
            DeviceMemoryError: The share of the device is too small.
            Exception: One of `PASSING`, without the errors that led to it: Serve shows it as it is,
                and the replica's log file has the rest.
        """
        self._phases = StartPhases.of_process()
        self._spec = spec
        self._end_process = end_process
        self._replica_id = _own_id()
        self._progress = StartProgress(self._replica_id)
        _count_weights(self._progress)
        board = StartBoard(self._progress)
        self._used_s = -inf
        self._tracer = open_tracer(spec.tracing, "raystream-replica", self._replica_id)
        self._spans = (
            None if self._tracer is None else ModelSpans(self._tracer, spec.id, SpanKind.SERVER)
        )
        self._channels = ChannelServer(node_address(), TlsFiles.of(os.environ))
        self._store = MetricStore(self._table, own_deployment(), self._replica_id)
        self._ray_metrics = RayMetrics(self._store)
        self._encoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        try:
            self._device = open_device(spec)
            self._monitor = _monitor_of(
                spec, self._device, self._read_memory(), MemoryMetrics(self._store, spec.id)
            )
            self._monitor.start()
            self._start()
        except Exception as error:  # noqa: BLE001 - raised again
            self._log("can't start", error)
            raise _to_raise(error).with_traceback(None) from None
        finally:
            board.close()
        self._phases.end("rest")
        if is_actor():  # else the process may have begun long before
            note_start(spec, self._phases.total_s)
        logger.info(
            "%s is ready after %.1f s (%s) on %s: share %g of the device, %d compute thread(s), %s",
            spec.id,
            self._phases.total_s,
            self._phases,
            self._device.name,
            spec.device_share,
            self._facts.num_threads,
            self._facts.summary,
        )
        if comparison := self._facts.memory.comparison:
            logger.info("%s: %s", spec.id, comparison)
        self._ready_unix_s = time.time()
        self._store.gauge(STARTED.name, spec.id).set(self._ready_unix_s)
        self._health = _Health(ReplicaState.HEALTHY, self._ready_unix_s)

    def reconfigure(self, user_config: object) -> None:
        """Set how requests are batched, and how much may wait; refuse nonsense without an error.

        Serve would kill a replica that raises here, however well it serves. So it keeps its
        settings, or those of the model's entry if it has only started, and says so in its log and
        in its report.

        Args:
            user_config: A mapping of `max_batch_size`, the most requests that are tokenized in one
                call; `batch_wait_timeout_s`, how long the first of them waits for others; and
                `max_queued_requests` and `max_queued_tokens`, which replace the model entry's.
        """
        try:
            given = given_settings(user_config)
        except ValueError as error:
            self._refused_user_config = str(error)
            logger.error(
                "%s: user_config is refused, and the settings stay as they are: %s",
                self._spec.id,
                error,
            )
            return
        self._refused_user_config = None
        self._apply(given)

    async def inspect(self) -> ReplicaReport:
        """Return what an operator wants to know; it costs no step of the model."""
        return ReplicaReport(
            replica_id=self._replica_id,
            node=node_address(),
            process_id=os.getpid(),
            device=self._device.name,
            share=self._spec.device_share,
            state=self._health.state,
            state_unix_s=self._health.unix_s,
            ready_unix_s=self._ready_unix_s,
            plan=self._facts.memory,
            memory=self._monitor.report,
            work=self._work,
            refused_user_config=self._refused_user_config,
            attention=self._facts.attention,
            light_sleep=self._light_sleep,
        )

    def record_replica_metadata(self) -> dict[str, str | None]:
        """Return what Serve tells the callers of this replica; asked once, after the start."""
        return {"fingerprint": self._fingerprint}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load, which Serve passes to the autoscaling policy."""
        load = replace(
            self._load,
            kept=float(self._deep_sleep.is_kept(self._sleeper)),
            ending=float(self._deep_sleep.is_ending(self._sleeper)),
        )
        return load.as_stats()

    async def ping(self) -> None:
        """Wait until the model has worked; one that sleeps lightly sleeps on.

        Raises:
            RaystreamError: It is broken.
        """
        raise NotImplementedError

    async def wake(self) -> None:
        """Wake the model from a light sleep, and wait until it has worked.

        Raises:
            RaystreamError: It is broken, or the weights can't be read.
        """
        with self._sleeper.in_use() as use:
            await self._sleeper.awake(use)
            await self.ping()

    async def read_metrics(self) -> Snapshot:
        """Return the values of this replica's metrics."""
        self._metrics.observe_waits(self._waits)
        return self._store.snapshot()

    def _note_use(self) -> None:
        """Note that somebody uses the model now."""
        self._used_s = time.monotonic()

    @property
    def _was_used(self) -> float:
        """1 if the model was used lately, else 0: Serve asks only from time to time."""
        return float(time.monotonic() - self._used_s < RECENT_S)

    def _apply(self, given: Mapping[str, float]) -> None:
        """Apply settings; those that are not given get their defaults."""
        raise NotImplementedError

    @property
    def _load(self) -> ReplicaLoad:
        """The load of this moment."""
        raise NotImplementedError

    @property
    def _footprint(self) -> Footprint:
        """What the replica holds of its model, and where."""
        facts = self._facts
        return Footprint(
            num_parameters=facts.num_parameters,
            weight_bytes=facts.memory.weight_bytes,
            dtype=facts.dtype,
            device=self._device.name,
        )

    @property
    def _waits(self) -> Waits:
        """Why and how long requests wait here; `NO_WAITS` itself if none does."""
        raise NotImplementedError

    @property
    def _light_sleep(self) -> LightSleep | None:
        """Whether its model sleeps lightly; None for one that never does."""
        report = self._deep_sleep.report(self._sleeper)
        if report is None:
            return None
        return replace(report, level=self._sleep_level if report.num_sleeps else None)

    @property
    def _sleep_level(self) -> int | None:
        """Where the weights are while the model sleeps; see `LightSleep`."""
        return 2

    @staticmethod
    def _used_memory() -> float:
        """Return the part of the machine's or the container's memory that is in use."""
        return cgroup.used_share()

    def _own_turn(self) -> OwnTurn | None:
        """Return the turns of this replica's light group, which it may load now; None without one.

        It waits until no other model of the group holds memory on this node.

        Raises:
            RuntimeError: Serve has stopped the replica meanwhile.
        """
        turn = OwnTurn.of(self._spec.turn_group)
        if turn is None:
            return None
        self._phases.end("preparing")
        self._progress.begin(StartPhase.WAITING)
        if not turn.wait_to_load(is_stopped):
            self._end_process()
            raise RuntimeError("Serve has stopped the replica before it could load.")
        wait_for_share(self._device, self._spec.device_share)
        self._progress.begin(StartPhase.PREPARING)
        self._phases.leave_out()
        return turn

    def _open_sleeper(
        self,
        engine: Sleeper,
        turn: OwnTurn | None,
        park: Callable[[], None],
        abort: Callable[[], None],
    ) -> LightSleeper:
        """Return what puts the model to sleep.

        Args:
            engine: The engine.
            turn: See `_own_turn`.
            park: See `TurnEnd`.
            abort: See `TurnEnd`.
        """
        read_memory, on_cpu = self._read_memory(), self._device.torch_device.type == "cpu"
        self._deep_sleep = DeepSleep(self._spec, MemoryPressure(self._used_memory))
        end = None
        if turn is not None:
            end = TurnEnd(park, abort, graceful_shutdown_timeout_s(), self._end_process)
        sleeper = LightSleeper(
            engine,
            self._deep_sleep.light_after_s,
            unshared_bytes if on_cpu else lambda: read_memory().held_bytes,
            _observer_of_sleep(self._spec, self._metrics),
            is_pinned,
            turn=turn,
            turn_end=end,
            ends_instead=self._deep_sleep.ends_instead,
        )
        if turn is not None:
            sleeper.watch()  # it may have loaded in the turn of another model
        return sleeper

    @property
    def _work(self) -> WorkCounts:
        """What the replica does and has done."""
        raise NotImplementedError

    def _read_memory(self) -> Callable[[], MemoryUse]:
        """Return what reads the memory in use; it does not hold the replica."""
        return memory_reader(self._device)

    def _start(self) -> None:
        """Load the model, and start the threads that run it."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Stop the threads that `_start` has started; `_start` may have failed at any point."""
        raise NotImplementedError

    async def check_health(self) -> None:
        """Raise unless the model has worked since the last call, or works now.

        A replica that won't work again says so in one line, and ends its process: Serve replaces it
        at once. Its requests have moved by then, or move now.

        Raises:
            ReplicaUnavailableError: The replica hung; its streams have moved.
            Exception: The model fails; Serve replaces the replica after three such checks.
        """
        if self._channels.was_given_up:
            self._note_health(ReplicaState.FAILING)
            raise ReplicaUnavailableError("The replica hung for seconds, and was taken for lost.")
        try:
            await self._check_health()
        except Exception as error:
            self._note_health(ReplicaState.FAILING)
            if self._is_dead:
                self._end(error)
            raise
        self._note_health(ReplicaState.HEALTHY)

    def _note_health(self, state: ReplicaState) -> None:
        if state is not self._health.state:
            self._health = _Health(state, time.time())

    def _end(self, error: Exception) -> None:
        """Log why the replica ends, and end its process."""
        self._log("can't go on and is replaced", error)
        self._send_spans()
        self._end_process()

    def _log(self, what: str, error: Exception) -> None:
        """Log an error in one line, and with its traceback in the file only."""
        logger.error("%s %s: %s", self._spec.id, what, _in_one_line(error))
        # Serve's handlers write a record with this mark to the file only.
        logger.error("the traceback", exc_info=error, extra={"log_to_stderr": False})

    async def _check_health(self) -> None:
        """Raise unless the model has worked since the last call, or works now."""
        raise NotImplementedError

    @property
    def _is_dead(self) -> bool:
        """Whether the threads that run the model have ended, or hang."""
        raise NotImplementedError

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """End the threads when Serve drops the replica, after the calls through the channels.

        Serve has waited for its own calls, and awaits what this returns. It kills the replica after
        `graceful_shutdown_timeout_s`. While a call is open, Python does not drop the replica.
        """
        calls = self._channels.calls if hasattr(self, "_channels") else None
        if calls is not None and calls.num_open:
            return self._end_after(calls)
        self._end_threads()
        return None

    async def _end_after(self, calls: Calls) -> None:
        await calls.ended()
        self._end_threads()

    def _end_threads(self) -> None:
        try:
            if hasattr(self, "_monitor"):
                self._monitor.stop()
            if hasattr(self, "_sleeper"):
                self._sleeper.close()
                self._deep_sleep.close()
            # A subclass may have failed before it called `__init__`.
            if hasattr(self, "_encoding"):
                self._stop()
                self._channels.close()
                self._encoding.shutdown(wait=False)
                self._ray_metrics.close()
        finally:
            if hasattr(self, "_tracer"):
                self._send_spans()

    def _send_spans(self) -> None:
        """Send the last spans, which takes a second at most."""
        if self._tracer is not None:
            self._tracer.close()


@dataclass(frozen=True, slots=True)
class _Health:
    """The state by the latest health check, and since when it is so."""

    state: ReplicaState
    unix_s: float


def _monitor_of(
    spec: ModelSpec, device: MemoryDevice, read: Callable[[], MemoryUse], metrics: MemoryMetrics
) -> MemoryMonitor:
    """Return a monitor that logs and counts warnings; it does not hold the replica."""
    is_gpu = device.torch_device.type == "cuda"

    def tell(warning: MemoryWarning) -> None:
        if warning.ended_unix_s is not None:
            logger.info("%s: memory is no longer short (%s)", spec.id, warning.of)
            return
        metrics.count_warning(warning)
        short = SHORT_OF[warning.of].format(
            used=warning.used_bytes / GIB, limit=warning.limit_bytes / GIB, device=device.name
        )
        logger.warning("%s: memory is short: %s", spec.id, short)

    # None on a CPU, and where no figure of the GPUs is known.
    share_bytes = int(device.total_bytes * spec.device_share) or None if is_gpu else None
    return MemoryMonitor(read, share_bytes, metrics.observe, tell)


def _observer_of_sleep(spec: ModelSpec, metrics: ReplicaMetrics) -> Callable[[LightSleep], None]:
    """Return what records how a replica sleeps; it does not hold the replica.

    How long a wake took is kept for those who plan.
    """

    def observe(report: LightSleep) -> None:
        metrics.observe_sleep(report)
        if report.state is SleepState.AWAKE and report.last_wake_s is not None and is_actor():
            note_wake(spec, report.last_wake_s)

    return observe


def _own_id() -> str:
    """Return Serve's id of this replica; a new one if Serve does not run it."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return uuid4().hex


def node_address() -> str:
    """Return the address of this node in Ray's cluster; the loopback's if Ray does not run."""
    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"  # type: ignore[no-untyped-call] # Ray leaves it untyped


def _to_raise(error: Exception) -> Exception:
    """Return what Serve is told of a start that failed: `raystream serve` reads the class."""
    if isinstance(error, (UnsupportedModelError, *PASSING)):
        return error
    return UnsupportedModelError(reason_of(error))


def _in_one_line(error: BaseException) -> str:
    """Return an error and its cause; an error about a model's files says all itself."""
    line = reason_of(error)
    if error.__cause__ is None or isinstance(error, UnsupportedModelError):
        return line
    return f"{line} ({type(error.__cause__).__name__}: {_in_one_line(error.__cause__)})"


def _count_weights(progress: StartProgress) -> None:
    """Count the tensors that transformers loads, and hide its bar: a log holds tatters of it."""

    def bar(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") == "Loading weights" and args:
            tensors, *others = args
            progress.expect_tensors(len(tensors))
            args, kwargs = (_counted(tensors, progress), *others), kwargs | {"disable": True}
        return make(*args, **kwargs)

    transformers_logging.set_tqdm_hook(bar)


def _counted(tensors: Iterable[T], progress: StartProgress) -> Iterator[T]:
    for each in tensors:
        yield each
        progress.add(num_tensors=1)
