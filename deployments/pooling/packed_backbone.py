"""A backbone that computes nothing for padding.

It replaces the backbone of a stock model (`model.base_model`), between the inputs and the head. It
receives a padded batch, removes the padding, runs all sequences one after another in one row, and
lays out the hidden states like the padded batch. So every kind of head works unchanged: heads that
read the first token, the last that is not padding, or all tokens.

`pack` finds out by a trial run whether a model can be packed: the hidden states must equal those of
each sequence run by itself. `is_right_padded` finds out in the same way whether a model can be
padded: XLNet's head reads the last position of a row, padding or not, and FNet mixes all positions.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from deployments.compute.device_errors import is_of_device
from deployments.compute.host_to_device import send
from deployments.pooling.embedder import Embedder
from deployments.pooling.packed_attention import ATTENTION_NAME, PackedRow

logger = logging.getLogger(__name__)

TextModel = PreTrainedModel | Embedder
"""A model that answers each text with a row of numbers: a stock classifier, or an embedder."""

TOLERANCES = {torch.float32: 1e-3}
ROUNDED_TOLERANCE = 0.1
"""The relative error that rounding can cause. If scores are rounded at other points in bfloat16,
the hidden states of twelve layers differ by 1 % and logits by up to 4 %; mixed sequences or wrong
positions change all values."""

NO_TOKEN = -1
"""Marks padding for models without a padding token; heads must be able to tell it from text."""


class Trace(Protocol):
    """A backbone's trace, as the packed backbone sees it."""

    def takes(self, types: torch.Tensor | None) -> bool:
        """Return whether it is valid for texts of such types."""
        ...

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None, row: PackedRow
    ) -> ModelOutput:
        """Return the backbone's own output; `ids`, `positions` and `types` are [1, n]."""
        ...


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the tokens of a padded batch lie in a row without padding.

    Attributes:
        lengths: Tokens of each sequence.
        indices: [n], int64, each token's index in the padded batch, row by row.
        positions: [n], int64, each token's position in its sequence.
        starts: See `PackedRow`.
    """

    lengths: tuple[int, ...]
    indices: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, device: torch.device) -> Self:
        """Return the packing of sequences of some lengths, padded on the right to a width.

        Nothing is read from the device, and one copy takes all to it.
        """
        sizes = torch.tensor(lengths)
        ends = sizes.cumsum(0)
        num_tokens = int(ends[-1])
        positions = torch.arange(num_tokens) - (ends - sizes).repeat_interleave(sizes)
        rows = torch.arange(len(lengths)).repeat_interleave(sizes)
        indices = rows * width + positions
        if device.type == "cpu":
            return cls(tuple(lengths), indices, positions)
        joined = torch.cat([indices, positions, sizes.new_zeros(1), ends])
        sizes_of = [num_tokens, num_tokens, len(lengths) + 1]
        sent = torch.split(send(joined, device), sizes_of)
        return cls(tuple(lengths), sent[0], sent[1], sent[2].int())

    @classmethod
    def read(cls, attention_mask: torch.Tensor) -> Self:
        """Return the packing of a batch, [n, length], whose mask is 1 where there is a token."""
        lengths = attention_mask.sum(dim=1).tolist()
        return cls.of(lengths, attention_mask.shape[1], attention_mask.device)

    def take(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the tokens of a padded batch, [n, length], as one row, [1, tokens]."""
        return batch.flatten().index_select(0, self.indices)[None]

    def lay_out(self, row: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return a row, [tokens, hidden], as a padded batch, [*shape, hidden]."""
        batch = row.new_zeros(shape.numel(), row.shape[-1])
        return batch.index_copy_(0, self.indices, row).view(*shape, row.shape[-1])


_KNOWN: ContextVar[Packing | None] = ContextVar("known packing", default=None)
"""How the batch is packed that this thread runs; None if its mask has to be read."""


@contextmanager
def known(packing: Packing | None) -> Iterator[None]:
    """Run the block's batch with this packing. Reading a mask would wait for a GPU."""
    token = _KNOWN.set(packing)
    try:
        yield
    finally:
        _KNOWN.reset(token)


class PackedBackbone(torch.nn.Module):
    """Runs a stock backbone on sequences that are packed in one row.

    Attributes:
        stock: The backbone.
        traced: Its trace, which runs instead where it can.
    """

    def __init__(self, backbone: torch.nn.Module) -> None:
        """Wrap a backbone whose attention implementation is `packed`."""
        super().__init__()
        self.stock = backbone
        self.traced: Trace | None = None
        self._first_position = first_position(backbone)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: None = None,
        token_type_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> ModelOutput:
        """Run the backbone.

        Args:
            input_ids: [batch, length], padded on the right.
            attention_mask: [batch, length], 1 where there is a token.
            position_ids: Always None; heads pass it on.
            token_type_ids: [batch, length], which of a pair's texts each token belongs to.
            **options: Further arguments for the backbone.

        Returns:
            The backbone's own output, with `last_hidden_state` [batch, length, hidden] and
            `pooler_output`, if it has a pooler.
        """
        packing = _KNOWN.get() or Packing.read(attention_mask)
        positions = packing.positions[None] + self._first_position
        ids = packing.take(input_ids)
        types = None if token_type_ids is None else packing.take(token_type_ids)
        packed_row = PackedRow(packing.lengths, packing.starts)
        others = [option for name, option in options.items() if name != "return_dict"]
        is_plain = all(option is None or option is False for option in others)
        if self.traced is not None and self.traced.takes(types) and is_plain:
            output = self.traced(ids, positions, types, packed_row)
        else:
            if types is not None:
                options["token_type_ids"] = types
            output = self.stock(
                input_ids=ids, position_ids=positions, packed_row=packed_row, **options
            )
        hidden = packing.lay_out(output["last_hidden_state"][0], input_ids.shape)
        output["last_hidden_state"] = hidden
        if output.get("pooler_output") is not None:
            pooler: Any = self.stock.pooler
            output["pooler_output"] = pooler(hidden)
        return output


def first_position(backbone: torch.nn.Module) -> int:
    """Return the index of a sequence's first position.

    RoBERTa and its relatives start after the padding token's id, which their embeddings store.

    Source: transformers, models/roberta/modeling_roberta.py, create_position_ids_from_input_ids
    """
    for name, module in backbone.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


@torch.inference_mode()
def pack(model: TextModel, texts: Sequence[Sequence[int]]) -> bool:
    """Make a model compute without padding, if it can; return whether it can.

    Args:
        model: A model with stock attention, in evaluation mode.
        texts: Texts to try; their lengths should differ, and one should exceed the model's window.

    Raises:
        RuntimeError: Memory ran out, or the device is lost; neither says that it can't.
    """
    backbone, attention = model.base_model, model.config._attn_implementation
    config = model.config.get_text_config()
    pad_token_id = config.pad_token_id
    sequences = [torch.tensor(text) for text in texts]
    try:
        alone = [_hidden_and_rows(model, sequence[None]) for sequence in sequences]
        if pad_token_id is None:
            config.pad_token_id = NO_TOKEN
        model.set_attn_implementation(ATTENTION_NAME)
        setattr(model, model.base_model_prefix, PackedBackbone(backbone))
        together = _hidden_and_rows(model, *pad(sequences, config.pad_token_id))
    except Exception as error:  # a model's own code may raise anything
        if is_of_device(error):
            raise
        reason = f"{type(error).__name__}: {error}"
    else:
        hidden, rows = together
        pairs = [(one[0], hidden[i, : one.shape[1]]) for i, (one, _) in enumerate(alone)]
        if all(are_close(*pair) for pair in (*pairs, (torch.cat([own for _, own in alone]), rows))):
            return True
        reason = "its hidden states depend on the other sequences in the row"
    logger.info("%s models can't be packed: %s", model.config.model_type, reason)
    config.pad_token_id = pad_token_id
    setattr(model, model.base_model_prefix, backbone)
    model.set_attn_implementation(attention)
    return False


@torch.inference_mode()
def is_right_padded(model: TextModel, texts: Sequence[Sequence[int]]) -> bool:
    """Return whether texts padded to the longest get the same rows as each by itself.

    Args:
        model: A model in evaluation mode, on its device.
        texts: Texts to try; their lengths should differ.
    """
    pad_token_id = model.config.get_text_config().pad_token_id
    if pad_token_id is None:
        reason = "they have no padding token"
    else:
        try:
            alone = [_rows(model, *pad([torch.tensor(text)], pad_token_id)) for text in texts]
            together = _rows(model, *pad([torch.tensor(text) for text in texts], pad_token_id))
        except Exception as error:
            if is_of_device(error):
                raise
            reason = f"{type(error).__name__}: {error}"
        else:
            if are_close(torch.cat(alone), together):
                return True
            reason = "their results depend on the padding after a text"
    logger.warning(
        "%s models run texts one by one, which is slower: %s", model.config.model_type, reason
    )
    return False


def pad(sequences: Sequence[torch.Tensor], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences as one tensor, [n, longest], and a mask that is 1 at tokens."""
    token_ids = pad_sequence(list(sequences), batch_first=True, padding_value=pad_token_id)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    is_token = torch.arange(token_ids.shape[1]) < lengths[:, None]
    return token_ids, is_token.long()


def _hidden_and_rows(
    model: TextModel, token_ids: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states, [n, length, hidden], and rows, [n, width], of [n, length]."""
    if mask is None:
        mask = torch.ones_like(token_ids)
    backbone: torch.nn.Module = model.base_model
    device = model.device
    hidden: torch.Tensor = backbone(token_ids.to(device), attention_mask=mask.to(device))[
        "last_hidden_state"
    ]
    return hidden, _rows(model, token_ids, mask)


def _rows(model: TextModel, token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return rows, [n, width], of [n, length], all on the model's device after a move."""
    return rows_of(
        model, input_ids=token_ids.to(model.device), attention_mask=mask.to(model.device)
    )


def rows_of(model: TextModel, **inputs: torch.Tensor) -> torch.Tensor:
    """Return a model's row for each text of a batch: a classifier's logits, or vectors.

    Args:
        model: In evaluation mode.
        inputs: Its arguments, [n, length] each, on its device.

    Returns:
        [n, width], on the model's device.
    """
    output = model(**inputs)
    rows: torch.Tensor = output if isinstance(model, Embedder) else output.logits
    return rows


def are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal but for rounding, or have numbers that aren't finite."""
    if one.shape != other.shape:
        return False
    # Numbers that are not finite pass: they have another cause, which the warm-up reports.
    error = (one.float() - other.float()).norm()
    return not error > TOLERANCES.get(one.dtype, ROUNDED_TOLERANCE) * one.float().norm()
