"""Compares raystream, over vLLM or over its own engine, with vLLM's own server.

Both run the same model with the same threads, length and sequences at once, and are loaded by
turns with 1, 8 or 32 streams. A stream sends its next request when its answer is complete. Requests
are greedy, and their prompts share no prefix. With `engine: vllm`, both have the same environment
and executor: what raystream adds is HTTP by HAProxy and an ingress, Ray Serve, and a channel; what
it replaces is vLLM's HTTP server and its output processor. `benchmarks.serving.rounds` says what
each figure is.

With `--defaults`, vLLM's own server runs as `vllm serve` starts it, its engine in a process of its
own; else in the server's process, as in raystream's replica. The model is a folder, or a random
one of 3 million parameters, with which HTTP is most of the work.

Run: python -m benchmarks.peers.beside_vllm [--model FOLDER] [--engine-python .venv-vllm]
     python -m benchmarks.peers.beside_vllm --engine raystream --defaults --num-threads 2
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.cpu_shapes import THREE_MILLION, save_shape
from benchmarks.serving.processes import started
from benchmarks.serving.rounds import NUM_TOKENS, Prompts, Server, compare
from serve_app.commands.server_environment import HAPROXY_PORTS, free_ports
from serve_app.vllm_environment import DEFAULT_FOLDER, VARIABLES, python_of

RANDOM = "three-million"
KV_BYTES = 2**30
GOALS = (
    "with one engine and executor: tokens/s at least 0.96, TTFT p50 at most 1.05; with the small "
    "model, where HTTP is most of the work: CPU a token at most 1.25, TTFT p50 at most 6 ms more"
)


def main() -> None:
    """Compare, and print the figures and the goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="a folder; default: a small random model")
    parser.add_argument("--engine", choices=("vllm", "raystream"), default="vllm")
    parser.add_argument("--max-stall-ms", type=int, help="raystream's engine; default: none")
    parser.add_argument("--engine-python", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--requests", type=int, default=4, help="by a stream, in one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--defaults", action="store_true", help="vLLM's server as it comes")
    options = parser.parse_args()
    options.engine_python = options.engine_python.absolute()
    streams = [int(each) for each in options.streams.split(",")]
    options.max_num_seqs = max(streams)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        if options.model is None:
            model = folder / RANDOM
            tokenizer = save_shape(THREE_MILLION, model)
        else:
            model = options.model.resolve()
            tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        servers = (
            stack.enter_context(vllm_server(model, folder, options)),
            stack.enter_context(raystream_server(model, folder, options)),
        )
        # One stream alone needs more requests for a steady median.
        num_requests = {each: options.requests * max(each, 4) for each in streams}
        prompts = Prompts(tokenizer, model.name)
        table = compare(servers, prompts, num_requests, options.rounds)
    table.title = f"{model.name}, {options.dtype}, answers of {NUM_TOKENS} tokens"
    Console().print(table)
    Console().print(f"goals, {GOALS}")


@contextmanager
def vllm_server(model: Path, folder: Path, options: argparse.Namespace) -> Iterator[Server]:
    """Run vLLM's own server until the block ends."""
    (port,) = free_ports(1)
    command = [str(python_of(options.engine_python)), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", model.name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    command += ["--dtype", options.dtype, "--max-model-len", str(options.max_model_len)]
    command += ["--max-num-seqs", str(options.max_num_seqs)]
    command += ["--kv-cache-memory-bytes", str(KV_BYTES)]
    environment = {**os.environ, "PATH": f"{options.engine_python / 'bin'}:{os.environ['PATH']}"}
    if not options.defaults:
        environment |= {**VARIABLES, "OMP_NUM_THREADS": str(options.num_threads)}
        command += ["--distributed-executor-backend", "uni"]
    url = f"http://127.0.0.1:{port}/health"
    log = folder / "vllm.log"
    with started(command, url, log=log, cwd=folder, environment=environment) as process:
        yield Server("vLLM", port, process)


@contextmanager
def raystream_server(model: Path, folder: Path, options: argparse.Namespace) -> Iterator[Server]:
    """Run raystream until the block ends."""
    port, *others = free_ports(1 + len(HAPROXY_PORTS))
    environment = {**os.environ, **dict(zip(HAPROXY_PORTS, map(str, others), strict=True))}
    command = [sys.executable, "-m", "benchmarks.peers.serve_model", "--port", str(port)]
    command += ["--model", str(model), "--engine", options.engine, "--dtype", options.dtype]
    if options.engine == "vllm":
        command += ["--engine-python", str(options.engine_python)]
    if options.max_stall_ms is not None:
        command += ["--max-stall-ms", str(options.max_stall_ms)]
    command += ["--num-threads", str(options.num_threads)]
    command += ["--max-model-len", str(options.max_model_len)]
    command += ["--max-num-seqs", str(options.max_num_seqs)]
    command += ["--kv-cache-memory-bytes", str(KV_BYTES)]
    url = f"http://127.0.0.1:{port}/ready"
    log = folder / "raystream.log"
    with started(command, url, log=log, environment=environment) as process:
        yield Server("raystream", port, process)


if __name__ == "__main__":
    main()
