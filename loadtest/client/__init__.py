"""Sends one request, reads its answer from the socket, and times it."""
