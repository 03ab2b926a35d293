"""Descriptions of models that no replica has loaded.

A task of Ray reads a model's files, without its weights: the ingress imports no model.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import ray

from deployments.contract import ModelDescription, PoolerDescription
from deployments.errors import ReplicaUnavailableError
from deployments.model_spec import ModelSpec

GENERATOR = "deployments.generator.description"
POOLER = "deployments.pooling.description"


async def describe_files(
    specs: Mapping[str, ModelSpec], model_id: str
) -> ModelDescription | PoolerDescription:
    """Describe a model by its files.

    Args:
        specs: The models, by id.
        model_id: One of them.

    Raises:
        ReplicaUnavailableError: The files can't be read.
    """
    module = GENERATOR if specs[model_id].task == "generate" else POOLER
    try:
        described: ModelDescription | PoolerDescription = await _describe.remote(
            module, specs[model_id]
        )
    except Exception as error:
        raise ReplicaUnavailableError(
            f"The files of the model {model_id!r} can't be read."
        ) from error
    return described


@ray.remote(num_cpus=0)
def _describe(module: str, spec: ModelSpec) -> Any:
    return import_module(module).describe_files(spec)
