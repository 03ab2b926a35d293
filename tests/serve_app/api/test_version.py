from importlib.metadata import version

import httpx


async def test_the_version_is_the_package_s(client: httpx.AsyncClient) -> None:
    answer = await client.get("/version")
    assert answer.json() == {"version": version("raystream")}
