"""Count lines, nodes and names: `python tests/budget.py` prints those of each part, in the form of tests/budget.json.

Lines are code lines, without blank lines and comments; nodes are those of the syntax tree, so that denser lines save
nothing. Numbers may fall. If you raise a number, change the file in the same commit and give the reason in its body."""
import ast, json, sys
from book import CHAPTERS, EXPERIMENTS, FLOORS, FOLDERS, NOTEBOOKS, ROOT, SETTINGS, cells

FILE = ROOT/"tests/budget.json"
SCRIPTS = {"benchmarks": "benchmarks/*.py", "tests": "tests/*.py"}

def counts(sources):
    "Count lines, nodes, and public and private names (functions, classes, methods) of sources."
    trees = [ast.parse(source) for source in sources]
    lines = [line.strip() for source in sources for line in source.splitlines()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    private = sum(name.startswith("_") for name in names)
    return dict(lines=sum(bool(line) and not line.startswith("#") for line in lines), nodes=len(nodes),
                public=len(names) - private, private=private)

def floors():
    "Return floor -> exported cells; the folders of the toolbox are one floor."
    of = dict.fromkeys(FLOORS, "toolbox") | {"": "paper", "fast": "fast and lab", "lab": "fast and lab"}
    of["words"] = "words"
    found = {floor: [] for floor in dict.fromkeys(of.values())}
    for folder, notebooks in FOLDERS.items():
        code = [cell for notebook in notebooks if notebook in CHAPTERS for cell in cells(notebook, "code")]
        found.get(of.get(folder), []).extend(cell.source for cell in code if cell.exported)
    return found

def definitions(notebooks):
    "Yield the functions and classes that notebooks define, as sources."
    for cell in (cell for notebook in notebooks for cell in cells(notebook, "code")):
        for node in cell.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)): yield ast.get_source_segment(cell.source, node)

def house():
    "Return the current numbers of all parts."
    parts = floors() | {"experiments": [*definitions(EXPERIMENTS)]}
    parts |= {name: [p.read_text(encoding="utf-8") for p in sorted(ROOT.glob(pattern))]
              for name, pattern in SCRIPTS.items()}
    found = {name: counts(sources) for name, sources in parts.items()}
    commands = len(SETTINGS["console_scripts"].split())
    return found | dict(notebooks=len(NOTEBOOKS), commands=commands)

if __name__ == "__main__": json.dump(house(), sys.stdout, indent=1)
