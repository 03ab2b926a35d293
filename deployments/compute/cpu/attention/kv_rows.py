"""The extents and lengths of a step's rows, in the form that the attention kernel reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class KVRows:
    """The extent, position and length of each row; layers of one capacity share them.

    Attributes:
        places: [3, m], int64: the first token of each row's extent; the index of the row's own
            token in the extent; the number of tokens at the start of the extent that the row sees.
        addresses: The addresses of the three rows of `places`.
        num_tokens: Tokens that all rows see, in total.
    """

    places: npt.NDArray[np.int64]
    addresses: tuple[int, int, int]
    num_tokens: int

    @classmethod
    def of(cls, starts: Sequence[int], indices: Sequence[int], lengths: Sequence[int]) -> "KVRows":
        """Return rows with these extents' starts, token indices and lengths, m of each."""
        places = np.array((starts, indices, lengths), np.int64)
        first, step = places.ctypes.data, places.strides[0]
        return cls(places, (first, first + step, first + 2 * step), sum(lengths))
