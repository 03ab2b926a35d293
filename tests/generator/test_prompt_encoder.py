import json
import shutil
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from deployments.contract.errors import (
    GenerationFailedError,
    InvalidImageError,
    InvalidRequestError,
    RaystreamError,
)
from deployments.contract.generation import GenerationRequest, TokenizeRequest
from deployments.contract.messages import ChatMessage, ImagePart, TextPart
from deployments.contract.sampling_params import SamplingParams
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.model.loader import load_text_side
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.prompt_encoder import EncodedPrompt, PromptEncoder
from tests.deployments import tiny_folder
from tests.engine.tiny_models import (
    IMAGE_SIZE,
    IMAGE_TOKEN_ID,
    TOKENS_PER_IMAGE,
    byte_tokenizer,
    gemma3,
    generate,
    load,
    make_engine,
)
from tests.failing import failing
from tests.generator.tiny_processor import (
    CHAT_TEMPLATE,
    END_OF_IMAGE,
    IMAGE,
    START_OF_IMAGE,
    gemma3_processor,
)
from tests.images import png

PYDOC_CHAT = Path(__file__).resolve().parents[2] / "models/pydoc-chat"
Prompt = tuple[ChatMessage, ...] | str | tuple[int, ...]
IMAGES_OF_USER = "{% if part.type == 'image' and message.role != 'user' %}{% elif part.type"
ONE_IMAGE = f"\n\n{START_OF_IMAGE}{IMAGE * TOKENS_PER_IMAGE}{END_OF_IMAGE}\n\n"


def picture(
    color: str = "red", size: tuple[int, int] = (9, 7), mode: str = "RGB", kind: str = "PNG"
) -> ImagePart:
    file = BytesIO()
    Image.new("RGB", size, color).convert(mode).save(file, kind)
    return ImagePart(file.getvalue())


def user(*parts: TextPart | ImagePart) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", parts),)


def text_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = tiny_folder.CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def text_encoder() -> PromptEncoder:
    return PromptEncoder(text_tokenizer(), None)


@pytest.fixture(scope="module")
def image_encoder() -> PromptEncoder:
    processor = gemma3_processor()
    return PromptEncoder(processor.tokenizer, processor)


def encode_all(
    encoder: PromptEncoder, prompts: Sequence[Prompt]
) -> list[EncodedPrompt | RaystreamError]:
    requests = [
        GenerationRequest(str(i), prompt, SamplingParams()) for i, prompt in enumerate(prompts)
    ]
    return encoder.encode(requests)


def encode(encoder: PromptEncoder, prompt: Prompt) -> EncodedPrompt:
    (encoded,) = encode_all(encoder, [prompt])
    assert isinstance(encoded, EncodedPrompt)
    return encoded


def refusal(encoder: PromptEncoder, prompt: Prompt) -> RaystreamError:
    (encoded,) = encode_all(encoder, [prompt])
    assert isinstance(encoded, RaystreamError)
    return encoded


def text_of(encoded: EncodedPrompt) -> str:
    text = byte_tokenizer().decode(list(encoded.token_ids))
    assert isinstance(text, str)
    return text


def test_messages_go_through_the_template_of_a_text_model(text_encoder: PromptEncoder) -> None:
    encoded = encode(text_encoder, user(TextPart("Good "), TextPart("day")))
    assert text_of(encoded) == "<special1>user\nGood day<special2><special1>assistant\n"
    assert encoded.model_inputs == {}


def test_plain_text_and_token_ids_bypass_the_template(text_encoder: PromptEncoder) -> None:
    assert text_of(encode(text_encoder, "Good day")) == "Good day"
    assert encode(text_encoder, (60, 61)).token_ids == (60, 61)


def test_an_image_model_also_accepts_only_text(image_encoder: PromptEncoder) -> None:
    encoded = encode(image_encoder, user(TextPart("Good day")))
    assert text_of(encoded) == "<special1>user\nGood day<special2><special1>assistant\n"
    assert encoded.model_inputs == {}


def test_each_image_is_at_the_place_of_its_part(image_encoder: PromptEncoder) -> None:
    encoded = encode(
        image_encoder, user(TextPart("a"), picture("red"), TextPart("b"), picture("blue"))
    )
    assert text_of(encoded) == (
        f"<special1>user\na{ONE_IMAGE}b{ONE_IMAGE}<special2><special1>assistant\n"
    )
    pixels = encoded.model_inputs["pixel_values"]
    assert pixels.shape == (2, 3, IMAGE_SIZE, IMAGE_SIZE)
    red, blue = pixels.mean(dim=(2, 3))
    assert red.argmax() == 0
    assert blue.argmax() == 2
    assert encoded.model_inputs["token_type_ids"].tolist() == [
        [int(i == IMAGE_TOKEN_ID) for i in encoded.token_ids]
    ]


def test_the_digest_tells_apart_what_the_model_would_read(
    text_encoder: PromptEncoder, image_encoder: PromptEncoder
) -> None:
    red, blue = picture("red"), picture("blue")
    prompts: list[Prompt] = [
        user(TextPart("a"), red),
        user(TextPart("a"), blue),
        user(TextPart("a"), red, blue),
        user(TextPart("a"), blue, red),
        user(TextPart("a")),
        user(TextPart("b")),
        (60, 61),
        (61, 60),
    ]
    digests = [encode(image_encoder, prompt).digest for prompt in prompts]
    assert len(set(digests)) == len(prompts)
    assert [encode(image_encoder, prompt).digest for prompt in prompts] == digests
    assert (
        encode(text_encoder, "Good day").digest
        == encode(text_encoder, tuple(encode(text_encoder, "Good day").token_ids)).digest
    )


def test_images_of_every_mode_and_kind_become_rgb(image_encoder: PromptEncoder) -> None:
    parts = [
        picture(mode="L"), picture(mode="P"), picture(mode="RGBA"), picture(kind="GIF"),
        picture(mode="CMYK", kind="JPEG"), picture(kind="WEBP"), picture(size=(1, 1)),
        picture(size=(1, 300)),
    ]  # fmt: skip
    encoded = encode(image_encoder, user(*parts))
    assert encoded.model_inputs["pixel_values"].shape == (8, 3, IMAGE_SIZE, IMAGE_SIZE)


def test_the_model_gets_an_image_as_a_person_sees_it(image_encoder: PromptEncoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    gray = Image.linear_gradient("L").resize((9, 7))
    upright = gray.rotate(-90, expand=True)
    sent = [
        (gray, upright),
        (Image.fromarray(np.asarray(gray).astype(np.uint16) << 8), upright),
        (Image.merge("LA", (Image.new("L", gray.size), gray)), ImageOps.invert(upright)),
    ]
    for image, seen in sent:
        file = BytesIO()
        image.save(file, "PNG", exif=exif)
        found = encode(image_encoder, user(ImagePart(file.getvalue()))).model_inputs
        expected = encode(image_encoder, user(ImagePart(png(seen.convert("RGB"))))).model_inputs
        assert torch.equal(found["pixel_values"], expected["pixel_values"])


def test_the_engine_answers_encoded_prompts_as_generate_does(image_encoder: PromptEncoder) -> None:
    encoded = encode(image_encoder, user(TextPart("What is it?"), picture("green")))
    engine = make_engine(load(gemma3))
    params = SamplingParams(temperature=0, max_tokens=6)
    engine.add(SequenceRequest("s", encoded.token_ids, params, (), encoded.model_inputs))
    token_ids: list[int] = []
    while engine.has_work:
        token_ids += [i for _, delta in engine.step() for i in delta.token_ids]
    assert token_ids == generate(gemma3, encoded.token_ids, 6, encoded.model_inputs)


@pytest.mark.parametrize(
    "data", [b"", b"no image", picture().data[:45]], ids=["empty", "text", "cut off"]
)
def test_a_broken_image_is_refused_without_the_decoder_s_message(
    image_encoder: PromptEncoder, data: bytes
) -> None:
    error = refusal(image_encoder, user(ImagePart(data)))
    assert isinstance(error, InvalidImageError)
    assert str(error) == "an image can't be read; send PNG, JPEG, WebP or GIF"


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "EPS"])
def test_no_other_decoder_is_ever_started(image_encoder: PromptEncoder, kind: str) -> None:
    assert isinstance(refusal(image_encoder, user(picture(kind=kind))), InvalidImageError)


@pytest.mark.parametrize("text", [START_OF_IMAGE, IMAGE, f"{IMAGE} and {START_OF_IMAGE}"])
def test_placeholders_in_the_text_cannot_pass_for_images(
    image_encoder: PromptEncoder, text: str
) -> None:
    error = refusal(image_encoder, user(TextPart(text), picture()))
    assert isinstance(error, InvalidRequestError)
    assert "placeholders" in str(error)


@pytest.mark.parametrize("prompt", ["\ud800", user(TextPart("\udc80"))])
def test_half_a_surrogate_pair_is_refused(text_encoder: PromptEncoder, prompt: Prompt) -> None:
    error = refusal(text_encoder, prompt)
    assert isinstance(error, InvalidRequestError)
    assert "Unicode" in str(error)


def test_a_text_model_refuses_images(text_encoder: PromptEncoder) -> None:
    assert "takes no images" in str(refusal(text_encoder, user(picture())))


def test_a_model_without_a_template_refuses_only_messages() -> None:
    encoder = PromptEncoder(byte_tokenizer(), None)
    assert "no chat template" in str(refusal(encoder, user(TextPart("x"))))
    assert text_of(encode(encoder, "x")) == "x"


def test_turns_that_the_template_refuses_are_put_otherwise(text_encoder: PromptEncoder) -> None:
    encoded = encode(text_encoder, (ChatMessage("assistant", (TextPart("x"),)),))
    assert text_of(encoded).startswith("<special1>user\n<special2><special1>assistant\nx<special2>")


def test_a_template_s_error_is_passed_on() -> None:
    tokenizer = text_tokenizer()
    tokenizer.chat_template = str(tokenizer.chat_template).replace("loop.first", "true")
    error = refusal(PromptEncoder(tokenizer, None), (ChatMessage("assistant", (TextPart("x"),)),))
    assert "chat template rejects the messages: the assistant can not begin" in str(error)


def test_each_error_is_at_its_request_s_place(image_encoder: PromptEncoder) -> None:
    prompts: list[Prompt] = [
        "plain", user(ImagePart(b"broken")), user(TextPart("chat")), "\ud800",
        user(TextPart("look"), picture()), (60, 61), user(TextPart(IMAGE), picture()), "last",
    ]  # fmt: skip
    together = encode_all(image_encoder, prompts)
    assert [isinstance(encoded, RaystreamError) for encoded in together] == [
        False, True, False, True, False, False, True, False,
    ]  # fmt: skip
    for prompt, encoded in zip(prompts, together, strict=True):
        if isinstance(encoded, EncodedPrompt):
            alone = encode(image_encoder, prompt)
            assert encoded.token_ids == alone.token_ids
            assert encoded.model_inputs.keys() == alone.model_inputs.keys()
            for name, tensor in encoded.model_inputs.items():
                assert torch.equal(tensor, alone.model_inputs[name])


def test_a_template_s_failure_fails_only_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = text_tokenizer()
    tokenizer.chat_template = (
        "{{ messages[0].content }}{{ 1 / (messages[0].content | length - 4) }}"
    )
    encoded = encode_all(
        PromptEncoder(tokenizer, None), [user(TextPart("four")), "plain", user(TextPart("five5"))]
    )
    assert isinstance(encoded[0], GenerationFailedError)
    assert all(isinstance(prompt, EncodedPrompt) for prompt in encoded[1:])
    assert "ZeroDivisionError" in caplog.text


def test_a_processor_s_failure_fails_only_its_own_request(
    image_encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(gemma3_processor()), "__call__", failing(IndexError("of a red image")))
    broken, plain = encode_all(image_encoder, [user(picture()), "plain"])
    assert isinstance(broken, GenerationFailedError)
    assert "red" not in broken.message
    assert isinstance(plain, EncodedPrompt)


def test_a_tokenizer_s_failure_fails_only_its_own_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = text_tokenizer()
    stock = type(tokenizer).__call__

    def fail_on_call(
        self: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool
    ) -> object:
        if any("evil" in text for text in texts):
            raise OverflowError(f"can't take {texts}")
        return stock(self, texts, add_special_tokens=add_special_tokens)

    expected = encode_all(PromptEncoder(tokenizer, None), ["plain", user(TextPart("chat"))])
    monkeypatch.setattr(type(tokenizer), "__call__", fail_on_call)
    plain, broken, chat = encode_all(
        PromptEncoder(tokenizer, None), ["plain", "evil", user(TextPart("chat"))]
    )
    assert isinstance(broken, GenerationFailedError)
    assert [plain, chat] == expected
    assert "OverflowError" in caplog.text
    assert "evil" not in broken.message + caplog.text


def test_texts_that_arrive_together_take_one_call_of_the_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, calls = text_tokenizer(), list[int]()
    stock = type(tokenizer).__call__

    def counted(
        self: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool
    ) -> object:
        calls.append(len(texts))
        return stock(self, texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    encode_all(PromptEncoder(tokenizer, None), [user(TextPart(str(i))) for i in range(7)])
    assert calls == [7]
    # Plain prompts get special tokens that templates write themselves, so they need another call.
    encode_all(PromptEncoder(tokenizer, None), ["a", user(TextPart("b")), "c", (60,)])
    assert calls[1:] == [2, 1]


def test_no_requests_give_no_prompts(text_encoder: PromptEncoder) -> None:
    assert text_encoder.encode([]) == []


PROMPTS: list[tuple[ChatMessage, ...] | str] = [
    "", "Good day", user(TextPart("Good day")), user(TextPart("a"), picture(), TextPart("b"))
]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokenize_returns_the_tokens_that_generation_uses(
    image_encoder: PromptEncoder, prompt: tuple[ChatMessage, ...] | str
) -> None:
    told = image_encoder.tokenize(TokenizeRequest(prompt))
    assert told.token_ids == encode(image_encoder, prompt).token_ids
    assert told.strings is None


def test_messages_may_be_tokenized_without_the_start_of_the_answer(
    text_encoder: PromptEncoder,
) -> None:
    messages = user(TextPart("Hi"))
    whole, bare = (
        text_encoder.tokenize(TokenizeRequest(messages, add_generation_prompt=begins)).token_ids
        for begins in (True, False)
    )
    assert text_encoder.detokenize(bare) == "<special1>user\nHi<special2>"
    assert text_encoder.detokenize(whole) == "<special1>user\nHi<special2><special1>assistant\n"


def test_the_strings_of_tokens_are_the_vocabulary_s(text_encoder: PromptEncoder) -> None:
    told = text_encoder.tokenize(TokenizeRequest("a b", with_strings=True))
    assert told.strings == ("a", "Ġ", "b")


@pytest.mark.parametrize(
    ("add_special_tokens", "plain", "chat"),
    [(None, True, False), (True, True, True), (False, False, False)],
)
def test_special_tokens_are_added_as_for_generation_unless_the_request_says(
    add_special_tokens: bool | None, plain: bool, chat: bool
) -> None:
    tokenizer = text_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<special0> $A", special_tokens=[("<special0>", 2)]
    )
    encoder = PromptEncoder(tokenizer, None)
    for prompt, has_bos in (("a", plain), (user(TextPart("a")), chat)):
        told = encoder.tokenize(TokenizeRequest(prompt, add_special_tokens))
        assert (told.token_ids[0] == 2) is has_bos


def test_tokenized_text_is_detokenized_unchanged(text_encoder: PromptEncoder) -> None:
    text = "<special1>one\n\n two ,three . é 日本 🙂<eos>"
    assert text_encoder.detokenize(text_encoder.tokenize(TokenizeRequest(text)).token_ids) == text
    assert text_encoder.detokenize(()) == ""


@pytest.mark.parametrize("token_id", [-1, 300, 2**40])
def test_an_unknown_token_has_no_text(text_encoder: PromptEncoder, token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match="from 0 to 299") as caught:
        text_encoder.detokenize((60, token_id))
    assert caught.value.param == "tokens"


@pytest.mark.parametrize(
    "prompt", ["\ud800", user(ImagePart(b"no image")), user(TextPart(IMAGE), picture())]
)
def test_a_prompt_that_can_not_be_encoded_has_no_tokens(
    image_encoder: PromptEncoder, prompt: tuple[ChatMessage, ...] | str
) -> None:
    with pytest.raises(InvalidRequestError):
        image_encoder.tokenize(TokenizeRequest(prompt))


def image_encoder_with(template: str | None, of_tokenizer: str | None = None) -> PromptEncoder:
    processor = gemma3_processor()
    processor.chat_template = template
    processor.tokenizer.chat_template = of_tokenizer
    return PromptEncoder(processor.tokenizer, processor)


def test_a_plain_template_of_an_image_model_gets_text_and_places_for_images() -> None:
    encoder = image_encoder_with(tiny_folder.CHAT_TEMPLATE)
    assert encoder.accepts_images
    told = text_of(encode(encoder, user(TextPart("Good "), TextPart("day"))))
    assert told == "<special1>user\nGood day<special2><special1>assistant\n"
    encoded = encode(encoder, user(TextPart("What?"), picture()))
    assert text_of(encoded) == (
        f"<special1>user\n{ONE_IMAGE}\nWhat?<special2><special1>assistant\n"
    )
    assert set(encoded.model_inputs) == {"pixel_values", "token_type_ids"}
    forged = refusal(encoder, user(TextPart(START_OF_IMAGE), picture()))
    assert "placeholders of its own" in str(forged)


def test_a_text_template_that_reads_parts_gets_them() -> None:
    tokenizer = text_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    told = text_of(encode(PromptEncoder(tokenizer, None), user(TextPart("Good day"))))
    assert told == "<special1>user\nGood day<special2><special1>assistant\n"


def test_the_tokenizer_s_template_serves_a_processor_without_one(tmp_path: Path) -> None:
    for file in PYDOC_CHAT.iterdir():
        if file.is_file() and file.suffix != ".jinja":
            shutil.copy(file, tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    named = {"chat_template": (PYDOC_CHAT / "chat_template.jinja").read_text()}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | named))
    prompts = []
    for folder in (tmp_path, PYDOC_CHAT):
        tokenizer, processor, _ = load_text_side(str(folder), revision=None)
        encoded = encode(PromptEncoder(tokenizer, processor), user(picture(), TextPart("What?")))
        prompts.append(encoded.token_ids)
    assert prompts[0] == prompts[1]


def test_images_are_refused_where_no_template_can_place_them() -> None:
    processor = gemma3_processor()
    for side in (processor, processor.tokenizer):
        side.image_token = None
    processor.chat_template = tiny_folder.CHAT_TEMPLATE
    encoder = PromptEncoder(processor.tokenizer, processor)
    assert not encoder.accepts_images
    assert "takes no images" in str(refusal(encoder, user(picture())))
    assert text_of(encode(encoder, user(TextPart("Good day")))).startswith("<special1>user\nGood")


def test_an_image_that_a_role_has_no_place_for_gets_one_before_its_text() -> None:
    encoder = image_encoder_with(CHAT_TEMPLATE.replace("{% if part.type", IMAGES_OF_USER))
    messages = (ChatMessage("system", (picture(), TextPart("Be brief."))), *user(TextPart("?")))
    told = text_of(encode(encoder, messages))
    assert told.startswith(f"<special1>system\n{ONE_IMAGE}\nBe brief.<special2>")


def test_an_image_that_the_template_leaves_out_is_not_called_the_client_s_text() -> None:
    processor = gemma3_processor()
    processor.image_token = None  # so that only the template can write a placeholder
    written = CHAT_TEMPLATE.replace("{% if part.type", IMAGES_OF_USER)
    processor.chat_template = written.replace(START_OF_IMAGE, IMAGE)
    encoder = PromptEncoder(processor.tokenizer, processor)
    assert encoder.accepts_images
    messages = (ChatMessage("system", (picture(), TextPart("Be brief."))), *user(TextPart("?")))
    assert "leaves out an image" in str(refusal(encoder, messages))


@pytest.mark.parametrize("token", ["<special1>", "<special2>"])
def test_a_template_that_writes_tokens_without_an_embedding_is_refused(token: str) -> None:
    tokenizer = text_tokenizer()
    vocab_size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})
    PromptEncoder(tokenizer, None, vocab_size=vocab_size)
    tokenizer.chat_template = tiny_folder.CHAT_TEMPLATE.replace(token, "<new>")
    with pytest.raises(UnsupportedModelError, match=f"'<new>' with id {vocab_size} among them"):
        PromptEncoder(tokenizer, None, vocab_size=vocab_size)


def test_image_placeholders_without_an_embedding_are_refused() -> None:
    processor = gemma3_processor()
    with pytest.raises(UnsupportedModelError, match="no embedding"):
        PromptEncoder(processor.tokenizer, processor, vocab_size=IMAGE_TOKEN_ID)
