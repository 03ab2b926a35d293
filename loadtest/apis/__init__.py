"""Kinds of server: what a request's body looks like, and what an event of its answer means."""
