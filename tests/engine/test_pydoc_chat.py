"""The engine on the embedded model: real prompts, real images, the real tokenizer."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, ImagePart, TextPart
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, load_model
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.prompt_encoder import EncodedPrompt, PromptEncoder
from models.training.drawings import random_drawing
from tests.engine.collector import run_staggered
from tests.images import png

FOLDER = Path(__file__).resolve().parents[2] / "models/pydoc-chat"
GREEDY = SamplingParams(temperature=0, max_tokens=40)
QUESTIONS = [
    "What does os.path.join do?",
    "Explain textwrap.dedent.",
    "What does no.such.name do?",
    "What is json.loads?",
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(str(FOLDER), revision=None, dtype="float32", device=torch.device("cpu"))


@pytest.fixture(scope="module")
def stock() -> Any:
    return AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32)


def requests() -> list[GenerationRequest]:
    """Return questions about names, alternating with questions about one or two drawings."""
    random = Random(1)
    parts: list[tuple[TextPart | ImagePart, ...]] = []
    for i, question in enumerate(QUESTIONS):
        images = [ImagePart(png(random_drawing(random).render())) for _ in range(1 + i % 2)]
        parts += [(TextPart(question),), (*images, TextPart("What is in the picture?"))]
    return [
        GenerationRequest(f"r{i}", (ChatMessage("user", part),), GREEDY)
        for i, part in enumerate(parts)
    ]


def expected(stock: Any, prompt: EncodedPrompt) -> list[int]:
    input_ids = torch.tensor([prompt.token_ids])
    output = stock.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=GREEDY.max_tokens,
        do_sample=False,
        **prompt.model_inputs,
    )
    token_ids: list[int] = output[0, len(prompt.token_ids) :].tolist()
    return token_ids


@pytest.mark.slow
def test_text_and_images_in_a_batch_equal_generate(loaded: LoadedModel, stock: Any) -> None:
    encoded = PromptEncoder(loaded.tokenizer, loaded.processor).encode(requests())
    prompts = [prompt for prompt in encoded if isinstance(prompt, EncodedPrompt)]
    assert len(prompts) == len(QUESTIONS) * 2
    engine = Engine(loaded, EngineLimits(max_num_seqs=3, max_model_len=256, max_batched_tokens=32))
    collector = run_staggered(
        engine,
        [
            SequenceRequest(f"r{i}", prompt.token_ids, GREEDY, model_inputs=prompt.model_inputs)
            for i, prompt in enumerate(prompts)
        ],
    )
    for i, prompt in enumerate(prompts):
        assert collector.token_ids(f"r{i}") == expected(stock, prompt), i
