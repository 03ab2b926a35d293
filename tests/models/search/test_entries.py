from pathlib import Path

import pytest

from models.training.corpus import load_corpus
from models.training.detector.human_documents import shingles, words_of
from models.training.search.bm25 import terms
from models.training.search.documentation import Description
from models.training.search.entries import (
    MODEL_DIR,
    Entry,
    Question,
    as_question,
    harvest,
    held_out_questions,
    load_descriptions,
    load_entries,
    load_questions,
    training_descriptions,
    write_lines,
)

ENTRIES = {entry.name: entry for entry in load_entries()}
HELD_OUT = load_questions(MODEL_DIR / "held_out.jsonl")
HAND_WRITTEN = load_questions(MODEL_DIR / "questions.jsonl")


def test_the_committed_entries_are_sorted_unique_and_few_bytes() -> None:
    names = list(ENTRIES)
    assert names == sorted(names)
    assert len(names) == len(load_entries()) >= 6000
    assert (MODEL_DIR / "entries.jsonl").stat().st_size < 1_000_000


def test_nearly_all_that_pydoc_chat_knows_is_an_entry_with_its_answer_in_the_text() -> None:
    known = [entry for entry in load_corpus() if entry.name in ENTRIES]
    assert len(known) >= 0.98 * len(load_corpus())
    same = [entry for entry in known if ENTRIES[entry.name].summary == entry.answer]
    assert len(same) >= 0.95 * len(known)


def test_an_entry_has_a_heading_and_a_summary() -> None:
    entry = ENTRIES["shutil.rmtree"]
    assert entry.heading.startswith("function shutil.rmtree(path")
    assert entry.summary == "Recursively delete a directory tree."
    assert Entry("m", "module m").summary == ""


def test_harvested_names_are_those_of_the_running_python() -> None:
    described = [
        Description("socket.recv", "Receive data from the socket.", 0),
        Description("asyncio.loop.run_forever", "Run until it is stopped.", 0),
        Description("os.no_such_function", "Do nothing at all.", 0),
        Description("object.__init__", "Called after the instance was made.", 0),
    ]
    entries, kept = harvest(described)
    names = {it.name for it in kept}
    assert names == {"socket.socket.recv", "asyncio.AbstractEventLoop.run_forever"}
    assert names | {"os.path.join"} <= {entry.name for entry in entries}


def test_held_out_questions_are_about_held_out_entries_that_exist() -> None:
    assert len(HELD_OUT) >= 250
    assert len({it.question for it in HELD_OUT}) == len(HELD_OUT)
    assert all(ENTRIES[name].is_held_out for it in HELD_OUT for name in it.names)


def test_the_hand_written_questions_have_entries() -> None:
    assert len(HAND_WRITTEN) >= 100
    assert len({it.question for it in HAND_WRITTEN}) == len(HAND_WRITTEN)
    assert all(name in ENTRIES for it in HAND_WRITTEN for name in it.names)


def test_no_held_out_question_repeats_its_entry() -> None:
    for it in HELD_OUT:
        for name in it.names:
            assert it.question != as_question(ENTRIES[name].summary)
            asked, told = set(terms(it.question)), set(terms(ENTRIES[name].summary))
            assert len(asked & told) < 0.75 * len(asked | told)


def test_training_reads_nothing_about_held_out_entries() -> None:
    assert not any(ENTRIES[it.name].is_held_out for it in load_descriptions())


def test_no_sentence_of_training_shares_eight_words_with_a_question() -> None:
    asked = [words_of(it.question) for it in (*HELD_OUT, *HAND_WRITTEN)]
    known = {shingle for words in asked for shingle in shingles(words)}
    told = [words_of(it.text) for it in load_descriptions()]
    shared = [words for words in told if not known.isdisjoint(shingles(words))]
    assert shared == []


def held_out_entry(name: str) -> Entry:
    """Return an entry of that name with a summary that is held out."""
    texts = (f"function {name}(): Summary number {number}." for number in range(99))
    return next(it for text in texts if (it := Entry(name, text)).is_held_out)


@pytest.mark.parametrize(
    ("sentence", "is_asked"),
    [
        ("Zaps whatever stands in the way.", True),
        ("Too short.", False),
        ("The zap_all function zaps them.", False),
    ],
)
def test_only_a_sentence_without_the_name_is_a_question(sentence: str, is_asked: bool) -> None:
    entry = held_out_entry("m.zap_all")
    questions = held_out_questions([entry], [Description("m.zap_all", sentence, 0)])
    assert len(questions) == is_asked


def test_a_sentence_that_repeats_the_summary_is_no_question() -> None:
    entry = held_out_entry("m.zap")
    described = [Description("m.zap", f"This is {entry.summary.lower()}", 0)]
    assert held_out_questions([entry], described) == ()


def test_a_sentence_that_hints_at_a_question_is_not_trained_on() -> None:
    entry = next(
        it for text in "abcdefgh" if not (it := Entry("m.f", f"function m.f: {text}")).is_held_out
    )
    asked = "what zaps one two three four five six seven eight nine"
    told = ["Zap one two three four five six seven eight now.", "Zap it.", "Zap something else."]
    kept = training_descriptions(
        [entry],
        [Description("m.f", text, 0) for text in told],
        [Question(asked, ("m.g",)), Question("zap it", ("m.g",))],
    )
    assert [it.text for it in kept] == ["Zap something else."]


@pytest.mark.parametrize(
    ("sentence", "question"),
    [
        ("Return the base name.", "How do I return the base name?"),
        ("Matches nothing.", "matches nothing"),
        ("Returns the base name.", "What returns the base name?"),
        ("A dictionary that forgets.", "a dictionary that forgets"),
        ("XML is read.", "XML is read"),
    ],
)
def test_a_sentence_becomes_a_question_in_the_same_words(sentence: str, question: str) -> None:
    assert as_question(sentence) == question


def test_written_lines_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    entries = (Entry("m", "module m: \u201cQuoted\u201d."), Entry("m.f", "function m.f()"))
    write_lines(path, entries)
    assert load_entries(path) == entries
    questions = (Question("how?", ("m", "m.f")),)
    write_lines(path, questions)
    assert load_questions(path) == questions
