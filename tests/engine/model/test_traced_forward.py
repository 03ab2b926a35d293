import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from deployments.engine import recorded_forward
from deployments.engine.attention import ATTENTION_NAME
from deployments.engine.forward import Forward, StockForward
from deployments.engine.kv_slots import KVShape, KVSlots
from deployments.engine.model_loader import LoadedModel
from deployments.engine.packed_step import ChunkRows, PackedStep
from deployments.engine.recorded_forward import NotRecordableError, RecordedForward, record
from tests.engine.tiny_models import MODELS, gemma3, load, mixtral, qwen2, qwen3_moe

MakeModel = Callable[[], PreTrainedModel]

MIXTURES = (mixtral, qwen3_moe)
RECORDABLE = {name: make for name, make in MODELS.items() if make not in MIXTURES}

STEPS: Sequence[tuple[tuple[int, ...], tuple[int, ...], tuple[ChunkRows, ...], tuple[int, ...]]] = (
    # Slots and positions that decode, the chunks, and the rows that are due.
    ((), (), (ChunkRows(0, 0, 0, 9),), (8,)),
    ((), (), (ChunkRows(0, 1, 0, 1),), (0,)),
    ((0,), (9,), (), (0,)),
    ((0, 1), (10, 1), (), (0, 1)),
    ((0, 1), (11, 2), (ChunkRows(2, 2, 0, 7),), (0, 1)),
    ((0, 1), (12, 3), (ChunkRows(2, 2, 7, 14),), (0, 1, 8)),
)
"""Of 9, 1, 1, 2, 9 and 9 rows, some of them behind a window."""


def shape_of(loaded: LoadedModel) -> KVShape:
    return KVShape.of(loaded.text_config, torch.float32)


def made_of(loaded: LoadedModel) -> Forward:
    return record(loaded.model, shape_of(loaded))


@torch.inference_mode()
def logits_of(forward: Forward, loaded: LoadedModel) -> list[torch.Tensor]:
    """Run the steps above, on slots of their own."""
    kv = KVSlots(shape_of(loaded), num_slots=3, max_model_len=32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    logits = []
    for slots, decoded, chunks, due in STEPS:
        positions = [*decoded, *(i for chunk in chunks for i in range(chunk.start, chunk.end))]
        token_ids = torch.randint(44, 300, (1, len(positions)), generator=generator)
        step = PackedStep(kv, slots, decoded, chunks)
        logits.append(forward(token_ids, torch.tensor([positions]), torch.tensor(due), step))
    return logits


@pytest.mark.parametrize("make_model", RECORDABLE.values(), ids=RECORDABLE)
def test_what_was_recorded_gives_the_models_own_logits_to_the_last_bit(
    make_model: MakeModel,
) -> None:
    loaded = load(make_model)
    recorded = made_of(loaded)
    assert isinstance(recorded, RecordedForward)
    assert loaded.text_config._attn_implementation == ATTENTION_NAME
    own = logits_of(StockForward(loaded.model), loaded)
    assert [len(logits[0]) for logits in own] == [len(due) for *_, due in STEPS]
    assert all(map(torch.equal, logits_of(recorded, loaded), own))


def test_weights_that_change_later_are_those_that_count() -> None:
    loaded = load(qwen2)
    recorded = made_of(loaded)
    with torch.no_grad():
        loaded.model.get_parameter("model.norm.weight").mul_(2)
    own = logits_of(StockForward(loaded.model), loaded)
    assert all(map(torch.equal, logits_of(recorded, loaded), own))


@pytest.mark.parametrize("make_model", MIXTURES)
def test_a_mixture_of_experts_keeps_its_own_way(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(make_model)
    with caplog.at_level(logging.INFO):
        assert isinstance(made_of(loaded), StockForward)
    assert loaded.text_config._attn_implementation == ATTENTION_NAME
    (told,) = caplog.records
    assert told.levelno == logging.INFO
    assert "the forward pass is not recorded" in told.message


def wrapped(change: Callable[[torch.Tensor], torch.Tensor]) -> LoadedModel:
    """Return a Qwen2 whose last norm's output is changed."""
    loaded = load(qwen2)
    norm = loaded.model.get_submodule("model.norm")
    stock = norm.forward
    norm.forward = lambda rows: change(stock(rows))
    return loaded


def by_num_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2 if rows.shape[1] > 4 else rows


def by_even_num_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.shape[1] % 2 else rows * 2


def by_value(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2 if rows[0, 0, 0] > 0 else rows


def by_chosen_rows(rows: torch.Tensor) -> torch.Tensor:
    output = rows.clone()
    chosen = (rows[0, :, 0] > 0).nonzero().flatten()
    for row in chosen.tolist():
        output[0, row] *= 2
    return output


def by_kept_rows(rows: torch.Tensor) -> torch.Tensor:
    """Join as many rows as have a value above 0 with the others, as some mixtures of experts do."""
    is_high = rows[0, :, 0] > 0
    return torch.cat([rows[:, is_high] * 2, rows[:, ~is_high]], dim=1)[:, : rows.shape[1]]


CHANGES = (by_num_rows, by_even_num_rows, by_value, by_chosen_rows, by_kept_rows)


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_whose_way_depends_on_its_input_is_not_recorded(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    loaded = wrapped(change)
    with pytest.raises(NotRecordableError):
        RecordedForward(loaded.model)
    assert loaded.text_config._attn_implementation == ATTENTION_NAME
    assert isinstance(made_of(loaded), StockForward)


def test_what_depends_on_the_number_of_rows_is_named() -> None:
    with pytest.raises(NotRecordableError, match=r"depends on the number of rows: .*> 4"):
        RecordedForward(wrapped(by_num_rows).model)


def test_a_failed_recording_does_not_hinder_the_next(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise KeyError("a model's bug")

    with caplog.at_level(logging.INFO), pytest.raises(NotRecordableError, match="a model's bug"):
        RecordedForward(wrapped(fail).model)
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled
    assert isinstance(made_of(load(gemma3)), RecordedForward)


class Twisted(RecordedForward):
    """A recording in which something went wrong unnoticed."""

    def __call__(self, *arguments: Any) -> torch.Tensor:
        return super().__call__(*arguments) * 1.01


def test_a_recording_that_gives_other_logits_is_told_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorded_forward, "RecordedForward", Twisted)
    with caplog.at_level(logging.WARNING):
        assert isinstance(made_of(load(qwen2)), StockForward)
    assert "its logits would be others" in caplog.text


def test_a_state_of_the_recordings_time_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def by_call(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return rows * len(calls)

    with caplog.at_level(logging.WARNING):
        assert isinstance(made_of(wrapped(by_call)), StockForward)
    assert "its logits would be others" in caplog.text
