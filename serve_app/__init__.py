"""The HTTP server: requests in, Server-Sent Events out, and the root that composes the graph."""
