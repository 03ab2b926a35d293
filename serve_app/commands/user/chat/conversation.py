"""A conversation: its messages, and the settings of its next question."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, str]


@dataclass
class Conversation:
    """What the model is asked with.

    Attributes:
        model: The model's id.
        sampling: Fields of the request that change how tokens are chosen; those that are None are
            left to the server.
        system: The system prompt; None or empty for none.
        messages: Questions and answers by turns.
    """

    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def ask(self, question: str) -> None:
        """Add a question."""
        self.messages.append({"role": "user", "content": question})

    def answered(self, answer: str) -> None:
        """Add the answer to the last question; without one, forget the question."""
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()

    def body(self) -> dict[str, Any]:
        """Return the request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        given = {name: value for name, value in self.sampling.items() if value is not None}
        return {"model": self.model, "messages": [*system, *self.messages], **given}

    def save(self, file: Path) -> None:
        """Write the conversation as a request's body into a new file.

        Raises:
            OSError: It can't be written, or exists.
        """
        with file.open("x", encoding="utf-8") as new:
            json.dump(self.body(), new, ensure_ascii=False, indent=2)
            new.write("\n")
