"""Tools: the functions that a request offers, and the calls in an answer."""
