import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from deployments.channel import go_ahead
from deployments.compute.cpu.linear.quantization import QUANTIZATIONS
from deployments.compute.cpu.linear.quantized_linear import quantization_obstacle
from deployments.contract.errors import (
    ContextLengthExceededError,
    GenerationAbortedError,
    GenerationFailedError,
    InvalidRequestError,
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import (
    Accepted,
    GenerationEvent,
    GenerationRequest,
    Refused,
    RequestGroup,
    Started,
    StreamKey,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.contract.messages import ChatMessage, ImagePart, TextPart, Tool
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.file_description import describe_files
from deployments.generator.prompt_encoder import EncodedPrompt
from deployments.generator_replica import BATCH_WAIT_TIMEOUT_S, MAX_BATCH_SIZE, GeneratorReplica
from deployments.plan.memory_budget import DeviceMemoryError
from deployments.replica.metrics import StreamClock
from deployments.text_generator import TextGenerator
from serve_app.http.request_record import CURRENT_RECORD, RequestRecord
from tests.deployments.local_handle import local_backend, read
from tests.deployments.tiny_folder import CHAT_TEMPLATE, save_text_model, spec
from tests.engine.tiny_models import byte_tokenizer, generate, wide_qwen2
from tests.engines import EngineName, keys_of, only_raystream
from tests.failing import failing
from tests.offenders import every
from tests.serve_app.local_replica import GENERATORS

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("qwen2"), wide_qwen2())


@pytest.fixture(scope="module")
def generator(folder: Path, engine_name: EngineName) -> Iterator[GeneratorReplica]:
    made = GENERATORS[engine_name](spec(folder, **keys_of(engine_name)))
    yield made
    made.__del__()


def user(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", (TextPart(text),)),)


def joined(deltas: list[TextDelta]) -> tuple[list[int], str]:
    return [i for d in deltas for i in d.token_ids], "".join(d.text for d in deltas)


async def test_the_first_message_is_only_accepted_with_the_prompt_s_length(
    generator: GeneratorReplica,
) -> None:
    request = GenerationRequest("r", "Hello", GREEDY, stream=StreamKey("nobody", 0))
    first = await anext(aiter(generator.generate(request)))
    channel = await generator._channels.address()
    fingerprint = (await generator.describe()).system_fingerprint
    (encoded,) = generator._encoder.encode([request])
    assert isinstance(encoded, EncodedPrompt)
    assert first == [
        Accepted(
            5,
            generator._replica_id,
            channel=channel,
            fingerprint=fingerprint,
            prompt_digest=encoded.digest,
            start_s=generator._phases.total_s,
        )
    ]
    assert channel.host == "127.0.0.1"


async def test_a_chat_is_rendered_by_the_model_s_template(generator: GeneratorReplica) -> None:
    token_ids, _ = joined(await read(generator, GenerationRequest("r", user("Hi"), GREEDY)))
    text = "<special1>user\nHi<special2><special1>assistant\n"
    prompt = byte_tokenizer().encode(text, add_special_tokens=False)
    assert token_ids == generate(wide_qwen2, prompt, 8)


async def test_requests_that_arrive_together_are_answered_as_by_themselves(
    generator: GeneratorReplica,
) -> None:
    prompts: list[str | tuple[int, ...] | tuple[ChatMessage, ...]] = [
        "one", (60, 61), user("two"), "three" * 9, user("four"), "five",
    ]  # fmt: skip
    requests = [GenerationRequest(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    together = await asyncio.gather(*(read(generator, request) for request in requests))
    alone = [await read(generator, request) for request in requests]
    assert [joined(deltas) for deltas in together] == [joined(deltas) for deltas in alone]


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (GenerationRequest("r", "x" * 200, GREEDY), ContextLengthExceededError, "128 tokens"),
        (GenerationRequest("r", (999,), GREEDY), InvalidRequestError, "from 0 to 299"),
        (GenerationRequest("r", "", GREEDY), InvalidRequestError, "empty"),
        (
            GenerationRequest("r", (ChatMessage("user", (ImagePart(b"x"),)),), GREEDY),
            InvalidRequestError,
            "takes no images",
        ),
        (
            GenerationRequest("r", (ChatMessage("user", (TextPart("\ud800"),)),), GREEDY),
            InvalidRequestError,
            "not valid Unicode",
        ),
    ],
)
async def test_only_the_request_that_cannot_run_is_refused(
    generator: GeneratorReplica, request_: GenerationRequest, error: type[RaystreamError], says: str
) -> None:
    good = GenerationRequest("good", "fine", GREEDY)
    refused, answered = await asyncio.gather(
        read(generator, request_), read(generator, good), return_exceptions=True
    )
    assert isinstance(refused, error)
    assert says in str(refused)
    assert isinstance(answered, list)
    assert answered[-1].finish_reason is not None


async def test_two_requests_with_the_same_id_are_two_sequences(generator: GeneratorReplica) -> None:
    requests = [GenerationRequest("same", prompt, GREEDY) for prompt in ("one", "another")]
    together = await asyncio.gather(*(read(generator, request) for request in requests))
    alone = [await read(generator, request) for request in requests]
    assert [joined(deltas) for deltas in together] == [joined(deltas) for deltas in alone]


async def test_a_closed_stream_makes_room(generator: GeneratorReplica) -> None:
    endless = SamplingParams(temperature=0, ignore_eos=True)
    backend = local_backend(generator)
    async with aclosing(backend):
        streams = [await backend.send(GenerationRequest(f"r{i}", "go", endless)) for i in range(4)]
        for stream in streams:
            await anext(aiter(stream))
        for stream in streams:
            await stream.aclose()
    async with asyncio.timeout(30):
        while generator._engine.stats.num_running:
            await generator.ping()


async def test_a_resumed_stream_continues_with_the_same_tokens(generator: GeneratorReplica) -> None:
    sampling = SamplingParams(temperature=1, seed=5, max_tokens=12, ignore_eos=True)
    whole = await read(generator, GenerationRequest("r", "again", sampling))
    token_ids, text = joined(whole)
    for num_done in (1, 5, 11):
        rest = await read(
            generator, GenerationRequest("r", "again", sampling, tuple(token_ids[:num_done]))
        )
        assert joined(rest)[0] == token_ids[num_done:]
        assert text.endswith(joined(rest)[1])
        assert rest[-1].finish_reason is FinishReason.LENGTH


async def test_a_resumed_stream_s_prompt_is_not_counted_again_and_its_answer_is_whole(
    generator: GeneratorReplica,
) -> None:
    sampling = SamplingParams(temperature=1, seed=5, max_tokens=12, ignore_eos=True)
    request = GenerationRequest("r", "again", sampling)
    token_ids, _ = joined(await read(generator, request))

    async def gained(request: GenerationRequest) -> dict[str, float]:
        """Return what the sums of the metrics gain by a request."""
        before = (await generator.read_metrics()).series
        await read(generator, request)
        after = (await generator.read_metrics()).series
        return {name: after[name][0][1][-1] - before[name][0][1][-1] for name in after}

    whole = await gained(request)
    rest = replace(request, generated_token_ids=tuple(token_ids[:5]), is_resumed=True)
    resumed = await gained(rest)
    assert (whole["vllm_prompt_tokens_total"], resumed["vllm_prompt_tokens_total"]) == (5, 0)
    generated = "vllm_generation_tokens_total"
    assert (whole[generated], resumed[generated]) == (12, 7)
    for name in ("vllm_request_generation_tokens", "vllm_request_prompt_tokens"):
        assert whole[name] == resumed[name] > 0
    assert whole["vllm_time_to_first_token_seconds"] > 0
    assert resumed["vllm_time_to_first_token_seconds"] == 0


async def test_times_begin_when_the_client_s_request_arrived(generator: GeneratorReplica) -> None:
    names = ("time_to_first_token", "e2e_request_latency", "request_queue_time")

    async def sums() -> list[float]:
        series = (await generator.read_metrics()).series
        return [series[f"vllm_{name}_seconds"][0][1][-1] for name in names]

    before = await sums()
    arrived_1000_s_ago = RequestRecord("r", "POST", lambda: 1000.0, 0.0)
    token = CURRENT_RECORD.set(arrived_1000_s_ago)
    try:
        await read(generator, GenerationRequest("r", "Hello", GREEDY))
    finally:
        CURRENT_RECORD.reset(token)
    gained = [late - early for late, early in zip(await sums(), before, strict=True)]
    assert all(1000 <= each < 1100 for each in gained)
    first_token_s, whole_s, queue_s = gained
    assert queue_s < first_token_s < whole_s


async def test_defaults_come_from_the_model_s_generation_config(
    generator: GeneratorReplica,
) -> None:
    sampling = (await generator.describe()).default_sampling
    assert sampling == SamplingParams(
        temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1
    )


async def test_a_parameter_that_the_model_rejects_is_named(generator: GeneratorReplica) -> None:
    sampling = SamplingParams(max_tokens=8, logit_bias=((300, 1.0),))
    with pytest.raises(InvalidRequestError, match="names token 300") as caught:
        await read(generator, GenerationRequest("r", "x", sampling))
    assert caught.value.param == "logit_bias"


async def test_each_token_has_its_logprobs(generator: GeneratorReplica) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=8, top_logprobs=2)
    deltas = await read(generator, GenerationRequest("r", "x", sampling))
    told = [logprobs for delta in deltas for logprobs in delta.logprobs]
    assert [logprobs.chosen.token_id for logprobs in told] == joined(deltas)[0]
    assert all(logprobs.top[0] == logprobs.chosen for logprobs in told)


async def test_a_health_check_runs_the_engine(generator: GeneratorReplica) -> None:
    before = generator._engine.stats.num_steps
    await generator.check_health()
    await generator.check_health()
    assert generator._engine.stats.num_steps > before


@pytest.mark.slow
async def test_a_dead_engine_fails_health_and_requests(folder: Path) -> None:
    generator = TextGenerator(spec(folder))
    try:
        await generator.check_health()
        generator._engine.stop()
        with pytest.raises(RuntimeError, match="ended"):
            await generator.check_health()
        with pytest.raises(GenerationAbortedError, match="stopped"):
            await read(generator, GenerationRequest("r", "x", GREEDY))
    finally:
        generator.__del__()  # while there is a loop: its socket is closed there


async def test_user_config_sets_the_batching_or_changes_nothing_and_says_so(
    generator: GeneratorReplica, caplog: pytest.LogCaptureFixture
) -> None:
    batching: Any = generator._encode
    generator.reconfigure({"max_batch_size": 8, "batch_wait_timeout_s": 0.001})
    for nonsense, why in (
        ({"max_batch_size": 3, "max_batch_sise": 8}, "unknown keys: max_batch_sise; known are"),
        ({"batch_wait_timeout_s": 1, "max_batch_size": "many"}, "max_batch_size must be a whole"),
        ("many", "it must be a mapping"),
    ):
        generator.reconfigure(nonsense)
        assert batching._get_max_batch_size() == 8
        assert batching._get_batch_wait_timeout_s() == 0.001
        refused = (await generator.inspect()).refused_user_config
        assert refused is not None
        assert why in refused
        assert f"the settings stay as they are: {refused}" in caplog.messages[-1]
    generator.reconfigure({})
    assert (await generator.inspect()).refused_user_config is None
    assert batching._get_max_batch_size() == MAX_BATCH_SIZE
    assert batching._get_batch_wait_timeout_s() == BATCH_WAIT_TIMEOUT_S


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="can't load") as caught:
        TextGenerator(spec(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_served", [True, False])
def test_a_model_without_an_embedding_for_each_token_is_refused(
    tmp_path: Path, is_served: bool
) -> None:
    save_text_model(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.add_tokens(["fox"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no embedding for, 'fox' with id 30"):
        (TextGenerator if is_served else describe_files)(spec(tmp_path))


def test_a_model_that_does_not_fit_is_refused_with_advice(folder: Path) -> None:
    with pytest.raises(DeviceMemoryError, match="lower max_model_len or max_batched_tokens"):
        TextGenerator(spec(folder, max_batched_tokens=10**12))


@pytest.mark.slow
@pytest.mark.parametrize(("prefix_caching", "num_cached"), [(True, 39), (False, 0)])
async def test_a_repeated_prompt_is_reused_unless_prefix_caching_is_off(
    folder: Path, prefix_caching: bool, num_cached: int
) -> None:
    generator = TextGenerator(spec(folder, prefix_caching=prefix_caching))
    deltas = [
        await read(generator, GenerationRequest(name, "x" * 40, SamplingParams(max_tokens=2)))
        for name in ("first", "second")
    ]
    found = [sum(delta.num_cached_tokens for delta in each) for each in deltas]
    assert found == [0, num_cached]
    generator.__del__()


@only_raystream("`quantization` is raystream's own; vLLM has its own in `engine_args`")
@pytest.mark.skipif(quantization_obstacle() is not None, reason=str(quantization_obstacle()))
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.slow
async def test_a_replica_answers_with_quantized_weights(
    folder: Path, generator: GeneratorReplica, caplog: pytest.LogCaptureFixture, quantization: str
) -> None:
    caplog.set_level("INFO")
    quantized = TextGenerator(spec(folder, quantization=quantization))
    assert f"float32 with {quantization} weights" in caplog.text
    assert quantized._facts.memory.weight_bytes < generator._facts.memory.weight_bytes * 2 / 3
    deltas = await read(quantized, GenerationRequest("r", user("hello"), GREEDY))
    assert deltas[-1].finish_reason is not None
    quantized.__del__()


async def test_an_answer_follows_its_grammar(generator: GeneratorReplica) -> None:
    grammar = LLMatcher.grammar_from_json_schema('{"enum": ["red", "green"]}')
    params = replace(GREEDY, grammar=grammar, max_tokens=20)
    deltas = await read(generator, GenerationRequest("r", "Hello", params))
    assert joined(deltas)[1] in ('"red"', '"green"')
    assert deltas[-1].finish_reason is FinishReason.STOP


async def test_a_grammar_that_the_model_cannot_follow_is_refused(
    generator: GeneratorReplica,
) -> None:
    params = replace(GREEDY, grammar="start: <|no_such_token|>")
    with pytest.raises(InvalidRequestError) as refused:
        await read(generator, GenerationRequest("r", "Hello", params))
    assert refused.value.param == "response_format"


async def test_text_becomes_tokens_and_text_again_without_an_engine_step(
    generator: GeneratorReplica,
) -> None:
    num_steps = generator._engine.stats.num_steps
    told = await generator.tokenize(TokenizeRequest(user("Hi")))
    assert isinstance(told, TokenizedPrompt)
    assert await generator.detokenize(told.token_ids) == (
        "<special1>user\nHi<special2><special1>assistant\n"
    )
    assert generator._engine.stats.num_steps == num_steps


LOOK = ChatMessage("user", (ImagePart(b"x"),))
REFUSED_PROMPTS: list[tuple[GenerationRequest, str]] = [
    (GenerationRequest("r", "x" * 200, GREEDY), "prompt"),
    (GenerationRequest("r", "x" * 120, replace(GREEDY, max_tokens=9), length_param="n"), "n"),
    (GenerationRequest("r", (999,), GREEDY), "prompt"),
    (GenerationRequest("r", "\ud800", GREEDY), "prompt"),
    (GenerationRequest("r", (LOOK,), GREEDY), "messages"),
    (GenerationRequest("r", user("x"), GREEDY, template_kwargs=(("no", 1),)),
     "chat_template_kwargs.no"),
    (GenerationRequest("r", user("x"), GREEDY, tools=(Tool("f", None, "{}"),)), "tools"),
    (GenerationRequest("r", "x", replace(GREEDY, logit_bias=((300, 1.0),))), "logit_bias"),
    (GenerationRequest("r", "x", replace(GREEDY, grammar="start: <|no|>")), "response_format"),
    (GenerationRequest("r", "x", GREEDY, group=RequestGroup("g", 10**6, is_first=True)), ""),
]  # fmt: skip


@pytest.mark.parametrize("num_deaths", [0, 1])
async def test_a_client_s_fault_is_answered_and_not_raised(
    generator: GeneratorReplica, num_deaths: int
) -> None:
    for case in every(REFUSED_PROMPTS):
        with case as (request, param):
            events = aiter(generator.generate(replace(request, num_deaths=num_deaths)))
            if num_deaths and not param:
                pass  # it is refused before its turn has come
            elif num_deaths:
                let_begin(generator, await anext(events))
            ((refusal,),) = [told async for told in events]
            assert isinstance(refusal, Refused)
            assert isinstance(refusal.error, InvalidRequestError)
            assert (refusal.error.param or "") == param
            assert refusal.replica_id == generator._replica_id
            assert not refusal.is_full
    assert generator._admission.num_running == generator._admission.num_waiting == 0


async def test_a_fault_in_what_is_to_be_tokenized_is_answered_and_not_raised(
    generator: GeneratorReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def errors() -> list[type[RaystreamError]]:
        answers = [
            await generator.tokenize(TokenizeRequest("\ud800")),
            await generator.tokenize(TokenizeRequest((LOOK,))),
            await generator.detokenize((9999,)),
        ]
        return [type(each.error) for each in answers if isinstance(each, Refused)]

    assert await errors() == [InvalidRequestError] * 3
    monkeypatch.setattr(generator._token_executor, "_max_num_calls", 0)
    assert await errors() == [OverloadedError] * 3


async def test_a_fault_of_ours_is_raised(
    generator: GeneratorReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator._encoder.template, "render", failing(KeyError("a bug")))
    with pytest.raises(GenerationFailedError):
        await anext(aiter(generator.generate(GenerationRequest("r", user("x"), GREEDY))))
    with pytest.raises(KeyError):
        await generator.tokenize(TokenizeRequest(user("x")))


@pytest.mark.parametrize(("prompt", "num_tokens"), [("x", 16), ("x" * 120, 8)])
async def test_a_default_length_is_cut_to_the_rest_of_the_model_s_length(
    generator: GeneratorReplica, prompt: str, num_tokens: int
) -> None:
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    request = GenerationRequest("r", prompt, sampling, default_max_tokens=16)
    deltas = await read(generator, request)
    assert len(joined(deltas)[0]) == num_tokens
    assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_a_request_s_length_overrides_the_generation_config_s(
    generator: GeneratorReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator._facts.generation_config, "max_new_tokens", 5)
    for asked, num_tokens in ((None, 5), (9, 9)):
        sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=asked)
        deltas = await read(generator, GenerationRequest("r", "x", sampling))
        assert len(joined(deltas)[0]) == num_tokens


async def test_numbers_beyond_a_tensor_s_range_are_handled(generator: GeneratorReplica) -> None:
    sampling = SamplingParams(temperature=1e-300, top_k=10**30, min_tokens=10**30, top_p=1e-300)
    deltas = await read(generator, GenerationRequest("r", "x" * 120, sampling))
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def let_begin(generator: GeneratorReplica, told: list[GenerationEvent]) -> None:
    """Give a suspect its go-ahead, as the ingress's channel does."""
    (started,) = told
    assert isinstance(started, Started)
    generator._channels.go_aheads.give(started.number)


async def test_suspects_run_one_at_a_time_beside_the_other_requests(
    generator: GeneratorReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = asyncio.Event()
    compile_grammar = generator._compile_grammar

    async def hold_suspects(sequence: SequenceRequest) -> SequenceRequest:
        if sequence.is_resumed:
            await held.wait()
        return await compile_grammar(sequence)

    monkeypatch.setattr(generator, "_compile_grammar", hold_suspects)
    suspect = GenerationRequest(
        "s", "go", GREEDY, is_resumed=True, num_deaths=1, stream=StreamKey("nobody", 0)
    )
    first, second = (aiter(generator.generate(suspect)) for _ in range(2))
    let_begin(generator, await anext(first))
    waiting = asyncio.ensure_future(anext(second))
    assert (await read(generator, GenerationRequest("r", "fine", GREEDY)))[-1].finish_reason
    assert not waiting.done()
    held.set()
    (accepted,) = await anext(first)
    assert isinstance(accepted, Accepted)
    async with asyncio.timeout(30):
        assert isinstance((await waiting)[0], Started)  # the first has gained a token
    await first.aclose()  # type: ignore[attr-defined] # a generator
    await second.aclose()  # type: ignore[attr-defined] # a generator
    async with asyncio.timeout(30):
        third = aiter(generator.generate(suspect))
        assert isinstance((await anext(third))[0], Started)
    await third.aclose()  # type: ignore[attr-defined] # a generator


async def test_a_suspect_that_waits_for_its_turn_is_not_started(
    generator: GeneratorReplica,
) -> None:
    suspect = GenerationRequest("s", "go", GREEDY, is_resumed=True, num_deaths=1)
    with ExitStack() as stack:
        for _ in range(generator.max_num_seqs):
            stack.enter_context(generator._admission.permit(GenerationRequest("r", "x", GREEDY)))
        events = aiter(generator.generate(suspect))
        started = asyncio.ensure_future(anext(events))
        while not generator._admission.num_waiting:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        assert not started.done()
    assert isinstance((await started)[0], Started)
    await events.aclose()  # type: ignore[attr-defined] # a generator


async def test_a_suspect_without_its_go_ahead_does_not_begin_and_gives_up_its_turn(
    generator: GeneratorReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(go_ahead, "TICK_S", 0.0)
    encoded: list[object] = []
    monkeypatch.setattr(generator, "_encode", encoded.append)
    suspect = GenerationRequest("s", "go", GREEDY, is_resumed=True, num_deaths=1)
    for _ in range(2):
        found = [event async for (event,) in generator.generate(suspect)]
        assert [type(event) for event in found] == [Started]
    assert not encoded
    assert generator._admission.num_running == 0


async def test_an_error_of_a_metric_loses_no_delta(
    generator: GeneratorReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = GenerationRequest("r", "Hello", GREEDY)
    undisturbed = joined(await read(generator, request))
    errors: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))

    monkeypatch.setattr(StreamClock, "observe", failing(ValueError("no such tag")))
    assert joined(await read(generator, request)) == undisturbed
    loop.set_exception_handler(None)
    assert {str(context["exception"]) for context in errors} == {"no such tag"}


async def test_a_replica_that_hung_and_was_given_up_is_not_healthy(
    generator: GeneratorReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await generator.check_health()
    monkeypatch.setattr(generator._channels, "was_given_up", True)
    for _ in range(3):  # Serve wants to hear it several times
        with pytest.raises(ReplicaUnavailableError, match="hung"):
            await generator.check_health()


async def test_a_suspect_s_answer_is_the_same(generator: GeneratorReplica) -> None:
    request = GenerationRequest("r", "Hello", GREEDY)
    alone = await read(generator, request)
    for num_deaths in (1, 2):
        suspect = replace(request, num_deaths=num_deaths)
        assert joined(await read(generator, suspect)) == joined(alone)


@only_raystream("the thread of raystream's engine ends; vLLM's processes do in tests of their own")
async def test_an_engine_that_has_ended_starts_no_suspect(
    generator: GeneratorReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(generator, TextGenerator)
    monkeypatch.setattr(type(generator._engine._thread), "is_alive", False)
    suspect = GenerationRequest("s", "go", GREEDY, num_deaths=1)
    with pytest.raises(ReplicaUnavailableError, match="failed"):
        await anext(aiter(generator.generate(suspect)))
    monkeypatch.setattr(generator._engine, "_is_stopped", True)
    with pytest.raises(GenerationAbortedError, match="stopped"):
        await anext(aiter(generator.generate(suspect)))


async def test_an_operator_sees_the_plan_and_the_counts(folder: Path) -> None:
    generator = TextGenerator(spec(folder))
    try:
        await read(generator, GenerationRequest("r", "x" * 40, GREEDY))
        resumed = GenerationRequest(
            "s", "x" * 40, GREEDY, generated_token_ids=(60,), is_resumed=True
        )
        await read(generator, resumed)
        report = await generator.inspect()
    finally:
        generator.__del__()
    plan, work = report.plan, report.work
    assert plan == generator._facts.memory
    assert plan.weight_bytes
    assert plan.usable_bytes > plan.kv_bytes > 0 < plan.num_kv_tokens
    assert (work.num_running, work.num_waiting, work.num_preempted) == (0, 0, 0)
    assert (work.num_moved_in, work.kv_usage) == (1, 0)
    assert work.num_prompt_tokens
    assert work.num_cached_tokens
    assert work.num_cached_tokens < work.num_prompt_tokens
