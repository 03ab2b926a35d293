"""Clients as people have them, against `serve run` with the embedded model, over HTTP."""
