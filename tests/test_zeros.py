"""Test that 0 and empty collections, where they are legal, are values like others, and not a wish for the default."""
import ast
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import pytest, torch
import noc_nb
from noc_nb.constraints import RULES
from noc_nb.core import NocError
from noc_nb.data import ImageExamples
from noc_nb.fast.decode import decode
from noc_nb.fast.pool import Pool
from noc_nb.fast.search import grid_beam_search
from noc_nb.fit import FitConfig
from noc_nb.heldout import HeldOut
from noc_nb.lab.disk import unpacked, unpacking
from noc_nb.models.pipeline import CaptionOptions, NovelCaptioner, PipelineConfig
from noc_nb.regions import Regions
from noc_nb.selector import SelectorConfig
from noc_nb.train_selector import train_selector
from test_pins import (BUS, CAT, CATS, CLASSES, DOG, PRICED, TINY, ZEBRA, ZEBRAS, ByScore, build_captioner, choices,
                       small_world, world)

pytestmark = pytest.mark.usefixtures("one_thread")

@pytest.fixture(scope="module")
def data(): return small_world()

class Nothing:
    "An empty collection that is called, or read, like a full one."
    def __len__(self): return 0
    def __call__(self, ids): return torch.ones(len(ids), 1, 8), torch.ones(len(ids), 1, dtype=torch.bool)

# `x or y` takes y for every false x. These use it on purpose: the comment of `peak` says what 0 means, a download of 0
# bytes has no known size, no caption has 0 tokens, and a width of 0 is that of a box, four.
MEANT = {"cfg.peak", "f.bytes", "form.width", "max_len"}

def annotated(node):
    "Return (name, annotation) of the parameters of a function, or of the fields of a class."
    if isinstance(node, ast.ClassDef):
        return [(x.target.id, x.annotation) for x in node.body if isinstance(x, ast.AnnAssign)]
    return [(a.arg, a.annotation) for a in (*node.args.args, *node.args.kwonlyargs) if a.annotation]

def numbers(pairs):
    "Return the names that always stand for a number."
    kinds = {}
    for name, kind in pairs: kinds.setdefault(name, set()).add(ast.unparse(kind))
    return {name for name, found in kinds.items() if found <= {"int", "float"}}

def test_no_number_is_replaced_because_it_is_0():
    "No function of the package uses `x or y` for a parameter or field that is a number, unless y is false, too."
    files = [p for p in Path(noc_nb.__file__).parent.rglob("*.py") if p.name != "_modidx.py"]
    nodes = [n for p in files for n in ast.walk(ast.parse(p.read_text(encoding="utf-8")))]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
    fields = numbers(sum([annotated(n) for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))], []))
    found = set()
    for f in functions:
        own = numbers(annotated(f))
        for node in (n for n in ast.walk(f) if isinstance(n, ast.BoolOp) and isinstance(n.op, ast.Or)):
            for x, y in zip(node.values, node.values[1:]):
                number = getattr(x, "id", None) in own or getattr(x, "attr", None) in fields
                if number and not (isinstance(y, ast.Constant) and not y.value): found.add(ast.unparse(x))
    assert found == MEANT

def test_a_lowest_probability_of_0_keeps_every_class(data, monkeypatch):
    "With `min_prob=0` the tables and the pipeline consider every class, and differ from the default."
    own = world({0: (CATS, []), 1: (ZEBRAS, [(CAT, .6), (ZEBRA, .2), (BUS, .05), (DOG, .4)])}, train=[0], test=[1])
    monkeypatch.setitem(RULES, "mine", lambda image: [c for c, s in image.scores.items() if s >= image.threshold])
    zero, prices = replace(PRICED, min_prob=0.), replace(PRICED, unseen=60.)
    for row in "selector", "score":
        assert BUS not in choices(own, prices=prices).candidates(row)[1]
        assert BUS in choices(own, prices=replace(prices, min_prob=0.)).candidates(row)[1]
    assert choices(own, prices=zero)._rule("mine")["threshold"] == 0.
    vectors = {c: data.word_vectors[o.word] for c, o in CLASSES.items()}
    def named(prices, **options):
        cfg = PipelineConfig(prices=prices)
        pipeline = NovelCaptioner(ByScore(), build_captioner(own, TINY, 1), CLASSES, vectors, cfg)
        return [c.object for c in pipeline(own.regions[1], **options).candidates]
    every = named(replace(prices, min_prob=0.))
    assert "bus" in every and "bus" not in named(prices) and named(prices, min_prob=0.) == every

def test_the_selector_and_the_detector_have_a_minimum_each(data):
    "`min_prob` is compared with the selector's probability, and `min_detection` with the detector's score."
    class Half(ByScore):
        def forward(self, geometry, labels): return (geometry[...,5]/2).logit().masked_fill(labels < 0, -torch.inf)
    vectors = {c: data.word_vectors[o.word] for c, o in CLASSES.items()}
    pipeline = NovelCaptioner(Half(), build_captioner(data, TINY, 1), CLASSES, vectors)
    regions = Regions([[.1, .1, .5, .5]]*2, [DOG, CAT], [.9, .6], image_id=1)         # probabilities .45 and .3
    def found(objects=None, **low): return {c.object for c in pipeline(regions, objects, **low).candidates}
    assert found(min_prob=.2) == {"dog", "cat"} and found(min_prob=.4) == {"dog"} and found(min_prob=.5) == set()
    assert found(min_prob=.2, min_detection=.8) == {"dog"} and found(min_prob=.2, min_detection=.95) == set()
    assert found(min_detection=.5) == found() == set()                                # the usual probability is .5
    assert found(["cat", "bus"], min_prob=.9) == {"cat", "bus"}                       # not chosen by the selector
    assert found(["cat", "bus"], min_detection=0.) == {"cat"}                         # detected with any score
    assert found(["cat", "bus"], min_detection=.7) == set()

def test_no_tokens_are_refused_and_no_prices_change_nothing(data):
    captioner = build_captioner(data, TINY, 1).eval()
    batch = ImageExamples(data, [0, 1]).__getitems__([0, 1])
    pool = Pool(captioner)
    with pytest.raises(NocError, match="step 1: room for 0 words"):
        pool.step(torch.ones(2, dtype=torch.long), pool.start(batch.features, batch.mask, 0))
    assert decode(captioner, [batch], prices={}) == decode(captioner, [batch])
    with pytest.raises(NocError, match="eos=0: expected an id below 0"):
        grid_beam_search(lambda tokens, state: (torch.zeros(len(tokens), 0), state), None, [[]], bos=1, eos=0)

def test_empty_collections_are_kept(data):
    nothing, seen = Nothing(), []
    assert ImageExamples(data, [0], nothing).features is nothing
    def fit(model, loss, batches, *args): seen.append(batches.examples)
    train_selector(data, SelectorConfig(d_model=8, heads=1, d_ff=8), FitConfig(), fit, examples=nothing)
    assert seen == [nothing]
    made = HeldOut.of({}, {"dog": ["dog"]}, {}, {})
    assert (made.novel, made.f1) == ({}, {}) and HeldOut.of({}, {"dog": ["dog"]}).novel == {"dog": ("dog",)}

def test_a_limit_of_0_bytes_is_kept(tmp_path):
    file = tmp_path/"x"
    file.write_bytes(b"12")
    with unpacking(0), open(file, "rb") as f, pytest.raises(ValueError): unpacked(f, file).read()

@pytest.mark.parametrize("given, weight", [("", None), (0, 0.), ("0", 0.), (None, None), ("must", "must")])
def test_a_weight_of_0_that_a_program_sends_is_used(monkeypatch, given, weight):
    from noc_nb.pages import app
    asked = []
    monkeypatch.setattr(app, "_captioned", lambda *args, **options: asked.append(options["price_weight"]))
    monkeypatch.setattr(app, "_line", lambda *args: {})
    studio = SimpleNamespace(busy=nullcontext(), photos=None, _look=lambda *args: (None, None))
    app._Studio.answer(studio, "photo.jpg", price_weight=given)
    assert asked == [weight]
