"""vLLM's own benchmark: `vllm bench serve`, against chat and plain completions."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from steps import BASE_URL, MODEL, run

ADDRESS = urlsplit(BASE_URL)
TOKENIZER = Path(__file__).parents[4] / "models" / MODEL
# What the wheel would start: `vllm` imports the same function.
PROGRAM = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]


def bench(*options: str) -> None:
    folder = Path(tempfile.mkdtemp())
    done = subprocess.run(
        [
            *PROGRAM,
            *("--base-url", f"{ADDRESS.scheme}://{ADDRESS.netloc}"),
            *("--tokenizer", str(TOKENIZER)),
            *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16"),
            *("--num-prompts", "4", "--max-concurrency", "2", "--seed", "0", "--disable-tqdm"),
            *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
            *options,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((folder / "result.json").read_text())
    assert result["completed"] == 4, result
    assert result["total_output_tokens"] == 64, result


def completions() -> None:
    bench("--backend", "openai", "--model", MODEL)


def chat() -> None:
    bench("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--model", MODEL)


def chat_with_the_first_model_of_the_server() -> None:
    bench("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")


run(globals())
