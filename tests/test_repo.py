"Test what is committed: the README, the rows of results, and that no forbidden file is there."
import ast, json, re, shlex
from functools import cache
import pytest
import budget
from book import INDEX, NOTEBOOKS, ROOT, SETTINGS, cells, name, none_of, run, tracked
from readme import CHAPTERS, IMAGES, README, chapters, fences, pictures, to_markdown
from website import TEXTS, links, minutes, page, relink, target

def test_readme_is_the_index():
    assert README.read_text(encoding="utf-8") == to_markdown(), \
        "README.md is not what nbs/index.ipynb says: change the notebook, then `make readme`"
    files = {path: path.read_bytes() for path in IMAGES.glob("*")}
    assert files == pictures(), f"{name(IMAGES)} does not hold the index's pictures; run `make readme`"
    none_of((f"{name(p)}: {len(data)/1e3:.0f} KB" for p, data in files.items() if len(data) > 250e3),
            "a picture of the README has at most 250 KB")

def test_the_code_keeps_its_budget():
    "The code may shrink; if it grows, tests/budget.json must be raised in the same commit."
    allowed, there = json.loads(budget.FILE.read_text()), budget.house()
    assert allowed.keys() == there.keys(), "tests/budget.json lists other parts than the house has"
    def over():
        for part, now in there.items():
            pairs = now.items() if isinstance(now, dict) else [("count", now)]
            limits = allowed[part] if isinstance(now, dict) else dict(count=allowed[part])
            yield from (f"{part}: {n:,} {kind}, {limits[kind]:,} allowed" for kind, n in pairs if n > limits[kind])
    none_of(over(), "raise the number in tests/budget.json in the commit that needs it, and say why in its body")

def test_budget_counts_code():
    "The budget does not count comments, counts the same nodes in denser code, and counts methods as names."
    long = "def f(x):\n    # twice\n    y = 2*x\n\n    return y\n"
    dense = "def f(x): y = 2*x; return y"
    one, other = budget.counts([long]), budget.counts([dense])
    assert (one["lines"], other["lines"]) == (3, 1) and one["nodes"] == other["nodes"]
    assert budget.counts(["class A:\n    def b(self): pass\n    def _c(self): pass"]) | dict(nodes=0) == dict(
        lines=3, nodes=0, public=2, private=1)

def test_citation_names_the_version():
    stated = re.search(r"^version: (.+)$", (ROOT/"CITATION.cff").read_text(encoding="utf-8"), re.M)
    assert stated[1] == SETTINGS["version"], "CITATION.cff cites another version than settings.ini has"

def test_chapters_are_listed():
    assert CHAPTERS.read_text(encoding="utf-8") == chapters(), "a chapter's first lines changed; run `make readme`"
    none_of((name(p) for p in NOTEBOOKS if p.stem != "index" and f"](../{name(p)})" not in chapters()),
            "a notebook is on no floor")

def test_readme_is_read_in_three_minutes():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 220, f"README.md has {len(lines)} lines; what is longer belongs to docs/"

def test_links_resolve():
    "Each link of a notebook or page leads to a file; `make book` also checks anchors."
    def texts():
        for notebook in NOTEBOOKS:
            for cell in cells(notebook):
                shown = [o.get("data", {}).get("text/markdown", "") for o in cell.outputs]
                parts = [cell.source] if cell.kind == "markdown" else ["".join(text) for text in shown]
                for text in parts: yield name(notebook), text
        for file in ["README.md", *TEXTS]: yield file, (ROOT/file).read_text(encoding="utf-8")
    none_of((f"{source}: {link}" for source, text in texts() for link in links(text) if not target(link, source)),
            "links that lead nowhere")

def test_pages_of_the_site_show_no_directives():
    "A page has no directives of nbdev, and a broken link stops the build."
    sources = [(name(nb), "".join(cell["source"])) for nb in NOTEBOOKS for cell in page(nb)["cells"]]
    none_of((file for file, source in sources if re.search(r"^#\|", source, re.M)), "directives are shown")
    inside = "[a](../09_grid.ipynb) `[b](c)`"
    assert relink(inside, "nbs/models/115_photos.ipynb") == inside
    assert relink("[a](../docs/data.md#java)", "nbs/index.ipynb") == "[a](data.md#java)"
    with pytest.raises(SystemExit, match="nbs/00_core.ipynb: the link to 99_none.ipynb leads nowhere"):
        relink("[a](99_none.ipynb)", "nbs/00_core.ipynb")

def test_reading_times_of_the_front_page_are_those_of_the_chapters():
    text = "".join(cell.source for cell in cells(INDEX, "markdown"))
    said = re.findall(r"\]\(([\w/]+\.ipynb)\) \((\d+) min\)", text)
    assert len(said) > 9
    none_of((f"{link}: {found} min" for link, number in said
             if abs((found := minutes(ROOT/"nbs"/link)) - int(number)) > 2 + found/8), "change nbs/index.ipynb")

@cache
def options(command):
    "Return the options in a command's help."
    return set(re.findall(r"--[a-z][a-z_-]*", run(command, "--help", cwd=ROOT)))

def wrong_words(line):
    "Return the command, option or target of a shell line that does not exist, in a list."
    scripts = {entry.split("=")[0] for entry in SETTINGS["console_scripts"].split()}
    targets = re.findall(r"^([a-z-]+):", (ROOT/"Makefile").read_text(encoding="utf-8"), re.M)
    command, *rest = shlex.split(line, comments=True)
    if command in scripts: return [w for w in rest if w.startswith("--") and w not in options(command)]
    if command == "make": return [w for w in rest if "=" not in w and w not in targets]
    return [] if command in ("pip", "cd", "curl", "echo") else [command]

def test_commands_of_the_readme_exist():
    "Each line of a shell block is one existing command with existing options."
    index = "".join(f"{cell.source}\n" for cell in cells(INDEX, "markdown"))
    text = index + "".join((ROOT/f"docs/{page}.md").read_text(encoding="utf-8") for page in ("commands", "data"))
    lines = [line for line in "".join(fences(text, "sh")).splitlines() if line and line[0] != "#"]
    assert len(lines) > 15, "the index lost its commands"
    none_of((f"{line}: {word}" for line in lines for word in wrong_words(line)),
            "a shell block holds one command a line; this command, option or target is not there")

def lines():
    "Yield (place, file name, text) for every line of results/*.jsonl."
    for path in sorted((ROOT/"results").glob("*.jsonl")):
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{name(path)}: line {i}", path.name, line

ROW = "schema table row commit command config metrics device time".split()
MAIN = "data seed seconds training split detections features protocol counts".split()
LOG = "time commit command why".split()

def test_rows_say_how_they_were_made():
    "Every row records what is needed to reproduce it."
    def wrong():
        for where, file, line in lines():
            try: row = json.loads(line)
            except json.JSONDecodeError:
                yield f"{where}: not JSON"
                continue
            keys = LOG if file == "test_log.jsonl" else ROW if row.get("table") in ("bench", "scale") else ROW + MAIN
            missing = [k for k in keys if k not in row]
            if missing: yield f"{where}: no {', '.join(missing)}"
            elif row["commit"] in ("", None, "unknown"): yield f"{where}: no commit"
    none_of(wrong(), "rows are written by the commands and not by hand; make this one again, from a commit")

def test_scores_on_test_are_logged():
    "If there are results on the test split, there is a log of the scorings."
    rows = {where: json.loads(line) for where, file, line in lines() if file != "test_log.jsonl"}
    scored = [where for where, row in rows.items() if row.get("split") == "test" and row.get("data") != "toy"]
    assert not scored or (ROOT/"results/test_log.jsonl").exists(), \
        f"{scored[0]} is on test, and results/test_log.jsonl is not there: commit it with the rows"

def test_no_forbidden_file_is_committed():
    "The repository has no photos, pickles, jars or large files."
    files = [ROOT/file for file in sorted(tracked())]
    if not files: pytest.skip("no git checkout")
    banned = {".jpg", ".jpeg", ".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".jar"}
    none_of((name(p) for p in files if p.suffix in banned),
            "weights are safetensors, tables are JSON or CSV, and other people's photos stay outside; remove it")
    shipped = ROOT/"noc_nb/assets/models"                       # the package's pipelines
    def most(p): return 15e6 if shipped in p.parents else 5e6
    none_of((f"{name(p)}: {p.stat().st_size/1e6:.1f} MB" for p in files if p.stat().st_size > most(p)),
            "a file over 5 MB does not belong in git; make it when it is needed")

def test_scripts_name_no_host():
    "Scripts contain no addresses, because the machine's configuration determines where packages come from."
    scripts = [ROOT/"Makefile", *(ROOT/".ci").iterdir(), *(ROOT/".github/workflows").iterdir()]
    none_of((name(p) for p in scripts if re.search(r"://|index-url", p.read_text())), "take the address out")

def test_plain_files_have_at_most_120_columns():
    long = ((p, i) for p in [ROOT/"setup.py", *(ROOT/"tests").glob("*.py")]
            for i, line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1) if len(line) > 120)
    none_of((f"{name(p)}: line {i}" for p, i in long), "at most 120 columns; break the line")

# Expressions in messages that are made before they are needed, and why they cannot fail: someone read each of them
SAFE = {"labels[unknown]": "a mask of the same length", "classes[n]": "a key of both",
        "self.classes[n]": "a key of both", "best[row]": "a row that exists",
        "urls[name]": "a key of the loop",
        "labels[0]": "some label begins with /m/", "min(ids)": "each owner has an id",
        "columns[sign]": "a key of the dict",
        "names[0]": "in a loop over nothing if there are none", "names[0][0]": "a pair", "table.ids[0]": "one image",
        "about['dtype']": "checked by the schema", "about['shape']": "checked by the schema",
        "given[what]": "a row has every setting", "numbers['loss']": "the step's own loss",
        "table.shape[1]": "a matrix",
        "_REFUSED[name]": "a key of the loop", "_REFUSED['streamer']": "a constant", "new.classes[i]": "a known class",
        "group[0]": "a group has a word", "_COLUMNS['scores']": "a constant", "_COLUMNS['scores'][2]": "a constant",
        "count[i]": "a Counter", "captions[0]": "images without references are left out"}

def eager(tree):
    """Yield what may fail in the messages of `require`: indices, next, min and max of what may be empty, and attributes
    of what a condition tests for None."""
    def tested(condition):
        if isinstance(condition, ast.Name): yield condition.id
        compared = isinstance(condition, ast.Compare) and isinstance(condition.ops[0], ast.IsNot)
        if compared: yield from tested(condition.left)
        for value in getattr(condition, "values", ()): yield from tested(value)
    def may_fail(node):
        if isinstance(node, ast.Attribute): return getattr(node.value, "id", None) in maybe
        if isinstance(node, ast.Subscript): return not isinstance(node.slice, ast.Slice)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name): return False
        return (node.func.id == "next" and len(node.args) == 1 or node.func.id in ("min", "max")
                and len(node.args) == 1 and not node.keywords)
    def walk(node):
        if may_fail(node): yield node
        guarded = isinstance(node, (ast.IfExp, ast.BoolOp))          # computed only if the first part says so
        first = node.test if isinstance(node, ast.IfExp) else node.values[0] if guarded else None
        for child in [first] if guarded else ast.iter_child_nodes(node): yield from walk(child)
    for f in (f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)):
        calls = [n for n in ast.walk(f) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "require"]
        texts = [text for call in calls for text in call.args[1:]]
        maybe = {name for call in calls for name in tested(call.args[0])}
        names = {n.id for text in texts for n in ast.walk(text) if isinstance(n, ast.Name)}
        texts += [n.value for n in ast.walk(f) if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") in names
                  and isinstance(n.value, (ast.JoinedStr, ast.IfExp))]
        for text in texts: yield from walk(text)

def test_no_message_fails_before_it_is_needed():
    "The arguments of `require` are computed even if all is well, so that a message must not raise an error itself."
    found = {ast.unparse(node): path for path in (ROOT/"noc_nb").rglob("*.py")
             for node in eager(ast.parse(path.read_text(encoding="utf-8")))}
    assert not {text: path.name for text, path in found.items() if text not in SAFE}
    made = ("def f(x):\n where = f'{x[0]}'\n require(x, f'{where} {min(x)} {x and x[1]}', f'{next(x)} {x[:2]}')\n"
            " require(y is not None and z, f'{y.a} {z.b} {z and z.c} {where.d}')")
    assert {ast.unparse(n) for n in eager(ast.parse(made))} == {"x[0]", "min(x)", "next(x)", "y.a", "z.b"}
