"""Build the site of the book: `make book` runs this file, which writes pages for Sphinx and runs Sphinx.

A page is a committed notebook without nbdev's directives. Links between notebooks become links between pages, links to
other files of the repository become links to its host, and a broken link stops the build."""
import ast, copy, json, posixpath, re, shutil, sys
from base64 import b64decode
from functools import cache
from pathlib import Path
from urllib.request import Request, urlopen
from book import (CHAPTERS, FOLDERS, INDEX, MODULES, NOTEBOOKS, ROOT, SETTINGS, cells, module_of, name, number, part,
                  read)

TEXTS = {"docs/chapters.md": "chapters", "docs/glossary.md": "glossary", "docs/commands.md": "commands/index",
         "docs/data.md": "data", "docs/forms.md": "forms", "results/README.md": "results",
         "CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing", "hub/README.md": "hub",
         "noc_nb/assets/models/toy/README.md": "models/toy", "noc_nb/assets/models/lite/README.md": "models/lite"}
PAGES = {name(nb): name(nb)[len("nbs/"):-len(".ipynb")] for nb in NOTEBOOKS} | TEXTS   # a file -> its page
LINK = re.compile(r"(```.*?```|`[^`\n]*`)|\]\(([^)\s]+)\)", re.S)   # code, which is left alone, or a link's target

def target(link, source):
    "Resolve a link for the site: an address, a page, a file on the repository's host, or None if it is broken."
    if re.match(r"[a-z]+:|#", link): return link
    path, _, anchor = link.partition("#")
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if file in PAGES:
        here = posixpath.dirname(PAGES.get(source, "")) or "."
        page = posixpath.relpath(PAGES[file], here) + Path(file).suffix
        return f"{page}#{anchor}" if anchor else page
    if not (ROOT/file).exists(): return None
    kind = "tree" if (ROOT/file).is_dir() else "blob"
    return f"{SETTINGS['git_url']}/{kind}/{SETTINGS['branch']}/{file}"

def links(text):
    "Return the targets of a text's links, except in code."
    return [m[2] for m in LINK.finditer(text) if m[2]]

def relink(text, source):
    "Change the links of a text to pages of the site. Stop at a broken link."
    def replaced(m):
        if not m[2]: return m[0]
        found = target(m[2], source)
        if found is None: raise SystemExit(f"{source}: the link to {m[2]} leads nowhere")
        return f"]({found})"
    return LINK.sub(replaced, text)

def only_imports(source):
    "Return True if a cell does nothing but import."
    try: body = ast.parse(source).body
    except SyntaxError: return False                     # a magic command
    return bool(body) and all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)

def page_cell(cell, source):
    "Prepare a cell for the page."
    cell, text = copy.deepcopy(cell), "".join(cell["source"])
    if cell["cell_type"] == "markdown": return dict(cell, source=relink(text, source))
    cell["source"] = re.sub(r"^#\|.*\n?", "", text, flags=re.M).strip("\n")
    if re.search(r"^#\|\s*echo:\s*false", text, re.M): cell["metadata"]["tags"] = ["remove-input"]
    elif only_imports(cell["source"]):
        prompts = dict(code_prompt_show="Imports", code_prompt_hide="Imports")
        cell["metadata"] |= dict(tags=["hide-input"], mystnb=prompts)
    for output in cell["outputs"]:
        if "text/markdown" in output.get("data", {}):
            output["data"]["text/markdown"] = relink("".join(output["data"]["text/markdown"]), source)
        if "<a xlink:href" in (drawn := "".join(output.get("data", {}).get("text/html", ""))):
            output["data"]["text/html"] = drawn.replace('.ipynb"', '.html"')
    return cell if cell["source"] else None

def describe(cells, front=False):
    "Give each figure a description, the sentence above it, for readers who cannot see it. The front picture is whole."
    said = ""
    for cell in cells:
        text = re.sub(r"\]\([^)]*\)|[\[`*#>]", "", "".join(cell["source"])).strip()
        if cell["cell_type"] == "markdown": said = " ".join(text.rpartition("\n\n")[2].split()) or said
        elif shown := [o["data"] for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]:
            plot = "".join(shown[0].get("text/plain", "")).startswith("<Figure")
            wide = int.from_bytes(b64decode("".join(shown[0]["image/png"])[:40])[16:20], "big") > 1200 and not front
            kind = dict(classes="plot" if plot else "wide") if plot or wide else {}
            cell["metadata"]["mystnb"] = dict(image=dict(alt=f"Figure: {said[:200]}") | kind)

@cache
def is_reached(address):
    "Return True if an address can be reached."
    try:
        with urlopen(Request(address, method="HEAD"), timeout=5) as answer: return answer.status == 200
    except (OSError, ValueError): return False

def hosted(path):
    "Return a button that opens a chapter in a hosted notebook, or '' if the repository's address cannot be reached."
    host, _, repository = SETTINGS["git_url"].partition("github.com/")
    if not repository or not is_reached(SETTINGS["git_url"]): return ""
    place = f"https://colab.research.google.com/github/{repository}/blob/{SETTINGS['branch']}/{name(path)}"
    return f"\n\n[Open it in a hosted notebook]({place}) (`pip install noc_nb` comes first there)"

def tried_first(cells):
    "Remove interactive outputs from their cells, and yield them as cells without code for the top of the page."
    for cell in cells:
        pages = [(o, "".join(o.get("data", {}).get("text/html", ""))) for o in cell.get("outputs", [])]
        live = [o for o, text in pages if 'class="steps"' in text]
        if not live: continue
        cell["outputs"] = [o for o in cell["outputs"] if o not in live]
        yield dict(cell, id="tried", metadata=dict(tags=["remove-input"]), outputs=live)

def page(path):
    "Return the JSON of a notebook's page."
    book = read(path)
    kept = [c for c in (page_cell(c, name(path)) for c in book["cells"]) if c]
    describe(kept, front=path == INDEX)
    kept[1:1] = [*tried_first(kept)]
    if path.stem != "index":
        where = f"{SETTINGS['git_url']}/blob/{SETTINGS['branch']}/{name(path)}"
        kept[0]["source"] += f"\n\nThis page is the notebook [{name(path)}]({where}).{hosted(path)}"
    return dict(book, cells=kept)

def dotted(path): return ".".join(Path(name(path)).with_suffix("").parts)

def api_page(path):
    "Return the reference page of a module, which Sphinx reads from docstrings and comments."
    module = dotted(path)
    chapter = next((nb for nb in CHAPTERS if module == f"noc_nb.{module_of(nb)}"), None)
    made = f"Exported from [{chapter.stem}](../{PAGES[name(chapter)]}.ipynb)." if chapter else ""
    return f"# {module}\n\n{made}\n\n```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n```\n"

def title(notebook): return "".join(read(notebook)["cells"][0]["source"]).splitlines()[0].lstrip("# ")

def subtitle(notebook):
    "Return the line under the title, which says what the chapter is about."
    return re.search(r"^> (.*)$", "".join(read(notebook)["cells"][0]["source"]), re.M)[1]

def minutes(notebook):
    "Estimate the reading time: 230 words, 15 lines of exported code or 25 other lines a minute."
    words, ours, other = 0, 0, 0
    for cell in cells(notebook):
        lines = sum(bool(line.strip()) for line in cell.source.splitlines())
        if cell.kind == "markdown": words += len(cell.source.split())
        elif cell.exported: ours += lines
        else: other += lines
    return max(1, round(words/230 + ours/15 + other/25))

def toctree(pages, *options): return "\n".join(["```{toctree}", *options, "", *pages, "```"])

def floor(folder): return f"floors/{folder or 'paper'}"

def floor_page(folder):
    "Return the page of a floor: its chapters with their subjects and reading times. The side bar opens one floor."
    entries = {f"{number(nb):02} {title(nb)}": nb for nb in FOLDERS[folder]}
    lines = [f"- [{entry}](../{PAGES[name(nb)]}.ipynb): {subtitle(nb)} ({minutes(nb)} min)"
             for entry, nb in entries.items()]
    tree = toctree([f"{entry} </{PAGES[name(nb)]}>" for entry, nb in entries.items()], ":hidden:")
    return "\n\n".join([f"# {part(folder)}", "\n".join(lines), tree])

def reference_page():
    "Return the page that lists the modules."
    modules = [f"{dotted(path)} </api/{dotted(path)}>" for path in MODULES]
    return f"# Reference\n\nAll public names of the package, by module.\n\n{toctree(modules)}"

def contents():
    "Return the side bar: the floors, the other pages, and the reference."
    book = toctree(map(floor, FOLDERS), ":hidden:", ":caption: The book")
    return f"{book}\n\n{toctree([*TEXTS.values(), 'api/index'], ':hidden:', ':caption: Pages')}"

def definitions():
    "Return {public name in lower case: pages of the chapters that define it}, for the search."
    found = {}
    exported = [cell for notebook in CHAPTERS for cell in cells(notebook, "code") if cell.exported]
    for cell, node in [(cell, node) for cell in exported for node in cell.tree.body]:
        targets = [t.id for t in getattr(node, "targets", ()) if isinstance(t, ast.Name)]
        for defined in targets or [getattr(node, "name", "_")]:
            if not defined.startswith("_"): found.setdefault(defined.lower(), []).append(PAGES[name(cell.notebook)])
    return found

def llms():
    "Return llms.txt: what the project is and where its pages are, for programs that read instead of people."
    sections = {part(folder): [f"[{title(nb)}]({PAGES[name(nb)]}.html): {subtitle(nb)}" for nb in notebooks]
                for folder, notebooks in FOLDERS.items()}
    sections["Pages"] = [f"[{Path(file).stem}]({place}.html)" for file, place in TEXTS.items()]
    listed = ["\n".join([f"## {head}", "", *(f"- {line}" for line in lines)]) for head, lines in sections.items()]
    return "\n\n".join([f"# {SETTINGS['title']}", f"> {subtitle(INDEX)}", *listed]) + "\n"

def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")

def write_pages(folder):
    "Write all pages for Sphinx."
    for notebook in NOTEBOOKS:
        content = page(notebook)
        if notebook.stem == "index":
            side = dict(cell_type="markdown", id="contents", metadata={}, source=contents())
            content["cells"].append(side)
        write(folder/f"{PAGES[name(notebook)]}.ipynb", json.dumps(content))
    for file, place in TEXTS.items():
        write(folder/f"{place}.md", relink((ROOT/file).read_text(encoding="utf-8"), file))
    for path in MODULES: write(folder/f"api/{dotted(path)}.md", api_page(path))
    for part_of in FOLDERS: write(folder/f"{floor(part_of)}.md", floor_page(part_of))
    write(folder/"api/index.md", reference_page())

def build(out):
    "Build the site, replacing the last one; return Sphinx's exit status. A warning is a failure."
    from sphinx.cmd.build import main
    work = out.parent/f"{out.name}_build"
    pages, made = work/"pages", work/"made"
    shutil.rmtree(work, ignore_errors=True)
    write_pages(pages)
    scorer = f"const DEFINED = {json.dumps(definitions())};\n{(ROOT/'docs/scorer.js').read_text(encoding='utf-8')}"
    write(work/"scorer.js", scorer)
    status = main(["-q", "-W", "--keep-going", "-c", str(ROOT/"docs"), "-D", f"html_search_scorer={work/'scorer.js'}",
                   "-d", str(work/"read"), str(pages), str(made)])
    if not status:
        (made/".nojekyll").touch()   # GitHub Pages leaves out folders with an underscore otherwise
        write(made/"llms.txt", llms())
        shutil.rmtree(out, ignore_errors=True)
        made.rename(out)
    shutil.rmtree(work)
    return status

if __name__ == "__main__":
    status = build(ROOT/"_site")
    if not status: print("_site/index.html: open it in a browser")
    sys.exit(status)
