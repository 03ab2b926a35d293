"""The settings of a run: read from flags and files, then checked."""
