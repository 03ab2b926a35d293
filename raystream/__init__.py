"""The one command: the server's command line and the load tester's, which share no code."""
