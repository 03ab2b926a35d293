"""lm-evaluation-harness: its model `local-completions`, on tasks without a data set of the hub."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.openai_completions import LocalCompletionsAPI
from steps import BASE_URL, MODEL, run

TOKENIZER = Path(__file__).resolve().parents[4] / "models/pydoc-chat"
os.environ["OPENAI_API_KEY"] = "none"  # it would send an empty one, which is no valid header

BEGINNING = "Join two or more"
ENDINGS = [" pathname components", " green elephants"]


def _model(**options: Any) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        base_url=f"{BASE_URL}/completions",
        model=MODEL,
        tokenizer_backend="huggingface",
        tokenizer=str(TOKENIZER),
        max_length=512,
        max_retries=1,
        **options,
    )


def _task(folder: Path, output_type: str, **config: Any) -> ConfigurableTask:
    data = folder / "data.jsonl"
    row = {"question": BEGINNING, "endings": ENDINGS, "right": 0}
    data.write_text(json.dumps(row) + "\n")
    return ConfigurableTask(
        config={
            "task": output_type,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": output_type,
            **config,
        }
    )


def _evaluate(output_type: str, **config: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        task = _task(Path(folder), output_type, **config)
        found = simple_evaluate(model=_model(), tasks=[task], bootstrap_iters=0)
    assert found is not None
    results: dict[str, Any] = found["results"][output_type]
    return results


def multiple_choice() -> None:
    results = _evaluate(
        "multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{endings}}",
        doc_to_target="{{right}}",
        target_delimiter="",
        metric_list=[{"metric": "acc"}],
    )
    assert results["acc,none"] == 1.0, results


def rolling() -> None:
    results = _evaluate(
        "loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{question}}",
        metric_list=[{"metric": "word_perplexity"}],
    )
    assert 1 < results["word_perplexity,none"] < math.inf, results


def generate_until() -> None:
    results = _evaluate(
        "generate_until",
        doc_to_text="{{question}}",
        doc_to_target="x",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 8},
        metric_list=[{"metric": "exact_match"}],
    )
    assert results["exact_match,none"] == 0.0, results


def several_at_once() -> None:
    requests = [
        Instance("loglikelihood", {}, (BEGINNING, ending), at) for at, ending in enumerate(ENDINGS)
    ]
    likely, unlikely = _model(batch_size=2).loglikelihood(requests)
    assert unlikely[0] < likely[0] < 0


run(globals())
