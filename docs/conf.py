"Sphinx's settings for the site of the book; `tests/website.py` writes the pages."
import re, sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT/"tests")]
from fastcore.docments import docments
from website import NOTEBOOKS, PAGES, name

ini = ConfigParser(delimiters=["="])
ini.read(ROOT/"settings.ini", encoding="utf-8")
settings = ini["DEFAULT"]

project, author, release = settings["title"], settings["author"], settings["version"]
project_copyright = settings["copyright"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx-mathjax-offline",
              "sphinx_copybutton"]
language = "en"

# notebooks are shown as they are committed
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "gfm"
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = settings["title"]
html_copy_source = html_show_sourcelink = False
html_static_path = ["book.css"]
html_css_files = ["book.css"]
html_theme_options = {"top_of_page_buttons": [], "footer_icons": []}

# the reference: nbdev's comments behind parameters become the parameters' descriptions
default_role = "literal"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"

def rst(text):
    "Markdown of a docstring as reStructuredText."
    pieces = re.split(r"(`[^`]*`)", text)
    escaped = [f"\\ {p}\\ " if p.startswith("`") else re.sub(r"([*|_\\])", r"\\\1", p) for p in pieces]
    return "".join(escaped).strip()

def describe(app, what, full_name, obj, options, lines):
    "Parameters and result, as their comments say."
    lines[:] = [rst(line) for line in lines]
    if what not in ("function", "method", "class"): return
    try: found = docments(obj, full=True)
    except (TypeError, ValueError, OSError, AttributeError): return
    fields = [f":{'returns' if key == 'return' else f'param {key}'}: {rst(' '.join(about['docment'].split()))}"
              for key, about in found.items() if key not in ("self", "cls") and about["docment"]]
    if fields: lines += ["", *fields, ""]

def neighbours(app, page, template, context, tree):
    "Link each chapter to those before and after it in the reading order."
    order = ["index", *(PAGES[name(nb)] for nb in NOTEBOOKS if nb.stem != "index"), "index"]
    if page not in order[1:-1]: return
    at = order.index(page, 1)
    for key, name_of in (("prev", order[at-1]), ("next", order[at+1])):
        title = app.env.titles[name_of].astext()
        context[key] = dict(link=app.builder.get_relative_uri(page, name_of), title=title)

def accessible(app, page, template, context, tree):
    """Give captions of the side bar their level, code and tables the focus that they need to be scrolled by keys, and
    folds the label that they show."""
    side, body = context.get("furo_navigation_tree", ""), context.get("body", "")
    context["furo_navigation_tree"] = side.replace('role="heading"', 'role="heading" aria-level="2"')
    body = body.replace('<summary aria-label="Toggle hidden content">', "<summary>")
    context["body"] = re.sub('<(pre|div class="(table-wrapper|output text_html)[^>]*)>', r'<\1 tabindex="0">', body)

def setup(app):
    app.connect("autodoc-process-docstring", describe)
    app.connect("html-page-context", neighbours)
    app.connect("html-page-context", accessible, priority=900)   # after the theme has made the side bar
