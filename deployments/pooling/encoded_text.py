"""The texts of requests, as the device's lanes process them, and the answers to the requests.

A request's texts may run in several micro-batches, on several threads at once. It is answered once:
when all its texts are done, or as soon as one fails.
"""

import threading
from dataclasses import dataclass

from deployments.pooling.request_queue import Job, Row, TokenIds


class Answer:
    """Collects the answer to one job; any thread may add to it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._found: dict[int, Row] = {}
        self._lock = threading.Lock()

    @property
    def is_wanted(self) -> bool:
        """Whether the client still waits for the answer."""
        return not self._job.has_left and not self._job.answer.done()

    def note(self, index: int, outcome: Row | Exception) -> None:
        """Add the result of one text; the first failure ends the job."""
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
class EncodedText:
    """One text of a job.

    Attributes:
        index: The text's index among the job's texts.
        token_ids: The text, encoded.
        answer: Collects the results of the job's texts.
        type_ids: Which of a pair's texts each token belongs to; None: all to the first.
    """

    index: int
    token_ids: TokenIds
    answer: Answer
    type_ids: TokenIds | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens to compute."""
        return len(self.token_ids)


def texts_of(job: Job) -> list[EncodedText]:
    """Return a job's texts; they share its answer."""
    answer = Answer(job)
    type_ids = job.type_ids or (None,) * len(job.sequences)
    return [
        EncodedText(index, token_ids, answer, types)
        for index, (token_ids, types) in enumerate(zip(job.sequences, type_ids, strict=True))
    ]
