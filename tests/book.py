"Read the notebooks and the other files of the project, for the repository checks."
import ast, json, re, shutil, subprocess, sysconfig
from configparser import ConfigParser
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"": "The paper", "fast": "Fast", "words": "Words", "lab": "The lab", "files": "Toolbox: files",
          "models": "Toolbox: models", "scores": "Toolbox: scores", "pages": "Toolbox: pages",
          "commands": "Toolbox: commands"}                                   # in reading order

def number(path):
    "Return the number of a notebook."
    return int(Path(path).name.partition("_")[0])

def _folders():
    "List the folders of notebooks in reading order, unknown folders before the experiments."
    there = {p.parent.relative_to(ROOT/"nbs").as_posix().removeprefix(".") for p in (ROOT/"nbs").rglob("[0-9]*_*.ipynb")
             if ".ipynb_checkpoints" not in p.parts}
    return [*(f for f in FLOORS if f in there), *sorted(there - {*FLOORS, "experiments"}), "experiments"]

def part(folder):
    "Return the title of a folder of notebooks."
    return FLOORS.get(folder, folder.capitalize())

FOLDERS = {folder: sorted((ROOT/"nbs"/folder).glob("[0-9]*_*.ipynb"), key=number) for folder in _folders()}
BOOK, EXPERIMENTS = FOLDERS[""], FOLDERS["experiments"]
CHAPTERS = [nb for folder, notebooks in FOLDERS.items() if folder != "experiments" for nb in notebooks]
INDEX = ROOT/"nbs/index.ipynb"
NOTEBOOKS = [*CHAPTERS, *EXPERIMENTS, INDEX]
MODULES = sorted(p for p in (ROOT/"noc_nb").glob("**/*.py")
                 if not p.name.startswith("_") or p.stem == "__main__" or p == ROOT/"noc_nb/__init__.py")
PACKAGE_FILES = """settings.ini setup.py pyproject.toml MANIFEST.in LICENSE NOTICE README.md CHANGELOG.md CITATION.cff
    noc_nb nbs""".split()

_ini = ConfigParser(delimiters=["="])
_ini.read(ROOT/"settings.ini", encoding="utf-8")
SETTINGS = _ini["DEFAULT"]

@dataclass
class Cell:
    notebook: Path
    id: str
    kind: str      # "markdown" or "code"
    source: str
    outputs: list
    raw: dict      # the cell as it stands in the file
    directives: dict = field(init=False)  # {"export": "", "eval:": "false"}

    def __post_init__(self):
        found = re.findall(r"^#\|\s*(\S+)[ \t]*(.*)$", self.source, re.M) if self.kind == "code" else []
        self.directives = {key: value.strip() for key, value in found}

    @property
    def exported(self): return bool({"export", "exports", "exporti"} & self.directives.keys())

    @property
    def where(self):
        lines = [line for line in self.source.splitlines() if line.strip() and not line.startswith("#|")]
        return f"{name(self.notebook)}, cell {self.id} ({lines[0][:50] if lines else 'empty'})"

    @property
    def tree(self): return ast.parse(re.sub(r"^\s*[%!].*$", "", self.source, flags=re.M))

    def texts(self):
        "Return the outputs as text, without pictures."
        for o in self.outputs:
            if "text" in o: yield "".join(o["text"])
            for mime, data in o.get("data", {}).items():
                if mime.startswith("image/"): continue
                yield "".join(data) if isinstance(data, (str, list)) else json.dumps(data)

def name(path): return Path(path).relative_to(ROOT).as_posix()

def read(path):
    "Read the JSON of a notebook."
    return json.loads(Path(path).read_text(encoding="utf-8"))

def cells(path, kind=None):
    "Return the cells of a notebook, or those of one kind."
    found = [Cell(Path(path), c.get("id"), c["cell_type"], "".join(c["source"]), c.get("outputs", []), c)
             for c in read(path)["cells"]]
    return [c for c in found if kind in (None, c.kind)]

def folder(path): return path.parent.relative_to(ROOT/"nbs").as_posix().removeprefix(".")

def module_of(path):
    "Return the module that a chapter exports: data, lab.saving, scores.report, or one of the package itself."
    own = {"142_main": "__main__", "143_names": "__init__"}
    return own.get(path.stem) or ".".join(filter(None, [folder(path), path.stem.partition("_")[2]]))

def scratch(folder, names=PACKAGE_FILES):
    "Copy the project's files to a folder for experiments."
    for item in names:
        if (ROOT/item).is_dir():
            shutil.copytree(ROOT/item, folder/item, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        elif (ROOT/item).exists(): shutil.copy(ROOT/item, folder/item)
    return folder

def tracked():
    "Return the files that git lists or would list; none outside a checkout."
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    return {file for file in listed if file and (ROOT/file).exists()}

def run(*command, cwd, **kw):
    "Run a command of the environment; fail with its output if it fails."
    command = [str(Path(sysconfig.get_path("scripts"))/command[0]), *map(str, command[1:])]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, **kw)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout

def none_of(problems, advice):
    "Fail with a list of problems and their remedy, if there are any."
    problems = list(problems)
    assert not problems, f"{advice}:\n  " + "\n  ".join(problems)

if __name__ == "__main__": print(*map(name, NOTEBOOKS))   # in reading order
