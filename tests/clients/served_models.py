"""The models that the clients of this folder are answered by."""

from pathlib import Path
from typing import Any

import yaml

from serve_app.config import AppConfig
from tests.clients.questions import MODEL, NARROW
from tests.clients.tiny_poolers import entries
from tests.ray.serve_run import ROOT


def shipped_with_narrow() -> dict[str, Any]:
    """Return the shipped configuration with a second, narrow model."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    models = document["applications"][0]["args"]["models"]
    wide = models[0]
    assert wide["id"] == MODEL
    # 2048 is the model's length, which an endless answer nearly fills.
    limits = {"max_num_seqs": 1, "max_queued_requests": 1, "max_model_len": 2048}
    models.append({**wide, "id": NARROW, "num_cpus": 0.2, **limits})
    return document


def in_process(folder: Path) -> AppConfig:
    """Return what the tests' own process serves: tiny random models, too, made in the folder."""
    args = shipped_with_narrow()["applications"][0]["args"]
    args["models"] += entries(folder)
    # A second thread would only wait for the first.
    args["models"] = [{**model, "num_threads": 1} for model in args["models"]]
    return AppConfig.model_validate(args)
