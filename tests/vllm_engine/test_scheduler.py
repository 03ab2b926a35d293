import json
import os
import subprocess
import sys
from typing import Any

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu.sample import logit_bias

from deployments.contract.sampling_params import MAX_NUM_LOGIT_BIASES
from deployments.vllm_engine.failures import UNUSABLE_LOGITS
from deployments.vllm_engine.grammars import GrammarBackend
from deployments.vllm_engine.moves import MAX_NUM_STOP_TOKEN_IDS, Runner
from deployments.vllm_engine.scheduler import (
    V1Scheduler,
    V2AsyncScheduler,
    V2Scheduler,
    bind,
    scheduler_class,
)
from tests.vllm_engine.in_process import InProcessEngine
from tests.vllm_engine.parameter_sets import CUTS, NUM_TOKENS, PARAMETER_SETS

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

V2_ON_CPU = """
import sys

import triton
import triton.language
import vllm.triton_utils

# vLLM's CPU wheel has turned Triton off.
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
from tests.vllm_engine.v2_on_cpu import write_texts

write_texts(sys.argv[1])
"""


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What model runner V2 does, without a GPU; see `v2_on_cpu`."""
    file = tmp_path_factory.mktemp("v2") / "texts.json"
    ran = subprocess.run(
        [sys.executable, "-c", V2_ON_CPU, str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    results: dict[str, Any] = json.loads(file.read_text())
    return results


def test_a_cpu_runs_v1_with_our_scheduler_draws_and_grammars(engine: InProcessEngine) -> None:
    assert engine.runner is Runner.V1
    assert type(engine.scheduler) is V1Scheduler
    assert isinstance(engine.scheduler.structured_output_manager.backend, GrammarBackend)
    assert engine.config.model_config.logits_processors == ["deployments.vllm_engine.draws:Draws"]


@pytest.mark.parametrize(
    ("runner", "async_scheduling", "expected"),
    [
        (Runner.V1, False, V1Scheduler),
        (Runner.V2, False, V2Scheduler),
        (Runner.V2, True, V2AsyncScheduler),
    ],
)
def test_vllm_finds_the_scheduler_by_its_name(
    runner: Runner, async_scheduling: bool, expected: type
) -> None:
    found = scheduler_class(runner, async_scheduling)
    assert resolve_obj_by_qualname(f"{found.__module__}.{found.__qualname__}") is expected


def test_v1_is_refused_where_it_would_not_know_the_last_token() -> None:
    with pytest.raises(ValueError, match="unset VLLM_USE_V2_MODEL_RUNNER"):
        scheduler_class(Runner.V1, async_scheduling=True)


def test_exact_is_refused_without_batch_invariant_kernels(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="exact needs a GPU"):
        bind(engine.config)


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_v2_goes_on_equal_after_a_move(v2: dict[str, Any], scheduling: str) -> None:
    assert v2["runner"] == "V2"
    whole, moved = v2[scheduling]["whole"], v2[scheduling]["moved"]
    assert len(moved) >= len(PARAMETER_SETS) * (len(CUTS) - 1 if scheduling == "async" else 1)
    assert [name for name, text in moved.items() if text != whole[name.partition(" at ")[0]]] == []


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_v2_ends_a_moved_text_for_the_same_reason(v2: dict[str, Any], scheduling: str) -> None:
    reasons = v2[scheduling]["reasons"]
    moved = [name for name in reasons if " at " in name]
    assert [name for name in moved if reasons[name] != reasons[name.partition(" at ")[0]]] == []
    assert reasons["greedy"][0] == "length"
    assert reasons["grammar"][0] == "stop"


def test_v2_counts_the_tokens_before_a_move(v2: dict[str, Any]) -> None:
    texts = v2["async"]["moved"]
    assert len(texts["greedy at 7"]) == NUM_TOKENS
    stops = PARAMETER_SETS["min_tokens"].stop_token_ids
    text = texts["min_tokens at 16"]
    assert not stops.intersection(text[:20])
    assert text[-1] in stops


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_v2_ends_a_sequence_with_nan_without_its_token(v2: dict[str, Any], scheduling: str) -> None:
    texts, reasons = v2[scheduling]["whole"], v2[scheduling]["reasons"]
    assert reasons["bad"] == ["error", UNUSABLE_LOGITS]
    assert texts["bad"] == texts["presence"][:7]


def test_both_schedulers_of_v2_write_the_same(v2: dict[str, Any]) -> None:
    assert v2["sync"]["whole"] == v2["async"]["whole"]


def test_v2_holds_as_many_stops_and_biases_as_are_let_through() -> None:
    num_eos_at_most = 8
    assert MAX_NUM_STOP_TOKEN_IDS + num_eos_at_most <= logit_bias.MAX_NUM_STOP_TOKEN_IDS
    assert logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS >= MAX_NUM_LOGIT_BIASES
