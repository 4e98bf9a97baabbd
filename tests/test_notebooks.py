"Every notebook keeps the house rules of CONTRIBUTING.md. A failure lists its offenders and says what to change."
import ast, io, re, tokenize
from statistics import median
from book import (BOOK, CHAPTERS, EXPERIMENTS, FOLDERS, NOTEBOOKS, ROOT, cells, folder, module_of, name, none_of,
                  number, read)

DIRECTIVES = {"default_exp", "export", "slow", "gpu", "echo:"}   # not "eval:", which hides code that no longer works
WIDTH, LINES, CLASS_LINES = 100, 40, 60   # columns of code; lines of an exported cell, and of a cell with a class

CELLS = {nb: cells(nb) for nb in NOTEBOOKS}

def every(kind=None, notebooks=NOTEBOOKS):
    "Return the cells of all notebooks, or those of one kind."
    return [c for nb in notebooks for c in CELLS[nb] if kind in (None, c.kind)]

def exported(notebooks=CHAPTERS): return [c for c in every("code", notebooks) if c.exported]

def public(cell):
    "Return the public functions and classes of an exported cell."
    for node in cell.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"): yield node

def patched(node): return any(ast.unparse(d).startswith("patch") for d in node.decorator_list)

# ---- the file

def test_names_are_numbered():
    numbered = [nb for nb in NOTEBOOKS if nb.stem != "index"]
    none_of((nb.name for nb in numbered if not re.fullmatch(r"\d\d\d?_[a-z][a-z0-9_]*", nb.stem)),
            "name it NN_module.ipynb, in lower case; NN, of two digits or three, is its place in the reading order")

def test_numbers_are_unique():
    numbers = [number(nb) for nb in NOTEBOOKS if nb.stem != "index"]
    none_of((name(nb) for nb in NOTEBOOKS if nb.stem != "index" and numbers.count(number(nb)) > 1),
            "two notebooks have one number")
    none_of((name(nb) for nb in CHAPTERS if folder(nb) in ("", "fast", "lab") and number(nb) > 57),
            "the paper, fast and the lab have numbers below 58")

def test_notebooks_are_small():
    none_of((f"{name(nb)}: {nb.stat().st_size/1000:.0f} KB" for nb in NOTEBOOKS if nb.stat().st_size > 300_000),
            "300 KB are allowed: show fewer or smaller figures")

def test_notebooks_are_of_format_4_5_with_unique_ids():
    def wrong():
        for nb in NOTEBOOKS:
            book, ids = read(nb), [c.id for c in CELLS[nb]]
            if (book["nbformat"], book["nbformat_minor"]) < (4, 5): yield f"{name(nb)}: older than format 4.5"
            if book["metadata"].get("kernelspec", {}).get("name") != "python3": yield f"{name(nb)}: not `python3`"
            yield from (f"{c.where}: its id" for c in CELLS[nb] if not c.id or ids.count(c.id) > 1)
    none_of(wrong(), "run `nbdev_clean`; cell ids must be there and unique, since exported code carries them")

def test_outputs_are_complete_and_contain_no_error():
    "No output is an error, and every notebook with code has outputs."
    def wrong():
        for nb in NOTEBOOKS:
            code = [c for c in CELLS[nb] if c.kind == "code"]
            yield from (c.where for c in code if any(o["output_type"] == "error" for o in c.outputs))
            shown = [c for c in code if not c.exported]
            if len(shown) > 2 and not any(c.outputs for c in shown): yield f"{name(nb)}: no outputs"
    none_of(wrong(), "run `make notebooks NB=…`")

def test_no_cell_names_a_machine_path():
    machine = re.compile(r"(?<![\w.~])/(work|home|root|Users|opt|mnt)/\w+|(?<![\w.~])/tmp/\w+|[A-Z]:\\\\?Users")
    found = ((c, text, machine.search(text)) for c in every() for text in (c.source, *c.texts()))
    none_of((f"{c.where}: {text[max(0, m.start()-30):m.end()+30]!r}" for c, text, m in found if m),
            "a path of one machine; show a relative path, or replace the folder before printing")

# ---- the text

def test_notebooks_open_with_title_and_subtitle():
    first = {nb: CELLS[nb][0] for nb in NOTEBOOKS}
    none_of((name(nb) for nb, c in first.items() if c.kind != "markdown"
             or not re.match(r"# \S.*\n\n> \S.*(\n\n|$)", c.source)),
            "the first cell must be Markdown: `# Title`, an empty line, `> one line that says what it is about`")

def test_links_say_the_number_of_their_target():
    def wrong():
        for c in every():
            for text in ([c.source] if c.kind == "markdown" else c.texts()):
                for label, target in re.findall(r"\[`?(\d\d\d?(?![^\]_ `])[^\]]*)\]\(([^)\s]+\.ipynb)[^)]*\)", text):
                    if int(re.match(r"\d+", label)[0]) != number(target): yield f"{c.where}: [{label}]({target})"
    none_of(wrong(), "the label of a link to a chapter has another number than the chapter")

def test_nothing_is_left_to_do():
    none_of((c.where for c in every() if re.search(r"\b(TODO|FIXME|XXX)\b", c.source)),
            "finish it, or file an issue and take the note out")

def test_chapters_end_with_prose():
    none_of((name(nb) for nb in CHAPTERS if CELLS[nb][-1].kind != "markdown"),
            "end with two lines of Markdown: what we have, what comes next")

def test_chapters_lead_to_the_next():
    order = [nb for notebooks in FOLDERS.values() for nb in notebooks]
    none_of((name(nb) for nb, after in zip(order, order[1:]) if after.name not in CELLS[nb][-1].source),
            "link the next chapter in the last lines: floor by floor, by number")

def test_displayed_formulas_stand_alone():
    "A displayed formula has a paragraph of its own; otherwise the site does not show it as a formula."
    def joined(c):
        texts = c.source.split("$$")[::2]                      # before, between and after formulas
        ends, starts = (filter(None, part) for part in (texts[:-1], texts[1:]))
        return not (all(t.endswith("\n\n") for t in ends) and all(t.startswith("\n\n") for t in starts))
    none_of((c.where for c in every("markdown") if joined(c)), "put a blank line before and behind $$ ... $$")

def test_prose_has_at_most_120_columns():
    "Prose has lines of at most 120 columns, except in tables, links and formulas."
    def long(c):
        prose = re.sub(r"```.*?```|\$\$.*?\$\$", "", c.source, flags=re.S)
        return [line for line in prose.splitlines() if len(line) > 120 and not re.match(r"\s*\||.*\]\(", line)]
    none_of((f"{c.where}: {line[:60]}…" for c in every("markdown") for line in long(c)), "break the lines")

EDITED = ["", "fast", "words", "lab", "files", "models", "scores", "pages", "experiments", "commands"]  # may only grow

def dropped():
    "Compile a pattern of the phrases to avoid in the second table of docs/glossary.md."
    table = (ROOT/"docs/glossary.md").read_text(encoding="utf-8").partition("## Wording")[2]
    phrases = [phrase for row in re.findall(r"^\| (`.*?) \|", table, re.M) for phrase in re.findall(r"`(.+?)`", row)]
    return re.compile(rf"\b({'|'.join(phrases)})\b", re.I)

def wording(cell):
    "Return the English of a cell: its prose, or its docstrings, comments and messages."
    if cell.kind == "markdown": return re.sub(r"```.*?```|\$\$.*?\$\$|`[^`]*`", "", cell.source, flags=re.S)
    documented = [n for n in ast.walk(cell.tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    messages = [n for n in ast.walk(cell.tree) if isinstance(n, ast.Call)
                and getattr(n.func, "id", "") in ("require", "NocError")]
    strings = [m.value for call in messages for m in ast.walk(call)
               if isinstance(m, ast.Constant) and isinstance(m.value, str)]
    return "\n".join([*filter(None, map(ast.get_docstring, documented)), *strings,
                      *re.findall(r"(?<!\S)# .*", cell.source, re.M)])

def test_no_phrase_is_one_that_the_glossary_avoids():
    "No cell has a phrase that the glossary avoids, and no sentence begins with a headless clause (\"What ...\")."
    phrase, headless = dropped(), re.compile(r"(?:^|[.:] )What [^.?!]*\.(?= |$)")
    assert phrase.search("It is told as one mention.") and headless.search("It runs. What fails is refused.")
    assert not headless.search("What does it write? Sentences.")
    def found():
        for c in every(notebooks=[nb for folder in EDITED for nb in FOLDERS[folder]]):
            text = " ".join(wording(c).split())
            patterns = [phrase, headless] if c.kind == "markdown" else [phrase]
            yield from (f"{c.where}: {m[0]}" for pattern in patterns for m in pattern.finditer(text))
    none_of(found(), "docs/glossary.md says what to write instead")

# ---- the code

def test_cells_contain_imports_or_other_code():
    "A cell has imports or other code, not both."
    def mixed(c):
        imports = [isinstance(n, (ast.Import, ast.ImportFrom)) for n in c.tree.body]
        return any(imports) and not all(imports)
    none_of((c.where for c in every("code") if mixed(c)),
            "a code cell holds imports only, or none; move the imports to a cell of their own")

def test_code_has_at_most_100_columns():
    none_of((f"{c.where}: {len(line)} columns: {line[:60]}…"
             for c in every("code") for line in c.source.splitlines() if len(line) > WIDTH),
            f"lines of code have at most {WIDTH} columns; break them")

def test_each_statement_is_on_its_own_line():
    def joined(c):
        text = re.sub(r"^\s*[%!].*$", "", c.source, flags=re.M)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return any(t.type == tokenize.OP and t.string == ";" for t in tokens)
    none_of((c.where for c in every("code") if joined(c)), "semicolons join statements; give each a line")

def test_directives_are_those_listed():
    none_of((f"{c.where}: #| {d}" for c in every("code") for d in c.directives.keys() - DIRECTIVES),
            f"only these directives are used here: {', '.join(sorted(DIRECTIVES))}. Nothing is hidden from the reader")
    none_of((c.where for c in every("code") if "echo:" in c.directives and c.notebook.stem != "index"),
            "`echo: false` is for the index alone")

def test_flagged_cells_name_their_twin():
    "Each slow or gpu cell names an unflagged cell that makes the same claim on smaller data."
    def lonely():
        for c in every("code"):
            if not {"slow", "gpu"} & c.directives.keys(): continue
            named = re.search(r"^# smaller version: cell (\w{8})$", c.source, re.M)
            twin = next((t for t in CELLS[c.notebook] if named and t.id == named[1]), None)
            if twin is None: yield f"{c.where}: no line `# smaller version: cell ID`"
            elif {"slow", "gpu"} & twin.directives.keys(): yield f"{c.where}: its twin is flagged, too"
            elif not re.search(r"\bassert\b|\btest_\w+\(", twin.source): yield f"{c.where}: its twin asserts nothing"
    none_of(lonely(), "name the small cell that always runs and claims the same")

# ---- the exported code

def test_each_chapter_exports_one_module():
    "Every chapter exports one module of the same name, except chapters that only combine others."
    def wrong():
        for nb in CHAPTERS:
            if not exported([nb]): continue
            code = [c for c in CELLS[nb] if c.kind == "code"]
            modules = [c.directives["default_exp"] for c in code if "default_exp" in c.directives]
            if modules != [module_of(nb)]: yield f"{name(nb)}: needs one cell `#| default_exp {module_of(nb)}`"
            elif "default_exp" not in code[0].directives: yield f"{name(nb)}: `default_exp` is not in its first cell"
            yield from (c.where for c in code if c.directives.get("export"))
    none_of(wrong(), "export into the notebook's own module, by `#| export`")

def test_patched_methods_hide_no_name():
    "No function has the name of a patched method, because fastcore 1.8's `patch` sets that name to None."
    def hidden():
        for nb in CHAPTERS:
            trees = [node for c in exported([nb]) for node in c.tree.body]
            names = {a.asname or a.name for n in trees if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
            names |= {n.name for n in trees if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not patched(n)}
            methods = (n.name for n in trees if isinstance(n, ast.FunctionDef) and patched(n))
            yield from (f"{name(nb)}: {method}" for method in methods if method in names)
    none_of(hidden(), "define the method in its class, or call the function something else")

def code_lines(cell): return sum(bool(line.strip()) for line in cell.source.splitlines() if not line.startswith("#|"))

def most_lines(cell):
    "Return the maximum number of lines of a cell; a cell with a class may have more."
    return CLASS_LINES if any(isinstance(node, ast.ClassDef) for node in cell.tree.body) else LINES

def test_exported_cells_are_short():
    none_of((f"{c.where}: {code_lines(c)} lines" for c in exported() if code_lines(c) > most_lines(c)),
            f"an exported cell has at most {LINES} lines, one with a class {CLASS_LINES}; split it")
    assert median(map(code_lines, exported(BOOK))) <= 15, "an exported cell of the paper's floor has about 12 lines"

def unshown(notebook):
    "Return the largest number of exported cells in a row without an output; imports do not count."
    longest = run = 0
    for c in CELLS[notebook]:
        if c.kind != "code": continue
        imports = all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in c.tree.body)
        if c.exported and not imports: run += 1
        elif c.outputs: run = 0
        longest = max(longest, run)
    return longest

def test_definitions_are_followed_by_outputs():
    "At most five exported cells in a row have no output on the paper's floor, at most eight elsewhere."
    def most(nb): return 5 if nb in BOOK else 8
    none_of((f"{name(nb)}: {unshown(nb)} exported cells in a row" for nb in CHAPTERS if unshown(nb) > most(nb)),
            "show what a definition does, in a cell with an output")

def test_refusals_are_few_on_the_papers_floor():
    calls = [node.func.id for c in every("code", BOOK) if not c.exported for node in ast.walk(c.tree)
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    tests = [node for c in every("code", BOOK) if not c.exported for node in ast.walk(c.tree)]
    plain = sum(isinstance(node, ast.Assert) for node in tests)
    claims = plain + sum(call.startswith("test_") for call in calls)
    assert calls.count("test_fail") <= .05*claims, "refusals are no lesson: tests/test_hostile.py has them"

def test_functions_have_few_parameters():
    "No function except a command has ten parameters; it takes an object instead."
    prescribed = {"grid_beam", "with_words"}   # transformers prescribes half of the first's; the second has the others
    def many():
        for c in exported():
            for node in ast.walk(c.tree):
                if not isinstance(node, ast.FunctionDef) or node.name.startswith("noc_"): continue
                if node.name in prescribed: continue
                a = node.args
                count = len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs)
                if count - (a.args[:1] and a.args[0].arg in ("self", "cls") or 0) > 10: yield f"{c.where}: {count}"
    none_of(many(), "collect parameters in a configuration")

def own_imports(cell):
    "Return the modules of the package that a cell imports, without `noc_nb.`; `*` for a star import."
    for node in ast.walk(cell.tree):
        if isinstance(node, ast.ImportFrom):
            if any(a.name == "*" for a in node.names): yield "*"
            whole = "noc_nb." * node.level + (node.module or "")
            if whole.startswith("noc_nb."): yield whole.rstrip(".").removeprefix("noc_nb.")
            elif whole == "noc_nb": yield from (a.name for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.startswith("noc_nb."))

def test_exported_imports_follow_the_floors():
    "No star imports. A chapter imports from lower numbers of its own floor, and from floors above it."
    floor = {folder: i for i, folder in enumerate(FOLDERS)}
    order = {module_of(nb): (floor[folder(nb)], number(nb)) for nb in CHAPTERS}
    def early(m, here): return m in order and order[m] < order[here]
    none_of((f"{c.where}: {m}" for c in exported() for m in own_imports(c)
             if not early(m, module_of(c.notebook))),
            "import names one by one, and only from chapters that come before (an upward import exports well and "
            "fails later); move the code down, or pass it in as an argument")

def test_exported_names_are_documented():
    "Every public name has a docstring, and every parameter of a function has a comment."
    def missing():
        for c in exported():
            lines = c.source.splitlines()
            for node in public(c):
                if not ast.get_docstring(node): yield f"{c.where}: `{node.name}` has no docstring"
                if isinstance(node, ast.FunctionDef) and not patched(node):
                    a = node.args
                    bare = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs) if "#" not in lines[p.lineno-1]]
                    if bare: yield f"{c.where}: `{node.name}` says nothing on {', '.join(bare)}"
    none_of(missing(), "say in one line what it does, and after each parameter `# shape, unit, meaning`")

# ---- the experiments

def test_experiments_export_nothing():
    none_of((c.where for c in every("code", EXPERIMENTS) if c.exported or "default_exp" in c.directives),
            "an experiment notebook only renders; move the function to a chapter")
