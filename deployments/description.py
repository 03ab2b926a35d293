"""What a replica tells the ingress of its model."""

import time

from deployments.chat_template import ChatTemplate, choose_tool_call_format, special_marks
from deployments.contract import ModelDescription, SamplingParams
from deployments.engine.model_loader import LoadedModel
from deployments.fingerprint import system_fingerprint
from deployments.model_spec import ModelSpec


def describe_model(
    spec: ModelSpec, loaded: LoadedModel, template: ChatTemplate
) -> ModelDescription:
    """Describe a model: what it accepts, and what its own generation config samples with."""
    generation = loaded.model.generation_config
    tool_call_format = choose_tool_call_format(spec.tool_call_parser, template)
    temperature = getattr(generation, "temperature", None)
    if getattr(generation, "do_sample", None) is False:
        temperature = 0.0
    return ModelDescription(
        id=spec.id,
        created=int(time.time()),
        max_model_len=spec.max_model_len,
        accepts_images=loaded.processor is not None,
        default_sampling=SamplingParams(
            temperature=1.0 if temperature is None else temperature,
            top_k=getattr(generation, "top_k", None) or 0,
            top_p=getattr(generation, "top_p", None) or 1.0,
            min_p=getattr(generation, "min_p", None) or 0.0,
            repetition_penalty=getattr(generation, "repetition_penalty", None) or 1.0,
        ),
        accepts_tools=template.accepts_tools,
        tool_call_format=tool_call_format.name if tool_call_format else None,
        tool_call_token_ids=special_marks(loaded.tokenizer, tool_call_format),
        system_fingerprint=system_fingerprint(spec),
    )
