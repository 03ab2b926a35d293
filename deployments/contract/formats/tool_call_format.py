"""The formats in which families of models write tool calls in their text.

Each format is data: marks, and a call's JSON object between them. It is read by the parser of
answers, by the grammar that forces a call, and by the detection of a template's format. The names
are vLLM's.

Source: the chat templates of Qwen2.5, Llama 3.1, Mistral 7B v0.3 and gpt-oss on
https://huggingface.co.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """One way to write calls: `block[0] call[0] {...} call[1] separator ... block[1]`.

    `block` and `call` include the white space that the family writes; readers do not require it.

    Attributes:
        name: vLLM's name of the parser.
        marks: All marks that a tokenizer may have as single tokens.
        block: The text before the first call and after the last.
        call: The text before and after each call's object.
        separator: The text between two calls.
        arguments_key: The key of the arguments in a call's object; the function's name is `name`.
        only_at_start: Whether calls are recognized only at the beginning of the text. Formats
            without marks need this: elsewhere a call looks like JSON that is meant for the user.
        call_id_length: The number of letters and digits that the templates require of a call's id;
            None if they accept any.
        has_channels: Whether an answer is messages on channels (harmony), whose headers name the
            function, and a call's object is its arguments only. Then only `marks` are used.
    """

    name: str
    marks: tuple[str, ...]
    block: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("", "")
    separator: str
    arguments_key: str = "arguments"
    only_at_start: bool = False
    call_id_length: int | None = None
    has_channels: bool = False


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
OPENAI = ToolCallFormat(
    name="openai",
    marks=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    separator="",
    has_channels=True,
)

FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType(
    {known.name: known for known in (HERMES, LLAMA3_JSON, MISTRAL, OPENAI)}
)
"""All formats, by name."""
