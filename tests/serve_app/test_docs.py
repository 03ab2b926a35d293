import re

import httpx
import pytest

from tests.serve_app.test_ingress import openapi


async def test_the_page_loads_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    loaded.remove("data:,")  # no icon
    assert len(loaded) == 3
    for path in loaded:
        answer = await client.get(str(httpx.URL("http://test/docs").join(path)))
        assert answer.status_code == 200
        assert answer.content


async def test_the_page_s_policy_lets_no_inline_script_run_and_nothing_foreign_load(
    client: httpx.AsyncClient,
) -> None:
    page = await client.get("/docs")
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "http" not in page.headers["content-security-policy"]
    scripts = re.findall(r"<script([^>]*)>([^<]*)</script>", page.text)
    assert all("src=" in attributes and not content for attributes, content in scripts)
    assert " style=" not in page.text


async def test_the_script_asks_for_our_document(client: httpx.AsyncClient) -> None:
    script = (await client.get("/docs/start.js")).text
    assert 'url: "openapi.json"' in script
    assert (await openapi(client))["openapi"].startswith("3.1")


@pytest.mark.parametrize("path", ["/docs/nothing.js", "/docs/../config.py", "/docs/%2e%2e/docs.py"])
async def test_nothing_else_is_served_beside_the_page(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


async def test_a_wrong_method_beside_the_page_names_the_right_ones(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.post("/docs/start.js")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
