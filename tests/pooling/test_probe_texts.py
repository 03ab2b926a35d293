from typing import Any

import pytest

from deployments.pooling.probe_texts import ProbeTexts
from tests.engine.tiny_models import byte_tokenizer
from tests.pooling.tiny_classifiers import qwen2, qwen2_without_padding, roberta
from tests.pooling.tiny_folder import framing_tokenizer


@pytest.mark.parametrize("length", [2, 3, 9, 128])
def test_a_probe_has_the_special_tokens_of_every_text(length: int) -> None:
    tokenizer = framing_tokenizer()
    text = ProbeTexts.of(roberta(), tokenizer).of_length(length)
    assert len(text) == length
    assert (text[0], text[-1]) == (2, 3)
    assert not {*text[1:-1]} & {*tokenizer.all_special_ids}


def test_a_probe_is_as_short_as_a_text_can_be() -> None:
    assert ProbeTexts.of(roberta(), framing_tokenizer()).of_length(1) == (2, 3)
    assert len(ProbeTexts.of(qwen2(), byte_tokenizer()).of_length(0)) == 1


def test_a_probe_has_only_tokens_that_the_model_knows() -> None:
    model: Any = qwen2_without_padding()
    model.config.vocab_size = 60  # the tokenizer has 300
    assert max(ProbeTexts.of(model, framing_tokenizer()).ordinary) == 59
