"""Count the right and wrong words of musts, prices, and prices with a floor; train a selector on what words gain.

    python benchmarks/selecting.py --selectors lite --settings musts:.6,prices:1,prices:2,floor:2:.9
    python benchmarks/selecting.py --selectors usual,gains --seeds 0,1,2 --settings musts:.6,prices:2

The captions are those of the preset's captioner in the package, on `val`. The settings:

    musts:.6        classes that the selector rates at .6 or more are musts
    prices:2        every class from .1 has a price: w = 2, β = 5
    floor:2:.9      the same prices, but a class rated at .9 or more is a must
    floor:2:.6:8    the same prices, but a class rated at .6 or more has a price of at least 8 nats

The selectors: `lite` is the package's; `usual` is trained with the paper's loss; in the loss of `gains` a region has
the weight of what its class does to the caption (`_gains`). The words of a row are compared with those of the first
setting and the first selector with the same seed. Rows are appended to results/mix/selecting.jsonl; chapter 70 shows
them."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from advice import _told_apart
from noc_nb.commands.command import one_thread, script
from noc_nb.constraints import constraint_tokens
from noc_nb.core import require
from noc_nb.data import ImageExamples, Loader, SelectorExamples
from noc_nb.fast.cider import CiderD
from noc_nb.fast.decode import decode
from noc_nb.fast.prices import PriceConfig
from noc_nb.files.dataset import load_data
from noc_nb.heldout import mentioned
from noc_nb.lab.disk import find_data, read_json, write_json
from noc_nb.lab.experiment import Choices, Experiment
from noc_nb.lab.models import PRESETS, Models, Run, train_selector_in
from noc_nb.lab.novelty import interval, judge
from noc_nb.lab.progress import progress, say
from noc_nb.lab.results import append_row
from noc_nb.models.pipeline import NovelCaptioner, pipeline_folder
from noc_nb.selector import selector_loss
from noc_nb.train_selector import selector_scores
from noc_nb.vocab import Vocab

# ---- Settings
_LINE = "selector", "cider_dgbs", .2    # row, training, λ0

def _best(selector, data, ids):
    "Return image id -> {class id: highest probability of its regions}."
    def best(labels, probs): return {c: p for p, c in sorted(zip(probs.tolist(), labels.tolist()))}
    return {i: best(*scores) for i, scores in selector_scores(selector, data, ids).items()}

class _Floored(Choices):
    "Choices in which a class that is rated at `floor` or more has a price of at least `least`."
    floor, least = None, None
    def candidates(self, row, lambda0=.2, seeds=(0,)):
        "Raise the prices of the classes above the floor."
        found = super().candidates(row, lambda0, seeds)
        if self.floor == math.inf: return found
        rated = _best(self.models.selector(seed=seeds[0]), self.data, self.ids)
        def raised(i):
            above = {c: max(self.least, found[i].get(c, -math.inf)) for c, p in rated[i].items() if p >= self.floor}
            best = sorted((found[i] | above).items(), key=lambda item: -item[1])
            return dict(best[:self.preset.limit])
        return {i: raised(i) for i in found}

def _preset(name, text, seed):
    "Return the preset of a setting; its floor, and the least price above the floor."
    base = replace(PRESETS[name], borrow=2, selector_seeds=(seed,))
    kind, *numbers = text.split(":")
    sizes = dict(musts=(1,), prices=(1,), floor=(2, 3))
    require(len(numbers) in sizes.get(kind, ()), f"setting {text!r}",
            "musts:THRESHOLD, prices:W, floor:W:FLOOR or floor:W:FLOOR:NATS")
    first, *rest = map(float, numbers)
    above = rest + [math.inf]*(2 - len(rest))
    if kind == "musts": return replace(base, selector=replace(base.selector, threshold=first)), above
    return replace(base, prices=PriceConfig(weight=first)), above

# ---- A selector that learns what a word gains
# The gain of a class is the CIDEr-D of the caption with the class minus that of the caption without it. If the free
# caption names the class, it is the caption with it, and the other one avoids all forms of the class. If not, the free
# caption is the one without the class, and the other one must say its word.
def _gains(captioner, data, search, examples):
    "Return the gain of each class among the regions of each image: image id -> {class id: gain}."
    whole, vocab = examples.whole, Vocab(captioner.tokens)
    features = data.region_features(captioner.cfg.max_regions)
    cider = CiderD({i: data.tokens[i] for i in whole.image_ids})
    seen = {i: {*row[row >= 0].tolist()} for i, row in zip(whole.image_ids, whole.labels)}
    def captions(ids, groups=None, avoid=()):
        batches = Loader(ImageExamples(data, ids, features), 100, shuffle=False)
        found = decode(captioner, batches, groups, search, avoid=avoid) if ids else {}
        return {i: d.caption for i, d in found.items()}
    def scores(texts):
        return dict(zip(texts, cider.score([text.split() for text in texts.values()], [*texts])))
    free = captions(whole.image_ids)
    plain, gains = scores(free), {i: {} for i in seen}
    said = {i: mentioned([text], data.classes) for i, text in free.items()}
    for c in progress(sorted(set().union(*seen.values())), "classes"):
        word, forms = (constraint_tokens([c], data.classes, vocab, form)[0].get(c, [])
                       for form in ("words", "forms"))
        named, other = ([i for i in seen if c in seen[i] and (c in said[i]) == yes]
                        for yes in (True, False))
        group = [word] if word else []
        avoided, forced = captions(named, avoid=forms), captions(other, dict.fromkeys(other, group))
        for i, score in scores(avoided).items(): gains[i][c] = plain[i] - score
        for i, score in scores(forced).items(): gains[i][c] = score - plain[i]
    return gains

def gain_loss(logits, targets, labels, lambda0=None, lambda1=None):
    """Return the cross-entropy of the sign of each region's gain (its target), weighted with the size of the gain and
    averaged over real regions. The weights of the paper's loss are not used."""
    real = labels >= 0
    logits, gains = logits.masked_fill(~real, 0.), targets.masked_fill(~real, 0.)
    sign = (gains > 0).to(logits.dtype)
    loss = binary_cross_entropy_with_logits(logits, sign, gains.abs(), reduction="sum")
    return loss / real.sum().clamp(min=1)

class _Selectors(Models):
    "The package's captioner, and selectors with their own examples."
    examples = None
    def captioner(self, training):
        "Return the captioner of the preset's pipeline."
        return NovelCaptioner.from_pretrained(self.run.preset.data).captioner.float()
    def selector(self, inner=True, lambda0=.2, seed=0):
        "Return a trained selector, read from its folder or trained now."
        preset, folder = self.run.preset, self.folder/f"{self.parts.loss.__name__}-{seed}"
        train = replace(preset.train_selector, seed=seed)
        return train_selector_in(folder, self.data, preset.selector, train, True, self.parts.loss, self.examples)

def _with_gains(preset, data, runs):
    "Return training examples whose targets are gains; these are read from a file or computed now."
    file, cfg = Path(runs)/"gains.json", preset.selector
    examples = SelectorExamples(data, "train", max_regions=cfg.max_regions)
    if not file.exists():
        models = _Selectors(Run(replace(preset, borrow=2)), data, runs)
        found = _gains(models.averaged(models.captioner(None)), data, preset.search, examples)
        write_json(file, [[i, *pair] for i, own in found.items() for pair in own.items()])
    gains = {(i, c): gain for i, c, gain in read_json(file)}
    whole = examples.whole
    rows = [[gains.get((i, c), 0.) for c in row] for i, row in zip(whole.image_ids, whole.labels.tolist())]
    examples.whole = whole._replace(targets=torch.tensor(rows))
    return examples

# ---- Words
# A column of a table is a held-out object, as in F1, or another class. A word is right if the references of the image
# mention it. Words are compared with those that other captions say, and with all classes among the selector's regions.
class _Words:
    "Tables (N,K), True where the captions, or the detections, name a column."
    def __init__(self, experiment):
        self.e, data, self.ids = experiment, experiment.data, list(experiment.ids)
        blank = self._judged(dict.fromkeys(self.ids, ""))
        self.objects, self.held = blank.objects, [data.heldout.objects[o] for o in blank.objects]
        self.known = sorted(data.classes.keys() - data.dropped - {*self.held})
        self.kinds = dict(novel=slice(len(self.held)), known=slice(len(self.held), None))
        detected = SelectorExamples(data, self.ids, 0, experiment.run.preset.selector.max_regions).whole
        self.detected = self._table([{*row} for row in detected.labels.tolist()], self.held + self.known)
        refs = self._table([data.mentioned(i) for i in self.ids], self.known)
        self.truth = np.hstack([blank.cells.any(-1), refs])
        novel = set().union(*experiment.novel.values())
        self.weight = np.array([1. if i in novel else experiment.fp_weight for i in self.ids])
        n = len(self.ids)
        self.draws = np.random.default_rng(0).multinomial(n, np.full(n, 1/n), 1000)

    def _table(self, rows, columns): return np.array([[c in row for c in columns] for row in rows])

    def _judged(self, captions):
        data = self.e.data
        return judge(captions, data.captions, self.ids, self.e.novel, data.heldout, scorer=self.e._scorer)

    def said(self, decoded):
        "Return the table of what captions name."
        captions = {i: d.caption for i, d in decoded.items()}
        own = [mentioned([captions[i]], self.e.data.classes) for i in self.ids]
        return np.hstack([self._judged(captions).cells[...,:2].any(-1), self._table(own, self.known)])

    def _share(self, part, whole, weight):
        "Return a share in per cent, with its interval over images."
        sums = [np.concatenate([[x.sum()], self.draws @ x]) for x in (part*weight, whole*weight)]
        with np.errstate(invalid="ignore"): drawn = 100*np.divide(*sums)
        return [None if math.isnan(x) else round(x, 1) for x in (float(drawn[0]), *interval(drawn))]

    def _side(self, own, base, hit):
        "Count the words of `base` that are hit, their images, and the words of the captions."
        of, found = base.sum(1), hit.sum(1)
        whole = (of > 0) & (found == of)
        return dict(of=int(of.sum()), hit=int(found.sum()), said=int(own.sum()), images=int((of > 0).sum()),
                    whole=int(whole.sum()), share=self._share(found, of, 1.),
                    natural=self._share(found, of, self.weight))

    def compared(self, own, base):
        """Count, for held-out and for other words, how many right ones of `base` the captions keep, and how many
        wrong ones they leave out."""
        kinds = {}
        for kind, at in self.kinds.items():
            said, other, truth = own[:,at], base[:,at], self.truth[:,at]
            right, wrong = other & truth, other & ~truth
            kinds[kind] = dict(right=self._side(said & truth, right, right & said),
                               wrong=self._side(said & ~truth, wrong, wrong & ~said))
        return kinds

    def by_object(self, own, base):
        "Return, for each held-out object, how many right words of `base` there are and how many are kept."
        right = (base & self.truth)[:,self.kinds["novel"]]
        kept = right & own[:,self.kinds["novel"]]
        pairs = zip(right.sum(0).tolist(), kept.sum(0).tolist())
        return {o: dict(of=of, hit=hit) for o, (of, hit) in zip(self.objects, pairs)}

    def ranking(self, selector):
        """Return, for held-out and for other words, what a limit on the probability keeps of the right detections if
        it excludes 90 or 95 % of the wrong ones."""
        rated = _best(selector, self.e.data, self.ids)
        rows = np.array([[rated[i].get(c, 0.) for c in self.held + self.known] for i in self.ids])
        def split(at):
            seen, truth = self.detected[:,at], self.truth[:,at]
            return _told_apart(*(-rows[:,at][seen & right] for right in (truth, ~truth)))
        return {kind: split(at) for kind, at in self.kinds.items()}

# ---- Rows
_LOSSES = dict(lite=selector_loss, usual=selector_loss, gains=gain_loss)

def _experiment(preset, above, data, folder, selector, **about):
    "Return the experiment of one row."
    class Kind(Experiment): kind = Models if selector == "lite" else _Selectors
    models = pipeline_folder(preset.data) if selector == "lite" else folder.parent
    found = Kind(Run(preset, part="val", **about), data, folder, folder.exists(), ("C",), models,
                 loss=_LOSSES[selector])
    found.choices = _Floored(found.run, data, found.models)
    found.choices.floor, found.choices.least = above
    return found

def bench_selecting(
    preset:str="lite",    # preset, and the package's pipeline of the same name
    data:str=None,        # folder in COCO's layout (default: the variable NOC_DATA)
    selectors:str="lite", # some of lite, usual, gains
    seeds:str="0",        # seeds of the selectors
    settings:str="musts:.6,prices:2", # settings, as above
    runs:str="_runs/selecting", # folder of the models, and of a run for each row
    out:str="results/mix/selecting.jsonl", # rows are appended here
):
    "Caption `val` with each selector and setting, and count right and wrong words."
    one_thread()
    names = selectors.split(",")
    require(_LOSSES.keys() >= {*names}, f"--selectors {selectors}", f"some of {', '.join(_LOSSES)}")
    command = f"benchmarks/selecting.py --preset {preset} --selectors {selectors} --seeds {seeds} --settings {settings}"
    source = load_data(data or find_data(), PRESETS[preset].split)
    gains = _with_gains(PRESETS[preset], source, runs) if "gains" in names else None
    for seed in map(int, seeds.split(",")):
        first = None
        for selector, setting in product(names, settings.split(",")):
            cfg, above = _preset(preset, setting, seed)
            name = f"{selector} {seed} {setting}"
            e = _experiment(cfg, above, source, Path(runs)/name.replace(" ", "-").replace(":", "-"), selector,
                            variant=name, command=command)
            if selector == "gains": e.models.examples = gains
            row, words = e.complete([_LINE])[-1], _Words(e)
            own = words.said(e.captions(*_LINE))
            first = own if first is None else first
            counts = dict(first=words.compared(own, first), objects=words.by_object(own, first),
                          detected=words.compared(own, words.detected))
            ranking = words.ranking(e.models.selector(seed=seed))
            append_row(out, row | dict(setting=setting, selector=selector, words=counts, ranking=ranking))
            say(f"{name}: {row['metrics']['in']['C']:.1f} {row['metrics']['out_macro']['C']:.1f} "
                f"{row['metrics']['out_macro']['F1']:.1f}, {counts['first']['novel']}")

if __name__ == "__main__": script(bench_selecting)
