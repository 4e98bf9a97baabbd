"""Measure the time of a cross-entropy step and of a self-critical step, phase by phase.

    python benchmarks/training.py                 # the paper's sizes, random regions and references; no data needed
    python benchmarks/training.py --reward        # the reward and pycocoevalcap, on captions of NOC_DATA
    python benchmarks/training.py --run FOLDER    # the curves of a finished run, as rows

Rows are appended to results/bench_train.jsonl; chapter 65 shows them. The training loop does not compile the model,
because captions differ in length, and each new length may be compiled again. --compiled times a compiled step, too."""

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
from noc_nb.commands.command import script
from noc_nb.core import BOS, EOS, PAD, SPECIALS, default_device, require, set_seed
from noc_nb.data import CaptionBatch
from noc_nb.encoder import CaptionerConfig
from noc_nb.fast.cider import CiderD, CiderReward
from noc_nb.fast.decode import search
from noc_nb.fast.search import SearchConfig
from noc_nb.files.captions import read_captions
from noc_nb.lab.config import Config, check_range, override, setting
from noc_nb.lab.disk import find_data, read_json
from noc_nb.lab.progress import progress
from noc_nb.lab.results import append_row, new_row
from noc_nb.lab.runs import locked
from noc_nb.scst import SelfCritical, caption_log_probs, scst_loss
from noc_nb.train_xe import xe_loss
from noc_nb.lab.metrics import tokenize

# ---- Sizes
# The defaults are the paper's sizes, with 50 regions per image, ten thousand words, and five references for each of a
# thousand images.
@dataclass(frozen=True)
class BenchConfig(Config):
    "The sizes of a timed step."
    images:int = setting(10, 1)       # images per self-critical step
    captions:int = setting(50, 1)     # captions per cross-entropy step
    words:int = setting(10_000, 5)    # words in the vocabulary
    length:int = setting(11, 1)       # words per reference, without EOS
    references:int = setting(5, 1)    # references per image
    known:int = 1000                  # number of images with prepared references
    repeats:int = setting(3, 1)       # timed steps, after one to warm up
    seed:int = 0                      # seed of weights, regions and words
    captioner:CaptionerConfig = CaptionerConfig()
    search:SearchConfig = SearchConfig()

def _captioner(cfg):
    "Build a captioner with random weights whose words have given vectors."
    set_seed(cfg.seed)
    tokens = [*SPECIALS, *(f"w{i}" for i in range(cfg.words - len(SPECIALS)))]
    table = torch.randn(cfg.words, cfg.captioner.d_word)
    known = torch.arange(cfg.words) > 3
    return Captioner(cfg.captioner, tokens, table, known).to(default_device())

def _batch(cfg, rows):
    "Draw random regions and captions for a number of images."
    g, n = torch.Generator().manual_seed(cfg.seed), cfg.captioner.max_regions
    words = torch.randint(4, cfg.words, (rows, cfg.length), generator=g)
    edge = torch.ones(rows, 1, dtype=torch.long)
    tokens = torch.cat([edge*BOS, words, edge*EOS], 1)
    features = torch.randn(rows, n, cfg.captioner.d_feature, generator=g)
    mask = torch.ones(rows, n, dtype=torch.bool)
    return CaptionBatch(features, mask, tokens, list(range(rows))).to(default_device())

# ---- A stopwatch
# A GPU computes asynchronously, so the clock of search.py waits for it. `torch.utils.benchmark` times whole statements;
# the stopwatch times the phases of a step. The profiler measures in which share of a step the GPU computes; in the rest
# of the time it is idle.
class _Watch:
    "Records the seconds of every phase of every step."
    def __init__(self): self.laps, self.last = defaultdict(list), clock()

    def lap(self, phase:str):
        "End a phase and begin the next."
        now = clock()
        self.laps[phase].append(now - self.last)
        self.last = now

    def medians(self)->dict:
        "Return the median seconds of every phase, without the first lap, which warms up."
        return {phase: median(laps[1:]) for phase, laps in self.laps.items() if len(laps) > 1}

def _gpu_busy(step):
    "Return the percentage of a step in which the GPU computes, or None without a GPU."
    if not torch.cuda.is_available(): return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        start = clock()
        step(_Watch())
        seconds = clock() - start
    microseconds = sum(event.self_device_time_total for event in seen.key_averages())
    return microseconds / 1e4 / seconds

# ---- The two steps
# A cross-entropy step consists of forward, backward and update. A self-critical step begins with search and reward.
def _timed(cfg, step, **counted):
    "Time a step several times; return the numbers. `first` is the time of the first step."
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
    "Time a cross-entropy step; return seconds, phases, and captions and words per second."
    captioner, batch = _captioner(cfg).train(), _batch(cfg, cfg.captions)
    adam = torch.optim.Adam(captioner.parameters(), lr=1e-6)
    model = torch.compile(captioner, dynamic=True) if compiled else captioner
    def step(watch):
        with _autocast(): loss, _ = xe_loss(model, batch)
        watch.lap("forward")
        _learn(loss, adam, watch)
    return _timed(cfg, step, captions=cfg.captions, words=batch.weight)

def _bench_scst(cfg, constraints=0):
    "Time a self-critical step with a number of constraints per image; see `_bench_xe`."
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

# ---- The reward, compared with pycocoevalcap
# After the references have been prepared, the reward scores 250 captions of 50 images in a step, or one caption of each
# of 5,000 images. `pycocoevalcap` prepares the references again in every call. Both score the same captions (the second
# reference of every image against all its references), in turn in one run, and must agree.
# The captions of a beam differ only in their last words, so most of their n-grams are the same. Of the 9,000 n-grams in
# 250 captions of a captioner trained on `lite`, 1,900 are distinct (counted once, by hand). In this benchmark a step
# scores the first reference of each image with its last zero to four words replaced by those of another reference
# (9,600 n-grams, 3,000 of them distinct), for twenty different batches one after the other.
def _beams(coded, images):
    "Make five captions per image that differ in their last words, as token ids."
    captions = []
    for i in images:
        first, last = coded[i][0], coded[i][-1]
        for n in range(5):
            words = first[:max(0, len(first)-n)] + last[max(0, len(last)-n):]
            captions.append(torch.tensor([*words, EOS]))
    return pad_sequence(captions, True, PAD)

def _reward_steps(refs):
    "Return CIDEr-D on token ids, and its inputs in up to twenty steps."
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
    "Time CIDEr-D with prepared references, and `pycocoevalcap`; return medians and ratio."
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
    "Read references of COCO images that have at least five. Raise `NocError` without data."
    coco = find_data()
    require(coco, "--reward: no captions", "NOC_DATA, a folder in COCO's layout")
    captions, *_ = read_captions(coco/"annotations/captions_val2014.json")
    enough = [i for i in sorted(captions) if len(captions[i]) >= 5]
    return {i: list(map(tokenize, captions[i])) for i in enough[:images]}

# ---- The command
def _bench_rows(cfg, constraints, modes, compiled=False, command="benchmarks/training.py"):
    "Yield result rows of all steps. Raise `NocError` for an unknown mode."
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
    "Yield a row for every finished phase of a run. Raise `NocError` if there is none."
    files = sorted(Path(run).glob("**/done.json"))
    require(files, f"{run}: no finished phase", "a done.json in it or below")
    for path in files:
        done = read_json(path)
        yield new_row("bench", "history", data=data, variant=path.parent.name, command=command,
                      config=done["config"], seconds=round(done["seconds"], 1),
                      metrics=dict(best=done["best"], history=done["history"]))

def _read_counts(constraints, cfg):
    "Read `--constraints`. Raise `NocError` if a number is invalid or exceeds the vocabulary."
    most = cfg.words - 4
    try: counts = [int(n) for n in constraints.split(",")]
    except ValueError: counts = [-1]
    fit = 0 <= min(counts) and max(counts) <= most
    require(fit, f"--constraints {constraints}", f"numbers from 0 to {most}, as in 0,3,5")
    return counts

def _command(o):
    "Return the command that reproduces the rows, without names of folders."
    shown = {} if o.reward else dict(constraints=o.constraints, modes=o.modes,
                                     threads=torch.get_num_threads())
    if o.run is not None: shown = dict(data=o.data, run="FOLDER")
    words = [f"--{name} {value}" for name, value in shown.items()]
    words += [f"--{name}" for name in ("compiled", "reward") if getattr(o, name)]
    if o.set: words.append(f'--set {" ".join(o.set)}')
    return " ".join(["benchmarks/training.py", *words])

def bench_train(
    out:str="results/bench_train.jsonl", # file that rows are appended to
    constraints:str="0,3,5", # numbers of constraints to time, separated by commas
    modes:str="grid,bank",   # kinds of search, separated by commas
    compiled:bool=False,     # also time cross-entropy through torch.compile
    reward:bool=False,       # time the reward and pycocoevalcap, on captions of NOC_DATA
    set:list=None,           # changes to the sizes, as key=value
    run:str=None,            # instead, append the training curves of the run in this folder
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