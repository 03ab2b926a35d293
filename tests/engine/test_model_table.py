from tests.engine.model_table import features_of
from tests.engine.tiny_models import (
    gemma2,
    gemma3,
    gpt2,
    gpt_oss,
    llama,
    llama3,
    mistral,
    qwen3_moe,
)


def test_features_are_read_off_the_model() -> None:
    assert features_of(llama()) == ["keys for every head"]
    assert features_of(llama3()) == ["grouped queries", "scaled rotary positions"]
    assert features_of(mistral()) == ["grouped queries", "sliding window"]
    assert features_of(qwen3_moe()) == ["grouped queries", "norms on queries and keys", "experts"]
    assert features_of(gpt2()) == ["keys for every head", "learned positions"]
    assert features_of(gemma2()) == [
        "grouped queries",
        "sliding window in some layers",
        "softcapped scores",
    ]
    assert features_of(gpt_oss()) == [
        "grouped queries",
        "sliding window in some layers",
        "scaled rotary positions",
        "attention sinks",
        "experts",
    ]
    assert features_of(gemma3()) == [
        "one head of keys",
        "sliding window in some layers",
        "norms on queries and keys",
    ]
