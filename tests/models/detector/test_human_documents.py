from functools import cache

import pytest

from models.training.corpus import load_corpus
from models.training.detector.document import Document, Source
from models.training.detector.human_documents import (
    MIN_CHARS,
    SeenText,
    corpus_documents,
    extra_documents,
    human_documents,
    package_documents,
    prose,
    shingles,
    words_of,
)

# The documents change only with `make models`; reading them takes a minute.
pytestmark = pytest.mark.soak


@cache
def documents() -> tuple[Document, ...]:
    return human_documents()


def paragraphs_of(*, held_out: bool) -> set[tuple[str, ...]]:
    texts = [it.text for it in documents() if it.is_held_out is held_out]
    return {words_of(part) for text in texts for part in text.split("\n\n")}


def test_there_are_topics_and_docstrings_on_both_sides() -> None:
    found = {(it.source, it.is_held_out) for it in documents()}
    assert found == {(s, h) for s in (Source.TOPIC, Source.DOCSTRING) for h in (True, False)}
    assert all(len(it.text) >= MIN_CHARS for it in documents())


def test_no_eight_words_in_a_row_are_on_both_sides() -> None:
    sides = [
        {shingle for words in paragraphs_of(held_out=held_out) for shingle in shingles(words)}
        for held_out in (True, False)
    ]
    assert sides[0].isdisjoint(sides[1])


def test_no_paragraph_is_on_both_sides() -> None:
    assert paragraphs_of(held_out=True).isdisjoint(paragraphs_of(held_out=False))


def test_people_share_no_eight_words_with_the_chat_models_corpus() -> None:
    learned = {shingle for it in load_corpus() for shingle in shingles(words_of(it.answer))}
    for paragraphs in (paragraphs_of(held_out=True), paragraphs_of(held_out=False)):
        assert all(learned.isdisjoint(shingles(words)) for words in paragraphs)


@pytest.mark.parametrize(
    ("paragraph", "is_seen"),
    [
        ("Join two or more pathname components, inserting '/' as needed.", True),
        ("Assertion failed.  And so on.", True),
        ("Nothing that any module of the library says about itself.", False),
    ],
)
def test_text_that_the_chat_model_has_seen_is_recognised(paragraph: str, is_seen: bool) -> None:
    assert SeenText().touches(paragraph) is is_seen


def test_prose_is_kept_and_code_tables_and_headings_are_not() -> None:
    text = """The "with" statement
    ********************

    It wraps a block
    of code.

       with open() as file: ...

    >>> with_it()

    stmt ::= "with"

    It ends.
    """
    assert list(prose(text)) == ["It wraps a block\nof code.", "It ends."]


def test_the_corpus_is_split_by_answer_as_the_samples_are() -> None:
    sides = [{it.text for it in corpus_documents(held_out=side)} for side in (True, False)]
    assert sides[0].isdisjoint(sides[1])
    assert 0.15 < len(sides[0]) / len(sides[0] | sides[1]) < 0.25
    assert all(it.is_held_out for it in corpus_documents(held_out=True))


def test_documents_that_share_words_with_held_out_text_are_not_trained_on() -> None:
    held_out = [
        Document(package_documents("click")[0].text, Source.DOCSTRING, "module m"),
        Document("Join two or more pathname components, inserting '/' as needed", Source.TOPIC, ""),
    ]
    known = {it for document in held_out for it in shingles(words_of(document.text))}
    documents = extra_documents(held_out)
    assert len(documents) > 2000
    assert all(known.isdisjoint(shingles(words_of(it.text))) for it in documents)
