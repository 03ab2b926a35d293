from collections import Counter

from loadtest.config.choices import Order
from loadtest.load.question_sampler import QuestionSampler
from loadtest.load.questions import Question

QUESTIONS = [Question(f"question {number}") for number in range(10)]


def asked(sampler: QuestionSampler, num: int) -> list[int]:
    return [sampler.next_call(0, index)[0] for index in range(num)]


def test_equal_seeds_ask_the_same_and_different_seeds_do_not() -> None:
    first, again, other = (asked(QuestionSampler(QUESTIONS, seed=seed), 50) for seed in (1, 1, 2))
    assert first == again != other


def test_shuffled_asks_each_once_before_any_twice() -> None:
    drawn = asked(QuestionSampler(QUESTIONS, order=Order.SHUFFLED), 20)
    assert Counter(drawn[:10]) == Counter(drawn[10:]) == Counter(range(10))
    assert drawn[:10] != sorted(drawn[:10])


def test_sequential_starts_again_after_the_last() -> None:
    assert asked(QuestionSampler(QUESTIONS, order=Order.SEQUENTIAL), 12) == [*range(10), 0, 1]


def test_unique_questions_all_have_different_prefixes() -> None:
    sampler = QuestionSampler(QUESTIONS[:1], nonce="abc")
    texts = [sampler.next_call(level, index)[1].text for level in range(3) for index in range(3)]
    assert len({text.split(" ")[0] for text in texts}) == 9
    assert all(text.endswith("question 0") for text in texts)


def test_a_unique_conversation_has_the_prefix_in_its_first_message() -> None:
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "why?"})
    _, call = QuestionSampler([Question("why?", messages)], nonce="abc").next_call(1, 2)
    assert call.messages is not None
    assert [message["content"] for message in call.messages] == ["(abc-1-2) s", "why?"]


def test_users_are_drawn_from_a_number_of_names_or_left_out() -> None:
    sampler = QuestionSampler(QUESTIONS, num_users=3)
    users = {sampler.next_call(0, index)[1].user for index in range(100)}
    assert users == {"user-0", "user-1", "user-2"}
    assert QuestionSampler(QUESTIONS).next_call(0, 0)[1].user == ""


def test_each_call_has_one_of_the_images() -> None:
    sampler = QuestionSampler(QUESTIONS, image_urls=["data:a", "data:b"])
    urls = {sampler.next_call(0, index)[1].image_url for index in range(50)}
    assert urls == {"data:a", "data:b"}
