import pytest

from serve_app.client import event_reader
from serve_app.client.event_reader import Comment, Event, EventReader, OversizedEventError


def read(*pieces: bytes) -> list[Event | Comment]:
    reader = EventReader()
    return [each for piece in pieces for each in reader.feed(piece)]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_each_line_end_of_the_standard_counts_once_even_if_it_is_cut(end: bytes) -> None:
    stream = end.join([b"data: a", b"data: b", b"", b": note", b"", b"data: c", b"", b""])
    expected = [Event("a\nb"), Comment("note"), Event("c")]
    assert read(stream) == expected
    assert read(*(stream[i : i + 1] for i in range(len(stream)))) == expected


def test_other_fields_and_a_byte_order_mark_are_skipped() -> None:
    assert read(b"\xef\xbb\xbfevent: x\nid: 1\nretry: 5\ndata:y\nunknown\n\n") == [Event("y")]


def test_an_event_that_is_cut_off_is_not_returned() -> None:
    assert read(b"data: a\n") == []


def test_an_event_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_reader, "MAX_EVENT_BYTES", 100)
    read(*[b"data: " + b"a" * 80 + b"\n\n"] * 3)
    with pytest.raises(OversizedEventError):
        read(b"data: " + b"a" * 101)
    with pytest.raises(OversizedEventError):
        read(*[b"data: " + b"a" * 40 + b"\n"] * 3)
