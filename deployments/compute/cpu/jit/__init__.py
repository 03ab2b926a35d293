"""Machine code generated at run time with llvmlite, run by torch's OpenMP threads."""
