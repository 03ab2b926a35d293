import json

import pytest

from deployments.contract.messages import ImagePart, TextPart
from deployments.generator.message_content import (
    FIRST,
    SECOND,
    TEXTS,
    Content,
    ContentForm,
    shows_texts,
)

IMAGE = ImagePart(b"image")


@pytest.mark.parametrize(
    ("form", "content"),
    [
        (ContentForm.TEXT, "<i>\n<i>\nWhat is it?"),
        (ContentForm.ONE_PART, [{"type": "text", "text": "<i>\n<i>\nWhat is it?"}]),
        (
            ContentForm.PARTS,
            [
                {"type": "text", "text": "What"},
                {"type": "image"},
                {"type": "text", "text": " is it?"},
                {"type": "image"},
            ],
        ),
    ],
)
def test_a_content_is_written_in_each_form(form: ContentForm, content: Content) -> None:
    assert form.write((TextPart("What"), IMAGE, TextPart(" is it?"), IMAGE), "<i>") == content


def test_a_content_without_text_is_empty_in_each_form() -> None:
    assert [form.write((), None) for form in ContentForm] == ["", [], []]


def test_a_part_that_was_written_out_does_not_show_its_text() -> None:
    parts = ContentForm.PARTS.write(TEXTS, None)
    assert shows_texts(f"<user>{FIRST.upper()} {SECOND}")
    assert shows_texts(json.dumps({"text": FIRST + SECOND, "type": "object"}))
    assert not shows_texts(f"<user>{FIRST}")
    example = 'Answer as {"type": "text", "text": "..."}.'
    assert shows_texts(f"<system>{example}<user>{FIRST} {SECOND}")
    for written in (str(parts), json.dumps(parts), json.dumps(json.dumps(parts)), str(parts[0])):
        assert not shows_texts(f"<user>{written} {FIRST} {SECOND}")
