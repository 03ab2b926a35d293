"""The results of a run: records, summaries, and the files that hold them."""
