"""How the families of models write the calls of tools in their text.

Each format is data: marks, and the JSON object of a call between them. What parses an answer, what
forces one and what tells the formats apart all read it here. The names are vLLM's.

Source: the chat templates of Qwen2.5, Llama 3.1 and Mistral 7B v0.3 on https://huggingface.co.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """One way to write calls: `block[0] call[0] {...} call[1] separator ... block[1]`.

    White space at the ends of marks is how the family writes them; no reader insists on it.

    Attributes:
        name: vLLM's name of the parser.
        marks: All marks that a tokenizer may hold as tokens of their own.
        block: What stands before the first call and behind the last.
        call: What stands before and behind each call's object.
        separator: What stands between two calls.
        arguments_key: The key of the arguments in a call's object; the function's name is `name`.
        only_at_start: Whether calls are found at the text's beginning alone, as they must be where
            no mark tells them from JSON that is meant for the reader.
        call_id_length: Letters and digits of a call's id, if the templates ask for a number.
    """

    name: str
    marks: tuple[str, ...]
    block: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("", "")
    separator: str
    arguments_key: str = "arguments"
    only_at_start: bool = False
    call_id_length: int | None = None


HERMES = ToolCallFormat(
    name="hermes",
    marks=("<tool_call>", "</tool_call>"),
    call=("<tool_call>\n", "\n</tool_call>"),
    separator="\n",
)
LLAMA3_JSON = ToolCallFormat(
    name="llama3_json",
    marks=(),
    separator="; ",
    arguments_key="parameters",
    only_at_start=True,
)
MISTRAL = ToolCallFormat(
    name="mistral",
    marks=("[TOOL_CALLS]",),
    block=("[TOOL_CALLS] [", "]"),
    separator=", ",
    call_id_length=9,
)

FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType(
    {known.name: known for known in (HERMES, LLAMA3_JSON, MISTRAL)}
)
"""The formats that are known, by name."""
