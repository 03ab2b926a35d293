from dataclasses import replace
from pathlib import Path

import torch

from deployments.pooler_description import describe_files, describe_model
from deployments.pooling.model_loader import load_pooler
from tests.deployments.tiny_folder import spec

PYDOC_DETECTOR = Path(__file__).resolve().parents[2] / "models/pydoc-detector"


def test_files_describe_a_model_as_its_replicas_do() -> None:
    model = spec(str(PYDOC_DETECTOR), id="m", max_model_len=128)
    loaded = load_pooler(
        model.source,
        revision=None,
        dtype=model.entry.dtype,
        device=torch.device("cpu"),
        max_model_len=128,
    )
    expected = replace(describe_model(model, loaded.model, loaded.max_model_len), created=0)
    assert replace(describe_files(model), created=0) == expected
    assert len(expected.labels) == 2
