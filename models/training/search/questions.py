"""The training's questions: sentences about an entry, said otherwise.

A question begins as a sentence of the entry's description, its summary or its name. Words change
into synonyms, words or whole ends get lost, letters are mistyped, the module may be named, and a
phrase such as "how to" may stand in front. Nothing here knows the held-out or the hand-written
questions.
"""

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from models.training.search.documentation import Description
from models.training.search.entries import Entry, as_question

SYNONYMS_PATH: Final = Path(__file__).parent / "synonyms.txt"
PHRASINGS: Final = (
    "how to {}",
    "how can i {} in python",
    "i want to {}",
    "i need something to {}",
    "what is there to {}",
    "is there a way to {}",
    "python {}",
    "{} in python",
)


class Synonyms:
    """Replaces words and phrases by others of their line in ``synonyms.txt``."""

    def __init__(self, path: Path = SYNONYMS_PATH) -> None:
        others: defaultdict[str, list[str]] = defaultdict(list)
        for line in path.read_text(encoding="utf-8").splitlines():
            group = [phrase.strip() for phrase in line.split(",")]
            for phrase in group:
                others[phrase] += [it for it in group if it != phrase]
        self._others = dict(others)
        phrases = "|".join(map(re.escape, sorted(others, key=len, reverse=True)))
        self._phrase = re.compile(rf"(?<![a-z])(?:{phrases})(?![a-z])")

    def replaced(self, text: str, share: float, rng: random.Random) -> str:
        """Return the text in lower case, with about `share` of its known phrases replaced."""

        def other(found: re.Match[str]) -> str:
            return rng.choice(self._others[found[0]]) if rng.random() < share else found[0]

        return self._phrase.sub(other, text.lower())


class QuestionSource:
    """Makes questions about entries without end; the same state of `rng` gives the same ones."""

    OWN_WORDS_SHARE: Final = 0.65
    SUMMARY_SHARE: Final = 0.22
    REPLACED_SHARE: Final = 0.25
    PHRASED_SHARE: Final = 0.4
    PLACED_SHARE: Final = 0.2
    MISTYPED_SHARE: Final = 0.1

    def __init__(self, descriptions: Sequence[Description], rng: random.Random) -> None:
        self._rng = rng
        self._synonyms = Synonyms()
        self._told: defaultdict[str, list[Description]] = defaultdict(list)
        for it in descriptions:
            self._told[it.name].append(it)

    def question(self, entry: Entry) -> str:
        """Return a question that the entry answers."""
        rng = self._rng
        text = self._sentence(entry)
        if text is None:
            text = self._name(entry)
        else:
            text = as_question(text) if rng.random() < 0.5 else text
            if rng.random() < 0.7:
                text = self._synonyms.replaced(text, self.REPLACED_SHARE, rng)
            text = self._shortened(text)
        if rng.random() < self.PLACED_SHARE:
            text = f"{text} {rng.choice(('in', 'with', 'of', ''))} {self._place(entry)}"
        if rng.random() < self.MISTYPED_SHARE:
            text = self._mistyped(text)
        return rng.choice(PHRASINGS).format(text) if rng.random() < self.PHRASED_SHARE else text

    def passage(self, entry: Entry) -> str:
        """Return the entry's text, sometimes only its heading or its summary."""
        part = self._rng.random()
        if part < 0.15:
            return entry.heading
        return entry.summary if part < 0.25 and entry.summary else entry.text

    def _sentence(self, entry: Entry) -> str | None:
        kind = self._rng.random()
        told = self._told.get(entry.name)
        if told and kind < self.OWN_WORDS_SHARE:
            # Later sentences tell less.
            return self._rng.choices(told, weights=[1 / (1 + it.place) for it in told])[0].text
        return entry.summary or None if kind < self.OWN_WORDS_SHARE + self.SUMMARY_SHARE else None

    def _name(self, entry: Entry) -> str:
        parts = entry.name.split(".")
        return " ".join(parts[-self._rng.choice((1, 1, 2)) :]).replace("_", " ")

    def _place(self, entry: Entry) -> str:
        outer = entry.name.split(".")[:-1]
        return self._rng.choice((outer[0], outer[-1])) if outer else "python"

    def _shortened(self, text: str) -> str:
        """Leave out some words, and all but a part of a long text."""
        words = text.split()
        if len(words) > 4 and self._rng.random() < 0.5:
            words = [word for word in words if self._rng.random() > 0.15] or words
        if len(words) > 12 and self._rng.random() < 0.4:
            length = self._rng.randint(5, 12)
            start = self._rng.randint(0, len(words) - length)
            words = words[start : start + length]
        return " ".join(words)

    def _mistyped(self, text: str) -> str:
        """Swap two neighbouring letters, or lose one."""
        at = self._rng.randrange(max(1, len(text) - 2))
        swapped = text[at : at + 2][::-1] if self._rng.random() < 0.5 else text[at : at + 1]
        return text[:at] + swapped + text[at + 2 :]


class EntryBatches:
    """Yields batches of entries; in some rounds neighbours in a batch are of the same module.

    Entries of one module are each other's hardest wrong answers.
    """

    BLOCK: Final = 16
    BLOCKED_SHARE: Final = 0.5

    def __init__(self, entries: Sequence[Entry], size: int, rng: random.Random) -> None:
        self._entries, self._size, self._rng = entries, size, rng
        self._modules: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            self._modules[entry.name.partition(".")[0]].append(entry)

    def __iter__(self) -> Iterator[list[Entry]]:
        """Yield batches without end."""
        while True:
            is_blocked = self._rng.random() < self.BLOCKED_SHARE
            order = self._in_blocks() if is_blocked else self._shuffled(self._entries)
            for at in range(0, len(order) - self._size + 1, self._size):
                yield order[at : at + self._size]

    def _in_blocks(self) -> list[Entry]:
        blocks: list[list[Entry]] = []
        for module in self._modules.values():
            entries = self._shuffled(module)
            blocks += [entries[at : at + self.BLOCK] for at in range(0, len(entries), self.BLOCK)]
        self._rng.shuffle(blocks)
        return [entry for block in blocks for entry in block]

    def _shuffled(self, entries: Sequence[Entry]) -> list[Entry]:
        return self._rng.sample(entries, len(entries))
