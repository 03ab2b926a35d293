"""Ways for requests to reach an engine; each must give the tokens of `generate`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deployments.engine.model.loader import LoadedModel
from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine.collector import Collector
from tests.engine.tiny_models import make_engine


@dataclass(frozen=True)
class Scenario:
    """Circumstances that must not change any token."""

    max_num_seqs: int = 8  # most sequences that run at once
    budget: int = 256  # most tokens in one step
    steps_between: int = 0  # steps after each arrival
    victims: tuple[int, ...] = ()  # indices of the requests that are aborted while others run
    num_generated: int = 0  # generated tokens that each request brings along
    is_warm: bool = False  # whether the engine has warmed up and runs the traced model
    # How many sequences of full length the KV memory holds; None for all.
    memory: float | None = None


SCENARIOS: Mapping[str, Scenario] = {
    # Tracing is slow; one scenario in which rows of all kinds meet is enough.
    "staggered arrivals": Scenario(max_num_seqs=3, budget=24, steps_between=2, is_warm=True),
    "aborts in between": Scenario(max_num_seqs=3, budget=24, victims=(0, 3)),
    "prefill in chunks": Scenario(budget=8),
    "fewer places than requests": Scenario(max_num_seqs=2),
    "too little memory for all": Scenario(steps_between=1, memory=1.5),
    "resumed elsewhere": Scenario(num_generated=5),
}


def run(
    scenario: Scenario,
    loaded: LoadedModel,
    requests: Sequence[SequenceRequest],
    expected: Mapping[str, list[int]],
) -> dict[str, list[int]]:
    """Run requests greedily on an engine of their own; `expected` are their tokens by their ids.

    Some of the tokens may come with the request. Return the tokens of each request that was not
    aborted, including those it brought along.
    """
    engine = make_engine(
        loaded, max_num_seqs=scenario.max_num_seqs, budget=scenario.budget, memory=scenario.memory
    )
    if scenario.is_warm:
        engine.warm_up()
    collector = Collector(engine)
    # Leave out the last token: a request with all its tokens would be refused.
    brought = {name: ids[:-1][: scenario.num_generated] for name, ids in expected.items()}
    for request in requests:
        generated = tuple(brought[request.sequence_id])
        engine.add(replace(request, generated_token_ids=generated))
        for _ in range(scenario.steps_between):
            collector.step()
    victims = [requests[place].sequence_id for place in scenario.victims]
    for victim in victims:
        collector.step()
        collector.step()
        engine.abort(victim)
    collector.run()
    return {
        name: tokens + collector.token_ids(name)
        for name, tokens in brought.items()
        if name not in victims
    }
