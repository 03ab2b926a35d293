"""Describes a model to the ingress."""

import time

from transformers import GenerationConfig, PreTrainedTokenizerBase

from deployments.contract.descriptions import ModelDescription
from deployments.contract.model_spec import ModelSpec
from deployments.generator.chat_template import choose_tool_call_format, special_marks
from deployments.generator.default_sampling import default_sampling
from deployments.generator.prompt_encoder import PromptEncoder
from deployments.generator.reasoning import describe_reasoning


def describe_model(
    spec: ModelSpec,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig | None,
    max_model_len: int,
    encoder: PromptEncoder,
    fingerprint: str | None,
) -> ModelDescription:
    """Describe a model from its parts; without a version if no replica has loaded it.

    Args:
        spec: The model.
        tokenizer: Its tokenizer.
        generation: Its defaults; None if it has none.
        max_model_len: The most tokens of prompt and answer together.
        encoder: Encodes its prompts.
        fingerprint: See `system_fingerprint`.
    """
    template = encoder.template
    tool_call_format = choose_tool_call_format(spec.entry.tool_call_parser, template)
    return ModelDescription(
        id=spec.id,
        created=int(time.time()),
        max_model_len=max_model_len,
        accepts_images=encoder.accepts_images,
        default_sampling=default_sampling(generation),
        accepts_tools=template.accepts_tools,
        tool_call_format=tool_call_format.name if tool_call_format else None,
        tool_call_token_ids=special_marks(tokenizer, tool_call_format),
        reasoning=describe_reasoning(tokenizer, encoder.reasoning_format),
        template_parameters=template.parameters,
        system_fingerprint=fingerprint,
        root=spec.root,
        default_max_tokens=getattr(generation, "max_new_tokens", None),
        has_chat_template=template.exists,
        engine=spec.entry.engine,
        is_exact=spec.entry.exact if spec.entry.engine == "vllm" else None,
    )
