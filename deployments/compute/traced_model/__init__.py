"""A model's pass as a flat list of operators: traced, kept on disk as text, and run."""
