import logging

import pytest
import torch

from deployments.gpu.allocator import ALLOCATOR_VARIABLES, EXPANDABLE, let_segments_grow

SWITCH = "_accelerator_setAllocatorSettings"


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take the settings in the allocator's place, in an environment that has none."""
    taken: list[str] = []
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, SWITCH, taken.append)
    return taken


def test_segments_are_told_to_grow(settings: list[str]) -> None:
    assert let_segments_grow()
    assert settings == [EXPANDABLE]


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_settings_of_the_environment_are_left_alone(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert not let_segments_grow()
    assert not settings


def test_a_torch_without_the_switch_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch._C, SWITCH)
    with caplog.at_level(logging.WARNING):
        assert not let_segments_grow()
    assert "no switch" in caplog.text


def test_a_switch_that_refuses_is_told_and_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(settings: str) -> None:
        raise RuntimeError(f"no such key: {settings}")

    monkeypatch.setattr(torch._C, SWITCH, refuse)
    assert not let_segments_grow()
    assert "no such key: expandable" in caplog.text
