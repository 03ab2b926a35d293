import json

from benchmarks.shares import Answer, Client, Report, points_of, tokens_by_key


def answer(
    name: str, *tokens: tuple[float, int], sent_s: float = 0, is_whole: bool = True
) -> Answer:
    """Return an answer with as many tokens in all by these times."""
    made = Answer(name, sent_s, 200)
    for time_s, num_tokens in tokens:
        message = {
            "choices": [{"delta": {"content": f"{num_tokens} "}}],
            "usage": {"completion_tokens": num_tokens},
        }
        made.lines.append((time_s, b"data: " + json.dumps(message).encode() + b"\n"))
    if is_whole:
        made.lines.append((tokens[-1][0], b"data: [DONE]\n"))
    return made


def test_tokens_are_counted_when_they_come() -> None:
    found = answer("a 0", (0.5, 1), (0.9, 1), (1.5, 4), sent_s=0.25)
    assert list(found.tokens()) == [(0.5, 1), (1.5, 3)]
    assert found.ttft_s == 0.25
    assert found.text == "1 1 4 "
    assert points_of([found], 0.0) == [(0.0, 0.0), (1.0, 1.0), (2.0, 4.0)]


def test_an_answer_that_was_cut_short_has_tokens_and_no_text() -> None:
    found = answer("a 0", (0.5, 2), is_whole=False)
    assert list(found.tokens()) == [(0.5, 2)]
    assert found.text is None
    assert Answer("a 0", 0.0).ttft_s == float("inf")


def test_keys_are_compared_over_the_same_time() -> None:
    client = Client(1, ["a"])
    client.answers = [answer("one 0 0", (1, 1), (3, 5)), answer("three 0 0", (2, 9), (9, 20))]
    assert tokens_by_key(client, 2, 9) == {"one": 4, "three": 9}


def test_a_missed_bar_is_told() -> None:
    report = Report()
    report.add_ttfts("alone", [answer("a 0", (0.1, 1)), answer("a 1", (0.2, 1))])
    report.add_ttfts("beside", [answer("a 0", (0.2, 1)), answer("a 1", (0.29, 1))], "alone")
    assert report.are_met == [True] * 5
    report.add_ttfts("late", [answer("a 0", (0.31, 1))], "alone")
    assert report.are_met[-1] is False
    assert report.table().row_count == 8
    report.tokens["case"] = {"one": [(0.0, 0.0), (1.0, 5.0)]}
    assert len(report.figure().axes) == 2
