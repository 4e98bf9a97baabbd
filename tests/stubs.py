"""Stubs for type checkers, which `make release` puts beside the modules: `python tests/stubs.py FOLDER`.

`@patch` gives a class its methods at run time, which no checker sees; in a stub they stand in the class."""
import ast, re, sys
from pathlib import Path

TAKE_LISTS = {"Regions"}   # dataclasses that make tensors of lists
BASES = {"Config", "nn.Module"}   # say too little of a result: it is of the class that was asked, or of what was given
KINDS = dict(cls_method="classmethod", as_prop="property")

def patch_of(node):
    "The `@patch` of a function, or None."
    return next((d for d in getattr(node, "decorator_list", ()) if re.match(r"patch\b", ast.unparse(d))), None)

def method(node):
    "A patched function as it would stand in its class, and the names of its classes."
    own = node.args.args[0]
    classes = [n.id for n in ast.walk(own.annotation) if isinstance(n, ast.Name)]
    kinds = [KINDS[word.arg] for word in getattr(patch_of(node), "keywords", ())]
    node.decorator_list, own.annotation = [ast.Name(kind) for kind in kinds], None
    return node, classes

def or_none(node, default):
    "What is None by default may be None."
    if node.annotation and isinstance(default, ast.Constant) and default.value is None:
        node.annotation = ast.BinOp(node.annotation, ast.BitOr(), ast.Constant(None))

def shorten(node):
    "A function without its body; defaults of None are told."
    if isinstance(node, ast.AnnAssign): or_none(node, node.value)
    if not isinstance(node, ast.FunctionDef): return
    node.body = [ast.Expr(ast.Constant(...))]
    a = node.args
    for arg, default in [*zip(a.args[::-1], a.defaults[::-1]), *zip(a.kwonlyargs, a.kw_defaults)]:
        or_none(arg, default)

def own_kind(node):
    "A function whose result is known by a base class alone; a class's own method gives its own kind."
    if not isinstance(node, ast.FunctionDef): return
    own = any(ast.unparse(d) == "classmethod" for d in node.decorator_list)
    if node.returns and ast.unparse(node.returns) not in BASES: return
    node.returns = ast.Name("Self") if own else None

def constructor(node):
    "What makes a dataclass whose columns may be lists."
    fields = [ast.unparse(field) for field in node.body if isinstance(field, ast.AnnAssign)]
    given = ", ".join(fields).replace(": Tensor", ": Tensor | np.ndarray | list | tuple")
    return ast.parse(f"def __init__(self, {given}): ...").body[0]

def stub(text):
    "A module's stub."
    tree = ast.parse(text)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in [node for node in tree.body if patch_of(node)]:
        made, names = method(node)
        for name in names: classes.get(name, tree).body.append(made)
        tree.body.remove(node)
    for name in TAKE_LISTS & classes.keys(): classes[name].body.append(constructor(classes[name]))
    for node in [*ast.walk(tree)]:
        shorten(node)
        own_kind(node)
    if any(isinstance(node, ast.Name) and node.id == "Self" for node in ast.walk(tree)):
        tree.body[1:1] = ast.parse("from typing_extensions import Self").body
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"

def write_stubs(package):
    "A stub beside each module of a folder, and the mark that says so."
    for path in Path(package).glob("**/*.py"):
        path.with_suffix(".pyi").write_text(stub(path.read_text(encoding="utf-8")), encoding="utf-8")
    (Path(package)/"py.typed").touch()

if __name__ == "__main__": write_stubs(sys.argv[1])
