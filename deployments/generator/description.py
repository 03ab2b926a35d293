"""Describes a replica's model to the ingress."""

import time

from transformers import GenerationConfig, PreTrainedTokenizerBase

from deployments.contract.descriptions import ModelDescription
from deployments.contract.model_spec import ModelSpec, number
from deployments.engine.model.loader import LoadedModel, load_config, load_text_side
from deployments.generator.chat_template import choose_tool_call_format, special_marks
from deployments.generator.default_sampling import default_sampling
from deployments.generator.prompt_encoder import PromptEncoder
from deployments.generator.reasoning import describe_reasoning
from deployments.plan.model_shape import ModelShape
from deployments.plan.replica_plan import NO_LIMIT_LEN


def describe_model(
    spec: ModelSpec,
    loaded: LoadedModel,
    max_model_len: int,
    encoder: PromptEncoder,
    fingerprint: str,
) -> ModelDescription:
    """Describe a model: what it accepts, and how it samples by default."""
    generation = loaded.model.generation_config
    return _describe(spec, loaded.tokenizer, generation, max_model_len, encoder, fingerprint)


def describe_files(spec: ModelSpec) -> ModelDescription:
    """Describe a model that no replica has loaded: as its replicas would, but without a version.

    A length that is left to the replicas is the model's own limit: none of them takes more.

    Raises:
        UnsupportedModelError: Files are missing, or the engine can't run the model.
    """
    tokenizer, processor, generation = load_text_side(spec.source, revision=spec.entry.revision)
    config = load_config(spec.source, revision=spec.entry.revision)
    vocab_size = config.get_text_config().vocab_size
    encoder = PromptEncoder(
        tokenizer, processor, spec.entry.reasoning_parser, vocab_size=vocab_size
    )
    max_model_len = number(spec.entry.max_model_len)
    if max_model_len is None:
        max_model_len = ModelShape.of(config).max_positions or NO_LIMIT_LEN
    return _describe(spec, tokenizer, generation, max_model_len, encoder, None)


def _describe(
    spec: ModelSpec,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig | None,
    max_model_len: int,
    encoder: PromptEncoder,
    fingerprint: str | None,
) -> ModelDescription:
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
    )
