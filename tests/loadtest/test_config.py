import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from loadtest.apis.by_path import ApiName
from loadtest.config import RunConfig
from loadtest.load.plans import plans_of
from loadtest.load.published_config import published_config

URL = "http://127.0.0.1:8000/v1/chat/completions"


def configured(**settings: Any) -> RunConfig:
    return RunConfig.model_validate({"url": URL, **settings})


def test_flags_and_files_write_the_same_things() -> None:
    by_flags = configured(queues="1,2,4", duration="1m", slo=["ttft:2000"], header=["A: b"])
    by_file = configured(queues=[1, 2, 4], duration=60, slo={"ttft": 2000}, header={"A": "b"})
    assert by_flags.model_copy(update={"slo": (), "header": ()}) == by_file.model_copy(
        update={"slo": (), "header": ()}
    )
    assert by_flags.headers() == by_file.headers() == {"A": "b"}


def test_the_default_is_five_queues_of_twenty_loops_behind_a_warm_up() -> None:
    [plan] = plans_of(configured())
    assert (plan.num_queues, plan.num_loops, plan.num_warmups) == (5, 20, 1)
    assert plan.num_counted == 100
    assert plan.title == "5 queues"


def test_a_rate_without_an_end_sends_a_hundred() -> None:
    [plan] = plans_of(configured(rate=2.5))
    assert (plan.num_queues, plan.num_loops, plan.num_requests) == (None, None, 100)
    assert plan.title == "2.5 requests/s"


def test_a_sweep_is_repeated_as_a_whole() -> None:
    plans = plans_of(configured(queues="1,8", repeat=2, duration="5s"))
    assert [(plan.index, plan.repeat, plan.num_queues) for plan in plans] == [
        (0, 0, 1),
        (1, 0, 8),
        (2, 1, 1),
        (3, 1, 8),
    ]
    assert {plan.num_loops for plan in plans} == {None}


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", ApiName.OPENAI_CHAT),
        ("/v1/completions", ApiName.OPENAI_COMPLETIONS),
        ("/text-generation", ApiName.TEXT_GENERATION),
        ("/v1/classify", ApiName.CLASSIFY),
        ("/classify/", ApiName.CLASSIFY),
    ],
)
def test_the_path_tells_the_api(path: str, api: ApiName) -> None:
    assert configured(url=f"http://host{path}").resolved_api() is api


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "127.0.0.1:8000"}, "no URL such as"),
        ({"url": "http://host/v1"}, "say which it is with --api"),
        ({"loops": 3, "duration": 5}, "loops and duration exclude each other"),
        ({"requests": 3, "duration": 5}, "requests and duration exclude each other"),
        ({"rate": 3, "queues": 5}, "an open loop, which has no queues"),
        ({"arrival": "constant"}, "arrival means nothing without rate"),
        ({"duration": 5, "ramp": 5}, "ramp takes all of the duration"),
        ({"duration": 0}, "greater than 0"),
        ({"timeout": "0s"}, "greater than 0"),
        ({"grace": "inf"}, "finite number"),
        ({"rate": "nan"}, "finite number"),
        ({"max_error_rate": "nan"}, "less than or equal to 1"),
        ({"queues": "0"}, "greater than or equal to 1"),
        ({"queues": "many"}, "valid integer"),
        ({"timeout": "soon"}, "no duration such as"),
        ({"header": ["no colon"]}, "'Name: value'"),
        ({"header": ["A: b\r\nC: d"]}, "'Name: value'"),
        ({"header": ["A\nB: c"]}, "'Name: value'"),
        ({"header": ["A: \0"]}, "'Name: value'"),
        (
            {"url": "http://me:word@h/v1/completions", "header": ["authorization: Basic x"]},
            "exclude each other",
        ),
        ({"api": "custom"}, "needs a body"),
        ({"text_path": "a"}, "say --api custom"),
        ({"body": "{"}, "neither JSON nor @FILE"),
        ({"body": "@nowhere.json"}, "neither JSON nor @FILE"),
        ({"slo": ["speed:1"]}, "there is no figure 'speed'"),
        ({"fail_if": ["ttft"]}, "FIGURE.STATISTIC OPERATOR NUMBER"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE is not set"),
        ({"max_error_rate": 2}, "less than or equal to 1"),
        ({"queue": 3}, "unknown key 'queue'; did you mean 'queues'"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        configured(**settings)


def test_a_body_comes_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"a": "{text}"}')
    assert configured(api="custom", body=f"@{path}").body == {"a": "{text}"}


def test_the_results_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_KEY", "sk-very-secret")
    config = configured(
        url="http://host/v1/completions?password=pass-word&api_key=hidden-key&n=1",
        api_key_env="LT_KEY",
        header=["X-Token: other-secret"],
        body={"auth": "body-secret"},
    )
    published = json.dumps(published_config(config, "m"))
    for secret in ("sk-very-secret", "pass-word", "hidden-key", "other-secret", "body-secret"):
        assert secret not in published
    assert config.headers() == {"X-Token": "other-secret", "Authorization": "Bearer sk-very-secret"}
    assert {"sk-very-secret", "Bearer sk-very-secret", "other-secret"} <= set(config.secrets())
    assert {"pass-word", "hidden-key", "body-secret"} <= set(config.secrets())
    assert '"queues": [5]' in published
    assert '"loops": 20' in published
    assert '"model": "m"' in published


def test_a_key_from_the_environment_replaces_a_header_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LT_KEY", "sk-1")
    config = configured(api_key_env="LT_KEY", header=["authorization: Bearer old"])
    assert config.headers() == {"Authorization": "Bearer sk-1"}
