"""A Gemma 3 processor that needs only Pillow, for the tiny models of `tests.engine`."""

from transformers import Gemma3ImageProcessorPil, Gemma3Processor

from tests.engine.tiny_models import IMAGE_SIZE, TOKENS_PER_IMAGE, byte_tokenizer

START_OF_IMAGE = "<special3>"
END_OF_IMAGE = "<special4>"
IMAGE = "<special5>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<special1>{{ message.role }}\n"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<special3>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<special2>{% endfor %}"
    "{% if add_generation_prompt %}<special1>assistant\n{% endif %}"
)


def gemma3_processor() -> Gemma3Processor:
    """Return a processor whose special tokens have the ids of the tiny Gemma 3."""
    tokenizer = byte_tokenizer()
    tokens = {"boi_token": START_OF_IMAGE, "eoi_token": END_OF_IMAGE, "image_token": IMAGE}
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
        image_seq_length=TOKENS_PER_IMAGE,
    )
