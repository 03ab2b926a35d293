"""`Engine`: lists of inputs in this process, without Ray."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from deployments.contract.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    RaystreamError,
    WrongTaskError,
)
from raystream.engine import Engine
from serve_app.api.chat.schema import ChatCompletion
from serve_app.api.completions.schema import Completion
from tests.deployments.tiny_folder import save_text_model
from tests.failing import failing
from tests.pooling.tiny_embedders import save_embedder
from tests.pooling.tiny_folder import save_classifier
from tests.ray.serve_run import wait_until

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}
SEEDED: dict[str, Any] = {"seed": 7, "temperature": 1.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = save_text_model(tmp_path_factory.mktemp("tiny") / "tiny-chat")
    has_ray = ray.is_initialized()  # tests of other modules may have started it in this process
    with Engine(folder, **SETTINGS) as engine:
        yield engine
        assert ray.is_initialized() is has_ray


def test_texts_come_in_the_order_of_the_prompts_and_equal_those_of_one_prompt(
    engine: Engine,
) -> None:
    prompts = [f"Prompt number {number}" for number in range(20)]
    answers = engine.generate(prompts, **SEEDED)
    alone = engine.generate([prompts[13]], **SEEDED)
    assert len(answers) == 20
    assert isinstance(answers[13], Completion)
    assert isinstance(alone[0], Completion)
    assert answers[13].text == alone[0].text
    assert answers[13].model == "tiny-chat"
    assert answers[13].usage.completion_tokens <= 12


def test_a_bad_input_does_not_end_the_rest(engine: Engine) -> None:
    bad: Any = None
    answers = engine.generate(["fine", "too long" * 40, bad, (5, 6, 7)], **SEEDED)
    assert [type(answer) for answer in answers] == [
        Completion,
        ContextLengthExceededError,
        InvalidRequestError,
        Completion,
    ]
    assert "prompt" in str(answers[2])


def test_what_no_body_could_hold_does_not_end_the_rest(engine: Engine) -> None:
    first, second = engine.chat(["ok", "\ud800 x"], **SEEDED)
    assert isinstance(first, ChatCompletion)
    assert isinstance(second, InvalidRequestError)
    assert r"can't encode character '\ud800'" in str(second)
    (stopped,) = engine.generate(["ok"], stop="\ud800")
    assert isinstance(stopped, InvalidRequestError)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": {1, 2}}}}
    (shaped,) = engine.chat(["ok"], response_format=schema)
    assert isinstance(shaped, InvalidRequestError)
    assert "type set is not JSON serializable" in str(shaped)


def test_an_argument_is_no_option(engine: Engine) -> None:
    calls: list[Any] = [(engine.generate, "prompt"), (engine.chat, "messages")]
    calls += [(engine.classify, "input"), (engine.embed, "input")]
    for call, name in calls:
        with pytest.raises(TypeError, match=f"{name} is no option: it is the first argument"):
            call(["a"], **{name: "b"})


def test_conversations_are_strings_or_lists_of_messages(engine: Engine) -> None:
    asked = [{"role": "user", "content": "Hello?"}]
    first, second = engine.chat(["Hello?", asked], **SEEDED)
    assert isinstance(first, ChatCompletion)
    assert isinstance(second, ChatCompletion)
    assert first.text == second.text
    one: Any = asked
    with pytest.raises(TypeError, match="one more"):
        engine.chat(one)
    with pytest.raises(TypeError, match="list of texts"):
        engine.generate("one string")
    with pytest.raises(TypeError, match="stream is no option"):
        engine.generate(["one"], stream=True)


async def test_it_works_inside_a_running_event_loop(engine: Engine) -> None:
    assert asyncio.get_running_loop().is_running()
    (answer,) = engine.generate(["Hello"], **SEEDED)
    assert isinstance(answer, Completion)


def test_an_empty_list_is_answered(engine: Engine) -> None:
    assert engine.generate([]) == []


def test_a_bar_counts_the_inputs(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.generate(["a", "b"], **SEEDED)
    assert capsys.readouterr().err == "", "nobody watches"
    engine._progress = True
    try:
        engine.generate(["a", "b"], **SEEDED)
    finally:
        engine._progress = None
    shown = capsys.readouterr().err
    assert "tiny-chat: 100%" in shown
    assert "2/2" in shown


def test_an_interrupt_frees_the_places(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_show", failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["a"] * 50, **SEEDED | {"max_tokens": 40, "ignore_eos": True})
    assert engine.generate(["a"], **SEEDED)


def test_another_task_is_refused_at_once(engine: Engine) -> None:
    with pytest.raises(WrongTaskError, match="task='classify'"):
        engine.classify(["text"])


def test_a_wrong_setting_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'dtype'") as refused:
        Engine(tmp_path, dtyp="float32")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "clasify"}, "task: Input should be 'generate', "),
        ({"id": "a b"}, "id: String should match pattern "),
        ({"max_model_len": "x"}, "max_model_len: .*, or: .*"),
    ],
)
def test_a_wrong_value_is_told_with_its_setting(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Engine(tmp_path, **settings)


def test_any_folder_gives_an_id_and_a_setting_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_embedder(tmp_path).rename(tmp_path / "_my model")
    monkeypatch.chdir(folder)
    with Engine(".", task="embed") as engine:
        assert engine.id == "my-model"
        assert isinstance(engine.embed(["one"])[0], np.ndarray)
    with Engine(folder, task="embed", id="x") as engine:
        assert engine.id == "x"
        assert isinstance(engine.embed(["one"])[0], np.ndarray)


def test_texts_are_classified(tmp_path: Path) -> None:
    with Engine(save_classifier(tmp_path)) as engine:
        assert engine.task == "classify", "by its files"
        texts = ["Return the sum of two numbers.", "", "Join paths." * 4]
        found = engine.classify(texts, top_k=1)
    assert isinstance(found[1], RaystreamError)
    kept = [each for each in found if not isinstance(each, RaystreamError)]
    assert [each.index for each in kept] == [0, 2]
    assert all(len(each.scores) == 1 for each in kept)


def test_texts_are_embedded_and_nothing_is_left(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path)
    before = set(threading.enumerate())
    engine = Engine(folder, task="embed")
    first, refused, again = engine.embed(["one", "", "one"])
    engine.close()
    engine.close()
    assert isinstance(refused, InvalidRequestError)
    assert isinstance(first, np.ndarray)
    assert isinstance(again, np.ndarray)
    assert first.dtype == np.float32
    assert np.allclose(first, again, atol=1e-6)
    wait_until(lambda: set(threading.enumerate()) <= before, 30)
    with pytest.raises(RuntimeError, match="closed"):
        engine.embed(["one"])
