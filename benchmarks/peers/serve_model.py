"""Serves one model in the foreground until SIGINT, as `make serve` serves the embedded ones.

Benchmarks that start several servers in turn run this. The configuration is the shipped
serve_config.yaml with another model in it.

Run: python -m benchmarks.peers.serve_model --model FOLDER --port 8000 [--task classify | embed]
     python -m benchmarks.peers.serve_model --model FOLDER --port 8000 --engine vllm
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from serve_app.commands.check.compose import VLLM_MODEL
from serve_app.commands.server_environment import HAPROXY_BINARY
from serve_app.shipped_files import parse_env

ROOT = Path(__file__).resolve().parent.parent.parent


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Return the shipped configuration with the arguments' model as the only one."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = args.port
    application = config["applications"][0]
    # An entry that embeds has the keys of one that classifies.
    task = "generate" if args.task == "generate" else "classify"
    model = next(m for m in application["args"]["models"] if m["task"] == task)
    deployments = {each["name"]: each for each in application["deployments"]}
    ingress, deployment = deployments["Ingress"], deployments[model["id"]]
    name = Path(args.model).name
    model |= {
        "id": name,
        "task": args.task,
        "source": str(Path(args.model).resolve()),
        "dtype": args.dtype,
    }
    model |= {"max_model_len": args.max_model_len, "num_threads": args.num_threads}
    if args.max_batched_tokens is not None:
        model["max_batched_tokens"] = args.max_batched_tokens
    if args.task == "generate":
        model["quantization"] = args.quantization
        model["max_num_seqs"] = args.max_num_seqs
        if args.max_stall_ms is not None:
            model["max_stall_ms"] = args.max_stall_ms
        if args.kv_cache_memory_bytes is not None:
            model["kv_cache_memory_bytes"] = args.kv_cache_memory_bytes
        model["max_queued_requests"] = args.max_queued_requests
    if args.engine == "vllm":
        model |= {"engine": "vllm", "engine_python": args.engine_python}
        model.pop("quantization", None)  # vLLM finds it in the model's files
        deployment |= VLLM_MODEL
    application["args"]["tracing"]["otlp_endpoint"] = args.otlp_endpoint
    ingress["autoscaling_config"] = {"min_replicas": 1, "max_replicas": 1}
    deployment["name"] = name
    application["args"]["models"], application["deployments"] = [model], [ingress, deployment]
    return config


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line; None reads this process's own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="a folder with weights and tokenizer")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--task", choices=("generate", "classify", "embed"), default="generate")
    parser.add_argument("--engine", choices=("raystream", "vllm"), default="raystream")
    parser.add_argument("--engine-python", help="vLLM's environment; default: .venv-vllm")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", help="int8 or int4; default: none")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-batched-tokens", type=int, help="default: as shipped")
    parser.add_argument("--max-stall-ms", type=int, help="default: none")
    parser.add_argument("--num-threads", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="default: auto")
    parser.add_argument("--max-queued-requests", type=int, default=64)
    parser.add_argument("--otlp-endpoint", help="where traces go; default: nowhere")
    args = parser.parse_args(arguments)
    args.num_threads = args.num_threads if args.num_threads == "auto" else int(args.num_threads)
    return args


def main() -> None:
    """Write the configuration to a temporary file, and replace this process with `serve run`."""
    args = parsed()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        yaml.safe_dump(configuration(args), file)
    serve = str(Path(sys.executable).with_name("serve"))
    os.chdir(ROOT)
    os.execve(serve, [serve, "run", "--address", "local", file.name], environment())


def environment() -> dict[str, str]:
    """Return the variables that `make serve` sets."""
    return {
        **os.environ,
        **parse_env((ROOT / "serve.env").read_text()),
        HAPROXY_BINARY: str(Path(sys.executable).with_name("raystream-haproxy")),
    }


if __name__ == "__main__":
    main()
