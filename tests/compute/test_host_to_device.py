from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deployments.compute.host_to_device import fetch, host_tensor, send, take_rows, to_device

CPU = torch.device("cpu")


def test_values_keep_their_type_and_order() -> None:
    assert torch.equal(to_device([3, 1], CPU, torch.int64), torch.tensor([3, 1]))
    assert to_device([], CPU, torch.int64).dtype == torch.int64
    nested = to_device([[1, 2]], CPU, torch.float64)
    assert (nested.shape, nested.dtype) == ((1, 2), torch.float64)


def test_rows_are_taken_as_a_copy() -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    taken = take_rows(rows, [2, 0, 2])
    assert torch.equal(taken, rows[[2, 0, 2]])
    taken.zero_()
    assert rows.sum() == 15


def test_nothing_is_pinned_for_a_cpu() -> None:
    tensor = torch.ones(2)
    assert send(tensor, CPU) is tensor
    assert not host_tensor([1.0], CPU, torch.float32).is_pinned()


def test_what_comes_from_a_card_is_waited_for_on_that_cards_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second, recorded = torch.device("cuda", 1), list[Any]()
    event: Any = SimpleNamespace(
        record=lambda stream="that of the current device": recorded.append(stream)
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    on_card = SimpleNamespace(device=second, to=lambda device, non_blocking: torch.ones(1))
    assert fetch(cast("torch.Tensor", on_card)).copied is event
    assert recorded == ["that of cuda:1"]
