"""Decode steps as captured CUDA graphs: one launch instead of a thousand.

On a GPU, launching a decode step's kernels from Python takes longer than running them. So a step of
decode rows only is padded to one of a few sizes (`graph_sizes`), and each size is a graph. Its
inputs (token ids, rotary positions, lengths, and where each row's extents start) are in a static
buffer that one copy from pinned memory fills.

If rows read their extents by length, all sizes are captured at the start, the largest first, whose
memory serves the others; so are small steps with prompts (`cuda_mixed`). With masks there are too
many sizes, so each is captured when it first occurs: that step runs plainly and is then captured.
So is every step after `drop`.

If a capture fails, all steps run plainly from then on. But if a capture only lacked memory or time,
existing captures stay in use, a decode step of another size takes the next larger one, and after
`drop`, which frees memory, captures are tried again. If the
step itself fails, it raises as a plain step would, and may be run again in parts: its rows write
the same keys and values to the same places. At the start no rows wait for it, so there it counts as
a failed capture, unless the device is lost.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from deployments.compute.device_errors import is_fatal, is_out_of_memory, release_cache
from deployments.compute.host_to_device import host_tensor
from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.replay.cuda_capture import Graph, GraphCapturer
from deployments.engine.replay.cuda_mixed import MixedSize, MixedSteps
from deployments.engine.replay.static_decode import CudaStaticDecodeStep
from deployments.plan.graph_sizes import DecodeBucket, DecodeBuckets

logger = logging.getLogger(__name__)

RunModel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedStep], torch.Tensor]
"""Runs the model on token ids [1, n], positions [1, n], the rows whose logits are wanted [k], all
int64, and the packed step; returns [k, vocab], in the model's dtype."""

Size = DecodeBucket | MixedSize

PART_LAYERS = frozenset({2, 8, 32})
"""The layers with which another graph begins. A launch takes the host time for each kernel: for all
of a model with 28 layers half a millisecond, in which the device would have nothing to do. It runs
two layers for as long as six take to be launched, and so on."""

MAX_CAPTURE_S = 60.0
"""No capture begins at the start after this many seconds. On an H100, 35 graphs of a model with 28
layers took 1.9 s."""


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What capturing at the start took.

    Attributes:
        num_graphs: The graphs.
        num_sizes: The sizes of steps; larger if some have no graph.
        seconds: The time.
        num_bytes: Memory of the device, with the graphs' common pool and with what libraries keep
            after their first run on the captures' stream.
    """

    num_graphs: int
    num_sizes: int
    seconds: float
    num_bytes: int

    def __str__(self) -> str:
        """Describe it for the log."""
        graphs = str(self.num_graphs)
        if self.num_graphs < self.num_sizes:
            graphs = f"{self.num_graphs} of {self.num_sizes}"
        mib = self.num_bytes / 2**20
        return f"{graphs} CUDA graphs, captured in {self.seconds:.1f} s, {mib:.0f} MiB"


class CudaDecodeReplay:
    """Runs decode steps as captured graphs where possible; see `DecodeReplay`."""

    def __init__(
        self,
        run_model: RunModel,
        kv: KVCache,
        capturer: GraphCapturer,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_graphs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate the static inputs; nothing is captured yet.

        Args:
            run_model: Runs the model.
            kv: The KV cache that the model attends over.
            capturer: Captures the steps.
            max_num_seqs: The most rows of a step of decode rows.
            max_batched_tokens: The most tokens of a step.
            max_graphs: Most graphs that are kept with masks; the least recently used one is
                dropped.
            clock: Returns the time, in seconds.
        """
        self._run_model = run_model
        self._kv = kv
        self._buckets = DecodeBuckets(max_num_seqs, max(kv.capacities), kv.reads_by_length)
        self._sizes: list[Size] = []
        self._mixed: MixedSteps | None = None
        if kv.reads_by_length:
            self._mixed = MixedSteps(kv, max_num_seqs, max_batched_tokens)
            self._sizes = [*self._buckets.with_length(1), *self._mixed.sizes]
        self._max_graphs = len(self._sizes) or max_graphs
        self._clock = clock
        self._is_full = False  # there was no memory, or no time, for another graph
        self._capturer: GraphCapturer | None = capturer
        self._graphs: dict[Size, Graph] = {}  # the most recently used is last
        # Token ids, positions, lengths and the starts of each group lie one after the other, so a
        # single copy fills all.
        self._num_inputs = 3 + kv.num_groups
        num_values = self._num_inputs * max_num_seqs
        self._inputs = torch.zeros(num_values, dtype=torch.int64, device=kv.device)
        self._due = torch.arange(max_num_seqs, device=kv.device)
        self._logits: torch.Tensor | None = None
        self.report: CaptureReport | None = None

    @property
    def num_captured(self) -> int:
        """The number of graphs that are kept now."""
        return len(self._graphs)

    @torch.inference_mode()
    def prepare(self, least: int, most: int) -> None:
        """Capture all sizes if rows read by length, unless captures have failed; see `report`."""
        if not self._kv.reads_by_length or self._capturer is None:
            return
        started, free_bytes, num_bytes = self._clock(), 0, 0
        for size in self._sizes:
            if self._capturer is None or self._is_full:
                break
            if self._clock() - started > MAX_CAPTURE_S:
                logger.warning("there was no time to capture %s", size)
                self._is_full = True
                break
            if isinstance(size, MixedSize):
                assert self._mixed is not None
                self._mixed.fill(size, PackedStep(self._kv, (), (), ()))
            else:
                self._fill(size)
            try:
                free_bytes = free_bytes or self._capturer.free_bytes
                self._run_and_capture(size, self._capturer)
                if self._capturer is not None:
                    num_bytes = free_bytes - self._capturer.free_bytes
                continue
            except Exception as error:  # without graphs, the engine still answers
                if is_fatal(error):
                    raise
                is_short = is_out_of_memory(error)
                logger.warning("%s could not be run at the start", size, exc_info=True)
            # Outside the except block, since the traceback held the step's tensors.
            self._limit_captures(size, is_short=is_short)
            release_cache(self._kv.device)
        if not self._graphs:
            num_bytes = 0  # those that were captured have been dropped
        seconds = self._clock() - started
        self.report = CaptureReport(len(self._graphs), len(self._sizes), seconds, num_bytes)
        logger.info("%s", self.report)

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
        bucket = self._find(len(lengths), max(lengths))
        if bucket is None:
            return None
        starts = [
            [row[group] for row in step.decode_starts] for group in range(self._kv.num_groups)
        ]
        self._fill(bucket, token_ids, step.rotary_positions, lengths, starts)
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

    def run_mixed(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        due: Sequence[int],
        step: PackedStep,
    ) -> torch.Tensor | None:
        """Run a step with chunks; None if it has to run plainly.

        Args:
            token_ids: Each row's token.
            positions: Its position.
            due: The rows whose logits are wanted.
            step: The decode rows and the chunks.

        Returns:
            As `run`, for the rows that are due.
        """
        size = None if self._mixed is None else self._mixed.cover(step, len(due))
        if self._mixed is None or size is None:
            return None
        graph = self._graphs.pop(size, None)
        if graph is None and (self._capturer is None or self._is_full):
            return None
        self._mixed.fill(size, step, token_ids, positions, due)
        if graph is None:
            assert self._capturer is not None
            logits = self._run_and_capture(size, self._capturer)
        else:
            graph.replay()
            self._graphs[size] = graph
            assert self._logits is not None
            logits = self._logits
        return logits[: len(due)].to(torch.float32, copy=True)

    def _find(self, num_rows: int, length: int) -> DecodeBucket | None:
        """Return the size that a step takes: its own, or a larger one if no more are captured."""
        bucket = self._buckets.cover(num_rows, length)
        if bucket in self._graphs or not self._is_full:
            return bucket
        larger = [
            size
            for size in self._graphs
            if isinstance(size, DecodeBucket)
            and size.num_rows >= num_rows
            and size.read_length >= bucket.read_length
        ]
        return min(larger, key=lambda size: (size.num_rows, size.read_length), default=None)

    def _fill(
        self,
        bucket: DecodeBucket,
        token_ids: Sequence[int] = (),
        positions: Sequence[int] = (),
        lengths: Sequence[int] = (),
        starts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Fill the static inputs with the rows of a step, and with padding after them."""
        num_padding = bucket.num_rows - len(token_ids)
        padding = [0] * num_padding
        values = [*token_ids, *padding, *positions, *padding, *lengths, *padding]
        spare_tokens = self._kv.spare_tokens
        for own, spare in zip(starts or [()] * len(spare_tokens), spare_tokens, strict=True):
            values += own
            values += [spare] * num_padding
        host = host_tensor(values, self._inputs.device, torch.int64)
        self._inputs[: len(values)].copy_(host, non_blocking=True)

    def _compute(self, bucket: Size) -> torch.Tensor:
        """Run the model on the static inputs: [rows that are due, vocab]."""
        if isinstance(bucket, MixedSize):
            assert self._mixed is not None
            mixed = self._mixed.static_step(bucket)
            inputs = mixed.inputs
            mixed.begin_layer = self._divide
            return self._run_model(
                inputs.token_ids[None], inputs.positions[None], inputs.due, mixed
            )
        own = self._inputs[: self._num_inputs * bucket.num_rows].view(self._num_inputs, -1)
        token_ids, positions, lengths = own[:3]
        step = CudaStaticDecodeStep.of(self._kv, bucket, lengths, own[3:])
        step.begin_layer = self._divide
        due = self._due[: bucket.num_rows]
        return self._run_model(token_ids[None], positions[None], due, step)

    def _divide(self, layer: int) -> None:
        """Begin another graph, while one is captured, with some layers."""
        if layer in PART_LAYERS and self._capturer is not None:
            self._capturer.divide()

    def _run_and_capture(self, bucket: Size, capturer: GraphCapturer) -> torch.Tensor:
        """Run a step of this size, and capture it for the next; return the logits, all rows'."""
        logits = capturer.warm_up(partial(self._compute, bucket))
        try:
            self._graphs[bucket] = self._capture(bucket, capturer, like=logits)
        except Exception as error:  # any failure of a capture leaves plain steps usable
            is_short = is_out_of_memory(error)
            logger.warning("%s could not be captured", bucket, exc_info=True)
        else:
            return logits
        # Outside the except block, since the traceback held the failed capture's tensors.
        self._limit_captures(bucket, is_short=is_short)
        release_cache(self._kv.device)
        return logits

    def _limit_captures(self, failed: Size, *, is_short: bool) -> None:
        """Decide, after a failed capture, what is captured from now on."""
        if is_short or (self._graphs and isinstance(failed, MixedSize)):
            if not self._graphs:
                self._logits = None
            logger.warning("no more sizes of steps are captured than these %d", len(self._graphs))
            self._is_full = True
        else:
            logger.warning("decode steps are launched kernel by kernel from now on")
            self._capturer = None
            self.drop()

    def _capture(self, bucket: Size, capturer: GraphCapturer, *, like: torch.Tensor) -> Graph:
        if len(self._graphs) >= self._max_graphs:
            del self._graphs[next(iter(self._graphs))]
        if self._logits is None:
            # One buffer serves all graphs; one for each graph would have to be kept alive.
            self._logits = like.new_empty(self._buckets.max_rows, like.shape[-1])
        target = self._logits[: len(like)]
        return capturer.capture(lambda: target.copy_(self._compute(bucket)))
