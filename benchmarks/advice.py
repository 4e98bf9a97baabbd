"""Measure how musts, prices and a threshold deal with advice: words to mention, of which some are wrong.

    python benchmarks/advice.py advice --task lm      # or --task lite: rows in results/words_advice.jsonl
    python benchmarks/advice.py surprise --task lm    # results/words_surprise.jsonl
    python benchmarks/advice.py musts                 # results/words_musts.jsonl

Right words are in a reference. Wrong words are in no reference, but are of the same kind and about as frequent. In
mixed advice each word is right or wrong by chance. Task lm: CommonGen's held-out sets and the language model of
words.py, which reads the right words. Task lite: val images and the package's pipeline. Advice can be followed in
three ways: must; price:2.0, a price of 2 nats per word; or under:2.0, where a word is a must if it alone would cost
the sentence less than 2 nats. Chapters 73 and 74 show the rows."""

import random, re, sys
from collections import Counter
from dataclasses import asdict

from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from claims import write_variants
from words import (_BATCH, _lines, _measures, _regular, _says, _scorer, _Set,
                                _with_interval, _words_of, _WordsRun)
from noc_nb.commands.cli import noc_reproduce
from noc_nb.commands.command import one_thread, script
from noc_nb.core import require
from noc_nb.files.dataset import load_data
from noc_nb.heldout import mentioned
from noc_nb.lab.progress import progress, say
from noc_nb.lab.results import append_row, new_row, read_rows, write_rows
from noc_nb.models.pipeline import NovelCaptioner

# ---- Two tasks
# A task has sets with references, pairs of a right and a wrong word for each set, and a model that generates sentences
# with given words, as musts or at a price. A word is a list of forms, or a class.
def _by_kind(train):
    "Return each concept's kind (verb or not), and the concepts of a kind, most frequent first."
    seen, counts = _words_of(train), Counter(w for line in train for w in line["concepts"])
    def verb(word): return any(form.endswith("ing") and form in seen for form in _regular(word))
    kinds = {word: verb(word) for word in counts}
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    def of(kind): return [w for w in ranked if kinds[w] == kind]
    return kinds, {kind: of(kind) for kind in (True, False)}

def _stranger(word, one, kinds, ranked, rng):
    "Choose a concept of a word's kind and similar frequency that is in no reference."
    others = ranked[kinds[word]]
    place = others.index(word)
    near = sorted(range(len(others)), key=lambda i: abs(i - place))[:60]
    def fits(w): return not any(_says(s, _regular(w)) for s in [*one.references, *one.concepts])
    return rng.choice([others[i] for i in near if fits(others[i])][:20])

class _Sentences:
    "The task lm: CommonGen's held-out sets and a language model."
    def __init__(self, o):
        run, rng = _WordsRun(o), random.Random(0)
        self.speaker, self.sets, self.config = run.speaker, run.sets, asdict(run.cfg)
        kinds, ranked = _by_kind(_lines(run.data, "train"))
        self.right = [one.forms for one in self.sets]
        def strange(word, one):
            other = _stranger(word, one, kinds, ranked, rng)
            return sorted(_regular(other) & run.read | {other})
        def strangers(one): return [strange(word, one) for word in one.concepts]
        self.wrong = list(map(strangers, self.sets))

    def say(self, places, words, price=None):
        "Generate sentences with words for some of the sets; return them with log-probabilities."
        sets = [self.sets[i]._replace(forms=list(w)) for i, w in zip(places, words)]
        rows = self.speaker._search(sets, "bank", 5, *[] if price is None else [price])
        return zip(map(self.speaker._text, rows), self.speaker._log_prob(sets, rows))

    def forms(self, word): return word

class _Captions:
    "The task lite: `val` images and a pipeline."
    def __init__(self, o):
        data, rng, self.config = load_data(), random.Random(0), dict(pipeline=o.model)
        self.pipeline = NovelCaptioner.from_pretrained(o.model)
        classes = {i: c for i, c in data.classes.items() if i not in self.pipeline.people}
        said = {i: mentioned(data.captions[i], classes) for i in data.splits["val"]}
        ids = rng.sample([i for i in data.splits["val"] if said[i]], o.sets)
        self.images = [data.regions[i] for i in ids]
        counts, known = Counter(c for found in said.values() for c in found), sorted(classes)
        self.right, self.wrong = [sorted(said[i]) for i in ids], []
        for i in ids:
            others = [c for c in known if c not in said[i]]
            self.wrong.append([])
            while len(self.wrong[-1]) < len(said[i]):
                new, = rng.choices(others, [counts[c] for c in others])
                if new not in self.wrong[-1]: self.wrong[-1].append(new)
        self.sets = [_Set([], list(map(self.forms, found)), data.captions[i])
                     for i, found in zip(ids, self.right)]

    def say(self, places, words, price=None):
        "Caption some of the images with classes; return captions with log-probabilities."
        groups = [list(map(self.pipeline._group, found)) for found in words]
        worth = [[np.inf if price is None else price]*len(found) for found in groups]
        found = self.pipeline._search([self.images[i] for i in places], groups, worth)
        return [(one.caption, one.score) for one in found]

    def forms(self, word): return self.pipeline.classes[word].forms

# ---- Costs, and ways to follow advice
# The cost of a word is the log-probability that the sentence loses if this word is the only must. With a threshold, a
# word is used if it costs less. A search with prices weighs all words at once, and needs no extra search for costs.
def _say(task, places, words, price=None):
    "Generate sentences with words and log-probabilities, in batches of sets."
    out = []
    for n in range(0, len(places), _BATCH):
        out += task.say(places[n:n+_BATCH], words[n:n+_BATCH], price)
    return out

def _costs(task, words):
    "Return the cost in nats of each word alone, a list for every set."
    plain = [score for _, score in _say(task, range(len(words)), [[]]*len(words))]
    places = [i for i, row in enumerate(words) for _ in row]
    alone = _say(task, places, [[word] for row in words for word in row])
    cost = iter([plain[i] - score for i, (_, score) in zip(places, alone)])
    return [list(islice(cost, len(row))) for row in words]

def _advice(task, costs, kind):
    "Draw advice of a kind: for each set (word, cost, True if right)."
    share, rng, out = dict(right=1, half=.5, wrong=0, none=0)[kind], random.Random(1), []
    for right, wrong, good, bad in zip(task.right, task.wrong, *costs):
        coins = [rng.random() < share for _ in right]
        both = zip(coins, zip(right, good), zip(wrong, bad))
        out.append([(*(a if coin else b), coin) for coin, a, b in both if kind != "none"])
    return out

def _follow(task, advice, way):
    "Follow advice in one of the ways; return texts and log-probabilities."
    name, _, size = way.partition(":")
    known = re.fullmatch(r"must|(price|under):\d+(\.\d+)?", way)
    require(known, f"way {way!r}", "must, price:2.0 or under:2.0")
    limit = float(size) if name == "under" else np.inf
    def used(row): return [word for word, cost, _ in row if cost < limit]
    price = float(size) if name == "price" else None
    return _say(task, range(len(advice)), list(map(used, advice)), price)

# ---- Rows
# A row has the shares of the advised right and wrong words that the sentences mention, CIDEr-D, and the difference from
# CIDEr-D without advice, with bootstrap intervals over sets.
def _share(task, texts, advice, good):
    "Return the percentage of right or wrong advised words that are mentioned; None without words."
    said = [_says(text, task.forms(word)) for text, row in zip(texts, advice)
            for word, _, right in row if right == good]
    return 100*sum(said)/len(said) if said else None

def _quantiles(costs):
    flat = [cost for row in costs for cost in row]
    return [round(float(x), 2) for x in np.quantile(flat, [.05, .1, .25, .5, .75, .9, .95])]

def _advised(task, costs, ways):
    "Yield kind, way and metrics of every kind of advice; the first is no advice."
    advice = {kind: _advice(task, costs, kind) for kind in ("right", "half", "wrong", "none")}
    with _scorer(task.sets, ["C"]) as scorer:
        plain = None
        for kind, way in progress([("none", "must"), *product([*advice][:3], ways)], "advice"):
            texts, scores = zip(*_follow(task, advice[kind], way))
            asked = ("right", "wrong") if kind == "none" else (kind, kind)
            right, wrong = (_share(task, texts, advice[some], good)
                            for some, good in zip(asked, (True, False)))
            tokens = [len(text.split()) + 1 for text in texts]
            found = dict(texts=texts, tokens=tokens, log_prob=scores)
            cider = _measures(found, task.sets, scorer)["C"]
            plain = cider if plain is None else plain
            yield kind, way, dict(right=right, wrong=wrong, C=_with_interval(cider),
                                  change=_with_interval(cider - plain))

_WAYS = ("must", "price:1.0", "price:2.0", "price:3.0", "price:4.0", "price:6.0", "price:8.0",
         "under:1.0", "under:2.0", "under:4.0", "under:6.0")

def bench_advice(
    task:str="lite",  # lite: captions of images; lm: sentences with concepts
    model:str="lite", # pipeline for task lite
    sets:int=200,     # number of images or sets of concepts
    seed:int=0,       # seed of the language model
    ways:list=None,   # ways to follow advice (default: must, and several prices and limits)
    out:str="results/words_advice.jsonl", # rows are appended here
    runs:str="_runs/words", # folder of language models
):
    "Give right, wrong and mixed advice, and append a row for each way to follow it."
    _advice_rows(_task(task, model, sets, seed, runs), ways or _WAYS, out, _keys(task, model, sets, seed))

def _task(task, model, sets, seed, runs):
    "Build one of the two tasks. Raise `NocError` if the name is unknown."
    one_thread()
    o = SimpleNamespace(**locals(), part="held", peer=None, set=None)
    made = dict(lite=_Captions, lm=_Sentences)
    require(task in made, f"task {task!r}", "lite or lm")
    return made[task](o)

def _keys(task, model, sets, seed):
    which = dict(model=model) if task == "lite" else dict(seed=seed)
    return dict(task=task, **which, sets=sets)

def _advice_rows(task, ways, out, keys):
    "Append the rows of a task."
    costs = [_costs(task, words) for words in progress((task.right, task.wrong), "costs")]
    quantiles = dict(zip(("right", "wrong"), map(_quantiles, costs)))
    for kind, way, metrics in _advised(task, costs, ways):
        append_row(out, new_row("bench", "advice", **keys, kind=kind, way=way, metrics=metrics,
                                costs=quantiles, config=task.config, command=_command(keys)))
        say(f"{kind}, {way}: {metrics}")

def _command(keys, name="advice"):
    return " ".join([f"benchmarks/advice.py {name}", *(f"--{key} {value}" for key, value in keys.items())])

# Does a word cost more in a set than in other sets? Its *surprise* is its mean cost in other sets, whose references do
# not mention it. Right words are separated from wrong ones by a limit on the cost, on the cost minus the surprise, or
# on the cost divided by the surprise. The limit excludes 90 or 95 % of the wrong words.
def _surprises(task, n):
    "Return word (as text) -> its mean cost in n sets that do not mention it."
    rng, words = random.Random(2), {f"{w}": w for row in task.right + task.wrong for w in row}
    def strange(i, word):
        said = any(_says(s, task.forms(word)) for s in task.sets[i].references)
        return not said and word not in task.wrong[i]
    pairs = []
    for key, word in words.items():
        others = [i for i in range(len(task.sets)) if strange(i, word)]
        pairs += [(key, i) for i in rng.sample(others, min(n, len(others)))]
    plain = [score for _, score in _say(task, range(len(task.sets)), [[]]*len(task.sets))]
    keys, places = zip(*pairs)
    asked = _say(task, places, [[words[key]] for key in keys])
    costs = {key: [] for key in words}
    for key, i, (_, score) in zip(keys, places, asked): costs[key].append(plain[i] - score)
    return {key: float(np.mean(own)) for key, own in costs.items()}

def _told_apart(right, wrong):
    "Return share of excluded wrong words -> the limit and the percentage of right words kept."
    limits = {left: float(np.quantile(wrong, 1 - left/100)) for left in (90, 95)}
    return {left: dict(limit=limit, kept=100*float(np.mean(right < limit)))
            for left, limit in limits.items()}

def bench_surprise(
    task:str="lite",  # lite: captions of images; lm: sentences with concepts
    model:str="lite", # pipeline for task lite
    sets:int=300,     # number of images or sets of concepts
    seed:int=0,       # seed of the language model
    n:int=20,         # number of other sets for a word's surprise
    out:str="results/words_surprise.jsonl", # a row is appended here
    runs:str="_runs/words", # folder of language models
):
    "Measure how well limits on a word's cost, with or without its surprise, separate words."
    keys, asked = _keys(task, model, sets, seed), _task(task, model, sets, seed, runs)
    append_row(out, _surprise_row(asked, keys | dict(n=n)))

def _surprise_row(task, keys):
    "Build a result row."
    words = task.right, task.wrong
    costs, surprise = [_costs(task, some) for some in words], _surprises(task, keys["n"])
    def flat(rows): return np.array([x for row in rows for x in row])
    def elsewhere(rows): return np.array([surprise[f"{w}"] for row in rows for w in row])
    pairs = list(zip(map(flat, costs), map(elsewhere, words)))
    def apart(f): return _told_apart(*(f(*pair) for pair in pairs))
    kinds = dict(cost=lambda cost, _: cost, above=np.subtract, share=np.divide)
    return new_row("bench", "surprise", **keys, config=task.config,
                   metrics={name: apart(f) for name, f in kinds.items()},
                   command=_command(keys, "surprise"))

# ---- Which search for musts?
# The musts are the selector's choices, or right words (the oracle's). All images of `val` are captioned with both by
# several searches, and each search is compared with the plain bank, whose rows take turns, by `write_variants`.
_SEARCHES = dict(turns="mode=bank", credit="mode=credit", ten="mode=bank search.k=10",
                 grid="mode=grid")

def bench_musts(
    preset:str="lite",  # preset, and the package's pipeline of the same name
    data:str=None,      # folder in COCO's layout (default: the variable NOC_DATA)
    runs:str="_runs/musts", # folder with a run for each search
    out:str="results/words_musts.jsonl", # rows are written here
):
    "Caption `val` images with musts by several searches, and write rows."
    one_thread()
    folders = [Path(runs)/name for name in _SEARCHES]
    for folder, search in zip(folders, _SEARCHES.values()):
        changes = ["borrow=2", "selector.threshold=0.6", *f"search.{search}".split()]
        noc_reproduce(preset, data, out=str(folder), tables="1", rows="selector,oracle",
                      training="cider_dgbs", metrics="C", set=changes, resume=folder.exists(),
                      part="val", variant=folder.name, models=preset)
    deltas = write_variants(Path(runs)/"deltas.jsonl", folders[0], folders[1:], data)
    beside = {(r["line"], r["variant"]): r["metrics"] for r in deltas}
    kept = "variant", "data", "split", "seed", "metrics", "counts", "config", "seconds"
    def musts(r):
        about = {key: r[key] for key in kept}
        return new_row("bench", "musts", line=r["row"], beside=beside.get((r["row"], r["variant"])),
                       command="benchmarks/advice.py musts", **about)
    write_rows(out, [musts(r) for folder in folders
                     for r in read_rows(folder/"rows.jsonl", training="cider_dgbs")])

if __name__ == "__main__":
    tasks = dict(advice=bench_advice, surprise=bench_surprise, musts=bench_musts)
    name = sys.argv.pop(1) if sys.argv[1:] else ""
    if name not in tasks: sys.exit(f"benchmarks/advice.py {name}: expected one of {', '.join(tasks)}")
    script(tasks[name])
