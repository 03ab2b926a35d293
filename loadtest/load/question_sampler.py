"""Chooses each request's question, user and image, from a seed.

Choices follow the order of sending, so two runs with the same seed ask the same questions,
whichever queue is faster. Each level continues where the previous one ended: if levels repeated
their questions, the server's prefix cache would already hold them.
"""

import random
from collections.abc import Iterator, Sequence

from loadtest.client.contract import Call
from loadtest.config.choices import Order
from loadtest.load.questions import Question


class QuestionSampler:
    """Makes the calls of a run.

    Attributes:
        rng: The random generator of the whole run.
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
        """Prepare to sample from these questions, users and images.

        Args:
            questions: At least one.
            order: The order in which questions are asked.
            seed: The seed of all random choices.
            num_users: The number of user names; with 0, calls name no user.
            image_urls: If not empty, one of them is sent with each question.
            nonce: Makes this run's questions differ from those of all other runs, for `--unique`.
        """
        self.rng = random.Random(seed)
        self._questions = questions
        self._num_users = num_users
        self._image_urls = image_urls
        self._nonce = nonce
        self._indices = self._drawn(order)

    def next_call(self, level: int, index: int) -> tuple[int, Call]:
        """Return the next question's index, and the call of a level's request."""
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
    """Return a question whose text, or whole conversation, begins with a prefix."""
    if question.messages is None:
        return Question(prefix + question.text)
    first, *others = question.messages
    messages = ({**first, "content": f"{prefix}{first.get('content', '')}"}, *others)
    return Question(str(messages[-1]["content"]), messages)
