"""The questions that the clients ask."""

from typing import Any

from models.training.corpus import load_corpus

MODEL = "pydoc-chat"
DETECTOR = "pydoc-detector"
SEARCH = "pydoc-search"
LONG = "long"
"""A model that takes the long prompts of agents; its answers to them make no sense."""
NARROW = "narrow"
"""The same model with room for one running request, so that it is easily full."""
SCRIPTED = "scripted"
"""A model that calls `TOOL` of its own accord, and says `LAST_WORDS` behind the tool's result."""

TOOL = "look_up"
ARGUMENTS = '{"name": "os.path.join"}'
FIRST_WORDS = ("Let me look ", "that up.")
LAST_WORDS = ("It joins ", "paths.")

MAX_TOKENS = 2000
"""Tokens of an endless answer, and at least as many steps of the engine."""

ANSWERS = {entry.name: entry.answer for entry in load_corpus()}
NAME = "os.path.join"


def about(name: str, **options: Any) -> dict[str, Any]:
    """Return a question whose answer the model has memorized."""
    messages = [{"role": "user", "content": f"What does {name} do?"}]
    return {"model": MODEL, "messages": messages, "temperature": 0, **options}


def endless(model: str) -> dict[str, Any]:
    """Return a question whose answer nearly fills the model's length."""
    return about(NAME, model=model, max_tokens=MAX_TOKENS, extra_body={"ignore_eos": True})
