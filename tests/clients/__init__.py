"""Real client libraries against `serve run` with the embedded model, over HTTP."""
