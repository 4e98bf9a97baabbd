"""Generate README.md from nbs/index.ipynb, and docs/chapters.md, the list of chapters. `make readme` runs this file,
and test_repo.py checks that both are current."""
import base64, posixpath, re
from book import FOLDERS, INDEX, ROOT, cells, name, number, part

README, CHAPTERS = ROOT/"README.md", ROOT/"docs/chapters.md"
IMAGES = ROOT/"nbs/images"   # the index's pictures as files
HEAD = "<!-- Written from nbs/index.ipynb by `make readme`. Change the notebook, not this file. -->\n"

def relink(text):
    "Change links relative to nbs/ to links relative to the repository's root."
    def link(m): return m[0] if re.match(r"[a-z]+:|#|/", m[1]) else f"]({posixpath.normpath('nbs/' + m[1])})"
    return re.sub(r"\]\(([^)\s]+)\)", link, text)

def fence(text, language): return f"```{language}\n{text.strip(chr(10))}\n```"

def fences(text, language):
    "Return the fenced blocks of one language."
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)

def picture(output):
    "Return name, description, bytes and link of an output that is a named picture, or None."
    about = output.get("metadata", {}).get("image/png", {})
    if "name" not in about: return None
    data = base64.b64decode("".join(output["data"]["image/png"]))
    return about["name"], about.get("alt", ""), data, about.get("link")

def pictures(notebook=INDEX):
    "Return the named pictures of a notebook: file -> bytes."
    found = [picture(output) for cell in cells(notebook, "code") for output in cell.outputs]
    return {IMAGES/f"{p[0]}.png": p[2] for p in found if p}

def shown(cell, output):
    "Convert one output of a cell to Markdown."
    if output["output_type"] == "stream":
        return fence("".join(output["text"]), "text") if output["name"] == "stdout" else ""
    data, named = output["data"], picture(output)
    if named:
        shown = f"![{named[1]}]({name(IMAGES)}/{named[0]}.png)"
        return f"[{shown}]({named[3]})" if named[3] else shown
    if "text/markdown" in data: return relink("".join(data["text/markdown"]))
    if any(mime.startswith(("image/", "text/html")) for mime in data):
        raise SystemExit(f"{cell.where}: README.md takes text, Markdown and pictures with a name in their metadata")
    return fence("".join(data["text/plain"]), "text")

def parts(notebook):
    "Yield the parts of the page in order: prose, code (unless `echo: false`), outputs."
    for cell in cells(notebook):
        if cell.kind == "markdown": yield relink(cell.source)
        elif "hide" not in cell.directives:
            code = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M)
            if code.strip() and cell.directives.get("echo:") != "false": yield fence(code, "python")
            yield from (shown(cell, o) for o in cell.outputs)

def to_markdown(notebook=INDEX):
    "Return the text of README.md."
    text = "\n\n".join(p.strip("\n") for p in parts(notebook) if p.strip())
    return HEAD + "\n" + text.replace("```\n\n```python\n", "\n") + "\n"      # imports and what uses them, together

def chapters():
    "Return the page of all chapters, floor by floor: number, title and subtitle."
    def entry(notebook):
        title, about = re.search(r"# (.*)\n\n> (.*(?:\n.+)*)", cells(notebook)[0].source).groups()
        return f"- [{number(notebook):02} {title}](../{name(notebook)}): {' '.join(about.split())}"
    lists = ("\n".join(map(entry, notebooks)) for notebooks in FOLDERS.values())
    sections = (f"## {part(folder)}\n\n{listed}" for folder, listed in zip(FOLDERS, lists))
    about = "> All notebooks in reading order, floor by floor. Numbers never change, and have gaps."
    return "\n\n".join(["# Chapters", about, *sections]) + "\n"

if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for file, data in pictures().items(): file.write_bytes(data)
    README.write_text(to_markdown(), encoding="utf-8")
    CHAPTERS.write_text(chapters(), encoding="utf-8")
    print(f"{README.name}: {len(README.read_text(encoding='utf-8').splitlines())} lines")
