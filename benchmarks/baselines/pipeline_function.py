"""The function that the baselines call: a model that returns a result for each text."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
PipelineFunction: TypeAlias = Callable[[Sequence[str]], Sequence[Result]]
"""Runs one batch and blocks until it is done."""
