"""`raystream-serve FILE`: serves a file's application on this machine until Ctrl-C.

It runs the driver under the supervisor. This process does nothing else, so it imports no Ray.
"""

import sys

from serve_app.commands.supervise import run_supervised

DRIVER = (sys.executable, "-m", "serve_app.commands.driver")
HELP = frozenset({"-h", "--help"})
USAGE = "usage: raystream-serve FILE\n"
DESCRIPTION = """
Serves the application of a Serve configuration, such as serve_config.yaml, on this machine until
Ctrl-C. It first checks the file as raystream-check does, and that the server's ports are free.
"""


def main() -> int:
    """Serve the file that the command line names and return the exit code."""
    if HELP.intersection(sys.argv[1:]):
        sys.stdout.write(f"{USAGE}{DESCRIPTION}")
        return 0
    if len(sys.argv) != 2:
        sys.stderr.write(USAGE)
        return 2
    return run_supervised([*DRIVER, sys.argv[1]])


if __name__ == "__main__":
    sys.exit(main())
