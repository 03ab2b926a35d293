"""`openai` for Python against a full server.

A request is refused at once with Retry-After, and its retry is served.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx2
import openai
import pytest

from tests.clients.conftest import Narrow
from tests.clients.questions import NAME, NARROW, about, endless
from tests.serve_app.local_server import LocalServer


@pytest.fixture
def full(client: openai.OpenAI, held: Narrow) -> Iterator[ExitStack]:
    """Fill the narrow model's slot and its queue; closing the yielded stack makes room."""
    with ExitStack() as streams:
        for _ in range(2):
            stream = client.chat.completions.create(**endless(NARROW), stream=True)
            streams.enter_context(stream)
        held.wait_until_admitted(2)
        yield streams


def test_a_full_server_refuses_with_503(client: openai.OpenAI, full: ExitStack) -> None:
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(**about(NAME, model=NARROW), stream=stream)
        assert caught.value.status_code == 503
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_retry_waits_as_long_as_retry_after_says_and_is_served(
    local: LocalServer, held: Narrow, full: ExitStack
) -> None:
    sent_s: list[float] = []
    answers: list[httpx2.Response] = []

    def note(answer: httpx2.Response) -> None:
        answers.append(answer)
        # Make room once the server has refused.
        full.close()
        held.let_go()

    http = local.client(
        event_hooks={"request": [lambda _: sent_s.append(time.monotonic())], "response": [note]}
    )
    with openai.OpenAI(
        base_url=f"{local.url}/v1", api_key="none", max_retries=2, http_client=http
    ) as client:
        answer = client.chat.completions.create(**about(NAME, model=NARROW, max_tokens=4))
    assert [answer.status_code for answer in answers] == [503, 200]
    assert answer.choices[0].finish_reason == "length"
    # By default, the client would have retried within half a second.
    assert sent_s[1] - sent_s[0] >= int(answers[0].headers["retry-after"]) >= 1
