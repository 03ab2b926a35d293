"""The GPU's fused operators, in Triton, which every CUDA build of torch brings."""
