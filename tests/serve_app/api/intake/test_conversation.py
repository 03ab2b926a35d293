import pytest

from deployments.contract.errors import InvalidRequestError
from serve_app.api.intake.conversation import Conversation
from serve_app.api.openai.prompt_schema import TextPartBody
from tests.offenders import Offenders

NAMES = ((r"\.tool_call_id$", ".call"), (r"^stop$", "ends"), (r"^max_tokens$", "most"))


def part(text: str) -> TextPartBody:
    return TextPartBody(type="text", text=text)


def conversation() -> Conversation:
    """Return a user's turn from two places, an assistant's that calls, and the call's result."""
    made = Conversation(NAMES)
    made.turn("user", "items[0]").add(part("a"), "items[0].text")
    made.turn("user", "items[1]").add(part("b"), "items[1].text")
    made.turn("user", "items[1]").add(part("c"), "items[1].more")
    made.turn("assistant", "items[2]").call("c", "f", "{}", "items[3]")
    made.result("c", "items[4]")
    return made


def test_consecutive_turns_of_a_role_are_one_but_results_are_not() -> None:
    made = conversation()
    made.result("c", "items[5]")
    bodies = made.bodies()
    assert [body.role for body in bodies] == ["user", "assistant", "tool", "tool"]
    assert bodies[0].content == [part("a\n\nb"), part("c")], "a chat template would join and trim"


def test_a_new_turn_may_have_the_role_of_the_one_before() -> None:
    made = conversation()
    for at in (5, 6):
        made.new_turn("user", f"items[{at}]").add(part(f"{at}"), f"items[{at}].text")
    assert [body.content for body in made.bodies()[-2:]] == [[part("5")], [part("6")]]


def test_parts_of_one_message_are_not_parted() -> None:
    made = Conversation(NAMES)
    for text in ("a", "b"):
        made.turn("system", "system").add(part(text), "system")
    made.turn("system", "items[0]").add(part("c"), "items[0]")
    assert made.bodies()[0].content == [part("a"), part("b\n\nc")]


def test_a_turn_that_holds_nothing_is_an_empty_text() -> None:
    assert conversation().bodies()[2].content == [part("")]


PLACES: list[tuple[str, str]] = [
    ("messages[0].content[1].image_url.url", "items[1].more.image_url.url"),
    ("messages[0].content[7]", "items[0]"),
    ("messages[1].tool_calls[0].id", "items[3].id"),
    ("messages[1].tool_calls", "items[2].tool_calls"),
    ("messages[2].tool_call_id", "items[4].call"),
    ("messages", "messages"),
    ("stop", "ends"),
]


def test_an_error_names_the_place_in_the_request() -> None:
    with Offenders() as offenders:
        for param, named in PLACES:
            with offenders.case(param, named):
                with pytest.raises(InvalidRequestError) as caught, conversation().renaming():
                    raise InvalidRequestError(f"{param} is wrong.", param)
                assert (caught.value.param, caught.value.message) == (named, f"{named} is wrong.")


def test_a_word_that_is_also_a_field_s_name_stays_in_a_message() -> None:
    with pytest.raises(InvalidRequestError) as caught, conversation().renaming():
        raise InvalidRequestError("A stop string is too long.", "stop")
    assert (caught.value.param, caught.value.message) == ("ends", "A stop string is too long.")


def test_a_field_s_name_is_replaced_wherever_a_message_has_it() -> None:
    with pytest.raises(InvalidRequestError) as caught, conversation().renaming():
        raise InvalidRequestError("At most 9 fit into max_tokens.", "max_tokens")
    assert caught.value.message == "At most 9 fit into most."


def test_an_error_without_a_field_is_left_alone() -> None:
    with pytest.raises(InvalidRequestError) as caught, conversation().renaming():
        raise InvalidRequestError("no")
    assert (caught.value.param, caught.value.message) == (None, "no")
