"""The engine on a GPU, beside the memory's bandwidth and `model.generate`; needs no Ray."""
