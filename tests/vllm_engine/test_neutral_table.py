from tests.vllm_engine.neutral_table import TABLE, neutral_files


def test_the_document_holds_the_table() -> None:
    text = TABLE.read()
    assert TABLE.put_into(text) == text, "run: make table"


def test_tests_of_both_engines_are_found_by_what_they_ask_for() -> None:
    files = {each.path: each for each in neutral_files()}
    cuts = files["tests/faults/test_lost_at_each_token.py"]
    assert "test_an_answer_is_the_undisturbed_one_wherever_it_is_cut" in cuts.names
    assert "images are refused with vLLM" in cuts.only_raystream.values()
    # Their fixture stands in a conftest.py, and asks for the engine by another one.
    assert "test_a_whole_answer" in files["tests/clients/test_openai_chat.py"].names
    assert "tests/faults/test_suspects.py" not in files
