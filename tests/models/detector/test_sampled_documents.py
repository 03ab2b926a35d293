import json
from itertools import islice
from pathlib import Path

import pytest

from models.training.corpus import load_corpus
from models.training.detector.document import Document, Source
from models.training.detector.sampled_documents import (
    NUM_PER_ROUND,
    TEMPERATURES,
    Ask,
    Asking,
    Sampler,
    load_chat_model,
    read_samples,
)

HUMAN = [Document("An opening that is to be completed.", Source.TOPIC, "topic with")]
ROUND = sum(NUM_PER_ROUND.values())


def asks(count: int) -> list[Ask]:
    return list(islice(Asking(HUMAN).asks(), count))


def test_the_same_seed_asks_the_same_whatever_was_answered_already() -> None:
    assert asks(3 * ROUND) == asks(3 * ROUND)
    assert [ask.seed for ask in asks(3 * ROUND)] == list(range(3 * ROUND))


def test_every_round_asks_in_every_way_and_all_temperatures_come() -> None:
    asked = asks(5 * ROUND)
    assert {ask.temperature for ask in asked} == set(TEMPERATURES)
    for source, count in NUM_PER_ROUND.items():
        assert sum(ask.source is source for ask in asked[:ROUND]) == count


def test_names_that_share_a_docstring_share_an_origin() -> None:
    answers = {f"answer {entry.answer}" for entry in load_corpus()}
    asked = [ask for ask in asks(9 * ROUND) if ask.source is Source.ANSWER]
    assert {ask.origin for ask in asked} <= answers


def test_a_completion_has_the_origin_of_its_opening() -> None:
    completion = next(ask for ask in asks(ROUND) if ask.source is Source.COMPLETION)
    assert completion.origin == "topic with"
    assert completion.prompt.startswith("<bos>An")


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(load_chat_model())


def test_answers_do_not_depend_on_what_is_asked_beside_them(sampler: Sampler) -> None:
    asked = [ask for ask in asks(2 * ROUND) if ask.source is Source.ANSWER]
    together = dict(sampler.sample(asked))
    alone = dict(pair for ask in asked for pair in sampler.sample([ask]))
    assert together == alone


def test_an_answer_goes_on_for_as_long_as_it_is_asked_to(sampler: Sampler) -> None:
    prompt = "<bos><start_of_turn>user\nExplain len.<end_of_turn>\n<start_of_turn>model\n"
    texts = {
        min_tokens: text
        for min_tokens in (0, 60)
        for _, text in sampler.sample([Ask(Source.ANSWER, "", prompt, 0.8, 7, min_tokens)])
    }
    assert texts[60].startswith(texts[0])
    assert len(texts[60]) > len(texts[0])


def test_samples_are_read_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert read_samples(path) == {}
    fields = {"text": "t", "source": Source.ANSWER, "origin": "answer", "temperature": 0.9}
    path.write_text("".join(json.dumps({"seed": seed, **fields}) + "\n" for seed in (4, 2)))
    assert list(read_samples(path)) == [2, 4]
    assert read_samples(path)[4] == Document("t", Source.ANSWER, "answer", 0.9)
