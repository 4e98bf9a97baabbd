"Test the pipelines of the package: their scores, averaged embeddings, and broken folders."
import json
import math
import re
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
import pytest
import torch
import noc_nb
from safetensors.torch import load, save
from noc_nb.attention import FeedForward, linear
from noc_nb.core import EOS, NocError
from noc_nb.files.dataset import load_data
from noc_nb.files.drawing import make_toy
from noc_nb.heldout import HeldOut
from noc_nb.lab.config import override
from noc_nb.lab.models import average_neighbours
from noc_nb.lab.objects import _object_words
from noc_nb.lab.runs import compare_training, training_record
from noc_nb.lab.saving import load_model
from noc_nb.lab.table import checked
from noc_nb.models.pipeline import NovelCaptioner, _features
from noc_nb.models.source import Job
from noc_nb.lab.novelty import judge
from noc_nb.regions import Regions
from noc_nb.scst import caption_log_probs
from noc_nb.train_xe import build_vocab
from noc_nb.vocab import FUNCTION_WORDS

@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "Load a toy world with a hundred val images, and enough captions to know which classes are never mentioned."
    torch.set_num_threads(1)
    return load_data(make_toy(tmp_path_factory.mktemp("toy"), train=40, val=100, test=1), split="toy")

@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("part", ["lite/selector", "lite/captioner", "toy/selector", "toy/captioner"])
def test_a_shipped_model_answers_as_when_it_was_saved(part):
    "No edit since changed the logits of a shipped model."
    folder = Path(noc_nb.__file__).parent/"assets/models"/part
    assert (folder/"answer.json").exists()
    load_model(folder)

def scores(name, data, ids):
    "Return F1 of held-out objects and CIDEr-D, out of domain and in domain, of a pipeline's captions."
    pipeline = NovelCaptioner.from_pretrained(name, device="cpu")
    regions = data.regions.take(ids)                                  # also has images without detections
    captions = pipeline([regions[i] for i in ids])
    sentences = {i: caption.caption for i, caption in zip(ids, captions)}
    found = judge(sentences, data.captions, ids, data.novel["val"], data.heldout, ("C",)).row()
    return dict(F1=found["out_macro"]["F1"], out=found["out_pooled"]["C"], within=found["in"]["C"])

def floor(name, data, ids, least):
    "Check that each score is at least a limit a little below today's."
    found = scores(name, data, ids)
    text = ", ".join(f"{what} {found[what]:.1f} (at least {least[what]})" for what in least)
    assert all(found[what] >= least[what] for what in least), f"{name} on {len(ids)} val images: {text}"

def test_toy_is_as_good_as_it_was(world):
    floor("toy", world, world.splits["val"], dict(F1=74, out=66, within=105))

def test_lite_is_as_good_as_it_was(coco):
    torch.set_num_threads(1)
    data = load_data(coco, "lite", "simulated")
    floor("lite", data, data.splits["val"][:150], dict(F1=68, out=69.5, within=85))

def test_lite_records_what_it_was_trained_on(coco):
    "The record is that of the data, whose vocabulary is the captioner's; training images and read words are refused."
    data, lite = load_data(coco, "lite"), NovelCaptioner.from_pretrained("lite", device="cpu")
    vocab = build_vocab(data, 2)
    assert ([*vocab.tokens], {*vocab.unseen}) == ([*lite.captioner.tokens], {*lite.captioner.unseen})
    assert lite.selector.trained == training_record(data) and lite.captioner.trained == training_record(data, seen=True)
    assert compare_training(lite.captioner.trained, data, data.splits["test"], "lite") == ""
    read = replace(data, heldout=HeldOut.of({"cow": 21}, {"cow": ["cow"]}))
    for wrong, ids in (data, data.splits["train"][-1:]), (read, data.splits["test"]):
        with pytest.raises(NocError, match="lite: was trained on (1 of the 1 images|captions with cow)"):
            compare_training(lite.captioner.trained, wrong, ids, "lite")

def test_averaged_embeddings_are_kept_by_a_saved_pipeline(world, tmp_path):
    "A word without captions gets its neighbours' mean embedding; the pipeline is saved, loaded, and mentions the word."
    toy = NovelCaptioner.from_pretrained("toy", device="cpu")
    captions = [caption for i in world.splits["train"] for caption in world.tokens[i]]
    never = next(c for c in toy.classes.values() if c.name in world.novel["val"]
                 and not any(c.word in tokens for tokens in captions))
    near = ["cat", "dog"]
    averaged = average_neighbours(toy.captioner, {never.word: near})
    pipeline = NovelCaptioner(toy.selector, averaged, toy.classes, toy.vectors, toy.cfg)
    pipeline.save_pretrained(tmp_path/"averaged")
    again = NovelCaptioner.from_pretrained(tmp_path/"averaged", device="cpu")
    table, old, ids = again.captioner.words(), toy.captioner.words(), toy.vocab.stoi
    mean = old[[ids[word] for word in near]].mean(0)
    torch.testing.assert_close(table[ids[never.word]], mean)
    others = [i for word, i in ids.items() if word != never.word]
    torch.testing.assert_close(table[others], old[others])
    images = [world.regions[i] for i in sorted(world.novel["val"][never.name])][:4]
    for regions, caption, plain in zip(images, pipeline(images, [never.name]), toy(images, [never.name])):
        saved = again(regions, [never.name])
        assert saved.said == {never.name: never.word} and saved.reason is None
        assert never.word in saved.caption.split() and saved.caption == caption.caption
        assert saved.score != plain.score                       # the search used the new embedding

# ---- broken folders

@pytest.fixture(scope="module")
def toy(): return NovelCaptioner.from_pretrained("toy", device="cpu")

def of_json(**changes): return lambda whole: json.dumps(json.loads(whole) | changes).encode()

def of_vectors(**changes):
    "Return a function that changes some class vectors of a file; None removes one."
    def change(whole):
        vectors = load(whole) | changes
        return save({name: vector for name, vector in vectors.items() if vector is not None})
    return change

WIDTH = len(NovelCaptioner.from_pretrained("toy", device="cpu").vectors[1])
BROKEN = {
    "pipeline.json": [
        (lambda whole: b"[]", "expected settings, as an object"),
        (of_json(search=dict(beams=5)), "search: unknown setting 'beams'"),
        (of_json(limit="5"), "limit='5': expected a value of type int"),
        (of_json(form="verbs"), "form=verbs: expected one of words"),
        (of_json(beams=5), "unknown setting 'beams'"),
        (of_json(limit=-1), "limit=-1: expected 0 or more"),
        (of_json(prices=dict(weight=-1)), "prices: weight=-1: expected 0 to 1000")],
    "captioner/config.json": [
        (of_json(layers=2000), "layers=2000: expected 1 to 100"),
        (of_json(heads=0), "heads=0: expected 1 to 100000"),
        (of_json(heads=7), "d_model=")],
    "class_vectors.safetensors": [
        (lambda whole: whole[:-9], "expected the model's weights, as"),
        (lambda whole: b"", "expected the model's weights, as"),
        (of_vectors(abc=torch.ones(WIDTH)), "class abc: expected a vector for each"),
        (of_vectors(**{"50000000": torch.ones(WIDTH)}), "class 50000000: expected a vector"),
        (of_vectors(**{"1": torch.ones(WIDTH + 1)}), "class 1: expected"),
        (of_vectors(**{"1": torch.full((WIDTH,), torch.nan)}), "class 1: expected"),
        (of_vectors(**{"1": torch.tensor(1.)}), f"class 1: expected {WIDTH} finite"),
        (of_vectors(**{"1": None}), "class 1: expected a vector")]}

@pytest.mark.parametrize("name", BROKEN)
def test_the_error_for_a_broken_folder_names_the_file(toy, tmp_path, name):
    toy.save_pretrained(tmp_path, half=True)
    file = tmp_path/name
    whole = file.read_bytes()
    for change, expected in BROKEN[name]:
        file.write_bytes(change(whole))
        with pytest.raises(NocError, match=re.escape(f"{file}: {expected}")):
            NovelCaptioner.from_pretrained(tmp_path, device="cpu")
    file.write_bytes(whole)
    NovelCaptioner.from_pretrained(tmp_path, device="cpu")

def half(d, d_ff, p): return FeedForward(d, d_ff//2, p)

@pytest.mark.parametrize("chapter, name, edit, named", [
    ("selector", "linear", lambda n, d: linear(n + (n == 6), d), "nbs/03_selector.ipynb"),
    ("selector", "FeedForward", half, "nbs/03_selector.ipynb or nbs/02_attention.ipynb"),
    ("decoder", "FeedForward", half, "nbs/06_captioner.ipynb or nbs/05_decoder.ipynb or nbs/02_attention.ipynb")])
def test_an_edited_chapter_is_named(monkeypatch, chapter, name, edit, named):
    "If a chapter was edited and shipped weights do not fit any more, the message names it and the two ways on."
    monkeypatch.setattr(f"noc_nb.{chapter}.{name}", edit)
    part = "selector" if chapter == "selector" else "captioner"
    with pytest.raises(NocError) as e: NovelCaptioner.from_pretrained("lite", device="cpu")
    assert f"lite/{part}/model.safetensors: " in str(e.value) and f"by config.json and {named}; if one" in str(e.value)
    assert "--selector module:Class), or train the model again" in str(e.value)

def test_a_folder_is_never_taken_for_a_shipped_pipeline(toy, tmp_path, monkeypatch):
    "The name of a shipped pipeline has priority over a folder; a path means the folder, which must contain a pipeline."
    monkeypatch.chdir(tmp_path)
    for name in "lite", "mine": toy.save_pretrained(name)
    words = [len(NovelCaptioner.from_pretrained(name, device="cpu").vocab)
             for name in ("./lite", Path("lite"), "mine", "./mine")]
    words += [len(Job("photos", name).pipeline().vocab) for name in ("./lite", "mine")]
    assert words == [len(toy.vocab)]*6 != [len(NovelCaptioner.from_pretrained("lite", device="cpu").vocab)]*6
    Path("empty").mkdir()
    with pytest.raises(NocError, match="^empty/pipeline.json: no such file"): NovelCaptioner.from_pretrained("empty")
    for name in "huge", "./huge":
        with pytest.raises(NocError, match=f"^{name}: no such folder, and no pipeline of the package: expected one of"):
            NovelCaptioner.from_pretrained(name)

def test_a_word_of_the_caller_is_asked_for_as_it_is_written():
    "A word that merely belongs to a class is required, or avoided, itself; a class's own name stands for the class."
    pipeline = NovelCaptioner.from_pretrained("lite", device="cpu")
    [cat] = pipeline.class_ids(["kitten"])
    def words(own, i): return {" ".join(pipeline.vocab.tokens[t] for t in ids) for ids in own._group(i)}
    own = pipeline.with_objects(dict.fromkeys(["kitten", "zebra|penguin", "fire truck"], math.inf))
    assert [own.classes[i].name for i in own.wanted] == ["kitten", "zebra|penguin", "fire truck"] and cat in own.wanted
    assert [words(own, i) for i in own.wanted] == [{"kitten"}, {"zebra", "zebras", "penguin"}, {"fire truck"}]
    assert words(pipeline.with_objects({"cat": math.inf}), cat) == {"cat"}
    assert pipeline.with_objects({"bird": math.inf, "penguin": -math.inf}).barred == ["penguin"]
    assert {"cat", "kitten"} < {*pipeline.with_objects({"cat": -math.inf}).barred}
    lacks = copy(pipeline)
    lacks.classes = {cat: replace(pipeline.classes[cat], forms=(*pipeline.classes[cat].forms, "qqq"))}
    with pytest.warns(UserWarning, match="'qqq': cannot be written; its class is required"):
        assert [*lacks.with_objects({"qqq": math.inf}).wanted] == [cat]

# ---- penalties

GLUED = checked(Regions([[.1, .1, .6, .6], [.5, .2, .9, .7], [.2, .5, .5, .9], [.6, .5, .8, .8]],
                        [6, 3, 18, 62], [.9]*4))

def clumsy(caption, lite):
    "Return how many content words of a caption are repeated, and how many of its pairs of objects nobody wrote."
    words, objects = caption.split(), {*_object_words(lite.classes)}
    again = sum(w in words[:n] and w not in FUNCTION_WORDS for n, w in enumerate(words))
    pairs = [f"{a} {b}" for a, b in pairwise(words) if {a, b} <= objects]
    return again, sum(pair not in lite.captioner.trained["pairs"] for pair in pairs)

@pytest.mark.parametrize("objects", [(), ("bus", "car", "chair", "dog"), None])
def test_a_score_is_the_log_probability_less_the_penalties(objects):
    "The score of a caption of `lite` is its log-probability, teacher-forced, less what its clumsy words cost."
    lite, clumsiest = NovelCaptioner.from_pretrained("lite", device="cpu"), 0
    for repetition, pair in (0., 0.), (.25, .5), (2., 2.), (50., 50.):
        lite.cfg = override(lite.cfg, [f"prices.repetition={repetition}", f"prices.pair={pair}"])
        found = lite(GLUED, objects)
        again, glued = clumsy(found.caption, lite)
        tokens = torch.tensor([[[*map(lite.vocab.stoi.get, found.caption.split()), EOS]]])
        with torch.no_grad(): log_prob = caption_log_probs(lite.captioner, _features(lite, [GLUED]), tokens).item()
        assert found.score == pytest.approx(log_prob - again*repetition - glued*pair, abs=2e-3)
        clumsiest = max(clumsiest, again + glued)
        assert repetition < 50 or not again + glued
    assert clumsiest or objects != ("bus", "car", "chair", "dog")

def test_penalties_of_pairs_need_a_record(tmp_path):
    "A captioner that does not know what people write side by side is refused, with both ways on."
    lite = NovelCaptioner.from_pretrained("lite", device="cpu")
    del lite.captioner.trained["pairs"]
    with pytest.raises(NocError, match=r"prices.pair=2: expected a captioner whose trained.json has `pairs`"):
        lite(GLUED)
    lite.cfg = override(lite.cfg, ["prices.pair=0"])
    assert lite(GLUED).caption
