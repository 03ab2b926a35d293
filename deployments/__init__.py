"""The Serve deployments that run on the GPUs: thin shells around the engine and the classifier."""
