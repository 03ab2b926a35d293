"""Adapters on vLLM's engine, compared with models into which they are merged."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm.lora.request import LoRARequest

from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import InvalidParameterError, SamplingParams
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.vllm_engine.adapters import WEIGHT_FILE
from deployments.vllm_engine.engine import VllmEngine
from deployments.vllm_engine.logs import EngineLogs
from tests.deployments.tiny_folder import save_text_model, spec
from tests.engine.tiny_models import SHAPE
from tests.vllm_engine.tiny_adapters import ALPHA, RANK, save_adapter

pytestmark = pytest.mark.vllm

WIDE = {**SHAPE, "hidden_size": 128, "num_key_value_heads": 2}
"""vLLM's attention on a CPU has no heads of fewer than 32 numbers."""

NUM_TOKENS = 16
DEADLINE_S = 60


def qwen2() -> Qwen2ForCausalLM:
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(**WIDE))


def merged(folder: Path) -> Qwen2ForCausalLM:
    """Return the model with an adapter added to its weights."""
    model, weights = qwen2(), load_file(folder / WEIGHT_FILE)
    for name, low in weights.items():
        if ".lora_A." in name:
            place = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            added = weights[name.replace("lora_A", "lora_B")] @ low * (ALPHA / RANK)
            linear: Any = model.get_submodule(place)
            with torch.no_grad():
                linear.weight += added
    return model


def continued(model: Any, prompt: tuple[int, ...]) -> list[int]:
    """Return the tokens that transformers generates."""
    found = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "a": save_adapter(folder / "a", 1, ("q_proj", "v_proj"), qwen2().model.layers),
        "b": save_adapter(folder / "b", 2, ("k_proj", "o_proj"), qwen2().model.layers),
    }


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory, adapters: dict[str, Path]
) -> Iterator[VllmEngine]:
    folder = save_text_model(tmp_path_factory.mktemp("qwen2"), qwen2())
    model = spec(
        folder,
        engine="vllm",
        engine_args={"enforce_eager": True},
        kv_cache_memory_bytes=2**26,
        adapters=[{"id": name, "source": str(each)} for name, each in adapters.items()],
    )
    started = VllmEngine(model, EngineLogs(), lambda stats: None, on_cpu=True)
    started.start()
    yield started
    started.stop()


async def generated(engine: VllmEngine, prompt: tuple[int, ...], adapter: str | None) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    sequence = SequenceRequest(engine.unique_id("s"), prompt, params, adapter=adapter)
    engine.validate(sequence)
    deltas: list[TextDelta] = []
    ended = asyncio.Event()

    def take(delta: TextDelta) -> None:
        deltas.append(delta)
        if delta.finish_reason is not None:
            ended.set()

    async with asyncio.timeout(DEADLINE_S):
        with engine.running(sequence, take):
            await ended.wait()
    assert deltas[-1].finish_reason is FinishReason.LENGTH, deltas[-1]
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def test_requests_for_adapters_run_beside_the_model_s_own(
    engine: VllmEngine, adapters: dict[str, Path]
) -> None:
    await engine.check_health()  # loads them, as Serve's first check does
    models: dict[str | None, Qwen2ForCausalLM] = {None: qwen2()}
    for name, folder in adapters.items():
        models[name] = merged(folder)
    prompts = [(5, 6, 7, 8 + i) for i in range(3)]
    asked = [(prompt, name) for prompt in prompts for name in models]
    found = await asyncio.gather(*(generated(engine, *each) for each in asked))
    assert found == [continued(models[name], prompt) for prompt, name in asked]
    assert len({tuple(tokens) for tokens in found}) == len(asked)


async def test_an_unknown_adapter_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(InvalidParameterError, match="there is no adapter 'c'"):
        await generated(engine, (5, 6), "c")


async def test_an_adapter_that_vllm_cannot_load_fails_the_check_and_no_stream(
    engine: VllmEngine, tmp_path: Path
) -> None:
    broken = save_adapter(tmp_path / "broken", 3, ("q_proj",), qwen2().model.layers)
    (broken / WEIGHT_FILE).write_bytes(b"no safetensors")
    running = asyncio.ensure_future(generated(engine, (5, 6, 7), None))
    request = LoRARequest("broken", 9, str(broken))
    engine._unloaded.append(request)
    with pytest.raises(UnsupportedModelError, match="can't load the adapter 'broken'"):
        await engine.check_health()
    engine._unloaded.clear()
    assert len(await running) == NUM_TOKENS
    await engine.check_health()
