"""How requests reach an engine: each way must give the tokens that `generate` gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deployments.engine.model_loader import LoadedModel
from deployments.engine.sequence import SequenceRequest
from tests.engine.collector import Collector
from tests.engine.tiny_models import make_engine


@dataclass(frozen=True)
class Scenario:
    """Circumstances that must change nothing.

    Attributes:
        num_slots: Sequences that run at once.
        budget: Tokens in one step.
        steps_between: Steps after each arrival.
        is_victim_every: Each so-maniest request is aborted while it runs; 0 spares all.
        num_generated: Tokens that each request brings along.
    """

    num_slots: int = 8
    budget: int = 256
    steps_between: int = 0
    is_victim_every: int = 0
    num_generated: int = 0


SCENARIOS: Mapping[str, Scenario] = {
    "staggered arrivals": Scenario(num_slots=3, budget=24, steps_between=2),
    "aborts in between": Scenario(num_slots=3, budget=24, is_victim_every=3),
    "prefill in chunks": Scenario(budget=8),
    "fewer slots than requests": Scenario(num_slots=2),
    "resumed elsewhere": Scenario(num_generated=5),
}


def run(
    scenario: Scenario,
    loaded: LoadedModel,
    requests: Sequence[SequenceRequest],
    expected: Mapping[str, list[int]],
) -> dict[str, list[int]]:
    """Return the tokens of each request that was not aborted, those that it brought included."""
    engine = make_engine(loaded, num_slots=scenario.num_slots, budget=scenario.budget)
    collector = Collector(engine)
    brought = {
        name: ids[: min(scenario.num_generated, len(ids) - 1)] for name, ids in expected.items()
    }
    victims = [r.sequence_id for r in requests][:: scenario.is_victim_every or len(requests) + 1]
    for request in requests:
        generated = tuple(brought[request.sequence_id])
        engine.add(replace(request, generated_token_ids=generated))
        for _ in range(scenario.steps_between):
            collector.step()
    for victim in victims if scenario.is_victim_every else ():
        collector.step()
        collector.step()
        engine.abort(victim)
    collector.run()
    spared = [name for name in expected if not (scenario.is_victim_every and name in victims)]
    return {name: brought[name] + collector.token_ids(name) for name in spared}
