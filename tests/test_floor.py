"The paper's floor is read from the method to the data: a chapter needs no later one, and nothing of other floors."
import ast
from book import BOOK, cells, module_of, none_of

REFUSALS = 25                              # those that a reader of the equations needs

CODE = {module_of(nb): cells(nb, "code") for nb in BOOK}      # in reading order

def imported(cell):
    "Return the modules of the package that a cell imports, without `noc_nb.`."
    for node in ast.walk(cell.tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if names == ["noc_nb"]: names = [f"noc_nb.{a.name}" for a in node.names]
        if isinstance(node, ast.Import): names = [a.name for a in node.names]
        yield from (name.removeprefix("noc_nb.") for name in names if name.startswith("noc_nb."))

def test_the_papers_floor_imports_no_other_floor():
    "No cell of the floor, exported or not, imports from another floor or the package's short names."
    none_of((f"{c.where}: {m}" for code in CODE.values() for c in code for m in imported(c) if m not in CODE),
            "show it on the toy world, draw with matplotlib, or move the check to tests/")

def test_a_chapter_needs_no_later_one():
    place = {module: n for n, module in enumerate(CODE)}
    none_of((f"{c.where}: {m}" for module, code in CODE.items() for c in code for m in imported(c)
             if m in place and place[m] >= place[module]), "move the function, or hand it in")

def test_refusals_are_few():
    "The floor refuses only what a reader of the equations needs to know; the rest is refused by readers and pipeline."
    def refusals(tree):
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require"
            raised = isinstance(node, ast.Raise) and "NocError" in ast.unparse(node)
            if called or raised: yield node
    found = [f"{c.where}: line {node.lineno}" for code in CODE.values() for c in code
             if c.exported for node in refusals(c.tree)]
    assert len(found) <= REFUSALS, "\n".join([f"{len(found)}, {REFUSALS} allowed", *found])

def test_the_plain_tokeniser_equals_the_whole_one(coco):
    "On all captions of COCO, the floor's tokens are those of the PTB tokeniser that the commands use."
    from noc_nb.lab.disk import read_json
    from noc_nb.lab.metrics import tokenize as whole
    from noc_nb.vocab import tokenize
    captions = [a["caption"] for name in ("train", "val")
                for a in read_json(coco/f"annotations/captions_{name}2014.json")["annotations"]]
    assert len(captions) > 90_000
    none_of((c for c in captions if tokenize(c) != whole(c)), "other tokens")
