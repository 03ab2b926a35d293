"""`openai` for Python through HAProxy: what only a connection shows."""

import httpx2
import openai
import pytest

from tests.clients.questions import ANSWERS, NAME, NARROW, about
from tests.clients.served.conftest import Window
from tests.ray.serve_run import Server


def test_text_arrives_while_the_answer_is_being_written(
    client: openai.OpenAI, held: Window
) -> None:
    stream = client.chat.completions.create(**about(NAME, model=NARROW), stream=True)
    texts = (chunk.choices[0].delta.content or "" for chunk in stream)
    first = next(text for text in texts if text)
    held.wait_until_admitted(1)
    assert len(first) < len(ANSWERS[NAME])
    held.let_go()
    assert first + "".join(texts) == ANSWERS[NAME]


def test_answers_whole_streamed_and_refused_share_a_connection(server: Server) -> None:
    addresses: list[object] = []

    def note(answer: httpx2.Response) -> None:
        addresses.append(answer.extensions["network_stream"].get_extra_info("client_addr"))

    http = openai.DefaultHttpxClient(event_hooks={"response": [note]})
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0, http_client=http
    ) as client:
        client.chat.completions.create(**about(NAME))
        # The SDK closes a stream at `[DONE]`, before the end of its body, and so its connection.
        http.post(f"{server.url}/v1/chat/completions", json=about(NAME, stream=True))
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**about(NAME, model="nobody"))
        client.models.list()
    assert addresses[0]
    assert addresses == [addresses[0]] * 4
