"""Classification on the wire: our own surface, in OpenAI's manner, and vLLM's.

Source: https://docs.vllm.ai/en/stable/serving/openai_compatible_server/ (Classification API)
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.strict_body import StrictBody
from serve_app.api.usage import Usage
from serve_app.config import MAX_NUM_TEXTS

DEFAULT_MAX_CHARS = 300

Text = Annotated[str, Field(min_length=1)]
NumTokens = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _kind(texts: Any) -> str | None:
    """Return how the input is written, so that an error tells of that alone."""
    return "text" if isinstance(texts, str) else "texts" if isinstance(texts, list) else None


Texts = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[
        list[Text], Tag("texts"), Field(min_length=1, max_length=MAX_NUM_TEXTS, fail_fast=True)
    ],
    Discriminator(
        _kind,
        custom_error_type="input",
        custom_error_message="Send a text or a list of texts.",
    ),
]


class TextsBody(StrictBody):
    """Texts, and the model that classifies them."""

    model: str | None = Field(
        default=None, description="Null means the first model that classifies."
    )
    input: Texts = Field(description="A text, or several. None may be empty.")
    user: str | None = Field(default=None, description="Accepted; neither kept nor read.")

    @property
    def texts(self) -> list[str]:
        """The texts, also if it is one alone."""
        return [self.input] if isinstance(self.input, str) else self.input


class SplitOptions(StrictBody):
    """How texts are cut into pieces, and what the pieces say of the whole."""

    max_chars: int | None = Field(
        default=None,
        ge=1,
        description="Most characters of a piece, as Unicode code points; null means "
        f"{DEFAULT_MAX_CHARS}. A single grapheme that is longer is a piece of its own.",
    )
    overlap: int | None = Field(
        default=None,
        ge=0,
        description="Most characters at the end of a piece that the next one repeats, whole words "
        "if there are any. Less than max_chars; null means 0.",
    )
    aggregate: Literal["mean", "max"] | None = Field(
        default=None,
        description="The whole text's scores: the pieces' mean, weighted by their length; or of "
        "each label the highest, which need not add up to one. Pieces of white space do not "
        "count. Null means mean.",
    )

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        if self.num_repeated >= self.num_chars:
            raise PydanticCustomError(
                "invalid_combination",
                "overlap ({overlap}) must be less than max_chars ({max_chars}), or no piece would "
                "bring anything new.",
                {"field": "overlap", "overlap": self.num_repeated, "max_chars": self.num_chars},
            )
        return self

    @property
    def num_chars(self) -> int:
        """Most code points of a piece."""
        return DEFAULT_MAX_CHARS if self.max_chars is None else self.max_chars

    @property
    def num_repeated(self) -> int:
        """Most code points that a piece repeats."""
        return self.overlap or 0


class ClassifyBody(TextsBody):
    """Texts to classify, whole or in pieces."""

    split: SplitOptions | None = Field(
        default=None,
        description="Classify each text in pieces, cut behind sentences and words; {} is enough.",
    )
    truncate: bool | None = Field(
        default=None,
        description="Drop the end of a text, or of a piece, that has more tokens than the model "
        "reads. Otherwise it is refused.",
    )
    top_k: int | None = Field(
        default=None, ge=1, description="Tell so many of the best labels; null tells all."
    )


class VllmClassifyBody(TextsBody):
    """Texts to classify, in vLLM's shape."""

    truncate_prompt_tokens: Literal[-1] | NumTokens | None = Field(
        default=None,
        description="The tokens of a text that the model reads, special ones included; its end is "
        "dropped. -1: as many as the model reads at all; null refuses what is longer than that.",
    )
    request_id: str | None = Field(
        default=None, description="Accepted, but not read: send X-Request-Id."
    )

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "activation": (True,),
        "add_special_tokens": (True,),
        "cache_salt": (),
        "messages": (),
        "mm_processor_kwargs": ({},),
        "priority": (0,),
        "softmax": (True,),
        "truncation_side": ("right",),
        "use_activation": (True,),
    }


class LabelScore(BaseModel):
    """How likely a label is."""

    label: str
    score: float


class Scored(BaseModel):
    """What the model says of a text or a piece."""

    label: str = Field(description="The best.")
    scores: list[LabelScore] = Field(description="The best first.")
    truncated: bool = Field(description="Whether the model did not read the end.")


class ClassifiedPiece(Scored):
    """A piece of a text."""

    start: int = Field(description="Unicode code points of the text before the piece.")
    end: int = Field(description="Unicode code points of the text up to the piece's end.")


class ClassifiedText(Scored):
    """A text."""

    object: Literal["classification"] = "classification"
    index: int = Field(description="Its place in the input.")
    pieces: list[ClassifiedPiece] | None = Field(
        default=None, description="With split: from the text's beginning to its end."
    )


class Classifications(BaseModel):
    """What the model says of each text."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifiedText]
    usage: Usage


class VllmClassification(BaseModel):
    """A text, in vLLM's shape."""

    index: int
    label: str
    probs: list[float] = Field(description="In the order of the model's labels.")
    num_classes: int


class VllmClassifications(BaseModel):
    """What the model says of each text, in vLLM's shape."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[VllmClassification]
    usage: Usage
