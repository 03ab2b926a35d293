"""Runs sequences on vLLM instead of the embedded engine.

`engine`, `pooled_engine` and what they start with run in vLLM's environment, and `draws`,
`grammars`, `scheduler`, `failures` and `watches` inside vLLM's own processes there. `fleet`, in
front of servers of vLLM that run already, needs no vLLM and runs in raystream's own environment,
with `moves`, `requests` and `failures`. `pooling_worker`, `replica` and `logs` need none either.

`moves` says how a sequence is handed to vLLM, also one that another replica began.
"""
