"""Models' files, read without a replica and without their weights.

Tasks of Ray read them: the ingress imports no model, and each node may have folders of its own.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.contract.descriptions import ModelDescription, PoolerDescription
from deployments.contract.errors import ReplicaUnavailableError
from deployments.contract.model_spec import ModelSpec
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.plan.checkpoint import CONFIG_FILE, check_checkpoint, find_file
from serve_app import vllm_environment

GENERATOR = "deployments.file_description"
POOLER = "deployments.pooler_description"

LOADERS: Final = {
    True: "deployments.engine.model.loader",
    False: "deployments.pooling.model_outline",
}
"""The module that reads a model's configuration, by whether it generates."""

NODES_TIMEOUT_S: Final = 60.0
"""How long the other nodes have to read a configuration; with their imports it takes seconds."""

MAX_WAIT_S: Final = 10.0
"""How long a description waits for those before it, of which one may download from a hub."""


class FileDescriptions:
    """Describes models by their files, one after the other.

    Ray gives a task the process of the task before, which has imported what takes seconds. Tasks at
    the same time would each have a process of their own.
    """

    def __init__(self, specs: Mapping[str, ModelSpec]) -> None:
        """Take the models, by id; nothing is read yet."""
        self._specs = specs
        self._describing = asyncio.Lock()

    async def of(self, model_id: str) -> ModelDescription | PoolerDescription:
        """Describe a model.

        Raises:
            ReplicaUnavailableError: The files can't be read.
        """
        spec = self._specs[model_id]
        module = GENERATOR if spec.entry.task == "generate" else POOLER
        is_alone = await self._others_end()
        try:
            described: ModelDescription | PoolerDescription = await _describe.remote(module, spec)
        except Exception as error:
            raise ReplicaUnavailableError(
                f"The files of the model {model_id!r} can't be read."
            ) from error
        finally:
            if is_alone:
                self._describing.release()
        return described

    async def _others_end(self) -> bool:
        """Wait until no other model is described; return False if that takes long."""
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                return await self._describing.acquire()
        except TimeoutError:
            return False


@ray.remote(num_cpus=0)
def _describe(module: str, spec: ModelSpec) -> Any:
    return import_module(module).describe_files(spec)


class Nodes(Protocol):
    """The nodes that replicas may run on."""

    def resources(self) -> Sequence[Mapping[str, float]]:
        """Return the resources of each node, this one's, too."""
        ...

    def problems_elsewhere(self, spec: ModelSpec) -> Iterator[str | None]:
        """Yield `problem_of` on each node but this, as they come; None if a node does not answer.

        Args:
            spec: The model.
        """
        ...


class RayNodes:
    """The nodes of Ray's cluster."""

    def resources(self) -> Sequence[Mapping[str, float]]:
        """Return the resources of each node; see `Nodes`."""
        return [node["Resources"] for node in self._alive()]

    def problems_elsewhere(self, spec: ModelSpec) -> Iterator[str | None]:
        """Ask each node but this one; see `Nodes`."""
        here = ray.get_runtime_context().get_node_id()
        return self.problems_at((node["NodeID"] for node in self._alive()), spec, besides=here)

    def problems_at(
        self, node_ids: Iterable[str], spec: ModelSpec, besides: str | None = None
    ) -> Iterator[str | None]:
        """Ask these nodes, each of which gives one answer; see `Nodes.problems_elsewhere`."""
        asked = [
            _problem_of.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
            ).remote(spec)
            for node_id in node_ids
            if node_id != besides
        ]
        while asked:
            done, asked = ray.wait(asked, timeout=NODES_TIMEOUT_S)
            if not done:  # what comes later would be a node's second answer
                yield from [None] * len(asked)
                return
            try:
                yield ray.get(done[0])
            except RayError:  # the node has gone
                yield None

    def _alive(self) -> Iterator[Mapping[str, Any]]:
        return (node for node in ray.nodes() if node["Alive"])  # type: ignore[no-untyped-call] # Ray leaves it untyped


def unreadable(specs: Iterable[ModelSpec], nodes: Nodes | None = None) -> Iterator[str]:
    """Yield why models' configurations can't be read, or show that they can't be served.

    Their replicas would fail at once, and in a roll-out only after others have stopped for them. A
    model passes if any node can read it, if a node does not say, and if no node of today could hold
    a replica: one that comes with the load may.

    Args:
        specs: The models.
        nodes: The nodes that replicas may run on; None means those of Ray's cluster. The others are
            asked about models that can't be read on this one.
    """
    nodes = nodes or RayNodes()
    for spec in specs:
        why = problem_of(spec)
        if (
            why is not None
            and any(_can_hold(each, spec) for each in nodes.resources())
            and None not in nodes.problems_elsewhere(spec)
        ):
            yield f"{spec.id}: {why}"


def _can_hold(resources: Mapping[str, float], spec: ModelSpec) -> bool:
    """Return whether a node may hold a replica, which the file may let need less of the CPU."""
    num_gpus = 1.0 if spec.entry.engine_args.uses_ray else spec.num_gpus
    return resources.get("GPU", 0.0) >= num_gpus and resources.get("CPU", 0.0) > 0


def problem_of(spec: ModelSpec) -> str | None:
    """Return why a replica on this node could not read a model's configuration; None if it could.

    What is on the hub and not here yet is downloaded: the configuration only. Of a model that vLLM
    runs, the node's environment is looked at: what models it runs, only vLLM knows.
    """
    if spec.entry.engine == "vllm":
        return _problem_of_vllm(spec)
    loader = import_module(LOADERS[spec.entry.task == "generate"])
    try:
        loader.load_config(spec.source, revision=spec.entry.revision)
    except ValueError as error:
        return str(error)
    return None


def _problem_of_vllm(spec: ModelSpec) -> str | None:
    source, revision, is_fleet = spec.source, spec.entry.revision, bool(spec.entry.engine_urls)
    try:
        if not is_fleet:
            check_checkpoint(source, revision, may_be_quantized=True)
    except UnsupportedModelError as error:
        return str(error)
    if find_file(source, revision, CONFIG_FILE) is None:
        return f"can't load {source!r}: there is no such folder or repository, or no {CONFIG_FILE}"
    if is_fleet:
        return None
    return next(vllm_environment.problems(vllm_environment.folder_of(spec.entry)), None)


@ray.remote(num_cpus=0)
def _problem_of(spec: ModelSpec) -> str | None:
    return problem_of(spec)
