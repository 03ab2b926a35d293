"""Reads the files in which sentence-transformers describes an embedding model.

They say what happens to the backbone's hidden states: `modules.json` lists a Transformer, a Pooling
and any number of Dense and Normalize modules, each with a folder of its own. A model without
`modules.json` gets mean pooling and nothing else, as in sentence-transformers.

Anything that the files ask for and that is not done here is refused by name, because the vectors
would be others than those that the model was trained for.

Source: sentence-transformers 6.2, base/model.py, base/modules/, sentence_transformer/modules/
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, cast, get_args

from transformers.utils.hub import cached_file

from deployments.contract.unsupported_model import UnsupportedModelError

logger = logging.getLogger(__name__)

PoolingMode = Literal["cls", "mean", "lasttoken"]

OLD_MODES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The older form of `pooling_mode`: a switch for each."""

ACTIVATIONS: Final = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")
"""Functions of a Dense module that are served, all from `torch.nn`."""

NO_LENGTH: Final = 10**9
"""Tokenizers without a limit write a far larger number."""

TRANSFORMER_FILES: Final = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Where a Transformer's settings may be; the first that exists holds."""

TRANSFORMER_KEYS: Final[Mapping[str, Any]] = {
    "query_length": None,
    "document_length": None,
    "query_expansion": None,
    "processing_kwargs": {},
    "transformer_task": "feature-extraction",
}
"""Settings of a Transformer module, each with the only value that is served; {} means empty."""

HARMLESS_ARGUMENTS: Final = frozenset(
    {"attn_implementation", "dtype", "padding_side", "torch_dtype", "trust_remote_code"}
)
"""Arguments of the loaders that change no vector: here they are chosen by the server."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer behind the pooling.

    Attributes:
        folder: Where its weights lie.
        in_features: Width of its input.
        out_features: Width of its output.
        bias: Whether it adds a bias.
        activation: A name in `ACTIVATIONS`.
    """

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """What the files say.

    Attributes:
        pooling: How a text's hidden states become vectors, which are joined.
        steps: What happens to the vector after that, in order.
        truncate_dim: The width that vectors are cut to at the end; None keeps all.
        max_seq_length: The most tokens of a text, special ones included; None sets no limit.
        lowercases: Whether texts are put into lower case.
        prompts: Texts that go before a client's text, by name.
        default_prompt: The name of the prompt for requests that name none; None uses none.
    """

    pooling: tuple[PoolingMode, ...] = ("mean",)
    steps: tuple[Dense | Literal["normalize"], ...] = ()
    truncate_dim: int | None = None
    max_seq_length: int | None = None
    lowercases: bool = False
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None

    @property
    def is_normalized(self) -> bool:
        """Whether the vectors have the length 1."""
        return self.steps[-1:] == ("normalize",) and self.truncate_dim is None

    def width(self, hidden_size: int) -> int:
        """Return the number of numbers in a vector of a model whose hidden states are this wide."""
        dense = [step.out_features for step in self.steps if isinstance(step, Dense)]
        width = dense[-1] if dense else hidden_size * len(self.pooling)
        return min(width, self.truncate_dim or width)


def read_sentence_files(source: str, *, revision: str | None) -> SentenceFiles:
    """Read a model's files.

    Args:
        source: A folder, or the id of a hub repository.
        revision: A commit of the hub repository.

    Raises:
        UnsupportedModelError: They ask for something that is not served.
        ValueError: A file is no JSON.
        OSError: There is no such folder or repository.
    """
    return _Reader(source, revision).read()


def read_activation(source: str, *, revision: str | None) -> str | None:
    """Return the function on a cross-encoder's logit, as newer files name it; None by default.

    Args:
        source: See `read_sentence_files`.
        revision: See `read_sentence_files`.

    Raises:
        UnsupportedModelError: The model is more than a Transformer.
        ValueError: A file is no JSON.
    """
    modules = _read_json(source, revision, "modules.json")
    if modules is None:
        return None
    kinds = _kinds(modules)
    if kinds != ["Transformer"]:
        raise UnsupportedModelError(
            f"can't load {source!r}: its modules.json names {', '.join(kinds)}; a cross-encoder is "
            "served if it is a Transformer, and an embedding model with `task: embed`"
        )
    found = _read_json(source, revision, "config_sentence_transformers.json") or {}
    named: str | None = found.get("activation_fn")
    return named


class _Reader:
    """Reads the files of one model."""

    def __init__(self, source: str, revision: str | None) -> None:
        self._source = source
        self._json = partial(_read_json, source, revision)

    def read(self) -> SentenceFiles:
        tokenizer = self._json("tokenizer_config.json") or {}
        own_length = tokenizer.get("model_max_length")
        modules = self._json("modules.json")
        if modules is None:
            logger.warning(
                "%s has no modules.json: texts get the mean of their hidden states", self._source
            )
            return SentenceFiles(max_seq_length=_length(own_length))
        kinds = _kinds(modules)
        if kinds[:2] != ["Transformer", "Pooling"]:
            raise self._refusal(
                f"its modules.json begins with {' and '.join(kinds[:2]) or 'nothing'}; served are "
                "a Transformer and a Pooling, then any of Dense and Normalize"
            )
        paths = [str(module["path"]) for module in modules]
        transformer = self._transformer(paths[0])
        prompts = self._json("config_sentence_transformers.json") or {}
        return SentenceFiles(
            pooling=self._pooling(paths[1], prompts),
            steps=tuple(map(self._step, kinds[2:], paths[2:])),
            truncate_dim=prompts.get("truncate_dim"),
            max_seq_length=_length(transformer.get("max_seq_length") or own_length),
            lowercases=bool(transformer.get("do_lower_case", False)),
            prompts=tuple(
                (name, text or "") for name, text in (prompts.get("prompts") or {}).items()
            ),
            default_prompt=prompts.get("default_prompt_name"),
        )

    def _transformer(self, path: str) -> Mapping[str, Any]:
        if path:
            raise self._refusal(
                f"its Transformer lies in the folder {path!r}; load and save it with a newer "
                "sentence-transformers, which puts it into the main folder"
            )
        name, found = self._transformer_file()
        for key, only in TRANSFORMER_KEYS.items():
            if found.get(key) and found[key] != only:
                raise self._refusal(f"{name} sets {key} to {found[key]!r}")
        if "text" not in found.get("modality_config", {"text": {}}):
            raise self._refusal(f"{name} has no modality_config for text")
        for kind in ("model", "config", "processor", "tokenizer"):
            for key in (f"{kind}_args", f"{kind}_kwargs"):
                unknown = sorted(set(found.get(key) or {}) - HARMLESS_ARGUMENTS)
                if unknown:
                    raise self._refusal(f"{name} sets {key}: {', '.join(unknown)}")
        return found

    def _transformer_file(self) -> tuple[str, Mapping[str, Any]]:
        """Return the name and the content of the file with a Transformer's settings."""
        for name in TRANSFORMER_FILES:
            found: Mapping[str, Any] | None = self._json(name)
            if found:
                return name, found
        return TRANSFORMER_FILES[0], {}

    def _pooling(self, path: str, prompts: Mapping[str, Any]) -> tuple[PoolingMode, ...]:
        found = self._json(f"{path}/config.json") or {}
        modes = found.get("pooling_mode") or [
            mode for key, mode in OLD_MODES.items() if found.get(key)
        ]
        modes = [modes] if isinstance(modes, str) else modes or ["mean"]
        for mode in modes:
            if mode not in get_args(PoolingMode):
                raise self._refusal(
                    f"it pools by {mode!r}; served are {', '.join(get_args(PoolingMode))}"
                )
        if not found.get("include_prompt", True) and any((prompts.get("prompts") or {}).values()):
            raise self._refusal("its Pooling leaves out the prompt (include_prompt is false)")
        return cast("tuple[PoolingMode, ...]", tuple(modes))

    def _step(self, kind: str, path: str) -> Dense | Literal["normalize"]:
        if kind not in ("Dense", "Normalize"):
            raise self._refusal(f"its modules.json names a {kind}; served are Dense and Normalize")
        found = self._json(f"{path}/config.json") or {}
        names = {found.get("module_input_name"), found.get("module_output_name")}
        if found.get("use_residual") or names - {None, "sentence_embedding"}:
            raise self._refusal(f"{path} reads token embeddings, or has a residual connection")
        if kind == "Normalize":
            return "normalize"
        for key in ("in_features", "out_features"):
            if not isinstance(found.get(key), int):
                raise self._refusal(f"{path}/config.json names no {key}")
        module, _, activation = str(found.get("activation_function", "Tanh")).rpartition(".")
        if activation not in ACTIVATIONS or not module.startswith("torch.nn"):
            raise self._refusal(
                f"the activation of {path} is {module}.{activation}; served are "
                f"torch.nn's {', '.join(ACTIVATIONS)}"
            )
        return Dense(
            path,
            found["in_features"],
            found["out_features"],
            bool(found.get("bias", True)),
            activation,
        )

    def _refusal(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"can't load {self._source!r}: {why}")


def _kinds(modules: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the classes of modules, without the names of their packages."""
    return [str(module["type"]).rpartition(".")[2] for module in modules]


def find_file(source: str, revision: str | None, name: str) -> str | None:
    """Return the path of a model's file; None if the model has none of this name."""
    path: str | None = cached_file(
        source, name, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    return path


def _read_json(source: str, revision: str | None, name: str) -> Any:
    path = find_file(source, revision, name)
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _length(tokens: Any) -> int | None:
    return int(tokens) if tokens is not None and 0 < tokens < NO_LENGTH else None
