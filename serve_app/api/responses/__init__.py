"""`POST /v1/responses`: the newer of OpenAI's two APIs for conversations, without its store."""
