"""A cluster that never ran."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deployments.contract.model_spec import ModelSpec


@dataclass
class Cluster:
    """This node, and others that say what is wrong with a model there; see `Nodes`."""

    others: Sequence[str | None] = ()
    nodes: Sequence[Mapping[str, float]] = ({"CPU": 2.0},)
    asked: list[str] = field(default_factory=list)

    def resources(self) -> Sequence[Mapping[str, float]]:
        return self.nodes

    def problems_elsewhere(self, spec: ModelSpec) -> Iterator[str | None]:
        for why in self.others:
            self.asked.append(spec.id)
            yield why
