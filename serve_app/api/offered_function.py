"""A function that a request offers to the model."""

from dataclasses import dataclass

from deployments.contract import Tool


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function.

    Attributes:
        tool: What the model is told.
        is_strict: Whether its calls must fit the schema, also where the model decides to call.
        param: Where in the request the function stands.
    """

    tool: Tool
    is_strict: bool
    param: str

    @property
    def name(self) -> str:
        """The name that the model calls."""
        return self.tool.name

    @property
    def num_bytes(self) -> int:
        """The size of all that the model is told."""
        tool = self.tool
        return sum(len(t.encode()) for t in (tool.name, tool.description or "", tool.parameters))
