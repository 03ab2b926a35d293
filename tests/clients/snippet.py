"""Runs code of docs/clients.md, whose clients reach the application in this process."""

from functools import partial
from unittest.mock import patch

import anthropic
import openai

from tests.clients_page import code_of
from tests.serve_app.local_server import LocalServer


def run_snippet(heading: str, local: LocalServer) -> None:
    """Run a section's Python in a namespace of its own."""
    code = compile(code_of(heading, "python", local.url), heading, "exec")
    with (
        local.client() as http,
        patch.object(openai, "OpenAI", partial(openai.OpenAI, http_client=http)),
        patch.object(anthropic, "Anthropic", partial(anthropic.Anthropic, http_client=http)),
    ):
        exec(code, {"__name__": "__main__"})
