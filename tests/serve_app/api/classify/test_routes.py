"""Classification through the whole application, with a fake classifier."""

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from deployments.contract.errors import InvalidRequestError, OverloadedError, PoolingFailedError
from serve_app.api.classify.routes import MAX_SCORES_AT_ONCE
from serve_app.api.classify.scores import MAX_NUM_SCORES
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.offenders import for_each
from tests.serve_app.apps import AppClient, Client, access_lines, client_of
from tests.serve_app.fake_pooler import MAX_MODEL_LEN, FakeClassifier
from tests.serve_app.fakes import FakeBackend, FakeClock

V1, VLLM = "/v1/classify", "/classify"
NO_CACHE = {"cached_tokens": 0}
TOO_LONG = "word " * MAX_MODEL_LEN
REPEATING = {"max_chars": 20, "overlap": 15}


@pytest.fixture
def classifier() -> FakeClassifier:
    return FakeClassifier()


@pytest.fixture
def app(
    config: AppConfig, backend: FakeBackend, classifier: FakeClassifier, clock: FakeClock
) -> FastAPI:
    return build_app(AppParts(config, {"m": backend}, clock=clock, classifiers={"c": classifier}))


@pytest.fixture
async def strict_client(classifier: FakeClassifier) -> AsyncIterator[AppClient]:
    """Yield a client of an application with low limits."""
    limits = {"max_num_texts": 3, "max_num_pieces": 4, "max_prompt_bytes": 40}
    config = AppConfig.model_validate(
        {"models": [{"id": "m", "source": "nowhere"}], "limits": limits}
    )
    app = build_app(AppParts(config, {}, clock=FakeClock(), classifiers={"c": classifier}))
    async with client_of(app) as client:
        yield client


async def classified(client: AppClient, text: object, **fields: object) -> Any:
    return (await client.ask(V1, {"model": "c", "input": text, **fields})).json()


async def refused(client: AppClient, body: object, path: str = V1) -> Any:
    return (await client.ask(path, body, 400)).json()["error"]


def scores(**each: float) -> list[dict[str, object]]:
    return [{"label": label, "score": score} for label, score in each.items()]


async def test_a_text_has_its_label_and_all_scores_best_first(client: Client) -> None:
    answer = await client.post(
        V1, json={"model": "c", "input": "ABCd"}, headers={"x-request-id": "mine"}
    )
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json() == {
        "id": "classify-mine",
        "object": "list",
        "created": 1_700_000_000,
        "model": "c",
        "data": [
            {
                "object": "classification",
                "index": 0,
                "label": "capital",
                "scores": scores(capital=0.75, small=0.25, odd=0.0),
                "truncated": False,
                "pieces": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 0,
            "total_tokens": 3,
            "prompt_tokens_details": NO_CACHE,
        },
    }


async def test_several_texts_are_one_request_to_one_replica(
    client: Client, classifier: FakeClassifier
) -> None:
    body = await classified(client, ["AB", "ab", "two words"])
    assert [(each["index"], each["label"]) for each in body["data"]] == [
        (0, "capital"),
        (1, "small"),
        (2, "small"),
    ]
    assert body["usage"]["total_tokens"] == 3 + 3 + 4
    (request,) = classifier.requests
    assert request.texts == ("AB", "ab", "two words")


async def test_a_request_without_a_model_asks_the_first_classifier(client: Client) -> None:
    for path in (V1, VLLM):
        answer = await client.post(path, json={"input": "a"})
        assert answer.json()["model"] == "c"


@pytest.mark.parametrize(("top_k", "labels"), [(1, 1), (2, 2), (3, 3), (4, 3), (10**30, 3)])
async def test_top_k_returns_the_best_labels(client: Client, top_k: int, labels: int) -> None:
    body = await classified(client, "ABCd", top_k=top_k, split={})
    best = scores(capital=0.75, small=0.25, odd=0.0)[:labels]
    assert body["data"][0]["scores"] == best
    assert body["data"][0]["pieces"][0]["scores"] == best


async def test_of_equal_scores_the_earlier_label_leads(client: Client) -> None:
    assert (await classified(client, "Ab"))["data"][0]["label"] == "small"


async def test_pieces_have_offsets_and_are_weighted_by_their_length(
    client: Client, classifier: FakeClassifier
) -> None:
    text = "ABCDEF. abcd."
    body = await classified(client, ["x", text], split={"max_chars": 9})
    one, two = body["data"]
    assert [(piece["start"], piece["end"]) for piece in one["pieces"]] == [(0, 1)]
    pieces = two["pieces"]
    assert [text[piece["start"] : piece["end"]] for piece in pieces] == ["ABCDEF. ", "abcd."]
    assert [piece["label"] for piece in pieces] == ["capital", "small"]
    assert [piece["scores"][0]["score"] for piece in pieces] == [6 / 8, 1.0]
    told = {each["label"]: each["score"] for each in two["scores"]}
    assert told == pytest.approx({"small": 7 / 13, "capital": 6 / 13, "odd": 0})
    assert two["label"] == "small"
    (request,) = classifier.requests
    assert request.texts == ("x", "ABCDEF. ", "abcd.")


async def test_aggregate_max_takes_each_label_s_highest_score(client: Client) -> None:
    body = await classified(client, "ABCDEF. abcd.", split={"max_chars": 9, "aggregate": "max"})
    assert body["data"][0]["scores"] == scores(small=1.0, capital=0.75, odd=0.0)


async def test_pieces_of_white_space_do_not_count(client: Client) -> None:
    for aggregate in ("mean", "max"):
        split = {"max_chars": 4, "aggregate": aggregate}
        (told,) = (await classified(client, "ABCD" + " " * 8, split=split))["data"]
        assert [(piece["start"], piece["end"]) for piece in told["pieces"]] == [
            (0, 4),
            (4, 8),
            (8, 12),
        ]
        assert told["scores"][0] == {"label": "capital", "score": 1.0}


async def test_a_text_of_only_white_space_is_classified(client: Client) -> None:
    for split in (None, {"max_chars": 2}, {"max_chars": 2, "aggregate": "max"}):
        (told,) = (await classified(client, " \n ", split=split))["data"]
        assert told["scores"][0] == {"label": "small", "score": 1.0}


async def test_pieces_overlap_as_requested(client: Client) -> None:
    text = "one two three four"
    body = await classified(client, text, split={"max_chars": 10, "overlap": 6})
    pieces = [text[piece["start"] : piece["end"]] for piece in body["data"][0]["pieces"]]
    assert pieces == ["one two ", "two three ", "three four"]


async def test_the_default_pieces_have_300_characters_at_most(client: Client) -> None:
    text = "It is so. " * 100
    for split in ({}, {"max_chars": None, "overlap": None, "aggregate": None}):
        pieces = (await classified(client, text, split=split))["data"][0]["pieces"]
        assert [(piece["start"], piece["end"]) for piece in pieces] == [
            (0, 300),
            (300, 600),
            (600, 900),
            (900, 1000),
        ]


async def test_a_long_text_is_split_on_a_thread_with_the_same_result(client: Client) -> None:
    text = "It is so. " * 2000
    pieces = (await classified(client, text, split={}))["data"][0]["pieces"]
    assert len(pieces) == 67
    assert "".join(text[piece["start"] : piece["end"]] for piece in pieces) == text


async def test_a_text_that_is_too_long_is_refused_with_both_remedies(client: Client) -> None:
    error = await refused(client, {"input": ["a", TOO_LONG]})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert "514 tokens" in error["message"]
    assert '"split": {"max_chars": 300}' in error["message"]
    assert '"truncate": true' in error["message"]
    assert (await refused(client, {"input": TOO_LONG}))["param"] == "input"


async def test_a_piece_that_is_too_long_is_named(client: Client) -> None:
    text = "w " * 600
    error = await refused(client, {"input": ["a", text], "split": {"max_chars": 1100}})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert "from 0 to 1100" in error["message"]
    assert "smaller split.max_chars" in error["message"]


async def test_a_text_that_is_too_long_may_be_truncated_and_the_answer_says_so(
    client: Client, classifier: FakeClassifier
) -> None:
    body = await classified(client, ["a", TOO_LONG], truncate=True)
    assert [each["truncated"] for each in body["data"]] == [False, True]
    assert body["usage"]["prompt_tokens"] == 3 + MAX_MODEL_LEN
    body = await classified(client, "w " * 600, truncate=True, split={"max_chars": 1100})
    assert body["data"][0]["truncated"]
    assert [piece["truncated"] for piece in body["data"][0]["pieces"]] == [True, False]
    assert all(request.truncate for request in classifier.requests)


async def test_other_refusals_of_a_text_keep_their_message_and_name_the_text(
    client: Client, classifier: FakeClassifier
) -> None:
    classifier.refusal = InvalidRequestError("The text has no tokens.", "input[2]")
    split = {"max_chars": 1}
    error = await refused(client, {"input": ["ab", "c"], "split": split})
    assert error["param"] == "input[1]"
    assert error["message"] == "input[1]: The text has no tokens. It is the piece from 0 to 1."
    classifier.refusal = InvalidRequestError("Send less.", "input")
    assert (await refused(client, {"input": "a"}))["message"] == "input: Send less."


@pytest.mark.parametrize("path", [V1, VLLM])
async def test_the_text_that_the_model_failed_on_is_named_by_its_place_in_the_request(
    client: Client, classifier: FakeClassifier, path: str
) -> None:
    classifier.refusal = PoolingFailedError("The model failed.", "input[0]")
    answer = await client.ask(path, {"input": "a"}, 500)
    assert answer.json()["error"]["param"] == "input"
    if path == V1:
        classifier.refusal = PoolingFailedError("The model failed.", "input[2]")
        answer = await client.post(path, json={"input": ["ab", "c"], "split": {"max_chars": 1}})
        assert answer.json()["error"]["param"] == "input[1]"


@for_each(
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", 1]}, "input[1]"),
    ({"input": None}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": ["a"] * 8193}, "input"),
    ({"top_k": 0}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"truncate": 1}, "truncate"),
    ({"split": True}, "split"),
    ({"split": {"max_chars": 0}}, "split.max_chars"),
    ({"split": {"max_chars": "300"}}, "split.max_chars"),
    ({"split": {"overlap": -1}}, "split.overlap"),
    ({"split": {"overlap": 300}}, "split.overlap"),
    ({"split": {"max_chars": 5, "overlap": 5}}, "split.overlap"),
    ({"split": {"aggregate": "median"}}, "split.aggregate"),
    ({"split": {"max_char": 5}}, "split.max_char"),
    ({"inputs": "a"}, "inputs"),
    ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
)
async def test_an_invalid_request_is_refused_by_the_field_s_name(
    fields: dict[str, Any], param: str, client: Client, classifier: FakeClassifier
) -> None:
    error = await refused(client, {"input": "a", **fields})
    assert error["param"] == param
    assert classifier.requests == []


async def test_an_unknown_field_is_refused_with_a_suggestion(client: Client) -> None:
    error = await refused(client, {"input": "a", "split": {"max_char": 5}})
    assert error["code"] == "unknown_parameter"
    assert "'max_chars'" in error["message"]


@for_each(
    ({"input": ["a"] * 4}, "max_num_texts", "input"),
    ({"input": "a" * 41}, "max_prompt_bytes", "input"),
    ({"input": ["é" * 20, "a"]}, "max_prompt_bytes", "input"),
    ({"input": "a" * 5, "split": {"max_chars": 1}}, "max_num_pieces", "split"),
    ({"input": ["aaa", "aa"], "split": {"max_chars": 1}}, "max_num_pieces", "split"),
    ({"input": "a" * 30, "split": REPEATING}, "max_prompt_bytes", "input"),
)
async def test_a_request_over_a_limit_is_refused_by_the_limit_s_name(
    fields: dict[str, Any],
    limit: str,
    param: str,
    strict_client: AppClient,
    classifier: FakeClassifier,
) -> None:
    error = await refused(strict_client, fields)
    assert f"limits.{limit}" in error["message"]
    assert error["param"] == param
    assert classifier.requests == []


async def test_a_request_at_its_limits_is_served(strict_client: AppClient) -> None:
    bodies: list[dict[str, object]] = [
        {"input": ["a"] * 3},
        {"input": "é" * 20},
        {"input": ["aaa", "a"], "split": {"max_chars": 1}},
    ]
    for body in bodies:
        assert (await strict_client.post(V1, json=body)).status_code == 200


async def test_an_answer_with_too_many_scores_is_refused_before_the_model_is_asked(
    config: AppConfig,
) -> None:
    labels = tuple(f"label {number}" for number in range(1000))
    classifier = FakeClassifier(labels=labels)
    app = build_app(AppParts(config, {}, clock=FakeClock(), classifiers={"c": classifier}))
    text = "a" * (MAX_NUM_SCORES // 1000 + 1)
    async with client_of(app) as client:
        error = await refused(client, {"input": text, "split": {"max_chars": 1}})
        assert error["param"] == "top_k"
        error = await refused(client, {"input": list(text)}, VLLM)
        assert error["param"] == "input"
        assert "top_k" not in error["message"]
        assert classifier.requests == []
        body = await classified(client, text, split={"max_chars": 1}, top_k=5)
    assert len(body["data"][0]["pieces"][0]["scores"]) == 5


@pytest.mark.parametrize("shape", [V1, VLLM])
@pytest.mark.parametrize(("num_texts", "is_on_loop"), [(10, True), (11, False)])
async def test_a_large_answer_is_serialized_off_the_event_loop(
    config: AppConfig, monkeypatch: pytest.MonkeyPatch, shape: str, num_texts: int, is_on_loop: bool
) -> None:
    labels = tuple(f"label {number}" for number in range(MAX_SCORES_AT_ONCE // 10))
    app = build_app(
        AppParts(config, {}, clock=FakeClock(), classifiers={"c": FakeClassifier(labels=labels)})
    )
    threads: list[threading.Thread] = []
    write = BaseModel.model_dump_json

    def spy(answer: BaseModel) -> str:
        threads.append(threading.current_thread())
        return write(answer)

    monkeypatch.setattr(BaseModel, "model_dump_json", spy)
    async with client_of(app) as client:
        answer = await client.post(shape, json={"model": "c", "input": ["a"] * num_texts})
    assert len(answer.json()["data"]) == num_texts
    assert (threads[0] is threading.main_thread()) is is_on_loop


async def test_vllm_s_request_is_answered_in_vllm_s_shape(client: Client) -> None:
    body = {"model": "c", "input": ["ABCd", "ab"], "truncate_prompt_tokens": None}
    answer = await client.post(VLLM, json=body, headers={"x-request-id": "mine"})
    assert answer.json() == {
        "id": "classify-mine",
        "object": "list",
        "created": 1_700_000_000,
        "model": "c",
        "data": [
            {"index": 0, "label": "capital", "probs": [0.25, 0.75, 0.0], "num_classes": 3},
            {"index": 1, "label": "small", "probs": [1.0, 0.0, 0.0], "num_classes": 3},
        ],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 0,
            "total_tokens": 6,
            "prompt_tokens_details": NO_CACHE,
        },
    }


async def test_vllm_s_truncation_is_supported(client: Client, classifier: FakeClassifier) -> None:
    assert (await refused(client, {"input": ["a", TOO_LONG]}, VLLM))["param"] == "input[1]"
    error = await refused(client, {"input": TOO_LONG}, VLLM)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "truncate_prompt_tokens: -1" in error["message"]
    body = {"input": TOO_LONG, "truncate_prompt_tokens": -1}
    assert (await client.post(VLLM, json=body)).status_code == 200
    assert [request.truncate for request in classifier.requests] == [False, False, True]


async def test_vllm_s_truncation_length_reaches_the_replica(
    client: Client, classifier: FakeClassifier
) -> None:
    for length, asked_for in ((None, None), (-1, None), (5, 5)):
        body = {"input": "a", "truncate_prompt_tokens": length}
        assert (await client.post(VLLM, json=body)).status_code == 200
        assert classifier.requests[-1].max_num_tokens == asked_for
        assert classifier.requests[-1].truncate is (length is not None)


@for_each(
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", 2**31),
    ("use_activation", False),
    ("activation", False),
    ("softmax", False),
    ("add_special_tokens", False),
    ("messages", [{"role": "user", "content": "a"}]),
    ("split", {}),
    ("top_k", 1),
    ("zzz", 1),
)
async def test_vllm_s_unsupported_fields_are_refused_by_name(
    field: str, value: object, client: Client, classifier: FakeClassifier
) -> None:
    assert (await refused(client, {"input": "a", field: value}, VLLM))["param"] == field
    assert classifier.requests == []


async def test_vllm_s_unsupported_fields_are_accepted_with_harmless_values(client: Client) -> None:
    body = {
        "input": "a",
        "user": "me",
        "request_id": "r",
        "use_activation": True,
        "add_special_tokens": True,
        "cache_salt": None,
    }
    assert (await client.post(VLLM, json=body)).status_code == 200


@pytest.mark.parametrize("path", [V1, VLLM])
async def test_a_generating_model_is_not_asked_to_classify(client: Client, path: str) -> None:
    error = await refused(client, {"model": "m", "input": "a"}, path)
    assert (error["code"], error["param"]) == ("wrong_task", "model")
    assert "'m' can't classify. Models that can: c." in error["message"]


@for_each(
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/text-generation", {"prompt": "hi"}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [1]}),
)
async def test_a_classifier_is_not_asked_for_text(
    path: str, body: dict[str, Any], client: Client
) -> None:
    error = await refused(client, {"model": "c", **body}, path)
    assert (error["code"], error["param"]) == ("wrong_task", "model")
    assert "'c' can't generate text. Models that can: m." in error["message"]
    assert client.backend.num_calls == 0


async def test_an_unknown_model_is_not_found(client: Client) -> None:
    for path in (V1, VLLM):
        error = await client.refused(path, {"model": "x", "input": "a"}, 404)
        assert "Served: m, c." in error["message"]


async def test_a_server_without_a_classifier_says_so(config: AppConfig) -> None:
    app = build_app(AppParts(config, {"m": FakeBackend()}, clock=FakeClock()))
    async with client_of(app) as client:
        error = await client.refused(V1, {"input": "a"}, 404)
    assert error["message"] == "No model here can classify."


async def test_an_overloaded_replica_is_reported_with_retry_after(
    client: Client, classifier: FakeClassifier
) -> None:
    classifier.refusal = OverloadedError("The model is overloaded.", None, 7)
    answer = await client.post(V1, json={"input": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert answer.json()["error"]["code"] == "overloaded"


async def test_the_access_log_counts_the_tokens_of_classified_texts(
    client: Client, classifier: FakeClassifier, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await classified(client, ["one two", "three"])
    classifier.refusal = PoolingFailedError("no")
    await client.post(VLLM, json={"model": "c", "input": "a"})
    answered, failed = access_lines(caplog)
    assert (answered["route"], answered["model"], answered["status"]) == (V1, "c", 200)
    assert (answered["prompt_tokens"], answered["completion_tokens"]) == (7, 0)
    assert (failed["route"], failed["status"], failed["prompt_tokens"]) == (VLLM, 500, 0)
    assert failed["error_code"] == "pooling_failed"
    assert "three" not in caplog.text


async def test_both_kinds_of_model_are_listed_shown_and_checked(
    client: Client, classifier: FakeClassifier
) -> None:
    cards = (await client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["task"], card["labels"]) for card in cards] == [
        ("m", "generate", None),
        ("c", "classify", ["small", "capital", "odd"]),
    ]
    assert (await client.get("/v1/models/c")).json() == cards[1]
    assert cards[1]["max_model_len"] == MAX_MODEL_LEN
    assert not cards[1]["accepts_images"]
    assert (await client.get("/health")).json()["models"] == ["m", "c"]
    classifier.sickness = PoolingFailedError("the worker has ended")
    answer = await client.get("/health")
    assert answer.status_code == 503
    assert "c: the worker has ended" in answer.json()["error"]["message"]
