import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serve_app.api.body.echoed_fields import (
    IN_CALLS,
    IN_MESSAGES,
    IN_PARTS,
    Nothing,
    carries_nothing,
)
from serve_app.api.body.unsupported_fields import UNSUPPORTED
from serve_app.http.json_route import MAX_NUM_VALUES
from tests.offenders import for_each

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, "", False, 0, "a"]) | st.just([]) | st.just({}),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children),
    max_leaves=5,
)


@for_each(None, "", [], {}, [None, ""], {"a": None, "b": [{"c": {}}]})
def test_what_holds_only_nothing_carries_nothing(value: Any) -> None:
    assert carries_nothing(value)


@for_each(False, 0, " ", [0], {"a": {"b": [False]}})
def test_false_and_zero_carry_something(value: Any) -> None:
    assert not carries_nothing(value)


def test_a_body_full_of_nulls_takes_little_time() -> None:
    began_s = time.process_time()
    assert carries_nothing([None, ""] * (MAX_NUM_VALUES // 2))
    assert time.process_time() - began_s < 0.5  # a call for each takes some seconds


@given(VALUES)
def test_the_check_and_the_schema_s_type_agree(value: Any) -> None:
    try:
        Nothing.model_validate(value, strict=True)
    except ValidationError:
        assert not carries_nothing(value)
    else:
        assert carries_nothing(value)


@for_each(*sorted(IN_MESSAGES | IN_PARTS | IN_CALLS))
def test_each_echoed_field_has_a_reason_for_its_refusal(name: str) -> None:
    assert UNSUPPORTED[name].why
