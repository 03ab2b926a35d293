"""Which files Ray's variables name; `test_token_channels` speaks TLS with them."""

import pytest

from deployments.contract.channel.tls import TlsFiles

NAMED = {
    "RAY_TLS_SERVER_CERT": "/tls/node.crt",
    "RAY_TLS_SERVER_KEY": "/tls/node.key",
    "RAY_TLS_CA_CERT": "/tls/ca.crt",
}


@pytest.mark.parametrize("switch", [{}, {"RAY_USE_TLS": "0"}, {"RAY_USE_TLS": "false"}])
def test_without_ray_s_switch_there_is_no_tls(switch: dict[str, str]) -> None:
    assert TlsFiles.of(NAMED | switch) is None


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_with_ray_s_switch_the_files_are_ray_s(value: str) -> None:
    found = TlsFiles.of(NAMED | {"RAY_USE_TLS": value})
    assert found == TlsFiles("/tls/node.crt", "/tls/node.key", "/tls/ca.crt")


@pytest.mark.parametrize("missing", NAMED)
def test_a_switch_without_a_file_is_an_error(missing: str) -> None:
    named = {name: value for name, value in NAMED.items() if name != missing}
    with pytest.raises(KeyError, match=missing):
        TlsFiles.of(named | {"RAY_USE_TLS": "1"})
