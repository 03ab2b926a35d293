"""Attention that reads each extent only as far as its sequence goes.

A layer is one long row of tokens. Tensors on the device tell torch's flash attention where each
sequence's extent starts, how much of it is in use, and which queries are the sequence's newest. So
a step needs no mask, gathers nothing and reads no padding, whether it decodes, prefills or does
both. If there are few rows, many of the GPU's processors read parts of a long extent at the same
time.

Flash attention is documented for starts that ascend; what it does with gaps between the extents, or
with starts in another order, its documentation does not say. So `find_obstacle` compares its
results with masked attention on the device at hand before it is used. If they differ, or the
operator is missing, masks are used instead.

In captured steps of decode rows our own kernel attends (`find_row_attention`), which reads short
extents faster. It is compared in the same way; if it can't be used, flash attention is.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from deployments.compute.device_errors import is_of_device
from deployments.compute.sdpa import flash_attention
from deployments.compute.speedups import AttendRows, import_row_attention, unless_triton_fails
from deployments.engine.attention.kv_cache import KVShape
from deployments.plan.model_shape import FLASH_HEAD_DIM_STEP, MAX_FLASH_HEAD_DIM, WITH_SINKS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

PROBE_LENGTHS = (1, 77, 2048, 300)
"""Sequence lengths of the comparison; one is long enough to be read in parts."""

PROBE_CHUNKS = (1, 77, 130, 40)
"""Queries of each sequence when chunks are compared; some have earlier tokens, some have none."""

PROBE_WINDOW = 100
"""The window when chunks of a layer with a window are compared."""

PROBE_EXTENT = 2304
"""Tokens from one extent's start to the next in the comparison."""

PROBE_REPEATS = (1, 512)
"""How often the sequences are repeated when decode rows are compared: so many rows fill any GPU
that their extents are read whole, and few rows' are read in parts."""

TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Allowed difference of outputs, which are averages of numbers around 1, for each dtype that
flash attention takes."""


@dataclass(frozen=True, slots=True)
class ExtentReads:
    """The parts of extents that n sequences read in layers of one capacity.

    Attributes:
        query_starts: [n + 1], int32, the first query of each sequence, and the number of queries.
        starts: [n + 1], int32, the first token of each sequence's extent, and any other token.
        lengths: [n], int32, how many tokens from there each sequence has. Its queries are the last
            of them; each sees itself and all before it.
        most_queries: The most queries of a sequence.
        longest: The most tokens that a sequence can have.
        window: The most tokens that a query sees, itself included; None if it sees all.
        attend_rows: Attends if each sequence has one query, which sees all; None: flash attention
            does.
    """

    query_starts: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    most_queries: int
    longest: int
    window: int | None = None
    attend_rows: AttendRows | None = None

    @classmethod
    def of_rows(
        cls,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        spare_token: int,
        longest: int,
        attend_rows: AttendRows | None = None,
    ) -> "ExtentReads":
        """Return the reads of n sequences with one query each.

        Args:
            starts: [n], int64, the first token of each row's extent.
            lengths: [n], int64, the length of each row's sequence, at least 1.
            spare_token: The token after all extents.
            longest: The most tokens that a row can see.
            attend_rows: See `find_row_attention`.
        """
        query_starts = torch.arange(len(starts) + 1, dtype=torch.int32, device=starts.device)
        ended = torch.nn.functional.pad(starts, (0, 1), value=spare_token)
        used = lengths.clamp(max=longest).int()
        return cls(query_starts, ended.int(), used, 1, longest, attend_rows=attend_rows)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attend with each sequence's queries to its tokens.

        Args:
            query: [m, num_heads, head_dim], the queries of all sequences.
            keys: [tokens of the layer, num_kv_heads, head_dim].
            values: As keys.
            scale: Factor on the scores; None means head_dim ** -0.5.

        Returns:
            [m, num_heads, head_dim].
        """
        if self.attend_rows is not None:
            return self.attend_rows(
                query, keys, values, self.starts, self.lengths, self.longest, scale
            )
        return flash_attention(
            query,
            keys,
            values,
            self.query_starts,
            self.starts,
            self.most_queries,
            self.longest,
            is_causal=self.most_queries > 1,
            scale=scale,
            window_size_left=None if self.window is None else self.window - 1,
            seqused_k=self.lengths,
        )


def find_obstacle(
    shape: KVShape, text_config: "PreTrainedConfig", device: torch.device
) -> str | None:
    """Return why a model can't attend by `ExtentReads`; None if it can.

    Args:
        shape: The model's keys and values.
        text_config: Its configuration.
        device: Its device.

    Raises:
        torch.AcceleratorError: The device failed.
        torch.OutOfMemoryError: It has no memory for the comparison.
    """
    if device.type != "cuda":
        return f"a device of type {device.type}"
    if shape.dtype not in TOLERANCE:
        return str(shape.dtype).removeprefix("torch.")
    if shape.head_dim > MAX_FLASH_HEAD_DIM or shape.head_dim % FLASH_HEAD_DIM_STEP:
        return f"heads of {shape.head_dim} elements"
    if getattr(text_config, "attn_logit_softcapping", None):
        return "softcapped scores"
    if text_config.model_type in WITH_SINKS:
        return "attention sinks"
    return compare_with_masks(shape, text_config.num_attention_heads, device)


def find_row_attention(shape: KVShape, num_heads: int, device: torch.device) -> AttendRows | None:
    """Return our attention of decode rows, for captured steps; None if flash attention has to.

    Only captured steps use it: launched from Python, two kernels of Triton take longer than they
    spare.

    Args:
        shape: The model's keys and values, which flash attention takes; see `find_obstacle`.
        num_heads: Heads of queries.
        device: The model's device.

    Raises:
        torch.AcceleratorError: The device failed.
        torch.OutOfMemoryError: It has no memory for the comparison.
    """
    if device.type != "cuda":
        return None

    def find() -> AttendRows | None:
        attend_rows = import_row_attention()
        error = compare_rows_with_masks(attend_rows, shape, num_heads, device)
        if error <= TOLERANCE[shape.dtype]:  # false for NaN
            return attend_rows
        logger.warning("flash attention reads decode rows: our kernel is off by %g", error)
        return None

    return unless_triton_fails(find, "flash attention reads decode rows")


def describe_reads(
    obstacle: str | None, *, attends_in_place: bool, has_row_attention: bool = False
) -> str:
    """Return in words how attention reads the KV memory.

    Args:
        obstacle: See `find_obstacle`.
        attends_in_place: Whether our own kernel attends.
        has_row_attention: Whether it attends in captured steps of decode rows.
    """
    if attends_in_place:
        return "attention by our kernel"
    if obstacle is None and has_row_attention:
        return "flash attention by length, and our kernel for decode rows"
    if obstacle is None:
        return "flash attention by length"
    return f"attention by masks because of {obstacle}"


@torch.inference_mode()
def compare_with_masks(shape: KVShape, num_heads: int, device: torch.device) -> str | None:
    """Return how `ExtentReads` differs from masked attention with such heads; None if it does not.

    Args:
        shape: The keys and values.
        num_heads: Heads of queries.
        device: The model's device.

    Raises:
        torch.AcceleratorError: The device failed.
        torch.OutOfMemoryError: It has no memory for the comparison, which says nothing of its
            result; masks would be read until the process ends.
    """
    try:
        errors = list(_errors(shape, num_heads, device))
    except Exception as failure:  # after any other error, masked attention still works
        if is_of_device(failure):
            raise
        logger.warning("flash attention fails here", exc_info=True)
        return f"an error of flash attention ({type(failure).__name__})"
    for error in errors:
        if not error <= TOLERANCE[shape.dtype]:  # true for NaN
            return f"flash attention, which is off by {error:g}"
    return None


@torch.inference_mode()
def compare_rows_with_masks(
    attend_rows: AttendRows, shape: KVShape, num_heads: int, device: torch.device
) -> float:
    """Return the largest difference of decode rows' attention from masked attention.

    Args:
        attend_rows: Attends.
        shape: The keys and values.
        num_heads: Heads of queries.
        device: Where to compare.
    """
    order, counts = range(len(PROBE_LENGTHS)), (1,) * len(PROBE_LENGTHS)
    probes = [
        _Probe.random(shape, num_heads, device, each, counts) for each in (order, order[::-1])
    ]
    errors = [
        probe.error_of_rows(attend_rows, number) for probe in probes for number in PROBE_REPEATS
    ]
    return torch.tensor(errors).max().item()  # NaN if one is, unlike Python's


def _errors(shape: KVShape, num_heads: int, device: torch.device) -> Iterator[float]:
    """Yield the largest difference from masked attention in each case.

    Decode rows and chunks, of layers with a window too, are compared with extents in ascending and
    in descending order.
    """
    order = range(len(PROBE_LENGTHS))
    cases: list[tuple[Sequence[int], int | None]]
    cases = [((1,) * len(order), None), (PROBE_CHUNKS, None)]
    if any(shape.windows):
        cases.append((PROBE_CHUNKS, PROBE_WINDOW))
    for extents in (order, order[::-1]):
        for counts, window in cases:
            yield _Probe.random(shape, num_heads, device, extents, counts, window).error


@dataclass(frozen=True, slots=True)
class _Probe:
    """Random queries, keys and values of some sequences, and what masked attention makes of them.

    Attributes:
        query: [m, num_heads, head_dim].
        keys: [tokens, num_kv_heads, head_dim]. Tokens of no sequence are NaN.
        values: As keys.
        reads: The sequences.
        expected: [m, num_heads, head_dim], float32.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    reads: ExtentReads
    expected: torch.Tensor

    @classmethod
    def random(
        cls,
        shape: KVShape,
        num_heads: int,
        device: torch.device,
        order: range,
        counts: Sequence[int],
        window: int | None = None,
    ) -> "_Probe":
        """Return sequences of the probe's lengths.

        Args:
            shape: The keys and values.
            num_heads: Heads of queries.
            device: The model's device.
            order: For each sequence, how many extents are before its own.
            counts: The queries of each sequence.
            window: The most tokens that a query sees.
        """
        spare_token = len(order) * PROBE_EXTENT
        generator = torch.Generator(device).manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            numbers = torch.randn(*size, shape.head_dim, generator=generator, device=device)
            return numbers.to(shape.dtype)

        def numbers(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        query = random(sum(counts), num_heads)
        keys, values = (random(spare_token + 1, shape.num_kv_heads) for _ in range(2))
        starts = [place * PROBE_EXTENT for place in order]
        extents = [slice(at, at + n) for at, n in zip(starts, PROBE_LENGTHS, strict=True)]
        is_unread = torch.ones(len(keys), dtype=torch.bool, device=device)
        for extent in extents:
            is_unread[extent] = False
        for stored in (keys, values):
            stored.masked_fill_(is_unread[:, None, None], torch.nan)
        query_starts = [sum(counts[:at]) for at in range(len(counts) + 1)]
        reads = ExtentReads(
            numbers(query_starts),
            numbers([*starts, spare_token]),
            numbers(PROBE_LENGTHS),
            max(counts),
            max(PROBE_LENGTHS),
            window,
        )
        expected = [
            _masked(own, keys[extent].float(), values[extent].float(), window)
            for own, extent in zip(torch.split(query.float(), list(counts)), extents, strict=True)
        ]
        return cls(query, keys, values, reads, torch.cat(expected))

    @property
    def error(self) -> float:
        """The largest difference of what `ExtentReads` gives."""
        found = self.reads.attend(self.query, self.keys, self.values, None)
        return (found.float() - self.expected).abs().max().item()

    def error_of_rows(self, attend_rows: AttendRows, num_repeats: int) -> float:
        """Return the largest difference with sequences of one query, each repeated."""
        starts = self.reads.starts[:-1].repeat(num_repeats)
        lengths, longest = self.reads.lengths.repeat(num_repeats), self.reads.longest
        query = self.query.repeat(num_repeats, 1, 1)
        found = attend_rows(query, self.keys, self.values, starts, lengths, longest, None)
        differences = found.float().view(num_repeats, *self.expected.shape) - self.expected
        return differences.abs().max().item()


def _masked(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Attend with a sequence's last queries [m, num_heads, head_dim], by a mask."""
    grouped = query.view(len(query), keys.shape[1], -1, query.shape[-1]).permute(1, 2, 0, 3)
    places = torch.arange(len(keys), device=keys.device)
    own = places[len(keys) - len(query) :, None]
    mask = places <= own
    if window is not None:
        mask &= places > own - window
    own_keys, own_values = (
        tokens.transpose(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1)
        for tokens in (keys, values)
    )
    output = scaled_dot_product_attention(grouped, own_keys, own_values, attn_mask=mask)
    return output.permute(2, 0, 1, 3).flatten(1, 2)
