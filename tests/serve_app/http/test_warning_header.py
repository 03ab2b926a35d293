from hypothesis import given
from hypothesis import strategies as st

from serve_app.http.warning_header import MAX_LENGTH, header_value, warning_headers


@given(st.text())
def test_any_text_becomes_a_value_of_a_header(text: str) -> None:
    value = header_value(text)
    assert value.isascii()
    assert not value or value.isprintable()
    assert len(value) <= MAX_LENGTH


def test_a_long_text_is_cut_visibly() -> None:
    assert header_value("a" * MAX_LENGTH) == "a" * MAX_LENGTH
    assert header_value("a" * (MAX_LENGTH + 1)).endswith("a...")


def test_without_a_request_there_is_no_header() -> None:
    assert warning_headers() == {}
