"""Write stubs for type checkers beside the modules: `make release` runs `python tests/stubs.py FOLDER`.

`@patch` adds methods to a class at run time, where type checkers do not see them; in a stub they are in the class."""
import ast, re, sys
from pathlib import Path

TAKE_LISTS = {"Regions"}   # dataclasses that convert lists to tensors
BASES = {"Config", "nn.Module"}   # return types that are too general
KINDS = dict(cls_method="classmethod", as_prop="property")

def patch_of(node):
    "Return the `@patch` decorator of a function, or None."
    return next((d for d in getattr(node, "decorator_list", ()) if re.match(r"patch\b", ast.unparse(d))), None)

def method(node):
    "Return a patched function as a method, and the names of its classes."
    own = node.args.args[0]
    classes = [n.id for n in ast.walk(own.annotation) if isinstance(n, ast.Name)]
    kinds = [KINDS[word.arg] for word in getattr(patch_of(node), "keywords", ())]
    node.decorator_list, own.annotation = [ast.Name(kind) for kind in kinds], None
    return node, classes

def or_none(node, default):
    "Add None to the annotation of parameters whose default is None."
    if node.annotation and isinstance(default, ast.Constant) and default.value is None:
        node.annotation = ast.BinOp(node.annotation, ast.BitOr(), ast.Constant(None))

def shorten(node):
    "Remove the body of a function; annotate defaults of None."
    if isinstance(node, ast.AnnAssign): or_none(node, node.value)
    if not isinstance(node, ast.FunctionDef): return
    node.body = [ast.Expr(ast.Constant(...))]
    a = node.args
    for arg, default in [*zip(a.args[::-1], a.defaults[::-1]), *zip(a.kwonlyargs, a.kw_defaults)]:
        or_none(arg, default)

def own_kind(node):
    "Give class methods without a specific return type the type `Self`; others get no type."
    if not isinstance(node, ast.FunctionDef): return
    own = any(ast.unparse(d) == "classmethod" for d in node.decorator_list)
    if node.returns and ast.unparse(node.returns) not in BASES: return
    node.returns = ast.Name("Self") if own else None

def constructor(node):
    "Return an `__init__` for a dataclass whose columns may be lists."
    fields = [ast.unparse(field) for field in node.body if isinstance(field, ast.AnnAssign)]
    given = ", ".join(fields).replace(": Tensor", ": Tensor | np.ndarray | list | tuple")
    return ast.parse(f"def __init__(self, {given}): ...").body[0]

def stub(text):
    "Return the stub of a module."
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
    "Write a stub beside each module of a folder, and the file `py.typed`."
    for path in Path(package).glob("**/*.py"):
        path.with_suffix(".pyi").write_text(stub(path.read_text(encoding="utf-8")), encoding="utf-8")
    (Path(package)/"py.typed").touch()

if __name__ == "__main__": write_stubs(sys.argv[1])
