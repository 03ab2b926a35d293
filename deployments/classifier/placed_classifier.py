"""A classifier on a replica's device, within its share.

It is made on the worker's thread (`deployments.classifier.device_worker`), whose number of compute
threads it sets.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from deployments.classifier.lanes import choose_num_lanes
from deployments.classifier.model_loader import LoadedClassifier, load_classifier
from deployments.classifier.request_queue import TokenIds
from deployments.classifier.sequence_classifier import Layout, SequenceClassifier
from deployments.compute.device_errors import is_fatal, is_out_of_memory
from deployments.compute.errors import UnsupportedModelError
from deployments.compute.work_watch import max_work_s
from deployments.device.device import MemoryDevice
from deployments.device.memory_budget import GIB, DeviceMemoryError
from deployments.device_share import claim_share, set_compute_threads
from deployments.model_spec import ModelSpec
from deployments.start_phases import EndPhase

LARGE_MODEL_BYTES = 32 * 2**20
"""From this size on, computing a text of a hundred tokens takes longer than its way over HTTP."""

LAYOUTS: Mapping[Layout, str] = {
    "packed": "packed without padding",
    "padded": "padded",
    "one by one": "run one by one",
}
"""Names of the layouts for the log."""


@dataclass(frozen=True, slots=True)
class PlacedClassifier:
    """A classifier that is ready to run.

    Attributes:
        classifier: The model, warmed up.
        loaded: The loaded model that it was made from.
        num_threads: Number of compute threads.
    """

    classifier: SequenceClassifier
    loaded: LoadedClassifier
    num_threads: int

    @property
    def summary(self) -> str:
        """The log's description of the model: its lanes, dtype, weights, labels and layout."""
        return (
            f"{self.classifier.num_lanes} lane(s), "
            f"{str(self.loaded.model.dtype).removeprefix('torch.')}, "
            f"{self.loaded.num_weight_bytes / GIB:.3f} GiB of weights, "
            f"{len(self.loaded.labels)} labels, texts of {self.loaded.max_model_len} tokens, "
            f"{LAYOUTS[self.classifier.layout]}"
        )


def place_classifier(
    spec: ModelSpec, device: MemoryDevice, end_phase: EndPhase = lambda name: None
) -> PlacedClassifier:
    """Load a model onto a device and warm it up.

    Raises:
        UnsupportedModelError: The model can't be served; one line says why.
        DeviceMemoryError: The share of the device is too small.
    """
    claim_share(spec, device)
    loaded = load_classifier(
        spec.source,
        revision=spec.revision,
        dtype=spec.dtype,
        device=device.torch_device,
        max_model_len=spec.max_model_len,
    )
    end_phase("weights")
    num_threads = set_compute_threads(spec, loaded.num_weight_bytes, LARGE_MODEL_BYTES)
    probes = loaded.probes
    num_lanes = choose_num_lanes(loaded.model, device.torch_device, num_threads)
    max_batch_s = max_work_s(
        loaded.num_weight_bytes,
        max(spec.max_batched_tokens, loaded.max_model_len),
        device.torch_device.type,
    )
    classifier = SequenceClassifier(
        loaded.model, loaded.layout, probes.of_length(1), num_lanes, max_batch_s
    )
    _warm_up(classifier, probes.of_length(loaded.max_model_len), spec)
    end_phase("warm-up")
    return PlacedClassifier(classifier, loaded, num_threads)


def _warm_up(classifier: SequenceClassifier, longest: TokenIds, spec: ModelSpec) -> None:
    """Run the shortest text and the largest micro-batch, so that errors show at the start."""
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
                f"a share of {spec.device_share:g} does not hold a micro-batch of "
                f"{len(sequences)} x {len(sequences[0])} tokens besides the weights; raise "
                "num_gpus (or gpu_share), or lower max_batched_tokens or max_model_len"
            ) from error
        if not probabilities.isfinite().all():
            raise UnsupportedModelError(
                f"{spec.source!r} gives no finite numbers; try another dtype than {spec.dtype}"
            )
