"""The table of docs/vllm.md of the tests that run with both engines, read from their files."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.made_table import ROOT, MadeTable

FIXTURE: Final = "engine_name"
FOLDERS: Final = ("tests/clients", "tests/deployments", "tests/faults", "tests/serve_app")


@dataclass(frozen=True)
class Neutral:
    """A file of tests that ask for the engine under test.

    Attributes:
        path: The file, from the project's root.
        names: Its tests that run with both engines.
        only_raystream: Why the others run with raystream's only, by their names.
    """

    path: str
    names: tuple[str, ...]
    only_raystream: Mapping[str, str]


def neutral_files() -> list[Neutral]:
    """Return the files in which a test asks for the engine, itself or by a fixture."""
    found = (
        read(path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("test_*.py"))
    )
    return [each for each in found if each.names or each.only_raystream]


def read(path: Path) -> Neutral:
    """Read a file of tests, and the fixtures that it sees."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    needs = {
        each.name: arguments_of(each) for file in conftests(path) for each in functions_of(file)
    }
    functions = list(functions_of(module))
    needs |= {each.name: arguments_of(each) for each in functions}
    asking = [
        each
        for each in functions
        if each.name.startswith("test_") and FIXTURE in all_of(each.name, needs)
    ]
    whole = [why for node in module.body if is_pytestmark(node) for why in reasons_of(node)]
    why = {
        each.name: [*whole, *(w for d in each.decorator_list for w in reasons_of(d))]
        for each in asking
    }
    return Neutral(
        str(path.relative_to(ROOT)),
        tuple(name for name, reasons in why.items() if not reasons),
        {name: reasons[0] for name, reasons in why.items() if reasons},
    )


def conftests(path: Path) -> Iterator[ast.Module]:
    """Yield the conftest.py of the folders above a file, the outermost first."""
    for folder in reversed(path.relative_to(ROOT).parents):
        if (file := ROOT / folder / "conftest.py").exists():
            yield ast.parse(file.read_text(encoding="utf-8"))


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(module: ast.Module) -> Iterator[Function]:
    """Yield the functions of a module, and those of its classes."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def arguments_of(function: Function) -> set[str]:
    """Return the names of a function's arguments: the fixtures of a test or of a fixture."""
    return {each.arg for each in function.args.args}


def all_of(name: str, needs: Mapping[str, set[str]]) -> set[str]:
    """Return all fixtures that a test needs, also those of its fixtures."""
    found: set[str] = set()
    left = [name]
    while left:
        for each in needs.get(left.pop(), set()) - found:
            found.add(each)
            left.append(each)
    return found


def is_pytestmark(node: ast.stmt) -> bool:
    """Whether a statement marks all tests of its module."""
    names = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(each, ast.Name) and each.id == "pytestmark" for each in names)


def reasons_of(node: ast.AST) -> Iterator[str]:
    """Yield the argument of each `only_raystream` in a decorator or a statement."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "only_raystream":
            (why,) = each.args
            assert isinstance(why, ast.Constant)
            yield str(why.value)


def neutral_table() -> str:
    """Return the table in Markdown."""
    rows = [
        "| tests | with both engines | only with raystream's | why |",
        "| --- | --- | --- | --- |",
    ]
    for each in neutral_files():
        reasons = "; ".join(dict.fromkeys(each.only_raystream.values()))
        link = f"[{each.path.removeprefix('tests/')}](../{each.path})"
        only = len(each.only_raystream) or ""
        rows.append(f"| {link} | {len(each.names) or ''} | {only} | {reasons} |")
    return "\n".join(rows) + "\n"


TABLE: Final = MadeTable("docs/vllm.md", "the tests of both engines", neutral_table)

if __name__ == "__main__":
    TABLE.write()
