"""What a model's files say before anything is loaded: whether they are there, and what they can do.

Reads names, JSON and the headers of weights: of a folder, of a hub repository in the cache, or of
one on the hub, which is asked for a few kilobytes. Imports neither torch nor Ray.
"""

import json
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from difflib import get_close_matches
from errno import EACCES
from importlib.util import find_spec
from os import R_OK, X_OK, access, environ, strerror
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Final, TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._validators import validate_repo_id

from deployments.contract.descriptions import Engine, Task
from deployments.contract.unsupported_model import (
    UnsupportedModelError,
    pointer_advice,
    pointers_in,
    reason_of,
)
from deployments.plan.checkpoint import check_checkpoint
from serve_app.shipped_files import SHIPPED

T = TypeVar("T")

HUB_TIMEOUT_S: Final = 2.5
"""How long the hub has for an answer, unless HF_HUB_ETAG_TIMEOUT is set: a check takes 3 s."""

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

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

TOKENIZER: Final = re.compile(r"tokenizer|vocab|merges|spiece|sentencepiece|tekken")
"""How the name of a tokenizer's file begins."""

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


KnownFiles = Mapping[tuple[str, str | None], ModelFiles | SourceError]
"""The files of models, or why there are none, by source and revision."""

ENCODERS: Final = frozenset({"electra", "mpnet", "deberta", "deberta-v2", "t5", "bart", "fnet"})
"""Types of models without causal attention whose names do not end in `bert` or `roberta`."""


def _generates(architecture: str | None) -> bool:
    return architecture is not None and architecture.endswith(GENERATORS)


def is_path(source: str) -> bool:
    """Return whether a source can only be a path, whether or not there is such a folder."""
    return source.startswith(("/", "./", "../", "~")) or source in (".", "..")


def path_of(source: str) -> Path:
    """Return the path that a source would have, if it is one.

    Raises:
        SourceError: It begins with the home of an unknown user.
    """
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        user = source.partition("/")[0]
        raise SourceError(f"there is no folder {source!r}: {user} is no home here") from error


def is_folder(source: str) -> bool:
    """Return whether a source is a folder; False if this user can't see that."""
    try:
        return path_of(source).is_dir()
    except (OSError, SourceError):
        return False


def local_folder(source: str) -> Path | None:
    """Return the folder that a source names, here or among the shipped; None for a hub's id.

    Raises:
        SourceError: It can only be a folder, and there is none, or this user can't enter it.
    """
    here = path_of(source)
    try:
        if here.is_dir():
            if not access(here, R_OK | X_OK):
                raise PermissionError(EACCES, strerror(EACCES))
            return here.resolve()
        if here.is_file():
            raise SourceError(_file_message(source, here))
        if is_path(source):
            raise SourceError(f"there is no folder {source!r}{_near(here)}")
        shipped = SHIPPED / source
        return shipped.resolve() if (shipped / "config.json").is_file() else None
    except OSError as error:
        raise SourceError(_unreadable(source, error)) from error


def _unreadable(source: str, error: OSError) -> str:
    return f"{source!r} can't be read: {error.strerror or reason_of(error)}"


def _file_message(source: str, file: Path) -> str:
    for suffix, kind, advice in OTHER_FORMATS:
        if file.suffix == suffix:
            return f"{source!r} is a file of {kind}, which is not served: {advice}"
    return f"{source!r} is a file; give the model's folder, {str(file.parent)!r}"


def _near(path: Path) -> str:
    """Return a hint at a folder of a similar name, if a path does not exist."""
    for base in (Path(), SHIPPED):
        for name, rest in ((path.name, ""), (path.parent.name, path.name)):
            parent = path.parent if rest == "" else path.parent.parent
            try:
                beside = [each.name for each in (base / parent).iterdir() if each.is_dir()]
                for near in get_close_matches(name, beside, n=1, cutoff=0.75):
                    if (base / parent / near / rest).is_dir():
                        return f"; did you mean {str(parent / near / rest)!r}?"
            except OSError:
                continue
    return ""


def read_files(source: str, revision: str | None) -> ModelFiles:
    """Return what a model's files say, as far as it can be known before a start.

    Raises:
        SourceError: There are none, or they can't be read; see `problems` for what is wrong with
            those that there are.
    """
    folder = local_folder(source)
    return _in_folder(source, folder, None) if folder is not None else _of_hub(source, revision)


def task_of(source: str, revision: str | None) -> Task:
    """Return what a model is made for; generate if its files can't be read."""
    try:
        return read_files(source, revision).task
    except SourceError:
        return "generate"


def read_all(
    sources: Iterable[tuple[str, str | None]],
) -> dict[tuple[str, str | None], ModelFiles | SourceError]:
    """Return the files of several models, or why there are none, by source and revision.

    The hub is asked about all of them at the same time.
    """

    def read(key: tuple[str, str | None]) -> ModelFiles | SourceError:
        try:
            return read_files(*key)
        except SourceError as error:
            return error

    keys = list(dict.fromkeys(sources))
    with ThreadPoolExecutor(max_workers=max(1, len(keys))) as pool:
        return dict(zip(keys, pool.map(read, keys), strict=True))


def _in_folder(source: str, folder: Path, commit: str | None) -> ModelFiles:
    patterns = ("*", "*/config.json")
    found = (file for pattern in patterns for file in folder.glob(pattern) if file.is_file())
    try:
        names = frozenset(str(file.relative_to(folder)) for file in found)
    except OSError as error:
        raise SourceError(_unreadable(source, error)) from error
    config = _read_json(source, folder / "config.json") if "config.json" in names else {}
    return ModelFiles(source, names, folder, commit, config)


def _read_json(source: str, file: Path) -> Mapping[str, Any]:
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


def _of_hub(source: str, revision: str | None) -> ModelFiles:
    try:
        validate_repo_id(source)
    except HFValidationError as error:
        raise SourceError(
            f"there is no folder {source!r}, and it can't be the id of a repository on the hub, "
            f"such as Qwen/Qwen3-0.6B{_near(Path(source))}"
        ) from error
    cached = try_to_load_from_cache(source, "config.json", revision=revision)
    if isinstance(cached, str):
        snapshot = Path(cached).parent
        files = _in_folder(source, snapshot, snapshot.name)
        if not any(_weight_problems(files)):
            return files
    return _ask_hub(source, revision)


def _ask_hub(source: str, revision: str | None) -> ModelFiles:
    """Return the names of a repository's files, and its configuration.

    Raises:
        SourceError: It is not there, or can't be reached.
    """

    def ask() -> ModelFiles:
        found = HfApi().model_info(source, revision=revision, timeout=timeout_s)
        names = frozenset(each.rfilename for each in found.siblings or ())
        config: Mapping[str, Any] = {}
        if "config.json" in names:
            file = hf_hub_download(
                source, "config.json", revision=found.sha, etag_timeout=timeout_s
            )
            config = _read_json(source, Path(file))
        return ModelFiles(source, names, None, found.sha, config)

    given = environ.get("HF_HUB_ETAG_TIMEOUT")
    timeout_s = float(constants.HF_HUB_ETAG_TIMEOUT) if given else HUB_TIMEOUT_S
    at = f" at {revision!r}" if revision else ""
    none = f"there is no folder {source!r}"
    uncached = f"{none}, and the repository{at} is not, or not wholly, in the cache"
    near = _near(Path(source))
    try:
        return _within(timeout_s, ask)
    except SourceError:
        raise
    except GatedRepoError as error:
        raise SourceError(
            f"{source!r} asks for an account that has accepted its licence on the hub: set "
            "HF_TOKEN to that account's token"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{source!r} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{none}, and no repository of this name is on the hub, or it is not yours to see "
            f"(HF_TOKEN is the token that is sent){near}"
        ) from error
    except OfflineModeIsEnabled as error:
        raise SourceError(
            f"{uncached} ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE forbids to download it"
            f"{near}"
        ) from error
    except TimeoutError as error:
        raise SourceError(
            f"{uncached}, and {constants.ENDPOINT} has not answered in {timeout_s:g} s; if it is "
            f"only slow, set HF_HUB_ETAG_TIMEOUT to more seconds{near}"
        ) from error
    except Exception as error:
        raise SourceError(
            f"{uncached}, and {constants.ENDPOINT} can't be reached: {reason_of(error)}{near}"
        ) from error


def _within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return what a call returns or raises, but wait no longer: a name's look-up may hang.

    Raises:
        TimeoutError: It takes longer.
    """
    results: Queue[tuple[T | None, BaseException | None]] = Queue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = results.get(timeout=timeout_s)
    except Empty:
        raise TimeoutError from None
    if isinstance(error, BaseException):
        raise error
    return value  # type: ignore[return-value] # what the call returned


def problems(files: ModelFiles, engine: Engine = "raystream") -> Iterator[str]:
    """Yield why a model's files can't be served.

    Args:
        files: The files.
        engine: What runs the model. vLLM knows other types, and runs quantized weights.
    """
    try:
        yield from _problems(files, engine)
    except SourceError as error:
        yield str(error)
    except OSError as error:
        yield _unreadable(files.source, error)


def _problems(files: ModelFiles, engine: Engine) -> Iterator[str]:
    source, names = files.source, files.names
    place = str(files.folder or source)
    try:
        check_checkpoint(place, files.commit, local_only=True, may_be_quantized=engine == "vllm")
    except UnsupportedModelError as error:
        # The message begins with the place.
        yield f"{source!r}{str(error).removeprefix(repr(place))}"
        return
    if "config.json" not in names:
        yield _without_config(files)
        return
    yield from () if engine == "vllm" else _type_problems(files)
    yield from _weight_problems(files)
    if not any(TOKENIZER.match(name) for name in names):
        yield f"{source!r} has no tokenizer: tokenizer.json, or what it is made from, is missing"


def _type_problems(files: ModelFiles) -> Iterator[str]:
    """Yield why transformers does not know a model's type."""
    source, kind = files.source, files.config.get("model_type")
    if "auto_map" in files.config and not _is_known(kind):
        yield (
            f"{source!r} needs code of its own, which its config.json names as auto_map; code of "
            "models is never run here"
        )
    elif not isinstance(kind, str):
        yield f"{source!r}: its config.json has no model_type, so it is no model of transformers"
    elif not _is_known(kind):
        yield (
            f"{source!r}: its config.json sets model_type to {kind!r}, which the installed "
            "transformers does not know; vLLM may (`engine: vllm`)"
        )


def _without_config(files: ModelFiles) -> str:
    source, names = files.source, files.names
    if not names:
        return f"{source!r} is an empty folder"
    below = sorted(name for name in names if name.endswith("/config.json"))
    if "model_index.json" in names:
        return f"{source!r} holds a pipeline of diffusers, which is not served"
    if files.folder is not None and below:
        folder = files.folder / Path(below[0]).parent
        return f"{source!r} has no config.json; did you mean {str(folder)!r}?"
    return f"{source!r} has no config.json{_other_format(names)}"


def _weight_problems(files: ModelFiles) -> Iterator[str]:
    """Yield which files of weights are missing or damaged."""
    source, names, folder = files.source, files.names, files.folder
    if WEIGHTS in names:
        weights = [WEIGHTS]
    elif INDEX not in names:
        yield f"{source!r} has no {WEIGHTS}{_other_format(names)}"
        return
    elif folder is None:
        return  # the hub's own index is right
    else:
        index = _read_json(source, folder / INDEX).get("weight_map")
        weights = sorted(set(map(str, index.values()))) if isinstance(index, dict) else []
        if missing := [name for name in weights if name not in names]:
            yield (
                f"{source!r} lacks {len(missing)} of the {len(weights)} files of weights that its "
                f"index names, {missing[0]} among them; copy or download it again"
            )
            return
    if folder is None:
        return
    if pointers := pointers_in(folder / name for name in weights):
        yield f"{source!r}: {pointer_advice(pointers)}"
        return
    for name in weights:
        if (problem := _cut(folder / name)) is not None:
            yield f"{source!r}: {name} {problem}; copy or download it again"
            return


def _cut(file: Path) -> str | None:
    """Return why a file of weights is not whole, by the header that names its size.

    Source: https://huggingface.co/docs/safetensors (the format)
    """
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            size = file.stat().st_size
            if length > size:
                return "is damaged or cut off"
            header = json.loads(opened.read(length))
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, KeyError, TypeError, IndexError, AttributeError):
        return "can't be read as safetensors"
    whole = 8 + length + max(ends, default=0)
    return None if size >= whole else f"is cut off: it has {size} of {whole} bytes"


def _other_format(names: frozenset[str]) -> str:
    """Return what a model's weights are in place of safetensors, if that is known."""
    for suffix, kind, advice in OTHER_FORMATS:
        if found := sorted(name for name in names if name.endswith(suffix)):
            return f", but {found[0]} ({kind}), which is not served: {advice}"
    if any(name.startswith("consolidated") for name in names):
        return ", but weights in their maker's own format; take those in that of transformers"
    return ""


def _is_known(kind: object) -> bool:
    """Return whether the installed transformers knows a type of models.

    Most types have a folder of their name, and looking for it takes no import.
    """
    name = str(kind).replace("-", "_")
    package = find_spec("transformers")
    places = (package.submodule_search_locations or ()) if package is not None else ()
    if any(Path(place, "models", name, "__init__.py").is_file() for place in places):
        return True
    environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return kind in CONFIG_MAPPING
