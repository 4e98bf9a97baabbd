"Test the page of 134_steps in a headless Chromium: its captions equal Python's, and it draws the steps."
import random
import pytest
from book import ROOT, cells

def committed():
    "Return the page that the chapter shows."
    outputs = [o for cell in cells(ROOT/"nbs/pages/134_steps.ipynb", "code") for o in cell.outputs]
    shown, = ["".join(o["data"]["text/html"]) for o in outputs if "text/html" in o.get("data", {})]
    return shown

@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    "Return a function that opens a page from a file. At the end, fail if a page reported an error or a request."
    wrong, folder = [], tmp_path_factory.mktemp("page")
    def open_page(html):
        (folder/"page.html").write_text(f"<!doctype html><meta charset=utf-8>{html}", encoding="utf-8")
        tab = browser.new_page()
        tab.on("pageerror", lambda e: wrong.append(str(e)))
        tab.on("request", lambda r: None if r.url.startswith("file:") else wrong.append(r.url))
        tab.goto((folder/"page.html").as_uri())
        return tab
    yield open_page
    assert wrong == []

def compared(page): return page.locator(".check").inner_text()

def test_the_page_finds_the_same_captions_as_python(opened):
    "The page finds Python's hundred captions and values, and reports a wrong caption or a changed search."
    html = committed()
    assert compared(opened(html)) == "100 of 100 saved captions equal Python's."
    start = html.index('"cases":')
    broken = html[:start] + html[start:].replace(' on a', ' in a', 1)
    assert compared(opened(broken)) == "99 of 100 saved captions equal Python's."
    no_ties = html.replace("|| a.tokens.at(-1) - b.tokens.at(-1)", "|| b.tokens.at(-1) - a.tokens.at(-1)")
    assert no_ties != html and not compared(opened(no_ties)).startswith("100")

def test_steps_are_drawn(opened):
    "Each step draws one more column, and the last shows the answer, whose path ends in the top row."
    page = opened(committed())
    assert "step 0 of 10" in page.locator(".steps").inner_text() and page.locator(".answer").inner_text().strip() == ""
    for t in range(1, 11):
        page.get_by_role("button", name="next").press("Enter")
        assert page.locator("td.now").count() == 3 and page.locator("td.best:not(.later)").count() == t
    assert {"zebra", "frisbee"} <= set(page.locator(".answer").inner_text().split())
    assert all(row.startswith("row 2") for row in page.locator(".kept").all_inner_texts())

def test_every_setting_is_stored(opened):
    "The stored table of `lite` is complete for all settings, and the answer mentions all musts."
    page, rng = opened(committed()), random.Random(0)
    page.locator("select").first.select_option("1")
    slide = "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }"
    prices, step = page.get_by_label("price"), page.get_by_label("step")
    for levels in [(0, 0, 0), (4, 4, 4), *(rng.choices(range(5), k=3) for _ in range(12))]:
        page.locator("select").nth(1).select_option(rng.choice("123"))
        for n, level in enumerate(levels): prices.nth(n).evaluate(slide, level)
        step.evaluate(slide, 12)
        words = page.locator(".answer").inner_text().split()
        assert all(word in words for word, n in zip(("cat", "couch", "suitcase"), levels) if n == 4)
    assert page.locator(".wanted output").first.inner_text() in ("no constraint", "4 nats", "8 nats", "12 nats", "must")
