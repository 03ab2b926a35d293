"""Decode steps as captured CUDA graphs: one launch instead of a thousand.

On a GPU, launching a decode step's kernels from Python takes longer than running them. So a step of
decode rows only is padded to one of a few sizes (`graph_sizes`). The first step of a size runs
plainly and is then captured; each later one is a replay. Its inputs (token ids, lengths, and where
each row's extents start) are in a static buffer that one copy from pinned memory fills. The rows
run in the order in which their extents lie in memory; their logits are in the order of the step.

If a capture fails, later captures read extents with a mask. If they already did, all steps run
plainly from then on. But if a capture only lacked memory, existing captures stay in use, and steps
of other sizes run plainly. If the step itself fails, it raises as a plain step would, and may be
run again in parts: its rows write the same keys and values to the same places.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from deployments.compute.device_errors import is_out_of_memory, release_cache
from deployments.compute.host_to_device import host_tensor
from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.attention.packed_step import PackedStep, Starts
from deployments.engine.replay.cuda_capture import Graph, GraphCapturer
from deployments.engine.replay.row_order import RowOrder
from deployments.engine.replay.static_decode import CudaStaticDecodeStep
from deployments.plan.graph_sizes import DecodeBucket, DecodeBuckets

logger = logging.getLogger(__name__)

RunModel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedStep], torch.Tensor]
"""Runs the model on token ids [1, n], positions [1, n], the rows whose logits are wanted [k], all
int64, and the packed step; returns [k, vocab], in the model's dtype."""


class CudaDecodeReplay:
    """Runs decode steps as captured graphs where possible; see `DecodeReplay`."""

    def __init__(
        self,
        run_model: RunModel,
        kv: KVCache,
        capturer: GraphCapturer,
        *,
        max_num_seqs: int,
        max_graphs: int,
        reads_by_length: bool,
    ) -> None:
        """Allocate the static inputs; nothing is captured yet.

        Args:
            run_model: Runs the model.
            kv: The KV cache that the model attends over.
            capturer: Captures the steps.
            max_num_seqs: The most rows of a step.
            max_graphs: Most graphs that are kept; the least recently used one is dropped.
            reads_by_length: Whether rows read their extents by `ExtentReads`.
        """
        self._run_model = run_model
        self._kv = kv
        self._buckets = DecodeBuckets(max_num_seqs, max(kv.capacities))
        self._max_graphs = max_graphs
        self._reads_by_length = reads_by_length
        self._is_full = False  # there was no memory for another graph
        self._capturer: GraphCapturer | None = capturer
        self._graphs: dict[DecodeBucket, Graph] = {}  # the most recently used is last
        # Token ids, lengths and those of `RowOrder` lie one after the other, so that a single copy
        # fills all.
        self._num_inputs = 3 + kv.num_groups
        num_values = self._num_inputs * max_num_seqs
        self._inputs = torch.zeros(num_values, dtype=torch.int64, device=kv.device)
        self._order = RowOrder.of((), 0, kv.spare_tokens)
        self._logits: torch.Tensor | None = None

    @property
    def num_captured(self) -> int:
        """The number of graphs that are kept now."""
        return len(self._graphs)

    def prepare(self, least: int, most: int) -> None:
        """Do nothing: capturing all sizes would take minutes, and most never occur."""

    def drop(self) -> None:
        """Drop all graphs, which gives their memory back to the allocator."""
        self._graphs.clear()
        self._logits = None
        self._is_full = False

    def run(self, token_ids: Sequence[int], step: PackedStep) -> torch.Tensor | None:
        """Run a step; see `DecodeReplay`. None if captures have failed."""
        if self._capturer is None:
            return None
        lengths = [position + 1 for position in step.decode_positions]
        bucket = self._buckets.cover(len(lengths), max(lengths))
        if self._is_full and bucket not in self._graphs:
            return None
        self._fill(token_ids, lengths, step.decode_starts, bucket)
        # Removed first, so that a graph whose replay raises is dropped.
        graph = self._graphs.pop(bucket, None)
        if graph is None:
            logits = self._run_and_capture(bucket, self._capturer)
        else:
            graph.replay()
            self._graphs[bucket] = graph
            assert self._logits is not None
            logits = self._logits
        return logits[: len(lengths)].to(torch.float32, copy=True)

    def _fill(
        self,
        token_ids: Sequence[int],
        lengths: Sequence[int],
        starts: Sequence[Starts],
        bucket: DecodeBucket,
    ) -> None:
        """Fill the static inputs; a row's place among them is the one at which it runs."""
        if not self._order.holds(starts, bucket.num_rows):
            self._order = RowOrder.of(starts, bucket.num_rows, self._kv.spare_tokens)
        order = self._order
        values = [*order.sort(token_ids), *order.sort(lengths), *order.inputs]
        host = host_tensor(values, self._inputs.device, torch.int64)
        self._inputs[: len(values)].copy_(host, non_blocking=True)

    def _compute(self, bucket: DecodeBucket) -> torch.Tensor:
        """Run the model on the static inputs: [num_rows, vocab], in the order of the step."""
        inputs = self._inputs[: self._num_inputs * bucket.num_rows].view(self._num_inputs, -1)
        token_ids, lengths, places = inputs[:3]
        step = CudaStaticDecodeStep.of(
            self._kv, bucket, lengths, inputs[3:], reads_by_length=self._reads_by_length
        )
        return self._run_model(token_ids[None], step.positions[None], places, step)

    def _run_and_capture(self, bucket: DecodeBucket, capturer: GraphCapturer) -> torch.Tensor:
        """Run the first step of a size, and capture it for the next."""
        logits = capturer.warm_up(partial(self._compute, bucket))
        try:
            self._graphs[bucket] = self._capture(bucket, capturer, like=logits)
        except Exception as error:  # any failure of a capture leaves plain steps usable
            is_short = is_out_of_memory(error)
            logger.warning(
                "a step of %d rows could not be captured", bucket.num_rows, exc_info=True
            )
        else:
            return logits
        # Outside the except block, since the traceback held the failed capture's tensors.
        self._limit_captures(is_short=is_short)
        release_cache(self._kv.device)
        return logits

    def _limit_captures(self, *, is_short: bool) -> None:
        """Decide, after a failed capture, what is captured from now on."""
        if is_short and self._graphs:
            logger.warning("no more sizes of steps are captured than these %d", len(self._graphs))
            self._is_full = True
        elif self._reads_by_length and not is_short:
            logger.warning("captured steps read extents with a mask from now on")
            self._reads_by_length = False
            self.drop()
        else:
            logger.warning("decode steps are launched kernel by kernel from now on")
            self._capturer = None
            self.drop()

    def _capture(
        self, bucket: DecodeBucket, capturer: GraphCapturer, *, like: torch.Tensor
    ) -> Graph:
        if len(self._graphs) >= self._max_graphs:
            del self._graphs[next(iter(self._graphs))]
        if self._logits is None:
            # One buffer serves all graphs; one for each graph would have to be kept alive.
            self._logits = like.new_empty(self._buckets.max_rows, like.shape[-1])
        target = self._logits[: bucket.num_rows]
        return capturer.capture(lambda: target.copy_(self._compute(bucket)))
