"""Encodes prompts with images one after another, while their pixels fit into the host's memory.

What a model reads of an image is many times its file, and a sequence holds it until it ends, since
it may be computed again. The tokens of a prompt bound what one of them holds; here all of them
together are bounded, and a prompt beyond that is refused before its images are decoded.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final, TypeVar, TypeVarTuple

from deployments.contract.bounded_executor import BoundedExecutor
from deployments.contract.errors import OverloadedError, OverloadReason, RaystreamError
from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, ImagePart
from deployments.generator.prompt_encoder import EncodedPrompt, PromptEncoder
from deployments.plan import cgroup

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PART_OF_MEMORY: Final = 1 / 8
"""Of the machine's or the container's memory: 1 GiB of 8, which is 110 images of Gemma 3."""

RETRY_AFTER_S: Final = 1.0


class ImagePrompts:
    """Encodes a replica's prompts with images, on a thread of their own. Not thread-safe.

    Attributes:
        num_bytes: What the sequences hold of images.
    """

    def __init__(
        self, encoder: PromptEncoder, *, max_num_calls: int, max_bytes: int | None = None
    ) -> None:
        """Start a thread.

        Args:
            encoder: The model's.
            max_num_calls: The most calls of `run` in progress.
            max_bytes: From here on no further prompt is encoded. So all may hold the pixels of one
                prompt more. None: `PART_OF_MEMORY`.
        """
        self.num_bytes = 0
        self._encoder = encoder
        self._max_bytes = (
            int(cgroup.total_bytes() * PART_OF_MEMORY) if max_bytes is None else max_bytes
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")
        self._turn = asyncio.Lock()
        # They queue here, so that prompts to be answered wait for one of them at most.
        self._calls = BoundedExecutor(self._thread, 1, max_num_calls, "prompts with images")

    async def encode(
        self, request: GenerationRequest, held: ExitStack
    ) -> EncodedPrompt | RaystreamError:
        """Encode a prompt when it is its turn; its pixels count until `held` is closed."""
        async with self._turn:
            if self.num_bytes >= self._max_bytes:
                return OverloadedError(
                    f"The images of other requests fill the memory for them: {self.num_bytes} of "
                    f"{self._max_bytes} bytes. Try again in 1 s.",
                    None,
                    RETRY_AFTER_S,
                    OverloadReason.IMAGES,
                )
            loop = asyncio.get_running_loop()
            (encoded,) = await loop.run_in_executor(self._thread, self._encoder.encode, [request])
            if isinstance(encoded, EncodedPrompt):
                # Before the next one's turn.
                self._hold(sum(t.nbytes for t in encoded.model_inputs.values()), held)
            return encoded

    async def run(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run work on the images of a prompt that is not to be answered; see `BoundedExecutor`."""
        return await self._calls.run(work, *args)

    def close(self) -> None:
        """End the thread after its work."""
        self._thread.shutdown(wait=False)

    def _hold(self, num_bytes: int, held: ExitStack) -> None:
        self.num_bytes += num_bytes
        held.callback(self._release, num_bytes)

    def _release(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


def has_images(prompt: Sequence[ChatMessage | int] | str) -> bool:
    """Return whether a prompt has images; a text and token ids, of any length, have none."""
    if isinstance(prompt, str) or not all(isinstance(each, ChatMessage) for each in prompt):
        return False
    messages = (each for each in prompt if isinstance(each, ChatMessage))
    return any(isinstance(part, ImagePart) for each in messages for part in each.parts)
