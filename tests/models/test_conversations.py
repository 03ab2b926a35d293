import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.training.batches import pieces
from models.training.conversations import (
    PHRASINGS,
    SMALL_TALK_ANSWER,
    Conversation,
    ConversationSource,
    refusal,
)
from models.training.corpus import load_corpus
from models.training.drawings import answer_about, random_drawing

ENTRIES = load_corpus()
ANSWERS = {entry.name: entry.answer for entry in ENTRIES}


def text_conversations(seed: int, count: int) -> list[Conversation]:
    source = ConversationSource(ENTRIES, random.Random(seed))
    return [source.text_conversation() for _ in range(count)]


def test_the_same_seed_gives_the_same_conversations() -> None:
    assert text_conversations(1, 30) == text_conversations(1, 30)
    assert text_conversations(1, 30) != text_conversations(2, 30)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32))
def test_every_answer_is_the_corpus_answer_or_a_refusal_of_the_asked_name(seed: int) -> None:
    for conversation in text_conversations(seed, 5):
        for turn in conversation.turns:
            asked = [name for name in ANSWERS if name in turn.question]
            told = {ANSWERS[name] for name in asked} | {SMALL_TALK_ANSWER}
            refused = turn.answer.removeprefix("I don't know ").removesuffix(".")
            assert turn.answer in told or refused in turn.question


def test_each_name_is_asked_as_often_as_any_other() -> None:
    few = [entry for entry in ENTRIES if entry.name.startswith("textwrap.")]
    source = ConversationSource(few, random.Random(0))
    turns = [turn for _ in range(200) for turn in source.text_conversation().turns]
    counts = [sum(turn.answer == entry.answer for turn in turns) for entry in few]
    assert max(counts) - min(counts) <= 1


def test_a_conversation_about_drawings_shows_them_in_one_turn_with_their_answer() -> None:
    rng = random.Random(0)
    drawings = [random_drawing(rng), random_drawing(rng)]
    conversation = ConversationSource(ENTRIES, rng).image_conversation(drawings)
    shown = [turn for turn in conversation.turns if turn.drawings]
    assert [turn.answer for turn in shown] == [answer_about(*drawings)]


def test_only_answers_are_learned() -> None:
    conversation = text_conversations(3, 1)[0]
    learned = [text for text, is_answer in pieces(conversation) if is_answer]
    assert learned == [f"{turn.answer}<end_of_turn>" for turn in conversation.turns]


def test_a_refusal_copies_the_name() -> None:
    assert refusal("os.path.joyn") == "I don't know os.path.joyn."


def test_every_phrasing_holds_the_name_once() -> None:
    assert all(phrasing.count("{name}") == 1 for phrasing in PHRASINGS)
