from collections.abc import Mapping
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, ImagePart, TextPart
from deployments.contract.sampling_params import SamplingParams
from serve_app.backends.replicas import prefix_memory
from serve_app.backends.replicas.prefix_memory import PIECE_LENGTH, PrefixMemory, prefix_keys

NUMBERS = count()


def keys_of(prompt: tuple[ChatMessage, ...] | str | tuple[int, ...]) -> list[int]:
    return prefix_keys(GenerationRequest(f"r{next(NUMBERS)}", prompt, SamplingParams()))


def talk(*texts: str) -> tuple[ChatMessage, ...]:
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    return tuple(
        ChatMessage(role, (TextPart(text),))  # type: ignore[arg-type] # one of these
        for role, text in zip(roles, texts, strict=False)
    )


def test_a_conversation_has_the_keys_of_its_earlier_turns() -> None:
    first, next_ = keys_of(talk("s", "a")), keys_of(talk("s", "a", "b", "c"))
    assert next_[:2] == first
    assert len(set(next_)) == 4
    assert keys_of(talk("s", "x", "b", "c"))[1:] != next_[1:]


def test_pictures_roles_and_tools_tell_conversations_apart() -> None:
    one = (ChatMessage("user", (ImagePart(b"1"), TextPart("what?"))),)
    two = (ChatMessage("user", (ImagePart(b"2"), TextPart("what?"))),)
    spoken = (ChatMessage("assistant", (ImagePart(b"1"), TextPart("what?"))),)
    assert len({keys_of(each)[0] for each in (one, two, spoken)}) == 3
    split = (ChatMessage("user", (TextPart("ab"), TextPart("c"))),)
    other = (ChatMessage("user", (TextPart("a"), TextPart("bc"))),)
    assert keys_of(split) != keys_of(other)


@pytest.mark.parametrize("long", ["x" * 3 * PIECE_LENGTH, tuple(range(3 * PIECE_LENGTH))])
def test_other_prompts_have_a_key_for_each_piece(long: str | tuple[int, ...]) -> None:
    assert len(keys_of(long)) == 3
    assert keys_of(long[: 2 * PIECE_LENGTH + 5]) == keys_of(long)[:2]
    assert keys_of(long[: PIECE_LENGTH - 1]) == []
    assert keys_of(()) == []


def test_the_longest_beginning_decides_and_of_its_replicas_the_least_busy() -> None:
    memory = PrefixMemory()
    memory.note(keys_of(talk("s", "a")), "A")
    memory.note(keys_of(talk("s", "b")), "B")
    memory.note(keys_of(talk("s", "b")), "C")
    idle = {"A": 0, "B": 0, "C": 0}
    assert memory.choose(keys_of(talk("s", "a", "x", "y")), idle) == "A"
    assert memory.choose(keys_of(talk("s", "b", "x", "y")), {"A": 0, "B": 1, "C": 0}) == "C"
    assert memory.choose(keys_of(talk("other")), idle) is None
    assert memory.choose(keys_of(talk("s", "a", "x", "y")), {"B": 0, "C": 0}) in {"B", "C"}


def test_a_replica_that_refuses_is_not_asked_again_for_the_prompt() -> None:
    memory, keys = PrefixMemory(), keys_of(talk("s", "a"))
    memory.note(keys, "A")
    memory.forget(keys, "A")
    memory.forget(keys_of(talk("never")), "A")
    assert memory.choose(keys, {"A": 0, "B": 0}) is None


@given(st.dictionaries(st.sampled_from("ABCDE"), st.integers(0, 50), min_size=1))
def test_no_replica_gets_more_than_its_bound(loads: Mapping[str, int]) -> None:
    memory, keys = PrefixMemory(), keys_of(talk("s", "a"))
    memory.note(keys, "A")
    chosen = memory.choose(keys, loads)
    mean = (sum(loads.values()) + 1) / len(loads)
    if chosen is None:
        assert loads.get("A", 10**9) + 1 > 1.25 * mean
    else:
        assert loads[chosen] < 1.25 * mean
        assert chosen == "A"


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_memory, "MAX_NUM_PREFIXES", 4)
    monkeypatch.setattr(prefix_memory, "MAX_NUM_HOLDERS", 2)
    memory = PrefixMemory()
    first = keys_of(talk("a"))
    for name in ("A", "B", "C"):
        memory.note(first, name)
    assert memory.choose(first, {"A": 0}) is None
    assert memory.choose(first, {"B": 0, "C": 0}) is not None
    for text in "bcde":
        memory.note(keys_of(talk(text)), "A")
    assert memory.choose(first, {"B": 0, "C": 0}) is None
