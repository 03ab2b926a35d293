"""Mistakes that people make in such manifests, each with the check that must catch it.

A file holds the mistakes that the rules of the same name catch. `test_mistakes` plants them one at
a time.
"""

from tests.k8s.mistakes import kuberay, network, pods, references, schemas, serving, streams
from tests.k8s.mistakes.mistake import MISTAKES

__all__ = ["MISTAKES", "kuberay", "network", "pods", "references", "schemas", "serving", "streams"]
