"Test that the modules equal what the notebooks export, and that the settings are consistent."
import ast, importlib.metadata, inspect, io, os, re, subprocess, sys, tokenize
from book import CHAPTERS, MODULES, ROOT, SETTINGS, cells, module_of, name, none_of, run, scratch
from stubs import stub

def norm(dist): return re.sub(r"[-_.]+", "-", dist).lower()

def files(folder, pattern):
    "Return name -> content of the files of a folder that match a pattern."
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.glob(pattern)) if p.is_file()}

def compare(old, new):
    "Yield a line for each file that differs."
    for f in sorted(old.keys() | new.keys()):
        if f not in new: yield f"{f}: nothing produces it"
        elif f not in old: yield f"{f}: missing"
        elif old[f] != new[f]: yield f"{f}: differs"

# ---- generated files

def test_modules_are_what_the_notebooks_export(tmp_path):
    """Exporting into an empty folder gives the committed modules, none edited by hand or without a notebook, and
    changes no other file that git would list; nor does cleaning the notebooks."""
    repo = scratch(tmp_path)
    before = files(repo, "**/*.*")
    for f in files(repo, "noc_nb/**/*.py"): (repo/f).unlink()
    run("nbdev_export", cwd=repo)
    none_of(compare(before, files(repo, "**/*.*")),
            "`make export` changes these files: commit what it leaves, and delete a module that has no notebook")
    run("nbdev_clean", cwd=repo)
    none_of(compare(before, files(repo, "**/*.*")), "run `nbdev_clean` and commit what it changes")
    assert "noc_nb/**/*.py linguist-generated" in (ROOT/".gitattributes").read_text(), \
        "say in .gitattributes that noc_nb/*.py is generated"

def test_each_module_comes_from_one_notebook():
    modules = [name(p).removeprefix("noc_nb/").removesuffix(".py").replace("/", ".") for p in MODULES]
    chapters = [nb for nb in CHAPTERS if any(cell.exported for cell in cells(nb, "code"))]
    none_of(compare(dict.fromkeys(map(module_of, chapters)), dict.fromkeys(modules)),
            "every chapter that exports has one module, and every module has its chapter")

def test_a_private_name_has_one_home():
    "No two modules define the same private name; only the entry of a command is named after its options."
    homes = {}
    for module in MODULES:
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
            if isinstance(node, ast.Assign): names = [x.id for x in node.targets if isinstance(x, ast.Name)]
            for x in names:
                if re.match("_(?!_|run_)", x): homes.setdefault(x, set()).add(name(module))
    none_of((f"{x}: {', '.join(sorted(of))}" for x, of in homes.items() if len(of) > 1), "rename all but one")

def test_no_module_has_an_undefined_name():
    "No module uses an undefined name, for example one that only an unexported cell of its notebook imports."
    from pyflakes.checker import Checker
    from pyflakes.messages import UndefinedExport, UndefinedLocal, UndefinedName
    def undefined(path):
        for m in Checker(ast.parse(path.read_text(encoding="utf-8")), name(path)).messages:
            if isinstance(m, (UndefinedExport, UndefinedLocal, UndefinedName)): yield str(m)
    none_of((m for p in MODULES for m in undefined(p)), "import or define these names in a cell that is exported")

# ---- settings

def test_the_stubs_contain_the_patched_methods():
    "Stubs have the methods that `@patch` adds, accept lists for `Regions`, and give `from_pretrained` its own type."
    from noc_nb.models import pipeline
    from noc_nb.lab import config, experiment
    for module in pipeline, experiment:
        text = inspect.getsource(module)
        made = {c.name: c for c in ast.parse(stub(text)).body if isinstance(c, ast.ClassDef)}
        patched = re.findall(r"^@patch\S*(?: *#.*)?\ndef (\w+)\((?:self|cls):(\w+)", text, re.M)
        assert len(patched) == text.count("\n@patch") > 0
        for method, name in patched: assert method in {getattr(f, "name", None) for f in made[name].body}
    assert ("def from_pretrained(cls, name, device=None, selector=RegionSelector) -> NovelCaptioner:"
            in stub(inspect.getsource(pipeline)))
    regions = stub((ROOT/"noc_nb/regions.py").read_text())
    assert "boxes: Tensor | np.ndarray | list | tuple, labels: Tensor | np" in regions
    assert "def override(cfg, settings: list):" in stub(inspect.getsource(config))

def test_requirements_name_every_import():
    "A user who installs the package gets all that its modules import."
    owners = importlib.metadata.packages_distributions()    # Python 3.10 lacks packages with the name of their module
    extras = " ".join(value for key, value in SETTINGS.items() if key.startswith("extra_"))
    stated = {norm(re.match(r"[\w.-]+", r)[0]) for r in f'{SETTINGS["requirements"]} {extras}'.split()}
    def unknown():
        for c in (c for p in CHAPTERS for c in cells(p, "code") if c.exported):
            for node in ast.walk(c.tree):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                          [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
                for top in {m.partition(".")[0] for m in modules} - sys.stdlib_module_names - {"noc_nb"}:
                    if not {norm(d) for d in owners.get(top, [top])} & stated: yield f"{c.where}: {top}"
    none_of(unknown(), "exported code imports what `requirements` in settings.ini does not name; add it, or do without")

def test_python_versions_agree():
    "setup.py, settings.ini and the workflow name the same Pythons."
    supported = re.findall(r'"(3\.\d+)"', (ROOT/"setup.py").read_text())
    assert supported[0] == SETTINGS["min_python"], "min_python in settings.ini is not the first version in setup.py"
    matrix = re.search(r"python: \[(.*)\]", (ROOT/".github/workflows/test.yml").read_text())[1]
    assert re.findall(r"[\d.]+", matrix) == supported, "the workflow tests other Pythons than setup.py names"

def test_actions_are_named_by_commit():
    "CI runs the code that was read: a tag can be moved, a commit cannot."
    files = (ROOT/".github/workflows").glob("*.yml")
    used = [line.strip() for path in files for line in path.read_text().splitlines() if "uses:" in line]
    none_of((line for line in used if not re.search(r"uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)),
            "name the commit of a release, and the release in a comment")
    assert used

def test_readme_names_the_pythons_that_are_tried():
    "CI installs the package with the Python versions that the README names."
    told = re.search(r"needs Python ([\d.]+) to ([\d.]+)", (ROOT/"README.md").read_text(encoding="utf-8"))
    matrix = re.search(r"python: \[(.*)\]", (ROOT/".github/workflows/installed.yml").read_text())[1]
    tried = re.findall(r"[\d.]+", matrix)
    assert told.groups() == (tried[0], tried[-1]) and tried[0] == SETTINGS["min_python"]

def test_flags_are_separated_by_spaces():
    assert SETTINGS["tst_flags"].split() == ["slow", "gpu"], \
        "settings.ini needs `tst_flags = slow gpu`: with `|` or `,` between them nbdev_test runs the flagged cells"

CLOSURE = """
import sys, torch, numpy, fastcore.basics
before = {*sys.modules}
import noc_nb.scst
print(*sorted({*sys.modules} - before))
"""

def test_the_papers_floor_stands_alone():
    "Importing self-critical training loads only the paper's modules and the standard library."
    loaded = run(sys.executable, "-c", CLOSURE, cwd=ROOT).split()
    others = [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names | {"noc_nb"}]
    none_of(others, "`import noc_nb.scst` loads these; hand them in as arguments")
    ours = [name for name in loaded if name.startswith("noc_nb.")]
    none_of((name for name in ours if name.count(".") > 1 or name in ("noc_nb.fast", "noc_nb.lab")),
            "the paper's floor imports another floor")
    none_of({"filelock", "hashlib", "configparser"} & {*loaded}, "the paper's floor needs no lock, hash or settings")

LOADED = """
import importlib, pkgutil, sys, torch, numpy, fastcore.basics
before = {*sys.modules}
for folder in sys.argv[1:]:
    package = importlib.import_module(folder)
    for module in pkgutil.iter_modules(package.__path__, folder + "."):
        if not module.ispkg and not module.name.endswith("__main__"): importlib.import_module(module.name)
print(*sorted({*sys.modules} - before))
"""

def loaded(*folders):
    "Return the modules that importing all modules of these folders of the package loads."
    return run(sys.executable, "-c", LOADED, *folders, cwd=ROOT).split()

def test_words_need_only_the_papers_floor_and_fast():
    "The modules of words load only these floors and the standard library, and no floor above `models` loads them."
    found = loaded("noc_nb.words")
    floors = {name: name.split(".")[1] for name in found if name.count(".") > 1}
    none_of((name for name, floor in floors.items() if floor not in ("fast", "words")),
            "words imports another floor; hand it in as an argument")
    none_of((name for name in found if name.partition(".")[0] not in sys.stdlib_module_names | {"noc_nb"}),
            "importing noc_nb.words loads these")
    none_of((name for name in loaded("noc_nb", "noc_nb.fast", "noc_nb.lab", "noc_nb.files")
             if name.startswith("noc_nb.words")), "only models, scores, pages and commands may import words")

HIDDEN = """
import builtins, importlib, pkgutil, sys
real = builtins.__import__
def without(name, globals=None, locals=None, fromlist=(), level=0):
    own = str((globals or {}).get("__name__")).startswith("noc_nb")
    if own and not level and name in ("fcntl", "termios", "resource", "pwd", "grp"): raise ImportError(name)
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = without
import noc_nb
names = [m.name for m in pkgutil.walk_packages(noc_nb.__path__, "noc_nb.") if m.name != "noc_nb.__main__"]
for name in names: importlib.import_module(name)
print(len(names))
"""

def test_every_module_imports_without_the_modules_that_windows_lacks():
    "Every module can be imported where the modules of Unix are missing."
    assert int(run(sys.executable, "-c", HIDDEN, cwd=ROOT)) > 60

HEAVY = "pandas pyarrow matplotlib torchvision gradio ray pycocoevalcap accelerate jinja2".split()

def test_importing_the_pipeline_loads_no_large_package():
    "Importing the pipeline loads no package for tables, files, plots or pages."
    code = "import sys, noc_nb.models.pipeline; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = run(sys.executable, "-c", code, cwd=ROOT).split()
    none_of(sorted(set(HEAVY) & set(loaded)),
            "`import noc_nb.models.pipeline` loads these; import them in the function that needs them")

OPTIONS = """
import sys
from noc_nb.commands.cli import main
sys.argv = sys.argv[1:]
try: main()
except SystemExit as e: print(e.code, *{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)
"""

def test_options_are_read_before_anything_is_imported():
    "`--help`, `--version` and a misspelt option do not import PyTorch or other large packages."
    for script in SETTINGS["console_scripts"].split():
        command, _, target = script.partition("=")
        assert target == "noc_nb.commands.cli:main", f"{command}: {target}"
        for option, leaves, says in (("--help", "0", f"usage: {command} "), ("--hlep", "2", f"usage: {command} "),
                                     ("--version", "0", f"noc_nb {SETTINGS['version']}\n")):
            done = subprocess.run([sys.executable, "-c", OPTIONS, command, option], cwd=ROOT, capture_output=True,
                                  text=True)
            code, *loaded = done.stderr.splitlines()[-1].split()
            assert code == leaves and says in done.stdout + done.stderr, done.stderr[-2000:]
            assert not {"torch", "numpy", *HEAVY} & set(loaded), f"{command} {option}: imports {loaded}"

FIRST = """
import sys
from noc_nb.commands.cli import main
for line in open("lines"):
    sys.argv = line.split()
    try: main()
    except SystemExit as e: assert e.code == 2, line
print(*{name.partition('.')[0] for name in sys.modules})
"""

def test_inputs_are_checked_before_anything_is_imported(tmp_path):
    "A missing, empty, truncated or wrong input gives one line before PyTorch is imported."
    files = dict(empty="", cut='[{"bbox": [1, ', dogs="dogs", list='[{"image_id": 1}]')
    for name, text in files.items(): (tmp_path/f"{name}.json").write_text(text)
    (tmp_path/"p.parquet").write_text("PAR1 and no more")
    (tmp_path/"folder").mkdir()
    cases = {
        "noc_caption none": "none: no such file or folder; expected photos (folder, .tar, .parquet)",
        "noc_caption empty.json": "empty.json: is empty; expected photos",
        "noc_caption cut.json": "cut.json: is not a complete .json file",
        "noc_caption p.parquet": "p.parquet: is not a complete .parquet file",
        "noc_caption list.json": 'list.json: has no "bbox"',
        "noc_caption folder --add-words none.txt": "none.txt: no such file",
        "noc_caption folder --model ./folder": "./folder/pipeline.json: no such file",
        "noc_caption folder --captioner folder": "folder/config.json: no such file",
        "noc_eval --captions dogs.json": "dogs.json: is not a .json file; expected captions to score, in any form",
        "noc_features none": "none: no such file", "noc_features folder --weights none.pth": "none.pth: no such file",
        "noc_train xe --captions none.json": "none.json: no such file",
        "noc_train xe --features folder": "folder/meta.json: no such file",
        "noc_train scst --start folder": "folder/config.json: no such file",
        "noc_reproduce --heldout list.json": 'list.json: has no "objects"',
        "noc_pipeline --selector folder": "folder/config.json: no such file",
        "noc_app --detections empty.json": "empty.json: is empty"}
    (tmp_path/"lines").write_text("\n".join(cases))
    done = subprocess.run([sys.executable, "-c", FIRST], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr
    for (line, told), said in zip(cases.items(), done.stderr.splitlines(), strict=True):
        assert said.startswith(f"error: {told}"), (line, said)
    assert not {"torch", "numpy", *HEAVY} & {*done.stdout.split()}

def test_the_help_contains_whole_comments():
    "The help contains every word of the comments in the source, including continuation lines."
    from noc_nb.commands.cli import commands
    from noc_nb.commands.command import _comments
    for name, f in commands().items():
        source = inspect.getsource(f).partition('):\n    "')[0]
        tokens = tokenize.generate_tokens(io.StringIO(source + "): pass").readline)
        words = " ".join(t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT).split()
        assert " ".join(_comments(f).values()).split() == words, name
