"""An embedding that is looked up in the packed weights of the layer that computes the logits.

Many models use one table for both. The layer's kernel reads it packed, so the embedding would need
a plain copy of its own, of a fifth to a half of a small model's bytes.
"""

import torch
from torch.func import functional_call
from transformers import PreTrainedModel

from deployments.compute.cpu.linear.packed_layout import BLOCK, can_read, packed_words
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear
from deployments.compute.merged_linear import reads_weights

MIN_TABLE_BYTES = 2**24
"""A smaller table stays plain: a lookup in packed weights takes some microseconds more."""


class PackedEmbedding(torch.nn.Module):
    """An embedding without a table of its own."""

    def __init__(self, embedding: torch.nn.Embedding, packed: torch.Tensor) -> None:
        """Take the table's place.

        Args:
            embedding: Any subclass of `Embedding`; its table is dropped.
            packed: The same table, packed; see `can_read`.
        """
        super().__init__()
        self._packed = packed
        self._words = packed_words(packed)
        self._embedding = embedding
        nothing = embedding.weight.new_empty(0, embedding.embedding_dim)
        embedding.weight = torch.nn.Parameter(nothing, requires_grad=False)
        embedding.padding_idx = None  # only training uses it

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens of any shape."""
        words = self._words[token_ids // BLOCK, :, token_ids % BLOCK]
        rows = words.view(self._packed.dtype)
        if type(self._embedding) is torch.nn.Embedding:
            return rows
        # A subclass may scale what it looks up.
        numbers = torch.arange(token_ids.numel()).view(token_ids.shape)
        found: torch.Tensor = functional_call(
            self._embedding, {"weight": rows.flatten(0, -2)}, (numbers,)
        )
        return found


def is_tied(model: torch.nn.Module) -> bool:
    """Return whether the embedding's table is also the plain weight of the layer of the logits."""
    embedding, head = _ends(model)
    return (
        isinstance(embedding, torch.nn.Embedding)
        and type(head) is torch.nn.Linear
        and head.weight is embedding.weight
    )


def look_up_in_head(model: torch.nn.Module) -> None:
    """Let a model that was tied look its embeddings up in the packed layer.

    A table stays plain if it is small, if the layer can't be read, or if the model's own code reads
    the table.
    """
    embedding, head = _ends(model)
    assert isinstance(model, PreTrainedModel)
    assert isinstance(embedding, torch.nn.Embedding)
    if (
        isinstance(head, PrepackedLinear)
        and embedding.weight.nbytes >= MIN_TABLE_BYTES
        and not any(reads_weights(m) for m in model.modules() if embedding in m.children())
        and can_read(head.packed)
    ):
        shared = PackedEmbedding(embedding, head.packed)
        model.set_input_embeddings(shared)


def _ends(model: torch.nn.Module) -> tuple[object, object]:
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        return None, None  # no logits
    return model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call] # left untyped
