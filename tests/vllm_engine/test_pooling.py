"""Models that classify or embed on vLLM, compared with the embedded engine's answers."""

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import processors
from transformers import AutoModel, BertConfig, PreTrainedModel

from deployments.contract.descriptions import Task
from deployments.contract.errors import ContextLengthExceededError, ReplicaUnavailableError
from deployments.contract.generation import Refused
from deployments.contract.pooling import Pooled, PoolingRequest, TextPair
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.plan.replica_report import WorkCounts
from deployments.pooling.model_loader import load_pooler
from deployments.pooling.pooling_model import PoolingModel
from deployments.vllm_pooler import VllmPooler
from tests.deployments.replica_context import as_replica
from tests.deployments.tiny_folder import spec
from tests.engine.tiny_models import byte_tokenizer
from tests.pooling.tiny_classifiers import SHAPE, make
from tests.pooling.tiny_folder import framing_tokenizer

pytestmark = pytest.mark.vllm

MODELS = Path(__file__).resolve().parents[2] / "models"
DETECTOR, SEARCH = MODELS / "pydoc-detector", MODELS / "pydoc-search"

WIDE = {"hidden_size": 128, "num_attention_heads": 4}
"""vLLM's attention on a CPU has no heads of fewer than 32 numbers."""

LENGTH = 120
DEADLINE_S = 60
TEXTS = (
    "What does os.path.join do?",
    "def f(x): return x",
    "a",
    "Return the docstring's first paragraph. " * 3,
)
MANY = tuple([tuple(range(5, 60))] * 400)
"""Texts that take vLLM some steps."""


@contextmanager
def on_vllm(folder: Path, task: Task, **settings: Any) -> Iterator[VllmPooler]:
    """Serve a model, and end it after the block, with all its processes."""
    ends = settings.pop("end_process", lambda: None)
    entry = spec(
        folder,
        task=task,
        engine="vllm",
        engine_args={"enforce_eager": True},
        max_model_len=LENGTH,
        max_batched_tokens=512,
        **settings,
    )
    with as_replica(entry.id):
        made = VllmPooler(entry, end_process=ends)
        processes = engine_processes()
        try:
            yield made
        finally:
            made.__del__()
    _, left = psutil.wait_procs(processes, timeout=5)
    assert not left


def embedded_rows(
    folder: Path, task: Task, pooler: VllmPooler, request: PoolingRequest
) -> npt.NDArray[np.float32]:
    """Return what the embedded engine answers, of the same tokens."""
    loaded = load_pooler(
        str(folder),
        task=task,
        revision=None,
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=LENGTH,
    )
    (encoded,) = pooler._encoder.encode([request])
    assert not isinstance(encoded, Exception)
    model = PoolingModel(loaded.model, loaded.layout, loaded.probes.of_length(1))
    rows: npt.NDArray[np.float32] = model(encoded.token_ids, encoded.type_ids).numpy()
    return rows


async def answer(pooler: VllmPooler, request: PoolingRequest) -> npt.NDArray[np.float32]:
    found = await pooler.pool(request)
    assert isinstance(found, Pooled), found
    return np.array([each.vector for each in found.texts])


async def require_equal(
    pooler: VllmPooler, folder: Path, task: Task, texts: tuple[Any, ...]
) -> None:
    request = PoolingRequest("r", texts, truncate=True)
    expected = embedded_rows(folder, task, pooler, request)
    found = await answer(pooler, request)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    alone = [await answer(pooler, replace(request, texts=(text,))) for text in texts]
    np.testing.assert_allclose(np.concatenate(alone), expected, atol=1e-5, rtol=1e-5)


def engine_processes() -> list[psutil.Process]:
    """Return vLLM's processes; multiprocessing has one beside them."""
    processes = psutil.Process().children(recursive=True)
    return [each for each in processes if "resource_tracker" not in " ".join(each.cmdline())]


def engine_core() -> psutil.Process:
    (core,) = engine_processes()
    return core


@pytest.fixture(scope="module")
def ends() -> list[str]:
    return []


@pytest.fixture(scope="module")
def classifier(ends: list[str]) -> Iterator[VllmPooler]:
    with on_vllm(DETECTOR, "classify", end_process=lambda: ends.append("ended")) as made:
        yield made


async def test_a_classifier_s_scores_are_the_embedded_engine_s(classifier: VllmPooler) -> None:
    await require_equal(classifier, DETECTOR, "classify", TEXTS)
    told = await classifier.describe()
    assert (told.labels, told.is_multi_label) == (("human", "pydoc-chat"), False)
    assert (told.max_model_len, told.embedding) == (LENGTH, None)


async def test_a_text_that_is_too_long_is_refused_or_truncated(classifier: VllmPooler) -> None:
    long = "a word " * 1000
    refused = await classifier.pool(PoolingRequest("r", (long,)))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, ContextLengthExceededError)
    found = await classifier.pool(PoolingRequest("r", (long, "y"), truncate=True))
    assert isinstance(found, Pooled)
    assert [each.is_truncated for each in found.texts] == [True, False]
    assert found.texts[0].num_tokens == LENGTH > found.texts[1].num_tokens


async def test_a_client_that_leaves_frees_vllm(classifier: VllmPooler) -> None:
    asking = asyncio.ensure_future(classifier.pool(PoolingRequest("r", MANY)))
    async with asyncio.timeout(DEADLINE_S):
        while classifier._queue.num_running == 0:  # noqa: ASYNC110 - the queue does not tell
            await asyncio.sleep(0)
        asking.cancel()
        while is_busy(classifier):  # noqa: ASYNC110 - nor does the worker
            await asyncio.sleep(0)
    await classifier.ping()


def is_busy(classifier: VllmPooler) -> bool:
    counted = replace(classifier._work, tenants=())
    return classifier._vllm_worker._num_running > 0 or counted != WorkCounts(0, 0)


async def test_a_healthy_replica_passes_its_check_and_tells_its_memory(
    classifier: VllmPooler,
) -> None:
    for _ in range(2):
        await classifier.check_health()
    report = await classifier.inspect()
    assert report.plan.weight_bytes > 0
    assert report.memory is not None


async def test_killing_vllm_fails_its_requests_and_ends_the_replica(
    classifier: VllmPooler, ends: list[str]
) -> None:
    asking = asyncio.ensure_future(classifier.pool(PoolingRequest("r", MANY)))
    async with asyncio.timeout(DEADLINE_S):
        while classifier._queue.num_running == 0:  # noqa: ASYNC110 - the queue does not tell
            await asyncio.sleep(0)
        engine_core().kill()
        with pytest.raises(ReplicaUnavailableError):
            await asking
        with pytest.raises(ReplicaUnavailableError):
            await classifier.check_health()
    assert ends == ["ended"]


async def test_vllm_that_hangs_is_found() -> None:
    ends: list[str] = []
    with on_vllm(SEARCH, "embed", end_process=lambda: ends.append("ended")) as embedder:
        await require_equal(embedder, SEARCH, "embed", TEXTS)
        told = await embedder.describe()
        assert told.embedding is not None
        assert (told.embedding.width, told.embedding.is_normalized) == (192, True)
        core = engine_core()
        core.send_signal(signal.SIGSTOP)
        with pytest.raises(ReplicaUnavailableError):
            async with asyncio.timeout(DEADLINE_S):
                await embedder.pool(PoolingRequest("r", ("a",)))
        with pytest.raises(ReplicaUnavailableError):
            await embedder.check_health()
        assert ends == ["ended"]


async def test_a_cross_encoder_tells_a_pair_s_texts_apart(tmp_path: Path) -> None:
    changes = {"id2label": {0: "fit"}, "label2id": {"fit": 0}, "type_vocab_size": 2}
    folder = save_with_types(tmp_path, make(BertConfig(**{**SHAPE, **WIDE, **changes})))
    pairs = (TextPair("a question", "an answer, and more"), TextPair("x", "y"), "plain")
    with on_vllm(folder, "classify") as model:
        assert model._facts.reads_types
        await require_equal(model, folder, "classify", pairs)
        assert (await model.describe()).is_multi_label


async def test_dense_layers_and_other_pooling_are_as_the_files_say(tmp_path: Path) -> None:
    folder = save_dense_embedder(tmp_path)
    with on_vllm(folder, "embed") as embedder:
        await require_equal(embedder, folder, "embed", TEXTS)
        told = (await embedder.describe()).embedding
        assert told is not None
        assert (told.width, told.is_normalized) == (64, False)
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="1 of its 2 Dense layers"):
        VllmPooler(spec(folder, task="embed", engine="vllm", max_model_len=LENGTH))


def save_with_types(folder: Path, model: PreTrainedModel) -> Path:
    """Save a model with a tokenizer that numbers a pair's texts."""
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<special0> $A <special1>",
        pair="<special0> $A <special1> $B:1 <special1>:1",
        special_tokens=[("<special0>", 2), ("<special1>", 3)],
    )
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    tokenizer.save_pretrained(folder)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    path = folder / "tokenizer_config.json"  # `save_pretrained` leaves these names out
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": names}))
    return folder


def save_dense_embedder(folder: Path) -> Path:
    """Save an embedding model with the files of sentence-transformers, which is not installed."""
    torch.manual_seed(0)
    shape = {key: value for key, value in SHAPE.items() if key not in ("id2label", "label2id")}
    auto: Any = AutoModel  # transformers leaves `from_config` untyped
    auto.from_config(BertConfig(**{**shape, **WIDE})).save_pretrained(folder)
    framing_tokenizer().save_pretrained(folder)
    kinds = ("Transformer", "Pooling", "Dense", "Dense")
    paths = ("", "1_Pooling", "2_Dense", "3_Dense")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    for path, width, activation in (("2_Dense", 128, "Tanh"), ("3_Dense", 64, "Sigmoid")):
        config = {
            "in_features": 128,
            "out_features": width,
            "bias": True,
            "activation_function": f"torch.nn.modules.activation.{activation}",
        }
        (folder / path / "config.json").write_text(json.dumps(config))
        layer = torch.nn.Linear(128, width)
        weights = {f"linear.{name}": weight for name, weight in layer.state_dict().items()}
        save_file(weights, folder / path / "model.safetensors")
    return folder
