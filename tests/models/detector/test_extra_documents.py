from models.training.detector.document import Document, Source
from models.training.detector.extra_documents import (
    corpus_documents,
    extra_documents,
    package_documents,
)
from models.training.detector.human_documents import shingles, words_of


def test_the_corpus_is_split_by_the_answers_that_samples_are_split_by() -> None:
    sides = [{it.text for it in corpus_documents(held_out=side)} for side in (True, False)]
    assert sides[0].isdisjoint(sides[1])
    assert 0.15 < len(sides[0]) / len(sides[0] | sides[1]) < 0.25
    assert all(it.is_held_out for it in corpus_documents(held_out=True))


def test_what_shares_words_with_held_out_text_is_not_trained_on() -> None:
    held_out = [
        Document(package_documents("click")[0].text, Source.DOCSTRING, "module m"),
        Document("Join two or more pathname components, inserting '/' as needed", Source.TOPIC, ""),
    ]
    known = {it for document in held_out for it in shingles(words_of(document.text))}
    documents = extra_documents(held_out)
    assert len(documents) > 2000
    assert all(known.isdisjoint(shingles(words_of(it.text))) for it in documents)
