"""Runs sequences on vLLM instead of the embedded engine; it runs in vLLM's environment.

`moves` says how a sequence is handed to vLLM, also one that another replica began. `draws`,
`grammars`, `scheduler`, `failures` and `watches` run inside vLLM's own processes.
"""
