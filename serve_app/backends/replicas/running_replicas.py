"""The replicas of each model that Serve routes to, as this process knows them.

Serve's routers (`model_router`) write this down in their own thread; `replica_departures` reads it
on the event loop. All values are replaced as a whole and never changed, so readers need no lock.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from serve_app.backends.replicas.prefix_memory import PrefixMemory

MAX_NUM_LEFT: Final = 256
"""How many replicas are remembered after they have left."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What is known about a replica from outside.

    Attributes:
        replica_id: As Serve names it, and as in its own answers.
        node_id: The node that it runs on.
        fingerprint: Of its model; None for a pooler.
    """

    replica_id: str
    node_id: str | None
    fingerprint: str | None = None


class RunningReplicas:
    """The replicas of one model that run, and those on nodes that are about to stop.

    Attributes:
        prefixes: Which of them have run prompts with which beginnings.
        num_seen: How many have run since this process began to look.
    """

    def __init__(self) -> None:
        self.prefixes = PrefixMemory()
        self.num_seen = 0
        self._by_id: Mapping[str, ReplicaFacts] = {}
        self._left: dict[str, ReplicaFacts] = {}
        self._draining_nodes: frozenset[str] = frozenset()
        self._listeners: tuple[Callable[[], object], ...] = ()

    def replace(self, replicas: Iterable[ReplicaFacts]) -> None:
        """Note which replicas run now; callable in any thread."""
        now = {each.replica_id: each for each in replicas}
        self.num_seen += len(now.keys() - self._by_id.keys() - self._left.keys())
        left = {key: each for key, each in self._by_id.items() if key not in now}
        recent = list({**self._left, **left}.items())[-MAX_NUM_LEFT:]
        self._left = {key: each for key, each in recent if key not in now}
        self._by_id = now
        self._tell()

    def set_draining_nodes(self, node_ids: frozenset[str]) -> None:
        """Note which nodes are about to stop; callable in any thread."""
        if node_ids != self._draining_nodes:
            self._draining_nodes = node_ids
            self._tell()

    def listen(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call a function after each change, in the thread that makes it.

        Returns:
            Ends that.
        """
        self._listeners = (*self._listeners, listener)
        return lambda: self._forget(listener)

    def _forget(self, listener: Callable[[], object]) -> None:
        self._listeners = tuple(each for each in self._listeners if each is not listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def find(self, replica_id: str) -> ReplicaFacts | None:
        """Return what is known about a replica that runs, or has left lately."""
        return self._by_id.get(replica_id) or self._left.get(replica_id)

    @property
    def ids(self) -> frozenset[str]:
        """The replicas that Serve routes to."""
        return frozenset(self._by_id)

    @property
    def open_ids(self) -> frozenset[str]:
        """Those that take new requests: none on a node that is about to stop."""
        return frozenset(id_ for id_ in self._by_id if self.suits(id_, None))

    @property
    def has_any(self) -> bool:
        """Whether Serve routes to any replica."""
        return bool(self._by_id)

    def is_running(self, replica_id: str) -> bool:
        """Return whether Serve routes to a replica."""
        return replica_id in self._by_id

    def is_on_draining_node(self, replica: ReplicaFacts) -> bool:
        """Return whether a replica's node is about to stop."""
        return replica.node_id in self._draining_nodes

    def has_left(self, replica_id: str) -> bool:
        """Return whether Serve no longer routes to a replica, and did lately."""
        return replica_id in self._left

    def suits(self, replica_id: str, fingerprint: str | None) -> bool:
        """Return whether a replica may take a request.

        Args:
            replica_id: The replica.
            fingerprint: The version that the request needs; None takes any.
        """
        replica = self._by_id.get(replica_id)
        if replica is None or self.is_on_draining_node(replica):
            return False
        return fingerprint in (None, replica.fingerprint)

    def has_successor(self, replica: ReplicaFacts) -> bool:
        """Return whether another replica of the same version can go on with a replica's streams."""
        return any(
            self.suits(each.replica_id, replica.fingerprint)
            for each in self._by_id.values()
            if each.replica_id != replica.replica_id
        )


_models: Final[dict[str, RunningReplicas]] = {}


def running_replicas_of(app: str, deployment: str) -> RunningReplicas:
    """Return this process's only `RunningReplicas` of a deployment; callable in any thread.

    Serve makes routers by itself, so nothing else could hand it to them.
    """
    return _models.setdefault(f"{app}#{deployment}", RunningReplicas())
