from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from vllm import SamplingParams as VllmParams

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.sampling.row import SamplingRow
from deployments.engine.sampling.sampler import Sampled, sample
from deployments.engine.scheduling.token_counts import TokenCounts
from deployments.vllm_engine import draws
from deployments.vllm_engine.failures import UNUSABLE_LOGITS
from tests.engine.tiny_models import EOS_TOKEN_ID
from tests.vllm_engine.in_process import InProcessEngine, Text
from tests.vllm_engine.parameter_sets import CUTS, EVERY, PARAMETER_SETS, PROMPT, RANDOM

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PREEMPTED_AT = (3, 8, 14, 20)


@pytest.fixture(scope="module")
def whole(engine: InProcessEngine) -> dict[str, Text]:
    """The texts of all parameter sets, run together without a move."""
    return engine.run_all(PARAMETER_SETS)


@pytest.fixture(autouse=True)
def unharmed(engine: InProcessEngine) -> None:
    engine.harm = None


def differing(texts: dict[str, Text], expected: dict[str, Text]) -> list[str]:
    """Return the texts that differ from the whole one of their parameters."""
    return [name for name, text in texts.items() if text != expected[name.partition(" at ")[0]]]


def test_each_token_is_the_one_of_the_embedded_sampler(engine: InProcessEngine) -> None:
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in PARAMETER_SETS}

    def note(logits: torch.Tensor, rows: dict[str, int]) -> torch.Tensor:
        for name, at in rows.items():
            seen[name].append(logits[at].clone())
        return logits

    engine.harm = note
    texts = engine.run_all(PARAMETER_SETS)
    for name, params in PARAMETER_SETS.items():
        text = texts[name].token_ids
        assert [
            chosen_from(logits, params, text[:at]) for at, logits in enumerate(seen[name])
        ] == text, name


def chosen_from(logits: torch.Tensor, params: SamplingParams, text: list[int]) -> int:
    # vLLM bars the end of the text until min_tokens, also where it is to be ignored.
    stops = params.stop_token_ids | {EOS_TOKEN_ID}
    barred = stops if len(text) < params.min_tokens else frozenset()
    counts = TokenCounts(PROMPT, text) if params.has_penalties else None
    row = SamplingRow(params, len(PROMPT) + len(text), counts, barred)
    (chosen,) = sample(logits[None], [row])
    assert chosen is not None
    return chosen.token_id


def test_a_moved_text_is_equal_wherever_it_was_cut(
    engine: InProcessEngine, whole: dict[str, Text]
) -> None:
    for name, params in PARAMETER_SETS.items():
        for cut in CUTS:
            if cut < len(whole[name].token_ids):
                engine.add(f"{name} at {cut}", params, whole[name].token_ids[:cut])
    moved = engine.run()
    assert len(moved) >= 4 * 9
    assert differing(moved, whole) == []


def test_a_text_depends_on_no_neighbour(engine: InProcessEngine, whole: dict[str, Text]) -> None:
    alone: dict[str, Text] = {}
    for name, params in PARAMETER_SETS.items():
        alone |= engine.run_all({name: params})
    assert differing(alone, whole) == []


def test_texts_go_on_equal_after_four_preemptions(
    engine: InProcessEngine, whole: dict[str, Text]
) -> None:
    preempted: set[str] = set()

    def preempt(step: int) -> None:
        if step in PREEMPTED_AT:
            preempted.update(request.request_id for request in engine.scheduler.running)
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    for name, params in PARAMETER_SETS.items():
        engine.add(name, params)
    texts = engine.run(preempt)
    assert len(preempted) == len(PARAMETER_SETS)
    assert differing(texts, whole) == []


def test_logprobs_stay_the_model_s(engine: InProcessEngine) -> None:
    params = replace(RANDOM, top_logprobs=3, max_tokens=5)
    noted: list[torch.Tensor] = []

    def note(logits: torch.Tensor, rows: dict[str, int]) -> torch.Tensor:
        noted.append(logits[0].log_softmax(-1))
        return logits

    engine.harm = note
    text = engine.run_all({"a": params})["a"]
    for logprobs, found, token_id in zip(noted, text.logprobs, text.token_ids, strict=True):
        assert found[token_id].logprob == pytest.approx(float(logprobs[token_id]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", [EVERY, RANDOM], ids=["vLLM's row", "our row"])
@pytest.mark.parametrize("top_logprobs", [None, 2])
def test_a_sequence_with_nan_fails_and_the_others_go_on(
    engine: InProcessEngine, dtype: torch.dtype, params: SamplingParams, top_logprobs: int | None
) -> None:
    params = replace(params, top_logprobs=top_logprobs)
    healthy = {"greedy": EVERY, "seed": RANDOM, "penalty": PARAMETER_SETS["presence"]}

    def harm(logits: torch.Tensor, rows: dict[str, int]) -> torch.Tensor:
        logits = logits.to(dtype)
        if "bad" in rows and engine_step[0] == 4:
            logits[rows["bad"], 7] = torch.nan
        return logits

    engine_step = [0]
    engine.harm = harm
    expected = engine.run_all(healthy)
    engine.add("bad", params)
    for name, other in healthy.items():
        engine.add(name, other)
    texts = engine.run(lambda step: engine_step.__setitem__(0, step))
    bad = texts.pop("bad")
    assert (bad.finish_reason, bad.stop_reason) == ("error", UNUSABLE_LOGITS)
    assert len(bad.token_ids) == 4
    assert texts == expected


def test_a_sequence_whose_draw_raises_fails_and_the_others_go_on(
    engine: InProcessEngine, whole: dict[str, Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled | None]:
        if any(row.params.seed == 666 and row.position == len(PROMPT) + 3 for row in rows):
            raise RuntimeError("a fault of the sampler")
        return sample(logits, rows)

    monkeypatch.setattr(draws, "sample", raising)
    engine.add("bad", replace(RANDOM, seed=666))
    for name, params in PARAMETER_SETS.items():
        engine.add(name, params)
    texts = engine.run()
    bad = texts.pop("bad")
    assert (bad.finish_reason, bad.stop_reason) == ("error", UNUSABLE_LOGITS)
    assert len(bad.token_ids) == 3
    assert differing(texts, whole) == []


@pytest.mark.parametrize(
    "ours",
    [
        {"params": {"logit_bias": [], "presence_penalty": 1.0}},
        {"params": {"logit_bias": [], "top_p": 2}, "num_given": 0},
        {"num_given": 0},
    ],
)
def test_what_is_no_row_is_refused_before_it_runs(ours: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"num_given|top_p|params"):
        draws.Draws.validate_params(VllmParams(extra_args={"raystream": ours}))
