"""The models that the clients of this folder are answered by."""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from serve_app.config import AppConfig
from tests.clients.questions import (
    ARGUMENTS,
    FIRST_WORDS,
    LAST_WORDS,
    LONG,
    MODEL,
    NARROW,
    SCRIPTED,
    TOOL,
)
from tests.clients.tiny_poolers import entries
from tests.engines import EngineName, chat_model, keys_of
from tests.ray.serve_run import ROOT
from tests.scripted_model import call_of, save_scripted_model

NUM_POSITIONS = 65536
"""Coding agents begin with 10,000 tokens and more of the shipped model."""


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


def long_model(folder: Path) -> dict[str, Any]:
    """Save the shipped model with more positions than it was trained with; return its entry."""
    folder = shutil.copytree(ROOT / "models" / MODEL, folder / LONG)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["max_position_embeddings"] = NUM_POSITIONS
    path.write_text(json.dumps(config))
    return {"id": LONG, "source": str(folder), "num_cpus": 0.2, "max_num_seqs": 2}


def scripted_model(folder: Path) -> dict[str, Any]:
    """Save a model that calls a tool of its own accord; return its entry."""
    turns = ((*FIRST_WORDS, call_of(TOOL, ARGUMENTS)), LAST_WORDS)
    source = save_scripted_model(folder / SCRIPTED, turns, max_model_len=2048)
    return {"id": SCRIPTED, "source": str(source), "num_cpus": 0.2, "max_num_seqs": 2}


def in_process(folder: Path, engine: EngineName = "raystream") -> AppConfig:
    """Return what the tests' own process serves: tiny models, too, made in the folder.

    With vLLM, only the first two models: an engine takes ten seconds of CPU time to start.
    """
    args = shipped_with_narrow()["applications"][0]["args"]
    if engine == "vllm":
        keys = {"source": str(chat_model(engine, folder)), "dtype": "float32", **keys_of(engine)}
        generating = [each for each in args["models"] if each["task"] == "generate"]
        args["models"] = [{**model, **keys} for model in generating]
    else:
        args["models"] += [long_model(folder), scripted_model(folder), *entries(folder)]
    # A second thread would only wait for the first.
    args["models"] = [{**model, "num_threads": 1} for model in args["models"]]
    args["jobs"] = {"folder": str(folder / "jobs")}
    return AppConfig.model_validate(args)
