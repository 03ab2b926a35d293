"""What the commands that train and evaluate a model have in common."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch


def folder_argument(description: str | None, default: Path, num_threads: int) -> Path:
    """Read `--folder`, the model's folder, from the command line.

    Args:
        description: The help's text.
        default: The folder without the option.
        num_threads: Threads that torch may use: the figures depend on it.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, default=default)
    torch.set_num_threads(num_threads)
    folder: Path = parser.parse_args().folder
    return folder


def write_evaluation(figures: dict[str, Any], folder: Path) -> None:
    """Print a model's figures, and write evaluation.json beside its weights."""
    report = json.dumps(figures, indent=2) + "\n"
    (folder / "evaluation.json").write_text(report, encoding="utf-8")
    sys.stdout.write(report)
