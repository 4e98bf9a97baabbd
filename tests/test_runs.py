"Test the files that a run may change, and the inputs, functions and models that it depends on."
import errno, importlib.util, itertools, json, linecache, os, re, sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from noc_nb.constraints import RULES
from noc_nb.core import NocError
from noc_nb.fast.cider import cider_reward
from noc_nb.files.dataset import load_data
from noc_nb.files.drawing import make_toy
from noc_nb.files.store import read_tsv
from noc_nb.files.vectors import read_vectors
from noc_nb.lab.disk import _temporary_path, _in_use, state_of, whole_file, whole_folder, write_json
from noc_nb.lab.experiment import Experiment, _config
from noc_nb.lab.models import PRESETS, Run
from noc_nb.lab.runs import begin, called, locked
from noc_nb.models.detector import _load_model
from noc_nb.models.photos import image_files
from noc_nb.models.pipeline import CaptionOptions, NovelCaptioner
from noc_nb.models.source import Job
from noc_nb.pages.gallery import CaptionRun
from noc_nb.regions import Regions
from noc_nb.scst import SelfCritical
from noc_nb.selector import RegionSelector
from test_hostile import evaluated

def texts(folder):
    "Return name -> text of all files in a folder."
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}

def test_an_output_has_one_lock_whatever_path_leads_to_it(tmp_path, monkeypatch):
    "An output has one lock and one place, even if links or other paths lead to it."
    monkeypatch.chdir(tmp_path)
    for name in "deep/run", "other": Path(name).mkdir(parents=True)
    for link, to in {"link": "deep/run", "above": "deep", "other/again": "../link"}.items(): os.symlink(to, link)
    names = "deep/run", "link", "above/run", "other/again", "link/../run", "other/../deep//run/", tmp_path/"link"
    for one in names:
        with locked(one):
            for other in names:
                with pytest.raises(NocError, match="another run is writing it"): locked(other).__enter__()
        with whole_folder(one) as new: (new/"a.txt").write_text(str(one))
        assert texts(Path("deep/run")) == {"a.txt": str(one)}
    assert Path("link").is_symlink() and sorted(os.listdir()) == ["above", "deep", "link", "other"]

def test_a_run_removes_only_what_killed_runs_left(tmp_path):
    "Files of other tools and of another run in a subfolder remain; a run that ends with an error removes nothing."
    run = tmp_path/"run"
    (run/"part").mkdir(parents=True)
    others = [run/".a.7.tmp", run/"part/.b.host.7.tmp", tmp_path/".run.old", tmp_path/".run.lock", run/"noc_nb.tmp"]
    left = [_temporary_path(run), _temporary_path(run, "old"),
            *(_temporary_path(run/name) for name in ("part/a", "x.safetensors", "part"))]
    for path in others + left[1:]: path.write_text("mine")
    left[0].mkdir()
    def there(): return {path for path in others + left if path.exists()}
    with pytest.raises(NocError), locked(run): begin(run/"part/.a.7.tmp", run, dict(k=5), made=True)
    assert there() == {*others, *left}
    with whole_file(run/"part/a") as f, _in_use(left[3]):
        f.write("this run goes on ")
        with locked(run): begin(run/"run.json", run, dict(k=5))
        assert there() == {*others, left[3]}
        f.write("and ends")
    with locked(run): pass
    assert there() == {*others} and (run/"part/a").read_text() == "this run goes on and ends"

def killed_in(path, n):
    "Replace a folder in a process that is killed at its n-th rename. Return True if it reached this rename."
    if not (child := os.fork()):
        rename, calls = Path.rename, []
        def renamed(*args):
            calls.append(args)
            if len(calls) == n: os._exit(9)
            return rename(*args)
        Path.rename = renamed
        try:
            with locked(path), whole_folder(path, {}) as new: (new/"a.txt").write_text("new")
        finally: os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_run_killed_between_renames_loses_nothing(tmp_path, n):
    "A user changed the folder (`before` is empty), so both versions must be kept."
    run = tmp_path/"run"
    run.mkdir()
    (run/"a.txt").write_text("old")
    assert killed_in(run, n) == (n < 4)                          # there are three renames
    with locked(run): pass
    versions = [texts(path)["a.txt"] for path in tmp_path.iterdir()]
    assert sorted(versions) in (["old"], ["new", "old"])
    if versions == ["old"] and n != 3: assert (run/"a.txt").exists()

@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.ESTALE])
def test_a_rename_that_fails_leaves_the_old_folder(tmp_path, monkeypatch, n, error):
    run, rename, calls = tmp_path/"run", Path.rename, []
    def failing(*args):
        calls.append(args)
        if len(calls) == n: raise OSError(error, os.strerror(error))
        return rename(*args)
    with whole_folder(run) as new: (new/"a.txt").write_text("old")
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(NocError, match=re.escape(f"{run}: cannot be written ({os.strerror(error)})")):
        with whole_folder(run) as new: (new/"a.txt").write_text("new")
    assert texts(tmp_path) == {"run/a.txt": "old"}

def test_notes_in_a_report_that_is_replaced_are_kept(tmp_path):
    "If a user adds or edits a file of a report while it is replaced, both versions are kept and the error names them."
    write_json(tmp_path/"s.json", [dict(image_id=i, caption="a dog") for i in (0, 1)])
    out = tmp_path/"out"
    def score(**kw): evaluated(tmp_path, tmp_path/"s.json", out=out, **kw)
    score()
    (out/"report.json").unlink()                                 # a missing file is no change to keep
    score(show=lambda report: (out/"report.png").unlink())
    for name in "notes.txt", "report.md":
        def annotate(report): (out/name).write_text("mine")
        with pytest.raises(NocError, match=f"out: {name} was added or changed while .* both versions are kept") as told:
            score(show=annotate)
        kept = tmp_path/re.search(r"as (\S+)$", str(told.value))[1]
        assert (kept/name).read_text() == "mine" and "report.html" in state_of(kept)
        assert sorted(os.listdir(out)) == ["images.parquet", *(f"report.{x}" for x in ("html", "json", "md", "png"))]
        score()

# ---- fingerprints of functions

OBJECT = """class Bonus:
    scale, of = {}, 1
    def __init__(self): self.by = {}
    def helped(self): return {}
    def __call__(self, x): return x*self.by*self.scale + self.helped()
f = Bonus()"""
FUNCTIONS = dict(   # source code with gaps: another value in any gap must change the function's name
    source="def f(x): return x + {}",
    default="def f(x, by={}, *, more={}): return x*by + more",
    closure="def make(by, rest):\n    def f(x): return x*by + rest[1]\n    return f\nf = make({}, [0, {}])",
    partial="from functools import partial\ndef g(x, by, *, more): return x*by + more\nf = partial(g, 1, {}, more={})",
    module="BY, MORE = {}, {}\ndef f(x): return [(lambda y: y*BY)(z) for z in x] + [MORE]",
    helper="BY = {}\ndef g(x): return x*BY\ndef f(x): return g(x) + {}",
    cached="from functools import lru_cache\nBY = {}\n@lru_cache\ndef g(x): return x*BY\ndef f(x): return g(x)",
    wrapped="from functools import wraps\ndef by(n):\n    def more(g):\n        @wraps(g)\n"
            "        def f(x): return g(x)*n\n        return f\n    return more\n@by({})\ndef f(x): return x + {}",
    array="import numpy as np, torch\nBY, MORE = np.eye(99), torch.zeros(99, 99)\nBY[50, 50] = MORE[50, 50] = {}\n"
          "def f(x): return x @ BY @ MORE",
    held="from dataclasses import dataclass\nimport random, re\n@dataclass(frozen=True)\nclass Cfg: by:int = {}\n"
         "HELD = dict(cfg=Cfg({}), draw=random.Random({}), text=re.compile('a{}'), some={{1, {}}})\n"
         "def f(x): return HELD['cfg']",
    method=OBJECT + ".helped", static="class C:\n    @staticmethod\n    def g(x): return x*{}\n    @property\n"
           "    def p(self): return {}\ndef f(x): return C.g(x)*C().p",
    itself="BY = {}\ndef f(x): return f(x - 1)*BY if x else {}", object=OBJECT,
    network="import torch\nNET = torch.nn.Linear(2, 2)\nNET.weight.data.fill_({})\nNET.bias.data.fill_({})\n"
            "def f(x): return NET(x)")
FUNCTIONS = {kind: (text, {}) for kind, text in FUNCTIONS.items()}
FUNCTIONS["theirs"] = "import part as s\ndef f(x): return x*s.BY", {"part.py": "BY, OTHER = {}, 7"}

PART = {"part.py": "def make(x): return x*{}"}
PACKAGE = {"pkg/__init__.py": "", "pkg/sub.py": PART["part.py"]}
FILES = dict(       # forms in which a function reaches another module: a changed file must change the name, too
    submodule=("import pkg.sub\ndef f(x): return pkg.sub.make(x)", PACKAGE),
    inside=("def f(x):\n    import part\n    return part.make(x)", PART),
    no_package=("def f(x):\n    from far.away import part\n    return part.make(x)",
                {"far/away/part.py": PART["part.py"]}),
    module_default=("import part\ndef f(x, by=part): return by.make(x)", PART),
    module_in_dict=("import part\nPARTS = dict(a=[part])\ndef f(x): return PARTS['a'][0].make(x)", PART),
    module_in_class=("import part\nclass C: by = part\ndef f(x): return C.by.make(x)", PART),
    getattr=("import part\ndef f(x): return getattr(part, 'make')(x)", PART),
    metaclass=("from part import C\ndef f(x): return C.by(x)",
               {"part.py": "class M(type):\n    def by(cls, x): return x*{}\nclass C(metaclass=M): pass"}),
    star=("from part import *\ndef f(x): return globals()['make'](x)", PART),
    literal=("from importlib import import_module\ndef f(x): return import_module('pkg.sub').make(x)", PACKAGE),
    in_turn=("import first\ndef f(x): return first.part.make(x)",
             PART | {"first.py": "try: from . import none\nexcept ImportError: import part\n"
                                 "def g(): from pycocoevalcap.rouge import rouge"}),
    relative=("from pkg import top\ndef f(x): return top.make(x)",
              PACKAGE | {"pkg/top.py": "def make(x):\n    from .sub import make\n    return make(x)"}),
    parent=("import pkg.top\ndef f(x): return pkg.top.of(x)",
            {"pkg/__init__.py": "BY = {}", "pkg/top.py": "import sys\ndef of(x): return x*sys.modules['pkg'].BY"}),
    lazy=("import pkg\ndef f(x): return pkg.make(x)",
          PACKAGE | {"pkg/__init__.py": "def __getattr__(name):\n    from .sub import make\n    return make"}))
UNSEEN = dict(      # and forms that a run does not see, as the chapter says
    data=("def f(x): return x*int(open('by.txt').read())", {"by.txt": "{}"}),
    computed=("from importlib import import_module\ndef f(x): return import_module('pa' + 'rt').make(x)", PART))

def loaded(folder, text, name="theirs"):
    "Return the function `f` of a module with this text."
    file = folder/f"{name}.py"
    file.write_text(text)
    Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)     # may be as old
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    linecache.checkcache()
    spec.loader.exec_module(module)
    return module.f

@pytest.fixture
def name_of(tmp_path, monkeypatch):
    "Name the function `f` of a module beside other files, with values in the gaps, each time in another folder."
    n = itertools.count()
    def name(text, files, *values):
        folder = tmp_path/f"{next(n)}"                           # the folder does not change the name
        values = iter(values)
        def filled(text): return text.format(*itertools.islice(values, text.count("{}")))
        for file, content in files.items():
            (folder/file).parent.mkdir(parents=True, exist_ok=True)
            (folder/file).write_text(filled(content) if "{}" in content else content)
        folder.mkdir(exist_ok=True)
        for old in "part", "first", "pkg", "pkg.sub", "pkg.top", "far", "far.away": sys.modules.pop(old, None)
        with monkeypatch.context() as path:
            path.syspath_prepend(folder)
            return called(loaded(folder, filled(text)))
    return name

@pytest.mark.parametrize("kind", [*FUNCTIONS, *FILES, *UNSEEN])
def test_the_name_of_a_function_covers_all_that_it_computes_with(name_of, kind):
    "Values change the first fingerprint, which a function from a notebook has alone; files change the second."
    text, files = {**FUNCTIONS, **FILES, **UNSEEN}[kind]
    gaps = sum(part.count("{}") for part in (text, *files.values()))
    def name(*values):
        whole = name_of(text, files, *values)
        return whole.rpartition(" ")[0] if kind in FUNCTIONS else whole
    usual = name(*[3]*gaps)
    assert name(*[3]*gaps) == usual
    for gap in range(gaps):
        assert (name(*[5 if k == gap else 3 for k in range(gaps)]) == usual) == (kind in UNSEEN), gap

def test_the_name_of_a_function_covers_only_the_version_of_this_package(name_of, monkeypatch):
    "Functions of this package are named without it; a user's function has it if it reaches the package."
    own, text = [called(cider_reward), called(partial(cider_reward, 3))], "import {}, torch\ndef f(x): return x"
    def names(): return [name_of(text, {}, module) for module in ("json", "noc_nb.core")]
    (plain, ours), _ = names(), monkeypatch.setattr("noc_nb.__version__", "9.9")
    assert own == ["cider_reward", "cider_reward with 3"] == [called(cider_reward), called(partial(cider_reward, 3))]
    assert names()[0] == plain and names()[1] != ours

@pytest.mark.parametrize("held", ["open('/dev/null')", "__import__('threading').Lock()", "(n for n in range(3))",
                                  "__import__('socket').socket()"])
def test_a_function_that_nobody_can_compare_is_refused(tmp_path, held):
    for text in f"HELD = {held}\ndef f(x): return HELD", f"class C:\n    def __init__(s): s.x = [{held}]\n" \
            "    def __call__(s, x): pass\nf = C()":
        with pytest.raises(NocError, match=r"^(f|C): computes with a \w+, which has no fingerprint; expected"):
            called(loaded(tmp_path, text))

BRIEF = """from noc_nb.models.detector import _load_model
from noc_nb.models.photos import image_files
from noc_nb.models.pipeline import CaptionOptions, NovelCaptioner
from noc_nb.models.source import Job
from noc_nb.pages.gallery import CaptionRun
from noc_nb.fast.cider import cider_reward
BONUS = {}
def f(*how):
    cider = cider_reward(*how)
    return lambda tokens, ids: cider(tokens, ids) - BONUS*(tokens > 0).sum(1)"""

def test_a_reward_is_a_part_of_the_run(tmp_path):
    "Another reward needs the name of a variant, and a changed reward is another run with another captioner."
    data = load_data(make_toy(tmp_path/"toy", train=8, val=4, test=4), split="toy")
    brief, longer = (loaded(tmp_path, BRIEF.format(bonus)) for bonus in (.05, 5.))
    def start(variant=None, **how):
        return Experiment(Run(PRESETS["toy"], variant=variant), data, tmp_path/"run", **how)
    for odd in dict(reward=brief), dict(reward=partial(cider_reward)):
        with pytest.raises(NocError, match="differs from the paper's method: expected a variant"): start(**odd)
    first = start("brief", reward=brief)
    assert start("brief", reward=brief, resume=True).models.names == first.models.names
    for other in cider_reward, longer:
        with pytest.raises(NocError, match="run: reward: .* in the record"): start("brief", reward=other, resume=True)
    with pytest.raises(NocError, match="reward: Tensor: expected a function"): SelfCritical(torch.zeros(3))
    marks = [Experiment.kind(first.run, data, tmp_path, reward=r).marks for r in (brief, longer, cider_reward)]
    assert marks[0]["reward"] != marks[1]["reward"] and marks[2] == {}

def test_a_rule_is_a_part_of_the_run(tmp_path, monkeypatch):
    data = load_data(make_toy(tmp_path/"toy", train=8, val=4, test=4), split="toy")
    def start(variant=None, out="run", **how):
        return Experiment(Run(PRESETS["toy"], variant=variant), data, tmp_path/out, **how)
    start(out="paper")
    for name in "first", "score":                                # a new rule, and a replaced rule of the package
        monkeypatch.setitem(RULES, name, loaded(tmp_path, "def f(seen): return seen.best.labels[:1].tolist()"))
        with pytest.raises(NocError, match="f .*: differs from the paper's method: expected a variant"): start(out=name)
        run = start("one rule", name)
        assert {len(chosen) for chosen in run.choices.candidates(name).values()} <= {0, 1}
        if name == "first": assert "f " in _config(run, "first")["rule"] and "rule" not in _config(run, "none")
        monkeypatch.setitem(RULES, name, loaded(tmp_path, "def f(seen): return []"))
        chosen = run.choices.made.popitem()[1]
        assert run.choices.candidates(name) == chosen                    # a run keeps its rules
        with pytest.raises(NocError, match=f"rules.{name}: .* in the record"): start("one rule", name, resume=True)
        monkeypatch.undo()
    f, g = (loaded(tmp_path, f"def f(seen): return seen.best.labels[:{n}].tolist()", f"rule{n}") for n in (1, 2))
    with pytest.raises(NocError, match="f .*: differs from the paper's method: expected a variant"): start(rules=[f])
    run = start("a rule by name", "named", rules=[f])
    assert {len(chosen) for chosen in run.choices.candidates("f").values()} <= {0, 1} and "f" not in RULES
    with pytest.raises(NocError, match="rules.f: .* in the record"):
        start("a rule by name", "named", rules=[g], resume=True)
    with pytest.raises(NocError, match="rule f: expected a function with another name"): start("x", "x", rules=[f, g])
    run = start(out="last")
    with pytest.raises(NocError, match="row 'first': expected one of none, top1"): run.choices.candidates("first")
    texts = dict(listed="seen.best.labels[:2].tolist()", tensor="seen.best.labels[:2]", scores="seen.probs",
                 empty="None")
    rules = {name: loaded(tmp_path, f"def {name}(seen): return {text}\nf = {name}", name)
             for name, text in texts.items()}
    choices = start("two rules", "two", rules=[rules["tensor"], rules["listed"]]).choices
    monkeypatch.setattr(choices.models, "selector", lambda *_: RegionSelector(choices.preset.selector).eval())
    assert choices.candidates("tensor") == choices.candidates("listed")
    for name in "scores", "empty":
        with pytest.raises(NocError, match=f"rule {name}: image [0-9]+: .*: expected a list or a tensor of class ids"):
            start("a rule", name, rules=[rules[name]])

COUNTING = """import torch
from noc_nb.attention import linear
from noc_nb.selector import RegionSelector
class f(RegionSelector):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.embed = linear(7, cfg.d_model)
    def forward(self, geometry, labels):
        more = (labels[:,:,None] == labels[:,None,:]).sum(-1, keepdim=True) - {}
        return super().forward(torch.cat([geometry, more], -1), labels)"""

def test_a_selector_is_a_part_of_the_run(tmp_path):
    "Another class of selectors needs a variant, and a changed class is another run with another selector."
    data = load_data(make_toy(tmp_path/"toy", train=8, val=4, test=4), split="toy")
    one, two = (loaded(tmp_path, COUNTING.format(n), f"net{n}") for n in (1, 2))
    def start(variant=None, **how):
        return Experiment(Run(PRESETS["toy"], variant=variant), data, tmp_path/"run", **how)
    with pytest.raises(NocError, match="f .*: differs from the paper's method: expected a variant"): start(selector=one)
    first = start("counts", selector=one)
    assert start("counts", selector=one, resume=True).models.names == first.models.names
    for other in two, RegionSelector:
        with pytest.raises(NocError, match="run: network: .* in the record"):
            start("counts", selector=other, resume=True)
    marks = [Experiment.kind(first.run, data, tmp_path, selector=s).marks for s in (one, two, RegionSelector)]
    wrong = {"self.embed = linear(7, cfg.d_model)": ("pass", "8x7 and 6x64.*; expected a forward from geometry"),
             "-1), labels)": ("-1), labels)[...,None]", r"returns \(2, 4, 1\): expected a forward from geometry")}
    for text, (other, message) in wrong.items():
        bad = loaded(tmp_path, COUNTING.format(1).replace(text, other), "bad")
        with pytest.raises(NocError, match=f"^f: .*{message}"): start("bad", selector=bad)
    assert marks[0]["network"] != marks[1]["network"] and marks[2] == {}

def test_a_folder_never_chooses_the_class_of_its_selector(tmp_path, monkeypatch):
    """A pipeline with a selector of seven inputs is read by the class that the caller passes, and the seventh input
    changes its choice. The name in the folder is never imported."""
    counting = loaded(tmp_path, COUNTING.format(1))
    toy = NovelCaptioner.from_pretrained("toy", device="cpu")
    selector = counting(toy.selector.cfg).eval()
    NovelCaptioner(selector, toy.captioner, toy.classes, toy.vectors, toy.cfg).save_pretrained(tmp_path/"mine")
    read = NovelCaptioner.from_pretrained(tmp_path/"mine", "cpu", counting)
    boxes, scores = [[.1, .1, .5, .5], [.2, .3, .8, .9], [.4, .1, .6, .2]], [.9, .8, .7]
    once, twice = (Regions(boxes, labels, scores, image_id=1) for labels in ([2, 3, 4], [2, 3, 2]))
    with torch.no_grad():
        before = [read(r).probs for r in (once, twice)]
        read.selector.embed.weight[:,6] += 1
        after = [read(r).probs for r in (once, twice)]
    assert [read.selector is selector, before[0] == after[0], before[1] == after[1]] == [False, True, False]
    (tmp_path/"trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in "f", "trap", "trap:f", "trap.f":
        (tmp_path/"mine/selector/class.json").write_text(json.dumps(name))
        with pytest.raises(NocError, match=f"holds a {name}: expected a RegionSelector; to read it, name its class"):
            NovelCaptioner.from_pretrained(tmp_path/"mine", "cpu")
    with pytest.raises(NocError, match="holds a RegionSelector: expected a f"):
        NovelCaptioner.from_pretrained("toy", "cpu", counting)

# ---- every file of a model

def altered(path):
    "Change a file: other bytes with the same meaning, or another weight."
    data = bytearray(path.read_bytes())
    if path.suffix == ".safetensors": data[-1] ^= 1
    else: data += b" \n"
    path.write_bytes(data)

@pytest.mark.parametrize("kind", ["BLIP", "LLaVA", "DETR", "RT-DETR", "OWLv2", "Grounding DINO"])
def test_every_file_of_a_model_is_a_part_of_the_run(tmp_path, kind):
    "If any file of a model was altered, a resumed run names it; only README.md may change."
    pytest.importorskip("transformers")
    from noc_nb.models.pretrained import quiet
    from tiny_models import TOLD, save_blip, save_chat, save_detector
    part = "captioner" if kind in ("BLIP", "LLaVA") else "detector"
    model, photos, about = tmp_path/"model", tmp_path/"photos", tmp_path/"run.json"
    with quiet():
        if part == "detector": save_detector(kind, model, ["zebra", "bus"])
        else: dict(BLIP=save_blip, LLaVA=save_chat)[kind](model)
    photos.mkdir()
    Image.new("RGB", (64, 48)).save(photos/"1.png")
    (tmp_path/"names.txt").write_text("zebra\nbus\n")
    wishes = dict(options=CaptionOptions(objects="zebra")) if part == "captioner" else {}
    names = dict(classes=tmp_path/"names.txt") if kind in TOLD else {}
    job = Job(photos, "toy", **{part: model}, **names, **wishes)
    pipeline = job.pipeline()
    source = job.source(pipeline)
    def start(resume=True): CaptionRun(pipeline, source, job.options).begin(about, "out.jsonl", resume)
    start(False)
    start()
    files = [path for path in model.rglob("*") if path.is_file()]
    assert len(files) >= 3
    (model/"README.md").write_text("a card")
    for path in files:
        whole = path.read_bytes()
        altered(path)
        name = path.relative_to(model)
        with pytest.raises(NocError, match=f"out.jsonl: {part}/{name}: other content"): start()
        path.write_bytes(whole)
        start()

def test_a_model_of_the_hub_is_read_at_one_commit(tmp_path, monkeypatch):
    "All files of a hub's model are read at the commit of its settings, which is part of the run."
    pytest.importorskip("transformers")
    import transformers
    from noc_nb.models import pretrained
    asked = []
    class Auto:
        @staticmethod
        def from_pretrained(name, revision, **how):
            asked.append(revision)
            return SimpleNamespace(_commit_hash="c0ffee")
    monkeypatch.setattr(pretrained, "_is_local", lambda *_: False)
    monkeypatch.setattr(transformers, "AutoConfig", Auto)
    monkeypatch.setattr(transformers, "AutoProcessor", Auto)
    read = pretrained.Pretrained("someone/some-captioner", "a captioner")
    read.load("AutoProcessor")
    assert (read.commit, read.files, asked) == ("c0ffee", {}, ["main", "c0ffee"])

@pytest.mark.parametrize("kind", [torch.int64, torch.int8, torch.bool, torch.complex64])
def test_weights_that_are_not_floating_point_numbers_are_refused(tmp_path, kind):
    "Weights that are not floating-point numbers are refused for models, detectors and pipelines; 64 bits are accepted."
    pytest.importorskip("transformers")
    from noc_nb.models.pretrained import Pretrained, quiet
    from tiny_models import save_blip
    with quiet(): save_blip(tmp_path/"blip")
    small = "fasterrcnn_mobilenet_v3_large_320_fpn"
    torch.save(_load_model(small, None, weights_backbone=None).state_dict(), tmp_path/"d.pth")
    NovelCaptioner.from_pretrained("toy", device="cpu").save_pretrained(tmp_path/"toy")
    def blip(): Pretrained(tmp_path/"blip", "a captioner").model("AutoModelForImageTextToText")
    def detector(): _load_model(small, str(tmp_path/"d.pth"), weights_backbone=None)
    def toy(): NovelCaptioner.from_pretrained(tmp_path/"toy", device="cpu")
    for name, read in {"blip/model.safetensors": blip, "d.pth": detector, "toy/class_vectors.safetensors": toy,
                       "toy/captioner/model.safetensors": toy}.items():
        file = tmp_path/name
        pth = file.suffix == ".pth"
        weights = torch.load(file) if pth else load_file(file)
        def write(name, dtype):
            changed = weights | {name: weights[name].to(dtype)}
            torch.save(changed, file) if pth else save_file(changed, file, dict(format="pt"))
        name = next(n for n, w in weights.items() if w.is_floating_point())
        write(name, torch.float64)
        read()
        write(name, kind)
        with pytest.raises(NocError, match=re.escape(f"{file}: {name}: numbers of kind ")): read()
        write(name, weights[name].dtype)

# ---- faults of a disk

def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    "A folder that cannot be listed raises an error; `os.walk` would silently skip it."
    (tmp_path/"photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path/"photos/1.png")
    def stale(path): raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
    monkeypatch.setattr(os, "scandir", stale)
    with pytest.raises(NocError, match="photos: cannot be read .Stale file handle.; expected a folder"):
        image_files(tmp_path/"photos")

@pytest.mark.parametrize("name, read", [("v.txt", read_vectors), ("f.tsv", lambda path: list(read_tsv(path)))])
def test_a_line_of_two_gigabytes_is_not_read(tmp_path, name, read):
    "A file of two gigabytes of zeros is refused at once; reading it as one line would need 4.5 GB."
    with open(tmp_path/name, "wb") as f: f.truncate(2 << 30)
    with pytest.raises(NocError, match=f"{name}: .*it holds a zero byte"): read(tmp_path/name)
