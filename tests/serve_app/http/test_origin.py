import pytest
from starlette.datastructures import Headers

from deployments.contract.errors import ForeignOriginError
from serve_app.http.origin import require_origin


@pytest.mark.parametrize("origin", [None, "http://own:8000", "https://own:8000", "http://friend"])
def test_own_and_allowed_pages_may_ask_and_programs(origin: str | None) -> None:
    require_origin(headers(origin), ["http://friend"])


@pytest.mark.parametrize("origin", ["http://own", "http://elsewhere:8000", "null", "", "http://["])
def test_other_pages_may_not(origin: str) -> None:
    with pytest.raises(ForeignOriginError):
        require_origin(headers(origin), ["http://friend"])


@pytest.mark.parametrize("origin", ["null", "http://["])
def test_no_host_is_that_of_an_origin_without_one(origin: str) -> None:
    with pytest.raises(ForeignOriginError):
        require_origin(Headers({"origin": origin}), ())


def headers(origin: str | None) -> Headers:
    return Headers({"host": "own:8000"} | ({} if origin is None else {"origin": origin}))
