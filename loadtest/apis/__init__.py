"""What a request's body looks like, and what an event of its answer means, for each kind of server."""
