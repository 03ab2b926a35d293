"""Computes figures from the records, and describes the figures in sentences.

`request_table` turns records into columns, `spans` finds the window and the steady state,
`level_figures` computes percentiles and rates over them, and `findings` describes the results in
sentences. Nothing here reads a file; only a comparison prints.
"""
