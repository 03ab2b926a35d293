"""vLLM's engine (model runner V1) in the tests' own process, step by step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import SamplingParams as VllmParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.vllm_engine.grammars import envelope
from deployments.vllm_engine.moves import Runner, hand_over
from deployments.vllm_engine.scheduler import bind
from tests.vllm_engine.parameter_sets import PROMPT, stop_token_ids, tiny_model_folder

Harm = Callable[[torch.Tensor, dict[str, int]], torch.Tensor]
"""Changes a step's logits, [batch, vocab]; the dictionary says which sequence has which row."""


@dataclass
class Text:
    """What came of a sequence; `token_ids` begin with the delivered ones."""

    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: object = None
    logprobs: list[dict[int, Any]] = field(default_factory=list)


class InProcessEngine:
    """Runs sequences as the adapter hands them over."""

    def __init__(self) -> None:
        arguments = EngineArgs(
            model=str(tiny_model_folder()),
            dtype="float32",
            max_model_len=256,
            max_num_seqs=16,
            generation_config="vllm",
            scheduling_policy="priority",
            max_logprobs=20,
            structured_outputs_config={"backend": "guidance"},
            kv_cache_memory_bytes=2**26,
            distributed_executor_backend="uni",
            enforce_eager=True,
        )
        self.config = arguments.create_engine_config()
        self.runner = bind(self.config)
        self._engine = LLMEngine(
            vllm_config=self.config,
            executor_class=Executor.get_class(self.config),
            log_stats=False,
            multiprocess_mode=False,
        )
        core = self._engine.engine_core.engine_core
        self.core, self.scheduler = core, core.scheduler
        self._model_runner = core.model_executor.driver_worker.worker.model_runner
        self._compute_logits = self._model_runner.model.compute_logits
        self._model_runner.model.compute_logits = self._logits
        self.harm: Harm | None = None
        self._texts: dict[str, Text] = {}
        self._given: dict[str, list[int]] = {}

    def stop(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()

    def add(
        self,
        name: str,
        params: SamplingParams,
        given: Iterable[int] = (),
        prompt: tuple[int, ...] = PROMPT,
        constraint: str | None = None,
    ) -> None:
        """Queue a sequence; `constraint` takes the place of its grammar's envelope."""
        sequence = SequenceRequest(name, prompt, params, tuple(given))
        handed = hand_over(sequence, Runner.V1, len(prompt) + (params.max_tokens or 0))
        if params.needs_matcher and constraint is None:
            constraint = envelope(params.grammar, sequence.generated_token_ids, params.reasoning)
        bound = None if constraint is None else StructuredOutputsParams(grammar=constraint)
        self._engine.add_request(
            name,
            TokensPrompt(prompt_token_ids=handed.prompt_token_ids),
            VllmParams(
                **handed.fields,
                stop_token_ids=stop_token_ids(params),
                ignore_eos=True,
                detokenize=False,
                logprobs=params.top_logprobs,
                output_kind=RequestOutputKind.CUMULATIVE,
                structured_outputs=bound,
            ),
        )
        self._texts[name] = Text(list(given))
        self._given[name] = list(given)

    def run(self, at_step: Callable[[int], None] = lambda _: None) -> dict[str, Text]:
        """Run until all sequences have ended; `at_step` is called before each step."""
        step = 0
        while self._engine.has_unfinished_requests():
            at_step(step)
            step += 1
            for output in self._engine.step():
                done = output.outputs[0]
                self._texts[output.request_id] = Text(
                    [*self._given[output.request_id], *done.token_ids],
                    done.finish_reason,
                    done.stop_reason,
                    done.logprobs or [],
                )
        texts, self._texts, self._given = self._texts, {}, {}
        return texts

    def run_all(self, sequences: dict[str, SamplingParams]) -> dict[str, Text]:
        """Run sequences together."""
        for name, params in sequences.items():
            self.add(name, params)
        return self.run()

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._compute_logits(hidden_states)
        if self.harm is None:
            return logits
        rows = self._model_runner.input_batch.req_id_to_index
        # vLLM appends a suffix to each name.
        return self.harm(logits, {name.rpartition("-")[0]: at for name, at in rows.items()})
