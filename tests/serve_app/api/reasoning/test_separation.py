from deployments.contract.formats.reasoning_format import PromptReasoning
from deployments.contract.sampling_params import ReasoningTokens
from serve_app.api.reasoning.separation import ReasoningCounter
from tests.offenders import every

OPEN, BEGUN, ENDED = PromptReasoning.OPEN, PromptReasoning.BEGUN, PromptReasoning.ENDED
START, END, CHANNEL = 8, 9, 10


COUNTED: list[tuple[PromptReasoning, tuple[int, ...], int]] = [
    (OPEN, (START, 1, 2, END, 3, 4), 4),
    (OPEN, (START, 1, 2), 3),
    (OPEN, (1, START, 2, END), 0),
    (OPEN, (START, END, 3, START, 4, END), 2),
    (OPEN, (), 0),
    (BEGUN, (1, 2, END, 3), 3),
    (BEGUN, (1, 2), 2),
    (ENDED, (START, 1, END), 0),
]


def test_the_tokens_of_the_first_block_are_counted_with_its_marks() -> None:
    for case in every(COUNTED):
        with case as (prompt, token_ids, num_tokens):
            for size in (1, 2, 6):
                counter = ReasoningCounter(ReasoningTokens(START, END), prompt)
                counter.add(())
                for at in range(0, len(token_ids), size):
                    counter.add(token_ids[at : at + size])
                assert counter.num_tokens == num_tokens


ON_CHANNELS: list[tuple[tuple[int, ...], int]] = [
    ((START, CHANNEL, 1, END, 2, START, 3), 4),
    ((START, CHANNEL, 1), 3),
    ((START, 1, CHANNEL, END, 2), 0),
    ((CHANNEL, START, CHANNEL, 1, END), 0),
    ((START,), 0),
]


def test_on_channels_only_the_channel_s_name_begins_the_reasoning() -> None:
    for case in every(ON_CHANNELS):
        with case as (token_ids, num_tokens):
            for size in (1, 2, 6):
                tokens = ReasoningTokens(START, END, channel=CHANNEL)
                counter = ReasoningCounter(tokens, OPEN)
                for at in range(0, len(token_ids), size):
                    counter.add(token_ids[at : at + size])
                assert counter.num_tokens == num_tokens
