import random

from models.training.detector.baseline import BagOfCharacters
from models.training.detector.document import Source
from models.training.detector.pieces import Piece


def pieces(human: str, chat: str, seed: int) -> list[Piece]:
    rng = random.Random(seed)
    return [
        Piece("".join(rng.choices(letters, k=60)), source, None, False)
        for letters, source in ((human, Source.TOPIC), (chat, Source.ANSWER))
        for _ in range(40)
    ]


def test_texts_of_different_characters_are_told_apart() -> None:
    bag = BagOfCharacters(pieces("abcde", "abcdf", seed=1))
    assert bag.accuracy(pieces("abcde", "abcdf", seed=2)) > 0.95


def test_the_order_of_characters_tells_nothing() -> None:
    bag = BagOfCharacters(pieces("abc ", "abc ", seed=1))
    assert bag.accuracy(pieces("abc ", "abc ", seed=2)) < 0.75
