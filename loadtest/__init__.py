"""The load tester: an HTTP client that imports nothing from the server.

`commands` reads flags and files into a `config`. `load` decides when requests are sent, `client`
sends one request and returns its record, and `apis` knows the bodies and events of each kind of
server. `results` writes records to files and reads them. `analysis` and `report` work only from
those files. `mock` is a server to test against.
"""
