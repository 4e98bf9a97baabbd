"""Test the values of the paper's Section 3.1 and our own decisions (D1 to D11) by behaviour, in the paper's order.

A test fails if a line of the model, the search or the training changes, even if the configuration keeps its values.
The references are literal loops, NumPy, or numbers computed by hand. No model is trained for long. What a chapter
already tests in this way (Eq. 1, the loss, prices, memory, two passes of SCST) is not repeated."""
import copy, itertools, json, math
from collections import Counter, namedtuple
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from book import ROOT
from noc_nb.beam import reorder_state
from noc_nb.fast.trees import captions_of, prefix_scores, same_captions, tree
from noc_nb.captioner import Captioner
from noc_nb.cider import CiderD as PlainCiderD
from noc_nb.commands import reproduce
from noc_nb.commands.cli import main
from noc_nb.constraints import COCO_CLASSES, ObjectClass, best_scores, constraint_classes, constraint_tokens
from noc_nb.core import BOS, EOS, PAD, UNK, NocError
from noc_nb.data import CaptionBatch, CocoData, ImageExamples, Loader, RegionFeatures, SelectorExamples
from noc_nb.encoder import CaptionerConfig
from noc_nb.evaluation import caption_scores, domains
from noc_nb.fast.cider import CiderD, CiderReward, cider_reward
from noc_nb.fast.decode import decode, fast_search, oracle_prices, search
from noc_nb.fast.expansions import next_words
from noc_nb.fast.groups import pack_groups, read_groups
from noc_nb.fast.pool import Pool
from noc_nb.fast.prices import PriceConfig
from noc_nb.fast.modes import beam_search, grid_beam_search
from noc_nb.fast.search import SearchConfig
from noc_nb.files.dataset import load_data
from noc_nb.fit import plain_fit
from noc_nb.grid import algorithm_1
from noc_nb.heldout import COCO_HELDOUT, novel_images, removed_images, words_of
from noc_nb.lab.config import _from_dict
from noc_nb.lab.disk import read_json
from noc_nb.lab.experiment import Choices, Experiment
from noc_nb.lab.models import (PRESETS, Models, Parts, Run, _nearest_neighbours, average_neighbours, train_scst_in,
                               train_selector_in, train_xe_in)
from noc_nb.lab.metrics import CaptionScorer, meteor, points
from noc_nb.lab.novelty import interval, judge, nonnovel_weight, selection_f1, val_weight, weighted_f1
from noc_nb.lab.results import PaperTable, read_rows
from noc_nb.lab.runs import contents
from noc_nb.lab.saving import load_model, save_model, _save_vocab
from noc_nb.lab.table import checked, table_of
from noc_nb.lab.train import ScstTrainConfig, TrainConfig, Trainer
from noc_nb.lab.verdict import gap, over_runs
from noc_nb.models.classes import with_classes
from noc_nb.models.pipeline import (CaptionOptions, NovelCaptioner, PipelineConfig, _probs as pipeline_probs,
                                    _whole_mention, _with_names)
from noc_nb.models.source import _from_table
from noc_nb.pages import gallery
from noc_nb.regions import Regions, geometry
from noc_nb.scores import java
from noc_nb.scores.compare import _Run, _differences
from noc_nb.scores.quality import quality_scores
from noc_nb.scst import ScstConfig, SelfCritical, oracle_words, scst_loss
from noc_nb.scst import cider_reward as plain_reward
from noc_nb.selector import RegionSelector, SelectorConfig, select, selector_loss
from noc_nb.train_selector import selected, selector_scores, val_score
from noc_nb.train_xe import bad_endings, build_captioner, build_vocab, val_cider
from noc_nb.vocab import Vocab, tokenize

pytestmark = pytest.mark.usefixtures("one_thread")
PERSON, BICYCLE, BUS, CAT, DOG, HORSE, ZEBRA = 1, 2, 6, 17, 18, 19, 24
CLASSES = {i: COCO_CLASSES[i] for i in (PERSON, BICYCLE, BUS, CAT, DOG, HORSE, ZEBRA)}
TINY = CaptionerConfig(d_model=16, heads=2, d_ff=32, layers=1, memory=2, dropout=0.)

def close(a, b, eps=1e-9): assert np.abs(np.asarray(a) - np.asarray(b)).max(initial=0) < eps, (a, b)

# ---- a data set by hand

def world(images, train=(), val=(), test=()):
    "Build a data set from image id -> (captions, [(class, score)]) and its parts; published words define novel images."
    rng, splits = np.random.default_rng(0), dict(train=[*train], val=[*val], test=[*test])
    def found(i, pairs):
        pairs = sorted(pairs, key=lambda pair: -pair[1])         # detections are sorted, the best first
        boxes = np.sort(rng.random((len(pairs), 2, 2)), 1).reshape(-1, 4)
        return Regions(boxes, [c for c, _ in pairs], [s for _, s in pairs], image_id=i, size=(100, 100))
    captions = {i: texts for i, (texts, _) in images.items()}
    def says(i, words): return any(word in text.split() for text in captions[i] for word in words)
    novel = {part: {o: {i for i in splits[part] if says(i, words)} for o, words in COCO_HELDOUT.novel.items()}
             for part in ("val", "test")}
    for part in "val", "test": splits[f"novel_{part}"] = sorted(set().union(*novel[part].values()))
    words = {w for texts in captions.values() for text in texts for w in text.split()}
    vectors = {w: rng.normal(size=12).astype(np.float32) for w in sorted(words | {*words_of(CLASSES, COCO_HELDOUT)})}
    vectors.pop("blurry", None)                                  # a word without a vector
    return CocoData("own", Path("."), captions, table_of(found(i, pairs) for i, (_, pairs) in images.items()), splits,
                    novel, CLASSES, COCO_HELDOUT, dict(captions=sum(map(len, captions.values()))),
                    word_vectors=vectors)

DOGS = ["a dog runs on the grass", "a brown dog runs", "the dog is on the grass", "a dog and a cat", "a blurry dog"]
CATS = ["a cat sits on a bed", "a black cat sits", "the cat is on the bed", "a cat", "a cat sleeps on a bed"]
ZEBRAS = ["a zebra stands on the grass", "two zebras on the grass", "a zebra", "a zebra eats grass", "a zebra runs"]

def small_world(n=12):
    "Build a data set with dogs and cats for training, and dogs, cats and zebras in val and test."
    images = {}
    for i in range(n):
        images[i] = DOGS if i % 2 else CATS, [(PERSON, .99), (DOG if i % 2 else CAT, .9 - .01*i), (HORSE, .3)]
    for i in range(100, 108):
        own = (DOGS, DOG), (CATS, CAT), (ZEBRAS, ZEBRA), (CATS, CAT)
        texts, c = own[i % 4]
        images[i] = texts, [(c, .8), (DOG, .45), (PERSON, .7)]
    return world(images, range(n), range(100, 104), range(104, 108))

@pytest.fixture(scope="module")
def data(): return small_world()

@pytest.fixture(scope="module")
def captioner(data):
    "Build an untrained captioner whose random weights are large enough to make captions differ."
    model = build_captioner(data, TINY, 1, seed=3).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters(): p += .4*torch.randn(p.shape, generator=generator)
    return model

def shaken(model, seed=0):
    "Return the model in 64 bits, with noise added to all parameters."
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.double().parameters(): p += .1*torch.randn(p.shape, generator=generator).double()
    return model.eval()

class ByScore(nn.Module):
    "A selector whose probability of a region is the detector's score."
    cfg = SelectorConfig()
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
    def forward(self, geometry, labels): return geometry[...,5].logit().masked_fill(labels < 0, -torch.inf)

# ---- a literal transformer for one image without padding; `drop`: the factor of dropout

def plain_attention(w, at, x, kv, heads, drop=1., causal=False):
    d, out = x.shape[1], []
    q, k, v = (y @ m.T + b for y, m, b in zip((x, kv, kv), w[at+"qkv.weight"].chunk(3), w[at+"qkv.bias"].chunk(3)))
    for h in range(heads):
        own = slice(h*d//heads, (h + 1)*d//heads)
        keys, values, size = k[:,own], v[:,own], d//heads
        if at+"slots.k" in w:
            slots = w[at+"slots.k"][h], w[at+"slots.v"][h]
            keys = torch.cat([keys, size**.5*slots[0]])
            values = torch.cat([values, len(slots[1])**.5*slots[1]])
        scores = q[:,own] @ keys.T / size**.5
        if causal: scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        out.append(drop*scores.softmax(1) @ values)
    return torch.cat(out, 1) @ w[at+"out.weight"].T + w[at+"out.bias"]

def plain_norm(w, at, x):
    x = x - x.mean(1, keepdim=True)
    return x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * w[at+"weight"] + w[at+"bias"]

def plain_block(w, at, x, drop, *args, **kw):
    "Return LayerNorm(x + dropout(y)), where y is the attention to `args`, or the feed-forward network without them."
    if args: y = plain_attention(w, at+"f.", x, *args, drop, **kw)
    else: y = drop*(x @ w[at+"f.0.weight"].T + w[at+"f.0.bias"]).relu() @ w[at+"f.3.weight"].T + w[at+"f.3.bias"]
    return plain_norm(w, at+"norm.", x + drop*y)

def plain_selector(w, x, labels, inner=True, drop=1., layers=2, heads=8):
    x = x @ w["embed.weight"].T + w["embed.bias"]
    for l in range(layers):
        if inner:                                                # class by class (Eq. 2 and 3)
            new = torch.zeros_like(x)
            for c in set(labels):
                own = [i for i, label in enumerate(labels) if label == c]
                new[own] = plain_block(w, f"layers.{l}.inner.", x[own], drop, x[own], heads)
            x = new
        x = plain_block(w, f"layers.{l}.over_all.", x, drop, x, heads)
        x = plain_block(w, f"layers.{l}.ff.", x, drop)
    return (x @ w["score.weight"].T + w["score.bias"])[:,0]

def plain_encoder(w, x, drop=1., layers=3, heads=8, at="encoder."):
    x = drop*(x @ w[at+"embed.0.weight"].T + w[at+"embed.0.bias"]).relu()
    x = plain_norm(w, at+"embed.3.", x)
    for l in range(layers):
        x = plain_block(w, f"{at}attention.{l}.", x, drop, x, heads)
        x = plain_block(w, f"{at}ff.{l}.", x, drop)
    return x

def plain_captioner(w, x, tokens, drop=1., layers=3, heads=8):
    "Return the logits (t,v) after every token."
    table = w["words.frozen"].clone()
    table[~w["words.known"]] = w["words.learned"]
    x = plain_encoder(w, x, drop, layers, heads)
    y = table[tokens] @ w["word_in.weight"].T + w["word_in.bias"]
    t, d = y.shape
    position = torch.zeros(t, d, dtype=y.dtype)
    for i, j in itertools.product(range(t), range(0, d, 2)):
        position[i,j], position[i,j+1] = math.sin(i/10000**(j/d)), math.cos(i/10000**(j/d))
    y = drop*(y + position)
    for l in range(layers):
        y = plain_block(w, f"decoder.layers.{l}.words.", y, drop, y, heads, causal=True)
        y = plain_block(w, f"decoder.layers.{l}.regions.", y, drop, x, heads)
        y = plain_block(w, f"decoder.layers.{l}.ff.", y, drop)
    return (y @ w["word_out.weight"].T + w["word_out.bias"]) @ table.T

@pytest.fixture
def loud(monkeypatch):
    "Replace dropout by a multiplication by 1 + p, which shows exactly where it is applied, and its rate."
    def attend(q, k, v, attn_mask=None, dropout_p=0., is_causal=False, **_):
        scores = q @ k.mT / q.shape[-1]**.5
        if is_causal: scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        if attn_mask is not None: scores = scores.masked_fill(~attn_mask, -torch.inf)
        return (1 + dropout_p)*scores.softmax(-1) @ v
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(F, "dropout", lambda x, p=.5, training=True, inplace=False: x*(1 + p) if training else x)

# ---- Section 2.1: the region selector (D1)

SIX = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)).double()
SIX_LABELS = [18, 17, 18, 24, 18, 17]

def selector_scores_of(model, *images):
    "Return the logits of images, padded to one batch with numbers that must have no effect."
    x, labels = torch.full((len(images), 6, 6), 9.).double(), torch.full((len(images), 6), -1)
    for i, own in enumerate(images):
        x[i,:len(own)] = SIX[own]
        labels[i,:len(own)] = torch.tensor(SIX_LABELS)[own]
    return model(x, labels)

@pytest.mark.parametrize("inner", [True, False])
def test_selector_is_two_layers_of_8_heads_over_128(inner):
    "D1: the selector equals a literal one with N=2, width 128, 8 heads and 512 inside; padding has no effect."
    model = shaken(RegionSelector(SelectorConfig(inner=inner)))
    w, parts = model.state_dict(), ([0, 1, 2, 3, 4, 5], [4, 1, 3], [])
    out = selector_scores_of(model, *parts)
    for row, own in zip(out, parts):
        if own: close(row[:len(own)].detach(), plain_selector(w, SIX[own], [SIX_LABELS[i] for i in own], inner))
        assert (row[len(own):] == -torch.inf).all()
    blocks = ("inner.", "over_all.", "ff.") if inner else ("over_all.", "ff.")
    own = {name for l in (0, 1) for b in blocks for name in w if name.startswith(f"layers.{l}.{b}")}
    assert own | {f"{part}.{kind}" for part in ("embed", "score") for kind in ("weight", "bias")} == w.keys()
    assert w["embed.weight"].shape == (128, 6) and w["score.weight"].shape == (1, 128)
    assert w["layers.1.ff.f.0.weight"].shape == (512, 128)

@pytest.mark.parametrize("inner", [True, False])
def test_selector_drops_a_tenth_everywhere(loud, inner):
    "D1: dropout of .1 applies to attention weights, feed-forward networks and operators, only in training."
    model = shaken(RegionSelector(SelectorConfig(inner=inner)))
    own = [0, 1, 2, 3, 4, 5]
    for train, drop in (True, 1.1), (False, 1.):
        out = selector_scores_of(model.train(train), own)[0]
        close(out.detach(), plain_selector(model.state_dict(), SIX, SIX_LABELS, inner, drop))

def test_without_inner_only_the_operator_is_left_out():
    "D1: without inner-attention, the selector has all other parts with the same shapes."
    whole, without = RegionSelector(), RegionSelector(SelectorConfig(inner=False))
    own = {name: x.shape for name, x in whole.state_dict().items() if ".inner." not in name}
    assert own == {name: x.shape for name, x in without.state_dict().items()}
    assert sum(p.numel() for p in whole.parameters()) - sum(p.numel() for p in without.parameters()) \
        == 2*(4*128*128 + 4*128 + 2*128)

def test_training_and_judging_use_the_papers_weights(data, tmp_path):
    "Training passes λ0 = .2 and λ1 = .8 to the loss; without novel images, the score is minus the loss on `val`."
    heard = []
    def loss(logits, targets, labels, lambda0, lambda1):
        heard.append((lambda0, lambda1, len(labels)))
        return selector_loss(logits, targets, labels, lambda0, lambda1)
    cfg = replace(PRESETS["coco"].selector, d_model=8, heads=1, d_ff=8, layers=1)
    images = {i: (data.captions[i % 12], [(DOG, .5)]) for i in range(120)}
    many = world(images, range(120))
    train_selector_in(tmp_path/"run", many, cfg, replace(PRESETS["coco"].train_selector, epochs=1), loss=loss)
    assert {(a, b) for a, b, _ in heard} == {(.2, .8)}
    assert sorted(size for *_, size in heard) == [20, 50, 50]                # batches of 50
    calm = world({0: (CATS, [(CAT, .6), (DOG, .3)]), 1: (CATS, [(PERSON, .9)])}, val=[0, 1])
    one, zero = math.log(1/.6), math.log(1/.7)
    close(val_score(calm, SelectorConfig())(ByScore())["score"], -(.8*one + .2*zero)/2, 1e-6)

def test_targets_are_1_for_any_form_in_any_reference():
    "D1: a target is 1 if a reference has a form of the class; only images with 5 references, and the 10 best regions."
    refs = ["two kittens on a bed", "a bed", "a bed", "a bed", "someone's puppies"]
    many = [(DOG, .9 - .01*i) for i in range(9)] + [(HORSE, .5), (ZEBRA, .4), (PERSON, .99)]
    few = world({0: (refs, [(CAT, .5), (HORSE, .4), (PERSON, .9), (DOG, .3)]), 1: (refs[:4], [(CAT, .9)]),
                 2: (refs, sorted(many, key=lambda pair: -pair[1])), 3: (refs, [])}, range(4))
    batch = SelectorExamples(few)
    x = batch.whole
    assert x.image_ids == [0, 2, 3]                                          # image 1 has only four references
    assert x.labels[0].tolist()[:4] == [CAT, HORSE, DOG, -1] and x.targets[0].tolist()[:4] == [1, 0, 1, 0]
    assert x.labels[1].tolist() == [DOG]*9 + [HORSE]                         # 10 of 12; persons are left out
    assert x.labels[2].tolist() == [-1]*10
    close(x.geometry[0,:3,5], [.5, .4, .3], 1e-6)

def test_ground_truth_boxes_are_ordered_by_area(tmp_path):
    "D1: ground-truth boxes get score 1 and are ordered by area; an image without boxes is valid and empty."
    (tmp_path/"annotations").mkdir()
    images = [dict(id=i, width=100, height=50) for i in (7, 8)]
    captions = [dict(id=i, image_id=i, caption="a dog") for i in (7, 8)]
    boxes = [dict(id=n, image_id=7, category_id=c, bbox=box, iscrowd=0)
             for n, (c, box) in enumerate([(DOG, [0, 0, 10, 10]), (CAT, [0, 0, 50, 40]), (BUS, [50, 10, 20, 40])])]
    categories = [dict(id=i, name=c.name) for i, c in COCO_CLASSES.items()]
    for kind, rows in ("captions", captions), ("instances", boxes):
        content = dict(images=images, annotations=rows, categories=categories)
        (tmp_path/f"annotations/{kind}_val2014.json").write_text(json.dumps(content))
    own = load_data(tmp_path, None, "gt")
    assert own.regions[7].labels.tolist() == [CAT, BUS, DOG] and own.regions[7].scores.tolist() == [1, 1, 1]
    close(own.regions[7].boxes[1], [.5, .2, .7, 1.], 1e-6)
    assert len(own.regions[8]) == 0

def test_a_probability_of_half_selects_a_class():
    "Section 2.1: a class is selected if its best region has at least .5; the best class comes first."
    probs, labels = torch.tensor([[.49, .5, .7, .99, .6]]), torch.tensor([[1, 2, 3, -1, 2]])
    assert select(probs, labels) == [[3, 2]]
    assert selected({7: (labels[0], probs[0])}) == {7: [3, 2]}

def test_selector_looks_at_the_ten_best(data):
    "Section 3.1: at inference, as in training, the selector gets the ten best regions without persons and background."
    images = {0: (CATS, [(PERSON, .99)] + [(DOG, .9 - .05*i) for i in range(12)]), 1: (CATS, [(0, .8), (CAT, .3)])}
    found = selector_scores(ByScore(), world(images), [0, 1])
    close(found[0][1], [.9 - .05*i for i in range(10)], 1e-6)
    assert found[1][0].tolist() == [CAT]
    close(found[1][1], [.3], 1e-6)

def val_of_thresholds():
    "Return data whose best threshold on `val` is .4 by plain F1, and .5 by weighted F1."
    images = {i: (ZEBRAS, [(ZEBRA, .95 if i < 2 else .45)]) for i in range(4)}
    images |= {i: (CATS, [(ZEBRA, .45)] if i == 4 else [(CAT, .9)]) for i in range(4, 8)}
    images |= {i: (CATS, [(ZEBRA, .47), (CAT, .5), (DOG, .49)]) for i in (8, 9)}
    return world(images, val=range(8), test=(8, 9))

def test_val_counts_non_novel_images_as_the_published_split():
    "D7c: a false positive on a non-novel image of `lite`'s val counts 4.85 times, from the numbers of images."
    close(nonnovel_weight(range(1777), {"zebra": {*range(500)}, "bus": {*range(400, 816)}}),
          (17_234/3_018)/(961/816), 1e-12)
    assert round(nonnovel_weight(range(1777), {"zebra": {*range(816)}}), 2) == 4.85
    own = val_of_thresholds()
    close(val_weight(own), 17_234/3_018*4/4, 1e-12)
    other = replace(own, heldout=replace(COCO_HELDOUT, removal=COCO_HELDOUT.novel))   # weighted by its own test
    other.splits["test"], other.novel["test"] = [0, 1, 4, 8, 9], {"zebra": {0, 1}}
    close(val_weight(other), 3/2*4/4, 1e-12)
    other.novel["test"] = {"zebra": set()}
    assert val_weight(other) == 1
    assert val_weight(world({0: (CATS, [])}, val=[0])) == 1

def test_selector_is_judged_by_weighted_f1():
    "D7c: the selector's score is the mean weighted F1 of the held-out objects on val; here only zebras occur."
    own = val_of_thresholds()
    weight = 17_234/3_018
    images = {i: (own.captions[i], [(ZEBRA, s) for s in ([.9] if i in (0, 1, 4) else [.3])]) for i in range(8)}
    found = val_score(world(images, val=range(8)), SelectorConfig(), f1=weighted_f1)(ByScore())["score"]
    close(found, 100*2*2/(2*2 + weight + 2), 1e-9)
    close(val_score(world(images, val=range(8)), SelectorConfig())(ByScore())["score"], 100*2*2/(2*2 + 1 + 2), 1e-9)

# ---- Section 2.2 and 3.1: the captioner (D4)

@pytest.fixture(scope="module")
def paper():
    "Build the untrained captioner of the `coco` preset, with 30 words."
    torch.manual_seed(0)
    return Captioner(PRESETS["coco"].captioner, [f"w{i}" for i in range(30)])

def test_captioner_has_the_papers_sizes(paper):
    "Section 3.1, D4: the captioner has 3+3 layers, width 512, 2048 inside, 40 slots, 2048-d regions, 300-d words."
    shapes = {name: tuple(x.shape) for name, x in paper.named_parameters()}
    attention = {"qkv.weight": (1536, 512), "qkv.bias": (1536,), "out.weight": (512, 512), "out.bias": (512,)}
    slots = {"slots.k": (8, 40, 64), "slots.v": (8, 40, 64)}
    ff = {"0.weight": (2048, 512), "0.bias": (2048,), "3.weight": (512, 2048), "3.bias": (512,)}
    norm = {"norm.weight": (512,), "norm.bias": (512,)}
    def block(at, f): return {f"{at}.f.{k}": s for k, s in f.items()} | {f"{at}.{k}": s for k, s in norm.items()}
    expected = {"words.learned": (34, 300), "word_in.weight": (512, 300), "word_in.bias": (512,),
                "word_out.weight": (300, 512), "word_out.bias": (300,),
                "encoder.embed.0.weight": (512, 2048), "encoder.embed.0.bias": (512,),
                "encoder.embed.3.weight": (512,), "encoder.embed.3.bias": (512,)}
    for l in range(3):
        expected |= block(f"encoder.attention.{l}", attention | slots) | block(f"encoder.ff.{l}", ff)
        expected |= block(f"decoder.layers.{l}.words", attention) | block(f"decoder.layers.{l}.regions", attention)
        expected |= block(f"decoder.layers.{l}.ff", ff)
    assert shapes == expected

def features(*sizes, d=2048, seed=0):
    "Return random features of images with these numbers of regions, padded with numbers without effect, and the mask."
    x = torch.randn(len(sizes), max(sizes), d, generator=torch.Generator().manual_seed(seed)).double()
    return x, torch.arange(max(sizes)) < torch.tensor(sizes)[:,None]

def test_captioner_is_the_papers_transformer(loud, paper):
    """D4: the captioner equals a literal one with 8 heads, memory K=[W_k X; √d_k·M_k] and V=[W_v X; √m·M_v], a ReLU
    after the features' projection, logits from the transposed table, and dropout of .1 everywhere, only in training."""
    tokens = torch.tensor([[1, 9, 5, 30, 7], [1, 4, 4, 33, 2]])
    x, mask = features(4, 2)
    model = shaken(Captioner(PRESETS["coco"].captioner, paper.tokens, known=torch.arange(34) > 20))
    for train, drop in (True, 1.1), (False, 1.):
        out = model.train(train)(x, mask, tokens).detach()
        for i, n in enumerate((4, 2)):
            close(out[i], plain_captioner(model.state_dict(), x[i,:n], tokens[i], drop), 1e-6)

def test_the_fused_attention_equals_the_literal_one(paper):
    "The fused kernel with masks, in 32 bits, gives the same logits as the literal captioner."
    model, (x, mask) = paper.eval(), features(5, 3)
    tokens = torch.tensor([[1, 9, 5], [1, 4, 8]])
    out = model(x.float(), mask, tokens).detach()
    for i, n in enumerate((5, 3)):
        close(out[i], plain_captioner(model.state_dict(), x[i,:n].float(), tokens[i]), 1e-4)
    assert (model.encoder(x.float(), mask)[1,3:] == 0).all()

def test_an_image_without_regions_is_captioned(captioner, data):
    "An image without regions is captioned from the memory and the words, independently of other images."
    x, _ = data.region_features()([0, 1])
    none = torch.zeros(2, x.shape[1]).bool()
    alone = captioner(x[:1, :0], none[:1, :0], torch.tensor([[BOS, 7]])).detach()
    for features in x, 9*x:
        both = captioner(features, none, torch.tensor([[BOS, 7], [BOS, 7]])).detach()
        close(both, alone.expand(2, -1, -1), 1e-5)
    for features, mask in (x, none), (x[:, :0], none[:, :0]):
        for model in captioner, Pool(captioner):
            out, state = model.step(torch.full((2,), BOS), model.start(features, mask))
            out, _ = model.step(torch.full((2,), 7), state)
            close(out.detach(), alone[:,1].log_softmax(1).expand(2, -1), 1e-4)

def test_stored_features_are_widened(paper):
    "Stored features in 16 bits give the same result as the same features in 32 bits."
    x, mask = features(3)
    paper.eval()
    close(paper.encoder(x.half(), mask).detach(), paper.encoder(x.half().float(), mask).detach(), 1e-6)

def test_a_state_has_room_for_just_so_many_words(captioner, data):
    "A state has room for exactly T tokens; the default is the configuration's 20."
    (x, mask), pool = data.region_features()([0]), Pool(captioner)
    for max_len, room in (3, 3), (None, 20):
        state, steps = pool.start(x, mask, max_len), 0
        with pytest.raises(NocError, match=rf"step {room + 1}: room for {room} words.*max_len={room + 1}\)"):
            while True:
                _, state = pool.step(torch.tensor([5]), state)
                steps += 1
        assert steps == room
    _, state = pool.step(torch.tensor([BOS, BOS]), pool.start(x.expand(2, -1, -1), mask.expand(2, -1), 3))
    with pytest.raises(NocError, match="expected one image per line"): pool.reorder(state, torch.tensor([[1], [0]]))

def test_fresh_words_have_the_scale_of_the_model():
    "Before training, projected words have a standard deviation of √½, and logits the scale of vectors of length 1."
    torch.manual_seed(0)
    table = 5*torch.randn(400, 300)
    model = Captioner(CaptionerConfig(layers=1, d_ff=8), [f"w{i}" for i in range(396)], table)
    close(model.word_in(table).std().item(), .5**.5, 1e-5)
    close(model.word_out.weight.abs().max().item(), (6/(300 + 512))**.5/table.norm(dim=1).mean().item(), 1e-4)
    free = Captioner(CaptionerConfig(layers=1, d_ff=8), [f"w{i}" for i in range(396)])
    assert abs(free.words().std().item()*300**.5 - 1) < .02 and not free.words.known.any()
    for wrong in dict(table=table[:9]), dict(known=torch.zeros(9).bool()):
        with pytest.raises(NocError, match="shape"): Captioner(CaptionerConfig(), model.tokens, **wrong)

def test_a_captioner_is_read_back_unchanged_from_its_folder(captioner, tmp_path):
    "A saved captioner is loaded with the same words, frozen rows, learned rows and unseen words."
    save_model(captioner, tmp_path/"model")
    other = load_model(tmp_path/"model")
    assert other.tokens == captioner.tokens and other.unseen == captioner.unseen and "zebra" in other.unseen
    assert torch.equal(other.words(), captioner.words()) and torch.equal(other.words.known, captioner.words.known)
    assert other.cfg == captioner.cfg

def test_known_words_stay_as_they_are(data):
    "D4: rows of words with a vector are frozen; BOS, EOS, PAD, UNK and words without a vector are learned."
    model = build_captioner(data, TINY, 1)
    before, stoi = model.words().detach().clone(), Vocab(model.tokens).stoi
    known = [i for i, word in enumerate(model.tokens) if word in data.word_vectors]
    assert {*range(len(model.tokens))} - {*known} == {PAD, BOS, EOS, UNK, stoi["blurry"]}
    for i in known: assert before[i].tolist() == data.word_vectors[model.tokens[i]].tolist()
    assert not build_captioner(data, replace(TINY, freeze=False), 1).words.known.any()
    optimizer = torch.optim.SGD(model.parameters(), 1.)
    x, mask = data.region_features()([1, 2])
    model(x, mask, torch.tensor([[BOS, 5], [BOS, 6]])).square().sum().backward()
    optimizer.step()
    changed = (model.words() != before).any(1).nonzero()[:,0].tolist()
    assert changed == sorted({PAD, BOS, EOS, UNK, stoi["blurry"]})

def test_stepping_equals_teacher_forcing(captioner, data):
    "D4: decoding word by word gives the logits of one pass, also if hypotheses multiply and die, and images end."
    (x, mask), images, rng = data.region_features()([0, 1, 2]), [0, 1, 2], torch.Generator().manual_seed(0)
    mask[1,1:], pool, said = False, Pool(captioner), [[[BOS]]]*3         # `said`: the hypotheses of every image
    state, plain = pool.start(x, mask, 14), captioner.start(x, mask)
    for t, wide in zip(range(14), itertools.cycle((1, 3, 7, 5, 2, 6))):
        last = torch.tensor([own[-1] for beam in said for own in beam])
        (out, state), (same, plain) = pool.step(last, state), captioner.step(last, plain)
        close(out.detach(), same.detach(), 1e-4)
        rows = [(i, own) for i, beam in zip(images, said) for own in beam]
        for row, (i, own) in zip(out, rows):
            whole = captioner(x[i:i+1], mask[i:i+1], torch.tensor([own]))[0,-1].log_softmax(0)
            close(row.detach(), whole.detach(), 1e-4)
        g, left = len(said[0]), [n for n in range(len(images)) if t not in (5, 9) or n != 1]
        index = torch.stack([torch.randint(g, (wide,), generator=rng) + n*g for n in left])
        images = [images[n] for n in left]
        said = [[[*rows[old][1], 4 + (3*t + 5*j) % 20] for j, old in enumerate(own)] for own in index.tolist()]
        state, plain = pool.reorder(state, index), reorder_state(plain, index)
    assert images == [0] and len(said[0][0]) == 15

def test_vocabulary_has_every_constraint_word(data):
    "D4: the vocabulary has words seen 5 times (`coco`) or twice (`lite`), and all forms of constraint words."
    assert PRESETS["coco"].min_count == 5 and PRESETS["lite"].min_count == 2
    forms = {w for c in CLASSES.values() for form in (c.word, *c.forms, *c.phrase) for w in form.split()}
    forms |= {w for lists in (COCO_HELDOUT.removal, COCO_HELDOUT.novel) for words in lists.values() for w in words}
    count = Counter(w for i in data.splits["train"] for text in data.captions[i] for w in text.split())
    for least in 1, 5, 6, 7, 19:
        vocab = build_vocab(data, least) if least != 5 else build_vocab(data)
        assert {*vocab.tokens[4:]} == {w for w, n in count.items() if n >= least} | forms
        assert vocab.unseen == forms - count.keys() and "zebra" in vocab.unseen and "dog" not in vocab.unseen
    assert vocab.encode(["a", "giraffe"])[1] == UNK
    assert tokenize("A man's dog isn't at the T.V. (red), 2:30 - o'clock!") \
        == "a man 's dog is n't at the t.v. -lrb- red -rrb- 2:30 o'clock".split()      # PTB tokens, as in pycocoevalcap

def test_a_constraint_word_without_a_vector_is_an_error(data):
    "D4: a constraint word without a vector raises an error, because its row could be neither frozen nor learned."
    vectors = {w: v for w, v in data.word_vectors.items() if w != "zebra"}
    with pytest.raises(NocError, match="zebra"): build_captioner(replace(data, word_vectors=vectors), TINY, 1)

# ---- Section 2.3: the grid (D2, D3, D11)

def test_the_lists_of_removed_novel_and_f1_words_differ_in_two():
    "D2: the lists of removed words, novel words and F1's words differ exactly in `buses` and the forms of racquet."
    dcc = dict(bottle="bottle bottles", bus="bus busses", couch="couch couches sofa sofas",
               microwave="microwave microwaves", pizza="pizza pizzas", racket="racket rackets racquet racquets",
               suitcase="suitcase suitcases luggage luggages", zebra="zebra zebras")
    dcc = {o: {*words.split()} for o, words in dcc.items()}
    removal = dcc | dict(bus={"bus", "buses", "busses"})
    for lists, expected in (COCO_HELDOUT.removal, removal), (COCO_HELDOUT.f1["dcc"], dcc):
        assert {o: {*words} for o, words in lists.items()} == expected
    assert {o: {*words} for o, words in COCO_HELDOUT.novel.items()} == removal | dict(racket={"racket", "rackets"})
    for texts, found in (("{} on a road", True), ("a{} on a road", False)):
        for o, words in removal.items():
            for w in words:
                refs = {1: ["a road", texts.format(w.upper())]}
                assert removed_images(refs, COCO_HELDOUT) == ({1} if found else set())
                novel = {1} if found and "racquet" not in w else set()
                assert novel_images(refs, COCO_HELDOUT) == {x: novel if x == o else set() for x in removal}
                f1 = judge({1: texts.format(w)}, refs, [1], novel_images({1: [o]}, COCO_HELDOUT), metrics=()).row()
                assert f1["counts"]["found"][o] == dict(tp=found and w in dcc[o], fp=0, fn=0)

NINE = checked(Regions(np.tile([.1, .1, .5, .5], (9, 1)), [PERSON, DOG, CAT, DOG, BUS, HORSE, ZEBRA, 0, BICYCLE],
                       [.99, .5, .9, .8, .75, .4, .3, .95, .2]))    # sorted: CAT DOG BUS DOG HORSE ZEBRA BICYCLE

def test_rules_choose_as_computed_by_hand():
    "D2: rules use detections in the order of scores, without person, background and duplicates, and choose at most 5."
    def rule(how, **kw): return constraint_classes(NINE, how=how, **kw)
    assert rule("none") == [] and rule("topk") == [CAT]
    assert rule("topk", k=4) == [CAT, DOG, BUS]                              # the 4 best detections, merged
    assert rule("topk", k=9, max_regions=3) == [CAT, DOG, BUS]
    assert rule("topk", k=9) == [CAT, DOG, BUS, HORSE, ZEBRA] and rule("topk", k=9, limit=None)[-1] == BICYCLE
    assert rule("score") == [CAT, DOG, BUS] and rule("score", threshold=.75) == [CAT, DOG, BUS]
    assert rule("score", threshold=.2, max_regions=2) == [CAT, DOG]
    assert rule("score", threshold=.25) == [CAT, DOG, BUS, HORSE, ZEBRA]
    probs = torch.tensor([.2, .6, .5, .9, .49])                              # CAT DOG BUS DOG HORSE
    assert rule("selector", probs=probs) == [DOG, BUS] and rule("score", probs=probs) == rule("score")   # D7b
    everything = {PERSON, DOG, ZEBRA, BICYCLE, 0, 99}
    assert rule("oracle", mentioned=everything, max_regions=2) == [DOG, ZEBRA, BICYCLE]   # of all detections
    assert rule("oracle", mentioned=everything | {CAT, BUS, HORSE}) == [CAT, DOG, BUS, HORSE, ZEBRA]   # the first 5
    assert rule("topk", k=2, drop=(0, CAT)) == [PERSON, DOG]
    close([*best_scores(NINE).values()], [.9, .8, .75, .4, .3, .2], 1e-6)
    assert [*best_scores(NINE, probs).items()] == [(DOG, pytest.approx(.9)), (BUS, .5), (HORSE, pytest.approx(.49)),
                                                   (CAT, pytest.approx(.2))]

def test_constraints_are_words_forms_or_phrases():
    "D2: a constraint is one word (the paper), any form, or the whole name of a class, and occurs only once."
    classes = {13: next(c for c in COCO_CLASSES.values() if c.name == "stop sign"), DOG: CLASSES[DOG]}
    vocab = Vocab(["stop", "sign", "dog", "dogs", "puppy"])
    assert constraint_tokens([DOG, 13, DOG], classes, vocab)[0] == {DOG: [(6,)], 13: [(5,)]}
    groups, missing = constraint_tokens([DOG], classes, vocab, "forms")
    assert {*groups[DOG]} == {(6,), (7,), (8,)} and not any(m.lost for m in missing)
    assert constraint_tokens([13], classes, vocab, "phrases")[0] == {13: [(4, 5)]}
    groups, missing = constraint_tokens([DOG, 13], classes, Vocab(["sign"]), "phrases")
    assert groups == {} and [(m.class_id, m.text, m.lost) for m in missing] == [(DOG, "dog", True),
                                                                                 (13, "stop sign", True)]
    twins = {1: CLASSES[DOG], 2: replace(CLASSES[DOG], id=2)}
    assert constraint_tokens([2, 1], twins, vocab)[0] == {2: [(6,)]}

END, START = 0, 1

def language(v, seed, ties=False):
    "Return a random model that depends on all earlier words: its step, first states, and a function of a beginning."
    step, fresh = tree(v, seed, ties=ties)
    return step, lambda b: fresh(*range(b)), lambda i: prefix_scores(step, fresh(i), START)

def literal_grid(logp, words, k, T, absorb):
    "Return (row, t) -> [(score, tokens, said)] of Algorithm 1 with rows 0 to n; ties: lower token, then better parent."
    n, G = len(words), {(0, 0): [(0., (), frozenset())]}
    for t in range(1, T + 1):
        for c in range(max(0, n + t - T), min(t, n) + 1):
            found = []
            for score, y, said in G.get((c - 1, t - 1), []):
                found += [(score + logp(y)[w], y + (w,), said | {w}) for w in words if w not in said]
            for score, y, said in G.get((c, t - 1), []):
                if y[-1:] == (END,):
                    found.append((score, y, said))
                    continue
                for w, p in enumerate(logp(y)):
                    if w == END and c < n or absorb and w in words and w not in said: continue
                    found.append((score + p, y + (w,), said))
            if c == n and t == T: found = [h for h in found if h[1][-1] == END]
            once = {}
            for h in found: once.setdefault(h[1:], h)
            G[c, t] = sorted(once.values(), key=lambda h: (-h[0], h[1][-1]))[:k]
    return G

def captions(out, i=0):
    "Return (tokens, score) of an image's captions, without padding, which is 0."
    found = captions_of(out.tokens[i], out.scores[i], out.ended[i])
    assert not any(sum(tokens[tokens.index(END):]) for tokens, _ in found)
    return [(tokens[:tokens.index(END) + 1], score) for tokens, score in found]

@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_the_grid_search_equals_algorithm_1(absorb, ties):
    "D3: the search equals a literal Algorithm 1 for batches of many images, also with equal scores (D11)."
    for seed in range(6):
        k, T = 1 + seed % 3, 3 + seed % 3
        step, fresh, logp = language(6, seed, ties)
        wanted = [[], [2], [3, 5], [2, 3, 4][:T - 1], [4, 2]]
        groups = [[[(w,)] for w in words] for words in wanted]
        out = grid_beam_search(step, fresh(5), groups, bos=START, eos=END, k=k, max_len=T, absorb=absorb)
        for i, words in enumerate(wanted):
            G = literal_grid(logp(i), words, k, T, absorb)
            true = [(y, score) for score, y, _ in G[len(words), T]]
            same_captions(captions(out, i), true)
            assert out.reason[i] is None and (out.satisfied[i,:len(true)] == len(words)).all()
            found, cells = algorithm_1(logp(i), words, k, T, END, absorb)
            same_captions(found, true)
            assert {at: [h[0] for h in cell] for at, cell in cells.items()} \
                == {at: [h[1] for h in cell] for at, cell in G.items()}

@pytest.mark.parametrize("v, b, T, ties, k, penalty, forbidden", [
    *((7, 3, 5, False, *how) for how in itertools.product((1, 2, 4), (0., .7), ((), (3, 4)))),
    (700, 20, 3, True, 5, 0., (5, 699)), (40_000, 2, 3, True, 3, 0., (5, 39_999)), (576, 60, 3, True, 6, 0., (5, 575))])
def test_a_search_without_constraints_is_plain_beam_search(v, b, T, ties, k, penalty, forbidden):
    "Without constraints the search equals a literal one, with length penalties, forbidden words, ties and many words."
    step, fresh, logp = language(v, k, ties)
    how = dict(bos=START, eos=END, k=k, max_len=T, length_penalty=penalty, forbidden=forbidden)
    grids = [grid_beam_search(step, fresh(b), [[]]*b, mode=mode, **how) for mode in ("grid", "bank", "credit")]
    outs = [beam_search(step, fresh(b), **how), *grids]
    for i in range(b):
        beam, after = [((), 0.)], logp(i)
        for t in range(1, T + 1):
            new = [h for h in beam if h[0][-1:] == (END,)]
            for y, s in beam:
                if y[-1:] == (END,): continue
                scores = {w: p for w, p in enumerate(after(y)) if w not in forbidden}
                best = sorted(scores, key=scores.get, reverse=True)[:k]            # of equal scores, the lower token
                new += [(y + (w,), s + scores[w]) for w in dict.fromkeys([*best, END])]
            if t == T: new = [h for h in new if h[0][-1] == END]
            beam = sorted(new, key=lambda h: (-h[1]/len(h[0])**penalty, h[0][-1]))[:k]
        for out in outs: same_captions(captions(out, i), beam)
        close(outs[0].objective[i,:len(beam)], [s/len(y)**penalty for y, s in beam], 1e-6)

def test_defaults_of_the_search_are_the_papers():
    "The defaults are 5 beams, 20 tokens, the plain sum of log-probabilities, and no `absorb`."
    step, fresh, logp = language(9, 3)
    def longer(tokens, code):
        scores, code = step(tokens, code)
        scores[:,END] -= 30
        return scores, code
    seen = []
    def counting(tokens, code): seen.append(len(tokens)); return longer(tokens, code)
    out = beam_search(counting, fresh(1), bos=START, eos=END)
    assert out.tokens.shape == (1, 5, 20) and len(seen) == 20 and max(seen) == 5
    G = literal_grid(logp(0), [2], 5, 20, False)
    for cfg in SearchConfig(), PRESETS["coco"].search, PRESETS["lite"].search, PipelineConfig().search:
        own = grid_beam_search(step, fresh(1), [[[(2,)]]], bos=START, eos=END, **asdict(cfg))
        same_captions(captions(own), [(y, score) for score, y, _ in G[1, 20]])
        own = grid_beam_search(longer, fresh(1), [[]], bos=START, eos=END, **asdict(cfg))
        assert [len(y) for y, _ in captions(own)] == [20]*5

@pytest.mark.parametrize("find", [beam_search, grid_beam_search])
def test_scores_are_checked(find):
    "NaN and +inf raise errors that name image and step; -inf forbids a word; without any word, the reason says so."
    def run(rows, bad=-1, **kw):
        table = torch.tensor(rows, dtype=kw.pop("dtype", torch.float32))
        args = [[[]]*2] if find is grid_beam_search else []
        def step(tokens, images):
            scores = table[tokens]
            scores[images == bad] = math.nan
            return scores, images
        return find(step, torch.arange(2), *args, **dict(bos=2, eos=END, k=2, max_len=3) | kw)
    good = [[-9., -1., -2.], [-2., -1., -2.], [-3., -1., -2.]]
    for value, name in (math.nan, "NaN"), (math.inf, r"\+inf"):
        with pytest.raises(NocError, match=f"image 0, step 0: the model's scores hold {name}"):
            run([*good[:2], [0., value, 0.]])
        with pytest.raises(NocError, match=f"image 0, step 1: the model's scores hold {name}"):
            run([good[0], [0., value, 0.], good[2]])
    with pytest.raises(NocError, match="image 1, step 0: the model's scores hold NaN"): run(good, bad=1)
    dead = run([good[0], [-math.inf]*3, [-math.inf, -1., -math.inf]])
    assert not dead.ended.any() and "no" in dead.reason[0] and "next" in dead.reason[0]
    assert dead.tokens[0,0].tolist()[:1] == [1]
    for dtype in torch.float16, torch.bfloat16, torch.float64:
        assert captions(run(good, dtype=dtype))[0][0] == captions(run(good))[0][0]
    for wrong in dict(k=0), dict(k=True), dict(max_len=0), dict(max_len=10_001), dict(bos=-1), dict(eos=3), \
            dict(forbidden=[-1]), dict(forbidden=["a"]), dict(length_penalty=11):
        with pytest.raises(NocError): run(good, **wrong)
    run(good, k=10, max_len=2, length_penalty=-10)
    with pytest.raises(NocError, match="step: scores of shape"): run(good[0])
    with pytest.raises(NocError, match="step: scores are a"):
        find(lambda tokens, state: ([[0.]], state), torch.zeros(1, 1), *([[[]]] if find is grid_beam_search else []),
             bos=2, eos=END)

def test_states_of_any_nesting_are_reordered():
    "The search reorders states made of tuples, lists and dicts of tensors, and finds the number of images in a state."
    Pair = namedtuple("Pair", "a b")
    step, fresh, _ = language(6, 1)
    plain = beam_search(step, fresh(3), bos=START, eos=END, k=2, max_len=4)
    nests = ((lambda c: (c, "x"), lambda s: s[0]), (lambda c: [None, c], lambda s: s[1]),
             (lambda c: {"a": 7, "b": {"c": c}}, lambda s: s["b"]["c"]), (lambda c: Pair(c, 5), lambda s: s.a))
    for pack, unpack in nests:
        def nested(tokens, state):
            out, code = step(tokens, unpack(state))
            return out, pack(code)
        out = beam_search(nested, pack(fresh(3)), bos=START, eos=END, k=2, max_len=4)
        assert torch.equal(out.tokens, plain.tokens)
    with pytest.raises(NocError, match="no tensor"): beam_search(step, None, bos=START, eos=END)
    with pytest.raises(NocError, match="a row for each of 2"):
        grid_beam_search(step, fresh(3), [[], []], bos=START, eos=END)

def markov(rows, k=5, **kw):
    "Return a search of one image over a table of probabilities of the next word; the last row is the start."
    table = torch.tensor(rows, dtype=torch.float64).log()
    def find(groups, **more):
        return grid_beam_search(lambda tokens, state: (table[tokens], state), None, [groups], eos=END,
                                bos=len(rows) - 1, **dict(k=k) | kw | more)
    return find

def first(out): return captions(out)[0][0]

def test_captions_end_only_in_the_top_row():
    "D3: no caption ends before its word, even if the end is nearly certain; T counts the end, but not the start."
    find = markov([[.97, .01, .01, .01]]*5)
    out = find([[(2,)]], max_len=2)
    assert first(out) == (2, END) and out.spans[0,0].tolist() == [[0, 1]]
    close(out.scores[0,0], math.log(.01*.97), 1e-6)
    assert first(find([[(2,)], [(3,)]], max_len=3)) == (3, 2, END)              # of equal scores, the lower last token
    short = find([[(2,)], [(3,)]], max_len=2)
    assert not short.ended.any() and "2 tokens suffice for at most 1 constraints and the end" in short.reason[0]

def test_unfinished_captions_are_kept_only_where_none_finished():
    "D3: finished captions replace better unfinished ones at the last step; if there are none, the reason says so."
    find = markov([[0, .5, .5], [.01, .495, .495], [.01, .495, .495], [.01, .495, .495]], max_len=3)
    out = find([])
    assert out.ended[0].all() and out.reason == [None]
    never = markov([[0, .5, .5]]*4, max_len=3)([[(2,)]])
    assert not never.ended.any() and never.reason == ["no end within 3 tokens"] and never.satisfied[0,0] == 1

def test_ties_with_finished_captions_are_decided_by_tokens():
    "D11: in ties, a finished caption is ordered by its last token, the end: (1, 0) and (1, 1) come before token 2."
    never = -math.inf
    table = torch.tensor([[never, never, 0., never], [0., 0., -1., never], [never]*4, [never, 0., 0., never]])
    how = dict(bos=3, eos=2, k=2, max_len=3)
    def step(tokens, state): return table[tokens], state
    for out in beam_search(step, torch.zeros(1, 1), **how), grid_beam_search(step, torch.zeros(1, 1), [[]], **how):
        assert out.tokens[0].tolist() == [[1, 0, 2], [1, 1, 2]] and out.scores[0].tolist() == [0, -1]

def test_at_least_is_limited_to_the_groups():
    "`at_least` is one number or one per image, is limited to the number of groups, and two of three groups suffice."
    rows = [[.4, .3, .2, .1]]*5
    find, groups = markov(rows, max_len=4, k=1), [[(1,)], [(2,)], [(3,)]]
    assert first(find(groups, at_least=2)) == (1, 2, END) and find(groups, at_least=2).satisfied[0,0] == 2
    assert first(find(groups, at_least=[0])) == (END,) and len(first(find(groups, at_least=torch.tensor([9])))) == 4
    for wrong in -1, [1, 1], 1.5, "a":
        with pytest.raises(NocError, match="at_least"): find(groups, at_least=wrong)

def test_constraints_are_checked():
    "The error for an invalid constraint names its image and its position."
    find = markov([[.25]*4]*5, max_len=4)
    for groups, message in (([[]], "image 0, constraint 0"), ([[(2,)], [()]], "constraint 1"), ([[(0,)]], "token 0"),
                            ([[(4,)]], "token 4: expected an id below 4"), ([[(-1,)]], "token -1"),
                            ([[2]], "constraint 0"), (7, "image 0: 7"), ([[(1,)]]*63, "63 constraints"),
                            ([[(1,)*101]], "101 tokens")):
        with pytest.raises(NocError, match=message): find(groups)
    with pytest.raises(NocError, match="constraints"): grid_beam_search(None, None, [], bos=1, eos=0)
    one = markov([[.25]*4]*5, max_len=1)([[(1,)]]*62)
    assert one.reason[0].startswith("62 of 62 constraints are satisfied: 1 tokens suffice for at most 0")

def test_many_groups_are_searched():
    "The search also works with thirteen and more groups, and one token finishes all groups that contain it."
    find = markov([[.1] + [.05]*18]*20, max_len=16, k=1)
    out = find([[(w,)] for w in range(1, 15)])
    assert {*first(out)} == {*range(15)} and len(first(out)) == 15 and out.satisfied[0,0] == 14
    assert first(find([[(1,)], [(1,)], [(1,), (2,)]])) == (1, END)
    assert find([[(1,)], [(1,)], [(1,), (2,)]]).spans[0,0].tolist() == [[0, 1]]*3
    late = find([[(w,)] for w in range(1, 19)], max_len=16)
    assert late.reason[0].endswith("16 tokens suffice for at most 15 constraints and the end")
    assert find([[(w,)] for w in range(1, 16)]).reason == [None]                 # they just fit

def test_prices_are_checked():
    "D11: finite prices are limited to 10,000 nats; infinite prices are musts."
    find = markov([[.25]*4]*5, max_len=4)
    for price in 10_000, -10_000, 0, math.inf: find([[(1,)]], prices=[[price]])
    for price in 10_001, -10_001, -math.inf, math.nan, True, "1":
        with pytest.raises(NocError, match="image 0, constraint 0: price"): find([[(1,)]], prices=[[price]])
    for prices in [[]], [[1., 2.]], [], 3:
        with pytest.raises(NocError, match="prices"): find([[(1,)]], prices=prices)
    out = find([[(1,)], [(2,)]], prices=[[math.inf, 3.]])                       # a must, and a price of three nats
    assert {1, 2} <= {*first(out)} and out.satisfied[0,0] == 2
    close(out.objective[0,0], out.scores[0,0] + 3, 1e-5)
    assert 2 not in first(find([[(1,)], [(2,)]], prices=[[math.inf, .5]]))       # a token costs log 4 = 1.39 nats

def test_a_machine_has_at_most_256_states():
    "CBS accepts eight objects per image; a ninth raises an error that names the image."
    step, fresh, _ = language(12, 0)
    how = dict(bos=START, eos=END, k=1, max_len=10, mode="cbs")
    out = grid_beam_search(step, fresh(1), [[[(w,)] for w in range(2, 10)]], **how)
    assert out.satisfied[0,0] == 8 and out.reason == [None]
    with pytest.raises(NocError, match="image 1: its constraints make 512 states: expected at most 256"):
        grid_beam_search(step, fresh(2), [[], [[(w,)] for w in range(2, 11)]], **how)

def test_no_caption_holds_a_special_token(data):
    "D4: captions never contain UNK, PAD or BOS, even if the model prefers them, also in training."
    model = build_captioner(data, TINY, 1).eval()
    with torch.no_grad():
        for row in (PAD, BOS, UNK): model.words.learned[row] = 50*torch.eye(12)[row]
        model.word_out.bias[[PAD, BOS, UNK]] = 50.
    ids = [0, 1, 2]
    for groups in {}, {0: [[(9,)]], 1: [[(10,)], [(11,)]]}:
        batches = Loader(ImageExamples(data, ids), shuffle=False)
        for d in decode(model, batches, groups, SearchConfig(max_len=6)).values():
            assert d.caption and not {"<unk>", "<pad>", "<bos>"} & {*d.caption.split()}
    batch = ImageExamples(data, ids).__getitems__(ids)
    found = search(model, batch, [[], [], []], SearchConfig(max_len=6))
    assert not found.scores.requires_grad
    real = found.tokens[found.scores > -torch.inf]
    assert (real == UNK).sum() == (real == BOS).sum() == 0
    for row in real.tolist():
        if EOS in row: row = row[:row.index(EOS)]
        assert PAD not in row

# ---- prices (D7d)

PRICED = PriceConfig(weight=1., unseen=6., min_prob=.1)

def test_pipeline_prices_its_candidates(data):
    "D7d: the pipeline's candidates have a probability of at least `min_prob`; unseen words get β."
    captioner = build_captioner(data, TINY, 1)
    def pipeline(**kw):
        return NovelCaptioner(ByScore(), captioner, CLASSES, {c: data.word_vectors[o.word] for c, o in CLASSES.items()},
                              PipelineConfig(SearchConfig(k=1, max_len=4), **kw))
    def candidates(cfg, pairs):
        regions = Regions(np.tile([.1, .1, .5, .5], (len(pairs), 1)), [c for c, _ in pairs], [s for _, s in pairs],
                          image_id=1)
        return {c.object: c.price for c in cfg(regions).candidates}
    pairs = [(ZEBRA, .2), (BUS, .05), (DOG, .6), (CAT, .45), (PERSON, .9)]
    found = candidates(pipeline(prices=PRICED), pairs)
    assert [*found] == ["zebra", "dog"]                        # .05 would be worth 3 nats
    close([*found.values()], [math.log(.25) + 6, math.log(1.5)], 1e-5)
    assert [*candidates(pipeline(prices=replace(PRICED, min_prob=.04)), pairs)] == ["zebra", "bus", "dog"]
    assert candidates(pipeline(), pairs) == {"dog": None}      # the paper's method: a must from .5
    assert candidates(pipeline(limit=1), [(DOG, .6), (CAT, .7)]) == {"cat": None}

def test_the_pipelines_selector_sees_what_it_was_trained_on(data):
    "The pipeline's selector looks at the ten best detections other than people, as in training; others have no score."
    selector = RegionSelector(SelectorConfig(d_model=16, heads=2, d_ff=16, layers=1)).eval()
    pipeline = NovelCaptioner(selector, build_captioner(data, TINY, 1), CLASSES, None, PipelineConfig())
    rng = np.random.default_rng(0)
    boxes, scores = np.sort(rng.random((14, 2, 2)), 1).reshape(-1, 4), .99 - .05*np.arange(14)
    labels = [PERSON if n in (2, 5) else (DOG, CAT, BUS)[n % 3] for n in range(14)]
    regions = checked(Regions(boxes, labels, scores, image_id=1))
    kept = [n for n in range(14) if labels[n] != PERSON][:10]
    with torch.no_grad():
        own = regions.keep(kept)
        alone = selector(geometry(own.boxes, own.scores)[None], own.labels[None])[0].sigmoid()
    probs = pipeline_probs(selector, pipeline.people, [regions])[0]
    assert [n for n, p in enumerate(probs.tolist()) if p == p] == kept
    torch.testing.assert_close(probs[kept], alone)

def test_an_omitted_object_costs_the_objectives_loss(data, captioner):
    "An omitted object costs the objective's loss if it is a must and the other objects keep their prices."
    vectors = {c: data.word_vectors[o.word] for c, o in CLASSES.items()}
    cfg = PipelineConfig(SearchConfig(k=3, max_len=3))
    pipeline = NovelCaptioner(ByScore(), captioner, CLASSES, vectors, cfg)
    image = Regions([[.1, .1, .6, .6], [.3, .3, .9, .9]], [CAT, DOG], [.9, .6], image_id=0)
    x = RegionFeatures(table_of([image]), captioner.cfg.max_regions, vectors)([0])
    names, rng, others = ("cat", "bus", "dog", "horse"), np.random.default_rng(0), 0
    groups = [pipeline.with_objects(dict.fromkeys(names, 1.))._group(i) for n in names for i in pipeline.class_ids([n])]
    batch = CaptionBatch(*x, None, [0])
    def best(worth): return decode(captioner, [batch], {0: groups}, cfg.search, prices={0: worth})[0]
    for prices in rng.uniform(8, 20, (8, 4)).tolist():
        found, free = pipeline([image], dict(zip(names, prices)), costs=True)[0], best(prices)
        for n, c in enumerate(found.candidates):
            if c.word is not None: continue
            must = best([math.inf if m == n else price for m, price in enumerate(prices)])
            assert c.cost == pytest.approx(free.objective - must.objective, abs=1e-4)
            others += abs(c.cost - (free.score - must.score)) > 1e-3
    assert others > 1                                              # a must can drive out an object with a price

def test_a_phrase_has_the_mean_vector_of_its_words(data, captioner):
    "A class of another detector has the mean of its words' vectors, whatever their number."
    vectors = {c: data.word_vectors[o.word] for c, o in CLASSES.items()}
    pipeline = NovelCaptioner(ByScore(), captioner, CLASSES, vectors, PipelineConfig())
    several = {7: ObjectClass(7, "dog bus", "dog", ("dog",), ("dog", "bus"))}
    one = with_classes(pipeline, several)
    close([*one.vectors.values()], [(data.word_vectors["dog"] + data.word_vectors["bus"])/2], 1e-6)
    assert [*one.with_objects({"zebra": 1.}).wanted.values()] == [1.]      # another word than its only class

def choices(data, heard=None, **preset):
    run = Run(replace(PRESETS["coco"], **preset))
    def selector(*about):
        if heard is not None: heard.append(about)
        return ByScore()
    return Choices(run, data, SimpleNamespace(selector=selector, parts=Parts()))

def test_rows_choose_as_the_paper_says():
    "D2 and Table 1: every row chooses the right constraints for an image with eleven detections."
    pairs = [(PERSON, .99), (DOG, .9), (DOG, .8), (CAT, .7), (CAT, .65), (DOG, .6), (CAT, .58), (DOG, .56), (CAT, .54),
             (BUS, .52), (HORSE, .49), (DOG, .4), (ZEBRA, .3)]
    own = world({1: (["two zebras and a man", "a dog", "a dog", "a dog", "a horse"], pairs)}, test=[1])
    def rows(**preset):
        found = choices(own, **preset)
        return {row: [*found.candidates(row)[1]] for row in ("none", "top1", "top2", "top3", "selector",
                                                             "selector_no_inner", "oracle", "cbs")}
    paper = dict(none=[], top1=[DOG], top2=[DOG], top3=[DOG, CAT], selector=[DOG, CAT, BUS],
                 selector_no_inner=[DOG, CAT, BUS], oracle=[DOG, HORSE, ZEBRA], cbs=[DOG, CAT, BUS])
    assert rows() == paper
    assert rows(distinct=True) == paper | dict(top2=[DOG, CAT], top3=[DOG, CAT, BUS])
    assert rows(limit=1) == {row: found[:1] for row, found in paper.items()}
    priced = [DOG, CAT, BUS, HORSE]                            # ZEBRA is not among the ten best
    assert rows(prices=PRICED) == paper | dict(selector=priced, selector_no_inner=priced)

def test_selector_rows_use_the_papers_selector(data, tmp_path):
    "Rows of the selector use λ0 = .2 by default, and a separate model for each kind and seed."
    heard = []
    for row in "selector", "selector_no_inner": choices(data, heard).candidates(row)
    choices(data, heard).candidates("selector", .4, (3,))
    assert heard == [(True, .2, 0), (False, .2, 0), (True, .4, 3)]
    small = replace(PRESETS["coco"], selector=SelectorConfig(d_model=8, heads=1, d_ff=8, layers=1, threshold=.4),
                    train_selector=TrainConfig(epochs=1))
    models = Models(Run(small), data, tmp_path)
    for about, expected in (((), (True, .2, .8)), ((False, .3, 5), (False, .3, .7))):
        model = models.selector(*about)
        assert (model.cfg.inner, model.cfg.lambda0, model.cfg.lambda1, model.cfg.threshold) == (*expected, .4)
    assert {path.name for path in tmp_path.iterdir()} == {"selector-0.2-0", "selector-no-inner-0.3-5"}

def test_rows_price_unseen_words():
    "D7d: tables price unseen words as the pipeline does, by the training captions; the oracle and CBS have musts."
    own = world({0: (CATS, []), 1: (ZEBRAS, [(CAT, .6), (ZEBRA, .2), (BUS, .05), (DOG, .4)])}, train=[0], test=[1])
    found = choices(own, prices=PRICED).candidates("selector")[1]
    assert [*found] == [DOG, ZEBRA, CAT]                       # no training caption mentions a dog, either
    close([*found.values()], [math.log(4/6) + 6, math.log(.25) + 6, math.log(1.5)], 1e-5)
    assert choices(own, prices=PRICED).candidates("oracle")[1] == {ZEBRA: math.inf}
    assert {*choices(own, prices=PRICED).candidates("cbs")[1].values()} == {math.inf}
    close([*choices(own, prices=PRICED).candidates("score")[1].values()], [*found.values()], 1e-5)

def test_threshold_of_the_score_row_is_weighted():
    "D7c: the threshold of the score row is chosen by weighted F1: .5 and not .4."
    own = val_of_thresholds()
    assert [*choices(own).candidates("score")[8]] == [CAT]     # not the zebra of .47, nor the dog of .49
    chosen = {i: [ZEBRA] if i < 5 else [] for i in range(8)}
    def f1(chosen, weight):
        return selection_f1(chosen, own.captions, range(8), own.novel["val"], COCO_HELDOUT, fp_weight=weight)["mean"]
    best = {i: [ZEBRA] if i < 2 else [] for i in range(8)}
    close([f1(chosen, 1), f1(best, 1)], [100*8/9, 100*4/6])
    close([f1(chosen, 17_234/3_018), f1(best, 17_234/3_018)], [100*8/(8 + 17_234/3_018), 100*4/6])

# ---- Section 3.1: training (D5, D6) and CIDEr-D

def plain_cider(refs, captions, ids, unit="image"):
    "Return CIDEr-D as in Vedantam et al. (2015): σ = 6, ten times the mean over n = 1 to 4 and the references."
    @cache
    def grams(tokens): return Counter(tokens[i:i+n] for n in range(1, 5) for i in range(len(tokens) - n + 1))
    refs, captions = {i: [*map(tuple, texts)] for i, texts in refs.items()}, map(tuple, captions)
    documents = [[text] for texts in refs.values() for text in texts] if unit == "caption" else refs.values()
    df = Counter(g for texts in documents for g in {g for text in texts for g in grams(text)})
    @cache
    def weights(tokens, n):
        return {g: c*(math.log(len(documents)) - math.log(max(1, df[g]))) for g, c in grams(tokens).items()
                if len(g) == n}
    def length(x): return math.sqrt(sum(v*v for v in x.values()))
    scores = []
    for tokens, i in zip(captions, ids):
        total = 0.
        for ref, n in itertools.product(refs[i], range(1, 5)):
            h, r = weights(tokens, n), weights(ref, n)
            gap = max(0, len(tokens) - 1) - max(0, len(ref) - 1)
            common = sum(min(h[g], r[g])*r[g] for g in h.keys() & r.keys())
            if length(h) and length(r): total += common/(length(h)*length(r))*math.exp(-gap**2/(2*6.**2))
        scores.append(10*total/4/len(refs[i]))
    return scores

TEXTS = {i: [text.split() for text in texts[:3 + i]] for i, texts in enumerate((DOGS, CATS, ZEBRAS))}
SAID = ["a dog runs on the bed".split(), "a cat a cat a cat sits".split(), "grass".split(), [], "qq zebras on".split()]

@pytest.mark.parametrize("unit", ["image", "caption"])
@pytest.mark.parametrize("CiderD", [CiderD, PlainCiderD])
def test_cider_d_has_sigma_6_and_clipped_counts(CiderD, unit):
    "CIDEr-D has σ = 6, a factor 10, clipped counts, and document frequencies by image or by caption."
    ids = [0, 1, 2, 0, 2]
    close(CiderD(TEXTS, unit).score(SAID, ids), plain_cider(TEXTS, SAID, ids, unit), 1e-9)
    same_text = CiderD({0: [["a", "b", "c", "d", "e"]], 1: [["x", "y"]]}).score([["a", "b", "c", "d", "e"]], [0])
    close(same_text, [10.])

@pytest.mark.parametrize("how", [dict(), dict(eos_in_reward=False), dict(df_unit="caption"),
                                 dict(eos_in_reward=False, df_unit="caption")])
@pytest.mark.parametrize("cider_reward", [cider_reward, plain_reward])
def test_a_reward_of_ids_counts_the_end(data, how, cider_reward):
    """D6: by default the reward counts EOS, and a document is an image; words of references outside the vocabulary get
    their own ids, never UNK."""
    eos, unit = how.get("eos_in_reward", True), how.get("df_unit", "image")
    vocab = Vocab(["a", "dog", "cat", "on", "the", "runs", "sits", "grass", "bed"])
    ids = [0, 1, 3]
    reward = cider_reward(data, ids, vocab, ScstConfig(**how)) if how else cider_reward(data, ids, vocab)
    said = ["a dog runs on the grass", "a cat sits", "a dog on the bed on the bed", "cat"]
    tokens = torch.full((5, 12), PAD)
    for row, text in zip(tokens, said): row[:len(text.split()) + 1] = torch.tensor([*vocab.encode(text.split()), EOS])
    tokens[4,:3] = torch.tensor([4, UNK, 5])                   # without an end; UNK matches no word of a reference
    end = ["<end>"]*eos
    refs = {i: [text.split() + end for text in data.captions[i]] for i in ids}
    words = [text.split() + end for text in said] + [["a", "<unk>", "dog"]]
    of = [1, 0, 3, 0, 1]
    close(reward(tokens, of), plain_cider(refs, words, of, unit), 1e-5)
    close(CiderReward({0: [[4, 5]], 1: [[6]]}, EOS)(torch.tensor([[4, 5, EOS, PAD]]), [0]),
          plain_cider({0: [[4, 5, EOS]], 1: [[6, EOS]]}, [[4, 5, EOS]], [0]), 1e-5)

def moved(before, after):
    "Return the largest change of each bias."
    return [(after[name] - before[name]).abs().max().item() for name in before if name.endswith("bias")]

def test_first_steps_have_the_papers_rate(data, tmp_path):
    "D5: Adam's first step equals the learning rate: d^-.5 · 10,000^-1.5 for cross-entropy, and 5e-6 for SCST."
    own = world({i: (texts, [(DOG, .9), (CAT, .4)]) for i, texts in enumerate((DOGS, CATS)*5)}, range(10))
    coco = PRESETS["coco"]
    fresh = build_captioner(own, TINY, 1).state_dict()
    xe = train_xe_in(tmp_path/"xe", own, TINY, replace(coco.xe, epochs=1), 1)
    assert read_json(tmp_path/"xe/done.json")["history"][-1]["step"] == 1     # 50 captions
    close(max(moved(fresh, xe.state_dict())), 16**-.5*10_000**-1.5, 1e-10)
    start = {name: x.clone() for name, x in xe.state_dict().items()}
    heard = []
    def reward(tokens, ids):
        heard.append((len(tokens), tokens.shape[1]))
        return torch.arange(len(tokens)) % 5.
    after = train_scst_in(tmp_path/"scst", own, xe, replace(coco.scst, epochs=1), reward=lambda *how: reward)
    assert [n for n, _ in heard[1:]] == [10*5]        # beams of 5, after the trial of the reward on three captions
    close(max(moved(start, after.state_dict())), 5e-6, 1e-7)

def test_batches_have_a_size_of_50(tmp_path):
    "Section 3.1: batches have 50 captions in cross-entropy, and 50 images with five beams each in SCST."
    own = world({i: (((DOGS, CATS)[i % 2])[:1], [(DOG, .9), (CAT, .4)]) for i in range(55)}, range(55))
    coco, heard = PRESETS["coco"], []
    def reward(tokens, ids):
        heard.append(len(tokens))
        return torch.zeros(len(tokens))
    model = train_xe_in(tmp_path/"xe", own, TINY, replace(coco.xe, epochs=1), 1)
    assert read_json(tmp_path/"xe/done.json")["history"][-1]["step"] == 2
    train_scst_in(tmp_path/"scst", own, model, replace(coco.scst, epochs=1, min_refs=1), reward=lambda *how: reward)
    assert sorted(heard[1:]) == [5*5, 50*5]                               # the first call is the trial of the reward

def test_a_training_is_identified_by_its_content(captioner, data, tmp_path):
    "D10: other words, vectors, weights or settings make another training; a finished training is only loaded if equal."
    train, scst = TrainConfig(epochs=1), ScstTrainConfig(epochs=1)
    start = train_xe_in(tmp_path/"xe", data, TINY, train, 1)
    again = train_xe_in(tmp_path/"xe", data, TINY, train, 1, True)
    assert all(torch.equal(p, q) for p, q in zip(start.parameters(), again.parameters()))
    before, how = copy.deepcopy(start), SearchConfig(k=2, max_len=4)
    done = train_scst_in(tmp_path/"scst", data, start, scst, search_cfg=how)
    other, text = small_world(), small_world()
    other.word_vectors["dog"] = other.word_vectors["dog"] + 1
    text.captions[0] = ["a", *text.captions[0][1:]]
    for args in ((other, TINY, train), (text, TINY, train), (data, replace(TINY, memory=3), train),
                 (data, TINY, replace(train, batch=49)), (data, TINY, train, 2)):
        with pytest.raises(NocError, match="expected no change since the run began, or another output"):
            train_xe_in(tmp_path/"xe", *args[:3], *args[3:] or (1,), True)
    cases = [((data, before), {}), ((other, before), dict(search_cfg=how)), ((data, captioner), dict(search_cfg=how)),
             ((data, before), dict(search_cfg=how, constrained=True)), ((data, before), dict(search_cfg=how, limit=4)),
             ((data, before), dict(search_cfg=how, reward=lambda *how: lambda tokens, ids: torch.zeros(len(tokens))))]
    for args, more in cases:
        with pytest.raises(NocError, match="expected no change since the run began, or another output"):
            train_scst_in(tmp_path/"scst", *args, scst, resume=True, **more)
    again = train_scst_in(tmp_path/"scst", data, before, scst, search_cfg=how, resume=True)
    assert all(torch.equal(p, q) for p, q in zip(done.parameters(), again.parameters()))

def test_adam_and_the_schedule_are_literal_step_by_step(data, tmp_path):
    "D5: twelve steps give the weights of a literal Adam with (.9, .98) and the rate d^-.5 · min(s^-.5, s · w^-1.5)."
    pairs = [(DOG, .9), (CAT, .4), (CAT, .3)]
    own = world({i: (texts, pairs) for i, texts in enumerate((DOGS, CATS, CATS)*20)}, range(60))
    cfg = SelectorConfig(d_model=8, heads=2, d_ff=8, layers=1, dropout=0.)
    train = TrainConfig(epochs=6, warmup=5, seed=4)
    found = train_selector_in(tmp_path/"run", own, cfg, train)
    torch.manual_seed(4)
    model, examples, s = RegionSelector(cfg), SelectorExamples(own), 0
    first, second = ([torch.zeros_like(p) for p in model.parameters()] for _ in "12")
    for epoch in range(6):
        for batch in Loader(examples, 50, 4)(epoch):
            s += 1
            rate = 8**-.5*min(s**-.5, s*5**-1.5)
            loss = selector_loss(model(batch.geometry, batch.labels), batch.targets, batch.labels, .2, .8)
            gradients = torch.autograd.grad(loss, [*model.parameters()])
            with torch.no_grad():
                for p, g, m, v in zip(model.parameters(), gradients, first, second):
                    m += (1 - .9)*(g - m)
                    v += (1 - .98)*(g*g - v)
                    p -= rate*(m/(1 - .9**s))/((v/(1 - .98**s)).sqrt() + 1e-9)
    assert s == 12
    for (name, p), q in zip(found.named_parameters(), model.parameters()):
        if not name.endswith("qkv.bias"): close(p.detach(), q.detach(), 1e-4)   # a key's bias has a gradient of noise

def test_the_scst_loss_is_as_computed_by_hand():
    "D6: the baseline is the mean reward of an image's finite hypotheses, and the loss is a mean over images."
    log_probs = torch.tensor([[-1., -2., -9.], [-3., -4., -5.]], requires_grad=True)
    rewards = torch.tensor([[1., 3., 50.], [0., 3., 6.]])
    valid = torch.tensor([[True, True, False], [True, True, True]])
    loss = scst_loss(log_probs, rewards, valid)
    close(loss.item(), (-((1 - 2)*-1 + (3 - 2)*-2)/2 - ((0 - 3)*-3 + 0 + (6 - 3)*-5)/3)/2, 1e-6)
    close(torch.autograd.grad(loss, log_probs)[0], [[.25, -.25, 0], [.5, 0, -.5]], 1e-6)

def test_dropout_is_off_in_the_search_and_on_in_the_scoring(loud, data):
    "D6: dropout is off in the search and on in the scoring pass."
    model = build_captioner(data, replace(TINY, dropout=.1), 1)
    with torch.no_grad():
        for p in model.parameters(): p += .3*torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    batch, kept = ImageExamples(data, [0]).__getitems__([0]), []
    def reward(tokens, ids):
        kept.append(tokens)
        return torch.tensor([1., 0.])
    loss, _ = SelfCritical(reward, None, partial(fast_search, cfg=SearchConfig(k=2, max_len=5)))(model, batch)
    calm = search(model.eval(), batch, [[]], SearchConfig(k=2, max_len=5))
    assert torch.equal(kept[0], calm.tokens[0])
    log_probs = []
    for row in kept[0].tolist():
        row = row[:row.index(PAD)] if PAD in row else row
        out = plain_captioner(model.state_dict(), batch.features[0], torch.tensor([BOS, *row[:-1]]), 1.1, 1, 2)
        log_probs.append(out.log_softmax(1)[range(len(row)), row].sum().item())
    close(loss.item(), -(.5*log_probs[0] - .5*log_probs[1])/2, 1e-4)

def test_scst_uses_images_and_constraints_of_the_references(tmp_path):
    "D6: SCST uses images with 5 references, and as constraints the first 5 detected classes that a reference mentions."
    many = [(PERSON, .99)] + [(BUS, .98 - .01*i) for i in range(12)] + [(CAT, .3), (DOG, .2), (HORSE, .1)]
    own = world({0: (["a man and a dog", "a puppy"] + CATS[:3], many), 1: (CATS[:4], many), 2: (DOGS, [(CAT, .9)])},
                range(3))
    vocab = build_vocab(own, 1)
    cat, dog = vocab.stoi["cat"], vocab.stoi["dog"]
    assert oracle_words(own, [0, 1, 2], vocab) == {0: [cat, dog], 1: [cat], 2: [cat]}
    assert oracle_words(own, [0], vocab, 1) == {0: [cat]}
    heard = []
    def reward(tokens, ids):
        heard.extend(ids)
        return torch.arange(len(tokens))*1.
    train_scst_in(tmp_path/"run", own, build_captioner(own, TINY, 1), ScstTrainConfig(epochs=1), True,
                  SearchConfig(k=2, max_len=6), reward=lambda *how: reward)
    assert {*heard} == {0, 2}
    pairs = [(c, .1*i) for i, c in enumerate(CLASSES)]
    six = world({0: (["a bicycle a bus a cat a dog a horse and a zebra"], pairs)})
    words = oracle_words(six, [0], build_vocab(six, 1))[0]
    assert [build_vocab(six, 1).tokens[w] for w in words] == ["zebra", "horse", "dog", "cat", "bus"]
    with pytest.warns(UserWarning, match="'dog' in 1 images"):   # D3: a missing word is reported
        assert oracle_words(own, [0], Vocab(["cat"])) == {0: [4]}

def greedy(model, data, ids, groups, kept=None):
    "Return the CIDEr-D of greedy captions in points, with these images' references."
    found = decode(model, Loader(ImageExamples(data, ids), shuffle=False), groups, SearchConfig(k=1))
    refs = {i: [text.split() for text in data.captions[i]] for i in ids}
    if kept is not None: kept += [found[i].caption for i in ids]
    return 100*np.mean(plain_cider(refs, [found[i].caption.split() for i in ids], ids))

def test_dgbs_prices_follow_mentions(data):
    "D7d: a price is w times the log-odds of a mention in a reference, after half a reference is added to each side."
    own = world({0: (["a dog", "a dog", "a dog", "a cat", "a horse and a dog"], [(CAT, .9), (DOG, .8), (HORSE, .7)])})
    vocab = build_vocab(own, 1)
    (word, price), = oracle_prices(own, [0], vocab, weight=2.)[0].items()
    assert word == vocab.stoi["dog"]                           # the price of the others is below 0: 1.5 of 6
    close(price, 2*math.log((4.5/6)/(1.5/6)), 1e-9)

def test_scst_checks_its_input(data, captioner, tmp_path):
    "SCST raises errors if no image has enough references, and if a reward has a wrong shape or is not finite."
    with pytest.raises(NocError, match="min_refs=6: no training image"):
        train_scst_in(tmp_path/"run", data, captioner, ScstTrainConfig(min_refs=6, epochs=1))
    batch = ImageExamples(data, [0, 1]).__getitems__([0, 1])
    two = partial(fast_search, cfg=SearchConfig(k=2, max_len=3))
    def loss(reward): return SelfCritical(reward, None, two)(captioner, batch)
    with pytest.raises(NocError, match="a tensor of 4 numbers"): loss(lambda tokens, ids: torch.zeros(3))
    with pytest.raises(NocError, match="a tensor of 4 numbers"): loss(lambda tokens, ids: [0.]*4)
    for bad in math.nan, math.inf:
        with pytest.raises(NocError, match="image 1: NaN or infinite"):
            loss(lambda tokens, ids: torch.tensor([0., 0., bad, 0.]))
    captioner.eval()

def test_the_number_of_living_captions_counts_only_finite_hypotheses(captioner, data):
    "D6: only finite hypotheses count: with three words in the vocabulary, a beam of 5 is not full."
    stoi = Vocab(captioner.tokens).stoi
    heard = []
    def reward(tokens, ids):
        heard.append((tokens, ids))
        return (tokens != PAD).sum(1)*1.
    batch = ImageExamples(data, [3]).__getitems__([0])
    words, three = {3: [stoi["dog"], stoi["cat"]]}, partial(fast_search, cfg=SearchConfig(k=5, max_len=3))
    _, numbers = SelfCritical(reward, words, three)(captioner, batch)
    (tokens, ids), = heard
    assert ids == [3]*5 and {tuple(row) for row in tokens.tolist()} == {
        (stoi["dog"], stoi["cat"], EOS), (stoi["cat"], stoi["dog"], EOS), (PAD, PAD, PAD)}
    assert numbers["reward"] == 3 and numbers["satisfied"] == 2
    captioner.eval()

def test_the_best_epoch_is_kept(data, tmp_path):
    "Training keeps the weights with the best score on val, stops after `patience` epochs, and loads a finished run."
    cfg, seen = SelectorConfig(d_model=8, heads=2, d_ff=8, layers=1, dropout=0.), []
    def loss(*args):
        seen.append(1)
        return selector_loss(*args)
    calm = world({i: ((DOGS, CATS)[i % 2], [(DOG, .6), (CAT, .5)]) for i in range(30)}, range(20), range(20, 30))
    train = TrainConfig(epochs=8, warmup=1, peak=.5, batch=7, patience=3)
    model = train_selector_in(tmp_path/"run", calm, cfg, train, loss=loss)
    done = read_json(tmp_path/"run/done.json")
    scores = [entry["score"] for entry in done["history"]]
    close(val_score(calm, cfg)(model)["score"], max(scores), 1e-6)
    best = scores.index(max(scores))
    assert done["best"] == max(scores) and done["epoch"] == best + 1 and len(scores) == min(8, best + 4)
    assert len(seen) == len(scores)*(3 + 1)                    # batches of 7, 7, 6; val
    seen.clear()                                               # a list that the loss uses
    again = train_selector_in(tmp_path/"run", calm, replace(cfg, threshold=.3), train, True, loss)
    assert not seen and again.cfg.threshold == .3 and model.cfg.threshold == .5
    for p, q in zip(again.parameters(), model.parameters()): assert torch.equal(p, q)
    with pytest.raises(NocError, match="exists"): train_selector_in(tmp_path/"run", calm, cfg, train, loss=loss)

def test_captions_that_end_in_function_words_are_counted():
    "Captions that end in a function word are counted in per cent; an empty caption is not counted."
    assert bad_endings(["a man with a", "a dog", "a dog on the grass", "", "cat is"]) == 40
    assert bad_endings([]) == bad_endings([""]) == 0

def test_val_is_judged_by_its_non_novel_images(captioner):
    "`val_cider` is the CIDEr-D of greedy captions of at most 500 non-novel val images."
    images = {i: ((DOGS, CATS)[i % 2], [((DOG, CAT)[i % 2], .5 + .0009*i)]) for i in range(502)}
    images |= {1000: (ZEBRAS, [(ZEBRA, .9)])}
    own = world(images, val=[1000, *range(502)])
    assert own.novel["val"]["zebra"] == {1000}
    for i in (500, 501): del own.captions[i]                   # reading these would fail
    found, decoded = val_cider(own)(captioner), []
    close(found["score"], greedy(captioner, own, [*range(500)], {}, decoded), 1e-3)
    close(found["words"], np.mean([len(text.split()) for text in decoded]), 1e-6)
    close(found["bad_endings"], bad_endings(decoded), 1e-6)
    assert val_cider(world({1: (ZEBRAS, [])}, val=[1])) is None

def test_dgbs_is_judged_with_the_oracles_constraints(captioner, data, tmp_path):
    "D6: DGBS training is scored on val by captions with the oracle's constraints, other training without constraints."
    stoi, weights = Vocab(captioner.tokens).stoi, captioner.state_dict()
    ids = [i for i in data.splits["val"] if i != 102]          # the zebra is novel
    musts = {100: [[(stoi["dog"],)]], 101: [[(stoi["cat"],)]], 103: [[(stoi["cat"],)]]}
    found = {}
    for constrained in False, True:
        model = build_captioner(data, TINY, 1)
        model.load_state_dict(weights)
        folder = tmp_path/str(constrained)
        how = dict(constrained=True) if constrained else {}
        how |= dict(search_cfg=SearchConfig(k=2, max_len=8))
        model = train_scst_in(folder, data, model, ScstTrainConfig(epochs=1), **how)
        found[constrained] = read_json(folder/"done.json")["best"]
        close(found[constrained], greedy(model, data, ids, musts if constrained else {}), 1e-3)
        assert abs(found[constrained] - greedy(model, data, ids, {} if constrained else musts)) > .05

# ---- scores (D7)

TRUE = {1: ["a zebra", "zebras run"], 2: ["a zebra", "grass", "grass"], 3: ["a bus"], 4: ["a road", "a road"],
        5: ["a road"], 6: ["two buses"]}                       # 1 and 2 are novel for the zebra, 3 and 6 for the bus
HEARD = {1: "Zebras!", 2: "a bus", 3: "a zebra and a bus", 4: "a zebra", 5: "a busy road", 6: "two buses"}
NOVEL = dict.fromkeys(COCO_HELDOUT.objects, set()) | dict(zebra={1, 2}, bus={3, 6})

@pytest.mark.parametrize("protocol, zebra, bus", [
    (dict(), (1, 2, 1), (1, 1, 0)),                            # FP of the zebra: 3 and 4; of the bus: 2
    (dict(fp="nonnovel"), (1, 1, 1), (1, 0, 0)),
    (dict(weight="caption"), (2, 3, 3), (1, 3, 0)),            # 1 has two references, 2 three, 4 two
    (dict(weight="caption", fp="nonnovel"), (2, 2, 3), (1, 0, 0)),
    (dict(fp_weight=4.85), (1, 1 + 4.85, 1), (1, 1, 0)),
    (dict(fp_weight=0, fp="nonnovel"), (1, 0, 1), (1, 0, 0)),
    (dict(words="extended"), (1, 2, 1), (2, 1, 0)),            # `buses` is in this list alone
])
def test_f1_is_as_computed_by_hand(protocol, zebra, bus):
    "D7: F1 equals hand-computed values for both kinds of false positives and both weights, as a mean and pooled."
    row = judge(HEARD, TRUE, [1, 2, 3, 4, 5, 6, 6], NOVEL, metrics=(), **protocol).row()
    def f1(tp, fp, fn): return 100*2*tp/(2*tp + fp + fn)
    for o, cells in dict(zebra=zebra, bus=bus).items():
        close([row["counts"]["found"][o][k] for k in ("tp", "fp", "fn")], cells)
        close(row["f1"][o], f1(*cells))
    close(row["out_macro"]["F1"], (f1(*zebra) + f1(*bus))/2)
    close(row["out_pooled"]["F1"], f1(*np.add(zebra, bus)))
    assert (row["counts"]["images"], row["counts"]["in"], row["counts"]["out"]) == (6, 2, 4)
    assert row["counts"]["novel"]["bus"] == 2 and row["f1"]["pizza"] == 0
    assert row["protocol"]["cider_df"] == "6 evaluated images"
    expected = dict(words="dcc", weight="image", fp="other", fp_weight=1.) | protocol
    assert {k: row["protocol"][k] for k in expected} == expected

def test_f1_is_0_where_nothing_is_right():
    "D7: F1 is 0 without a true positive, also if no caption mentions the word, and the mean includes it."
    row = judge(dict.fromkeys(TRUE, "a bus"), TRUE, TRUE, NOVEL, metrics=()).row()
    assert row["f1"]["zebra"] == 0 and row["f1"]["bus"] == 100*2/(2 + 5)
    close(row["out_macro"]["F1"], 100/7)
    for novel in NOVEL, dict.fromkeys(NOVEL, set()):           # and without a novel image
        row = judge(dict.fromkeys(TRUE, "a dog"), TRUE, TRUE, novel, metrics=()).row()
        found = selection_f1(dict.fromkeys(TRUE, ()), TRUE, TRUE, novel)
        assert {*row["f1"].values(), *found.values(), row["out_macro"]["F1"], row["out_pooled"]["F1"]} == {0.}
        assert "mean" in found
    for captions, refs, ids, match in ((HEARD, {1: ["x"]}, [1, 2], "image 2"), ({1: "x"}, TRUE, [1, 2], "image 2"),
                                       (HEARD | {1: 7}, TRUE, [1], "image 1"), (HEARD, {1: "x"}, [1], "image 1")):
        with pytest.raises(NocError, match=match): judge(captions, refs, ids, NOVEL, metrics=())
    with pytest.raises(NocError, match="object 'zebra'"):
        judge(HEARD, TRUE, TRUE, {o: x for o, x in NOVEL.items() if o != "zebra"}, metrics=())
    for wrong in dict(words="none"), dict(weight="x"), dict(fp="x"), dict(fp_weight=-1.):
        with pytest.raises(NocError): judge(HEARD, TRUE, TRUE, NOVEL, metrics=(), **wrong)
    scorer = CaptionScorer({1: ["a"]}, ())
    with pytest.raises(NocError, match="prepared for 1 images"): judge(HEARD, TRUE, TRUE, NOVEL, scorer=scorer)
    with pytest.raises(NocError, match="metrics: 'X'"): CaptionScorer({1: ["a"]}, ("X",))

def test_selection_f1_is_as_computed_by_hand():
    "F1 of chosen classes equals hand-computed values; a class counts by its id and not by a word."
    chosen = {1: [ZEBRA, DOG], 2: [BUS], 3: [ZEBRA, BUS], 4: [ZEBRA], 5: [], 6: [BUS]}
    found = selection_f1(chosen, TRUE, TRUE, NOVEL)
    close([found["zebra"], found["bus"]], [100*2/(2 + 2 + 1), 100*2/(2 + 2)])  # image 6 has no word: BUS is wrong
    close(found["mean"], (found["zebra"] + found["bus"])/2)
    assert found["pizza"] == 0 and len(found) == 9
    close(selection_f1(chosen, TRUE, TRUE, NOVEL, fp_weight=3.)["zebra"], 100*2/(2 + 4 + 1))
    with pytest.raises(NocError, match="image 6: missing"):
        selection_f1({i: chosen[i] for i in (1, 2, 3, 4, 5)}, TRUE, TRUE, NOVEL)
    for ids in [1, 2], [4, 5]:
        with pytest.raises(NocError, match="images of both kinds"): nonnovel_weight(ids, NOVEL)
    close(nonnovel_weight([1, 2, 4, 4], NOVEL, (9, 2)), 9/2*2/1)

JUDGED = {1: "a zebra stands on the grass", 2: "two zebras", 3: "a bus on the road", 4: "a road a road a road",
          5: "a road", 6: "two buses on the grass"}
LONGER = {1: ZEBRAS, 2: ZEBRAS[:2], 3: ["a bus on a road", "a bus drives on the road today"],
          4: ["a road", "road to a road"], 5: ["a long road", "road"], 6: ["two buses on the road"]}
SETS = {"all": [1, 2, 3, 4, 5, 6], "in": [4, 5], "out_pooled": [1, 2, 3, 6], "zebra": [1, 2], "bus": [3, 6]}

def test_caption_scores_equal_pycocoevalcaps():
    "D7: BLEU, ROUGE-L and CIDEr-D equal pycocoevalcap's for each image and for sets, macro and pooled."
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    def theirs(ids):
        gts, res = {i: LONGER[i] for i in ids}, {i: [JUDGED[i]] for i in ids}
        return 100*np.array([*Bleu(4).compute_score(gts, res, verbose=0)[0], Rouge().compute_score(gts, res)[0]])
    cider = 100*Cider().compute_score(LONGER, {i: [c] for i, c in JUDGED.items()})[1]
    judged = judge(JUDGED, LONGER, LONGER, NOVEL, metrics=("C", "B4", "R"))
    once, row = judged.once(), judged.row()
    own = {}
    for name, ids in SETS.items():
        own[name] = np.append(theirs(ids), np.mean([cider[[*LONGER].index(i)] for i in ids]))
        if name in once: close([once[name][m] for m in ("B1", "B2", "B3", "B4", "R", "C")], own[name], 1e-7)
        close([*caption_scores(JUDGED, LONGER, ids).values()], own[name][[-1, 3, 4]], 1e-9)
    assert [*domains(JUDGED, NOVEL)] == [SETS["in"], SETS["out_pooled"]]
    macro = (own["zebra"] + own["bus"])/2
    close([once["out_macro"][m] for m in ("B1", "B2", "B3", "B4", "R", "C")], macro, 1e-7)
    close([row["out_macro"][m] for m in ("B4", "R", "C")], macro[3:], 1e-7)
    close(row["in"]["C"], own["in"][-1], 1e-7)
    assert row["in"]["M"] is None and "F1" not in row["in"]
    refs = {i: [text.split() for text in texts] for i, texts in LONGER.items()}
    close(plain_cider(refs, [c.split() for c in JUDGED.values()], JUDGED), cider/100, 1e-9)
    scorer = CaptionScorer(LONGER, ("C", "B4", "R"))
    for i, each in zip(LONGER, np.array(points(scorer.numbers(JUDGED))["B4"])): close(each, theirs([i])[3], 1e-7)
    with pytest.raises(NocError, match="captions: image 6: missing"): scorer.numbers({i: "x" for i in (1, 2, 3, 4, 5)})

def test_unequal_captions_are_scored_as_by_hand():
    "Hand-computed cases: BLEU's closest length (of two, the shorter), ROUGE-L's β of 1.2, and empty captions."
    scorer = CaptionScorer({1: ["a b c d e f", "a b"], 2: ["x y z"], 3: ["x"]}, ("B4", "R"))
    numbers = scorer.numbers({1: "a b q r", 2: "x z", 3: ""})
    assert numbers["B4"][0].tolist() == [2, 1, 0, 0, 4, 3, 2, 1, 4, 2]
    assert numbers["B4"][2].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    close(numbers["R"][:,0], [(1 + 1.44)*(2/4)*(2/2)/(2/2 + 1.44*2/4), (1 + 1.44)*1*(2/3)/(2/3 + 1.44), 0])
    found = points(numbers, np.array([[1., 0, 0], [2., 1, 0], [0, 0, 0]]))
    close(found["R"][1], 100*(2*numbers["R"][0,0] + numbers["R"][1,0])/3)
    assert np.isnan(found["R"][2]) and np.isnan(found["B1"][2])
    close(found["B1"][0], 100*2/4, 1e-6)
    close(found["B2"][1], 100*math.sqrt((6/10)*(2/7))*math.exp(0), 1e-6)

def plain_meteor(x):
    "Return METEOR 1.5 by its formula, from matches by kind, and content and function words of caption and reference."
    test, ref, test_function, ref_function = x[:4]
    sides = []
    for side, (length, function) in enumerate(((test, test_function), (ref, ref_function))):
        weighted = .75*(length - function) + .25*function
        kinds = enumerate((1., .6, .8, .6))
        matched = sum(w*(.75*x[4 + 4*kind + side] + .25*x[6 + 4*kind + side]) for kind, w in kinds)
        sides.append(matched/weighted)
    precision, recall = sides
    mean = 1/(.15/precision + .85/recall)
    return mean*(1 - .6*(x[20]/((x[21] + x[22])/2))**.2)

def test_meteor_is_as_computed_by_hand():
    x = [9, 11, 4, 5, *range(1, 17), 3, 7, 8]
    close(meteor(np.array(x, float)), plain_meteor(x), 1e-12)
    close(meteor(np.array([x, [0]*23], float)), [plain_meteor(x), 0], 1e-12)

def test_intervals_come_from_bootstrap_samples_of_images():
    "The first value is the score of all images, the others are of bootstrap samples; intervals contain 95 % of them."
    judged = judge(JUDGED, LONGER, LONGER, NOVEL, metrics=("R",))
    drawn, again = judged.bootstrap(250), judged.bootstrap(250)
    rng, each = np.random.default_rng(0), judged.numbers["R"][:,0]
    expected = [each.mean(), *(each[rng.integers(6, size=6)].mean() for _ in range(250))]
    close(drawn["all", "R"], 100*np.array(expected), 1e-9)
    assert all(np.array_equal(drawn[k], again[k], equal_nan=True) for k in drawn)
    low, high = interval(drawn["all", "R"])
    close([low, high], np.percentile(drawn["all", "R"][1:], [2.5, 97.5]), 1e-9)
    assert judged.bootstrap(0)["all", "R"].shape == (1,) and not np.array_equal(judged.bootstrap(250, 1)["all", "R"],
                                                                                 drawn["all", "R"])
    assert judged.once()["f1"]["pizza"] is None and judged.once()["f1"]["zebra"] == 100

def test_common_ngrams_are_clipped():
    "Common n-grams are clipped by the reference that has most of them."
    cider = CiderD({1: [["a", "a", "b"], ["a", "b", "b"]], 2: [["c"]]})
    shared, lengths = cider.common([["a", "a", "a", "b"], ["a", "c"]], [1, 2])
    assert shared.tolist() == [[3, 2, 1, 0], [1, 0, 0, 0]] and lengths.tolist() == [4, 2]

def test_cider_checks_its_input():
    refs = {1: [["a"]]}
    with pytest.raises(NocError, match="no references"): CiderD({})
    for wrong in [], "a b", ["a b"]:
        with pytest.raises(NocError, match="image 1"): CiderD({1: wrong})
    with pytest.raises(NocError, match="df='x'"): CiderD(refs, "x")
    with pytest.raises(NocError, match="image 2: no references"): CiderD(refs).score([["a"]], [2])
    with pytest.raises(NocError, match="2 captions"): CiderD(refs).score([["a"], ["b"]], [1])
    with pytest.raises(NocError, match="caption 1"): CiderD(refs).score([["a"], "b"], [1, 1])
    with pytest.raises(NocError, match="65,536 different words"): CiderD({1: [[str(i) for i in range(65_536)]]})
    CiderD({1: [[str(i) for i in range(65_535)]]})
    with pytest.raises(NocError, match="token 'a'"): CiderReward(refs, EOS)
    for wrong in -1, 65_535:
        with pytest.raises(NocError, match=f"token {wrong}.*an id from 0 to 65,534"): CiderReward({1: [[wrong]]}, EOS)
    assert CiderReward({0: [[0, 65_534, 9]], 1: [[7]]}, EOS)(torch.tensor([[65_534, 9, EOS]]), [0]) > 0
    reward = CiderReward({1: [[4]], 2: [[65_534]]}, EOS, dtype=torch.float64)
    found = reward(torch.tensor([[65_534, EOS]]), [2])
    assert found.tolist() == [5.] and found.dtype == torch.float64
    for tokens in torch.tensor([[-1]]), torch.tensor([[65_535]]), torch.tensor([4]), [[4]], torch.tensor([[4], [5]]):
        with pytest.raises(NocError, match="CIDEr-D: "): reward(tokens, [1])

# ---- the tables

def log_prob(model, data, i, caption):
    "Return the log-probability of a caption and its end, from one pass."
    x, mask = data.region_features(model.cfg.max_regions)([i])
    tokens = torch.tensor([[BOS, *Vocab(model.tokens).encode(caption.split()), EOS]])
    out = model(x, mask, tokens[:,:-1]).log_softmax(-1)[0]
    return out.gather(1, tokens[0,1:,None]).sum().item()

def test_averaged_words_are_used_only_under_constraints(data, tmp_path):
    "Rows with constraints use neighbour-averaged embeddings; the row without constraints uses the trained captioner."
    run = Run(replace(PRESETS["coco"], borrow=2, search=SearchConfig(k=2, max_len=8)), part="val")
    own = Experiment(run, data, tmp_path/"run", metrics=("C",))
    own.models.captioner, own.models.selector = lambda training: captioner, lambda *about: ByScore()
    unit = {c: data.word_vectors[o.word]/np.linalg.norm(data.word_vectors[o.word]) for c, o in CLASSES.items()}
    seen = {c for c in (CAT, DOG)}                             # no training caption has the other words
    def nearest(c): return sorted(seen, key=lambda other: -unit[c] @ unit[other])
    near = {CLASSES[c].word: [CLASSES[n].word for n in nearest(c)] for c in CLASSES.keys() - seen}
    captioner = build_captioner(data, TINY, 1).eval()
    for word in near: captioner.words.frozen[Vocab(captioner.tokens).stoi[word]] *= 3   # so that they have an effect
    averaged = average_neighbours(captioner, near)
    for row in "none", "top1", "selector", "oracle", "score", "cbs":
        model, other = (captioner, averaged) if row == "none" else (averaged, captioner)
        for i, d in own.captions(row, "xe").items():
            if d.reason: continue
            close(d.score, log_prob(model, data, i, d.caption), 1e-4)
            assert abs(d.score - log_prob(other, data, i, d.caption)) > 1e-3

@pytest.mark.parametrize("dogs, nearest", [(3, "cat"), (4, "dog")])
def test_neighbours_are_mentioned_often_enough(dogs, nearest):
    "A class is a neighbour if at least a thousandth of the training captions mention it, here 4 of 4,000."
    texts = [["a", "dog"]]*dogs + [["a", "cat"]]*(4000 - dogs)
    vectors = dict(dog=np.array([1., .1]), cat=np.array([0., 1.]), zebra=np.array([1., 0.]))
    classes = {c: CLASSES[c] for c in (DOG, CAT, ZEBRA)}
    data = SimpleNamespace(splits=dict(train=[1]), tokens={1: texts}, classes=classes, dropped=(), vectors=vectors)
    assert _nearest_neighbours(data, 1) == {"zebra": [nearest]}

def test_the_cbs_row_requires_two_of_three(captioner, data, tmp_path):
    "The row CBS requires two of the three best classes, in any form, and uses the machine."
    images = {1: (CATS, [(CAT, .9), (DOG, .8), (HORSE, .7), (BUS, .6)])}
    own = world({0: (DOGS, []), 1: (CATS, images[1][1])}, train=[0], val=[1])
    run = Run(replace(PRESETS["coco"], search=SearchConfig(k=2, max_len=6)), part="val")
    table = Experiment(run, own, tmp_path/"run", metrics=("C",))
    table.models.captioner, stoi = lambda training: captioner, Vocab(captioner.tokens).stoi
    forms = [[tuple(stoi[w] for w in form.split()) for form in CLASSES[c].forms] for c in (CAT, DOG, HORSE)]
    x, mask = own.region_features()([1])
    how = dict(bos=BOS, eos=EOS, k=2, max_len=6, forbidden=(PAD, BOS, UNK), mode="cbs")
    out = grid_beam_search(captioner.step, captioner.start(x, mask), [forms], at_least=2, **how)
    found = table.captions("cbs", "xe")[1]
    assert found.caption == Vocab(captioner.tokens).decode(out.tokens[0,0]) and found.wanted == 3
    assert found.satisfied == out.satisfied[0,0] >= 2

def test_rows_of_a_run_follow_from_the_captions(captioner, data, tmp_path):
    "D7, D7c: a row's scores are those computed by hand; on test, scorings are logged and false positives count once."
    for part in "val", "test":
        folder = tmp_path/part
        run = Run(replace(PRESETS["coco"], search=SearchConfig(k=2, max_len=8)), part=part, command="noc x", seed=7)
        own = Experiment(run, data, folder, metrics=("C",))
        own.models.captioner, own.models.selector = lambda training: captioner, lambda *about: ByScore()
        rows = own.complete([("none", "xe", None), ("score", "xe", None), ("oracle", "xe", None)])
        assert [row["row"] for row in rows] == ["none", "score", "oracle"] and (folder/"rows.jsonl").exists()
        assert own.complete([("none", "xe", None)]) == rows                 # no row is computed twice
        log = folder/"test_log.jsonl"
        assert log.exists() == (part == "test")
        if part == "test": assert len(log.read_text().splitlines()) == 3
        refs = {i: [text.split() for text in data.captions[i]] for i in data.splits[part]}
        for row in rows:
            said = own.captions(row["row"], "xe")
            each = dict(zip(said, plain_cider(refs, [d.caption.split() for d in said.values()], said)))
            zebra, = (i for i in refs if i % 4 == 2)
            close(row["metrics"]["out_macro"]["C"], 100*each.pop(zebra), 1e-4)
            close(row["metrics"]["in"]["C"], 100*np.mean([*each.values()]), 1e-4)
            weight = 17_234/3_018*1/3 if part == "val" else 1
            says = {i for i, d in said.items() if {"zebra", "zebras"} & {*d.caption.split()}}
            tp, fp = len(says & {zebra}), weight*len(says - {zebra})
            close(row["metrics"]["f1"]["zebra"], 100*2*tp/(2*tp + fp + 1 - tp), 1e-6)
            close(row["protocol"]["fp_weight"], weight, 1e-9)
            assert row["split"] == part and row["table"] == "main" and row["command"] == "noc x"
            assert row["seed"]["captioner"] == 7 and row["metrics"]["selection_f1"]["zebra"] == (
                0 if row["row"] == "none" else 100)
        assert rows[1]["config"]["threshold"] == .2            # all up to .8 are equally good on this val

def test_the_choice_of_classes_is_weighted_in_a_row(tmp_path):
    "D7c: in the F1 of chosen classes in a row, a false positive of val has its weight, not only when choosing."
    own, preset = val_of_thresholds(), replace(PRESETS["coco"], selector=SelectorConfig(threshold=.4))
    run = Experiment(Run(preset, part="val"), own, tmp_path/"run", metrics=())
    run.models.selector = lambda *about: ByScore()
    row, = run.complete([], [("selector", .2)])                # four zebras are right, a fifth is not
    close(row["metrics"]["selection_f1"]["zebra"], 100*8/(8 + 17_234/3_018), 1e-6)

def test_a_difference_is_ours_minus_the_papers():
    "In a table, Δ is positive where our mean over seeds is the higher one."
    rows = [dict(table="main", row="selector", training="cider_dgbs", lambda0=.2, seed=seed,
                 metrics=dict(out_macro=dict(F1=f1))) for seed, f1 in enumerate((77., 78.2))]
    head, lines = PaperTable(rows, 3).view()
    column, last = head.index("out F1"), [line[1] for line in lines].index("Δ")
    assert [line[column] for line in lines[last-2:last+1]] == ["75.1", "77.6 ±0.8", "+2.5"]

def test_an_interval_over_runs_has_the_variance_of_images():
    "With runs that agree, the interval is that of the images; else the variances add up, and it is wider than either."
    images, deltas = [1.2, 2.8], [1., 2., 3.]
    close(over_runs(images, [2., 2., 2.])["interval"], images, 1e-3)
    def half(sure, deltas): return np.ptp(over_runs(sure, deltas)["interval"])/2
    both, runs = half(images, deltas), half([0, 0], deltas)
    variance, freedom = (.8/1.96)**2 + 1/3, ((.8/1.96)**2 + 1/3)**2/((1/3)**2/2)
    t = {2: 4.30265, 4: 2.77645, 5: 2.57058}                   # Student's t, 97.5 %, from a table
    close(runs, t[2]/3**.5, 1e-3)
    assert 4 < freedom < 5 and t[5]*variance**.5 < both < t[4]*variance**.5

@pytest.mark.parametrize("seeds, paired", [((0, 1, 2), True), ((0, 1, 3), False), ((None,)*3, False)])
def test_runs_with_the_same_seeds_are_compared_in_pairs(seeds, paired):
    "`noc_eval --runs` pairs the runs of two systems if they have the same seeds, and only then."
    scores = {"a": [70., 80., 90.], "b": [71., 81.5, 91.]}
    drawn = {name: [x + np.random.default_rng(0).normal(0, .1, 101) for x in found] for name, found in scores.items()}
    def runs(name, seeds):
        judged = [SimpleNamespace(bootstrap=lambda samples, x=x: {("in", "C"): x}) for x in drawn[name]]
        return [_Run("", SimpleNamespace(judged=one), (), (name,), [name], seed) for one, seed in zip(judged, seeds)]
    known = (0, 1, 2) if seeds[0] is not None else seeds
    systems = dict(a=runs("a", known), b=runs("b", seeds))
    x, = _differences(systems, [("a", "b")], [("in", "C")], 100).values()
    assert x["interval"] == gap(*map(np.array, (drawn["a"], drawn["b"])), paired)["interval"]
    assert (np.ptp(x["interval"]) < 2) == paired               # the runs differ by 10, the pairs by .3

@pytest.mark.parametrize("patience", [1, 3])
def test_training_stops_after_patience_evaluations_without_a_gain(data, tmp_path, patience):
    "Both loops stop after as many equal or lower scores in a row, and keep the epoch before them."
    train, model = TrainConfig(epochs=9, batch=7, patience=patience), RegionSelector(SelectorConfig(d_model=8, heads=1))
    batches, scores = Loader(SelectorExamples(data), 7), [1, 3, 2, 4, 4, 4, 3, 5, 6]
    def loss(model, batch): return sum(p.sum() for p in model.parameters()), {}
    def evaluate(model):
        seen.append(len(seen))
        return dict(score=scores[seen[-1]])
    expected = {1: 3, 3: 7}[patience]
    for loop in partial(plain_fit, show=id), lambda *args: Trainer(*args[:2], args[3], tmp_path).fit(args[2], args[4]):
        seen = []
        loop(model, loss, batches, train, evaluate)
        assert len(seen) == expected
    assert read_json(tmp_path/"done.json")["epoch"] == {1: 2, 3: 4}[patience]

def test_self_critical_training_is_constrained_unless_free(captioner, data, tmp_path, monkeypatch):
    "`noc_train scst` searches with the oracle's words, and with --free without constraints."
    heard = []
    def train(out, data, captioner, cfg, constrained, *more):
        heard.append(constrained)
        raise NocError("heard")
    monkeypatch.setattr(reproduce, "train_scst_in", train)
    monkeypatch.setattr(reproduce, "_load_own", lambda *_: data)
    monkeypatch.chdir(tmp_path)
    save_model(captioner, "start")
    for typed in [], ["--free"]:
        monkeypatch.setattr("sys.argv", ["noc_train", "scst", "--out", "run", "--start", "start", *typed])
        with pytest.raises(SystemExit): main()
    assert heard == [True, False]

@pytest.mark.parametrize("kept", range(11))
def test_captions_continue_after_the_last_whole_group(tmp_path, monkeypatch, kept):
    "A resumed `noc_caption` makes the lines of all images after the last whole group of a batch, and no other, once."
    source = _from_table(table_of(Regions([[0, 0, 1, 1]], [DOG], [.9], image_id=i, size=(9, 9)) for i in range(10)))
    toy, options, made = NovelCaptioner.from_pretrained("toy", device="cpu"), CaptionOptions(batch=3), []
    def lines(run, ids):
        if made is None: raise KeyboardInterrupt
        made.append([*ids])
        return [dict(image_id=i, caption=f"image {i}") for i in ids]
    monkeypatch.setattr(gallery.CaptionRun, "lines", lines)
    whole = gallery._caption_all(toy, source, tmp_path/"whole", options).read_bytes()
    texts, out, made = whole.splitlines(keepends=True), tmp_path/"out", None
    with pytest.raises(KeyboardInterrupt): gallery._caption_all(toy, source, out, options)
    begun = b"".join(texts[:kept])
    (tmp_path/".out.part").write_bytes(begun + b'{"image_id": 1')                 # killed in the middle of a line
    made = []
    assert gallery._caption_all(toy, source, out, options, resume=True).read_bytes() == whole
    assert sum(made, []) == [*range(10 if kept == 10 else kept//3*3, 10)]

def test_no_run_resumes_with_other_inputs_or_settings(data, tmp_path):
    "D10: an existing output is refused without `resume`, and also with it if an input or a setting differs."
    run = Run(PRESETS["toy"], part="val")
    Experiment(run, data, tmp_path/"run")
    with pytest.raises(NocError, match="exists"): Experiment(run, data, tmp_path/"run")
    Experiment(run, data, tmp_path/"run", resume=True)
    for other in replace(run, seed=1), replace(run, part="test"), replace(run, preset=replace(run.preset, limit=4)), \
            replace(run, variant="x"), replace(run, detections="gt"):
        with pytest.raises(NocError, match="expected no change since the run began, or another output"):
            Experiment(other, data, tmp_path/"run", resume=True)
    file, about = tmp_path/"run/run.json", read_json(tmp_path/"run/run.json")
    older = {k: x for k, x in about["preset"].items() if k != "borrow"}     # as before this setting existed
    file.write_text(json.dumps(about | dict(preset=older)))
    with pytest.raises(NocError, match="preset.borrow: 0 in the record, 2 now"):
        Experiment(replace(run, preset=replace(run.preset, borrow=2)), data, tmp_path/"run", resume=True)
    Experiment(run, data, tmp_path/"run", resume=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    Experiment(run, data, tmp_path/"run", resume=True)         # the number of threads is not recorded
    torch.set_num_threads(threads)
    own = contents(data, seen=True)
    assert contents(small_world(), seen=True) == own
    other = small_world()
    other.regions.scores[0] += .01
    text, word = small_world(), small_world()
    text.captions[0] = ["a", *text.captions[0][1:]]
    word.word_vectors["dog"] = word.word_vectors["dog"] + 1
    changed = dict(regions=other, captions=text, vectors=word, splits=world(
        {i: (data.captions[i], []) for i in data.captions}, range(11), range(100, 104), range(104, 108)),
        classes=replace(small_world(), classes=COCO_CLASSES),
        heldout=replace(small_world(), heldout=replace(COCO_HELDOUT, f1={"dcc": COCO_HELDOUT.removal})))
    for name, new in changed.items():
        assert contents(new, seen=True)[name] != own[name], name
        with pytest.raises(NocError, match="expected no change since the run began, or another output"):
            Experiment(run, new, tmp_path/"run", resume=True)

def test_the_split_has_the_published_counts(coco):
    "D8: the split has the published numbers of images, and `lite` counts a false positive 4.85 times."
    split = read_json(coco/"splits/split_noc_coco.json")
    assert [len(split[k]) for k in ("train", "val", "test", "val_train", "test_train")] == [70_194, 3_018, 3_024,
                                                                                            20_252, 20_252]
    lite = read_json(coco/"splits/lite.json")
    assert (len(lite["val"]), len(lite["novel_val"])) == (1777, 816)
    close(nonnovel_weight(lite["val"], {"all": {*lite["novel_val"]}}), (17_234/3_018)/(961/816), 1e-12)
    assert (20_252 - 3_018, 3_018) == (17_234, 3_018)

# ---- tests of mutants from `tests/mutants.py` that no other test detected

LAST, FIRST = 0, 3

def test_a_vocabulary_of_another_size_is_named(tmp_path):
    "If a captioner's vocabulary and weights differ in size, the error names the file and both numbers."
    cfg = CaptionerConfig(d_feature=2, d_word=4, d_model=4, heads=1, d_ff=4, layers=1, memory=1)
    model = Captioner(cfg, ["a", "dog", "runs"])
    save_model(model, tmp_path)
    for wrong in model.tokens[:-1], [*model.tokens, "fast"]:
        _save_vocab(tmp_path/"vocab.json", Vocab(wrong))
        with pytest.raises(NocError, match=f"vocab.json: {len(wrong)} words: expected {len(model.tokens)} as in"):
            load_model(tmp_path)

@pytest.mark.parametrize("n, v", [(2, 40_009), (900, 40), (20, 1980), (70, 500)])
def test_next_words_are_those_of_a_sorted_row(n, v):
    "The next words equal those of a sorted row, in blocks or not, with ties, and with more hypotheses than words."
    scores = torch.randn(n, v, generator=torch.Generator().manual_seed(v)).double()
    scores[1:] = scores[1:].mul(2).round()
    end, best, words = next_words(scores, torch.full((n, 1), LAST), 7, torch.tensor([2, 3]), torch.arange(n), 0)
    for row, of in enumerate(scores.tolist()):
        order = sorted((w for w in range(v) if w not in (LAST, 2, 3)), key=lambda w: (-of[w], w))[:7]
        assert words[row].tolist() == order and best[row].tolist() == [of[w] for w in order]
    assert torch.equal(end[:,0], scores[:,LAST])

def test_an_image_that_cannot_end_is_captioned_among_others():
    "D3: at the last step finished captions are kept; for an image that cannot end, the best caption is returned."
    chances = torch.tensor([[[1/3]*3, [.1, .5, .4], [.1, .4, .5], [0, .6, .4]],
                            [[1/3]*3, [0, .6, .4], [0, .5, .5], [0, .6, .4]]]).log()
    def step(tokens, image): return chances[image, tokens], image
    out = beam_search(step, torch.tensor([0, 1, 0]), bos=FIRST, eos=LAST, k=2, max_len=2)
    assert out.tokens.tolist() == [[[1, LAST], [2, LAST]], [[1, 1], [1, 2]], [[1, LAST], [2, LAST]]]
    assert out.reason == [None, "no end within 2 tokens", None]
    assert out.ended.tolist() == [[True]*2, [False]*2, [True]*2]

def test_logits_are_normalised():
    "With `normalize`, logits give the same captions as log-probabilities, and -inf still forbids a word."
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).double()
    logits[:,4] = -torch.inf
    def find(table, **kw):
        return grid_beam_search(lambda tokens, state: (table[tokens], state), torch.zeros(1, 1), [[[(2,)]]], bos=FIRST,
                                eos=LAST, k=3, max_len=4, **kw)
    plain, own = find(logits.log_softmax(1)), find(logits, normalize=True)
    assert torch.equal(plain.tokens, own.tokens) and not (own.tokens == 4).any()
    torch.testing.assert_close(plain.scores, own.scores)

def test_the_table_of_sets_lists_what_each_may_still_take():
    "The table of sets of groups has the right rows, ends and remaining tokens, also with `at_least`."
    read = read_groups([[[(2, 3)], [(4,)], [(5, 6, 7), (8, 9)]], [[(2,)]]], LAST)
    groups, done = pack_groups(read, at_least=[2, None]), torch.tensor([[*range(8)], [0, 1]*4])
    for i, (sizes, need) in enumerate((([2, 1, 2], 2), ([1], 1))):
        for j, bits in enumerate(done[i].tolist()):
            said = [g for g in range(len(sizes)) if bits >> g & 1]
            assert groups.row(done)[i,j] == min(len(said), need)
            assert groups.at_top(done)[i,j] == groups.may_end(done)[i,j] == (len(said) >= need)
            left = sum(size for g, size in enumerate(sizes) if g not in said)
            assert groups.takes(done)[i,j] == (0 if len(said) >= need else left)
    assert torch.equal(groups.takes(done.view(2, 2, 4)), groups.takes(done).view(2, 2, 4))

def test_a_new_word_is_not_a_known_one():
    "CIDEr-D treats a word that no reference has as a separate word, also next to the references' last word."
    known, new, two = CiderD({0: [["a", "b"]], 1: [["c", "d"]]}).score([["c", "d"], ["c", "x"], ["x", "y"]], [1, 1, 1])
    assert known == pytest.approx(5) and new == pytest.approx(10/4/2) and two == 0

def test_a_selector_sees_at_least_one_region():
    with pytest.raises(NocError, match="max_regions"): _from_dict(SelectorConfig, dict(max_regions=0))
    assert SelectorConfig(max_regions=1).max_regions == 1

@pytest.mark.parametrize("name", ["lite", "toy"])
def test_presets_are_those_of_committed_rows(name):
    "Each number of a preset is that of the last row without a variant."
    rows = [r for r in read_rows(ROOT/f"results/{name}.jsonl") if r["row"] == "none" and not r.get("variant")]
    config, own = rows[-1]["config"] | dict(selector_seeds=[]), json.loads(json.dumps(asdict(PRESETS[name])))
    for key, now in own.items():
        then = config.get(key, now)                            # older rows lack later settings
        if isinstance(now, dict): then = {name: then.get(name, x) for name, x in now.items()}
        assert then == now, key
    assert config.keys() > {"captioner", "selector", "xe", "scst"}

def test_new_words_are_a_share_of_all_words():
    sums = np.zeros(21)
    sums[[0, 1, 12]] = 2, 8, 2                                 # two captions of eight words, of which two are new
    assert quality_scores(sums)["new words"] == 25

def test_a_spice_of_nothing_is_0(monkeypatch, tmp_path):
    "SPICE's program has no F-score for a caption without a proposition, which counts as 0."
    def start(command, **_):
        found = [dict(image_id=n, scores=dict(All=dict(f=f))) for n, f in enumerate((None, .5, 0.))]
        Path(command[command.index("-out") + 1]).write_text(json.dumps(found))
        return SimpleNamespace(wait=lambda: 0)
    monkeypatch.setattr(java, "_start_guarded", start)
    monkeypatch.setattr(java, "_time_limit", lambda *_: nullcontext())
    monkeypatch.setattr(java, "_end", lambda _: None)
    spice = java._Spice.__new__(java._Spice)
    spice.folder, spice.keeps, spice.seconds, spice.java, spice.heap = tmp_path, False, 9, "java", "-Xmx9m"
    assert spice._run([{}]*3) == [0., .5, 0.]

def test_no_caption_takes_two_places_in_a_beam():
    "A text whose phrase of two words is forced, and the same text where it is absorbed, are one hypothesis."
    for seed, absorb in itertools.product(range(8), (True, False)):
        step, fresh, _ = language(6, seed)
        out = grid_beam_search(step, fresh(1), [[[(2, 3)], [(4,)]]], bos=START, eos=END, k=3, max_len=5, absorb=absorb)
        assert len({y for y, _ in captions(out)}) == 3

def test_a_mention_is_the_longest_form_around_its_word():
    "A longer form counts if it has the word, also at the start of a caption, and not if it begins behind the word."
    for text, span, whole in ("fire hydrant red", (0, 1), (0, 2)), ("a big dog hot dog", (2, 3), (2, 3)), \
            ("a hot dog", (2, 3), (1, 3)):
        assert _whole_mention(text.split(), span, ["fire hydrant", "hot dog"]) == whole

def test_a_name_takes_the_place_of_three_words():
    "A class's name replaces its words and the article before them, and later spans move."
    words, spans = _with_names("by a red fire truck , dogs sit".split(), {3: (2, 5), 8: (6, 7)}, {3: "lorries"})
    assert words == "by lorries , dogs sit".split() and spans == {3: (1, 2), 8: (3, 4)}
