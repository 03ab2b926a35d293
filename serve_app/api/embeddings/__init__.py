"""`POST /v1/embeddings`: turns texts into vectors."""
