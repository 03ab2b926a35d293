import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.training.corpus import load_corpus
from models.training.detector.document import Document, Label, Source
from models.training.detector.pieces import (
    BANDS,
    MAX_CHARS,
    MIN_CHARS,
    Cutter,
    Piece,
    balanced,
    cut_end,
    is_prose,
    read_pieces,
    write_pieces,
)

WORDS = st.lists(st.text("abcdef.!", min_size=1, max_size=30), min_size=1, max_size=200)
ANSWER = next(entry.answer for entry in load_corpus() if entry.name == "os.path.join")


def cut(text: str, seed: int, *, prefers_sentences: bool) -> list[str]:
    cutter = Cutter(random.Random(seed))
    return list(cutter.cut(text, prefers_sentences=prefers_sentences))


@pytest.mark.slow
@given(words=WORDS, seed=st.integers(0, 99), prefers_sentences=st.booleans())
def test_pieces_are_whole_words_in_order_and_within_bounds(
    words: list[str], seed: int, prefers_sentences: bool
) -> None:
    pieces = cut(" ".join(words), seed, prefers_sentences=prefers_sentences)
    assert all(MIN_CHARS <= len(piece) <= MAX_CHARS for piece in pieces)
    kept = iter(words)
    assert all(word in kept for piece in pieces for word in piece.split())


@given(text=st.text(min_size=1, max_size=900), prefers_sentences=st.booleans())
def test_cuts_go_forward_and_at_most_max_chars_apart(text: str, prefers_sentences: bool) -> None:
    at = 0
    while at < len(text):
        end = cut_end(text, at, MAX_CHARS, prefers_sentences)
        assert at < end <= at + MAX_CHARS
        at = end


def test_a_nearby_sentence_end_is_preferred() -> None:
    text = "One sentence that is long enough. Another that is longer than the first one."
    assert text[: cut_end(text, 0, 50, True)] == "One sentence that is long enough."
    assert (
        text[: cut_end(text, 0, 50, False)] == "One sentence that is long enough. Another that is"
    )


def test_the_same_seed_cuts_the_same_pieces_without_repeats() -> None:
    documents = [Document("word " * 300, Source.TOPIC, "topic a")] * 2
    first, second = (Cutter(random.Random(5)).pieces(documents) for _ in range(2))
    assert first == second
    assert len({piece.text for piece in first}) == len(first)


def test_recited_and_made_up_pieces_of_the_chat_model_are_distinguished() -> None:
    said = f"{ANSWER} Beyond that it never ends the words."
    pieces = Cutter(random.Random(1)).pieces(
        [Document(text, Source.ANSWER, "answer", 1.0) for text in (ANSWER[:60], said)]
    )
    assert {piece.is_recited for piece in pieces} == {True, False}
    assert all(piece.is_recited == (piece.text in ANSWER) for piece in pieces)


def test_a_persons_piece_is_never_recited() -> None:
    pieces = Cutter(random.Random(1)).pieces([Document(ANSWER, Source.DOCSTRING, "module m")])
    assert not any(piece.is_recited for piece in pieces)


def test_code_and_tables_are_no_prose() -> None:
    assert is_prose("Return the number of items, or None.")
    assert not is_prose("x[0] = {1: 2, 3: 4}; y += (5, 6, 7)")


def pieces_of_all_lengths() -> list[Piece]:
    people = [Piece("h" * length, Source.TOPIC, None, False) for length in range(20, 301)] * 3
    sampled = [Piece("c" * length, Source.ANSWER, 1.0, False) for length in range(20, 301)]
    return [*people, *sampled]


def test_both_authors_have_equally_many_pieces_of_each_band() -> None:
    chosen = balanced(pieces_of_all_lengths(), random.Random(0))
    for band in BANDS:
        labels = [piece.label for piece in chosen if piece.band == band]
        assert labels.count(Label.HUMAN) == labels.count(Label.CHAT) == band[1] - band[0] + 1


def test_with_all_lengths_alike_the_scarcest_band_decides() -> None:
    scarce = [it for it in pieces_of_all_lengths() if len(it.text) < 200 or len(it.text) % 4 == 0]
    chosen = balanced(scarce, random.Random(0), all_lengths_alike=True)
    counts = [sum(piece.band == band for piece in chosen) for band in BANDS]
    assert counts == [2 * 7, 2 * 12, 2 * 25, 2 * 26]


def test_written_pieces_are_read_back(tmp_path: Path) -> None:
    pieces = [
        Piece("Twenty characters or more.", Source.TOPIC, None, False),
        Piece("Twenty characters or fewer.", Source.ANSWER, 1.1, True),
    ]
    write_pieces(pieces, tmp_path / "pieces.jsonl")
    assert read_pieces(tmp_path / "pieces.jsonl") == pieces
