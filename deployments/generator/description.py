"""Describes a replica's model to the ingress."""

import time

from deployments.contract import ModelDescription
from deployments.engine.model.loader import LoadedModel
from deployments.generator.chat_template import choose_tool_call_format, special_marks
from deployments.generator.default_sampling import default_sampling
from deployments.generator.prompt_encoder import PromptEncoder
from deployments.generator.reasoning import describe_reasoning
from deployments.model_spec import ModelSpec


def describe_model(
    spec: ModelSpec, loaded: LoadedModel, encoder: PromptEncoder, fingerprint: str
) -> ModelDescription:
    """Describe a model: what it accepts, and how it samples by default."""
    template = encoder.template
    tool_call_format = choose_tool_call_format(spec.tool_call_parser, template)
    return ModelDescription(
        id=spec.id,
        created=int(time.time()),
        max_model_len=spec.max_model_len,
        accepts_images=loaded.processor is not None,
        default_sampling=default_sampling(loaded.model.generation_config),
        accepts_tools=template.accepts_tools,
        tool_call_format=tool_call_format.name if tool_call_format else None,
        tool_call_token_ids=special_marks(loaded.tokenizer, tool_call_format),
        reasoning=describe_reasoning(loaded.tokenizer, encoder.reasoning_format),
        template_parameters=template.parameters,
        system_fingerprint=fingerprint,
        root=spec.root,
    )
