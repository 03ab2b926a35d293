"""Reads YAML as `yaml.safe_load` does, but refuses duplicate keys, and says in words what is wrong.

A place in a file is the path of its keys, such as `applications[0].args`, of which `line_of` knows
the line.
"""

import re
from typing import Any, Final

import yaml

STEP: Final = re.compile(r"(?P<key>[^.\[\]]+)|\[(?P<index>\d+)\]")
"""A part of a path."""

MEANINGS: Final = {
    "expected <block end>": "it does not continue the {kind} that begins in line {line}, column "
    "{column}: check how far it is indented",
    "could not find expected ':'": "it has no ':' after its key",
    "found unexpected end of stream": "the quote that begins here has no end",
    "mapping values are not allowed here": "a ':' can't stand here: check how far the line is "
    "indented, or write the text in quotes",
    "found character '\\t'": "a tab can't indent it: write spaces",
    "cannot start any token": "a value can't begin with this character: write it in quotes",
    "undefined alias": "a value that begins with '*' needs quotes",
    "expected ',' or": "a ',' is missing, or the bracket that begins in line {line} has no end",
    "but found another document": "a second document begins here: one file holds one",
    "found '<stream end>'": "a bracket has no end",
    "expected '<document start>'": "it does not continue what stands above: write KEY: VALUE",
}
"""What PyYAML's messages mean, by a part of them."""

AT_BEGIN: Final = ("could not find expected ':'", "found unexpected end of stream")
"""Parts of messages of what is wrong where its context begins."""


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses duplicate keys in a mapping; PyYAML's own loader silently keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the node of a mapping.

        Raises:
            yaml.composer.ComposerError: A key appears twice.
        """
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    message = f"key {key.value!r} appears twice"
                    raise yaml.composer.ComposerError(None, None, message, key.start_mark)
                seen.add(key.value)
        return node


def line_of(text: str, path: str) -> int | None:
    """Return the line of the innermost section that a path names.

    If the text is not YAML, return the line of the mistake; if it has nothing of the path, None.
    """
    try:
        node = yaml.compose(text, Loader=UniqueKeyLoader)
    except yaml.YAMLError as error:
        return _line_of_error(error, text)
    line = None
    for step in STEP.finditer(path):
        if step["key"] is not None and isinstance(node, yaml.MappingNode):
            found = [pair for pair in node.value if pair[0].value == step["key"]]
        elif step["index"] is not None and isinstance(node, yaml.SequenceNode):
            found = [(item, item) for item in node.value[int(step["index"]) :][:1]]
        else:
            found = []
        if not found:
            break
        (marked, node), *_ = found
        line = marked.start_mark.line + 1
    return _line_of_unknown_value(text) if line is None else line


def _line_of_unknown_value(text: str) -> int | None:
    """Return the line of a value that has a shape, but can't be read, such as an unknown tag."""
    try:
        yaml.load(text, Loader=UniqueKeyLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        return _line_of_error(error, text)
    return None


def _line_of_error(error: yaml.YAMLError, text: str) -> int | None:
    if isinstance(error, yaml.reader.ReaderError):
        return text.count("\n", 0, error.position) + 1
    if not isinstance(error, yaml.MarkedYAMLError):
        return None
    is_at_begin = any(part in str(error.problem) for part in AT_BEGIN)
    mark = (error.context_mark if is_at_begin else None) or error.problem_mark
    return None if mark is None else mark.line + 1


def in_words(error: yaml.YAMLError) -> str:
    """Return in plain words what is wrong in the line that `line_of` names."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"YAML can't have the character U+{error.character:04X}"
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    problem, begin = str(error.problem), error.context_mark or error.problem_mark
    for part, words in MEANINGS.items():
        if part in problem and begin is not None:
            kind = "list" if "collection" in str(error.context) else "section"
            return words.format(kind=kind, line=begin.line + 1, column=begin.column + 1)
    return problem


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Return in a line why a file can't be read as text."""
    if isinstance(error, UnicodeDecodeError):
        return f"not text in UTF-8: {error.reason} at byte {error.start}"
    return error.strerror or str(error)
