from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.formats.reasoning_format import REASONING_FORMATS, PromptReasoning
from deployments.contract.output import FinishReason, TextDelta, TokenLogprob, TokenLogprobs
from deployments.contract.sampling_params import ReasoningTokens
from serve_app.api.reasoning.separation import ReasoningCounter, Separation
from tests.offenders import for_each

OPEN, BEGUN, ENDED = PromptReasoning.OPEN, PromptReasoning.BEGUN, PromptReasoning.ENDED
START, END, CHANNEL = 8, 9, 10


@for_each(
    (OPEN, (START, 1, 2, END, 3, 4), 4),
    (OPEN, (START, 1, 2), 3),
    (OPEN, (1, START, 2, END), 0),
    (OPEN, (START, END, 3, START, 4, END), 2),
    (OPEN, (), 0),
    (BEGUN, (1, 2, END, 3), 3),
    (BEGUN, (1, 2), 2),
    (ENDED, (START, 1, END), 0),
)
def test_the_tokens_of_the_first_block_are_counted_with_its_marks(
    prompt: PromptReasoning, token_ids: tuple[int, ...], num_tokens: int
) -> None:
    for size in (1, 2, 6):
        counter = ReasoningCounter(ReasoningTokens(START, END), prompt)
        counter.add(())
        for at in range(0, len(token_ids), size):
            counter.add(token_ids[at : at + size])
        assert counter.num_tokens == num_tokens


@for_each(
    ((START, CHANNEL, 1, END, 2, START, 3), 4),
    ((START, CHANNEL, 1), 3),
    ((START, 1, CHANNEL, END, 2), 0),
    ((1, START, CHANNEL, 2, END), 4),
    ((START, CHANNEL, 1, END, 2, START, CHANNEL, 3, 4, END, START, 5), 9),
    ((START, CHANNEL, 1, START, CHANNEL, 2), 6),
    ((START, CHANNEL, 1, START, 2, CHANNEL), 3),
    ((START, START, CHANNEL, 1), 3),
    ((START,), 0),
    ((START, CHANNEL, 1, START), 3),
)
def test_on_channels_only_the_channel_s_name_begins_the_reasoning(
    token_ids: tuple[int, ...], num_tokens: int
) -> None:
    for size in (1, 2, 6):
        tokens = ReasoningTokens(START, END, channel=CHANNEL)
        counter = ReasoningCounter(tokens, OPEN)
        for at in range(0, len(token_ids), size):
            counter.add(token_ids[at : at + size])
        assert counter.num_tokens == num_tokens


@given(token_ids=st.lists(st.integers(START - 1, CHANNEL)), size=st.integers(1, 4))
def test_hidden_reasoning_has_no_log_probabilities_however_the_answer_arrives(
    token_ids: list[int], size: int
) -> None:
    tokens = ReasoningTokens(START, END, channel=CHANNEL)
    counter = ReasoningCounter(tokens, OPEN)
    counter.add(token_ids)
    whole = shown_of(tokens, token_ids)
    assert len(whole) == len(token_ids) - counter.num_tokens
    pieces = [token_ids[at : at + size] for at in range(0, len(token_ids), size)]
    assert shown_of(tokens, *pieces) == whole
    assert shown_of(tokens, *pieces, []) == whole, "the finish may come without a token"


def test_each_message_of_hidden_reasoning_has_no_log_probabilities() -> None:
    tokens = ReasoningTokens(START, END, channel=CHANNEL)
    told = [START, CHANNEL, 1, END, 2, START, 3, END, START, CHANNEL, 4, END, START, 5]
    assert shown_of(tokens, told) == [2, START, 3, END, START, 5]


def shown_of(tokens: ReasoningTokens, *pieces: list[int]) -> list[int]:
    """Return the tokens whose log-probabilities a client gets that gets no reasoning."""
    separation = Separation(REASONING_FORMATS["openai_gptoss"], tokens, OPEN, is_shown=False)
    kept = separation.logprobs_filter()
    shown = list[TokenLogprobs]()
    for at, piece in enumerate(pieces, start=1):
        entries = tuple(TokenLogprobs(TokenLogprob(each, b"", -0.5), ()) for each in piece)
        reason = FinishReason.STOP if at == len(pieces) else None
        shown += kept.shown(TextDelta(tuple(piece), "", reason, logprobs=entries))
    return [entry.chosen.token_id for entry in shown]
