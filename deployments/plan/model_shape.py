"""The sizes of a model, as its configuration tells them: layers, heads, and numbers of weights.

Memory is planned from them before anything is loaded, so nothing here imports torch, nor needs a
model's weights. The number of weights is counted from the widths of a family's layers: exactly for
the families that the engine serves but for some small vectors, and roughly for others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ITEM_BYTES: Final[Mapping[str, int]] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element, by the name of its type."""

QUANTIZED_BITS: Final[Mapping[str, int]] = {"int8": 8, "int4": 4}
"""Bits of a quantized weight, by the configuration's name."""

SCALED_INPUTS: Final = 32
"""Inputs whose quantized weights share a scale, which has the type of a step; see `step_dtype`."""

PLAIN_ENCODERS: Final = frozenset(
    {"albert", "bart", "bert", "camembert", "distilbert", "electra", "mpnet", "roberta"}
    | {"xlm-roberta"}
)
"""Types of models as BERT: a plain MLP, and a vector for each position."""

TWO_MATRICES: Final = PLAIN_ENCODERS | (
    {"bloom", "deberta", "deberta-v2", "falcon", "fnet", "gpt2", "gpt_bigcode", "gpt_neo"}
    | {"gpt_neox", "gptj", "nemotron", "opt", "phi", "starcoder2", "t5", "xlnet"}
)
"""Types of models whose MLP has two matrices; that of others is gated and has three."""

LEARNED_POSITIONS: Final = PLAIN_ENCODERS | {"gpt2", "gpt_bigcode", "gpt_neo", "opt"}
"""Types of models that hold a vector for each position."""

POSITIONS_AFTER_PADDING: Final = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})
"""Types of models whose first position comes after the padding token's id."""

OUTPUT_POOLER: Final = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "electra"})
"""Types of classifiers with a square matrix between the backbone and the labels."""

INTERMEDIATE_SIZE: Final = (
    "moe_intermediate_size",
    "intermediate_size",
    "ffn_dim",
    "hidden_dim",
    "d_ff",
    "n_inner",
)
"""Names for the width of an MLP; without any, it is four times the residual's."""

SIZED_TOWER: Final = "qwen2_5_vl_vision"
"""The type of vision towers whose images take as many tokens as their size asks for."""

NUM_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names for the number of experts in a layer."""


FLASH_DTYPES: Final = ("bfloat16", "float16")
MAX_FLASH_HEAD_DIM, FLASH_HEAD_DIM_STEP = 256, 8
"""Types and head sizes that flash attention takes.
Source: torch, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd."""

WITH_SINKS: Final = frozenset({"gpt_oss"})
"""Types of models with attention sinks, which torch's flash attention does not take."""


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """Numbers of weights.

    Attributes:
        total: All weights; tied ones count once.
        linear: Those of the decoder's linear layers, without the layer that computes the logits.
        head: Those of the layer that computes the logits; 0 for a pooler.
        is_tied: Whether the embeddings are that layer, too.
        is_estimate: Whether they were counted from the configuration, not in the files.
    """

    total: int
    linear: int
    head: int
    is_tied: bool
    is_estimate: bool = True

    def num_bytes(
        self,
        dtype: str,
        *,
        on_cpu: bool,
        quantization: str | None = None,
        has_bf16: bool = True,
    ) -> int:
        """Return the bytes of all weights in memory.

        On a CPU, tied weights count twice: not every CPU's kernels can look an embedding up in the
        packed layer of the logits, and then they need a copy. Quantized layers hold a scale for
        each group of weights, and the layer that computes the logits is int8 at least; the rest
        stays as it is.

        Args:
            dtype: Name of the type: float32, bfloat16 or float16.
            on_cpu: Whether the model runs on a CPU.
            quantization: int8, int4, or None; of a model whose linear layers all have a multiple of
                `SCALED_INPUTS` inputs.
            has_bf16: Whether a CPU has AVX512_BF16.
        """
        item = ITEM_BYTES[dtype]
        if quantization is None:
            copied = self.head if on_cpu and self.is_tied else 0
            return (self.total + copied) * item
        replaced = self.linear + (0 if self.is_tied else self.head)
        plain = (self.total - replaced) * item
        scale = ITEM_BYTES[step_dtype(dtype, quantization, has_bf16=has_bf16)]
        scales = (self.linear + self.head) // SCALED_INPUTS * scale
        return plain + self.linear * QUANTIZED_BITS[quantization] // 8 + self.head + scales


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model.

    Attributes:
        model_type: The family, as `model_type` in the configuration.
        dtype: Name of the type of the weights in the files.
        vocab_size: Tokens.
        hidden_size: Width of the residual.
        intermediate_size: Width of an MLP, or of all experts that a token runs through.
        num_layers: Layers of the language model.
        windows: For each layer with attention, the most tokens that a query sees, itself included;
            None if it sees all.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values; fewer than query heads with grouped queries.
        head_dim: Elements of one head.
        max_positions: The most tokens of a text; None if the configuration sets no limit. With
            longrope, those of its original range: beyond it, sequences would change one another.
        has_images: Whether the model takes images as well as text.
        has_softcap: Whether its attention bounds the scores.
        weights: How many weights there are.
        image_token_elements: Elements that the vision tower holds for each token of an image, where
            images take as many tokens as their size asks for; 0 for other models.
    """

    model_type: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    windows: tuple[int | None, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int | None
    has_images: bool
    has_softcap: bool
    weights: WeightCounts
    image_token_elements: int = 0

    @classmethod
    def of(cls, config: "PreTrainedConfig", *, is_pooler: bool = False) -> Self:
        """Read the sizes from a model's configuration.

        Args:
            config: The whole configuration, that of a vision tower included.
            is_pooler: Whether the model classifies or embeds; then it computes no logits.

        Raises:
            ValueError: The configuration lacks a size, or has one that is not understood.
        """
        try:
            return cls._read(config, is_pooler=is_pooler)
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"the configuration of a {config.model_type} is not understood: {error}"
            ) from error

    @classmethod
    def _read(cls, config: "PreTrainedConfig", *, is_pooler: bool) -> Self:
        text = config.get_text_config()
        hidden_size, num_layers = _size(text, "hidden_size"), _size(text, "num_hidden_layers")
        num_kv_heads, head_dim = kv_heads_of(text)
        dtype = stored_dtype(config)
        if dtype not in ITEM_BYTES:
            raise ValueError(f"weights in {dtype} are not served; known: {', '.join(ITEM_BYTES)}")
        return cls(
            model_type=str(text.model_type),
            dtype=dtype,
            vocab_size=_size(text, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_intermediate_size(text)
            * (getattr(text, "num_experts_per_tok", None) or 1),
            num_layers=num_layers,
            windows=windows_of(text),
            num_heads=getattr(text, "num_attention_heads", None) or 1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_positions=_max_positions(text),
            has_images=getattr(config, "vision_config", None) is not None,
            has_softcap=bool(getattr(text, "attn_logit_softcapping", None)),
            weights=_count(config, text, is_pooler=is_pooler),
            image_token_elements=_image_token_elements(getattr(config, "vision_config", None)),
        )

    def reads_by_length(self, dtype: str) -> bool:
        """Return whether a GPU's flash attention takes its heads, by what is known of it.

        The engine compares on the device, too, before it uses it.

        Args:
            dtype: Name of the type of keys and values.
        """
        fits = self.head_dim <= MAX_FLASH_HEAD_DIM and self.head_dim % FLASH_HEAD_DIM_STEP == 0
        is_plain = not self.has_softcap and self.model_type not in WITH_SINKS
        return fits and is_plain and dtype in FLASH_DTYPES

    def with_counted(self, num_weights: int) -> Self:
        """Return the sizes with the number of weights that is in the files."""
        return replace(self, weights=replace(self.weights, total=num_weights, is_estimate=False))


def stored_dtype(config: "PreTrainedConfig") -> str:
    """Return the name of the type of the weights in the files."""
    stored = config.get_text_config().dtype or config.dtype or "float32"
    return str(stored).removeprefix("torch.")


def step_dtype(dtype: str, quantization: str | None, *, has_bf16: bool) -> str:
    """Return the name of the type in which a model's linear layers compute.

    The kernel of quantized layers computes in float32, or in bfloat16 if the processor does.

    Args:
        dtype: Name of the model's type.
        quantization: int8, int4, or None.
        has_bf16: Whether a CPU has AVX512_BF16.
    """
    is_wider = quantization is not None and not (dtype == "bfloat16" and has_bf16)
    return "float32" if is_wider else dtype


def choose_dtype_name(stored: str, dtype: str, *, on_cpu: bool, has_bf16: bool) -> str:
    """Return the name of the type of the weights on the device.

    `auto` keeps the files' type, except on a CPU: float16 becomes float32 there, and so does every
    type if the CPU lacks AVX512_BF16.

    Args:
        stored: Name of the type in the files.
        dtype: auto, float32, bfloat16 or float16.
        on_cpu: Whether the model runs on a CPU.
        has_bf16: Whether that CPU has AVX512_BF16.
    """
    if dtype != "auto":
        return dtype
    return "float32" if on_cpu and (stored == "float16" or not has_bf16) else stored


def windows_of(text: "PreTrainedConfig") -> tuple[int | None, ...]:
    """Return each layer's window, as transformers' own caches read it from a text configuration.

    Models with layers of other types than these two are not served.
    """
    window: int | None = getattr(text, "sliding_window", None)
    layer_types = getattr(text, "layer_types", None)
    if layer_types is None:
        return (window,) * _size(text, "num_hidden_layers")
    return tuple(window if each == "sliding_attention" else None for each in layer_types)


def kv_heads_of(text: "PreTrainedConfig") -> tuple[int, int]:
    """Return the number of heads of keys and values, and the elements of a head.

    A model without attention, which the engine refuses and a pooler may be, counts as one head.
    """
    num_heads = getattr(text, "num_attention_heads", None) or 1
    head_dim = getattr(text, "head_dim", None) or _size(text, "hidden_size") // num_heads
    return getattr(text, "num_key_value_heads", None) or num_heads, head_dim


def rope_parameters(text: "PreTrainedConfig") -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters: one mapping, or one for each type of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    yield from nested or [rope]


def longrope_range(text: "PreTrainedConfig") -> int | None:
    """Return the positions up to which longrope rotates all sequences alike; None without it."""
    ranges = [
        original
        for rope in rope_parameters(text)
        if rope.get("rope_type") == "longrope"
        and (original := rope.get("original_max_position_embeddings"))
    ]
    return min(ranges, default=None)


def _max_positions(text: "PreTrainedConfig") -> int | None:
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and text.model_type in POSITIONS_AFTER_PADDING:
        positions -= (text.pad_token_id or 0) + 1
    limits = (positions, longrope_range(text))
    return min((each for each in limits if isinstance(each, int) and each > 0), default=None)


def _size(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"the configuration of a {config.model_type} has no {name}")
    return value


def _intermediate_size(text: Any) -> int:
    sizes = (getattr(text, name, None) for name in INTERMEDIATE_SIZE)
    return next(filter(None, sizes), 4 * _size(text, "hidden_size"))


def _num_experts(text: Any) -> int:
    return next((n for name in NUM_EXPERTS if (n := getattr(text, name, None))), 0)


def _count(config: Any, text: Any, *, is_pooler: bool) -> WeightCounts:
    hidden, vocab = _size(text, "hidden_size"), _size(text, "vocab_size")
    num_layers, model_type = _size(text, "num_hidden_layers"), text.model_type
    num_kv_heads, head_dim = kv_heads_of(text)
    queries = (getattr(text, "num_attention_heads", None) or 1) * head_dim
    attention = 2 * hidden * queries + 2 * hidden * num_kv_heads * head_dim
    matrix = hidden * _intermediate_size(text)
    mlp = matrix * (2 if model_type in TWO_MATRICES else 3)
    num_experts = _num_experts(text)
    experts = num_experts * (mlp + hidden) if num_experts else 0  # each has a row of the router
    linear = num_layers * (attention + (0 if num_experts else mlp))
    head = 0 if is_pooler else vocab * hidden
    # A composite model's own setting counts; some families tie unless they are told otherwise.
    is_tied = not is_pooler and bool(getattr(config, "tie_word_embeddings", True))
    num_labels = len(getattr(config, "id2label", None) or ()) if is_pooler else 0
    others = vocab * hidden + num_layers * experts + hidden * num_labels
    if model_type in LEARNED_POSITIONS:
        others += hidden * (getattr(text, "max_position_embeddings", None) or 0)
    if is_pooler and model_type in OUTPUT_POOLER:
        others += hidden * hidden
    others += _count_vision(getattr(config, "vision_config", None), hidden)
    total = linear + others + (0 if is_tied else head)
    return WeightCounts(total, linear, head, is_tied)


def _side(vision: Any, name: str, default: int) -> int:
    """Return the side of a square; some towers give height and width."""
    value = getattr(vision, name, None) or default
    return int(value[0] if isinstance(value, list | tuple) else value)


def _patch_elements(vision: Any) -> int:
    """Return the elements of a patch, which spans several frames; an image repeats its own."""
    return int(3 * vision.temporal_patch_size * vision.patch_size**2)


def _image_token_elements(vision: Any) -> int:
    """Return the most elements that a tower holds at once for each token of an image."""
    if vision is None or vision.model_type != SIZED_TOWER:
        return 0
    patch = 4 * vision.hidden_size + 3 * _intermediate_size(vision) + 3 * _patch_elements(vision)
    return int(patch * vision.spatial_merge_size**2)


def _count_vision(vision: Any, text_hidden: int) -> int:
    """Return the weights of a vision transformer, and of its projection to the text's width."""
    if vision is None:
        return 0
    hidden = getattr(vision, "hidden_size", None)
    layers = getattr(vision, "num_hidden_layers", None)
    if not isinstance(hidden, int) or not isinstance(layers, int):
        return 0  # a tower of another kind; the files' headers count it
    if vision.model_type == SIZED_TOWER:
        # A gated MLP, no vector for each position, and patches that are merged in squares.
        patch_size = _patch_elements(vision)
        merged: int = hidden * vision.spatial_merge_size**2
        layer = 4 * hidden**2 + 3 * hidden * _intermediate_size(vision)
        return hidden * patch_size + layers * layer + merged * (merged + text_hidden)
    patch, image = _side(vision, "patch_size", 14), _side(vision, "image_size", 224)
    embedding = 3 * patch**2 * hidden + (image // patch) ** 2 * hidden
    layer = 4 * hidden**2 + 2 * hidden * _intermediate_size(vision)
    return embedding + layers * layer + hidden * text_hidden
