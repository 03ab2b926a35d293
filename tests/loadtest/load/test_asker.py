from collections import Counter

from loadtest.load.asker import Asker, Order
from loadtest.questions import Question

QUESTIONS = [Question(f"question {number}") for number in range(10)]


def asked(asker: Asker, num: int) -> list[int]:
    return [asker.next_call(0, index)[0] for index in range(num)]


def test_a_seed_asks_the_same_again_and_another_one_does_not() -> None:
    first, again, other = (asked(Asker(QUESTIONS, seed=seed), 50) for seed in (1, 1, 2))
    assert first == again != other


def test_shuffled_asks_each_once_before_any_twice() -> None:
    drawn = asked(Asker(QUESTIONS, order=Order.SHUFFLED), 20)
    assert Counter(drawn[:10]) == Counter(drawn[10:]) == Counter(range(10))
    assert drawn[:10] != sorted(drawn[:10])


def test_sequential_goes_round() -> None:
    assert asked(Asker(QUESTIONS, order=Order.SEQUENTIAL), 12) == [*range(10), 0, 1]


def test_unique_questions_all_begin_in_their_own_way() -> None:
    asker = Asker(QUESTIONS[:1], nonce="abc")
    texts = [asker.next_call(level, index)[1].text for level in range(3) for index in range(3)]
    assert len({text.split(" ")[0] for text in texts}) == 9
    assert all(text.endswith("question 0") for text in texts)


def test_a_unique_conversation_begins_so_too() -> None:
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "why?"})
    _, call = Asker([Question("why?", messages)], nonce="abc").next_call(1, 2)
    assert call.messages is not None
    assert [message["content"] for message in call.messages] == ["(abc-1-2) s", "why?"]


def test_users_are_drawn_from_so_many_or_nobody_says_who_asks() -> None:
    asker = Asker(QUESTIONS, num_users=3)
    users = {asker.next_call(0, index)[1].user for index in range(100)}
    assert users == {"user-0", "user-1", "user-2"}
    assert Asker(QUESTIONS).next_call(0, 0)[1].user == ""


def test_one_of_the_images_goes_along() -> None:
    asker = Asker(QUESTIONS, image_urls=["data:a", "data:b"])
    urls = {asker.next_call(0, index)[1].image_url for index in range(50)}
    assert urls == {"data:a", "data:b"}
