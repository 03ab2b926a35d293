"""Classification benchmarks, offline and online: hand-built designs and this project."""
