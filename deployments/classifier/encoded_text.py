"""The texts of requests as the device's lanes handle them, and the answers that come together.

A request's texts may run in several micro-batches, on several threads at once; its answer is given
once, when the last of them is done or the first has failed.
"""

import threading
from dataclasses import dataclass

from deployments.classifier.waiting_line import Job, Probabilities, TokenIds


class Answer:
    """The answer to one job, until it is complete; any thread may add to it."""

    def __init__(self, job: Job) -> None:
        """Begin with nothing found."""
        self._job = job
        self._found: dict[int, Probabilities] = {}
        self._lock = threading.Lock()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for it."""
        return not self._job.has_left and not self._job.answer.done()

    def note(self, index: int, outcome: Probabilities | Exception) -> None:
        """Add what became of one text; the first that failed ends the job."""
        with self._lock:
            if self._job.answer.done():
                return
            if isinstance(outcome, Exception):
                self._job.answer.set_exception(outcome)
                return
            self._found[index] = outcome
            if len(self._found) == len(self._job.sequences):
                self._job.answer.set_result([self._found[i] for i in range(len(self._found))])


@dataclass(frozen=True, slots=True)
class Piece:
    """One text of a job.

    Attributes:
        index: Which of the job's texts it is.
        token_ids: The text.
        answer: Where what becomes of it is noted.
    """

    index: int
    token_ids: TokenIds
    answer: Answer

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.token_ids)


def pieces_of(job: Job) -> list[Piece]:
    """Return a job's texts; they share its answer."""
    answer = Answer(job)
    return [Piece(index, token_ids, answer) for index, token_ids in enumerate(job.sequences)]
