"""Classification: batches offline and online, by hand-built designs and by ours."""
