"""The load tester's room: an HTTP client that imports nothing of the server.

It is empty so far; the import contracts hold its walls.
"""
