"""Test the package as people install it: its wheel in a fresh environment, outside the repository.

In `make test`, torch, torchvision and the packages that only they need are linked from this environment, and pip
resolves the others without the `dev` extra and its limits. NOC_INSTALL=newest shares nothing and tests the extras
too. NOC_INSTALL=floors does the same with the oldest releases that settings.ini allows."""
import json, os, re, subprocess, sysconfig, tarfile, venv, zipfile
from importlib import metadata
from pathlib import Path
import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
import hub
from book import CHAPTERS, PACKAGE_FILES, ROOT, SETTINGS, cells, none_of, run, scratch, tracked
from readme import README, fences
from website import links

pytestmark = pytest.mark.slow
HOW = os.environ.get("NOC_INSTALL")
CORE = SETTINGS["requirements"].split()
EXTRAS = {key.removeprefix("extra_"): value.split() for key, value in SETTINGS.items() if key.startswith("extra_")}
COMMANDS = [entry.partition("=")[0] for entry in SETTINGS["console_scripts"].split()]
TORCH = {"torch", "torchvision"}
SMALL = "train_selector.epochs=1", "xe.epochs=1", "captioner.d_model=32", "captioner.d_ff=64"
ENV = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "NOC_DATA")}

def norm(requirement): return canonicalize_name(Requirement(requirement).name)

def brought(names, stop=()):
    "Return some packages and all packages that they need here; do not follow those in `stop`."
    found, left = set(), [Requirement(name) for name in names]
    while left:
        need = left.pop()
        entry = canonicalize_name(need.name), *sorted(need.extras)
        if entry in found or entry[0] in stop: continue
        found.add(entry)
        for more in map(Requirement, metadata.requires(need.name) or ()):
            marker = more.marker
            if not marker or any(marker.evaluate(dict(extra=extra)) for extra in ("", *need.extras)): left.append(more)
    return {entry[0] for entry in found}

def share(site, tops=TORCH):
    "Link torch and the packages that only torch needs into an environment. Return pip's constraints for them."
    names = brought(tops) - brought(CORE, stop=TORCH)
    for dist in map(metadata.distribution, names):
        for top in {file.parts[0] for file in dist.files} - {"..", "__pycache__"}:
            if not (site/top).exists(): (site/top).symlink_to(dist.locate_file(top))
    return [f"{name}=={metadata.version(name)}" for name in names]

def floors(requirements): return [re.sub(r"\[.*\]", "", r).replace(">=", "==") for r in requirements]

def pip(python, *words):
    "Run this environment's pip on another one."
    return run("python", "-m", "pip", "--python", python, *words, cwd=python.parent, env=ENV)

def used(python, command, *words, cwd):
    "Run a command of an environment, and return its output."
    return run(python.with_name(command), *words, cwd=cwd, env=ENV)

@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    "Return the source archive and the wheel in NOC_DIST, or build both."
    dist = os.environ.get("NOC_DIST")
    if not dist:
        repo = scratch(tmp_path_factory.mktemp("build"))
        run("python", "-m", "build", "--no-isolation", cwd=repo)
        dist = repo/"dist"
    return [next(Path(dist).resolve().glob(f"noc_nb-*{suffix}")) for suffix in (".tar.gz", ".whl")]

def fresh(env, tops, oldest):
    "Create an environment. Return its Python, and a file of constraints for pip; skip without a package index."
    venv.create(env, with_pip=False)
    python, limits = env/"bin/python", env/"limits.txt"
    try: pip(python, "install", "--dry-run", "--no-deps", "--retries", "0", "fastcore")
    except AssertionError: pytest.skip("no package index can be reached, so nobody can install the package from here")
    if HOW == "floors": lines = floors(oldest)
    else: lines = [] if HOW else share(Path(sysconfig.get_path("purelib", "posix_prefix", dict(base=str(env)))), tops)
    limits.write_text("\n".join(lines))
    return python, limits

@pytest.fixture(scope="module")
def python(archives, tmp_path_factory):
    "Return the Python of a fresh environment with the wheel and the packages that pip installs for it."
    python, limits = fresh(tmp_path_factory.mktemp("installed")/"env", TORCH, CORE)
    pip(python, "install", archives[1], "-c", limits)
    return python

def test_pip_installs_the_versions_that_people_get(python):
    pip(python, "check")
    versions = {norm(d["name"]): d["version"] for d in json.loads(pip(python, "list", "--format", "json"))}
    print(*(f"{norm(r)} {versions[norm(r)]}" for r in CORE), sep=", ")
    if HOW != "floors": assert Version(versions["fastcore"]) >= Version("2"), "the caps of `dev` hold here"
    else: none_of((r for r in floors(CORE) if versions[norm(r)] not in Requirement(r).specifier), "not at its floor")

# ---- the wheel

IMPORT_ALL = """
import importlib, importlib.metadata, pathlib, pkgutil, noc_nb
for m in pkgutil.walk_packages(noc_nb.__path__, "noc_nb."): importlib.import_module(m.name)
for e in importlib.metadata.distribution("noc_nb").entry_points: e.load()
home = pathlib.Path(noc_nb.__file__).parent
print(home, noc_nb.__version__)
"""

def test_every_module_imports_from_the_wheel(python, tmp_path):
    "Every module can be imported from the wheel without an extra."
    where, version = used(python, "python", "-c", IMPORT_ALL, cwd=tmp_path).splitlines()[-1].split()
    assert where.startswith(str(python.parents[1])), f"imported from {where} and not from the wheel"
    assert version == SETTINGS["version"], "noc_nb.__version__ is not the version of settings.ini: run `make export`"

def test_the_metadata_agree_with_the_settings(archives):
    "The metadata of the wheel are valid and agree with settings.ini."
    with zipfile.ZipFile(archives[1]) as z:
        files = {file.rpartition("/")[2]: z.read(file) for file in z.namelist() if "-info/" in file}
    meta = Metadata.from_email(files["METADATA"])             # raises an error if a package index would refuse it
    assert "LICENSE" in files and (SETTINGS["license"], meta.license_expression) == ("apache2", "Apache-2.0")
    told = meta.name, str(meta.version), meta.summary, meta.author, str(meta.requires_python)
    name, version, summary, author, oldest = map(SETTINGS.get, "lib_name version description author min_python".split())
    assert told == (name, version, summary, author, f">={oldest}")
    stated = [*CORE, *SETTINGS["dev_requirements"].split(), *sum(EXTRAS.values(), [])]
    assert {canonicalize_name(r.name) for r in meta.requires_dist} == set(map(norm, stated))
    scripts = files["entry_points.txt"].decode().replace(" = ", "=").split()
    none_of(set(SETTINGS["console_scripts"].split()) - set(scripts), "commands of settings.ini that the wheel lacks")
    none_of((link for link in links(meta.description) if not re.match("#|[a-z]+:", link)),
            "links of the description that lead nowhere on a package index")

def test_the_archives_contain_the_files_of_git(archives):
    "The archives have all files of the package that git has, and no others."
    listed = tracked()
    if not listed: pytest.skip("no git checkout")
    package = {file for file in listed if file.startswith("noc_nb/")}
    def of_git(files): return {file for file in files if not file.endswith((".pyi", "/py.typed"))}   # no stubs
    with tarfile.open(archives[0]) as t: source = of_git(m.name.partition("/")[2] for m in t.getmembers() if m.isfile())
    with zipfile.ZipFile(archives[1]) as z: built = of_git(file for file in z.namelist() if "-info/" not in file)
    none_of(sorted(package ^ built), "these are in the wheel or in git, and not in both; see MANIFEST.in")
    beside = {file for file in source - package if not re.match("PKG-INFO|setup.cfg|noc_nb.egg-info/", file)}
    assert package <= source and beside <= listed & set(PACKAGE_FILES), f"the source archive holds {sorted(beside)}"

def test_a_wheel_names_its_version_and_no_commit(python, tmp_path):
    "A wheel has no commit, even if it is installed inside another repository."
    for words in "init -q", "-c user.name=a -c user.email=a commit -qm theirs --allow-empty":
        subprocess.run(["git", *words.split()], cwd=python.parents[1], check=True)
    code = "from noc_nb.lab.progress import code_version; print(code_version())"
    assert used(python, "python", "-c", code, cwd=tmp_path).strip() == f"version {SETTINGS['version']}"

# ---- the package of words

WORDS_ALONE = """
import importlib, pkgutil, sys
sys.modules["transformers"] = sys.modules["noc_nb"] = None             # what imports them fails
import noc_words
for m in pkgutil.iter_modules(noc_words.__path__, "noc_words."): importlib.import_module(m.name)
from noc_words import grid_beam, with_words
assert with_words(must=["cat"]) == dict(custom_generate=grid_beam, words=["cat"])
print(noc_words.__file__)
"""

def test_words_install_with_torch_alone(tmp_path):
    "`pip install _hub`, or its wheel in NOC_DIST, brings torch and what torch needs, types, and no noc_nb."
    torch = [r for r in CORE if norm(r) == "torch"]
    python, limits = fresh(tmp_path/"env", {"torch"}, torch)
    dist = os.environ.get("NOC_DIST")
    source = next(Path(dist).resolve().glob("noc_words-*.whl")) if dist else hub.write(tmp_path/"_hub")
    pip(python, "install", source, "-c", limits)
    pip(python, "check")
    there = {norm(d["name"]) for d in json.loads(pip(python, "list", "--format", "json"))}
    if not HOW: assert there <= {"noc-words"} | brought(torch)
    where = Path(used(python, "python", "-c", WORDS_ALONE, cwd=tmp_path).splitlines()[-1])
    assert where.is_relative_to(tmp_path/"env") and (where.parent/"py.typed").exists()
    info = next(where.parent.parent.glob("noc_words-*.dist-info"))
    meta = Metadata.from_email((info/"METADATA").read_bytes())
    assert str(meta.version) == SETTINGS["version"] and "# Words that a text must mention" in meta.description
    assert [norm(str(r)) for r in meta.requires_dist if not r.marker] == ["torch"]
    assert {*meta.provides_extra} == {"transformers", "forms"}

# ---- uses of the package

@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_its_help(python, tmp_path, command):
    assert f"usage: {command} " in used(python, command, "--help", cwd=tmp_path)

def test_the_readmes_python_examples_run(python, tmp_path):
    "The README's Python examples run unchanged, and print the outputs that the README shows."
    text = README.read_text(encoding="utf-8")
    printed = used(python, "python", "-c", "\n".join(fences(text, "python")), cwd=tmp_path)
    assert printed == "".join(fences(text, "text")), "the README shows other outputs: `make notebooks NB=index`"

@pytest.fixture(scope="module")
def typed(python, tmp_path_factory):
    "Return a function that runs a command in a folder with a small toy world, and returns the text of files."
    folder = tmp_path_factory.mktemp("used")
    code = "from noc_nb.files.drawing import make_toy; make_toy('toy', train=60, val=8, test=8)"
    used(python, "python", "-c", code, cwd=folder)
    def typed(line, *files):
        command, *words = line.split()
        used(python, command, *words, cwd=folder)
        return [(folder/file).read_text(encoding="utf-8") for file in files]
    return typed

def test_captions_are_made_and_scored_by_the_commands(typed):
    "Boxes in COCO's format become captions, a page, and a report."
    line = "noc_caption toy/detections/simulated.json --images toy/images --model toy --out c.jsonl --html c.html"
    captions, html = typed(line, "c.jsonl", "c.html")
    made = [json.loads(line) for line in captions.splitlines()]
    assert len(made) == html.count("data:image/webp") == 8
    assert all(c["word"] in line["caption"] for line in made for c in line["candidates"] if c["word"])
    line = "noc_eval --captions c.jsonl --data toy --split toy --part val --metrics C,R --samples 50 --out report"
    report, _ = typed(line, "report/report.json", "report/report.md")
    assert json.loads(report)

def test_noc_reproduce_makes_tables(typed):
    line = "noc_reproduce --data toy --out run --tables 1 --rows none,selector --training xe --metrics C --set"
    table, rows = typed(f"{line} {' '.join(SMALL)}", "run/table1.md", "run/rows.jsonl")
    assert "Region selector · cross-entropy" in table and len(rows.splitlines()) == 3

# ---- the extras, if no package is shared

USES = dict(app=["133_app"], book=[], formats=["103_store", "111_classes"], ray=["141_distributed"],
            tensorboard=["48_train"], transformers=["114_detectors", "116_generate", "117_captioners"])

@pytest.fixture(scope="module")
def extended(python, archives):
    "Install all extras, and return the environment's Python."
    if not HOW: pytest.skip("extras are tried where NOC_INSTALL is set")
    limits = python.with_name("extras.txt")
    limits.write_text("\n".join(floors(sum(EXTRAS.values(), [])) if HOW == "floors" else []))
    pip(python, "install", f"{archives[1]}[{','.join(EXTRAS)}]", "-c", limits)
    pip(python, "check")
    return python

@pytest.mark.parametrize("chapter", [chapter for extra in EXTRAS for chapter in USES[extra]])
def test_chapters_of_the_extras_run(extended, tmp_path, chapter):
    notebook, = [nb for nb in CHAPTERS if nb.stem == chapter]
    code = [c.source for c in cells(notebook, "code") if not {"slow", "gpu", "eval:"} & c.directives.keys()]
    (tmp_path/"chapter.py").write_text("\n\n".join(code), encoding="utf-8")
    used(extended, "python", "-m", "IPython", tmp_path/"chapter.py", cwd=notebook.parent)
