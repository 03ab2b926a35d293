"""Presses the buttons of the page `/docs`, as its reader does."""

from dataclasses import dataclass

from tests.browser import Tab

DEADLINE_MS = 50_000

UNTIL = """
const until = (find) => new Promise((done, fail) => {
  const started = performance.now();
  const look = () => {
    const found = find();
    if (found) return done(found);
    if (performance.now() - started > DEADLINE_MS) return fail(new Error(`never: ${find}`));
    requestAnimationFrame(look);
  };
  look();
});
""".replace("DEADLINE_MS", str(DEADLINE_MS))

PATHS = """
until(() => document.querySelectorAll(".opblock").length).then(() =>
  [...document.querySelectorAll(".opblock-summary-path")].map((cell) => cell.dataset.path))
"""

EXECUTE = """
(async () => {
  const block = document.querySelectorAll(".opblock")[%d];
  const header = block.querySelector(".opblock-summary-control");
  header.click();
  (await until(() => block.querySelector(".try-out__btn"))).click();
  (await until(() => block.querySelector(".btn.execute"))).click();
  const live = await until(() => block.querySelector(".live-responses-table .response"));
  const text = (selector, from = block) => from.querySelector(selector)?.textContent ?? "";
  const executed = {
    path: block.querySelector(".opblock-summary-path").dataset.path,
    method: text(".opblock-summary-method"),
    status: Number.parseInt(text(".response-col_status", live)),
    shown: text(".highlight-code, pre", live),
    curl: text(".request-snippets"),
    documented: [...block.querySelectorAll(
      ".responses-table:not(.live-responses-table) > tbody > .response > .response-col_status"
    )].map((cell) => cell.textContent),
  };
  header.click();  // folded again: the page draws all that is open with each change
  return executed;
})()
"""


@dataclass(frozen=True, slots=True)
class Executed:
    """An operation, and what the page showed after "Execute"."""

    path: str  # the path's template
    method: str  # in capitals
    status: int  # the answer's status
    shown: str  # the answer's body
    curl: str  # the suggested command
    documented: list[str]  # the statuses that the document lists


async def execute_all(tab: Tab, url: str, *, but: tuple[str, ...] = ()) -> list[Executed]:
    """Open the page and press "Try it out" and "Execute", unchanged, on every operation.

    Args:
        tab: Where to open it.
        url: The page.
        but: How the paths of operations begin that are left out.
    """
    await tab.navigate(url, width=1280)
    paths: list[str] = await tab.evaluate(f"{{{UNTIL} {PATHS}}}")
    numbers = [number for number, path in enumerate(paths) if not path.startswith(but)]
    executed = [await tab.evaluate(f"{{{UNTIL} {EXECUTE % number}}}") for number in numbers]
    return [Executed(**each) for each in executed]
