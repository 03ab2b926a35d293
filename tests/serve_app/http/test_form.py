"""Forms, in whatever pieces they come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.errors import InvalidRequestError, UnsupportedMediaTypeError
from serve_app.http.form import FormReader, Part

TYPE = "multipart/form-data; boundary=abc"


def form(*parts: tuple[str, bytes]) -> bytes:
    return (
        b"".join(
            f"--abc\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + value + b"\r\n"
            for head, value in parts
        )
        + b"--abc--\r\n"
    )


def read(body: bytes, sizes: list[int] | None = None) -> list[tuple[Part, bytes]]:
    reader, found = FormReader(TYPE), list[tuple[Part, bytes]]()
    pieces, at = [], 0
    for size in sizes or []:
        pieces.append(body[at : at + size])
        at += size
    for piece in (*pieces, body[at:]):
        for each in reader.feed(piece):
            if isinstance(each, Part):
                found.append((each, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + each)
    assert reader.has_ended
    return found


@given(
    st.lists(st.binary() | st.sampled_from([b"--abc", b"\r\n--ab", b"\r\n\r\n", b""])),
    st.lists(st.integers(0, 40)),
)
def test_values_are_read_whatever_the_pieces(values: list[bytes], sizes: list[int]) -> None:
    values = [value for value in values if b"\r\n--abc" not in b"\r\n" + value]
    body = form(*((f'name="f{at}"', value) for at, value in enumerate(values)))
    assert read(body, sizes) == [(Part(f"f{at}", None), value) for at, value in enumerate(values)]


def test_a_filename_may_hold_any_text() -> None:
    ((part, _),) = read(form(('name="file"; filename="größe 1.jsonl"', b"x")))
    assert part == Part("file", "größe 1.jsonl")


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "multipart/form-data", "multipart/form-data; boundary=", "", "x" * 99],
)
def test_what_is_no_form_is_refused(content_type: str) -> None:
    with pytest.raises(UnsupportedMediaTypeError):
        FormReader(content_type)


@pytest.mark.parametrize(
    "body",
    [
        b"--abc and more",
        b"--abc\r\nContent-Type: text/plain\r\n\r\nx\r\n--abc--",
        b"--abc\r\n" + b"x" * 9000,
    ],
)
def test_a_broken_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        list(FormReader(TYPE).feed(body))


def test_a_form_without_an_end_has_not_ended() -> None:
    reader = FormReader(TYPE)
    list(reader.feed(b'--abc\r\nContent-Disposition: form-data; name="a"\r\n\r\nx'))
    assert not reader.has_ended
