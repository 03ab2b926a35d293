from loadtest.results.redaction import (
    redacted_body,
    redacted_headers,
    redacted_url,
    secrets_of_body,
    secrets_of_url,
)


def test_a_header_keeps_only_its_name() -> None:
    assert redacted_headers(["X-Key: abc", "Authorization: Bearer x:y"]) == [
        "X-Key: ***",
        "Authorization: ***",
    ]


def test_a_url_keeps_all_but_its_secrets() -> None:
    assert redacted_url("http://host:1/v1/x") == "http://host:1/v1/x"
    hidden = redacted_url("https://me:word@host/v1/x?api-key=abc&version=2")
    assert "word" not in hidden
    assert "abc" not in hidden
    assert "version=2" in hidden


def test_the_secrets_of_a_url_are_those_it_hides() -> None:
    assert secrets_of_url("https://me:word@host/v1/x?api-key=abc&n=2") == ["me", "word", "abc"]
    assert secrets_of_url("https://host/v1/x?n=2") == []


def test_a_body_keeps_all_but_its_secrets() -> None:
    body = {"max_tokens": 5, "q": "{text}", "more": [{"api_key": "abc", "token": "{user}"}]}
    hidden = {"max_tokens": 5, "q": "{text}", "more": [{"api_key": "***", "token": "{user}"}]}
    assert redacted_body(body) == hidden
    assert list(secrets_of_body(body)) == ["abc"]
    assert redacted_body(None) is None
    assert list(secrets_of_body(None)) == []
