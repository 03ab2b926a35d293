"""Sends every wrong type to every field of every body, and reads what the refusals say."""

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from deployments.contract.errors import InvalidRequestError
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.chat.schema import ChatRequest
from serve_app.api.classify.schema import VllmClassifyBody
from serve_app.api.completions.schema import CompletionRequest
from serve_app.api.structured.answer_grammar import GrammarSettings
from serve_app.api.structured.structural_tag import StructuralTag
from serve_app.api.structured.structured_outputs import StructuredFields, StructuredOutputs
from serve_app.config import LimitsConfig
from serve_app.http.validation_refusal import refusal_of, with_place
from tests.offenders import every, for_each
from tests.serve_app.apps import JSON, client_of, make_app
from tests.serve_app.fake_pooler import FakeClassifier
from tests.serve_app.fakes import FakeBackend
from tests.serve_app.http.body_samples import ALL_FORMATS, ANY_OBJECT, MESSAGES, OLDER_TAG, SAMPLES

Path = tuple[int | str, ...]

PYDANTIC = re.compile(
    r"[Ii]nput(?!_)|String|List|Dict|Field|Value|Unable|Extra|dictionary|instance|discriminator"
    r"|should |valid|Python|attribute|validation|extract"
)
WRONG: list[Any] = [
    None, True, 0, -1, 1.5, 2**70, 10**400, "", "x", "x" * 300, [], [0], [None], ["x"], [[]], {},
    {"x": 1}, [{}], [{"type": "x"}], {"type": "x"}, {"type": 1},
]  # fmt: skip


def bodies_in(value: Any) -> Iterator[StrictBody]:
    """Yield a body and all bodies within it."""
    if isinstance(value, StrictBody):
        yield value
        for name in type(value).model_fields:
            yield from bodies_in(getattr(value, name))
    if isinstance(value, list):
        for each in value:
            yield from bodies_in(each)


def test_the_samples_hold_every_field_of_every_body() -> None:
    seen: defaultdict[type[StrictBody], set[str]] = defaultdict(set)
    samples: list[tuple[type[StrictBody], Any]] = [(body, sample) for _, body, sample in SAMPLES]
    samples.append((StructuralTag, ALL_FORMATS))
    for body, sample in samples:
        for each in bodies_in(body.model_validate(sample)):
            seen[type(each)] |= each.model_fields_set
    assert {body: names ^ set(body.model_fields) for body, names in seen.items()} == {
        body: set() for body in seen
    }


def values_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield all values with their paths, but none in a JSON schema, which has its own messages."""
    yield path, value
    if isinstance(value, dict | list) and value != ANY_OBJECT:
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from values_in(value[key], (*path, key))


def changed(sample: Any, path: Path, value: Any) -> Any:
    """Return a copy of the sample with another value at a path."""
    if not path:
        return value
    copied = copy.deepcopy(sample)
    parent = copied
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    return copied


def without(sample: dict[str, Any], path: Path) -> Any:
    """Return a copy of the sample that lacks the value at a path."""
    copied = copy.deepcopy(sample)
    parent: Any = copied
    for step in path[:-1]:
        parent = parent[step]
    del parent[path[-1]]
    return copied


def mutants(sample: dict[str, Any]) -> Iterator[Any]:
    for path, value in values_in(sample):
        is_schema = value == ANY_OBJECT
        wrongs = [wrong for wrong in WRONG if not (is_schema and isinstance(wrong, dict))]
        yield from (changed(sample, path, wrong) for wrong in wrongs)
        if path:
            yield without(sample, path)
        if isinstance(value, dict) and not is_schema:
            yield changed(sample, (*path, "zzz"), 1)


async def refusals_of_mutants(
    client: httpx.AsyncClient, route: str, sample: dict[str, Any]
) -> dict[str, str | None]:
    """Send a body with each mistake; return the parameter that each message is about."""
    found: dict[str, str | None] = {}
    for mutant in mutants(sample):
        answer = await client.post(route, content=json.dumps(mutant), headers=JSON)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert answer.status_code in (400, 404), (mutant, error)
            # Anthropic's shape has no `param`: the message alone has to name the place.
            found[error["message"]] = error.get("param", first_path(error["message"]))
    return found


@pytest.mark.slow
async def test_every_refusal_is_in_plain_words_and_names_its_place() -> None:
    app = make_app(FakeBackend(tool_call_format="hermes"), classifier=FakeClassifier())
    async with client_of(app) as client:
        for case in every(SAMPLES):
            with case as (route, _, sample):
                assert (await client.post(route, json=sample)).status_code == 200
                told = await refusals_of_mutants(client, route, sample)
                assert len(told) > len(sample)
                assert [each for each in told.items() if not is_plain(*each)] == []


@pytest.mark.slow
@pytest.mark.parametrize("tag", [ALL_FORMATS, OLDER_TAG])
def test_a_structural_tag_given_as_text_is_refused_in_the_same_plain_words(
    tag: dict[str, Any],
) -> None:
    words: set[str] = set()
    for mutant in mutants(tag):
        body = {"structured_outputs": {"structural_tag": mutant}}
        try:
            StructuredFields.model_validate(body)
        except ValidationError as error:
            refused = refusal_of(error.errors(include_url=False), body)
            words.add(refused.message)
            assert is_plain(with_place(refused.message, refused.param), refused.param)
            if isinstance(mutant, dict):
                given = StructuredOutputs(structural_tag=json.dumps(mutant))
                with pytest.raises(InvalidRequestError) as as_text:
                    given.to_grammar(GrammarSettings(LimitsConfig()))
                assert (as_text.value.message, as_text.value.param) == (
                    refused.message,
                    refused.param,
                )
    assert len(words) > len(list(values_in(tag)))


def first_path(message: str) -> str | None:
    """Return the place that a message begins with; None if it begins with a sentence."""
    if message.startswith("The model"):
        return "model"
    found = re.match(r"(?:Unknown parameter: ')?([a-z][\w.\[\]]*)", message)
    return None if found is None else found[1].rstrip(".")


def is_plain(message: str, param: str | None) -> bool:
    """Return whether a message has none of pydantic's phrases, and names its parameter."""
    is_placed = with_place(message, param) == message and (param or "The body" in message)
    return bool(is_placed) and not PYDANTIC.search(message.replace(param or "", ""))


@for_each(
    (ChatRequest, 5, None, "The body must be an object."),
    (ChatRequest, {}, "messages", "messages is missing."),
    (ChatRequest, {"messages": []}, "messages", "messages must not be empty."),
    (ChatRequest, {"temperature": "warm"}, "temperature", "temperature must be a number."),
    (ChatRequest, {"temperature": 10**400}, "temperature",
     "temperature must be a smaller number."),
    (ChatRequest, {"max_tokens": 1.5}, "max_tokens", "max_tokens must be a whole number."),
    (ChatRequest, {"stream": 1}, "stream", "stream must be true or false."),
    (ChatRequest, {"logit_bias": []}, "logit_bias", "logit_bias must be an object."),
    (ChatRequest, {"stop": 5}, "stop", "stop must be a string or a list of strings."),
    (ChatRequest, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content",
     "messages[0].content must be a string or a list of parts."),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
     "messages[0].content[0].type",
     "messages[0].content[0].type must be 'text', 'image_url' or 'refusal'."),
    (ChatRequest, {"messages": [{"role": "user", "content": [{}]}]},
     "messages[0].content[0].type", "messages[0].content[0].type is missing."),
    (ChatRequest, {"messages": [{"role": "user", "contnet": "a"}]}, "messages[0].contnet",
     "Unknown parameter: 'messages[0].contnet'. Did you mean 'content'?"),
    (ChatRequest, {"tools": "f"}, "tools", "tools must be a list."),
    (ChatRequest, {"guided_json": 5}, "guided_json",
     "guided_json must be an object or a string."),
    (ChatRequest, {"guided_json": {}}, "guided_json", "guided_json must not be empty."),
    (ChatRequest, {"guided_json": ""}, "guided_json", "guided_json must not be empty."),
    (ChatRequest, {"structured_outputs": {"json_object": False}},
     "structured_outputs.json_object", "structured_outputs.json_object must be true."),
    (ChatRequest, {"structured_outputs": {"structural_tag": ""}},
     "structured_outputs.structural_tag",
     "structured_outputs.structural_tag must not be empty."),
    (ChatRequest, {"structural_tag": "[]"}, "structural_tag",
     "structural_tag: The structural tag can't be honoured: it is not a JSON object."),
    (ChatRequest, {"structural_tag": '{"type": "x"}'}, "structural_tag.type",
     "structural_tag.type must be 'structural_tag'."),
    (ChatRequest, {"chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a",
     "chat_template_kwargs.a must be true, false, null, a number between -1000000 and 1000000, "
     "or a string of at most 1024 characters."),
    (ChatRequest, {"chat_template_kwargs": {"x" * 65: 1}}, "chat_template_kwargs",
     "The names in chat_template_kwargs must have at most 64 characters."),
    (ChatRequest, {"max_completion_tokens": 4, "min_tokens": 5}, "min_tokens",
     "min_tokens must be at most max_completion_tokens, which is 4"),
    (VllmClassifyBody, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens",
     "truncate_prompt_tokens must be -1 or at least 1."),
    (VllmClassifyBody, {"truncate_prompt_tokens": "x"}, "truncate_prompt_tokens",
     "truncate_prompt_tokens must be -1 or a whole number."),
    (CompletionRequest, {"prompt": 5}, "prompt",
     "prompt must be a string, a list of strings, token ids, or a list of lists of token ids."),
)  # fmt: skip
async def test_a_refusal_says_what_its_field_must_be(
    body: type[StrictBody], fields: Any, param: str | None, message: str
) -> None:
    routes = {each: route for route, each, _ in SAMPLES}
    needed: dict[str, Any] = {"model": "m"}
    needed["prompt" if body is CompletionRequest else "messages"] = MESSAGES
    if body is VllmClassifyBody:
        needed = {"model": "m", "input": "a"}
    sent = {**needed, **fields} if isinstance(fields, dict) else fields
    if message == f"{param} is missing.":
        sent.pop(param, None)
    async with client_of(make_app(FakeBackend(tool_call_format="hermes"))) as client:
        error = (await client.post(routes[body], json=sent)).json()["error"]
    assert (error["param"], error["message"]) == (param, message)


@for_each(
    ("n must be at most 4.", "n", "n must be at most 4."),
    ("It must not be so.", "n", "n: It must not be so."),
    ("The prompt is too long.", "prompt", "The prompt is too long."),
    ("The content is empty.", "messages[0].content",
     "messages[0].content: The content is empty."),
    ("Send less.", None, "Send less."),
)  # fmt: skip
def test_a_message_that_does_not_name_its_parameter_gets_it_in_front(
    message: str, param: str | None, placed: str
) -> None:
    assert with_place(message, param) == placed


def test_a_refusal_quotes_only_a_little_of_a_long_name() -> None:
    error = {"type": "wrong_type", "loc": (), "ctx": {"expected": "x" * 600}, "input": {}}
    assert len(refusal_of([error], {}).message) <= 256
