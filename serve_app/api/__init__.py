"""The HTTP API: a folder for each surface that a client sees, and folders for what they share."""
