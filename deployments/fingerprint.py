"""What a model's texts depend on beside the request, as one short name.

A client that keeps a seed and sees another fingerprint need not wonder at another text.

Source: https://platform.openai.com/docs/api-reference/chat/object (system_fingerprint)
"""

import hashlib
import json

import torch
import transformers

from deployments.model_spec import ModelSpec


def system_fingerprint(spec: ModelSpec) -> str:
    """Return `fp_` and ten hexadecimal digits, the same on all replicas of one configuration."""
    decisive = (
        spec.source,
        spec.revision,
        spec.dtype,
        spec.quantization,
        spec.device,
        torch.__version__,
        transformers.__version__,
    )
    return "fp_" + hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:10]
