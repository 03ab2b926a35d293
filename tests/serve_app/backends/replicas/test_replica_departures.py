import asyncio
from typing import TYPE_CHECKING

from serve_app.backends.replicas.replica_departures import Departure, Departures, ServeReplicas
from serve_app.backends.replicas.running_replicas import ReplicaFacts, RunningReplicas
from tests.stopped_clock import settle

if TYPE_CHECKING:
    from collections.abc import Mapping

A = ReplicaFacts("a", "node-1", "fp_1")
B = ReplicaFacts("b", "node-2", "fp_1")
OTHER = ReplicaFacts("c", "node-2", "fp_2")


class Model:
    """A model whose replicas the test starts and stops."""

    def __init__(self, *replicas: ReplicaFacts) -> None:
        self.running = RunningReplicas()
        self.running.replace(replicas)
        self.states: Mapping[str, str] | Exception = {}
        self.is_any_wanted = True
        self.num_asked = 0
        self.told: list[str] = []
        self.parked: list[str] = []
        self.is_told = asyncio.Event()
        self.departures = Departures(self.running, self._ask)

    async def _ask(self) -> ServeReplicas:
        self.num_asked += 1
        if isinstance(self.states, Exception):
            raise self.states
        return ServeReplicas(self.states, self.is_any_wanted)

    def open(self, replica_id: str) -> None:
        def tell(departure: Departure) -> None:
            self._tell(replica_id, departure)

        self.close = self.departures.watch(replica_id, tell)

    async def tell(self) -> list[str]:
        """Tell streams to leave, and return all that were told."""
        await self.departures.tell()
        return self.told

    def _tell(self, replica_id: str, departure: Departure) -> None:
        (self.told if departure is Departure.MOVE else self.parked).append(replica_id)
        self.is_told.set()


async def test_streams_of_a_replica_that_is_stopped_are_told_until_they_have_left() -> None:
    model = Model(A, B)
    model.open("a")
    assert await model.tell() == []
    model.running.replace([B])
    model.states = {"a": "STOPPING", "b": "RUNNING"}
    await model.departures.tell()
    assert await model.tell() == ["a", "a"]
    model.close()
    assert await model.tell() == ["a", "a"]


async def test_streams_of_a_replica_that_is_gone_are_told() -> None:
    model = Model(A, B)
    model.open("a")
    model.running.replace([B])
    assert await model.tell() == ["a"]


async def test_a_replica_that_is_reconfigured_keeps_its_streams() -> None:
    model = Model(A, B)
    model.open("a")
    model.running.replace([B])
    model.states = {"a": "UPDATING", "b": "RUNNING"}
    await model.departures.tell()
    model.running.replace([A, B])
    assert await model.tell() == []


async def test_a_controller_that_does_not_answer_moves_nothing() -> None:
    model = Model(A, B)
    model.open("a")
    model.running.replace([B])
    model.states = RuntimeError("the controller restarts")
    assert await model.tell() == []
    model.states = {"a": "STOPPING"}
    assert await model.tell() == ["a"]


async def test_the_controller_is_asked_only_about_replicas_that_hold_streams() -> None:
    model = Model(A, B)
    model.running.replace([B])
    await model.departures.tell()
    assert model.num_asked == 0
    model.open("a")
    for _ in range(3):
        await model.departures.tell()
    assert model.num_asked == 1


async def test_without_another_replica_of_the_version_a_stream_stays() -> None:
    model = Model(A)
    model.open("a")
    model.running.replace([OTHER])
    assert await model.tell() == []
    model.running.replace([OTHER, B])
    assert await model.tell() == ["a"]


async def test_streams_are_parked_if_the_last_replica_is_stopped_and_serve_wants_none() -> None:
    model = Model(A)
    model.open("a")
    model.running.replace([])
    model.states, model.is_any_wanted = {"a": "STOPPING"}, False
    assert await model.tell() == []
    assert model.parked == ["a"]
    model.open("a")  # one that was being accepted
    await settle()
    assert model.parked == ["a", "a"]


async def test_streams_stay_if_the_last_replica_is_stopped_and_serve_wants_another() -> None:
    model = Model(A)
    model.open("a")
    model.running.replace([])
    model.states = {"a": "STOPPING"}
    assert await model.tell() == []
    assert model.parked == []
    model.is_any_wanted = False  # a turn ends while the next replica has not begun
    await model.tell()
    assert model.parked == ["a"]


async def test_streams_move_to_a_replica_that_is_left_though_serve_wants_none_of_them() -> None:
    model = Model(A, B)
    model.open("a")
    model.running.replace([B])
    model.states, model.is_any_wanted = {"a": "STOPPING", "b": "RUNNING"}, False
    assert await model.tell() == ["a"]
    assert model.parked == []


async def test_a_turn_is_over_if_no_other_replica_runs_and_serve_wants_none() -> None:
    model = Model(A, B)
    model.is_any_wanted = False
    assert not await model.departures.is_turn_over("a")
    assert model.num_asked == 0
    model.running.replace([A])  # which has died, and nobody has noticed yet
    assert await model.departures.is_turn_over("a")
    model.running.replace([])
    assert await model.departures.is_turn_over("a")
    model.is_any_wanted = True
    assert not await model.departures.is_turn_over("a")
    model.states = RuntimeError("the controller restarts")
    assert not await model.departures.is_turn_over("a")


async def test_streams_leave_a_node_that_is_about_to_stop() -> None:
    model = Model(A, B)
    model.open("a")
    model.running.set_draining_nodes(frozenset({"node-1"}))
    assert await model.tell() == ["a"]
    model.running.set_draining_nodes(frozenset({"node-1", "node-2"}))
    assert await model.tell() == ["a"]


async def test_a_stream_that_a_leaving_replica_accepts_is_told_at_once() -> None:
    model = Model(A, B)
    model.running.set_draining_nodes(frozenset({"node-1"}))
    model.open("a")
    await settle()
    assert model.told == ["a"]


async def test_changes_in_another_thread_are_noticed() -> None:
    model = Model(A, B)
    model.open("a")
    running = asyncio.create_task(model.departures.run())
    await settle()
    async with asyncio.timeout(30):
        await asyncio.to_thread(model.running.replace, [B])
        await model.is_told.wait()
    running.cancel()
    await asyncio.wait([running])


def test_requests_are_kept_to_their_version_and_off_nodes_that_stop() -> None:
    model = Model(A, B, OTHER)
    assert model.running.suits("a", None)
    assert model.running.suits("a", "fp_1")
    assert not model.running.suits("c", "fp_1")
    assert not model.running.suits("unknown", None)
    model.running.set_draining_nodes(frozenset({"node-1"}))
    assert not model.running.suits("a", None)


def test_only_some_replicas_are_remembered_after_they_have_left() -> None:
    running = RunningReplicas()
    for number in range(1000):
        running.replace([ReplicaFacts(str(number), None)])
    assert running.find("998") is not None
    assert running.find("0") is None
