"""What must hold of every rendering of k8s/, beyond what the API server checks.

A rule is a function from a rendering to lines that each name a fault. The tests apply all rules to
all overlays and combinations, and plant mistakes to show that each is caught.
"""

from tests.k8s.rules import kuberay, network, pods, references, serving, streams
from tests.k8s.rules.rendering import Rule

ALL: tuple[Rule, ...] = (
    *kuberay.RULES,
    *network.RULES,
    *pods.RULES,
    *references.RULES,
    *serving.RULES,
    *streams.RULES,
)
