"""What the measurements of servers share: start them, stream from them, and run older commits."""
