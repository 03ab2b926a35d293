import re

import pytest

from tests.offenders import for_each
from tests.serve_app.apps import Client


@pytest.mark.parametrize("given", ["a", "A_b-9", "x" * 64])
async def test_a_valid_id_comes_back(client: Client, given: str) -> None:
    answer = await client.get("/v1/models", headers={"x-request-id": given})
    assert answer.headers.get_list("x-request-id") == [given]


@for_each("", "x" * 65, "a b", "a\u00e9", "a.b", "$(rm)")
async def test_any_other_id_is_replaced(given: str, client: Client) -> None:
    answer = await client.get("/v1/models", headers={b"x-request-id": given.encode()})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


@pytest.mark.parametrize("path", ["/nowhere", "/v1/models", "/openapi.json", "/v1/models/x"])
async def test_every_answer_has_an_id(client: Client, path: str) -> None:
    assert (await client.get(path)).headers["x-request-id"]
