"""Fake replicas and a fake clock."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from deployments.contract.descriptions import ModelDescription, ReasoningDescription
from deployments.contract.errors import InvalidRequestError
from deployments.contract.formats.reasoning_format import PromptReasoning
from deployments.contract.generation import (
    Accepted,
    GenerationRequest,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import ReasoningTokens, SamplingParams
from tests.serve_app.by_method import ByMethod

if TYPE_CHECKING:
    from deployments.contract.errors import RaystreamError

# What a fake stream does: send a list of deltas, raise an error, or wait for an event.
Step = list[TextDelta] | Exception | asyncio.Event

HELLO: list[Step] = [
    [TextDelta((11,), "Hello")],
    [TextDelta((12,), ","), TextDelta((13, 14), " world")],
    [TextDelta((15,), "!", FinishReason.STOP)],
]


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def text_of(*pieces: str, finish: FinishReason = FinishReason.STOP) -> list[Step]:
    steps: list[Step] = [[TextDelta((at,), piece)] for at, piece in enumerate(pieces)]
    return [*steps, [TextDelta((99,), "", finish)]]


class Pinged(asyncio.Event):
    """A step: the stream is silent until its client has been sent pings."""

    def __init__(self, clock: "FakeClock", num_pings: int) -> None:
        super().__init__()
        self._clock = clock
        self._num_pings = num_pings

    async def wait(self) -> Literal[True]:
        """Let the time of each ping come; return once the last one has been sent."""
        clock = self._clock
        for num_woken in range(clock.num_woken + 1, clock.num_woken + 1 + self._num_pings):
            clock.wake.release()
            while clock.num_woken < num_woken or not clock.num_asleep:  # noqa: ASYNC110 - some turns
                await asyncio.sleep(0)
        return True


class FakeStream:
    waited_until_s = 0.0

    def __init__(
        self,
        steps: Sequence[Step],
        num_prompt_tokens: int,
        reasoning: PromptReasoning = PromptReasoning.OPEN,
    ) -> None:
        self.accepted = Accepted(
            num_prompt_tokens, "replica", reasoning, fingerprint="fp_fake", prompt_digest=b"prompt"
        )
        self.closed = asyncio.Event()
        self.waits = asyncio.Event()
        self._steps = steps

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        for step in self._steps:
            if isinstance(step, asyncio.Event):
                self.waits.set()
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                yield step

    async def aclose(self) -> None:
        self.closed.set()


class FakeBackend(ByMethod):
    def __init__(
        self,
        steps: Sequence[Step] = HELLO,
        model_id: str = "m",
        accepts_images: bool = True,
        default_sampling: SamplingParams | None = None,
        tool_call_format: str | None = None,
        tool_call_token_ids: tuple[tuple[str, int], ...] = (),
    ) -> None:
        self.steps = steps
        self.reasoning = PromptReasoning.OPEN  # what the end of each prompt says
        self.accepted: dict[str, Any] = {}  # fields of what each stream was accepted with
        self.refusal: Exception | None = None
        # One for each of the next requests; an exception is raised at once. Then all get `steps`.
        self.scripts: list[Sequence[Step] | Exception] = []
        self.sickness: RaystreamError | None = None
        self.loaded: asyncio.Event | None = None
        self.requests: list[GenerationRequest] = []
        self.tokenized: list[TokenizeRequest] = []
        self.detokenized: list[tuple[int, ...]] = []
        self.streams: list[FakeStream] = []
        self.opened = asyncio.Event()
        self.num_describes = 0
        self.num_pings = 0
        self.pinged: asyncio.Event | None = None
        self.description = ModelDescription(
            id=model_id,
            created=1_700_000_000,
            max_model_len=128,
            accepts_images=accepts_images,
            default_sampling=default_sampling or SamplingParams(),
            accepts_tools=tool_call_format is not None,
            tool_call_format=tool_call_format,
            tool_call_token_ids=tool_call_token_ids,
            system_fingerprint="fp_fake",
        )

    def reason(self) -> None:
        """Reason from now on, between the tokens 8 and 9."""
        reasoning = ReasoningDescription("qwen3", ReasoningTokens(8, 9))
        self.description = replace(self.description, reasoning=reasoning)

    @property
    def num_calls(self) -> int:
        return len(self.requests) + len(self.tokenized) + len(self.detokenized)

    async def generate(self, request: GenerationRequest) -> FakeStream:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        script = self.scripts.pop(0) if self.scripts else self.steps
        if isinstance(script, Exception):
            raise script
        self.streams.append(FakeStream(script, num_prompt_tokens=7, reasoning=self.reasoning))
        self.streams[-1].accepted = replace(self.streams[-1].accepted, **self.accepted)
        self.opened.set()
        return self.streams[-1]

    async def describe(self) -> ModelDescription:
        self.num_describes += 1
        if self.loaded is not None:
            await self.loaded.wait()
        return self.description

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        """Return a token for each character of a plain prompt, or two tokens for messages."""
        self.tokenized.append(request)
        text = request.prompt if isinstance(request.prompt, str) else "MM"
        return TokenizedPrompt(tuple(map(ord, text)), tuple(text) if request.with_strings else None)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        self.detokenized.append(token_ids)
        if max(token_ids, default=0) > 0x10FFFF:
            raise InvalidRequestError("no such token", "tokens")
        return "".join(map(chr, token_ids))

    async def ping(self) -> None:
        self.num_pings += 1
        if self.pinged is not None:
            await self.pinged.wait()
        if self.sickness is not None:
            raise self.sickness


class FakeClock:
    """Each reading of the monotonic time is half a second later; sleepers wait for `wake`."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0
        self.wake = asyncio.Semaphore(0)
        self.slept_s: list[float] = []
        self.num_asleep = self.num_woken = 0
        self._stopwatch_s = 0.0

    def unix_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        self._stopwatch_s += 0.5
        return self._stopwatch_s

    async def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.num_asleep += 1
        try:
            await self.wake.acquire()
            self.num_woken += 1
        finally:
            self.num_asleep -= 1
