"""A classifier on a replica's device, within its share.

Made on the worker's thread (`deployments.classifier.device_worker`), whose compute threads it sets.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deployments.classifier.model_loader import LoadedClassifier, load_classifier
from deployments.classifier.sequence_classifier import Layout, SequenceClassifier
from deployments.classifier.shares import choose_num_lanes
from deployments.classifier.waiting_line import TokenIds
from deployments.engine.cpu.allocator import keep_freed_memory
from deployments.engine.device_errors import is_fatal, is_out_of_memory
from deployments.engine.model_check import UnsupportedModelError
from deployments.gpu.budget import GIB, DeviceMemoryError
from deployments.gpu.device import MemoryDevice, num_compute_threads, num_cores
from deployments.model_spec import ModelSpec

logger = logging.getLogger("ray.serve")

LARGE_MODEL_BYTES = 32 * 2**20
"""Weights from which on a text of a hundred tokens takes longer than its way over HTTP."""

LAYOUTS: Mapping[Layout, str] = {
    "packed": "packed without padding",
    "padded": "padded",
    "one by one": "run one by one",
}
"""How the log names them."""


@dataclass(frozen=True, slots=True)
class PlacedClassifier:
    """A classifier that is ready to run.

    Attributes:
        classifier: The model, warmed up.
        loaded: What it was made of.
        num_threads: Threads that compute.
    """

    classifier: SequenceClassifier
    loaded: LoadedClassifier
    num_threads: int


def place_classifier(spec: ModelSpec, device: MemoryDevice) -> PlacedClassifier:
    """Load a model onto a device and warm it up.

    Raises:
        UnsupportedModelError: The model can't be served; one line says why.
        DeviceMemoryError: The share of the device is too small.
    """
    keep_freed_memory()
    torch.set_num_threads(num_cores())
    device.enforce_share(spec.num_gpus or 1.0)
    loaded = load_classifier(
        spec.source,
        revision=spec.revision,
        dtype=spec.dtype,
        device=device.torch_device,
        max_model_len=spec.max_model_len,
    )
    num_threads = spec.num_threads or num_compute_threads(
        loaded.num_weight_bytes, LARGE_MODEL_BYTES
    )
    torch.set_num_threads(num_threads)
    probes = loaded.probes
    num_lanes = choose_num_lanes(loaded.model, device.torch_device, num_threads)
    classifier = SequenceClassifier(loaded.model, loaded.layout, probes.of_length(1), num_lanes)
    _warm_up(classifier, probes.of_length(loaded.max_model_len), spec)
    return PlacedClassifier(classifier, loaded, num_threads)


def _warm_up(classifier: SequenceClassifier, longest: TokenIds, spec: ModelSpec) -> None:
    """Run the shortest text, and the largest micro-batch: what will not fit is found out now."""
    num_longest = max(1, spec.max_batched_tokens // len(longest))
    batches = [(classifier.probe,), (longest,) * num_longest]
    for sequences in batches:
        try:
            probabilities = classifier(sequences)
        except Exception as error:
            if is_fatal(error):
                raise
            if not is_out_of_memory(error):
                reason = f"{type(error).__name__}: {error}"
                raise UnsupportedModelError(
                    f"{spec.source!r} fails on a text of {len(sequences[0])} tokens: {reason}"
                ) from error
            raise DeviceMemoryError(
                f"a share of {spec.num_gpus or 1:g} does not hold a micro-batch of "
                f"{len(sequences)} x {len(sequences[0])} tokens beside the weights; raise num_gpus "
                "(or gpu_share), or lower max_batched_tokens or max_model_len"
            ) from error
        if not probabilities.isfinite().all():
            raise UnsupportedModelError(
                f"{spec.source!r} gives no finite numbers; try another dtype than {spec.dtype}"
            )


def log_placement(
    placed: PlacedClassifier, spec: ModelSpec, device: MemoryDevice, seconds: float
) -> None:
    """Log in one line what a replica has become, and how long that took."""
    logger.info(
        "%s is ready after %.1f s on %s: share %g of the device, %d compute thread(s) in "
        "%d lane(s), %s, %.3f GiB of weights, %d labels, texts of %d tokens, %s",
        spec.id,
        seconds,
        device.name,
        spec.num_gpus or 1,
        placed.num_threads,
        placed.classifier.num_lanes,
        str(placed.loaded.model.dtype).removeprefix("torch."),
        placed.loaded.num_weight_bytes / GIB,
        len(placed.loaded.labels),
        placed.loaded.max_model_len,
        LAYOUTS[placed.classifier.layout],
    )
