"""docs/clients.md: the code in its sections."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/clients.md"
ADDRESS = "http://127.0.0.1:8000"
"""The server's address in the page's code."""

SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def sections() -> dict[str, list[tuple[str, str, str]]]:
    """Return each section's blocks of code by its heading: language, name of a file or "", code."""
    return {
        heading: BLOCK.findall(text) for heading, text in SECTION.findall(PAGE.read_text("utf-8"))
    }


def code_of(heading: str, language: str, url: str) -> str:
    """Return a section's only block in a language, with a server's address in place of ours."""
    ((_, _, code),) = [block for block in sections()[heading] if block[0] == language]
    return code.replace(ADDRESS, url)
