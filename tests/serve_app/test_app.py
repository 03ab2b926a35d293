from pathlib import Path
from typing import Literal

import pytest

from serve_app import app
from serve_app.app import resolve
from serve_app.config import PROJECT_ROOT, AuthConfig, ModelConfig


@pytest.mark.parametrize(
    ("num_gpus", "device", "num_cluster_gpus", "expected"),
    [
        ("auto", "auto", 1, 0.25),
        ("auto", "auto", 0, 0.0),
        ("auto", "cpu", 1, 0.0),
        (0.5, "auto", 0, 0.5),
        (0.0, "auto", 1, 0.0),
    ],
)
def test_auto_asks_for_gpu_share_if_there_are_gpus_and_a_number_always_wins(
    num_gpus: float, device: str, num_cluster_gpus: int, expected: float
) -> None:
    model = ModelConfig.model_validate(
        {"id": "m", "source": "x", "num_gpus": num_gpus, "gpu_share": 0.25, "device": device}
    )
    assert resolve(model, num_cluster_gpus=num_cluster_gpus).num_gpus == expected


def test_a_folder_is_found_from_the_project_wherever_the_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ModelConfig(id="m", source="k8s")
    assert resolve(model, num_cluster_gpus=0).source == str(PROJECT_ROOT / "k8s")


def test_a_source_that_is_not_a_folder_is_a_hub_id() -> None:
    model = ModelConfig(id="m", source="owner/name")
    assert resolve(model, num_cluster_gpus=0).source == "owner/name"


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_replica_is_told_whether_to_share_prefixes(prefix_caching: bool) -> None:
    model = ModelConfig(id="m", source="org/name", prefix_caching=prefix_caching)
    assert resolve(model, num_cluster_gpus=0).prefix_caching is prefix_caching


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_replica_is_told_how_to_hold_its_weights(quantization: Literal["int8"] | None) -> None:
    model = ModelConfig(id="m", source="org/name", quantization=quantization)
    assert resolve(model, num_cluster_gpus=0).quantization == quantization


def test_a_replica_is_told_its_queue_limits() -> None:
    model = ModelConfig(id="m", source="owner/name", max_queued_requests=7, max_queued_tokens=5000)
    told = resolve(model, num_cluster_gpus=0)
    assert (told.max_queued_requests, told.max_queued_tokens) == (7, 5000)


def test_a_ray_without_token_is_refused_and_public_http_is_no_consent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "is_token_auth_enabled", lambda: False)
    with pytest.raises(app.UnauthenticatedRayError, match="RAY_AUTH_MODE=token"):
        app.require_ray_token(AuthConfig(allow_anonymous=True))
    app.require_ray_token(AuthConfig(allow_unauthenticated_ray=True))


def test_a_ray_with_a_token_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "is_token_auth_enabled", lambda: True)
    app.require_ray_token(AuthConfig())
