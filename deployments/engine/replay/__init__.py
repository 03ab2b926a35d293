"""Captures decode steps and replays them as a whole: CUDA graphs and CPU programs.

The first step of a size is captured, and each later step of that size replays the capture on the
same memory: `cuda_graphs` on a GPU, `cpu_program` on a CPU. Both capture a `StaticDecodeStep`.
"""
