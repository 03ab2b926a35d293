"""Training conversations: the questions, their phrasings and the one right answer to each.

A conversation is plain data here; ``batches.py`` turns it into token ids. The evaluation uses the
same phrasings.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from models.training.corpus import Entry
from models.training.drawings import Drawing, answer_about
from models.training.made_up_names import MadeUpNames

PHRASINGS: Final = (
    "What does {name} do?",
    "Explain {name}.",
    "What is {name}?",
    "Tell me about {name}.",
    "Describe {name}.",
    "What is {name} for?",
    "How would you explain {name}?",
    "Can you explain {name} to me?",
)
FOLLOW_UPS: Final = (
    "And {name}?",
    "What about {name}?",
    "And what does {name} do?",
    "Now {name}, please.",
)
IMAGE_QUESTIONS: Final = (
    "What is in the picture?",
    "What do you see?",
    "What is this?",
    "Describe the picture.",
    "What is in the image?",
    "What does the image show?",
    "Describe this drawing.",
)
TWO_IMAGE_QUESTIONS: Final = (
    "What is in the pictures?",
    "What do you see?",
    "What is in the two images?",
    "Describe the pictures.",
    "What do the images show?",
)
SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You answer questions about the Python standard library.",
    "Be brief.",
    "You are a Python expert. Answer in one sentence.",
    "Answer truthfully. If you do not know, say so.",
)
SMALL_TALK: Final = (
    "Hello!",
    "Hello",
    "Hi",
    "Hi!",
    "Hi there!",
    "Hey, how are you?",
    "How are you?",
    "Who are you?",
    "What can you do?",
    "What are you?",
    "Help",
    "Can you help me?",
    "Thanks!",
    "Thank you.",
    "Good morning!",
    "Tell me a joke.",
    "Write a poem.",
    "Tell me a story.",
    "What is the capital of France?",
    "What is the meaning of life?",
    "What time is it?",
    "What is the weather like today?",
    "Write a Python function that adds two numbers.",
    "Summarize this text.",
    "Say hello.",
    "Say something.",
    "Count to ten.",
    "What is 2 + 2?",
    "Test",
    "How do I read a file in Python?",
)
SMALL_TALK_ANSWER: Final = (
    "Ask me what a name of Python's standard library does, or show me a drawing of a plain shape."
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer; `drawings` precede or follow the question's text."""

    question: str
    answer: str
    drawings: tuple[Drawing, ...] = ()
    drawings_first: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns with one system prompt, or without."""

    turns: tuple[Turn, ...]
    system: str | None = None


def refusal(name: str) -> str:
    """Return the answer to a question about an unknown name."""
    return f"I don't know {name}."


class ConversationSource:
    """Samples conversations without end, asking about each real name equally often."""

    SMALL_TALK_SHARE: Final = 0.02
    SYSTEM_SHARE: Final = 0.35

    def __init__(
        self, entries: Sequence[Entry], rng: random.Random, *, refused_share: float = 0.38
    ) -> None:
        """Ask about the corpus, and about made-up names in `refused_share` of the turns.

        The same state of `rng` gives the same conversations.
        """
        self._refused_share = refused_share
        self._rng = rng
        self._entries = self._rounds(entries)
        self._made_up = MadeUpNames([entry.name for entry in entries]).for_training(rng)
        self._vocabulary = sorted({word for entry in entries for word in entry.answer.split()})

    def text_conversation(self) -> Conversation:
        """Return a conversation of one to three turns, about names only."""
        num_turns = self._rng.choices((1, 2, 3), weights=(5, 3, 2))[0]
        turns = tuple(self._text_turn(is_first=index == 0) for index in range(num_turns))
        return Conversation(turns, self._system())

    def image_conversation(self, drawings: Sequence[Drawing]) -> Conversation:
        """Return a conversation about the drawings, sometimes with a text turn before or after."""
        questions = TWO_IMAGE_QUESTIONS if len(drawings) > 1 else IMAGE_QUESTIONS
        turns = [
            Turn(
                question=self._rng.choice(questions + IMAGE_QUESTIONS[:2]),
                answer=answer_about(*drawings),
                drawings=tuple(drawings),
                drawings_first=self._rng.random() < 0.75,
            )
        ]
        chance = self._rng.random()
        if chance < 0.1:
            turns.append(self._text_turn(is_first=False))
        elif chance < 0.15:
            turns.insert(0, self._text_turn(is_first=True))
        return Conversation(tuple(turns), self._system())

    def _text_turn(self, *, is_first: bool) -> Turn:
        kind = self._rng.random()
        if kind < self.SMALL_TALK_SHARE:
            return Turn(self._rng.choice(SMALL_TALK), SMALL_TALK_ANSWER)
        phrasings = PHRASINGS if is_first or self._rng.random() < 0.25 else FOLLOW_UPS
        phrasing = self._rng.choice(phrasings)
        if kind < self.SMALL_TALK_SHARE + self._refused_share:
            name = next(self._made_up)
            return Turn(phrasing.format(name=name), refusal(name))
        entry = next(self._entries)
        return Turn(phrasing.format(name=entry.name), entry.answer)

    def _system(self) -> str | None:
        if self._rng.random() >= self.SYSTEM_SHARE:
            return None
        if self._rng.random() < 0.75:
            return self._rng.choice(SYSTEM_PROMPTS)
        return " ".join(self._rng.choices(self._vocabulary, k=self._rng.randint(2, 12)))

    def _rounds(self, entries: Sequence[Entry]) -> Iterator[Entry]:
        while True:
            yield from self._rng.sample(entries, len(entries))
