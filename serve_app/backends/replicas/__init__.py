"""Calls to replicas: Serve's handles and router, and the channels that bring deltas back."""
