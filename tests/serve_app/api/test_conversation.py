import pytest

from deployments.contract.errors import InvalidRequestError
from deployments.contract.messages import ChatMessage, TextPart
from serve_app.api.conversation import Conversation, GivenImage
from serve_app.api.requests.prompt_reader import to_messages
from serve_app.config import LimitsConfig


def conversation() -> Conversation:
    """Return a user's turn from two places, an assistant's that calls, and the call's result."""
    made = Conversation()
    made.turn("user", "items[0]").add_text("a")
    made.turn("user", "items[1]").add_text("b")
    made.turn("user", "items[1]").add_text("c")
    made.turn("assistant", "items[2]").call("c", "f", "{}", "items[3]")
    made.result("c", "items[4]", "call")
    return made


def messages(made: Conversation, accepts_images: bool = True) -> tuple[ChatMessage, ...]:
    return to_messages(made.turns, LimitsConfig(), accepts_images)


def test_consecutive_turns_of_a_role_are_one_but_results_are_not() -> None:
    made = conversation()
    made.result("c", "items[5]", "call")
    assert [message.role for message in messages(made)] == ["user", "assistant", "tool", "tool"]
    texts = (TextPart("a\n\nb"), TextPart("c"))
    assert messages(made)[0].parts == texts, "a chat template would join and trim"


def test_a_new_turn_may_have_the_role_of_the_one_before() -> None:
    made = conversation()
    for at in (5, 6):
        made.new_turn("user", f"items[{at}]").add_text(f"{at}")
    assert [message.parts for message in messages(made)[-2:]] == [
        (TextPart("5"),),
        (TextPart("6"),),
    ]


def test_parts_of_one_message_are_not_parted() -> None:
    made = Conversation()
    for text in ("a", "b"):
        made.turn("system", "system").add_text(text)
    made.turn("system", "items[0]").add_text("c")
    assert messages(made)[0].parts == (TextPart("a"), TextPart("b\n\nc"))


def test_a_refusal_is_not_joined_with_the_text_of_another_message() -> None:
    made = Conversation()
    made.turn("assistant", "items[0]").add_text("a")
    made.turn("assistant", "items[1]").add_refusal("b", "items[1].content[0]")
    made.turn("assistant", "items[2]").add_text("c")
    assert messages(made)[0].parts == tuple(map(TextPart, "abc"))


def test_a_turn_that_holds_nothing_is_an_empty_text() -> None:
    assert messages(conversation())[2].parts == (TextPart(""),)
    assert messages(conversation())[1].parts == ()


def test_an_error_names_the_place_in_the_request() -> None:
    made = conversation()
    made.turn("user", "items[5]").add_image("data:,", "items[5].content[0]", "source")
    image = made.turns[-1].parts[0]
    assert isinstance(image, GivenImage)
    with pytest.raises(InvalidRequestError) as caught:
        messages(made, accepts_images=False)
    assert caught.value.param == "items[5].content[0]"
    with pytest.raises(InvalidRequestError) as caught:
        messages(made)
    assert caught.value.param == "items[5].content[0].source"


def test_a_result_of_no_call_and_a_call_that_is_made_twice_are_named() -> None:
    made = conversation()
    made.result("d", "items[5]", "call")
    with pytest.raises(InvalidRequestError) as caught:
        messages(made)
    assert caught.value.param == "items[5].call"
    made = conversation()
    made.turns[1].call("c", "g", "{}", "items[5].id")
    with pytest.raises(InvalidRequestError) as caught:
        messages(made)
    assert caught.value.param == "items[5].id"


def test_only_the_assistant_refuses() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Conversation().turn("user", "items[0]").add_refusal("a", "items[0].content[0]")
    assert caught.value.param == "items[0].content[0]"
