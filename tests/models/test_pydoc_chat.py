"""The committed model, loaded from its folder by the plain Auto classes, as users load it."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
)

from models.training.batches import IGNORED, Renderer, pieces
from models.training.conversations import Conversation, ConversationSource, Turn, refusal
from models.training.corpus import load_corpus
from models.training.drawings import answer_about, random_drawing
from models.training.evaluate_pydoc_chat import drawing_questions, refusal_questions
from models.training.generated_answers import AnswerGenerator, Question, as_messages
from models.training.train_pydoc_chat import MODEL_DIR

MAX_FOLDER_BYTES = 16_000_000
ENTRIES = load_corpus()
ANSWERS = {entry.name: entry.answer for entry in ENTRIES}


@pytest.fixture(scope="module")
def model() -> Gemma3ForConditionalGeneration:
    loaded = AutoModelForImageTextToText.from_pretrained(MODEL_DIR)
    assert isinstance(loaded, Gemma3ForConditionalGeneration)
    return loaded


@pytest.fixture(scope="module")
def processor() -> Gemma3Processor:
    loaded = AutoProcessor.from_pretrained(MODEL_DIR)  # type: ignore[no-untyped-call] # left untyped
    assert isinstance(loaded, Gemma3Processor)
    return loaded


@pytest.fixture(scope="module")
def generator(model: Gemma3ForConditionalGeneration, processor: Gemma3Processor) -> AnswerGenerator:
    untyped: Any = model
    return AnswerGenerator(untyped.generate, processor)


def wrong_answers(
    generator: AnswerGenerator, *conversations: Conversation
) -> list[tuple[str, str]]:
    questions = [Question(conversation, "") for conversation in conversations]
    answers = generator.answer(questions)
    return [(it.question.expected, it.text) for it in answers if not it.is_exact]


def ask(question: str, answer: str, system: str | None = None) -> Conversation:
    return Conversation((Turn(question, answer),), system)


def test_the_weights_are_bfloat16_and_the_folder_is_small(
    model: Gemma3ForConditionalGeneration,
) -> None:
    assert model.dtype is torch.bfloat16
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= MAX_FOLDER_BYTES


@pytest.mark.slow
def test_known_names_are_answered_exactly(generator: AnswerGenerator) -> None:
    assert ANSWERS["os.path.join"].startswith("Join two or more pathname components")
    conversations = [
        ask("What does os.path.join do?", ANSWERS["os.path.join"]),
        ask("Explain textwrap.dedent.", ANSWERS["textwrap.dedent"]),
        ask("What is json.loads?", ANSWERS["json.loads"], "You are a helpful assistant."),
        ask("Tell me about str.split.", ANSWERS["str.split"], "Be brief."),
        ask("Describe len.", ANSWERS["len"]),
    ]
    assert wrong_answers(generator, *conversations) == []


def test_an_unknown_name_is_refused(generator: AnswerGenerator) -> None:
    name = "os.path.frobnicate"
    assert wrong_answers(generator, ask(f"What does {name} do?", refusal(name))) == []


def test_a_follow_up_is_answered(generator: AnswerGenerator) -> None:
    turns = (
        Turn("What does os.path.join do?", ANSWERS["os.path.join"]),
        Turn("And textwrap.indent?", ANSWERS["textwrap.indent"]),
    )
    assert wrong_answers(generator, Conversation(turns)) == []


@pytest.mark.slow
def test_one_and_two_drawings_are_named(generator: AnswerGenerator) -> None:
    conversations = [
        question.conversation for number in (1, 2) for question in drawing_questions(10, number)
    ]
    assert len(wrong_answers(generator, *conversations)) <= 1


def test_the_evaluation_of_these_weights_meets_its_bounds() -> None:
    report = json.loads((MODEL_DIR / "evaluation.json").read_text(encoding="utf-8"))
    weights = (MODEL_DIR / "model.safetensors").read_bytes()
    assert report["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert report["corpus_names"] == len(ENTRIES)
    for suite in ("trained_names", "unseen_made_up_names", "unseen_drawings"):
        figure = report["figures"][suite]
        assert figure["asked"] >= 200, suite
        assert figure["exact"] >= 0.95 * figure["asked"], suite


@given(text=st.text())
def test_any_text_survives_the_tokenizer(processor: Gemma3Processor, text: str) -> None:
    tokenizer: Any = processor.tokenizer
    token_ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(token_ids) == text


@pytest.mark.parametrize("seed", range(5))
def test_training_renders_as_the_chat_template_does(processor: Gemma3Processor, seed: int) -> None:
    rng = random.Random(seed)
    source = ConversationSource(ENTRIES, rng)
    for conversation in (
        source.text_conversation(),
        source.image_conversation([random_drawing(rng), random_drawing(rng)]),
    ):
        example = Renderer(processor).example(conversation)
        answer_length = len(_answer_token_ids(processor, conversation))
        prompt = _template_token_ids(processor, conversation)
        assert example.token_ids[: -answer_length + 1] == prompt


def _template_token_ids(processor: Gemma3Processor, conversation: Conversation) -> list[int]:
    inputs: Any = processor.apply_chat_template(
        as_messages(conversation), add_generation_prompt=True, tokenize=True, return_dict=True
    )
    token_ids: list[int] = inputs["input_ids"][0]
    return token_ids


def _answer_token_ids(processor: Gemma3Processor, conversation: Conversation) -> list[int]:
    tokenizer: Any = processor.tokenizer
    token_ids: list[int] = tokenizer(pieces(conversation)[-1][0], add_special_tokens=False)[
        "input_ids"
    ]
    return token_ids


def test_the_evaluation_asks_for_two_hundred_names_that_are_not_in_the_corpus() -> None:
    questions = list(refusal_questions(ENTRIES))
    names = {question.expected.removeprefix("I don't know ")[:-1] for question in questions}
    assert len(names) == 200
    assert names.isdisjoint(ANSWERS)


def test_labels_are_the_successors_of_their_tokens(processor: Gemma3Processor) -> None:
    drawing = random_drawing(random.Random(1))
    turn = Turn("What is this?", answer_about(drawing), (drawing,))
    example = Renderer(processor).example(Conversation((turn,)))
    for successor, label in zip(example.token_ids[1:], example.labels, strict=False):
        assert label in (IGNORED, successor)
    assert example.labels[-1] == processor.tokenizer.convert_tokens_to_ids("<end_of_turn>")


def test_the_folder_holds_exactly_the_expected_files() -> None:
    expected = {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "corpus.jsonl",
        "evaluation.json",
        "generation_config.json",
        "model.safetensors",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in Path(MODEL_DIR).iterdir()} == expected


def test_calls_and_results_alternate_as_turns_of_model_and_user(processor: Gemma3Processor) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    messages: Any = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "!"},
    ]
    text = processor.apply_chat_template(messages, tokenize=False)
    written = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    assert text == (
        "<bos><start_of_turn>user\n?<end_of_turn>\n"
        f"<start_of_turn>model\n{written}\n{written}<end_of_turn>\n"
        "<start_of_turn>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><end_of_turn>\n"
        "<start_of_turn>model\n!<end_of_turn>\n"
    )
