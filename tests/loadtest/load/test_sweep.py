import json

import pytest

from loadtest.config.run_config import RunConfig
from loadtest.load.sweep import published_config


def test_the_published_configuration_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_KEY", "sk-very-secret")
    config = RunConfig(
        url="http://host/v1/completions?password=pass-word&api_key=hidden-key&n=1",
        api_key_env="LT_KEY",
        header=("X-Token: other-secret",),
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
