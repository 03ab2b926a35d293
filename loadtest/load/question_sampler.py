"""What each request asks: questions, users and images, drawn by a seed.

Draws are by the order of sending, so that two runs with one seed ask the same, whichever queue was
faster. Levels go on drawing where the one before has ended: a level that asked what its predecessor
has asked would find the server's prefix cache filled.
"""

import random
from collections.abc import Iterator, Sequence
from enum import StrEnum

from loadtest.apis.contract import Call
from loadtest.questions import Question


class Order(StrEnum):
    """In which order the questions come."""

    RANDOM = "random"
    SHUFFLED = "shuffled"
    """Each once, in random order, then all of them again in another one."""
    SEQUENTIAL = "sequential"


class Asker:
    """Makes calls.

    Attributes:
        rng: The run's one source of chance.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        *,
        order: Order = Order.RANDOM,
        seed: int = 0,
        num_users: int = 0,
        image_urls: Sequence[str] = (),
        nonce: str | None = None,
    ) -> None:
        """Keep what is drawn from.

        Args:
            questions: At least one.
            order: How they follow each other.
            seed: Gives the same draws again.
            num_users: How many users there are; with 0 nobody says who asks.
            image_urls: One of them goes along with each question, if there are any.
            nonce: What sets this run's questions apart from all others', for `--unique`.
        """
        self.rng = random.Random(seed)
        self._questions = questions
        self._num_users = num_users
        self._image_urls = image_urls
        self._nonce = nonce
        self._indices = self._drawn(order)

    def next_call(self, level: int, index: int) -> tuple[int, Call]:
        """Return the next question's index, and what is asked by a level's request."""
        question_index = next(self._indices)
        question = self._questions[question_index]
        if self._nonce is not None:
            question = begun_with(f"({self._nonce}-{level}-{index}) ", question)
        return question_index, Call(
            text=question.text,
            messages=question.messages,
            image_url=self.rng.choice(self._image_urls) if self._image_urls else None,
            user=f"user-{self.rng.randrange(self._num_users)}" if self._num_users else "",
            index=index,
        )

    def _drawn(self, order: Order) -> Iterator[int]:
        indices = list(range(len(self._questions)))
        while True:
            match order:
                case Order.RANDOM:
                    yield self.rng.randrange(len(indices))
                case Order.SHUFFLED:
                    self.rng.shuffle(indices)
                    yield from indices
                case Order.SEQUENTIAL:
                    yield from indices


def begun_with(prefix: str, question: Question) -> Question:
    """Return a question, or its whole conversation, that begins with a text of its own."""
    if question.messages is None:
        return Question(prefix + question.text)
    first, *others = question.messages
    messages = ({**first, "content": f"{prefix}{first.get('content', '')}"}, *others)
    return Question(str(messages[-1]["content"]), messages)
