"""A client of a server, for the commands that ask one: `raystream chat` and `raystream demo`."""
