"""`openai` for Python: a client that leaves frees its slot at once."""

import asyncio

import openai
import pytest

from tests.clients.conftest import Window
from tests.clients.questions import NARROW, endless
from tests.ray.serve_run import Server

NEAR_THE_END = 1900
"""Steps of the engine. A whole answer takes 2000, about two seconds."""


@pytest.mark.parametrize("how", ["close the stream", "leave the block", "close the client"])
def test_a_stream_that_the_client_leaves_frees_its_slot(
    server: Server, window: Window, how: str
) -> None:
    before = window.num_steps(NARROW)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60)
    with client:
        stream = client.chat.completions.create(**endless(NARROW), stream=True)
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        window.wait_until_running(NARROW, 1)
        match how:
            case "close the stream":
                stream.close()
            case "leave the block":
                with stream:
                    pass
            case _:
                client.close()
        window.wait_until_running(NARROW, 0)
    assert 0 < window.num_steps(NARROW) - before < NEAR_THE_END


async def test_a_cancelled_task_frees_its_slot(server: Server, window: Window) -> None:
    before = window.num_steps(NARROW)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        async def read() -> None:
            async with await client.chat.completions.create(
                **endless(NARROW), stream=True
            ) as stream:
                async for _ in stream:
                    pass

        reading = asyncio.create_task(read())
        await asyncio.to_thread(window.wait_until_running, NARROW, 1)
        reading.cancel()
        await asyncio.to_thread(window.wait_until_running, NARROW, 0)
        assert not reading.done() or reading.cancelled()
    assert 0 < window.num_steps(NARROW) - before < NEAR_THE_END
