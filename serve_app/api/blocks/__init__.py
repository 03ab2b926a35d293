"""The blocks that an answer consists of, for APIs that tell them apart: Messages and Responses."""
