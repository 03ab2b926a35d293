from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.haproxy import HAProxyManager

from serve_app.middleware.replica_header import haproxy_name


@given(st.text())
def test_an_actor_has_the_name_that_ray_writes_into_haproxy_s_configuration(name: str) -> None:
    actor: Any = HAProxyManager
    assert haproxy_name(name) == actor.__ray_metadata__.modified_class.get_safe_name(name)
