"""No log contains prompts, answers or keys, whatever goes wrong."""

import logging
import traceback

import pytest

from deployments.contract.errors import GenerationFailedError
from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, TextPart
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.pooling import PoolingRequest
from tests.serve_app.apps import (
    ALICE,
    CHAT,
    JSON,
    access_lines,
    bearer,
    client_of,
    make_app,
    question,
    ring,
)
from tests.serve_app.fake_pooler import FakeClassifier
from tests.serve_app.fakes import FakeBackend, Step

PROMPT, ANSWER = "PROMPT-7f3a", "ANSWER-9c1e"
SAID: list[Step] = [[TextDelta((1,), ANSWER)], [TextDelta((2,), ANSWER, FinishReason.STOP)]]


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def everything_logged(caplog: pytest.LogCaptureFixture) -> str:
    """Return all that a handler could print of the server's records; skip the test client's own."""
    formatter = logging.Formatter("%(message)s")
    return "\n".join(
        f"{formatter.format(record)} {vars(record)!r} "
        + ("".join(traceback.format_exception(*record.exc_info)) if record.exc_info else "")
        for record in caplog.records
        if record.name not in ("httpx", "httpcore")
    )


def marked(**fields: object) -> dict[str, object]:
    return question(messages=[{"role": "user", "content": PROMPT}], **fields)


REQUESTS: list[tuple[str, object]] = [
    (CHAT, marked()),
    (CHAT, marked(stream=True)),
    (CHAT, marked(n=2, logprobs=True)),
    (CHAT, marked(temperature=PROMPT)),
    (CHAT, marked(unknown=PROMPT)),
    (CHAT, marked(**{PROMPT: 1})),
    (CHAT, marked(stop=[PROMPT] * 99)),
    (CHAT, marked(user=PROMPT, metadata={PROMPT: PROMPT})),
    (CHAT, marked(response_format={"type": PROMPT})),
    (CHAT, question(messages=[{"role": PROMPT, "content": PROMPT}])),
    (CHAT, question(messages=PROMPT)),
    (CHAT, question(model=PROMPT)),
    (CHAT, [PROMPT]),
    ("/text-generation", {"prompt": PROMPT, "stream": False}),
    ("/text-generation", {"prompt": PROMPT}),
    ("/text-generation", {"prompt": [PROMPT]}),
    ("/v1/classify", {"input": PROMPT}),
    ("/v1/classify", {"input": [PROMPT, PROMPT], "split": {"max_chars": 3}}),
    ("/v1/classify", {"input": PROMPT * 2**18}),
    ("/v1/classify", {"input": {"text": PROMPT}}),
    ("/classify", {"input": PROMPT, PROMPT: PROMPT}),
    (f"/{PROMPT}", {}),
    (f"/v1/models/{PROMPT}", {}),
    (f"{CHAT}?q={PROMPT}", marked()),
]


async def test_neither_prompt_nor_answer_nor_key_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = []
    app = make_app(FakeBackend(SAID), ring(), classifier=FakeClassifier())
    async with client_of(app) as client:
        for path, body in REQUESTS:
            caplog.clear()
            for headers in (bearer(ALICE), bearer(PROMPT), {"x-api-key": ALICE}):
                await client.post(path, json=body, headers=headers)
            assert len(access_lines(caplog)) == 3, (path, body)
            logged = everything_logged(caplog)
            words = [word for word in (PROMPT, ANSWER, ALICE) if word in logged]
            found += [f"{word} of {path} {str(body)[:200]}" for word in words]
    assert found == []


async def test_a_broken_body_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(make_app(FakeBackend(SAID))) as client:
        for body in (f'{{"model": "{PROMPT}', f'"{PROMPT}"', f"{PROMPT}\ud800", ""):
            content = body.encode("utf-8", "surrogatepass")
            assert (await client.post(CHAT, content=content, headers=JSON)).status_code == 400
            assert PROMPT not in everything_logged(caplog), body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["at once", "in mid-answer"])
async def test_a_traceback_of_the_server_logs_no_prompt(
    caplog: pytest.LogCaptureFixture, stream: bool, moment: str
) -> None:
    class FailingBackend(FakeBackend):
        async def generate(self, request: GenerationRequest):  # type: ignore[no-untyped-def] # the fake's
            if moment == "at once":
                raise RuntimeError(f"failed at {request!r}")
            return await super().generate(request)

    backend = FailingBackend([*SAID[:1], RuntimeError("failed")])
    async with client_of(make_app(backend)) as client:
        try:
            await client.post(CHAT, json=marked(stream=stream))
        except RuntimeError:
            # The HTTP server in front logs the traceback in this way. Its own logger may not
            # propagate here: a real server in another test configures it.
            logging.getLogger(__name__).exception("Exception in ASGI application")
        else:
            pytest.fail("the bug was swallowed")
    logged = everything_logged(caplog)
    assert "Exception in ASGI application" in logged
    assert not [word for word in (PROMPT, ANSWER) if word in logged]


async def test_a_failure_of_the_engine_logs_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend([*SAID[:1], GenerationFailedError("out of memory")])
    async with client_of(make_app(backend)) as client:
        await client.post(CHAT, json=marked())
        await client.post(CHAT, json=marked(stream=True))
    logged = everything_logged(caplog)
    assert "generation_failed" in logged
    assert not [word for word in (PROMPT, ANSWER) if word in logged]


def test_the_repr_of_a_request_to_a_replica_holds_no_prompt() -> None:
    backend = FakeBackend()
    sampling = backend.description.default_sampling
    message = ChatMessage("user", (TextPart(PROMPT),))
    for prompt in ((message,), PROMPT):
        assert PROMPT not in repr(GenerationRequest("id", prompt, sampling))
    assert PROMPT not in repr(message)
    assert PROMPT not in repr(PoolingRequest("id", (PROMPT,)))
