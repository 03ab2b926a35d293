import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.errors import InvalidRequestError
from deployments.contract.sampling_params import MAX_SEED
from serve_app.config import MAX_NUM_CHOICES
from serve_app.streaming.event_id import DIGEST_BYTES, EventId, EventIds, Mark, SentPart, checksum
from tests.serve_app.sse_decoder import SseDecoder

EVENT = b"data: x\n\n"
SEEDS = st.integers(0, MAX_SEED)
DIGESTS = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=5)
SENT = st.lists(
    st.tuples(st.integers(0, MAX_NUM_CHOICES - 1), TOKEN_IDS, st.integers(0, 1000)), max_size=20
)


def id_of(event: bytes) -> str:
    decoder = SseDecoder()
    assert decoder.feed(event) == ["x"]
    return decoder.last_event_id


@given(seed=SEEDS, digest=DIGESTS, sent=SENT)
def test_an_id_says_what_was_sent_of_each_choice(
    seed: int, digest: bytes, sent: list[tuple[int, list[int], int]]
) -> None:
    ids = EventIds(seed, digest, MAX_NUM_CHOICES, None)
    token_ids: list[list[int]] = [[] for _ in range(MAX_NUM_CHOICES)]
    sizes = [0] * MAX_NUM_CHOICES
    seen = 0
    for index, gained, size in sent:
        token_ids[index] += gained
        sizes[index] += size
        seen = max(seen, index + 1)
        assert not ids.gained(index, gained)
        found = EventId.decode(id_of(ids.sent(index, size, EVENT)))
        assert (found.seed, found.digest, found.mark) == (seed, digest, None)
        assert [(part.num_tokens, part.size) for part in found.parts] == [
            (len(token_ids[at]), sizes[at]) for at in range(seen)
        ]
        assert found.parts[index].checksum == checksum(token_ids[index])
    for mark in Mark:
        found = EventId.decode(id_of(ids.marked(mark, EVENT)))
        assert (len(found.parts), found.mark) == (seen, mark)


def test_what_comes_again_changes_no_id() -> None:
    parts = (SentPart(3, 10, checksum((1, 2, 3))), SentPart(0, 1, 0))
    last = EventId(5, b"d" * DIGEST_BYTES, parts)
    ids = EventIds(last.seed, last.digest, 3, last)
    assert ids.gained(0, (1, 2, 3))
    assert not ids.gained(0, (4,))
    assert not ids.gained(1, (9,))
    found = EventId.decode(id_of(ids.sent(0, 2, EVENT)))
    # The event of choice 1 is still to come.
    assert found.parts == (SentPart(4, 12, checksum((1, 2, 3, 4))), parts[1])
    assert EventId.decode(id_of(ids.sent(1, 0, EVENT))).parts[1] == SentPart(1, 1, checksum((9,)))


@given(
    text=st.text(max_size=60)
    | st.from_regex(r"\A[B-Z][\w-]{23}([\w-]{16}){0,2}(\.\w+)?\Z")  # of other versions
)
def test_any_other_text_is_refused_and_names_the_header(text: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        EventId.decode(text)
    assert refused.value.param == "Last-Event-ID"


def test_more_choices_than_an_answer_may_have_are_refused() -> None:
    ids = EventIds(1, b"d" * DIGEST_BYTES, MAX_NUM_CHOICES + 1, None)
    EventId.decode(id_of(ids.sent(MAX_NUM_CHOICES - 1, 1, EVENT)))
    with pytest.raises(InvalidRequestError):
        EventId.decode(id_of(ids.sent(MAX_NUM_CHOICES, 1, EVENT)))
