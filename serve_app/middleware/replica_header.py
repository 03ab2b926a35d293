"""How HAProxy and the replicas behind it know each other.

The ingresses of all servers on a machine listen on neighbouring ports, and a port that one of them
has left may be another server's next. Ray gives each replica a random name, which is also its name
in HAProxy's configuration. HAProxy sends requests only to a replica whose health check answers with
that name, and each request names the replica that it is meant for.
"""

import re
from typing import Final

REPLICA_HEADER: Final = "X-Raystream-Replica"

HEALTH_PATH: Final = "/-/healthz"
"""Where HAProxy asks a replica, or Serve's own proxy, for its health."""


def haproxy_name(actor_name: str) -> str:
    """Return the name that Ray gives to an actor in HAProxy's configuration.

    Source: HAProxyManager.get_safe_name in ray.serve._private.haproxy
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", actor_name.replace("#", "-").replace("/", "."))
