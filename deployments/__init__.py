"""What runs on the GPUs: one file per Serve deployment, thin shells around the engine."""
