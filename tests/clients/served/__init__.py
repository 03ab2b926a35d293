"""Real client libraries against a real server, over sockets and through HAProxy."""
