"""What a client touches: HTTP in, Server-Sent Events out, and the graph's composition root."""
