from serve_app.api.usage import UsageTally
from serve_app.choices import Choices
from serve_app.generation import Piece
from tests.serve_app.fakes import HELLO, FakeStream


def tally(num_prompts: int, num_per_prompt: int) -> UsageTally:
    streams = [FakeStream(HELLO, 7) for _ in range(num_prompts * num_per_prompt)]
    return UsageTally(Choices(streams, num_prompts))


def test_each_prompt_counts_once_and_every_token_of_every_answer() -> None:
    counted = tally(num_prompts=3, num_per_prompt=2)
    for index in range(6):
        counted.add(Piece("a", 1, choice_index=index))
        counted.add(Piece("", 2, choice_index=index))
    usage = counted.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (21, 18, 39)


def test_of_a_prompt_that_counts_as_cached_which_none_of_its_answers_has_computed() -> None:
    counted = tally(num_prompts=2, num_per_prompt=2)
    for index, num_cached_tokens in enumerate([0, 6, 4, 5]):
        counted.add(Piece("a", 1, None, (), num_cached_tokens, index))
        counted.add(Piece("b", 1, choice_index=index))
    assert counted.usage().prompt_tokens_details.cached_tokens == 4


def test_before_the_first_piece_nothing_is_cached() -> None:
    assert tally(1, 1).usage().prompt_tokens_details.cached_tokens == 0
