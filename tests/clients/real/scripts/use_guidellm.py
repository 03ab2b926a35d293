"""guidellm: a few synthetic prompts, one after the other, against chat and plain completions."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import BASE_URL, MODEL, run

TOKENIZER = Path(__file__).parents[4] / "models" / MODEL


def benchmark(request_format: str) -> None:
    folder = Path(tempfile.mkdtemp())
    target = BASE_URL.removesuffix("/v1")
    done = subprocess.run(
        [
            *(Path(sys.executable).parent / "guidellm", "run"),
            "--backend",
            f"kind=openai_http,target={target},model={MODEL},request_format={request_format}",
            *("--profile", "kind=synchronous"),
            *("--constraint", "kind=max_requests,count=3"),
            *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
            *("--output", f"kind=json,path={folder / 'result.json'}"),
            "--disable-console",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (run,) = json.loads((folder / "result.json").read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    assert totals["successful"] == 3, totals
    assert totals["errored"] == 0, totals


def chat() -> None:
    benchmark("/v1/chat/completions")


def completions() -> None:
    benchmark("/v1/completions")


run(globals())
