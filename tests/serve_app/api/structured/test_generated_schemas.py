"""What generators of six languages write is accepted, and what is left out of it is named."""

import json
from collections import Counter

import pytest

from deployments.contract.grammar import probe
from serve_app.api.requests.stream_opener import unheld_warnings
from serve_app.api.structured.answer_grammar import GrammarSettings
from serve_app.api.structured.json_schema_grammar import LENIENT, json_schema_grammar
from serve_app.config import LimitsConfig
from tests.offenders import every
from tests.serve_app.api.structured.accepting import takes
from tests.serve_app.api.structured.generated_schemas import GENERATORS, generated

SETTINGS = GrammarSettings(LimitsConfig())


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile here: 300 processes would take half a minute, and other tests start them."""
    monkeypatch.setattr(probe, "_run", lambda _job, grammar, _seconds: probe._compiled(grammar))


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_every_schema_is_accepted_and_what_is_left_out_is_named() -> None:
    num_schemas = Counter[str]()
    for case in every(generated()):
        with case as each:
            num_schemas[each.name.partition(" ")[0]] += 1
            found = json_schema_grammar(each.schema, SETTINGS, style=LENIENT)
            told = [f"Not enforced in JSON schemas: {each.unheld}"] if each.unheld else []
            assert list(unheld_warnings(found.unheld)) == told
            example = json.dumps(each.example, ensure_ascii=False)
            assert takes(found.text, example), example
    assert num_schemas.keys() == GENERATORS.keys()
    assert num_schemas.total() >= 300
