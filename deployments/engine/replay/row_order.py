"""The order in which the rows of a captured step run: that in which their extents lie in memory.

Flash attention is documented for starts that ascend. Rows and extents seldom change between two
steps, so an order is kept as long as it holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from deployments.engine.attention.packed_step import Starts


@dataclass(frozen=True, slots=True)
class RowOrder:
    """An order of a step's rows, with padding after them.

    Attributes:
        starts: The extents of the n rows.
        num_rows: Rows with the padding.
        order: [n], the rows in the order in which they run.
        inputs: [(1 + num_groups) * num_rows]: at which place each row runs, and then, for each
            group, the first token of the extent of the row at each place.
    """

    starts: Sequence[Starts]
    num_rows: int
    order: list[int]
    inputs: list[int]

    @classmethod
    def of(cls, starts: Sequence[Starts], num_rows: int, spare_tokens: Starts) -> Self:
        """Return the order by the first group's extents; padding is at the spare tokens."""
        order = sorted(range(len(starts)), key=starts.__getitem__)
        places = sorted(range(len(starts)), key=order.__getitem__)
        inputs = [*places, *range(len(starts), num_rows)]
        for group, spare_token in enumerate(spare_tokens):
            inputs += [starts[row][group] for row in order]
            inputs += [spare_token] * (num_rows - len(starts))
        return cls(starts, num_rows, order, inputs)

    def holds(self, starts: Sequence[Starts], num_rows: int) -> bool:
        """Return whether this is the order of rows with these extents."""
        return num_rows == self.num_rows and starts == self.starts

    def sort(self, values: Sequence[int]) -> list[int]:
        """Return the rows' values in the order in which the rows run, and 0 for padding."""
        return [values[row] for row in self.order] + [0] * (self.num_rows - len(self.order))
