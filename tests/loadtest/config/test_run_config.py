from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from loadtest.config.choices import ApiName
from loadtest.config.run_config import RunConfig
from tests.offenders import for_each

URL = "http://127.0.0.1:8000/v1/chat/completions"


def configured(**settings: Any) -> RunConfig:
    return RunConfig.model_validate({"url": URL, **settings})


def test_flags_and_files_give_the_same_configuration() -> None:
    by_flags = configured(queues="1,2,4", duration="1m", slo=["ttft:2000"], header=["A: b"])
    by_file = configured(queues=[1, 2, 4], duration=60, slo={"ttft": 2000}, header={"A": "b"})
    assert by_flags.model_copy(update={"slo": (), "header": ()}) == by_file.model_copy(
        update={"slo": (), "header": ()}
    )
    assert by_flags.headers() == by_file.headers() == {"A": "b"}


@for_each(
    ("/v1/chat/completions", ApiName.OPENAI_CHAT),
    ("/v1/completions", ApiName.OPENAI_COMPLETIONS),
    ("/text-generation", ApiName.TEXT_GENERATION),
    ("/v1/classify", ApiName.CLASSIFY),
    ("/classify/", ApiName.CLASSIFY),
)
def test_the_path_determines_the_api(path: str, api: ApiName) -> None:
    assert configured(url=f"http://host{path}").resolved_api() is api


@for_each(
    ({"url": "127.0.0.1:8000"}, "not a URL such as"),
    ({"url": "http://host/v1"}, "name the API with --api"),
    ({"loops": 3, "duration": 5}, "loops and duration can't be combined"),
    ({"requests": 3, "duration": 5}, "requests and duration can't be combined"),
    ({"rate": 3, "queues": 5}, "an open loop, which has neither queues"),
    ({"arrival": "constant"}, "arrival needs rate"),
    ({"duration": 5, "ramp": 5}, "ramp must be shorter than duration"),
    ({"duration": 0}, "greater than 0"),
    ({"timeout": "0s"}, "greater than 0"),
    ({"grace": "inf"}, "finite number"),
    ({"rate": "nan"}, "finite number"),
    ({"max_error_rate": "nan"}, "less than or equal to 1"),
    ({"queues": "0"}, "greater than or equal to 1"),
    ({"queues": "many"}, "valid integer"),
    ({"timeout": "soon"}, "not a duration such as"),
    ({"header": ["no colon"]}, "'Name: value'"),
    ({"header": ["A: b\r\nC: d"]}, "'Name: value'"),
    ({"header": ["A\nB: c"]}, "'Name: value'"),
    ({"header": ["A: \0"]}, "'Name: value'"),
    (
        {"url": "http://me:word@h/v1/completions", "header": ["authorization: Basic x"]},
        "can't be combined",
    ),
    ({"api": "custom"}, "needs a body"),
    ({"text_path": "a"}, "add --api custom"),
    ({"body": "{"}, "neither JSON nor the @NAME"),
    ({"body": "@nowhere.json"}, "neither JSON nor the @NAME"),
    ({"slo": ["speed:1"]}, "there is no figure 'speed'"),
    ({"fail_if": ["ttft"]}, "FIGURE.STATISTIC OPERATOR NUMBER"),
    ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE is not set"),
    ({"max_error_rate": 2}, "less than or equal to 1"),
    ({"queue": 3}, "unknown key 'queue'; did you mean 'queues'"),
)
def test_an_invalid_configuration_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        configured(**settings)


def test_a_body_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"a": "{text}"}')
    assert configured(api="custom", body=f"@{path}").body == {"a": "{text}"}


def test_a_key_from_the_environment_replaces_a_header_of_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LT_KEY", "sk-1")
    config = configured(api_key_env="LT_KEY", header=["authorization: Bearer old"])
    assert config.headers() == {"Authorization": "Bearer sk-1"}
