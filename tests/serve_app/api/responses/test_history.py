from serve_app.api.responses.history import MAX_STREAMS, Histories

ITEM = {"type": "message", "role": "user", "content": "a" * 100}


def test_a_connection_s_last_conversation_is_found_by_its_response() -> None:
    histories = Histories()
    histories.keep("a", None, "resp_1", [ITEM])
    histories.keep("a", None, "resp_2", [ITEM, ITEM])
    assert histories.find("a", "resp_1") is None
    assert histories.find("a", "resp_2") == [ITEM, ITEM]
    assert histories.find("b", "resp_2") is None


def test_what_is_found_can_be_changed() -> None:
    histories = Histories()
    histories.keep("a", None, "resp_1", [ITEM])
    found = histories.find("a", "resp_1")
    assert found is not None
    found.clear()
    assert histories.find("a", "resp_1") == [ITEM]


def test_a_connection_that_ends_leaves_nothing() -> None:
    histories = Histories(max_bytes=200)
    for _ in range(3):
        histories.keep("a", None, "resp_1", [ITEM])
        histories.leave("a")
    histories.leave("a")
    histories.keep("b", None, "resp_2", [ITEM])
    assert histories.find("a", "resp_1") is None
    assert histories.find("b", "resp_2") == [ITEM]


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    histories = Histories(max_bytes=350)  # two of some 150
    for name in ("a", "b"):
        histories.keep(name, None, "resp_1", [ITEM])
    histories.find("a", "resp_1")
    histories.keep("c", None, "resp_1", [ITEM])
    assert [name for name in "abc" if histories.find(name, "resp_1") is None] == ["b"]


def test_a_conversation_of_more_than_all_may_take_is_not_kept() -> None:
    histories = Histories(max_bytes=100)
    histories.keep("a", None, "resp_1", [ITEM])
    assert histories.find("a", "resp_1") is None


def test_each_stream_of_a_connection_has_its_last_conversation() -> None:
    histories = Histories()
    histories.keep("a", "main", "resp_1", [ITEM])
    histories.keep("a", "side", "resp_2", [ITEM, ITEM])
    histories.keep("a", "main", "resp_3", [])
    assert histories.find("a", "resp_1") is None
    assert histories.find("a", "resp_2") == [ITEM, ITEM]
    assert histories.find("a", "resp_3") == []
    histories.forget("a", "side")
    assert histories.find("a", "resp_2") is None


def test_the_streams_that_ended_longest_ago_are_forgotten() -> None:
    histories = Histories()
    for at in range(MAX_STREAMS):
        histories.keep("a", f"{at}", f"resp_{at}", [ITEM])
    histories.keep("a", "0", "resp_0", [ITEM])
    histories.keep("a", "another", "resp_another", [ITEM])
    assert histories.find("a", "resp_0") == [ITEM]
    assert histories.find("a", "resp_1") is None
    assert histories.find("a", "resp_another") == [ITEM]
