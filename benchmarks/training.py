"""How fast a training step is: one of cross-entropy and one of self-critical training, phase by phase.

    python benchmarks/training.py                 # the paper's sizes, random regions and references; no data needed
    python benchmarks/training.py --reward        # the reward beside pycocoevalcap, on captions of NOC_DATA
    python benchmarks/training.py --run FOLDER    # the curves of a finished run, as rows

Rows are appended to results/bench_train.jsonl; chapter 65 shows them. The training loop does not compile: captions
differ in length, and a new length may be compiled anew. --compiled times it beside the plain step."""

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
from pycocoevalcap.cider.cider import Cider
from torch.nn.utils.rnn import pad_sequence

from search import clock
from noc_nb.captioner import Captioner
from noc_nb.cider import CiderD, CiderReward
from noc_nb.commands.command import script
from noc_nb.core import default_device, require, set_seed
from noc_nb.data import CaptionBatch
from noc_nb.encoder import CaptionerConfig
from noc_nb.fast.decode import search
from noc_nb.fast.search import SearchConfig
from noc_nb.files.readers import read_captions
from noc_nb.lab.config import Config, check_range, override, setting
from noc_nb.lab.disk import find_data, read_json
from noc_nb.lab.progress import progress
from noc_nb.lab.results import append_row, new_row
from noc_nb.lab.runs import locked
from noc_nb.scst import SelfCritical, caption_log_probs, scst_loss
from noc_nb.train_xe import xe_loss
from noc_nb.vocab import BOS, EOS, PAD, SPECIALS, tokenize

# ---- What is timed
# The defaults are the paper's sizes, 50 regions an image, ten thousand words, and five references for each of a
# thousand images.
@dataclass(frozen=True)
class BenchConfig(Config):
    "What a timed step is made of."
    images:int = setting(10, 1)       # of a self-critical step
    captions:int = setting(50, 1)     # of a cross-entropy step
    words:int = setting(10_000, 5)    # of the vocabulary
    length:int = setting(11, 1)       # words of a reference, EOS not counted
    references:int = setting(5, 1)    # of an image
    known:int = 1000                  # images that references are prepared for
    repeats:int = setting(3, 1)       # timed steps; one more goes before them
    seed:int = 0                      # of everything random
    captioner:CaptionerConfig = CaptionerConfig()
    search:SearchConfig = SearchConfig()

def _captioner(cfg):
    "A fresh captioner whose words have known vectors, as a trained one's."
    set_seed(cfg.seed)
    tokens = [*SPECIALS, *(f"w{i}" for i in range(cfg.words - len(SPECIALS)))]
    table = torch.randn(cfg.words, cfg.captioner.d_word)
    known = torch.arange(cfg.words) > 3
    return Captioner(cfg.captioner, tokens, table, known).to(default_device())

def _batch(cfg, rows):
    "Random regions and captions of so many images."
    g, n = torch.Generator().manual_seed(cfg.seed), cfg.captioner.max_regions
    words = torch.randint(4, cfg.words, (rows, cfg.length), generator=g)
    edge = torch.ones(rows, 1, dtype=torch.long)
    tokens = torch.cat([edge*BOS, words, edge*EOS], 1)
    features = torch.randn(rows, n, cfg.captioner.d_feature, generator=g)
    mask = torch.ones(rows, n, dtype=torch.bool)
    return CaptionBatch(features, mask, tokens, list(range(rows))).to(default_device())

# ---- A stopwatch
# A GPU works behind the back of the program that feeds it, so the clock of search.py waits for it.
# `torch.utils.benchmark` times whole statements; the watch takes a step apart. How much of a step the GPU computes
# is asked from the profiler; in the rest it waits to be told what to do.
class _Watch:
    "Seconds of every phase of every step."
    def __init__(self): self.laps, self.last = defaultdict(list), clock()

    def lap(self, phase:str):
        "A phase ends, and the next begins."
        now = clock()
        self.laps[phase].append(now - self.last)
        self.last = now

    def medians(self)->dict:
        "The median of every phase, in seconds; the first lap, which warms up, is left out."
        return {phase: median(laps[1:]) for phase, laps in self.laps.items() if len(laps) > 1}

def _gpu_busy(step):
    "The share of a step in which a GPU computes, in percent; None without a GPU."
    if not torch.cuda.is_available(): return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        start = clock()
        step(_Watch())
        seconds = clock() - start
    microseconds = sum(event.self_device_time_total for event in seen.key_averages())
    return microseconds / 1e4 / seconds

# ---- The two steps
# One of cross-entropy goes forward and backward, and updates. A self-critical one searches and rewards before that.
def _timed(cfg, step, **counted):
    "Steps in numbers; `first` is the one that warms up, or compiles. A step gets a watch."
    watch, cuda = _Watch(), torch.cuda.is_available()
    for _ in range(1 + cfg.repeats): step(watch)
    phases = watch.medians()
    total = sum(phases.values())
    result = dict(seconds=total, first=sum(laps[0] for laps in watch.laps.values()), phases=phases)
    result["share"] = {phase: 100*seconds/total for phase, seconds in phases.items()}
    result["memory_mb"] = torch.cuda.max_memory_allocated()/1e6 if cuda else None
    result |= {f"{unit}_per_second": n/total for unit, n in counted.items()}
    return result | {"gpu_busy": _gpu_busy(step)}

def _autocast():
    return torch.autocast(default_device().type, torch.bfloat16, enabled=torch.cuda.is_available())

def _learn(loss, adam, watch):
    loss.backward()
    watch.lap("backward")
    adam.step()
    adam.zero_grad()
    watch.lap("update")

def _bench_xe(cfg, compiled=False):
    "Time a cross-entropy step: seconds, those of every phase, units a second."
    captioner, batch = _captioner(cfg).train(), _batch(cfg, cfg.captions)
    adam = torch.optim.Adam(captioner.parameters(), lr=1e-6)
    model = torch.compile(captioner, dynamic=True) if compiled else captioner
    def step(watch):
        with _autocast(): loss, _ = xe_loss(model, batch)
        watch.lap("forward")
        _learn(loss, adam, watch)
    return _timed(cfg, step, captions=cfg.captions, words=batch.weight)

def _bench_scst(cfg, constraints=0):
    "Time a self-critical step with so many constraints an image, as `_bench_xe`."
    captioner, batch = _captioner(cfg), _batch(cfg, cfg.images)
    adam = torch.optim.Adam(captioner.parameters(), lr=1e-6)
    g = torch.Generator().manual_seed(cfg.seed)
    size = cfg.known, cfg.references, cfg.length
    references = dict(enumerate(torch.randint(4, cfg.words, size, generator=g).tolist()))
    def random_group():
        words = torch.randperm(cfg.words - 4, generator=g)[:constraints] + 4
        return [[(word,)] for word in words.tolist()]
    groups = [random_group() for _ in batch.image_ids]
    critic = SelfCritical(CiderReward(references, EOS))
    def step(watch):
        with _autocast():
            beams = search(captioner.eval(), batch, groups, cfg.search)
            watch.lap("search")
            rewards = critic.rewards(beams.tokens, batch.image_ids)
            watch.lap("reward")
            log_probs = caption_log_probs(captioner.train(), batch, beams.tokens)
            loss = scst_loss(log_probs, rewards, beams.scores > -torch.inf)
            watch.lap("forward")
        _learn(loss, adam, watch)
    return _timed(cfg, step, images=cfg.images)

# ---- The reward beside pycocoevalcap
# What a reward has to do once the references are prepared: score 250 captions of 50 images in a step, or one caption
# of each of 5,000 images. `pycocoevalcap` prepares the references anew for every call. Both score the same captions,
# the second reference of every image against all of them, in turn in one run, and must agree.
# A beam's captions differ in their last words, and most of their n-grams are the same: counted once, by hand, of
# 9,000 in 250 captions by a captioner trained on `lite`, 1,900 are different. A step here scores the first reference
# of each image with none to four last words of another (9,600, of which 3,000 differ), for twenty different batches
# one after the other.
def _beams(coded, images):
    "Five captions an image that differ in their last words, as token ids."
    captions = []
    for i in images:
        first, last = coded[i][0], coded[i][-1]
        for n in range(5):
            words = first[:max(0, len(first)-n)] + last[max(0, len(last)-n):]
            captions.append(torch.tensor([*words, EOS]))
    return pad_sequence(captions, True, PAD)

def _reward_steps(refs):
    "CIDEr-D on token ids, and what it is asked in up to twenty steps."
    words = dict.fromkeys(w for captions in refs.values() for caption in captions for w in caption)
    ids = {word: n for n, word in enumerate(words, max(PAD, BOS, EOS) + 1)}
    def encoded(caption): return [ids[word] for word in caption]
    coded = {i: list(map(encoded, refs[i])) for i in refs}
    images, steps = list(refs)[:1000], []
    for at in range(0, len(images), 50):
        some = images[at:at+50]
        steps.append((_beams(coded, some), [i for i in some for _ in range(5)]))
    return CiderReward(coded, EOS), steps

def _bench_reward(refs, repeats=5):
    "Time CIDEr-D, references prepared, beside `pycocoevalcap`: both medians and their ratio."
    ids, watch = list(refs), _Watch()
    cider = CiderD(refs)
    watch.lap("prepare")
    captions = [texts[min(1, len(texts)-1)] for texts in refs.values()]
    candidates = {i: [" ".join(caption)] for i, caption in zip(ids, captions)}
    texts = {i: list(map(" ".join, refs[i])) for i in ids}
    reward, steps = _reward_steps(refs)
    for _ in range(1 + repeats):
        watch.lap("pause")
        ours = cider.score(captions, ids)
        watch.lap("ours")
        _, theirs = Cider().compute_score(texts, candidates)
        watch.lap("theirs")
        for step in steps:
            reward(*step)
            watch.lap("step")
    seconds = watch.medians()
    return dict(images=len(ids), references=sum(map(len, refs.values())),
                prepare=watch.laps["prepare"][0], ours=seconds["ours"], theirs=seconds["theirs"],
                times=seconds["theirs"]/seconds["ours"], step_ms=1000*seconds["step"],
                difference=float(abs(ours - theirs).max()))

def _coco_references(images=5000):
    "References of COCO's validation images with five or more. `NocError` where there are none."
    coco = find_data()
    require(coco, "--reward: no captions", "NOC_DATA, a folder in COCO's layout")
    captions, *_ = read_captions(coco/"annotations/captions_val2014.json")
    enough = [i for i in sorted(captions) if len(captions[i]) >= 5]
    return {i: list(map(tokenize, captions[i])) for i in enough[:images]}

# ---- The command
def _bench_rows(cfg, constraints, modes, compiled=False, command="benchmarks/training.py"):
    "Yield result rows of everything. Raises `NocError` for an unknown mode."
    def row(name, variant, cfg, metrics):
        return new_row("bench", name, variant=variant, command=command, config=asdict(cfg),
                       metrics=metrics, threads=torch.get_num_threads(), seed=cfg.seed)
    yield row("train_xe", None, cfg, _bench_xe(cfg))
    if compiled: yield row("train_xe", "compiled", cfg, _bench_xe(cfg, True))
    for n in constraints:
        for mode in modes if n else modes[:1]:
            one = replace(cfg, search=replace(cfg.search, mode=mode))
            yield row("train_scst", f"{n} constraints, {mode}", one, _bench_scst(one, n))

def _history_rows(run, data, command="benchmarks/training.py --run"):
    "Yield a row for every finished phase of a run. Raises `NocError` where there is none."
    files = sorted(Path(run).glob("**/done.json"))
    require(files, f"{run}: no finished phase", "a done.json in it or below")
    for path in files:
        done = read_json(path)
        yield new_row("bench", "history", data=data, variant=path.parent.name, command=command,
                      config=done["config"], seconds=round(done["seconds"], 1),
                      metrics=dict(best=done["best"], history=done["history"]))

def _read_counts(constraints, cfg):
    "Read `--constraints`. Raises `NocError` for what is no number of words that the model has."
    most = cfg.words - 4
    try: counts = [int(n) for n in constraints.split(",")]
    except ValueError: counts = [-1]
    fit = 0 <= min(counts) and max(counts) <= most
    require(fit, f"--constraints {constraints}", f"numbers from 0 to {most}, as in 0,3,5")
    return counts

def _command(o):
    "What makes rows again; the name of a folder is nobody's business."
    shown = {} if o.reward else dict(constraints=o.constraints, modes=o.modes,
                                     threads=torch.get_num_threads())
    if o.run is not None: shown = dict(data=o.data, run="FOLDER")
    words = [f"--{name} {value}" for name, value in shown.items()]
    words += [f"--{name}" for name in ("compiled", "reward") if getattr(o, name)]
    if o.set: words.append(f'--set {" ".join(o.set)}')
    return " ".join(["benchmarks/training.py", *words])

def bench_train(
    out:str="results/bench_train.jsonl", # file that rows are appended to
    constraints:str="0,3,5", # numbers of constraints to time, with commas between them
    modes:str="grid,bank",   # ways of searching, with commas between them
    compiled:bool=False,     # also time cross-entropy through torch.compile
    reward:bool=False,       # time the reward beside pycocoevalcap, on captions of NOC_DATA
    set:list=None,           # changes of the sizes, as key=value
    run:str=None,            # append the training curves of this run's folder instead
    data:str="lite",         # name of the run's data set
):
    "Time training steps and append result rows; or append the curves of a finished run."
    o = SimpleNamespace(**locals())
    cfg, text = override(BenchConfig(), " ".join(o.set or ()).split()), _command(o)
    check_range("--set ", cfg.images, known=cfg.known)
    with locked(o.out):
        if o.run is not None: rows = _history_rows(o.run, o.data, text)
        elif o.reward: rows = [_reward_row(cfg, text)]
        else:
            counts = _read_counts(o.constraints, cfg)
            rows = _bench_rows(cfg, counts, o.modes.split(","), o.compiled, text)
        for row in progress(rows, "rows"): append_row(o.out, row)

def _reward_row(cfg, text):
    metrics = _bench_reward(_coco_references(), cfg.repeats)
    return new_row("bench", "reward", variant=None, command=text, config=dict(repeats=cfg.repeats),
                   metrics=metrics, threads=torch.get_num_threads())

if __name__ == "__main__": script(bench_train)