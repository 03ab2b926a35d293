"""`openai` for Python: a client that leaves frees its place at once.

The engine is held in the midst of the answer, which therefore can't end by itself.
"""

import asyncio

import openai
import pytest

from tests.clients.questions import MAX_TOKENS, NARROW, endless
from tests.clients.served.conftest import Window
from tests.ray.serve_run import Server


@pytest.mark.parametrize("how", ["close the stream", "leave the block", "close the client"])
def test_a_stream_that_the_client_leaves_frees_its_place(
    server: Server, held: Window, how: str
) -> None:
    before = held.num_steps()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        stream = client.chat.completions.create(**endless(NARROW), stream=True)
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        held.wait_until_admitted(1)
        match how:
            case "close the stream":
                stream.close()
            case "leave the block":
                with stream:
                    pass
            case _:
                client.close()
        held.wait_until_admitted(0)
    assert_aborted(held, before)


async def test_a_cancelled_task_frees_its_place(server: Server, held: Window) -> None:
    before = held.num_steps()
    has_begun = asyncio.Event()
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        async def read() -> None:
            async with await client.chat.completions.create(
                **endless(NARROW), stream=True
            ) as stream:
                async for _ in stream:
                    has_begun.set()

        reading = asyncio.create_task(read())
        await has_begun.wait()
        await asyncio.to_thread(held.wait_until_admitted, 1)
        reading.cancel()
        await asyncio.to_thread(held.wait_until_admitted, 0)
        assert not reading.done() or reading.cancelled()
    assert_aborted(held, before)


def assert_aborted(held: Window, before: int) -> None:
    """Check that the engine does not go on with the answer when it is let go."""
    held.let_go()
    held.wait_until_running(0)
    assert 0 < held.num_steps() - before < MAX_TOKENS
