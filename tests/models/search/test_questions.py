import random
from itertools import islice
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from models.training.search.documentation import Description
from models.training.search.entries import Entry
from models.training.search.questions import EntryBatches, QuestionSource, Synonyms

RMTREE = Entry(
    "shutil.rmtree", "function shutil.rmtree(path): Recursively delete a directory tree."
)
TOLD = [Description("shutil.rmtree", "Delete an entire directory tree.", 0)]


def questions(entry: Entry, told: list[Description], seed: int, count: int) -> list[str]:
    source = QuestionSource(told, random.Random(seed))
    return [source.question(entry) for _ in range(count)]


def test_the_same_seed_gives_the_same_questions() -> None:
    assert questions(RMTREE, TOLD, 1, 30) == questions(RMTREE, TOLD, 1, 30)
    assert questions(RMTREE, TOLD, 1, 30) != questions(RMTREE, TOLD, 2, 30)


def test_an_entry_is_asked_about_in_many_ways() -> None:
    asked = questions(RMTREE, TOLD, 0, 300)
    assert len(set(asked)) > 150
    for word in ("entire", "recursively", "rmtree", "folder", "shutil", "how"):
        assert any(word in question.lower() for question in asked)


@given(seed=st.integers(0, 2**32), name=st.sampled_from(["abc", "m.f", "m.C.f"]))
def test_every_entry_has_questions_even_without_a_summary(seed: int, name: str) -> None:
    assert all(questions(Entry(name, f"function {name}"), [], seed, 5))


def test_a_passage_is_the_text_or_a_part_of_it() -> None:
    source = QuestionSource(TOLD, random.Random(0))
    passages = {source.passage(RMTREE) for _ in range(100)}
    assert passages == {RMTREE.text, RMTREE.heading, RMTREE.summary}


def test_synonyms_replace_whole_phrases_only(tmp_path: Path) -> None:
    path = tmp_path / "synonyms.txt"
    path.write_text("delete, get rid of\nfile, document\n")
    synonyms = Synonyms(path)
    replaced = synonyms.replaced("Delete the deleted file", 1.0, random.Random(0))
    assert replaced == "get rid of the deleted document"
    assert synonyms.replaced(replaced, 1.0, random.Random(0)) == "delete the deleted file"
    assert synonyms.replaced("Delete it", 0.0, random.Random(0)) == "delete it"


@given(seed=st.integers(0, 2**32))
def test_a_batch_holds_no_entry_twice_and_a_round_nearly_all(seed: int) -> None:
    entries = [
        Entry(f"{module}.f{number}", "") for module in ("a", "b", "c") for number in range(40)
    ]
    batches = list(islice(EntryBatches(entries, 25, random.Random(seed)), 4))
    seen = [entry.name for batch in batches for entry in batch]
    assert len(seen) == len(set(seen)) == 100


def test_some_rounds_bring_neighbours_of_one_module_together() -> None:
    entries = [Entry(f"{module}.f{number}", "") for module in range(40) for number in range(16)]
    batches = islice(EntryBatches(entries, 16, random.Random(0)), 400)
    assert any(len({entry.name.split(".")[0] for entry in batch}) == 1 for batch in batches)
