"""The kinds of server: how to write a request's body and read its answer's events."""
