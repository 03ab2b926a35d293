import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from deployments.compute.card_room import wait_for_room
from deployments.replica.own_card import Member, OtherCardError, join, wait_for_share

GIB = 2**30


@dataclass
class FakeMembers:
    """What members say of themselves; those of `dead` actors are gone."""

    dead: set[str] = field(default_factory=set)
    stored: dict[tuple[str, str], Member] = field(default_factory=dict)

    def note(self, group: str, member: Member) -> None:
        self.stored[group, member.model] = member

    def of(self, group: str) -> Iterator[Member]:
        for (each, _), member in self.stored.items():
            if each == group and member.actor not in self.dead:
                yield member

    def forget(self, group: str, model: str) -> None:
        del self.stored[group, model]


def test_all_models_of_a_light_group_are_on_one_card() -> None:
    members = FakeMembers()
    join(members, "card", Member("a", "a1", "GPU 0 of node n"))
    join(members, "card", Member("b", "b1", "GPU 0 of node n"))
    join(members, "other", Member("c", "c1", "GPU 1 of node n"))
    with pytest.raises(OtherCardError, match=r"^d takes light turns with a on one card, but"):
        join(members, "card", Member("d", "d1", "GPU 1 of node n"))
    join(members, "card", Member("d", "d2", "GPU 0 of node n"))


def test_a_group_moves_to_another_card_once_all_on_the_old_one_are_dead() -> None:
    members = FakeMembers()
    join(members, "card", Member("a", "a1", "GPU 0"))
    join(members, "card", Member("b", "b1", "GPU 0"))
    members.dead = {"a1"}
    with pytest.raises(OtherCardError):
        join(members, "card", Member("a", "a2", "GPU 1"))
    members.dead = {"a1", "b1"}
    join(members, "card", Member("a", "a3", "GPU 1"))


def test_of_two_that_start_at_once_one_sees_the_other() -> None:
    class Meanwhile(FakeMembers):
        def of(self, group: str) -> Iterator[Member]:
            self.note(group, Member("b", "b1", "GPU 1"))  # it starts now
            return super().of(group)

    with pytest.raises(OtherCardError):
        join(Meanwhile(), "card", Member("a", "a1", "GPU 0"))


def test_the_error_crosses_processes() -> None:
    error = OtherCardError("elsewhere")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@dataclass
class FreeingCard:
    """A GPU whose memory a killed process frees after some looks."""

    held_bytes: list[int]
    device: str = "cuda"
    name: str = "a fake GPU"
    total_bytes: int = 80 * GIB

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def foreign_bytes(self) -> int:
        return self.held_bytes.pop(0) if len(self.held_bytes) > 1 else self.held_bytes[0]

    def enforce_share(self, share: float) -> None:
        raise AssertionError("not asked for")


def test_a_load_waits_until_the_memory_of_a_killed_process_is_free() -> None:
    slept = list[float]()
    wait = partial(wait_for_room, timeout_s=5.0, now_s=lambda: sum(slept), sleep=slept.append)
    card = FreeingCard([70 * GIB, 70 * GIB, GIB])
    assert wait_for_share(card, 1.0, wait)
    assert len(slept) == 2
    assert wait_for_share(FreeingCard([40 * GIB]), 0.5, wait)
    assert len(slept) == 2, "the other half is not the group's"
    assert wait_for_share(FreeingCard([80 * GIB], "cpu"), 1.0, wait)
    assert not wait_for_share(FreeingCard([70 * GIB]), 1.0, wait)
    assert sum(slept) == pytest.approx(5.2, abs=0.2)
