import pytest

from deployments.contract.formats.reasoning_format import DEEPSEEK_R1, QWEN3
from deployments.contract.sampling_params import ReasoningTokens
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.generator.chat_template import ChatTemplate
from deployments.generator.reasoning import choose_reasoning_format, describe_reasoning
from tests.deployments.tiny_folder import REASONING_TEMPLATE
from tests.engine.tiny_models import byte_tokenizer


def test_the_configuration_overrides_the_template_s_reasoning() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = REASONING_TEMPLATE
    template = ChatTemplate(tokenizer, None)
    assert choose_reasoning_format("auto", template, tokenizer) is None
    with pytest.raises(UnsupportedModelError, match="reasoning_parser: none"):
        choose_reasoning_format("qwen3", template, tokenizer)
    first = len(tokenizer)
    tokenizer.add_tokens(["<think>", "</think>"])
    assert choose_reasoning_format("auto", template, tokenizer) is QWEN3
    assert choose_reasoning_format("none", template, tokenizer) is None
    assert choose_reasoning_format("deepseek_r1", template, tokenizer) is DEEPSEEK_R1
    described = describe_reasoning(tokenizer, QWEN3)
    assert described is not None
    assert described.tokens == ReasoningTokens(first, first + 1)
    assert not described.is_special
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    described = describe_reasoning(tokenizer, QWEN3)
    assert described is not None
    assert described.is_special
    assert describe_reasoning(tokenizer, None) is None


def test_a_channel_s_name_must_be_a_token_like_the_marks() -> None:
    tokenizer = byte_tokenizer()
    template = ChatTemplate(tokenizer, None)
    first = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel|>", "<|end|>"]})
    with pytest.raises(UnsupportedModelError, match="'analysis' are not tokens"):
        choose_reasoning_format("openai_gptoss", template, tokenizer)
    tokenizer.add_tokens(["analysis"])
    known = choose_reasoning_format("openai_gptoss", template, tokenizer)
    described = describe_reasoning(tokenizer, known)
    assert described is not None
    assert described.tokens == ReasoningTokens(first, first + 1, channel=first + 2)
    assert described.is_special
