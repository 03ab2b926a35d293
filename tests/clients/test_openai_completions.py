"""`openai` for Python: completions, whose prompts have no chat template."""

from typing import Any

import openai
import pytest

from tests.clients.questions import MODEL, NAME, about
from tests.serve_app.local_server import LocalServer

PROMPT = "Join two or more"


def asked(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **options}


@pytest.fixture
def token_ids(local: LocalServer) -> list[int]:
    """Return the prompt's tokens, from the server's own tokenizer."""
    with local.client() as http:
        answer = http.post("/tokenize", json={"model": MODEL, "prompt": PROMPT})
    tokens: list[int] = answer.raise_for_status().json()["tokens"]
    return tokens


def test_a_text_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(**asked())
    stream = client.completions.create(**asked(), stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 8


def test_token_ids_continue_as_their_text_does(client: openai.OpenAI, token_ids: list[int]) -> None:
    text = client.completions.create(**asked())
    ids = client.completions.create(**asked(prompt=token_ids))
    assert ids.choices[0].text == text.choices[0].text
    assert ids.usage == text.usage


def test_several_prompts_are_answered_in_order(client: openai.OpenAI, token_ids: list[int]) -> None:
    alone = client.completions.create(**asked()).choices[0].text
    texts = client.completions.create(**asked(prompt=[PROMPT, "Return", PROMPT]))
    assert [choice.index for choice in texts.choices] == [0, 1, 2]
    assert [texts.choices[at].text for at in (0, 2)] == [alone, alone]
    ids = client.completions.create(**asked(prompt=[token_ids, token_ids]))
    assert [choice.text for choice in ids.choices] == [alone, alone]


def test_an_echoed_prompt_precedes_its_text(client: openai.OpenAI) -> None:
    text = client.completions.create(**asked()).choices[0].text
    echoed = client.completions.create(**asked(echo=True)).choices[0].text
    assert echoed == PROMPT + text


def test_a_prompt_is_scored_the_same_by_both_fields(
    client: openai.OpenAI, token_ids: list[int]
) -> None:
    scored = asked(echo=True, logprobs=0, max_tokens=0, extra_body={"prompt_logprobs": 0})
    (choice,) = client.completions.create(**scored).choices
    positions: Any = choice.to_dict()["prompt_logprobs"]
    own = [position[str(i)] for position, i in zip(positions[1:], token_ids[1:], strict=True)]
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, *(each["logprob"] for each in own)]
    assert all(each["rank"] >= 1 > each["logprob"] for each in own)


def test_a_suffix_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**asked(suffix="!"))
    assert caught.value.param == "suffix"


def test_tokenizing_and_detokenizing_give_the_text_back(
    local: LocalServer, token_ids: list[int]
) -> None:
    with local.client() as http:
        answer = http.post("/detokenize", json={"model": MODEL, "tokens": token_ids})
    assert answer.raise_for_status().json()["prompt"].endswith(PROMPT)


def test_usage_counts_a_prompt_s_cached_tokens(client: openai.OpenAI) -> None:
    long = about(" ".join([NAME] * 60), max_tokens=1)
    client.chat.completions.create(**long)
    again = client.chat.completions.create(**long)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens or 0
    assert 0 < cached < again.usage.prompt_tokens


def test_a_length_beyond_the_model_s_is_lowered_to_what_the_prompt_leaves(
    client: openai.OpenAI,
) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[60] * 1000, max_tokens=4096, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1000, 1048)
    assert answer.choices[0].finish_reason == "length"
