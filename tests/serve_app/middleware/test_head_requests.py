from tests.offenders import for_each
from tests.serve_app.apps import Client


@for_each(
    "/v1/models", "/v1/models/m", "/v1/models/x", "/health", "/live", "/ready", "/version",
    "/docs", "/openapi.json", "/nothing",
)  # fmt: skip
async def test_head_is_answered_like_get_without_the_body(path: str, client: Client) -> None:
    headers = {"x-request-id": "mine"}
    got = await client.get(path, headers=headers)
    head = await client.head(path, headers=headers)
    assert (head.status_code, dict(head.headers)) == (got.status_code, dict(got.headers))
    assert got.content
    assert not head.content


async def test_head_on_a_post_route_names_the_right_method(client: Client) -> None:
    answer = await client.head("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_a_wrong_method_is_offered_head_beside_get(client: Client) -> None:
    answer = await client.delete("/v1/models")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert "GET, HEAD" in answer.json()["error"]["message"]
