"""Reads a stream as one delta."""

from contextlib import aclosing

from deployments.contract.output import TextDelta
from serve_app.backends.replicas.backend import GenerationStream
from serve_app.backends.streams.text_stream import joined_deltas


async def read_to_end(stream: GenerationStream) -> TextDelta:
    """Read the stream to its end, close it, and return all of it as one delta."""
    async with aclosing(stream):
        return TextDelta.join([delta async for _, delta in joined_deltas(stream)])
