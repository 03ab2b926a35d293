from pathlib import Path

from models.training.corpus import (
    MAX_ANSWER_CHARS,
    MIN_ANSWER_CHARS,
    Entry,
    answer_from,
    load_corpus,
    write_corpus,
)


def test_an_answer_is_the_first_paragraph_with_its_whitespace_normalised() -> None:
    assert answer_from("Join two\n   or more.\n\nThen more.") == "Join two or more."


def test_a_signature_is_skipped() -> None:
    docstring = "len(obj, /) -> int\n\nReturn the number of items."
    assert answer_from(docstring) == "Return the number of items."


def test_a_long_paragraph_is_cut_after_a_sentence() -> None:
    sentence = "This sentence has some forty letters, or so. "
    answer = answer_from(sentence * 10)
    assert answer is not None
    assert answer.endswith("or so.")
    assert len(answer) <= MAX_ANSWER_CHARS


def test_a_paragraph_with_a_path_of_the_machine_is_no_answer() -> None:
    assert answer_from("The file lies in /home/someone/python, always.") is None


def test_the_committed_names_are_sorted_and_unique() -> None:
    names = [entry.name for entry in load_corpus()]
    assert names == sorted(set(names))
    assert len(names) >= 2000


def test_every_committed_answer_is_bounded_plain_text() -> None:
    for entry in load_corpus():
        assert MIN_ANSWER_CHARS <= len(entry.answer) <= MAX_ANSWER_CHARS
        assert entry.answer.isascii()
        assert " ".join(entry.answer.split()) == entry.answer


def test_a_written_corpus_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    entries = (Entry("os.path.join", 'Join "two" or more.'), Entry("len", "Count the items."))
    write_corpus(entries, path)
    assert load_corpus(path) == entries
