"""Jobs on disk: the one store of the ingresses of a node, files, and batches that run from it."""
