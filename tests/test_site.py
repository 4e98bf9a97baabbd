"Test the site of the book: it is built, every page fits a phone and a laptop, and the search puts definitions first."
import os, subprocess, sys
import pytest
from book import INDEX, NOTEBOOKS, ROOT, name, none_of
from website import PAGES

pytestmark = pytest.mark.slow
SCREENS = """index 00_core 03_selector 09_grid 14_toy 22_method experiments/61_table1 experiments/69_failures
pages/134_steps words/116_generate commands/index chapters""".split()

@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "Build the site."
    pytest.importorskip("myst_nb", reason="Sphinx is not installed: pip install noc_nb[book]")
    folder = tmp_path_factory.mktemp("book")/"site"
    code = "import pathlib, sys, website; sys.exit(website.build(pathlib.Path(sys.argv[1])))"
    built = subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT/"tests", capture_output=True, text=True,
                           env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert built.returncode == 0, built.stderr[-3000:]
    return folder

def test_the_site_lists_every_chapter(site):
    listed = (site/"llms.txt").read_text(encoding="utf-8")
    pages = [PAGES[name(nb)] for nb in NOTEBOOKS if nb != INDEX]
    none_of((page for page in pages if f"({page}.html)" not in listed), "llms.txt does not list these pages")
    none_of((page for page in pages if not (site/f"{page}.html").exists()), "the site lacks these pages")
    side = (site/"09_grid.html").read_text(encoding="utf-8")
    assert side.count('role="heading"') == side.count('role="heading" aria-level="2"') > 0
    assert side.count("<pre") == side.count('<pre tabindex="0"') > 0 and "<summary aria-label" not in side

def test_no_page_of_the_site_scrolls_sideways(site, browser):
    for width in 390, 1280:
        tab = browser.new_page(viewport=dict(width=width, height=900))
        for page in SCREENS:
            tab.goto((site/f"{page}.html").as_uri(), timeout=120_000)     # a page loads the fonts of its formulas
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (page, width)
        tab.goto((site/"index.html").as_uri())
        front = tab.locator("article div.cell_output img").first.bounding_box()
        assert 0 <= front["x"] and front["x"] + front["width"] <= width, "the front picture is cut"
        tab.close()

@pytest.mark.parametrize("query, page", [("RULES", "08_constraints"), ("grid_beam_search", "fast/26_search")])
def test_the_search_finds_the_chapter_that_defines_a_name_first(site, browser, query, page):
    tab = browser.new_page()
    tab.goto(f"{(site/'search.html').as_uri()}?q={query}", timeout=120_000)
    first = tab.locator("ul.search li a").first
    first.wait_for()
    assert page in first.get_attribute("href")
    tab.close()
