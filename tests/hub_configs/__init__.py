"""Configurations of models on the hub; see README.md."""

from pathlib import Path

from transformers import AutoConfig

from deployments.plan.model_shape import ModelShape

FOLDER = Path(__file__).parent


def config_file(name: str) -> Path:
    return FOLDER / f"{name}.json"


def shape_of(name: str) -> ModelShape:
    """Return the sizes of a model."""
    config = AutoConfig.from_pretrained(config_file(name))
    is_pooler = config.architectures[0].endswith("ForSequenceClassification")
    return ModelShape.of(config, is_pooler=is_pooler)
