from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from models.training.detector.document import (
    Document,
    Label,
    Source,
    is_held_out,
    read_documents,
    write_documents,
)

ORIGINS = [f"module m{number}" for number in range(2000)]


def test_one_origin_in_five_is_held_out() -> None:
    assert 0.17 < sum(map(is_held_out, ORIGINS)) / len(ORIGINS) < 0.23


@given(origin=st.text(), first=st.text(), second=st.text())
def test_documents_of_one_origin_are_on_one_side(origin: str, first: str, second: str) -> None:
    sides = {
        Document(text, source, origin).is_held_out
        for text, source in ((first, Source.TOPIC), (second, Source.COMPLETION))
    }
    assert len(sides) == 1


def test_only_topics_and_docstrings_are_by_people() -> None:
    people = {source for source in Source if source.label is Label.HUMAN}
    assert people == {Source.TOPIC, Source.DOCSTRING}


def test_written_documents_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "documents.jsonl"
    documents = (
        Document('A "quoted"\nlïne.', Source.TOPIC, "topic with"),
        Document("I don't know.", Source.UNKNOWN_NAME, "name os.x", 0.8),
    )
    write_documents(documents, path)
    assert read_documents(path) == documents
