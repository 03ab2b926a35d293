"""The corpus: names of Python's standard library, each with one paragraph of its docstring.

Harvested once on Python 3.11 and committed as ``models/pydoc-chat/corpus.jsonl``, so that
training and evaluation do not depend on the Python that runs them. Training reads the file; only
``python -m models.training.corpus`` writes it.
"""

import argparse
import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

CORPUS_PATH = Path(__file__).parent.parent / "pydoc-chat" / "corpus.jsonl"
MAX_ANSWER_CHARS = 200
MIN_ANSWER_CHARS = 16
_MODULES = """
abc argparse array ast asyncio atexit base64 binascii bisect builtins bz2 calendar cmd codecs
collections collections.abc colorsys concurrent.futures configparser contextlib contextvars copy
copyreg csv dataclasses datetime decimal difflib dis doctest email email.message email.utils enum
errno fileinput fnmatch fractions functools gc getopt getpass glob graphlib gzip hashlib heapq
hmac html html.parser http http.client http.cookies http.server importlib importlib.metadata
importlib.util inspect io ipaddress itertools json keyword linecache locale logging
logging.handlers lzma marshal math mimetypes mmap multiprocessing multiprocessing.pool numbers
operator os os.path pathlib pdb pickle pkgutil plistlib pprint pydoc queue random re reprlib runpy
secrets shelve shlex shutil signal smtplib socket socketserver sqlite3 statistics string struct
subprocess sys tarfile tempfile textwrap threading time timeit tomllib trace traceback tracemalloc
types typing unicodedata unittest unittest.mock urllib.error urllib.parse urllib.request uuid
warnings weakref webbrowser xml.dom.minidom xml.etree.ElementTree zipfile zipimport zlib zoneinfo
"""
"""Modules of the corpus: documented ones that remain in Python after 3.12."""

_METHOD_OWNERS = """
builtins.str builtins.list builtins.dict builtins.set builtins.int builtins.float pathlib.Path
collections.deque collections.OrderedDict collections.Counter datetime.datetime datetime.date
datetime.timedelta fractions.Fraction threading.Thread threading.Event threading.Condition
threading.Barrier queue.Queue asyncio.Queue asyncio.Task asyncio.Event asyncio.Lock
concurrent.futures.Future concurrent.futures.Executor logging.Logger logging.Handler
logging.Formatter argparse.ArgumentParser csv.DictWriter subprocess.Popen socket.socket
zipfile.ZipFile tarfile.TarFile string.Formatter configparser.ConfigParser ast.NodeVisitor
inspect.Signature uuid.UUID contextlib.ExitStack email.message.EmailMessage json.JSONEncoder
json.JSONDecoder shlex.shlex graphlib.TopologicalSorter textwrap.TextWrapper
difflib.SequenceMatcher enum.Enum types.SimpleNamespace
"""
"""Classes whose public methods are in the corpus; builtins' names have no module."""

_SIGNATURE = re.compile(r"^[\w.]+\s*\(.*\)\s*(->|--|:|$)|->|^\s*(>>>|[-=*~]{3})|::")
_SENTENCE_END = re.compile(r"[.!?](?=\s)")
_PLATFORM_CALL = re.compile(
    r"os\.(W[A-Z]|sched_|posix_|get\w*id|set\w*id|pwrite|pread|eventfd|\w*xattr)"
)
_MACHINE_BOUND = re.compile(
    r"0x[0-9a-f]{4}|/usr|/home|/root|/opt|/work|/tmp|built-in function|^Deprecated AST",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A name and the only right answer to a question about it."""

    name: str
    answer: str


def load_corpus(path: Path = CORPUS_PATH) -> tuple[Entry, ...]:
    """Read the committed corpus, in its committed order."""
    with path.open(encoding="utf-8") as lines:
        return tuple(Entry(**json.loads(line)) for line in lines)


def write_corpus(entries: tuple[Entry, ...], path: Path = CORPUS_PATH) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for entry in entries:
            file.write(json.dumps({"name": entry.name, "answer": entry.answer}) + "\n")


def answer_from(docstring: str) -> str | None:
    """Return the first paragraph of prose of a docstring, or None if it does not fit.

    Signatures and doctests are skipped. The paragraph must be ASCII and of bounded length; a longer
    one is cut after its last whole sentence within the bound.
    """
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        text = " ".join(paragraph.split())
        if _SIGNATURE.search(text):
            continue
        return _bounded(text)
    return None


def _bounded(text: str) -> str | None:
    if len(text) > MAX_ANSWER_CHARS:
        ends = [match.end() for match in _SENTENCE_END.finditer(text[: MAX_ANSWER_CHARS + 1])]
        text = text[: ends[-1]] if ends else ""
    fits = len(text) >= MIN_ANSWER_CHARS and text.isascii() and text[0].isalpha()
    return text if fits and not _MACHINE_BOUND.search(text) else None


def harvest() -> tuple[Entry, ...]:
    """Collect the corpus from the Python that runs this, sorted by name."""
    answers: dict[str, str] = {}
    for name, documented in _documented_objects():
        docstring = inspect.getdoc(documented)
        answer = answer_from(docstring) if docstring else None
        if answer is not None and name not in answers:
            answers[name] = answer
    return tuple(Entry(name, answers[name]) for name in sorted(answers))


def _documented_objects() -> Iterator[tuple[str, object]]:
    for module_name in _MODULES.split():
        module = _imported(module_name)
        if module is None:
            continue
        yield module_name, module
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name in _public_names(module):
            if not _PLATFORM_CALL.match(f"{prefix}{name}") and _is_asked_about(
                getattr(module, name, None), module
            ):
                yield f"{prefix}{name}", getattr(module, name)
    for owner in _METHOD_OWNERS.split():
        yield from _methods(owner)


def _methods(owner: str) -> Iterator[tuple[str, object]]:
    module_name, class_name = owner.rsplit(".", 1)
    class_ = getattr(importlib.import_module(module_name), class_name)
    prefix = class_name if module_name == "builtins" else owner
    for name, member in sorted(vars(class_).items()):
        if not name.startswith("_") and (
            callable(member) or isinstance(member, property | classmethod)
        ):
            yield f"{prefix}.{name}", getattr(class_, name)


def _imported(module_name: str) -> ModuleType | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module_name)
        except ImportError:
            return None


def _public_names(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None) or vars(module)
    return sorted(name for name in names if not name.startswith("_"))


def _is_asked_about(member: object, module: ModuleType) -> bool:
    """Return whether a member is a function or class with a docstring of its own."""
    if not (inspect.isroutine(member) or inspect.isclass(member)):
        return False
    home = getattr(member, "__module__", None) or module.__name__
    homes = {module.__name__.split(".")[0], "posixpath", "genericpath", "posix", "io"}
    own = home.lstrip("_").split(".")[0] in homes
    listed = bool(getattr(module, "__all__", None))
    return (
        (own or listed)
        and bool(getattr(member, "__doc__", None))
        and "__doc__" in _own_attributes(member)
    )


def _own_attributes(member: object) -> set[str]:
    return set(vars(member)) if inspect.isclass(member) else {"__doc__"}


def main() -> None:
    """Harvest the corpus and write it beside the model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--path", type=Path, default=CORPUS_PATH)
    entries = harvest()
    write_corpus(entries, parser.parse_args().path)
    sys.stdout.write(f"{len(entries)} names, {sum(len(e.answer) for e in entries)} characters\n")


if __name__ == "__main__":
    main()
