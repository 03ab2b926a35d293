"""The least number of loads with which an order that knows all that will come serves requests.

What `deployments.turns` decides is compared with it, in simulations and in the measurement.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple


class State(NamedTuple):
    """The model that runs, and when the oldest request that waits has come, by model."""

    holder: str
    oldest: tuple[tuple[str, float], ...]

    def with_arrival(self, model: str, came_s: float) -> "State":
        """Return the state after a request, which is served at once if its model runs."""
        if model == self.holder or model in dict(self.oldest):
            return self
        return State(self.holder, tuple(sorted((*self.oldest, (model, came_s)))))

    def after(self, loaded: Sequence[str]) -> "State":
        """Return the state after models were loaded, each of which has served what waited."""
        left = tuple(each for each in self.oldest if each[0] not in loaded)
        return State(loaded[-1], left)


def least_loads(requests: Iterable[tuple[str, float]], most_wait_s: float) -> int:
    """Return the least number of loads with which no request waits longer than a given time.

    The order knows all requests, swaps in no time, and finishes a request as soon as it begins. So
    no real order needs fewer. It chooses the model that it begins with; that one's load counts.

    A swap before a request has to be served gains nothing: those of the model that runs need none,
    and those of the others can be served together. So models are loaded only then.

    Args:
        requests: The model of each request, and when it comes.
        most_wait_s: The most seconds from when a request comes until its model runs.
    """
    requests = list(requests)
    models = sorted({model for model, _ in requests})
    come = [(came_s, False, model, came_s) for model, came_s in requests]
    due = [(came_s + most_wait_s, True, model, came_s) for model, came_s in requests]
    num_loads = {State(model, ()): 1 for model in models}
    for _, is_due, model, came_s in sorted(come + due):
        found: dict[State, int] = {}
        for state, before in num_loads.items():
            if not is_due:
                nexts: Iterable[tuple[State, int]] = [(state.with_arrival(model, came_s), 0)]
            elif (model, came_s) in state.oldest:
                nexts = _after_loads(state, models, model)
            else:  # it was served before
                nexts = [(state, 0)]
            for after, more in nexts:
                found[after] = min(before + more, found.get(after, before + more))
        num_loads = found
    return min(num_loads.values())


def _after_loads(state: State, models: Sequence[str], due: str) -> Iterator[tuple[State, int]]:
    """Yield the states that loads at one moment lead to, and their number; one model is due.

    Of the orders in which models can be loaded only the last model matters.
    """
    others = [each for each in models if each != state.holder]
    for number in range(1, len(others) + 1):
        for loaded in combinations(others, number):
            if due in loaded:
                for last in loaded:
                    yield state.after((*loaded, last)), number
                yield state.after((*loaded, state.holder)), number + 1
