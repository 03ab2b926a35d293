"""Captures decode steps and replays them as a whole: CUDA graphs and CPU programs.

The first step of a size is captured, and each later step of that size replays the capture on the
same memory. `DecodeReplay` is the interface; `cuda_replay` implements it on a GPU, and `cpu_replay`
on a CPU. Both capture a `StaticDecodeStep`.
"""
