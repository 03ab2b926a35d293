"""Files: OpenAI's `/v1/files`, for batches."""
