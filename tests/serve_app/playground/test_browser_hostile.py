"""A model's text is hostile: nothing in it runs, loads anything, or holds up the page."""

import asyncio
import re
from typing import Any

from playwright.async_api import Route, expect

from deployments.contract.output import FinishReason, TextDelta
from tests.browser import DEADLINE_MS
from tests.offenders import every
from tests.serve_app.playground.served_page import Models, Page

ALLOWED = (
    *("P", "BR", "HR", "H3", "H4", "H5", "H6", "STRONG", "EM", "S", "A", "CODE", "PRE", "DIV"),
    *("BLOCKQUOTE", "UL", "OL", "LI", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"),
    *("FIGURE", "FIGCAPTION", "SPAN", "BUTTON"),
)
"""The elements that a text may become, and the frame of its code."""
CLASSES = re.compile(r"code-block|quiet|language-[\w+#.-]+|hljs-[\w -]+|math( display)?|")

HOSTILE = (
    "<script>document.body.dataset.owned = 1</script>",
    "<img src=x onerror='document.body.dataset.owned = 1'>",
    "<svg/onload=document.body.dataset.owned=1>",
    "<iframe srcdoc='<script>parent.document.body.dataset.owned = 1</script>'></iframe>",
    "<style>* { display: none }</style>",
    "<form action=https://elsewhere.example><input name=key></form>",
    "<a href='javascript:document.body.dataset.owned=1'>press</a>",
    "[press](javascript:document.body.dataset.owned=1)",
    "[press](JaVaScRiPt:document.body.dataset.owned=1)",
    "[press](java&#10;script:document.body.dataset.owned=1)",
    "[press](data:text/html,<script>alert(1)</script>)",
    "[press](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[press](vbscript:msgbox)",
    "[press](file:///etc/passwd)",
    "[press](//elsewhere.example/path)",
    "[press](v1/models)",
    "![stolen](https://elsewhere.example/a.png?key=1)",
    "[![stolen](https://elsewhere.example/b.png)](https://elsewhere.example)",
    "![stolen](data:image/svg+xml;base64,PHN2Zy8+)",
    '<https://elsewhere.example/?a="onmouseover="document.body.dataset.owned=1>',
    "[x]: https://elsewhere.example '\" onmouseover=document.body.dataset.owned=1'\n\n[x]",
    "```<img src=x onerror=document.body.dataset.owned=1>\n<script>alert(1)</script>\n```",
    "`<script>document.body.dataset.owned=1</script>`",
    "&lt;script&gt;document.body.dataset.owned=1&lt;/script&gt;",
    "<math><mtext><table><mglyph><style><img src=x onerror=document.body.dataset.owned=1>",
    '<noscript><p title="</noscript><img src=x onerror=document.body.dataset.owned=1>">',
    "| a |\n|:-:|\n| <img src=x onerror=document.body.dataset.owned=1> |",
    "<base href=https://elsewhere.example/>",
    "<meta http-equiv=refresh content='0;url=https://elsewhere.example'>",
    "<div id=status name=getElementById style='position:fixed;inset:0'>",
)

INSPECT = """
(prose) => [...prose.querySelectorAll("*")].map((element) => ({
  tag: element.tagName,
  attributes: Object.fromEntries([...element.attributes].map(({name, value}) => [name, value])),
}))
"""


TAKE_MARK = """
(() => {
  const found = document.body.dataset.owned ?? "untouched";
  delete document.body.dataset.owned;
  return found;
})()
"""
"""What a script of an answer would have left, which is forgotten."""


def whole(text: str) -> list[list[TextDelta]]:
    return [[TextDelta((1,), text, FinishReason.STOP)]]


async def answered(page: Page, models: Models, text: str) -> None:
    models.chat.steps = [*whole(text)]
    await page.open()
    await page.ask("Say it")
    await page.is_done()


def check_element(element: dict[str, Any]) -> None:
    """Fail if a text may not become this element."""
    assert element["tag"] in ALLOWED
    attributes = element["attributes"]
    assert not any(name.startswith("on") or name in ("style", "src", "id") for name in attributes)
    assert CLASSES.fullmatch(attributes.get("class", ""))
    if "href" in attributes:
        assert attributes["href"].startswith(("http://", "https://"))
        assert attributes["rel"] == "noopener noreferrer"
        assert attributes["target"] == "_blank"


async def test_nothing_in_an_answer_runs_or_loads(page: Page) -> None:
    await page.open()
    for case in every([*HOSTILE, "\n\n".join(HOSTILE)]):
        with case as text:
            page.models.chat.steps = [*whole(text)]
            await page.ask_anew("Say it")
            await expect(page.answer.locator(".prose")).not_to_be_empty()
            for element in await page.answer.locator(".prose").evaluate(INSPECT):
                check_element(element)
            assert await page.tab.evaluate(TAKE_MARK) == "untouched"
            assert not await page.is_wider_than_the_window()
            page.check_quiet()


async def test_what_is_shown_is_what_the_model_has_said(page: Page) -> None:
    said = "<b>bold?</b> & &amp; <script>1</script>"
    await answered(page, page.models, said)
    await expect(page.answer.locator(".prose")).to_have_text("<b>bold?</b> & & <script>1</script>")


async def test_markdown_is_shown_as_markdown(page: Page) -> None:
    text = (
        "# Title\n\n- one\n- **two**\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
        "```py\nx = 1\n```\n\n[link](https://example.org)"
    )
    await answered(page, page.models, text)
    prose = page.answer.locator(".prose")
    await expect(prose.locator("h3")).to_have_text("Title")
    await expect(prose.locator("li")).to_have_count(2)
    await expect(prose.locator("td[align=right]")).to_have_text("2")
    await expect(prose.locator("pre")).to_have_text("x = 1\n")
    await expect(prose.locator("figcaption")).to_contain_text("Python")
    await expect(prose.locator(".hljs-number")).to_have_text("1")
    await expect(prose.get_by_role("link")).to_have_attribute("href", "https://example.org")


FORMULAS = (
    r"\href{javascript:alert(1)}{x}", r"\url{https://elsewhere.example}", r"\htmlId{status}{x}",
    r"\htmlStyle{position:fixed}{x}", r"\htmlClass{notice}{x}", r"\htmlData{a=b}{x}",
    r"\includegraphics{https://elsewhere.example/a.png}", r"\text{<img src=x onerror=alert(1)>}",
    r"\def\a{\a\a}\a", r"\rule{1000em}{1000em}", r"\frac{", r"\kern{99999em} x",
)  # fmt: skip


async def test_a_formula_is_drawn_with_its_fonts_and_can_do_no_harm(page: Page) -> None:
    await answered(page, page.models, r"It is $\mathbb{R}^2$ or" "\n\n" r"$$\int_0^1 x\,dx$$")
    formulas = page.answer.locator(".formula")
    await expect(formulas).to_have_count(2)
    await expect(formulas.last.locator(".katex-display")).to_be_visible()
    # What a screen reader reads.
    await expect(formulas.first.locator("math")).to_have_count(1)
    await page.tab.wait_for(
        "['KaTeX_AMS', 'KaTeX_Math', 'KaTeX_Main'].every((name) => "
        "[...document.fonts].some((each) => each.family === name && each.status === 'loaded'))"
    )
    page.check_quiet()
    await page.button("New chat").click()
    await answered(page, page.models, "\n\n".join(f"${each}$" for each in FORMULAS) + "\n\n$end$")
    await page.answer.locator(".formula", has_text="end").wait_for()
    prose = page.answer.locator(".prose")
    assert await prose.locator("a, img, [id], .notice, [data-a]").count() == 0
    assert await prose.evaluate(
        "(prose) => [...prose.querySelectorAll('[style]')].every("
        "(each) => each.style.position !== 'fixed')"
    )
    assert not await page.is_wider_than_the_window()


async def test_a_library_that_is_loaded_later_and_was_changed_does_not_run(page: Page) -> None:
    async def change(route: Route) -> None:
        answer = await route.fetch()
        await route.fulfill(response=answer, body=await answer.text() + "\nwindow.owned = 1;")

    for name in ("highlight.js", "katex.js"):
        await page.page.route(f"**/vendor/{name}", change)
    await answered(page, page.models, "```py\nx = 1\n```\n\n$y$")
    async with asyncio.timeout(DEADLINE_MS / 1000):
        while sum("integrity" in each for each in page.tab.complaints) < 2:
            await page.tab.evaluate("new Promise(requestAnimationFrame)")
    await expect(page.answer.locator("code.math")).to_have_text("y")
    await expect(page.answer.locator("pre")).to_have_text("x = 1\n")
    assert await page.tab.evaluate("window.owned ?? 'untouched'") == "untouched"
    page.tab.complaints.clear()


async def test_the_button_of_a_growing_block_of_code_copies_all_of_it_and_keeps_the_focus(
    page: Page,
) -> None:
    more = asyncio.Event()
    page.models.chat.steps = [
        [TextDelta((1,), "```py\nx = 1\n")], more, *whole("y = 2\n```\n"),
    ]  # fmt: skip
    await page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.open()
    await page.ask("Say it")
    copy = page.button("Copy the Python code")
    await copy.focus()
    more.set()
    await page.is_done()
    await expect(copy).to_be_focused()
    await copy.press("Enter")
    await expect(copy).to_have_text("Copied")
    assert await page.tab.evaluate("navigator.clipboard.readText()") == "x = 1\ny = 2\n"
    await expect(page.answer.locator(".hljs-number")).to_have_count(2)


MAX_CHARACTERS, MAX_LINES = 40_000, 2_000
"""A longer text is shown as it is."""

ROWS = "| a | b | c |\n|---|---|---|\n"
HUGE = {
    "a megabyte without a space": "x" * 1_000_000,
    "a megabyte of lines": "one line\n" * 110_000,
    "a megabyte of stars": "*" * 1_000_000,
    "a megabyte of brackets": "[" * 1_000_000,
    "a huge table": ROWS + "| 1 | 2 | 3 |\n" * 70_000,
    "a table that is rendered": ROWS + "| 1 | 2 | 3 |\n" * 1_900,
    "a table of empty rows": "| a |\n|---|\n" + "|\n" * 19_990,
    "a wide table that is rendered": f"{'|a' * 9_000}|\n{'|-' * 9_000}|\n",
    "deep quotes": "> " * 15_000 + "deep",
    "deep lists": "\n".join("  " * depth + "- x" for depth in range(180)),
    "nested brackets": "[" * 15_000 + "a" + "](b)" * 5_000,
    "backticks": " ".join("`" * n for n in range(1, 250)),
    "emphasis": "**a *b " * 5_000,
    "surrogates": "🙂" * 300_000,
    "formulas": "$x$ " * 9_000,
    "a formula that is not closed": "$x " * 13_000,
    "code in colours": "```js\n" + "x = (`${a}` / 2) // c\n" * 1_100,
    "blocks of code": "```py\nx = 1\n```\n" * 600,
}


async def test_a_huge_answer_does_not_hold_up_the_page(page: Page) -> None:
    await page.open()
    for case in every(HUGE.items()):
        with case as (_name, text):
            parts = [text[start : start + 50_000] for start in range(0, len(text), 50_000)]
            page.models.chat.steps = [
                *([TextDelta((i,), part)] for i, part in enumerate(parts)),
                [TextDelta((0,), "", FinishReason.STOP)],
            ]
            await page.ask_anew("Say it")
            # The page still answers: to a key, and to a change of tabs.
            await page.page.get_by_label("Your message").fill("next")
            await page.show("Classify")
            await page.show("Chat")
            assert not await page.is_wider_than_the_window()
            await check_shown(page, text)


async def check_shown(page: Page, text: str) -> None:
    """Fail if a long text is not shown whole, or if the page shows nothing."""
    prose = page.answer.locator(".prose")
    shown = await prose.evaluate("(prose) => prose.textContent.length")
    assert shown > 0
    is_plain = len(text) > MAX_CHARACTERS or text.count("\n") >= MAX_LINES
    await expect(page.answer.locator(".plain")).to_have_count(1 if is_plain else 0)
    if is_plain:
        assert shown == len(text.encode("utf-16-le")) // 2


async def test_right_to_left_text_and_marks_stay_in_their_box(page: Page) -> None:
    zalgo = "".join(letter + "\u0310\u0353\u0489" * 40 for letter in "zalgo")
    text = f"שלום עולם\n\n\u202eevil\u202c and left\n\n\u202e unclosed\n\n{zalgo}"
    await answered(page, page.models, text)
    prose = page.answer.locator(".prose")
    directions = await prose.evaluate(
        "(prose) => [...prose.children].map((each) => getComputedStyle(each).unicodeBidi)"
    )
    assert set(directions) == {"plaintext"}
    # Marks above and below the letters are cut at the box, and do not cover the page.
    assert await prose.evaluate("(prose) => getComputedStyle(prose).overflow") == "clip"
    # An override that is not closed does not turn what follows around.
    assert await prose.evaluate("(prose) => prose.dir") == "auto"
    assert not await page.is_wider_than_the_window()


async def test_hostile_names_of_calls_and_notices_are_text(page: Page) -> None:
    page.models.chat.steps = [*whole("<img src=x onerror=document.body.dataset.owned=1>")]
    await page.open()
    await page.ask("<img src=x onerror=document.body.dataset.owned=1>")
    await page.is_done()
    await expect(page.page.locator(".asked")).to_have_text(
        "<img src=x onerror=document.body.dataset.owned=1>"
    )
    assert await page.tab.evaluate("document.body.dataset.owned ?? 'untouched'") == "untouched"
