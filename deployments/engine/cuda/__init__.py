"""What makes a step fast on a GPU: decode steps captured as graphs."""
