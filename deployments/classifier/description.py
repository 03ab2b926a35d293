"""Describes a classifier to the ingress."""

import time

from transformers import PreTrainedConfig

from deployments.classifier.model_loader import (
    LoadedClassifier,
    fit_length,
    label_names,
    load_outline,
)
from deployments.classifier.sequence_classifier import choose_activation
from deployments.contract import ClassifierDescription
from deployments.model_spec import ModelSpec


def describe_model(spec: ModelSpec, loaded: LoadedClassifier) -> ClassifierDescription:
    """Describe a model that a replica has loaded."""
    return _describe(spec, loaded.model.config, loaded.max_model_len)


def describe_files(spec: ModelSpec) -> ClassifierDescription:
    """Describe a model that no replica has loaded, as its replicas would.

    Raises:
        UnsupportedModelError: Files are missing, or the model is not a classifier.
    """
    outline = load_outline(spec.source, revision=spec.revision)
    return _describe(spec, outline.config, fit_length(spec.max_model_len, outline))


def _describe(
    spec: ModelSpec, config: PreTrainedConfig, max_model_len: int
) -> ClassifierDescription:
    return ClassifierDescription(
        id=spec.id,
        created=int(time.time()),
        max_model_len=max_model_len,
        labels=label_names(config),
        is_multi_label=choose_activation(config) != "softmax",
        root=spec.root,
    )
