"""Folders with tiny random models, as a replica loads them."""

from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from deployments.contract.model_spec import ModelConfig, ModelSpec
from tests.engine.tiny_models import EOS_TOKEN_ID, byte_tokenizer, qwen2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the assistant can not begin') }}{% endif %}"
    "<special1>{{ message.role }}\n{{ message.content }}<special2>{% endfor %}"
    "{% if add_generation_prompt %}<special1>assistant\n{% endif %}"
)

REASONING_TEMPLATE = (
    "{% for message in messages %}<special1>{{ message.role }}\n"
    "{% if message.role == 'assistant' and '</think>' in message.content %}"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ message.content }}{% endif %}<special2>{% endfor %}"
    "{% if add_generation_prompt %}<special1>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""It treats reasoning as Qwen3's template does: dropped from earlier turns, on unless it is off."""


def save_text_model(folder: Path, model: PreTrainedModel | None = None) -> Path:
    """Save a model with a byte-level tokenizer and a chat template."""
    model = model or qwen2()
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call] # left untyped
        eos_token_id=EOS_TOKEN_ID,
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
    )
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def spec(source: str | Path, **changes: Any) -> ModelSpec:
    """Return the spec of a small replica."""
    num_gpus, tracing = changes.pop("num_gpus", 0.0), changes.pop("tracing", None)
    values = {
        "id": "tiny",
        "source": str(source),
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 128,
        "max_batched_tokens": 64,
    }
    if changes.get("task", "generate") == "generate":
        values["max_num_seqs"] = 4
    entry = ModelConfig.model_validate({**values, **changes})
    return ModelSpec(entry, str(source), num_gpus, tracing)
