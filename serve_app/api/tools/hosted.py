"""Tools that only a vendor's own server runs.

Agents offer such tools beside their own, whatever server they ask. They are left out of the offer,
and the warning header names them. A tool of a vendor's type that the client would run is refused
instead: its calls would be missing from the answer, and the model does not know its arguments.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

OPENAI_HOSTED: Final = (
    r"^(web_search|web_search_preview|file_search|code_interpreter|image_generation|mcp"
    r"|tool_search)(_\d{4}_\d{2}_\d{2})?$"
)
"""Source: https://platform.openai.com/docs/api-reference/responses/create (tools)"""

ANTHROPIC_HOSTED: Final = (
    r"^(web_search|web_fetch|code_execution|tool_search_tool_regex|tool_search_tool_bm25|advisor"
    r"|mcp_toolset)(_\d{8})?$"
)
"""Source: https://docs.claude.com/en/docs/agents-and-tools/tool-use/overview (server tools)"""

MAX_ECHO: Final = 64


class HostedTool(BaseModel):
    """A tool that only its vendor's server runs: left out of the offer, and named in a header."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    type: str


class OpenAiHostedTool(HostedTool):
    """A tool that only OpenAI's server runs: left out of the offer, and named in a header."""

    type: str = Field(pattern=OPENAI_HOSTED)


class AnthropicHostedTool(HostedTool):
    """A tool that only Anthropic's server runs: left out of the offer, and named in a header."""

    type: str = Field(pattern=ANTHROPIC_HOSTED)


@dataclass(frozen=True, slots=True)
class ToolTypes:
    """The types of tools that a list of them may hold.

    Attributes:
        own: The types that are honoured; the first is that of a tool without a type.
        hosted: The pattern of the types that are left out; None leaves out none.
        advice: How to offer a tool of another type.
    """

    own: tuple[str, ...]
    hosted: str | None
    advice: str

    def kind_of(self, tool: Any) -> str:
        """Return the tag of a tool, for pydantic's `Discriminator`: its own type, or `hosted`."""
        kind = self._type_of(tool)
        if kind in self.own:
            return kind
        return "hosted" if self._is_hosted(kind) else self.own[0]

    def check(self, tool: Any) -> Any:
        """Return a tool unchanged, as a validator before any other, if its type is known.

        Raises:
            PydanticCustomError: A tool of this type is neither honoured nor left out.
        """
        kind = self._type_of(tool)
        if kind not in self.own and not self._is_hosted(kind):
            named = " or ".join(map(repr, self.own))
            raise PydanticCustomError(
                "unsupported_parameter",
                "{field} must be {named}; {kind} is not supported here: {advice}.",
                {"field": "type", "named": named, "kind": kind[:MAX_ECHO], "advice": self.advice},
            )
        return tool

    def _is_hosted(self, kind: str) -> bool:
        return self.hosted is not None and re.search(self.hosted, kind) is not None

    def _type_of(self, tool: Any) -> str:
        found = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        return found if isinstance(found, str) else self.own[0]


OPENAI_TYPES: Final = ToolTypes(
    ("function",), OPENAI_HOSTED, "offer a function, which the client calls itself"
)


def left_out_warnings(types: Iterable[str]) -> tuple[str, ...]:
    """Return the warning about tools that are left out; nothing without any."""
    named = sorted(set(types))
    return (f"Tools that do not run here: {', '.join(named)}",) if named else ()
