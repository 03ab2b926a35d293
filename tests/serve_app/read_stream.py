"""Reads a stream as one delta."""

from deployments.contract.generation import GenerationStream
from deployments.contract.output import TextDelta
from serve_app.backends.streams.choices import Choices


async def read_to_end(stream: GenerationStream) -> TextDelta:
    """Read the stream to its end, close it, and return all of it as one delta."""
    (whole,) = await Choices([stream]).read_to_end()
    return whole
