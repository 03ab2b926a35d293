"""Classification on the wire: our own surface, in OpenAI's style, and vLLM's.

Source: https://docs.vllm.ai/en/stable/serving/openai_compatible_server/ (Classification API)
"""

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.body.priority import Priority
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.openai.text_schema import TextOrTexts, TruncatePromptTokens
from serve_app.api.openai.usage import Usage

DEFAULT_MAX_CHARS = 300


class TextsBody(StrictBody):
    """Texts, and the model that classifies them."""

    model: str | None = Field(default=None, description="Null means the first classifier.")
    input: TextOrTexts = Field(description="One text or several; an empty text is refused.")
    priority: Priority = None
    user: str | None = Field(default=None, description="Accepted, but neither kept nor read.")

    @property
    def texts(self) -> list[str]:
        """The texts as a list, also where the input is a single text."""
        return [self.input] if isinstance(self.input, str) else self.input


class SplitOptions(StrictBody):
    """How texts are cut into pieces, and how the scores of the pieces are aggregated."""

    max_chars: int | None = Field(
        default=None,
        ge=1,
        description="Most characters of a piece, counted in Unicode code points; null means "
        f"{DEFAULT_MAX_CHARS}. A single longer grapheme is a piece of its own.",
    )
    overlap: int | None = Field(
        default=None,
        ge=0,
        description="Most characters that a piece repeats from the end of the piece before: whole "
        "words if there are any. Less than max_chars; null means 0.",
    )
    aggregate: Literal["mean", "max"] | None = Field(
        default=None,
        description="How the scores of the whole text are made. mean: the mean of the pieces, "
        "weighted by their length. max: the highest score of each label; these need not add up "
        "to one. Pieces of only white space do not count. Null means mean.",
    )

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        if self.num_repeated >= self.num_chars:
            raise PydanticCustomError(
                "invalid_combination",
                "overlap ({overlap}) must be less than max_chars ({max_chars}): otherwise a piece "
                "would hold no new text.",
                {"field": "overlap", "overlap": self.num_repeated, "max_chars": self.num_chars},
            )
        return self

    @property
    def num_chars(self) -> int:
        """Most code points of a piece."""
        return DEFAULT_MAX_CHARS if self.max_chars is None else self.max_chars

    @property
    def num_repeated(self) -> int:
        """Most code points that a piece repeats from the one before."""
        return self.overlap or 0


class ClassifyBody(TextsBody):
    """Texts to classify, whole or in pieces."""

    split: SplitOptions | None = Field(
        default=None,
        description="Classify each text in pieces, cut after sentences or words. {} takes the "
        "defaults.",
    )
    truncate: bool | None = Field(
        default=None,
        description="Drop the end of a text or piece that has more tokens than the model reads. "
        "Without it, such a text is refused.",
    )
    top_k: int | None = Field(
        default=None, ge=1, description="Return this many of the best labels; null means all."
    )


class VllmClassifyBody(TextsBody):
    """Texts to classify, in vLLM's shape."""

    truncate_prompt_tokens: TruncatePromptTokens = None
    request_id: str | None = Field(
        default=None, description="Accepted, but not read: send X-Request-Id instead."
    )


class LabelScore(BaseModel):
    """A label and its score."""

    label: str
    score: float


class Scored(BaseModel):
    """The scores of a text or of a piece."""

    label: str = Field(description="The label with the best score.")
    scores: list[LabelScore] = Field(description="In descending order.")
    truncated: bool = Field(description="Whether the end was dropped before the model read it.")


class ClassifiedPiece(Scored):
    """The scores of a piece of a text."""

    start: int = Field(description="Unicode code points of the text before the piece.")
    end: int = Field(description="Unicode code points of the text up to the piece's end.")


class ClassifiedText(Scored):
    """The scores of a text."""

    object: Literal["classification"] = "classification"
    index: int = Field(description="The text's place in the input, from 0.")
    pieces: list[ClassifiedPiece] | None = Field(
        default=None, description="With split: the text's pieces, in order."
    )


class Classifications(BaseModel):
    """The scores of each text."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifiedText]
    usage: Usage


class VllmClassification(BaseModel):
    """The scores of a text, in vLLM's shape."""

    index: int
    label: str
    probs: list[float] = Field(description="In the order of the model's labels.")
    num_classes: int


class VllmClassifications(BaseModel):
    """The scores of each text, in vLLM's shape."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[VllmClassification]
    usage: Usage
