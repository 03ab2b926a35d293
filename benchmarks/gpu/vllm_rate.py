"""Measures vLLM on the same shape, where it is installed."""

import importlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.rates import Load
from benchmarks.gpu.shapes import Shape

UTILIZATION = 0.85


def vllm_rates(shape: Shape, loads: Sequence[Load]) -> Iterator[dict[str, Any]]:
    """Yield the tokens a second of vLLM's offline engine, with random weights.

    Prefill is left out: the time of a run of one new token is subtracted.

    Args:
        shape: A shape of Qwen 2.
        loads: What is decoded; the longest decides the length.
    """
    if importlib.util.find_spec("vllm") is None:
        yield {"vLLM": "is not installed"}
        return
    vllm: Any = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **shape.options}
        config |= {"bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        started = time.perf_counter()
        engine = vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max(2 * (load.prompt_length + load.num_tokens) for load in loads),
            max_num_seqs=max(load.num_seqs for load in loads),
            gpu_memory_utilization=UTILIZATION,
            enable_prefix_caching=False,
        )
        yield {"vLLM": f"{vllm.__version__}, ready in {time.perf_counter() - started:.0f} s"}
    for load in loads:
        prompts = [{"prompt_token_ids": ids} for ids in load.prompts(shape.options["vocab_size"])]

        def run(num_tokens: int, prompts: list[Any] = prompts) -> float:
            params = vllm.SamplingParams(
                temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
            )
            started = time.perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - started

        run(2)
        seconds = max(run(load.num_tokens) - run(1), 1e-9)
        rate = load.num_seqs * (load.num_tokens - 1) / seconds
        yield {
            "sequences": load.num_seqs,
            "step, ms": round(1000 * load.num_seqs / rate, 2),
            "tokens/s": round(rate),
        }
