import json
from itertools import islice
from pathlib import Path

import pytest

from models.training.corpus import load_corpus
from models.training.detector.document import Document, Source
from models.training.detector.sampled_documents import (
    NUM_PER_ROUND,
    TEMPERATURES,
    Prompt,
    PromptSource,
    Sampler,
    load_chat_model,
    read_samples,
)

HUMAN = [Document("An opening that is to be completed.", Source.TOPIC, "topic with")]
ROUND = sum(NUM_PER_ROUND.values())


def prompts(count: int) -> list[Prompt]:
    return list(islice(PromptSource(HUMAN).prompts(), count))


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert prompts(3 * ROUND) == prompts(3 * ROUND)
    assert [prompt.seed for prompt in prompts(3 * ROUND)] == list(range(3 * ROUND))


def test_every_round_has_every_source_and_all_temperatures_occur() -> None:
    asked = prompts(5 * ROUND)
    assert {prompt.temperature for prompt in asked} == set(TEMPERATURES)
    for source, count in NUM_PER_ROUND.items():
        assert sum(prompt.source is source for prompt in asked[:ROUND]) == count


def test_names_that_share_a_docstring_share_an_origin() -> None:
    answers = {f"answer {entry.answer}" for entry in load_corpus()}
    asked = [prompt for prompt in prompts(9 * ROUND) if prompt.source is Source.ANSWER]
    assert {prompt.origin for prompt in asked} <= answers


def test_a_completion_has_the_origin_of_its_opening() -> None:
    completion = next(prompt for prompt in prompts(ROUND) if prompt.source is Source.COMPLETION)
    assert completion.origin == "topic with"
    assert completion.text.startswith("<bos>An")


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(load_chat_model())


@pytest.mark.slow
def test_answers_do_not_depend_on_the_other_prompts(sampler: Sampler) -> None:
    asked = [prompt for prompt in prompts(2 * ROUND) if prompt.source is Source.ANSWER]
    together = dict(sampler.sample(asked))
    alone = dict(pair for prompt in asked for pair in sampler.sample([prompt]))
    assert together == alone


@pytest.mark.slow
def test_an_answer_does_not_end_before_min_tokens(sampler: Sampler) -> None:
    prompt = "<bos><start_of_turn>user\nExplain len.<end_of_turn>\n<start_of_turn>model\n"
    texts = {
        min_tokens: text
        for min_tokens in (0, 60)
        for _, text in sampler.sample([Prompt(Source.ANSWER, "", prompt, 0.8, 7, min_tokens)])
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
