"Every notebook keeps the house rules of CONTRIBUTING.md. A failure says what to change."
import ast, re
import pytest
from book import BOOK, CHAPTERS, EXPERIMENTS, NOTEBOOKS, ROOT, TOOLBOX, cells, module_of, name, none_of, number, read

ids = dict(ids=lambda p: p.stem)
each = pytest.mark.parametrize("nb", NOTEBOOKS, **ids)
each_chapter = pytest.mark.parametrize("nb", CHAPTERS, **ids)
each_experiment = pytest.mark.parametrize("nb", EXPERIMENTS, **ids)

EVAL_FALSE = set()  # "10_attention.ipynb:cell id" of cells that may stay unexecuted; none does
DIRECTIVES = {"default_exp", "export", "slow", "gpu", "eval:", "echo:"}

def public(cell):
    "Functions and classes of an exported cell that users see."
    for node in cell.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"): yield node

def patched(node): return any(ast.unparse(d).startswith("patch") for d in node.decorator_list)

def calls(cell): return {n.id for n in ast.walk(cell.tree) if isinstance(n, ast.Name)}

# ---- the file

@each
def test_name(nb):
    assert nb.stem == "index" or re.fullmatch(r"\d\d_[a-z][a-z0-9_]*", nb.stem), \
        f"{nb.name}: name it NN_module.ipynb, in lower case; NN is its place in the reading order"

def test_numbers_are_unique():
    def taken(nb, wing): return sum(number(nb) == number(other) for other in wing) > 1
    none_of((name(nb) for wing in (BOOK, TOOLBOX, EXPERIMENTS) for nb in wing if taken(nb, wing)),
            "two notebooks have one number; take a free one")

@each
def test_size(nb):
    assert nb.stat().st_size <= 300_000, \
        f"{nb.name} has {nb.stat().st_size/1000:.0f} KB and 300 are allowed: show fewer or smaller figures"

@each
def test_format(nb):
    book = read(nb)
    assert (book["nbformat"], book["nbformat_minor"]) >= (4, 5), f"{nb.name}: older than format 4.5: run `nbdev_clean`"
    assert book["metadata"].get("kernelspec", {}).get("name") == "python3", f"{nb.name}: its kernel must be `python3`"
    found = [c.id for c in cells(nb)]
    none_of((c.where for c in cells(nb) if not c.id or found.count(c.id) > 1),
            "cell ids must be there and unique (exported code carries them); rename the second one")

@each
def test_outputs_are_whole(nb):
    "Notebooks are committed executed, without errors."
    none_of((c.where for c in cells(nb, "code") if any(o["output_type"] == "error" for o in c.outputs)),
            f"a committed output is an error; run `make notebooks NB={nb.stem}`")
    code = [c for c in cells(nb, "code") if not c.exported]
    assert len(code) < 3 or any(c.outputs for c in code), f"{nb.name} has no outputs: run `make notebooks NB={nb.stem}`"

@each
def test_no_machine_paths(nb):
    machine = re.compile(r"(?<![\w.~])/(work|home|root|Users|opt|mnt)/\w+|(?<![\w.~])/tmp/\w+|[A-Z]:\\\\?Users")
    def found():
        for c in cells(nb):
            for text in (c.source, *c.texts()):
                if m := machine.search(text): yield f"{c.where}: {text[max(0, m.start()-30):m.end()+30]!r}"
    none_of(found(), "a path of one machine; show a relative path, or replace the folder before printing")

# ---- the text

@each
def test_opens_with_title_and_subtitle(nb):
    first = cells(nb)[0]
    assert first.kind == "markdown" and re.match(r"# \S.*\n\n> \S", first.source), \
        f"{nb.name}: the first cell must be Markdown: `# Title`, an empty line, `> one line that says what it is about`"

@each
def test_links_resolve(nb):
    def broken():
        for c in cells(nb):
            for text in ([c.source] if c.kind == "markdown" else c.texts()):
                for target in re.findall(r"\]\(([^)\s]+)\)", text):
                    here = not re.match(r"[a-z]+:|#", target)
                    if here and not (nb.parent/target.partition("#")[0]).exists(): yield f"{c.where}: {target}"
    none_of(broken(), f"a link leads nowhere; mend it (relative to {name(nb.parent)}/)")

@each
def test_nothing_left_to_do(nb):
    none_of((c.where for c in cells(nb) if re.search(r"\b(TODO|FIXME|XXX)\b", c.source)),
            "finish it, or file an issue and take the note out")

@each_chapter
def test_ends_with_prose(nb):
    assert cells(nb)[-1].kind == "markdown", f"{nb.name}: end with two lines of Markdown: what we have, what comes next"

# ---- the code

@each
def test_cells_import_or_work(nb):
    "nbdev's documentation and a reader both want imports apart."
    def mixed():
        for c in cells(nb, "code"):
            imports = [isinstance(n, (ast.Import, ast.ImportFrom)) for n in c.tree.body]
            if any(imports) and not all(imports): yield c.where
    none_of(mixed(), "a code cell holds imports only, or none; move the imports to a cell of their own")

@each
def test_width(nb):
    none_of((f"{c.where}: {len(line)} columns: {line[:60]}…"
             for c in cells(nb, "code") for line in c.source.splitlines() if len(line) > 120),
            "lines of code have at most 120 columns; break them")

@each
def test_directives(nb):
    none_of((f"{c.where}: #| {d}" for c in cells(nb, "code") for d in c.directives.keys() - DIRECTIVES),
            f"only these directives are used here: {', '.join(sorted(DIRECTIVES))}. Nothing is hidden from the reader")
    if nb.stem != "index":
        none_of((c.where for c in cells(nb, "code") if "echo:" in c.directives), "`echo: false` is for the index alone")

@each
def test_every_cell_runs(nb):
    none_of((c.where for c in cells(nb, "code") if "eval:" in c.directives and f"{nb.name}:{c.id}" not in EVAL_FALSE),
            "`eval: false` hides code that no longer works. Make the cell run, or add it to EVAL_FALSE with its reason")

@each
def test_flagged_cells_have_a_twin(nb):
    "What a slow or gpu cell shows is also shown, smaller, by a cell that always runs."
    code = cells(nb, "code")
    known = {n.name for path in CHAPTERS for c in cells(path, "code") if c.exported
             for n in public(c) if not patched(n)}
    flagged = [c for c in code if {"slow", "gpu"} & c.directives.keys()]
    test = re.compile(r"\bassert\b|\btest_\w+\(|\bExceptionExpected\(")
    tested = {n for c in code if c not in flagged and (c.exported or test.search(c.source)) for n in calls(c)}
    def lonely():
        for c in flagged:
            for missing in sorted(calls(c) & known - tested): yield f"{c.where}: `{missing}`"
    none_of(lonely(), "a slow or gpu cell uses what no always-executed test of this notebook uses; add a small twin")

# ---- the exported code

@each_chapter
def test_exports_one_module(nb):
    "One notebook, one module, of the same name."
    code = cells(nb, "code")
    assert [c.directives["default_exp"] for c in code if "default_exp" in c.directives] == [module_of(nb)], \
        f"{nb.name} needs exactly one cell `#| default_exp {module_of(nb)}`"
    assert "default_exp" in code[0].directives, f"{nb.name}: `#| default_exp` belongs in the first code cell"
    none_of((c.where for c in code if c.directives.get("export")), "export into the notebook's own module: `#| export`")

@each_chapter
def test_exported_cells_are_short(nb):
    lengths = ((c, sum(bool(line.strip()) for line in c.source.splitlines() if not line.startswith("#|")))
               for c in cells(nb, "code") if c.exported)
    none_of((f"{c.where}: {n} lines" for c, n in lengths if n > 40),
            "an exported cell has at most 40 lines; split it, with prose and a test between the parts")

ALLOWED = {"train_xe": {"tools.quality"}}

def own_imports(cell):
    "The modules of the package that a cell imports, without `noc_nb.`; `*` for a star."
    for node in ast.walk(cell.tree):
        if isinstance(node, ast.ImportFrom):
            if any(a.name == "*" for a in node.names): yield "*"
            whole = "noc_nb." * node.level + (node.module or "")
            if whole.startswith("noc_nb."): yield whole.rstrip(".").removeprefix("noc_nb.")
            elif whole == "noc_nb": yield from (a.name for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.startswith("noc_nb."))

@each_chapter
def test_exported_imports(nb):
    "No star. The book imports only what comes before; the toolbox the whole book, and of itself what comes before."
    order = {module_of(p): (p in TOOLBOX, number(p)) for p in CHAPTERS}
    def early(m): return order[m] < order[module_of(nb)] if m in order else False
    none_of((f"{c.where}: {m}" for c in cells(nb, "code") if c.exported for m in own_imports(c)
             if not early(m) and m not in ALLOWED.get(module_of(nb), ())),
            f"{nb.name}: import names one by one, and only from chapters that come before (an upward import exports "
            "well and fails later); move the code down, or pass it in as an argument")

@each_chapter
def test_exported_names_are_documented(nb):
    "A docstring for everything public, a comment for every parameter of a function."
    def missing():
        for c in (c for c in cells(nb, "code") if c.exported):
            lines = c.source.splitlines()
            for node in public(c):
                if not ast.get_docstring(node): yield f"{c.where}: `{node.name}` has no docstring"
                if isinstance(node, ast.FunctionDef) and not patched(node):
                    a = node.args
                    bare = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs) if "#" not in lines[p.lineno-1]]
                    if bare: yield f"{c.where}: `{node.name}` says nothing on {', '.join(bare)}"
    none_of(missing(), "say in one line what it does, and after each parameter `# shape, unit, meaning`")

# ---- the experiments

@each_experiment
def test_experiments_export_nothing(nb):
    none_of((c.where for c in cells(nb, "code") if c.exported or "default_exp" in c.directives),
            "an experiment notebook only renders; move the function to a chapter")

@each_experiment
def test_experiments_cite_committed_rows(nb):
    "A number in a table comes from a file in results/, not from a run inside the notebook."
    text = "\n".join(c.source for c in cells(nb))
    assert re.search(r"\bresults\b|read_rows|paper\.csv|read_paper", text), \
        f"{nb.name}: render rows of results/*.jsonl (`read_rows`), and say which file they stand in"
    files = re.findall(r"results/([\w.-]+\.(?:jsonl|csv))", text)
    none_of((f"results/{f}" for f in files if not (ROOT/"results"/f).exists()), f"{nb.name} cites a missing file")
