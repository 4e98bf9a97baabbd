"""Write the folder of words for models: `python tests/hub.py [FOLDER]`.

The folder is a repository for the hub, `generate(custom_generate=FOLDER)`, and a package, `pip install FOLDER`. `hub/`
contains its card. The code is the part of the package that `START` needs: a file for each module, with relative
imports, so that only torch has to be installed, and transformers for a model of transformers."""
import ast, shutil, sys
from pathlib import Path
import noc_nb
from book import SETTINGS

ROOT = Path(__file__).parent.parent
START = {"words/generate": {"generate", "grid_beam", "with_words"}}   # modules -> public names
PACKAGE = "noc_words"
HEAD = '''"""{doc} A part of noc_nb {version}, made by `make hub`. Apache License 2.0."""
'''

def target(node):
    "Return the class of a patched method, else None."
    if not any(ast.unparse(d).startswith("patch") for d in getattr(node, "decorator_list", ())): return None
    annotation = node.args.args[0].annotation
    return annotation and ast.unparse(annotation)

def defines(node):
    "Return the names that a statement of a module defines."
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)): return {target(node) or node.name}
    if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)): return set()
    targets = getattr(node, "targets", None) or [node.target]
    return {n.id for part in targets for n in ast.walk(part) if isinstance(n, ast.Name)}    # MODES["bank"] = Bank too

def uses(node): return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}

class Module:
    "A module of the package, with the statements that are needed."
    def __init__(self, name):
        self.file = ROOT/"noc_nb"/f"{name}.py"
        self.lines = self.file.read_text(encoding="utf-8").splitlines()
        self.tree = ast.parse("\n".join(self.lines))
        self.needed, self.names = set(), set()

    def imports(self):
        "Yield (statement, alias, module of the package or None) for each imported name."
        for node in self.tree.body:
            if not isinstance(node, (ast.Import, ast.ImportFrom)): continue
            for alias in node.names:
                own = isinstance(node, ast.ImportFrom) and node.level
                up = self.file.parent.parent if own == 2 else self.file.parent
                yield node, alias, str((up/node.module.replace(".", "/")).relative_to(ROOT/"noc_nb")) if own else None

    def need(self, names):
        "Add the statements that define these names, and all that they use. Return the names needed from other modules."
        self.names |= names
        size = -1
        while size != len(self.needed) + len(self.names):
            size = len(self.needed) + len(self.names)
            for place, node in enumerate(self.tree.body):
                if not defines(node) & self.names: continue
                self.needed.add(place)
                self.names |= uses(node)
        out = {}
        for _, alias, module in self.imports():
            if module and alias.name in self.names: out.setdefault(module, set()).add(alias.name)
        return out

    def text(self):
        "Return the source of the module's needed statements, with relative imports."
        head = HEAD.format(doc=ast.get_docstring(self.tree), version=noc_nb.__version__)
        outside, inside = [], {}
        for node, alias, module in self.imports():
            if (alias.asname or alias.name.partition(".")[0]) not in self.names: continue
            line = f"import {ast.unparse(alias)}"
            if module: inside.setdefault(Path(module).name, []).append(alias.name)
            else: outside.append(f"from {node.module} {line}" if isinstance(node, ast.ImportFrom) else line)
        outside += [f"from .{name} import {', '.join(names)}" for name, names in inside.items()]
        parts = []
        for place in sorted(self.needed):
            node = self.tree.body[place]
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            parts.append("\n".join(self.lines[first-1:node.end_lineno]))
        return "\n\n".join([head + "\n".join(outside), *parts]) + "\n"

def modules():
    "Return name -> `Module` for all modules that `START` needs."
    found, todo = {}, [*START.items()]
    while todo:
        name, names = todo.pop()
        module = found.setdefault(name, Module(name))
        if names <= module.names: continue
        todo += module.need(names).items()
    return found

def project():
    "Return the package's pyproject.toml."
    need = (ROOT/"hub/requirements.txt").read_text(encoding="utf-8").split()
    torch, transformers = (next(r for r in need if r.startswith(name)) for name in ("torch", "transformers"))
    inflect = next(r for r in SETTINGS["extra_formats"].split() if r.startswith("inflect"))
    return f'''[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{PACKAGE.replace("_", "-")}"
version = "{noc_nb.__version__}"
description = "Beam search for models of transformers that must mention given words"
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE", "NOTICE"]
requires-python = ">={SETTINGS["min_python"]}"
dependencies = ["{torch}"]

[project.optional-dependencies]
transformers = ["{transformers}"]
forms = ["{inflect}"]

[project.urls]
source = "{SETTINGS["git_url"]}"

[tool.setuptools]
packages = ["{PACKAGE}"]
package-dir = {{{PACKAGE} = "custom_generate"}}
package-data = {{{PACKAGE} = ["py.typed"]}}
'''

def write(folder):
    "Write the repository, and return its folder."
    folder = Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    code = folder/"custom_generate"
    code.mkdir(parents=True)
    for name, module in modules().items(): (code/f"{Path(name).name}.py").write_text(module.text(), encoding="utf-8")
    lines = [f"from .{Path(name).name} import {', '.join(sorted(names))}" for name, names in START.items()]
    public = sorted(set().union(*START.values()))
    head = HEAD.format(doc="Words that a text of a model must mention.", version=noc_nb.__version__)
    (code/"__init__.py").write_text("\n".join([head, *lines, f"\n__all__ = {public}\n"]), encoding="utf-8")
    (code/"py.typed").touch()
    (folder/"pyproject.toml").write_text(project(), encoding="utf-8")
    for file in "hub/README.md", "LICENSE": shutil.copy(ROOT/file, folder)
    notice = (ROOT/"NOTICE").read_text(encoding="utf-8").partition("\n\n")[0]     # the rest is about models
    (folder/"NOTICE").write_text(notice + "\n", encoding="utf-8")
    shutil.copy(ROOT/"hub/requirements.txt", code)
    return folder

if __name__ == "__main__": print(f"{write(*sys.argv[1:] or [ROOT/'_hub'])}: a repository for the hub, and a package")
