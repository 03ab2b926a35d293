"""Runs vLLM's model runner V2 on a CPU, all but the model, and writes the tokens to a file.

V2 needs a GPU: its sampler is written in Triton. Here its kernels run in Triton's interpreter, and
pinned memory is plain memory. Real are the scheduler with our subclass, two methods of V2's runner
(`add_requests`, `finish_requests`), `RequestState`, `Sampler`, `post_update`, and our grammars. In
place of the model stands a table: the logits that follow each token.

`test_scheduler` runs it in a process of its own, in which Triton is this interpreter.
"""

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams as VllmParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.input_batch import post_update
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from deployments.contract.sampling_params import ReasoningTokens, SamplingParams
from deployments.engine.grammar.matcher import unpack
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.vllm_engine.grammars import envelope
from deployments.vllm_engine.moves import Runner, hand_over
from deployments.vllm_engine.scheduler import bind, scheduler_class
from tests.engine.tiny_models import VOCAB_SIZE
from tests.vllm_engine.parameter_sets import (
    CUTS,
    GRAMMAR,
    MARKS,
    PARAMETER_SETS,
    PROMPT,
    stop_token_ids,
    tiny_model_folder,
)

MAX_NUM_SEQS = 16
MAX_MODEL_LEN = 256
BLOCK_SIZE = 16


class PlainBuffer:
    """Memory of the host in place of memory that a GPU sees, too."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> torch.Tensor:
        return self.cpu[:n]


class Worker:
    """V2's worker without the model; `add_requests` is V2's own."""

    def __init__(self, config: Any) -> None:
        device = torch.device("cpu")
        self.req_states = RequestState(
            MAX_NUM_SEQS, MAX_MODEL_LEN, MAX_MODEL_LEN, 0, VOCAB_SIZE, device
        )
        self.sampler = Sampler(config, MAX_NUM_SEQS, VOCAB_SIZE, device, self.req_states)
        # What `add_requests` also tells: nothing of it belongs to sampling.
        nothing = SimpleNamespace(
            add_request=lambda *_: None,
            append_block_ids=lambda *_, **__: None,
            apply_staged_writes=lambda: None,
        )
        self.runner = SimpleNamespace(
            req_states=self.req_states,
            sampler=self.sampler,
            model_state=nothing,
            block_tables=nothing,
            lora_state=nothing,
            prompt_logprobs_worker=nothing,
            encoder_cache=None,
            adaptive_verification=None,
            pooling_runner=None,
            is_last_pp_rank=True,
            _remove_request=self.req_states.remove_request,
        )
        generator = torch.Generator().manual_seed(3)
        self.table = 3 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
        self.bad_position: int | None = None

    def run(self, planned: SchedulerOutput, grammar: Any) -> ModelRunnerOutput:
        """Run a step; requests whose prompt is not whole yet get no token."""
        GPUModelRunner.finish_requests(self.runner, planned)
        GPUModelRunner.add_requests(self.runner, planned)
        names = list(planned.num_scheduled_tokens)
        states = self.req_states
        at = np.array([states.req_id_to_index[name] for name in names], dtype=np.int32)
        lengths = states.total_len.gpu[torch.tensor(at)].long()
        last = states.all_token_ids.gpu[torch.tensor(at), lengths - 1].long()
        logits = self.table[last].clone()
        if grammar is not None:
            rows = [names.index(name) for name in grammar.structured_output_request_ids]
            barred = unpack(torch.from_numpy(grammar.grammar_bitmask), VOCAB_SIZE)
            logits[rows] = logits[rows].masked_fill(barred, -torch.inf)
        if "bad" in names and lengths[names.index("bad")] == self.bad_position:
            logits[names.index("bad"), 7] = torch.nan
        # V2's own kernel for this needs a function that the interpreter lacks.
        assert self.sampler.compute_nans, "V2 counts NaN if the environment says so"
        num_nans = logits.isnan().sum(dim=-1).tolist()
        idx = torch.tensor(at)
        sampled, _ = self.sampler.sample(
            logits,
            idx,
            idx,
            at,
            lengths - 1,
            last.int(),
            torch.zeros_like(idx),
            lengths.int().numpy(),
        )
        ones = torch.ones(len(names), dtype=torch.int32)
        post_update(
            idx,
            states.num_computed_tokens.gpu,
            states.last_sampled_tokens,
            self.sampler.penalties_state.output_bin_counts,
            sampled.view(-1, 1),
            ones,
            torch.zeros_like(ones),
            None,
            states.all_token_ids.gpu,
            states.total_len.gpu,
        )
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[token_id] for token_id in sampled.tolist()],
            num_nans_in_logits=dict(zip(names, num_nans, strict=True)),
        )


class Engine:
    """The scheduler and the worker; steps in flight as vLLM has them."""

    def __init__(self, config: Any, is_async: bool) -> None:
        config.cache_config.num_gpu_blocks = 400
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.manager = StructuredOutputManager(config)
        self.scheduler = scheduler_class(Runner.V2, is_async)(
            config,
            KVCacheConfig(400, [], [KVCacheGroupSpec(["layer"], spec)]),
            self.manager,
            BLOCK_SIZE,
        )
        hash_of = get_hash_fn_by_name("sha256")
        init_none_hash(hash_of)
        self.block_hasher = get_request_block_hasher(BLOCK_SIZE, hash_of)
        self.worker = Worker(config)
        self.num_in_flight = 2 if is_async else 1
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, tuple[str, object]] = {}

    def add(self, name: str, params: SamplingParams, given: tuple[int, ...] = ()) -> None:
        """Queue a sequence, as the adapter hands it over."""
        sequence = SequenceRequest(name, PROMPT, params, given)
        handed = hand_over(sequence, Runner.V2, len(PROMPT) + (params.max_tokens or 0))
        constraint = None
        if params.needs_matcher:
            constraint = StructuredOutputsParams(
                grammar=envelope(params.grammar, given, params.reasoning)
            )
        request = Request(
            request_id=name,
            prompt_token_ids=handed.prompt_token_ids,
            sampling_params=VllmParams(
                **handed.fields,
                stop_token_ids=stop_token_ids(params),
                ignore_eos=True,
                detokenize=False,
                structured_outputs=constraint,
            ),
            pooling_params=None,
            block_hasher=self.block_hasher,
        )
        if constraint is not None:
            self.manager.grammar_init(request)
            while request.structured_output_request.grammar is None:
                time.sleep(0.001)
        self.tokens[name] = list(given)
        self.scheduler.add_request(request)

    def run(self) -> None:
        """Run until all sequences have ended."""
        in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        while self.scheduler.has_unfinished_requests() or in_flight:
            planned = self.scheduler.schedule()
            is_step = planned.total_num_scheduled_tokens > 0
            if is_step and planned.pending_structured_output_tokens:
                # As EngineCore does: the mask needs the tokens of the steps in flight.
                while in_flight:
                    self._take(*in_flight.popleft())
            if is_step:
                grammar = self.scheduler.get_grammar_bitmask(planned)
                in_flight.append((planned, self.worker.run(planned, grammar)))
            if in_flight and (len(in_flight) >= self.num_in_flight or not is_step):
                self._take(*in_flight.popleft())

    def _take(self, planned: SchedulerOutput, output: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(planned, output).values():
            for one in outputs.outputs:
                self.tokens[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.reasons[one.request_id] = (str(one.finish_reason), one.stop_reason)


def scenarios() -> dict[str, SamplingParams]:
    base = PARAMETER_SETS["seed"]
    bound = replace(base, grammar=GRAMMAR)
    return {
        **PARAMETER_SETS,
        "grammar": bound,
        "reasoning": replace(bound, reasoning=replace(MARKS, max_tokens=6)),
        "budget": replace(base, reasoning=ReasoningTokens(MARKS.start, MARKS.end, True, 6)),
    }


def run(config: Any, is_async: bool, cuts: Sequence[int]) -> dict[str, Any]:
    """Return for each scenario its whole text, and its texts with a move in between.

    Beside them runs a sequence whose logits hold NaN after the seventh token.
    """
    engine = Engine(config, is_async)
    for name, params in {**scenarios(), "bad": PARAMETER_SETS["presence"]}.items():
        engine.add(name, params)
    engine.worker.bad_position = len(PROMPT) + 7
    engine.run()
    engine.worker.bad_position = None
    whole, reasons = dict(engine.tokens), dict(engine.reasons)
    for cut in cuts:
        # The prefixes are cached by now, also beyond the prompt.
        for name, params in scenarios().items():
            if cut < len(whole[name]):
                engine.add(f"{name} at {cut}", params, tuple(whole[name][:cut]))
        engine.run()
    moved = {name: text for name, text in engine.tokens.items() if name not in whole}
    return {"whole": whole, "moved": moved, "reasons": reasons | engine.reasons}


def write_texts(file: str) -> None:
    """Write what both schedulers of V2 do to a file, as JSON."""
    torch.set_num_threads(1)
    buffer_utils.UvaBuffer = PlainBuffer
    arguments = EngineArgs(
        model=str(tiny_model_folder()),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        structured_outputs_config={"backend": "guidance"},
        block_size=BLOCK_SIZE,
        enforce_eager=True,
        kv_cache_memory_bytes=2**26,
    )
    config = arguments.create_engine_config()
    VllmConfig.use_v2_model_runner = property(lambda _: True)
    results: dict[str, Any] = {"runner": bind(config)}
    # One cut for the scheduler that vLLM takes only if told to: the interpreter is slow.
    results["sync"] = run(config, is_async=False, cuts=CUTS[1:2])
    results["async"] = run(config, is_async=True, cuts=CUTS)
    Path(file).write_text(json.dumps(results))
