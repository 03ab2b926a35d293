"""`POST /rerank`, `/v1/rerank` and `/v2/rerank`: sort documents by how well they answer a query."""
