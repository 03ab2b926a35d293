"""Serves one model in the foreground until SIGINT, as `make serve` does with the embedded ones.

What a benchmark that starts several servers in turn calls. The configuration is the shipped
serve_config.yaml with another model in it.

Run: python -m benchmarks.peers.serve_model --model FOLDER --port 8000 [--task classify]
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from k8s.make_base import parse_env

ROOT = Path(__file__).resolve().parent.parent.parent


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Return the shipped configuration with the model of the arguments in it, and no other."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = args.port
    application = config["applications"][0]
    model = next(m for m in application["args"]["models"] if m["task"] == args.task)
    deployments = {each["name"]: each for each in application["deployments"]}
    ingress, deployment = deployments["Ingress"], deployments[model["id"]]
    name = Path(args.model).name
    model |= {"id": name, "source": str(Path(args.model).resolve()), "dtype": args.dtype}
    model |= {"max_model_len": args.max_model_len, "num_threads": args.num_threads}
    if args.max_batched_tokens is not None:
        model["max_batched_tokens"] = args.max_batched_tokens
    if args.task == "generate":
        model["max_num_seqs"] = 32
        deployment["autoscaling_config"]["target_ongoing_requests"] = model["max_num_seqs"]
    ingress["autoscaling_config"] = {"min_replicas": 1, "max_replicas": 1}
    deployment["name"] = name
    application["args"]["models"], application["deployments"] = [model], [ingress, deployment]
    return config


def main() -> None:
    """Write the configuration to a temporary file and become `serve run`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="a folder with weights and tokenizer")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--task", choices=("generate", "classify"), default="generate")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-batched-tokens", type=int, help="as shipped, if not given")
    parser.add_argument("--num-threads", default="auto")
    args = parser.parse_args()
    args.num_threads = args.num_threads if args.num_threads == "auto" else int(args.num_threads)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        yaml.safe_dump(configuration(args), file)
    environment = {**os.environ, **parse_env((ROOT / "serve.env").read_text())}
    serve = str(Path(sys.executable).with_name("serve"))
    os.chdir(ROOT)
    os.execve(serve, [serve, "run", "--address", "local", file.name], environment)


if __name__ == "__main__":
    main()
