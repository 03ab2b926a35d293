import re

import pytest

from deployments.contract.tool_call_format import HERMES, LLAMA3_JSON, MISTRAL, ToolCallFormat
from serve_app.api.tools.parsing.answer import new_call_id


@pytest.mark.parametrize(
    ("known", "pattern"),
    [
        (HERMES, "call_[a-zA-Z0-9]{24}"),
        (LLAMA3_JSON, "call_[a-zA-Z0-9]{24}"),
        (MISTRAL, "[a-zA-Z0-9]{9}"),
    ],
)
def test_a_call_has_an_id_that_its_template_accepts(known: ToolCallFormat, pattern: str) -> None:
    ids = [new_call_id(known) for _ in range(100)]
    assert all(re.fullmatch(pattern, call_id) for call_id in ids)
    assert len(set(ids)) == 100
