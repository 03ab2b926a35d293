import base64
from collections.abc import Callable, Mapping
from io import BytesIO
from itertools import product

import pytest
from PIL import Image

from deployments.contract.errors import InvalidImageError
from deployments.contract.messages import IMAGE_FORMATS
from serve_app.config import LimitsConfig
from serve_app.images.images import check_image, media_type_of, read_image
from tests.offenders import every, for_each

LIMITS = LimitsConfig(max_image_pixels=12, max_image_bytes=2000)


def encoded(image_format: str, size: tuple[int, int] = (4, 3)) -> bytes:
    file = BytesIO()
    Image.new("RGB", size).save(file, image_format)
    return file.getvalue()


def uri(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_an_image_is_passed_on_unchanged(image_format: str) -> None:
    data = encoded(image_format)
    assert read_image(uri(data, f"image/{image_format.lower()}"), LIMITS, "p").data == data


LABELS = (
    "image/png", "image/jpeg", "image/jpg", "IMAGE/GIF", "image/bmp", "image/*", "", "text/plain",
    "application/octet-stream", "image/png;charset=utf-8", f"image/png;name={'x' * 200}.png",
)  # fmt: skip


@for_each(*product(IMAGE_FORMATS, LABELS))
def test_the_bytes_decide_what_an_image_is_not_its_label(image_format: str, label: str) -> None:
    data = encoded(image_format)
    assert read_image(uri(data, label), LIMITS, "p").data == data


def in_lines(text: str, num_characters: int = 76, end: str = "\r\n") -> str:
    return end.join(text[at : at + num_characters] for at in range(0, len(text), num_characters))


WAYS: Mapping[str, Callable[[str], str]] = {
    "MIME's lines": lambda text: in_lines(text) + "\r\n",
    "PEM's lines": lambda text: in_lines(text, 64, "\n"),
    "indented": lambda text: in_lines(text, 19, "\n\t  "),
    "a space in front": lambda text: f" {text}",
    "without padding": lambda text: text.rstrip("="),
    "lines without padding": lambda text: in_lines(text.rstrip("=")),
    "for URLs": lambda text: text.replace("+", "-").replace("/", "_"),
    "for URLs without padding": lambda text: text.replace("+", "-").replace("/", "_").rstrip("="),
}


def test_base64_is_read_as_encoders_write_it() -> None:
    for case in every(product(WAYS.items(), range(3))):
        with case as ((_way, write), num_more):
            data = encoded("PNG") + bytes(range(200, 256)) + b"\xff" * num_more
            text = write(base64.b64encode(data).decode())
            read = read_image(f"data:image/png;base64,{text}", LIMITS, "p")
            assert read.data == data


@pytest.mark.parametrize("write", WAYS.values(), ids=WAYS)
def test_only_the_bytes_count_towards_their_limit(write: Callable[[str], str]) -> None:
    data = encoded("PNG").ljust(2000, b"\xff")
    text = write(base64.b64encode(data).decode())
    assert read_image(f"data:;base64,{text}", LIMITS, "p").data == data
    text = write(base64.b64encode(data + b"\xff").decode())
    with pytest.raises(InvalidImageError, match=r"limits\.max_image_bytes"):
        read_image(f"data:;base64,{text}", LIMITS, "p")


def test_a_type_is_known_by_the_first_bytes() -> None:
    for image_format in IMAGE_FORMATS:
        text = base64.b64encode(encoded(image_format)).decode()
        assert media_type_of(text) == f"image/{image_format.lower()}"
        assert media_type_of(in_lines(text, 3)) == f"image/{image_format.lower()}"
    for other in ("", "iVBO", "é", "@@@@", base64.b64encode(encoded("BMP")).decode()):
        assert media_type_of(other) is None


@for_each(
    "",
    "https://example.com/a.png",
    "file:///etc/passwd",
    "data:,hello",
    "data:image/png,abc",
    "data:image/svg+xml;base64,AAAA",
    "data:image/png;base64,",
    "data:image/png;base64,@@@@",
    "data:image/png;base64,AAA",
    "data:image/png;base64,AAAA",
    "data:image/png;base64,\u00e9",
    "data:image/png;base64,AAAAA",
    "data:image/png;base64,AA=A",
    "data:image/png;base64",
    "data:" + "x" * 2000 + ";base64,AAAA",
    uri(encoded("BMP"), "image/png"),
    uri(encoded("PNG")[:20], "image/png"),
    uri(encoded("PNG", (4, 4)), "image/png"),
)
def test_any_other_uri_is_refused_with_its_param_and_without_an_echo(broken: str) -> None:
    with pytest.raises(InvalidImageError) as caught:
        read_image(broken, LIMITS, "messages[0]")
    assert caught.value.param == "messages[0]"
    assert "object at 0x" not in str(caught.value)
    assert "passwd" not in str(caught.value)


def test_a_header_with_giant_dimensions_is_refused_undecoded() -> None:
    data = bytearray(encoded("PNG"))
    data[16:24] = (2**31 - 1).to_bytes(4) * 2
    with pytest.raises(InvalidImageError):
        read_image(uri(bytes(data), "image/png"), LIMITS, "p")


def test_too_many_bytes_are_refused_before_they_are_decoded() -> None:
    text = "data:image/png;base64," + "!" * 4000
    with pytest.raises(InvalidImageError, match=r"limits\.max_image_bytes"):
        read_image(text, LIMITS, "p")


def test_exactly_the_allowed_number_of_bytes_is_read() -> None:
    data = encoded("PNG")
    data += b"\0" * (2000 - len(data))
    assert len(read_image(uri(data, "image/png"), LIMITS, "p").data) == 2000
    with pytest.raises(InvalidImageError, match=r"limits\.max_image_bytes"):
        read_image(uri(data + b"\0", "image/png"), LIMITS, "p")


def test_too_many_pixels_are_refused_by_the_limits_name() -> None:
    with pytest.raises(InvalidImageError, match=r"limits\.max_image_pixels"):
        read_image(uri(encoded("PNG", (4, 4)), "image/png"), LIMITS, "p")


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_format_of_a_fetched_image_is_found_from_its_bytes(image_format: str) -> None:
    data = encoded(image_format)
    assert check_image(data, LIMITS, "p").data == data


@for_each(b"", b"<svg/>", encoded("BMP"), encoded("TIFF"), encoded("PNG", (9, 9)))
def test_a_fetched_file_of_another_format_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidImageError) as caught:
        check_image(data, LIMITS, "p")
    assert "object at 0x" not in str(caught.value)
