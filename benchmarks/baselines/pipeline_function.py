"""What the baselines call: a model as a function that takes texts and returns a result for each."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
PipelineFunction: TypeAlias = Callable[[Sequence[str]], Sequence[Result]]
"""Runs one batch and blocks until it is done."""
