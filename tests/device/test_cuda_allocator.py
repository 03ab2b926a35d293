import logging

import pytest
import torch

from deployments.device.device import ALLOCATOR_VARIABLES, EXPANDABLE, let_segments_grow

SETTER = "_accelerator_setAllocatorSettings"


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the allocator's settings, in an environment without any."""
    taken: list[str] = []
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, SETTER, taken.append)
    return taken


def test_segments_are_set_to_grow(settings: list[str]) -> None:
    assert let_segments_grow()
    assert settings == [EXPANDABLE]


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_settings_of_the_environment_are_left_alone(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert not let_segments_grow()
    assert not settings


def test_a_torch_without_the_setting_works_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch._C, SETTER)
    with caplog.at_level(logging.WARNING):
        assert not let_segments_grow()
    assert "no setting" in caplog.text


def test_a_torch_that_rejects_the_setting_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(settings: str) -> None:
        raise RuntimeError(f"no such key: {settings}")

    monkeypatch.setattr(torch._C, SETTER, refuse)
    assert not let_segments_grow()
    assert "no such key: expandable" in caplog.text
