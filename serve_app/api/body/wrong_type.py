"""The error of a field that takes several types, of which a value has none.

pydantic reports one error for each type, or the error of the type that a value was converted to.
Neither says what the field takes.
"""

from pydantic_core import PydanticCustomError


def wrong_type(expected: str, field: str | None = None) -> PydanticCustomError:
    """Return the error of a value.

    Args:
        expected: What it may be: "a string or a list of strings".
        field: The field within it that has the wrong type; None means the value itself.
    """
    context = {"expected": expected} if field is None else {"expected": expected, "field": field}
    return PydanticCustomError("wrong_type", "must be {expected}", context)
