"""What a replica says about its model."""

from dataclasses import dataclass
from typing import Literal

from deployments.contract.sampling_params import ReasoningTokens, SamplingParams

Task = Literal["generate", "classify", "embed"]
"""What a model does."""

Engine = Literal["raystream", "vllm"]
"""What runs a model."""


@dataclass(frozen=True, slots=True)
class ReasoningDescription:
    """How a model marks its reasoning.

    Attributes:
        format: A key of `REASONING_FORMATS` in `reasoning_format`.
        tokens: The ids of the two marks.
        is_special: Whether the marks are special tokens, which normal decoding leaves out.
    """

    format: str
    tokens: ReasoningTokens
    is_special: bool = False


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a replica holds of a model, and where.

    Attributes:
        num_parameters: All weights; tied ones count once.
        weight_bytes: The weights in memory.
        dtype: Name of the type of the weights, or how they are quantized.
        device: The device's name.
    """

    num_parameters: int
    weight_bytes: int
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model that a text replica serves; each ingress asks for it once.

    Attributes:
        id: The name that clients ask for.
        created: When the replica finished loading the model, in Unix seconds.
        max_model_len: The most tokens of prompt and answer together.
        accepts_images: Whether messages may hold images.
        default_sampling: The values for parameters that a request does not set.
        accepts_tools: Whether the chat template can offer tools to the model.
        tool_call_format: How the model writes calls: a key of `FORMATS` in `tool_call_format`, or
            None if that is unknown.
        tool_call_token_ids: The marks of the format that are special tokens of the tokenizer, with
            their ids.
        reasoning: How the model marks its reasoning; None if its answers have none.
        template_parameters: The names that the chat template reads besides messages and tools; a
            request may set them.
        system_fingerprint: The version of the model and of what computes it. Replicas of the same
            version continue each other's texts.
        root: The hub repository of the model's files; None or the id if they lie in a folder.
        default_max_tokens: The most tokens of a chat's answer whose request sets no limit; None
            means as many as the model's length leaves.
        footprint: What the replica that tells it holds; None from the files of a model that sleeps.
        has_chat_template: Whether it answers messages; a base model only continues texts.
        parent: The id of the model that it is an adapter of; None if it is none.
        engine: What runs it.
        is_exact: Whether vLLM only uses kernels with which a sequence's tokens don't depend on what
            runs beside it. None for raystream's own engine, which has no such choice.
    """

    id: str
    created: int
    max_model_len: int
    accepts_images: bool
    default_sampling: SamplingParams
    accepts_tools: bool = False
    tool_call_format: str | None = None
    tool_call_token_ids: tuple[tuple[str, int], ...] = ()
    reasoning: ReasoningDescription | None = None
    template_parameters: tuple[str, ...] = ()
    system_fingerprint: str | None = None
    root: str | None = None
    default_max_tokens: int | None = None
    footprint: Footprint | None = None
    has_chat_template: bool = True
    parent: str | None = None
    engine: Engine = "raystream"
    is_exact: bool | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingDescription:
    """The vectors of an embedding model.

    Attributes:
        width: Numbers of a vector.
        is_normalized: Whether their length is 1.
        dimensions: The widths that its vectors may be cut to (Matryoshka); empty allows all, None
            none.
        prompts: Texts that go before a client's text, by name.
        default_prompt: The name of the prompt for requests that name none; None uses none.
    """

    width: int
    is_normalized: bool
    dimensions: tuple[int, ...] | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None


@dataclass(frozen=True, slots=True)
class PoolerDescription:
    """The model that a pooler's replica serves; each ingress asks for it once.

    Attributes:
        id: The name that clients ask for.
        created: When the replica finished loading the model, in Unix seconds.
        max_model_len: The most tokens of one text, special ones included.
        labels: In the order of the model's outputs; empty if it embeds.
        is_multi_label: Whether a text may have several labels (sigmoid instead of softmax).
        embedding: The vectors of a model that embeds; None if it classifies.
        root: See `ModelDescription`.
        footprint: See `ModelDescription`.
        engine: See `ModelDescription`.
    """

    id: str
    created: int
    max_model_len: int
    labels: tuple[str, ...] = ()
    is_multi_label: bool = False
    embedding: EmbeddingDescription | None = None
    root: str | None = None
    footprint: Footprint | None = None
    engine: Engine = "raystream"
