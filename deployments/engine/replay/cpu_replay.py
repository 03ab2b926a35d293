"""Decode steps of a traced forward pass as programs of CPU kernels.

A decode step makes hundreds of calls. Many take microseconds, and Python runs between them. But
every step of n rows calls the same kernels on the same memory; only its input rows and how far each
row sees differ. So the calls of the first step of n rows are captured, and later steps replay them
as a whole, without Python; see `graph_programs`. A model that computes with more than kernels runs
its steps call by call.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deployments.compute.graph_programs import GraphProgram, NotProgrammableError, open_programs
from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.replay.decode_replay import Attend
from deployments.engine.replay.static_decode import CpuStaticDecodeStep

logger = logging.getLogger(__name__)


class CpuDecodeReplay:
    """Runs decode steps as programs, by the numbers of rows and threads; see `DecodeReplay`."""

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        kv: KVCache,
        max_rows: int,
        attend: Callable[[PackedStep], Attend],
    ) -> None:
        """Prepare the graph; a program is captured by `prepare`, or by the first step of its size.

        Args:
            graph: See `open_programs`.
            kv: The KV cache.
            max_rows: The most rows of a step.
            attend: Returns the attention of a step.
        """
        self._kv = kv
        self._attend = attend
        self._graph = open_programs(graph, max_rows)
        self._programs: dict[tuple[int, int], tuple[GraphProgram, CpuStaticDecodeStep]] = {}
        self._refused: set[tuple[int, int]] = set()

    @property
    def num_captured(self) -> int:
        """The number of programs that are kept now."""
        return len(self._programs)

    @torch.inference_mode()
    def prepare(self, least: int, most: int) -> None:
        """Capture steps of `least`, twice as many ... `most` rows, which compiles all kernels.

        The first step of a size would wait for that. A step of another size still waits for its
        capture.
        """
        num_rows = least
        while num_rows < most:
            self._prepare(num_rows)
            num_rows *= 2
        self._prepare(most)

    def _prepare(self, num_rows: int) -> None:
        if self._graph is not None:
            self._find(num_rows, self._graph.begin((0,) * num_rows, (0,) * num_rows))

    def run(self, token_ids: Sequence[int], step: PackedStep) -> torch.Tensor | None:
        """Run a step; see `DecodeReplay`. None if there is no program for such a step."""
        size = step.num_decode, torch.get_num_threads()
        if self._graph is None or size in self._refused:
            return None
        inputs = self._graph.begin(token_ids, step.rotary_positions)
        found = self._find(step.num_decode, inputs)
        if found is None:
            return None
        program, static_step = found
        static_step.take(step)
        return program.run(inputs)[0].to(torch.float32, copy=True)

    def drop(self) -> None:
        """Drop all programs and their buffers."""
        self._programs.clear()
        if self._graph is not None:
            self._graph.drop()

    def _find(
        self, num_rows: int, inputs: Sequence[Any]
    ) -> tuple[GraphProgram, CpuStaticDecodeStep] | None:
        """Return the program of steps of `num_rows` rows, captured now if need be; None if none."""
        size = num_rows, torch.get_num_threads()
        if size in self._programs or size in self._refused:
            return self._programs.get(size)
        assert self._graph is not None
        try:
            static_step = CpuStaticDecodeStep.of(self._kv, num_rows)
            program = self._graph.capture(inputs, self._attend(static_step), num_rows)
            self._programs[size] = program, static_step
        except NotProgrammableError as error:
            logger.info("decode steps of %d rows run call by call: %s", num_rows, error)
            self._refused.add(size)
        return self._programs.get(size)
