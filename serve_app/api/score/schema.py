"""Scores on the wire, in vLLM's shape.

Source: https://docs.vllm.ai/en/stable/serving/openai_compatible_server/ (Score API)
"""

from typing import Literal

from pydantic import BaseModel, Field

from serve_app.api.openai.text_schema import CutTextsBody, TextOrTexts, TextUsage


class ScoreBody(CutTextsBody):
    """Texts to compare, one with another, one with several, or in pairs."""

    model: str | None = Field(
        default=None,
        description="Null means the first cross-encoder, or else the first embedding model.",
    )
    text_1: TextOrTexts = Field(description="One text, or as many as text_2 has.")
    text_2: TextOrTexts = Field(description="One text or several; each gets a score.")


class Score(BaseModel):
    """How well a pair of texts fits."""

    index: int
    object: Literal["score"] = "score"
    score: float = Field(
        description="Higher is better. A cross-encoder's score, from 0 to 1 unless its files say "
        "otherwise; an embedding model's cosine, from -1 to 1."
    )


class Scores(BaseModel):
    """The score of each pair."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: TextUsage
