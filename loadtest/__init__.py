"""The load tester: an HTTP client that imports nothing of the server.

`cli` reads what is asked for into a `config`. `load` decides when requests are sent, `sender` sends
one and makes its `record`, `apis` knows what an event means. `run_files` keeps what was measured;
`analysis`, `page` and `comparison` read these files alone. `mock` is a server to aim at.
"""
