"""How large the server under test is."""

MODEL_SECTION = "pydoc-chat"
NUM_REPLICAS = 2
MAX_NUM_SEQS = 16
"""Of each replica; as many as `NUM_QUEUED` may wait for a place."""

NUM_QUEUED = 8
DETECTOR = "pydoc-detector"
"""The model that a wrong file damages, so that its replica can't start."""
