"""Linear layers: weights laid out for the CPU, small batches, int8 and int4."""
