"""The shape of pydoc-chat: a tiny Gemma 3, sliding window and vision tower included."""

from typing import Final

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma3TextConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

from models.training.tokenizer import (
    END_OF_IMAGE,
    END_OF_TURN,
    IMAGE_SOFT_TOKEN,
    START_OF_IMAGE,
)

IMAGE_SIDE: Final = 56
PATCH_SIDE: Final = 7
TOKENS_PER_IMAGE: Final = 4
SLIDING_WINDOW: Final = 64
MAX_POSITIONS: Final = 2048
LAYER_TYPES: Final = (
    "sliding_attention",
    "sliding_attention",
    "full_attention",
    "sliding_attention",
    "sliding_attention",
    "full_attention",
)


def build_config(tokenizer: PreTrainedTokenizerFast) -> Gemma3Config:
    """Describe the model for this tokenizer's vocabulary."""
    text = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=len(LAYER_TYPES),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=SLIDING_WINDOW,
        layer_types=list(LAYER_TYPES),
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    vision = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        image_size=IMAGE_SIDE,
        patch_size=PATCH_SIDE,
        vision_use_head=False,
    )
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        boi_token_index=token_id(tokenizer, START_OF_IMAGE),
        eoi_token_index=token_id(tokenizer, END_OF_IMAGE),
        image_token_index=token_id(tokenizer, IMAGE_SOFT_TOKEN),
        tie_word_embeddings=True,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Gemma3ForConditionalGeneration:
    """Make a model with fresh weights from torch's global generator, in float32."""
    model = Gemma3ForConditionalGeneration(build_config(tokenizer))
    projector = model.model.multi_modal_projector.mm_input_projection_weight
    projector.data.normal_(std=projector.shape[0] ** -0.5)
    model.generation_config = build_generation_config(tokenizer)
    return model


def build_generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Return greedy defaults: the model recites its corpus, and sampling only adds errors."""
    return GenerationConfig(  # type: ignore[no-untyped-call] # left untyped
        do_sample=False,
        max_new_tokens=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stop_token_ids(tokenizer),
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Gemma3Processor:
    """Combine the tokenizer with an image processor that needs only Pillow."""
    image_processor = Gemma3ImageProcessorPil(size={"height": IMAGE_SIDE, "width": IMAGE_SIDE})
    return Gemma3Processor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=TOKENS_PER_IMAGE,
    )


def stop_token_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids that end an answer: ``<eos>`` and ``<end_of_turn>``."""
    return [token_id(tokenizer, str(tokenizer.eos_token)), token_id(tokenizer, END_OF_TURN)]


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Return the id of one known token."""
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found
