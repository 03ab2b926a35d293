"""What the records say: figures by their definitions, sentences by the figures.

`request_table` makes columns of the records, `spans` finds the window and the steady state,
`level_figures` takes percentiles and rates over them, `findings` says in words what they show.
Nothing here reads a file or prints.
"""
