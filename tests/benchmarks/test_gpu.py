from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import equality, rates
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.equality import num_equal
from benchmarks.gpu.floor import step_bytes
from benchmarks.gpu.rates import EngineRate, Load, engine_rate, threads_rate
from benchmarks.gpu.report import COLUMNS, NOT_MEASURED, Report, Row
from benchmarks.gpu.shapes import TINY, build, stock
from tests.failing import failing

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("frozen_heap")]

CPU = torch.device("cpu")


def test_without_a_gpu_the_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main([str(tmp_path / "table.md")])
    assert NOT_MEASURED in (tmp_path / "table.md").read_text()
    assert NOT_MEASURED in capsys.readouterr().out


def test_everything_runs_on_a_cpu_with_tiny_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(equality, "NUM_SEQS", 8)
    options = ["--device", "cpu", "--quick", "--sequences", "1,3", "--prompt-length", "9"]
    main([str(tmp_path / "table.md"), *options, "--num-tokens", "12"])
    written = (tmp_path / "table.md").read_text()
    rows = [line for line in written.splitlines() if line.startswith("| tiny")]
    assert [row.split(" | ")[1] for row in rows] == ["1", "3"]
    assert all(len(row.split(" | ")) == len(COLUMNS) and " - " not in row for row in rows)
    assert "in float32: 8 of 8 sequences" in written
    assert "in bfloat16: " in written
    assert capsys.readouterr().out.strip() == written.strip()


def test_it_asks_for_the_transformers_that_the_project_installs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = (Path(__file__).parents[2] / "requirements.lock").read_text()
    major, minor = program.TRANSFORMERS
    assert f"\ntransformers=={major}.{minor}." in lock
    monkeypatch.setattr(transformers, "__version__", "5.17.0")
    with pytest.raises(SystemExit):
        main(["table.md"])
    assert f'pip install "transformers=={major}.{minor}.*"' in capsys.readouterr().err


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure nothing; the whole program runs in the test above."""
    known = EngineRate(
        step_s=0.1, num_captured=0, mean_length=9.0, planned_bytes=2**20, peak_bytes=2**20
    )
    monkeypatch.setattr(program, "engine_rate", lambda *_, **__: known)
    monkeypatch.setattr(program, "static_batch_rate", lambda *_: 1.0)
    monkeypatch.setattr(program, "threads_rate", lambda *_: 1.0)
    monkeypatch.setattr(program, "read_bandwidth", lambda _: 1e10)
    monkeypatch.setattr(program, "num_equal", lambda device, dtype: (24, 24))


SMALL = ["--device", "cpu", "--sequences", "1,3", "--prompt-length", "9", "--num-tokens", "12"]


@pytest.mark.usefixtures("instant")
def test_a_part_that_runs_out_of_memory_leaves_a_gap_and_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        program,
        "static_batch_rate",
        failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    )
    main([str(tmp_path / "table.md"), *SMALL])
    written = (tmp_path / "table.md").read_text()
    rows = [line.split(" | ") for line in written.splitlines() if line.startswith("| tiny")]
    place = COLUMNS.index("generate, one batch, tok/s")
    assert [row[place] for row in rows] == ["-", "-"]
    assert "-" not in {cell for row in rows for i, cell in enumerate(row) if i != place}
    assert "- tiny, 3 sequences: generate, one batch: out of memory" in written


@pytest.mark.usefixtures("instant")
def test_an_interrupted_run_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def end(loaded: object, load: Load) -> float:
        measured.append(load.num_seqs)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(program, "threads_rate", end)
    with pytest.raises(KeyboardInterrupt):
        main([str(tmp_path / "table.md"), *SMALL])
    assert (tmp_path / "table.md").read_text().count("| tiny") == 1


def test_a_table_that_can_not_be_written_fails_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "read_bandwidth", failing(AssertionError("this takes long")))
    with pytest.raises(FileNotFoundError):
        main([str(tmp_path / "missing" / "table.md"), *SMALL])


def test_no_part_starts_after_the_time_limit(tmp_path: Path) -> None:
    main([str(tmp_path / "table.md"), *SMALL, "--minutes", "0"])
    written = (tmp_path / "table.md").read_text()
    assert "- equality in float32: no time was left" in written
    assert "| tiny" not in written


def test_more_threads_generate_fewer_tokens_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        rates, "_generate", lambda model, prompts, num_tokens: asked.append(num_tokens)
    )
    threads_rate(build(TINY, CPU), Load(4, 8, 400))
    assert asked == [2] * 4 + [1] * 4 + [128] * 4


def test_a_steps_floor_counts_weights_once_and_keys_for_each_sequence() -> None:
    loaded = build(TINY, CPU)
    token_bytes = 2 * 2 * 2 * 16 * 4  # keys and values, 2 layers, 2 heads of 16, float32
    one, five = step_bytes(loaded, 1, 100), step_bytes(loaded, 5, 100)
    assert five - one == 4 * 100 * token_bytes
    assert one - 100 * token_bytes == loaded.num_weight_bytes - 512 * 64 * 4 * (
        not loaded.text_config.tie_word_embeddings
    )


def test_the_engines_mean_length_lies_between_prompt_and_end() -> None:
    rate = engine_rate(build(TINY, CPU), Load(2, 8, 16), cuda_graphs=True)
    assert rate.step_s > 0
    assert rate.num_captured in (0, 2)  # programs of one and two rows, if the CPU runs any
    assert 8 < rate.mean_length < 24


def test_answers_too_short_to_be_timed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MAX_BATCHED_TOKENS", 8)
    with pytest.raises(ValueError, match="more new tokens"):
        engine_rate(build(TINY, CPU), Load(4, 24, 4), cuda_graphs=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_the_engine_gives_what_generate_gives() -> None:
    assert num_equal(torch.device("cuda", 0), torch.float32) == (24, 24)


def test_after_generate_the_model_attends_over_the_kv_cache_again() -> None:
    loaded = build(TINY, CPU)
    with stock(replace(loaded, plain=loaded.model)) as model:  # as on a GPU
        assert model.config._attn_implementation == "sdpa"
    assert loaded.text_config._attn_implementation == "kv_cache"


def test_on_a_cpu_generate_has_layers_that_threads_may_share() -> None:
    loaded = build(TINY, CPU)
    with stock(loaded) as model:
        assert model is not loaded.model
        assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
        threads_rate(loaded, Load(8, 32, 8))


def test_missing_figures_are_dashes() -> None:
    report = Report("A title", ("a note",), (Row("m", 256),))
    line = next(line for line in report.markdown.splitlines() if line.startswith("| m |"))
    assert line == "| m | 256 |" + " - |" * (len(COLUMNS) - 2)
    assert "- a note" in report.markdown
