"""Scores on the wire, in vLLM's shape.

Source: https://docs.vllm.ai/en/stable/serving/openai_compatible_server/ (Score API)
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

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

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "activation": (True,),
        "data_1": (),
        "data_2": (),
        "documents": (),
        "instruction": (),
        "items": (),
        "mm_processor_kwargs": ({},),
        "priority": (0,),
        "queries": (),
        "softmax": (True,),
        "truncation_side": ("right",),
        "use_activation": (True,),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        "activation": "the model's own files name the function",
        "data_1": "send text_1",
        "data_2": "send text_2",
        "documents": "send text_2",
        "instruction": "the model reads only the two texts",
        "items": "send text_2",
        "queries": "send text_1",
        "softmax": "each pair is scored by itself",
        "use_activation": "the model's own files name the function",
    }


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
