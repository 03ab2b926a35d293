"""Describes a model from its files, for one that sleeps: no replica has loaded it."""

from deployments.compute.model_files import read_generation, read_settings, wrap_load_errors
from deployments.compute.tokenizer_files import load_tokenizer
from deployments.contract.descriptions import ModelDescription
from deployments.contract.model_spec import ModelSpec, number
from deployments.engine.model.loader import load_config, load_text_side
from deployments.generator.description import describe_model
from deployments.generator.prompt_encoder import PromptEncoder
from deployments.plan.model_shape import ModelShape
from deployments.plan.sizes import NO_LIMIT_LEN


def describe_files(spec: ModelSpec) -> ModelDescription:
    """Describe a model that no replica has loaded: as its replicas would, but without a version.

    A length that is left to the replicas is the model's own limit: none of them takes more.

    Raises:
        UnsupportedModelError: Files are missing, or the engine can't run the model.
    """
    if spec.entry.engine == "vllm":
        return _describe_vllm_files(spec)
    tokenizer, processor, generation = load_text_side(spec.source, revision=spec.entry.revision)
    config = load_config(spec.source, revision=spec.entry.revision)
    vocab_size = config.get_text_config().vocab_size
    encoder = PromptEncoder(
        tokenizer, processor, spec.entry.reasoning_parser, vocab_size=vocab_size
    )
    max_model_len = number(spec.entry.max_model_len)
    if max_model_len is None:
        max_model_len = ModelShape.of(config).max_positions or NO_LIMIT_LEN
    return describe_model(spec, tokenizer, generation, max_model_len, encoder, None)


def _describe_vllm_files(spec: ModelSpec) -> ModelDescription:
    """Describe a model that vLLM runs: transformers here may not know its kind, nor the engine."""
    source, revision = spec.source, spec.entry.revision
    settings = read_settings(source, revision=revision)
    with wrap_load_errors(source, "its tokenizer"):
        tokenizer = load_tokenizer(source, revision=revision)
    generation = read_generation(source, revision=revision)
    encoder = PromptEncoder(
        tokenizer,
        None,
        spec.entry.reasoning_parser,
        vocab_size=settings.get("vocab_size", len(tokenizer)),
    )
    max_model_len = (
        number(spec.entry.max_model_len) or settings.get("max_position_embeddings") or NO_LIMIT_LEN
    )
    return describe_model(spec, tokenizer, generation, max_model_len, encoder, None)
