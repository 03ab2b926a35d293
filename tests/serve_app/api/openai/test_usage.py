from deployments.contract.output import TextDelta
from serve_app.api.openai.usage import UsageTally
from serve_app.backends.streams.choices import Choices
from tests.serve_app.fakes import HELLO, FakeStream


def tally(num_prompts: int, num_per_prompt: int) -> UsageTally:
    streams = [FakeStream(HELLO, 7) for _ in range(num_prompts * num_per_prompt)]
    return UsageTally(Choices(streams, num_prompts))


def test_each_prompt_counts_once_and_every_answer_s_tokens_count() -> None:
    counted = tally(num_prompts=3, num_per_prompt=2)
    for index in range(6):
        counted.add(index, TextDelta((1,), "a"))
        counted.add(index, TextDelta((2, 3), ""))
    usage = counted.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (21, 18, 39)


def test_tokens_of_a_prompt_count_as_cached_if_no_answer_computed_them() -> None:
    counted = tally(num_prompts=2, num_per_prompt=2)
    for index, num_cached_tokens in enumerate([0, 6, 4, 5]):
        counted.add(index, TextDelta((1,), "a", num_cached_tokens=num_cached_tokens))
        counted.add(index, TextDelta((2,), "b"))
    assert counted.usage().prompt_tokens_details.cached_tokens == 4


def test_before_the_first_delta_nothing_counts_as_cached() -> None:
    assert tally(1, 1).usage().prompt_tokens_details.cached_tokens == 0
