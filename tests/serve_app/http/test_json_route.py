import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.errors import InvalidRequestError
from serve_app.http import json_route
from serve_app.http.json_route import decode_json

TEXTS = st.text(st.sampled_from('a[]{}:,"\\\n\u00e9'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda children: st.lists(children) | st.dictionaries(TEXTS, children),
    max_leaves=20,
)


def num_nodes(value: Any) -> int:
    """Return the objects, lists and fields of a value."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(num_nodes, value.values()))
    return 1 + sum(map(num_nodes, value)) if isinstance(value, list) else 0


@given(value=VALUES, is_ascii=st.booleans())
def test_brackets_and_colons_in_strings_are_not_nodes(value: Any, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_route, "MAX_NUM_NODES", num_nodes(value))
        assert decode_json(body, 64) == value
        patch.setattr(json_route, "MAX_NUM_NODES", num_nodes(value) - 1)
        if num_nodes(value):
            with pytest.raises(InvalidRequestError, match="objects, lists and fields"):
                decode_json(body, 64)


@given(st.binary(max_size=40) | st.text(st.sampled_from('["\\{:a'), max_size=40).map(str.encode))
def test_any_body_is_decoded_or_refused(body: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_route, "MAX_NUM_NODES", 3)
        with suppress(InvalidRequestError):
            decode_json(body, 64)


def test_a_number_without_a_fraction_is_an_integer_unless_it_is_huge() -> None:
    decoded = decode_json(b"[2.0, 2e0, -0.0, 2.5, 9e18, 1e19, 1e300]", 8)
    assert decoded == [2, 2, 0, 2.5, 9 * 10**18, 1e19, 1e300]
    assert [type(number) for number in decoded] == [int, int, int, float, int, float, float]
