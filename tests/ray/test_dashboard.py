"""Ray's dashboard, beside `make serve`: models, replicas and logs stand there under our names.

No other Ray may run meanwhile: only the first on a machine has the port of the agent that reads
logs.
"""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser

from tests.browser import Tab, tab_of
from tests.docs_page import UNTIL
from tests.ray.serve_run import READY_DEADLINE_S, Server, wait_until
from tests.ray.test_serve_run import question

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.parametrize("shipped_server", ["haproxy"], indirect=True, scope="package"),
]

MODELS = ("pydoc-chat", "pydoc-detector", "pydoc-search")
SEARCH = """
(async () => {
  const box = await until(() => [...document.querySelectorAll("input")].find(
    (each) => each.closest(".MuiFormControl-root")?.innerText.includes("Keyword")
  ));
  const {set} = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
  set.call(box, %s);  // React hears of a value only if its own setter was not called
  box.dispatchEvent(new Event("input", {bubbles: true}));
})()
"""


async def run(tab: Tab, expression: str) -> None:
    """Evaluate an expression that may wait by `until`."""
    await tab.evaluate(f"{{ {UNTIL} {expression} }}")


async def shown(tab: Tab, *texts: str) -> None:
    """Wait until a page shows all of these texts."""
    wanted = json.dumps(texts)
    await run(
        tab, f"until(() => {wanted}.every((each) => document.body?.innerText.includes(each)))"
    )


@pytest.fixture
def address(server: Server) -> str:
    """Return the dashboard's address, as the screen tells it."""
    begin = "Ray's dashboard: "
    log = server.log
    wait_until(lambda: begin in log.read_text(), READY_DEADLINE_S)
    (line,) = [each for each in log.read_text().splitlines() if each.startswith(begin)]
    return line.removeprefix(begin).split()[0]


@pytest.fixture
def token(server: Server, address: str) -> str:
    """Return the token that the command on the screen prints; the user has no home for it."""
    (file,) = re.findall(
        r"RAY_AUTH_TOKEN_PATH=(\S+) \S+/ray get-auth-token", server.log.read_text()
    )
    return Path(file).read_text()


@pytest.fixture
async def tab(token: str, address: str, browser: Browser) -> AsyncIterator[Tab]:
    """Open a tab that has given Ray's token."""
    async with tab_of(browser) as tab:
        await tab.page.context.add_cookies(
            [{"name": "ray-authentication-token", "value": token, "url": address}]
        )
        yield tab


async def test_the_serve_tab_shows_the_models_and_the_ingress(
    tab: Tab, address: str, tmp_path: Path
) -> None:
    await tab.navigate(f"{address}/#/serve", width=1300)
    await shown(tab, "raystream", "Ingress", *MODELS, "HEALTHY")
    await tab.page.screenshot(path=tmp_path / "serve_tab.png", full_page=True)


async def test_a_request_is_found_by_its_id_in_the_ingress_s_log(
    server: Server, tab: Tab, address: str
) -> None:
    body = {"model": MODELS[0], "messages": question("What is os.path?"), "max_tokens": 4}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        answers = [await client.post("/v1/chat/completions", json=body) for _ in range(2)]
    other, sought = (answer.headers["x-request-id"] for answer in answers)
    (told,) = [each for each in server.log.read_text().splitlines() if "Logs, with" in each]
    logs = Path(told.split(": ")[1])
    wait_until(
        lambda: any(sought in each.read_text() for each in logs.glob("replica_*_Ingress_*.log")),
        READY_DEADLINE_S,
    )
    await tab.navigate(f"{address}/#/serve/applications/raystream/Ingress", width=1300)
    await run(tab, SEARCH % json.dumps(sought))
    await shown(tab, f'"request_id":"{sought}"')
    await run(tab, f"until(() => !document.body.innerText.includes('{other}'))")
