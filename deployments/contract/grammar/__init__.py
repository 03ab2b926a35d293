"""Grammars that bound an answer, as far as both the server and the engine read them."""
