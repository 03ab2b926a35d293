"""Runs a pooler's extremes once, so that errors show at the start."""

from collections.abc import Sequence

from deployments.compute.device_errors import is_fatal, is_out_of_memory
from deployments.contract.model_errors import UnsupportedModelError
from deployments.contract.pooling import PoolingRequest, TextPair
from deployments.pooling.model_loader import LoadedPooler
from deployments.pooling.pooling_model import PoolingModel
from deployments.pooling.request_queue import TokenIds
from deployments.pooling.text_encoder import EncodedTexts, TextEncoder


def warm_up(
    pooler: PoolingModel, loaded: LoadedPooler, source: str, max_batched_tokens: int
) -> None:
    """Run the shortest text, the largest micro-batch and, with one label, a pair of texts.

    Args:
        pooler: The model.
        loaded: The loaded model that it was made from.
        source: Names it in errors.
        max_batched_tokens: The most tokens of a micro-batch.

    Raises:
        UnsupportedModelError: The model fails on one of them, or gives no finite numbers.
    """
    longest = loaded.probes.of_length(loaded.max_model_len)
    num_longest = max(1, max_batched_tokens // len(longest))
    for sequences in ((pooler.probe,), (longest,) * num_longest):
        _try(pooler, loaded, source, f"a text of {len(sequences[0])} tokens", sequences)
    if len(loaded.labels) != 1:
        return
    encoder = TextEncoder(loaded.tokenizer, loaded.max_model_len, reads_types=loaded.reads_types)
    (encoded,) = encoder.encode([PoolingRequest("warm-up", (TextPair("a", "b"),), truncate=True)])
    if not isinstance(encoded, EncodedTexts):
        raise UnsupportedModelError(f"{source!r} can't read a pair of texts: {encoded}")
    _try(pooler, loaded, source, "a pair of texts", encoded.token_ids, encoded.type_ids)


def _try(
    pooler: PoolingModel,
    loaded: LoadedPooler,
    source: str,
    what: str,
    sequences: Sequence[TokenIds],
    type_ids: Sequence[TokenIds | None] = (),
) -> None:
    try:
        rows = pooler(sequences, type_ids)
    except Exception as error:
        if is_fatal(error) or is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(f"{source!r} fails on {what}: {reason}") from error
    if not rows.isfinite().all():
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        raise UnsupportedModelError(
            f"{source!r} gives no finite numbers; try another dtype than {dtype}"
        )
