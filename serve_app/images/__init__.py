"""Images in requests: fetched, checked and read."""
