"""Makes a stock model fast on a CPU: the same arithmetic on weights and kernels made for it."""
