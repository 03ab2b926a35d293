"""Describes a classifier or an embedding model to the ingress."""

import time

from transformers import PreTrainedConfig

from deployments.contract.descriptions import EmbeddingDescription, PoolerDescription
from deployments.contract.model_spec import ModelSpec, number
from deployments.plan.sizes import NO_LIMIT_LEN
from deployments.pooling.embedder import Embedder
from deployments.pooling.model_outline import fit_length, label_names, load_outline
from deployments.pooling.packed_backbone import TextModel
from deployments.pooling.pooling_model import choose_activation


def describe_files(spec: ModelSpec) -> PoolerDescription:
    """Describe a model that no replica has loaded, as its replicas would.

    Raises:
        UnsupportedModelError: Files are missing, or the model does not do its task.
    """
    outline = load_outline(spec.source, task=spec.entry.task, revision=spec.entry.revision)
    return describe_model(
        spec, outline, fit_length(number(spec.entry.max_model_len) or NO_LIMIT_LEN, outline)
    )


def describe_model(spec: ModelSpec, model: TextModel, max_model_len: int) -> PoolerDescription:
    """Describe a model.

    Args:
        spec: The model.
        model: Its modules and configuration; its weights are not read.
        max_model_len: The most tokens of one text that it reads.
    """
    is_embedder = isinstance(model, Embedder)
    return PoolerDescription(
        id=spec.id,
        created=int(time.time()),
        max_model_len=max_model_len,
        labels=() if is_embedder else label_names(model.config),
        is_multi_label=not is_embedder and choose_activation(model.config) != "softmax",
        embedding=_describe_vectors(model) if isinstance(model, Embedder) else None,
        root=spec.root,
        engine=spec.entry.engine,
    )


def _describe_vectors(model: Embedder) -> EmbeddingDescription:
    return EmbeddingDescription(
        width=model.width,
        is_normalized=model.files.is_normalized,
        dimensions=_dimensions(model.config, model.width),
        prompts=model.files.prompts,
        default_prompt=model.files.default_prompt,
    )


def _dimensions(config: PreTrainedConfig, width: int) -> tuple[int, ...] | None:
    """Return the widths that vectors of a width may be cut to; see `EmbeddingDescription`.

    The configuration names them as vLLM expects it.

    Source: https://docs.vllm.ai/en/stable/models/pooling_models/ (Matryoshka Embeddings)
    """
    named = getattr(config, "matryoshka_dimensions", None)
    if named:
        return tuple(sorted(each for each in named if each <= width)) or None
    return () if getattr(config, "is_matryoshka", False) else None
