"""What a model's files say of it: their names, and what `config.json` holds.

`model_source` finds them, and `source_problems` says why they can't be served.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deployments.contract.descriptions import Task
from deployments.contract.unsupported_model import pointer_advice, pointers_in, reason_of

CLASSIFIER: Final = "ForSequenceClassification"
GENERATORS: Final = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForImageTextToText")
"""How the names of architectures end whose models generate text."""

OTHER_HEADS: Final = (
    "ForMaskedLM",
    "ForPreTraining",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForImageClassification",
    "ForAudioClassification",
    "ForCTC",
)
"""How the names of architectures end whose models neither generate nor classify texts."""

VECTORS: Final = ("ForMaskedLM", "ForPreTraining", "Model")
"""How the names of architectures end that are taken for embedding models."""

DOES: Final[Mapping[Task, str]] = {
    "generate": "generate text",
    "classify": "classify texts",
    "embed": "embed texts",
}

ENCODERS: Final = frozenset({"electra", "mpnet", "deberta", "deberta-v2", "t5", "bart", "fnet"})
"""Types of models without causal attention whose names do not end in `bert` or `roberta`."""

OTHER_FORMATS: Final = (
    (".gguf", "GGUF", "take the repository of safetensors that the GGUF file was made from"),
    (".bin", "pickled weights, which could run code", "take a revision with safetensors"),
    (".pt", "pickled weights, which could run code", "take a revision with safetensors"),
    (".pth", "pickled weights, which could run code", "take a revision with safetensors"),
    (".h5", "TensorFlow's weights", "take a revision with safetensors"),
    (".msgpack", "Flax's weights", "take a revision with safetensors"),
    (".onnx", "ONNX", "take the repository of safetensors that it was made from"),
)
"""How files of weights end that are not served, what they are, and what to do."""


class SourceError(ValueError):
    """A model can't be found or served; the message says why, and what to write instead."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files.

    Attributes:
        source: As it was given.
        names: The paths of the files, from the folder's or repository's root.
        folder: Where they lie on this machine; None if only the configuration does.
        commit: The commit of a hub repository; None for a folder.
        config: What `config.json` holds.
    """

    source: str
    names: frozenset[str]
    folder: Path | None
    commit: str | None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str | None:
        """The class that the configuration names."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What the model can do, its own purpose first; empty if it is for something else."""
        name = self.architecture
        if name is not None and name.endswith(CLASSIFIER):
            return ("classify", "embed")
        if "modules.json" in self.names:
            return ("embed", "generate") if _generates(name) else ("embed",)
        if name is None or _generates(name):
            return ("generate", "embed")
        if name.endswith(VECTORS):
            is_decoder = name.endswith("Model") and not self._is_encoder
            return ("embed", "generate") if is_decoder else ("embed",)
        return () if name.endswith(OTHER_HEADS) else ("generate", "embed")

    @property
    def task(self) -> Task:
        """What the model is made for; generate if its files do not say."""
        return next(iter(self.tasks), "generate")

    @property
    def num_positions(self) -> int | None:
        """The most tokens of a text, if the configuration names it under its usual key."""
        text = self.config.get("text_config")
        named = (text if isinstance(text, dict) else self.config).get("max_position_embeddings")
        return named if isinstance(named, int) else None

    @property
    def _is_encoder(self) -> bool:
        kind = str(self.config.get("model_type"))
        return kind in ENCODERS or kind.endswith("bert")

    def task_problem(self, task: Task) -> str | None:
        """Return why the model does not do this; None if it may."""
        # Of any model, the states under its head can be taken for vectors.
        if task in self.tasks or task == "embed" or (self.architecture is None):
            return None
        others = " or ".join(f"`task: {other}`" for other in self.tasks)
        return (
            f"{self.source!r} is a {self.architecture} by its config.json, which does not "
            f"{DOES[task]}" + (f"; write {others}" if others else "; take another model")
        )


def _generates(architecture: str | None) -> bool:
    return architecture is not None and architecture.endswith(GENERATORS)


def unreadable(source: str, error: OSError) -> str:
    """Return why a model's files can't be read, in words."""
    return f"{source!r} can't be read: {error.strerror or reason_of(error)}"


def read_json(source: str, file: Path) -> Mapping[str, Any]:
    """Return the object that a file of a model holds.

    Raises:
        SourceError: It can't be read, or is no JSON object.
    """
    if pointers := pointers_in([file]):
        raise SourceError(f"{source!r}: {pointer_advice(pointers)}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{source!r}: its {file.name} can't be read: {reason_of(error)}"
        ) from error
    if not isinstance(found, dict):
        raise SourceError(f"{source!r}: its {file.name} is not a JSON object")
    return found
