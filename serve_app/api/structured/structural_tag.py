"""Structural tags on the wire: free text with tags whose content is constrained.

There are two shapes: `structures` with `triggers`, the older one, and `format`, which is built from
smaller formats. Of the smaller formats, those that llguidance can follow are accepted.

Sources: https://docs.vllm.ai/en/latest/features/structured_outputs/,
https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.body.strict_body import StrictBody

MAX_NUM_PARTS = 128
"""Most elements, tags or triggers in one list."""

MAX_NUM_FORMATS = 1_024
"""Most formats and tags in one structural tag. Validating one takes some ten microseconds, during
which all streams wait; a body has room for forty thousand."""

Mark = Annotated[str, Field(min_length=1)]


class ConstString(StrictBody):
    """One text."""

    type: Literal["const_string"]
    value: Mark


class AnyText(StrictBody):
    """Any text: up to the end of the tag around it, or to the end of the answer."""

    type: Literal["any_text"]


class JsonSchemaContent(StrictBody):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any]


class RegexContent(StrictBody):
    """Text that a regular expression matches, as long as possible."""

    type: Literal["regex"]
    pattern: str


class GrammarContent(StrictBody):
    """Text by rules in Lark or GBNF."""

    type: Literal["grammar"]
    grammar: str


class SequenceFormat(StrictBody):
    """One element after the other."""

    type: Literal["sequence"]
    elements: list["TagFormat"] = Field(min_length=1, max_length=MAX_NUM_PARTS)


class OrFormat(StrictBody):
    """Any one of the elements."""

    type: Literal["or"]
    elements: list["TagFormat"] = Field(min_length=1, max_length=MAX_NUM_PARTS)


class Tag(StrictBody):
    """Content between two marks."""

    type: Literal["tag"] = "tag"
    begin: str
    content: "TagFormat"
    end: str


class TriggeredTags(StrictBody):
    """Any text, in which a trigger begins one of the tags.

    With `at_least_one`, the text begins with a tag. With `stop_after_first`, it ends with it.
    """

    type: Literal["triggered_tags"]
    triggers: list[Mark] = Field(min_length=1, max_length=MAX_NUM_PARTS)
    tags: list[Tag] = Field(min_length=1, max_length=MAX_NUM_PARTS)
    at_least_one: bool | None = None
    stop_after_first: bool | None = None

    @model_validator(mode="after")
    def _check_triggers(self) -> Self:
        _check_triggers("tags", self.tags, self.triggers)
        return self


class TagsWithSeparator(StrictBody):
    """Tags with a separator between each two, and no other text."""

    type: Literal["tags_with_separator"]
    tags: list[Tag] = Field(min_length=1, max_length=MAX_NUM_PARTS)
    separator: str
    at_least_one: bool | None = None
    stop_after_first: bool | None = None


TagFormat = Annotated[
    ConstString
    | AnyText
    | JsonSchemaContent
    | RegexContent
    | GrammarContent
    | SequenceFormat
    | OrFormat
    | Tag
    | TriggeredTags
    | TagsWithSeparator,
    Field(discriminator="type"),
]

for _kind in (SequenceFormat, OrFormat, Tag, TriggeredTags, TagsWithSeparator):
    _kind.model_rebuild()


class Structure(StrictBody):
    """A tag of the older shape, with JSON between two marks."""

    begin: Mark
    schema_: dict[str, Any] = Field(alias="schema", description="The schema of the JSON.")
    end: str


def _check_triggers(field: str, tags: "Sequence[Tag | Structure]", triggers: Sequence[str]) -> None:
    for tag in tags:
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise PydanticCustomError(
                "structural_tag",
                "Each tag must begin with a trigger; this one begins with none: {begin}.",
                {"field": field, "begin": repr(tag.begin[:64])},
            )


def _formats_in(given: Any) -> Iterator[Any]:
    """Yield the formats and tags directly within one, as a request gives them."""
    if not isinstance(given, dict):
        return
    for name in ("format", "structures", "elements", "tags", "content"):
        value = given.get(name)
        yield from (each for each in (value if isinstance(value, list) else [value]) if each)


class StructuralTag(StrictBody):
    """Text with tags whose content is constrained: `format`, or `structures` with `triggers`."""

    type: Literal["structural_tag"]
    format: TagFormat | None = None
    structures: list[Structure] | None = Field(default=None, min_length=1, max_length=MAX_NUM_PARTS)
    triggers: list[Mark] | None = Field(default=None, min_length=1, max_length=MAX_NUM_PARTS)

    one_of: ClassVar[tuple[str, ...]] = ("format", "structures")
    needs: ClassVar[Mapping[str, str]] = {"structures": "triggers", "triggers": "structures"}

    @model_validator(mode="before")
    @classmethod
    def _check_num_formats(cls, data: Any) -> Any:
        """Refuse too many formats before any of them is validated."""
        level, num_formats = [data], 0
        while level:
            level = [child for parent in level for child in _formats_in(parent)]
            num_formats += len(level)
            if num_formats > MAX_NUM_FORMATS:
                raise PydanticCustomError(
                    "structural_tag",
                    "The structural tag holds {num} formats and tags or more; at most {max} are "
                    "read.",
                    {"num": num_formats, "max": MAX_NUM_FORMATS},
                )
        return data

    @model_validator(mode="after")
    def _check_triggers(self) -> Self:
        _check_triggers("structures", self.structures or (), self.triggers or ())
        return self

    def to_format(self) -> "TagFormat":
        """Return either shape as the newer one."""
        if self.format is not None:
            return self.format
        tags = [
            Tag(
                begin=structure.begin,
                content=JsonSchemaContent(type="json_schema", json_schema=structure.schema_),
                end=structure.end,
            )
            for structure in self.structures or []
        ]
        return TriggeredTags(type="triggered_tags", triggers=self.triggers or [], tags=tags)
