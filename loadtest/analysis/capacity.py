"""States the server's capacity in a sentence: the heaviest load that meets the objectives.

Without objectives, it is the load beyond which output stops growing. For a single load, the
sentence gives its rates and latency.
"""

from collections.abc import Sequence
from itertools import pairwise

from loadtest.analysis.load_steps import MIN_ATTAINMENT, LoadStep
from loadtest.analysis.metric import DISTRIBUTIONS, headline_name
from loadtest.analysis.objectives import Objective

MIN_GAIN = 0.10
"""The server is full if a heavier load brings less additional output than this share."""


def capacity_sentences(steps: Sequence[LoadStep], objectives: Sequence[Objective]) -> list[str]:
    """Return the sentences on capacity."""
    if objectives and steps:
        return [_within_objectives(steps, objectives)]
    return [_full_at(steps)] if len(steps) > 1 else [_rates_and_ttft(step) for step in steps]


def _rates_and_ttft(step: LoadStep) -> str:
    """State the rates and the TTFT of one load."""
    name = headline_name("ttft", is_open_loop=step.is_open_loop)
    qps, output = step.median_of(lambda level: level.window.qps), step.output_per_s
    p50, p95 = step.latency("ttft", "p50"), step.latency("ttft", "p95")
    parts = [
        f"{qps:,.2f} answers/s" if qps is not None else "",
        f"{output:,.1f} {step.levels[0].token_word}/s" if output is not None else "",
        f"{DISTRIBUTIONS[name].title} {p50:,.0f} ms (p95 {p95:,.0f} ms)" if p50 and p95 else "",
    ]
    figures = ", ".join(text for text in parts if text)
    return f"{step.title}: {figures or 'no answer ended in the window'}."


def _within_objectives(steps: Sequence[LoadStep], objectives: Sequence[Objective]) -> str:
    limits = " and ".join(str(objective) for objective in objectives)
    carried = 0
    while carried < len(steps) and steps[carried].is_carried:
        carried += 1
    if not carried:
        return f"Capacity: not even {steps[0].title} within {limits}: {_why(steps, 0, objectives)}."
    best = f"Capacity: {steps[carried - 1].title} within {limits}"
    if carried == len(steps):
        return f"{best}; no heavier load was tried."
    return f"{best}; at {steps[carried].load:g} {_why(steps, carried, objectives)}."


def _why(steps: Sequence[LoadStep], index: int, objectives: Sequence[Objective]) -> str:
    """State why a load is too much: failures, a queue, or a figure over its limit."""
    step = steps[index]
    failed = step.median_of(lambda level: level.error_rate)
    if failed is None or failed > 1 - MIN_ATTAINMENT:
        return "no request ended" if failed is None else f"requests fail ({failed:.0%})"
    if index and _is_queueing(steps[index - 1], step):
        return f"the queue grows (TTFT p95 {step.latency('ttft') or 0:,.0f} ms)"
    for objective in objectives:
        value = step.latency(objective.name)
        value_ms = (value or 0.0) * DISTRIBUTIONS[objective.name].ms_per_unit
        if value_ms > objective.limit_ms:
            return f"{objective.name} p95 is {value_ms:,.0f} ms"
    attained = step.median_of(lambda level: level.slo_attainment) or 0.0
    return f"only {attained:.0%} of the requests meet them all"


def _is_queueing(lighter: LoadStep, heavier: LoadStep) -> bool:
    """Return whether more load only made requests wait: no more output, but a higher TTFT."""
    output = lighter.output_per_s, heavier.output_per_s
    wait = lighter.latency("ttft"), heavier.latency("ttft")
    if None in output or None in wait or not output[0] or not wait[0]:
        return False
    return (output[1] or 0) < output[0] * (1 + MIN_GAIN) and (wait[1] or 0) > wait[0] * 1.5


def _full_at(steps: Sequence[LoadStep]) -> str:
    word = steps[0].levels[0].token_word
    for lighter, heavier in pairwise(steps):
        before, after = lighter.output_per_s, heavier.output_per_s
        if before and after is not None and after < before * (1 + MIN_GAIN):
            return (
                f"The server is full at {lighter.title} ({before:,.1f} {word}/s): at "
                f"{heavier.load:g} it is {after:,.1f} {word}/s{_longer_wait(lighter, heavier)}."
            )
    best = steps[-1].output_per_s
    output = f" ({best:,.1f} {word}/s)" if best is not None else ""
    return f"Output still grows at {steps[-1].title}{output}; no heavier load was tried."


def _longer_wait(lighter: LoadStep, heavier: LoadStep) -> str:
    before, after = lighter.latency("ttft", "p50"), heavier.latency("ttft", "p50")
    if not before or not after or after < before * 1.1:
        return ""
    return f", with {after / before:.1f} times the TTFT"
