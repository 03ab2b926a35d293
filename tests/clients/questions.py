"""What the clients ask."""

from typing import Any

from models.training.corpus import load_corpus

MODEL = "pydoc-chat"
DETECTOR = "pydoc-detector"
NARROW = "narrow"
"""The same model with room for one request that runs, so that it is soon full."""

ANSWERS = {entry.name: entry.answer for entry in load_corpus()}
NAME = "os.path.join"


def about(name: str, **options: Any) -> dict[str, Any]:
    """Return a question that the model answers by heart."""
    messages = [{"role": "user", "content": f"What does {name} do?"}]
    return {"model": MODEL, "messages": messages, "temperature": 0, **options}


def endless(model: str) -> dict[str, Any]:
    """Return a question whose answer goes on nearly to the model's last position."""
    return about(NAME, model=model, max_tokens=2000, extra_body={"ignore_eos": True})
