"""Machine code generated at run time with llvmlite or numba, run by torch's OpenMP threads."""
