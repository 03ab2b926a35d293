"""What has gone out of a text, over several runs."""

from deployments.contract.output import Delivered, PromptLogprobs, TextDelta

SCORED = TextDelta((), "", prompt_logprobs=(PromptLogprobs(None, 0, b"", b"", bytes(4 * 3), ()),))


def told(delivered: Delivered, *deltas: TextDelta) -> list[int]:
    """Return what a run tells of how much was cached."""
    delivered.begin_run()
    return [delivered.add(delta).num_cached_tokens for delta in deltas]


def test_ids_and_log_probabilities_of_all_runs_add_up() -> None:
    delivered = Delivered((1, 2), 4)
    told(delivered, SCORED, TextDelta((3,), "a"))
    told(delivered, TextDelta((4, 5), "b"), TextDelta((6,), "c"))
    assert delivered.token_ids == [1, 2, 3, 4, 5, 6]
    assert delivered.num_prompt_logprobs == 7
    assert delivered.num_gained == 3, "in the latest run"


def test_only_the_first_run_that_sends_something_tells_how_much_was_cached() -> None:
    delivered = Delivered()
    assert told(delivered) == []
    assert told(delivered, TextDelta((1,), "a", num_cached_tokens=2), TextDelta((2,), "b")) == [
        2,
        0,
    ]
    assert told(delivered, TextDelta((3,), "c", num_cached_tokens=4)) == [0]


def test_a_run_after_log_probabilities_of_the_prompt_tells_nothing_of_the_cache() -> None:
    delivered = Delivered()
    told(delivered, SCORED)
    assert told(delivered, SCORED, TextDelta((1,), "a", num_cached_tokens=4)) == [0, 0]


def test_what_went_out_elsewhere_may_have_told_how_much_was_cached() -> None:
    first = TextDelta((2,), "b", num_cached_tokens=4)
    assert told(Delivered((1,), has_told_cached=True), first) == [0]
    assert told(Delivered((1,)), first) == [4]
