"""Measure the cost of every step of the coco preset on files of full COCO's size.

    python benchmarks/scale.py                    # or make scale: a quarter of an hour on two quiet cores; resumes

Each step runs in a separate process, so that its peak memory can be measured, and long enough to be timed. Rows are
appended to results/scale.jsonl; chapter 71 shows them. Steps that have a row already are not measured again."""

import json, os, socket, subprocess, sys, time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, mkdtemp

import torch
from torch.utils.flop_counter import FlopCounterMode

from training import BenchConfig, _batch, _captioner
from world import WorldSize, make_world
from noc_nb.commands.command import peak_mb, script
from noc_nb.commands.reproduce import choice
from noc_nb.core import require
from noc_nb.data import CaptionExamples, ImageExamples, Loader, RegionFeatures, SelectorExamples
from noc_nb.fast.cider import cider_reward
from noc_nb.fast.decode import decode, search
from noc_nb.files.boxes import ground_truth, read_detections
from noc_nb.files.dataset import load_captions, load_data
from noc_nb.files.store import RegionStore
from noc_nb.heldout import novel_images, removed_images
from noc_nb.lab.metrics import CaptionScorer
from noc_nb.lab.models import PRESETS, _training_search
from noc_nb.lab.novelty import judge, weighted_f1
from noc_nb.lab.progress import progress
from noc_nb.lab.results import append_row, new_row, read_rows
from noc_nb.lab.runs import locked
from noc_nb.lab.train import Batches, Trainer
from noc_nb.scores.java import java_programs
from noc_nb.scst import SelfCritical, caption_log_probs, oracle_words
from noc_nb.selector import RegionSelector, selector_loss
from noc_nb.train_selector import val_score
from noc_nb.train_xe import build_captioner, build_vocab, xe_loss
from noc_nb.vocab import Vocab

# ---- A clock for each part
# Other programs may be running. So besides wall-clock seconds, the CPU seconds of a part are recorded; on an idle
# machine the two agree for a program with one thread.
def _cpu_seconds():
    "Return the CPU seconds of this process and its children so far."
    import resource                                        # which Windows lacks
    me, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in (me, children))

class _Bench:
    "A world on which steps are timed. Data and captioner are built once, for all steps."
    def __init__(self, root, rank=0, processes=1, steps=5, preset=PRESETS["coco"], scratch=None):
        self.root, self.rank, self.processes, self.preset = Path(root), rank, processes, preset
        self.scratch = Path(scratch or mkdtemp())              # where something is trained
        self.phases = count()
        self.steps, self.images, self.laps = steps, 100, {}    # of training; to caption; timed

    @cached_property
    def data(self):
        with self.lap("load"): return load_data(self.root, "coco")

    @cached_property
    def captioner(self):
        data, preset, kept = self.data, self.preset, len(self.data.splits["train"])
        with self.lap("vocabulary", 5*kept): build_vocab(data, preset.min_count)
        with self.lap("vectors"): len(data.vectors)             # reads them
        with self.lap("captioner"):
            return build_captioner(data, preset.captioner, preset.min_count)

    @contextmanager
    def lap(self, name:str, items:int=1):
        "Time a part of a step that processes `items` items."
        began, spent = time.monotonic(), _cpu_seconds()
        yield
        used = _cpu_seconds()
        self.laps[name] = dict(seconds=round(time.monotonic() - began, 2), items=items,
                               cpu_seconds=round(used - spent, 2), peak_mb=peak_mb())

# ---- Reading
# These steps read files. The builder of the held-out split must find the lists with which the world was written.
def _load(bench, file=None):
    "Load the whole data set, with detections as Parquet unless a file is given."
    detections = str(bench.root/"detections"/file) if file else "simulated"
    with bench.lap("load"): data = load_data(bench.root, "coco", detections)
    return dict(images=len(data.captions), captions=data.counts["captions"],
                detections=len(data.regions.boxes))

def _detections(bench, name):
    "Read detections in COCO's results format."
    sizes = load_captions(bench.root).sizes
    with bench.lap("detections"): table = read_detections(bench.root/f"detections/{name}", sizes)
    return dict(detections=len(table.boxes))

def _boxes(bench):
    "Read the ground truth of both parts, with outlines."
    files = sorted((bench.root/"annotations").glob("instances_*.json"))
    with bench.lap("boxes"): tables = list(map(ground_truth, files))
    return dict(boxes=sum(len(table.boxes) for table in tables))

def _builder(bench):
    "Build the held-out split from captions. Raise `NocError` if it is not the world's split."
    texts = load_captions(bench.root).texts
    data = load_data(bench.root, "coco", None)
    halves = [*data.splits["val"], *data.splits["test"]]
    train = texts.keys() - set(halves)
    with bench.lap("builder"):
        kept = train - removed_images({i: texts[i] for i in train}, data.heldout)
        novel = set().union(*novel_images(texts, data.heldout, halves).values())
    listed = {*data.splits["novel_val"], *data.splits["novel_test"]}
    same = kept == set(data.splits["train"]) and novel == listed
    require(same, f"{bench.root}: the builder finds another split", "the world's")
    return dict(kept=len(kept), novel=len(novel))

# ---- Training
# `Trainer` runs some steps of each training, also in two processes; the first step warms up. The selector's steps are
# short, so there are twenty times as many. PyTorch counts the operations of a step: those of matrix products, forward
# and backward.
class _Part:
    "The first batches of an epoch; records when the trainer requests each."
    def __init__(self, loader, steps): self.loader, self.steps, self.clock = loader, steps, []

    def __call__(self, *args):
        self.batches = self.loader(*args)
        return self

    def __len__(self): return self.steps

    def __iter__(self):
        for batch in islice(self.batches, self.steps):
            self.clock.append((time.monotonic(), _cpu_seconds()))
            yield batch
        self.clock.append((time.monotonic(), _cpu_seconds()))

    def medians(self):
        "Return the median seconds and CPU seconds of a step, without the first."
        gaps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.clock[1:], self.clock[2:])]
        seconds, cpu = (median(column) for column in zip(*gaps))
        return dict(step_seconds=round(seconds, 3), step_cpu_seconds=round(cpu, 3))

def _operations(work):
    "Count the operations of matrix products in `work`, in units of 10^12."
    with FlopCounterMode(display=False) as counter: work()
    return counter.get_total_flops()/1e12

def _train(bench, model, loss, cfg, loader, steps):
    "Run some steps of `Trainer`; return seconds and operations of a step, and sizes."
    part, batch = _Part(loader, steps), next(iter(loader))
    teraflop = None
    def learn(): loss(model.train(), batch)[0].backward()
    if bench.processes == 1: teraflop = _operations(learn)
    model.zero_grad(set_to_none=True)
    phase = replace(cfg, epochs=1, save_seconds=1e9)
    folder = bench.scratch/f"phase-{next(bench.phases)}"      # the same folder in all processes
    Trainer(model, loss, phase, folder, model.cfg.d_model).fit(part)
    return dict(**part.medians(), teraflop=teraflop, batch=loader.batch_size,
                examples=len(loader.examples), epochs=cfg.epochs)

def _selector(bench):
    "Build the selector's examples, run training steps, and choose classes for val."
    data, cfg, train = bench.data, bench.preset.selector, bench.preset.train_selector
    kept, model = len(data.splits["train"]), RegionSelector(cfg)
    with bench.lap("examples", kept):
        examples = SelectorExamples(data, "train", max_regions=cfg.max_regions)
    def loss(model, batch):
        logits = model(batch.geometry, batch.labels)
        return selector_loss(logits, batch.targets, batch.labels, cfg.lambda0, cfg.lambda1), {}
    with bench.lap("steps", 20*bench.steps):
        steps = _train(bench, model, loss, train, Batches(examples, train.batch), 20*bench.steps)
    score = val_score(data, cfg, f1=weighted_f1)
    with bench.lap("val", len(data.splits["val"])): score(model.eval())
    return steps

def _xe(bench, store=None):
    "Run cross-entropy steps on symbolic features, or on those of a store."
    data, cfg, most = bench.data, bench.preset.xe, bench.preset.captioner.max_regions
    ids = data.splits["train"]
    if store is not None:
        bench.data = data = replace(data, features=store)
        ids = [i for i in ids if i in store]
    captioner = bench.captioner
    vocab, length = Vocab(captioner.tokens), bench.preset.captioner.max_len
    with bench.lap("examples", 5*len(ids)):
        features = data.region_features(most)
        examples = CaptionExamples(data, vocab, ids, length, features)
        loader = Batches(examples, cfg.batch, cfg.seed)
    with bench.lap("steps", bench.steps):
        steps = _train(bench, captioner, xe_loss, cfg, loader, bench.steps)
    return dict(words=len(vocab), **steps)

def _xe_store(bench):
    "Run cross-entropy steps on the features of a store; time reading the features."
    store = RegionStore(bench.root/"features")
    numbers = _xe(bench, store)
    features = RegionFeatures(store, store.features.shape[0])
    ids = store.ids.tolist()
    with bench.lap("features", 5000):
        for start in range(0, 5000, 50): features(ids[start*7 % len(ids):][:50])
    return numbers | dict(stored=len(ids))

def _scst(bench):
    "Run self-critical steps without constraints and with the oracle's."
    data, captioner, cfg = bench.data, bench.captioner, bench.preset.scst
    train, vocab = data.splits["train"], Vocab(captioner.tokens)
    ids = [i for i in train if len(data.captions[i]) >= cfg.min_refs]
    with bench.lap("reward", 5*len(ids)): reward = cider_reward(data, ids, vocab, cfg)
    with bench.lap("constraints", len(ids)): oracle = oracle_words(data, ids, vocab)
    features = data.region_features(bench.preset.captioner.max_regions)
    images = ImageExamples(data, ids, features)
    loader = Batches(images, 10, cfg.seed)                        # a fifth of the preset's batch
    numbers = {}
    for name, words in dict(cider={}, cider_dgbs=oracle).items():
        loss = SelfCritical(reward, words, _training_search(cfg=bench.preset.search))
        with bench.lap(name, bench.steps):
            numbers[name] = _train(bench, captioner, loss, cfg, loader, bench.steps)
    return numbers

# ---- Captions and scores
# The captioner is untrained, so its captions have the maximum length, the slowest case of decoding. With two processes,
# each captions half of the images.
def _decode(bench):
    "Caption some test images without constraints and with the oracle's."
    data, captioner = bench.data, bench.captioner.eval()
    test = data.splits["test"]
    ids = test[:bench.images][bench.rank::bench.processes]
    words = oracle_words(data, ids, Vocab(captioner.tokens))
    oracle = {i: [[(token,)] for token in tokens] for i, tokens in words.items()}
    features = data.region_features(bench.preset.captioner.max_regions)
    numbers = dict(images=bench.images, test=len(test),
                   constraints=sum(map(len, oracle.values()))/len(ids))
    for name, constraints in dict(none={}, oracle=oracle).items():
        batches = Loader(ImageExamples(data, ids, features), 100, shuffle=False)
        with bench.lap(name, len(ids)): decode(captioner, batches, constraints, bench.preset.search)
    if bench.processes > 1: return numbers
    some = Loader(ImageExamples(data, ids[:10], features), 10, shuffle=False)
    for name, constraints in dict(none={}, oracle=oracle).items():
        work = partial(decode, captioner, some, constraints, bench.preset.search)
        numbers[f"{name}_teraflop"] = _operations(work)/len(ids[:10])
    return numbers

def _score(bench, metrics=("C", "B4", "R")):
    "Score one caption for each image of the test half: its first reference."
    data = bench.data
    ids, novel = data.splits["test"], data.novel["test"]
    refs = {i: data.captions[i][1:] for i in ids}
    captions = {i: data.captions[i][0] for i in ids}
    with bench.lap("references", 4*len(ids)):
        scorer = CaptionScorer(refs, metrics, java_programs(refs, metrics))
        images = len(scorer.refs.cider.rows)
    with scorer, bench.lap("scores", len(ids)):
        scores = judge(captions, refs, ids, novel, data.heldout, scorer=scorer).row()
    return dict(images=images, scores=scores["in"])

# `noc_reproduce` does all of this in one process, so the memory of a whole run is measured, too.
def _held(bench):
    "Hold what a whole run holds while it trains: examples, vectors, captioner, references."
    data, preset = bench.data, bench.preset
    ids = data.splits["train"]
    with bench.lap("regions", len(ids)): examples = SelectorExamples(data)
    captioner = bench.captioner
    vocab, length = Vocab(captioner.tokens), preset.captioner.max_len
    with bench.lap("captions", 5*len(ids)):
        captions = CaptionExamples(data, vocab, ids, length)
    with bench.lap("reward", 5*len(ids)): reward = cider_reward(data, ids, vocab, preset.scst)
    test = data.splits["test"]
    with bench.lap("references", 5*len(test)):
        scorer = CaptionScorer({i: data.captions[i] for i in test}, ("C", "B4", "R"))
        scored = len(scorer.refs.cider.rows)
    return dict(words=len(vocab), images=len(examples), captions=len(captions),
                rewarded=len(reward.cider.rows), scored=scored)

def _whole(bench):
    "Run a short version of all steps in one process, one after the other."
    bench.steps, bench.images = 3, 10
    parts = dict(selector=_selector, xe=_xe, scst=_scst, decode=_decode, score=_score)
    numbers = {}
    for name, part in parts.items():
        laps, bench.laps = bench.laps, {}
        numbers |= {f"{name} {key}": value for key, value in part(bench).items()}
        bench.laps = laps | {f"{name} {lap}": value for lap, value in bench.laps.items()}
    return numbers

# Operations can be counted without a world, on random regions of the paper's sizes.
def _counted(bench, images=2, captions=10):
    "Count 10^12 operations per image or caption for training and search."
    cfg = BenchConfig(images=images, captions=captions, captioner=bench.preset.captioner)
    captioner = _captioner(cfg)
    xe = _operations(lambda: xe_loss(captioner, _batch(cfg, captions))[0].backward())/captions
    batch = _batch(cfg, images)
    numbers = dict(xe=xe)
    for n in 0, 3:
        groups = [[[(4 + k,)] for k in range(n)]]*images
        seen = []
        def find(): seen.append(search(captioner.eval(), batch, groups, bench.preset.search))
        def learn(): caption_log_probs(captioner, batch, seen[0].tokens).sum().backward()
        numbers[f"search, {n} constraints"] = _operations(find)/images
        numbers[f"learn, {n} constraints"] = _operations(learn)/images
    return numbers

@dataclass(frozen=True)
class _Step:
    "A step, and the worlds and numbers of processes for which it is measured."
    work:object          # function `_Bench` -> numbers
    worlds:tuple=(1,)    # fractions of full COCO: 16 is a sixteenth
    processes:tuple=(1,) # numbers of processes

_GROWING = 16, 4, 1
_STEPS = dict(
    load=_Step(_load, _GROWING), load_json=_Step(partial(_load, file="simulated.json")),
    detections_json=_Step(partial(_detections, name="simulated.json"), _GROWING),
    boxes=_Step(_boxes, _GROWING), builder=_Step(_builder, _GROWING),
    selector=_Step(_selector, _GROWING), xe=_Step(_xe, processes=(1, 2)), scst=_Step(_scst),
    decode=_Step(_decode, processes=(1, 2)), score=_Step(_score, _GROWING), held=_Step(_held),
    operations=_Step(_counted), whole=_Step(_whole),
    xe_store=_Step(_xe_store),
    score_meteor=_Step(partial(_score, metrics=("M", "C", "B4", "R"))),
    detections_gz=_Step(partial(_detections, name="simulated.json.gz")))

# ---- Running a step in a separate process
# Each step runs in a new Python process. Two processes of one step find each other by the environment variables of
# `torch.distributed`, as with `accelerate launch`. The operating system reports CPU seconds and peak memory.
def _run_step(name, root, rank=0, processes=1, scratch=None):
    "Run a step in this process, and print its numbers as the last line."
    torch.set_num_threads(1)
    bench = _Bench(root, rank, processes, scratch=scratch)
    with bench.lap("start"): pass
    numbers = _STEPS[name].work(bench)
    print(json.dumps(dict(peak_mb=peak_mb(), numbers=dict(**numbers, laps=bench.laps))))

HERE = str(Path(__file__).resolve().parent)

def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]

def _start(name, root, rank, processes, scratch, port):
    "Start a process that runs a step."
    call = name, str(root), rank, processes, scratch
    code = f"import sys; sys.path.insert(0, {HERE!r}); from scale import _run_step; _run_step{call}"
    shared = dict(WORLD_SIZE=processes, RANK=rank, LOCAL_RANK=rank, MASTER_PORT=port)
    shared = {key: str(value) for key, value in shared.items()} if processes > 1 else {}
    env = os.environ | dict(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", **shared)
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=env, text=True,
                            stdout=subprocess.PIPE)

def _measure(name, root, processes=1):
    "Run a step alone; return seconds, peaks, load and metrics. Raise `NocError` if it fails."
    began, port = time.monotonic(), _free_port()
    with TemporaryDirectory() as scratch:
        children = [_start(name, root, rank, processes, scratch, port) for rank in range(processes)]
        printed = [child.stdout.read() for child in children]
        ended = [os.wait4(child.pid, 0) for child in children]
    for child, (_, status, _) in zip(children, ended): child.returncode = status
    failed = any(child.returncode for child in children)
    require(not failed, f"{name}: failed, as its process says above", "numbers")
    spent = sum(usage.ru_utime + usage.ru_stime for _, _, usage in ended)
    said = [json.loads(text.splitlines()[-1]) for text in printed]
    return dict(seconds=round(time.monotonic() - began, 1), cpu_seconds=round(spent, 1),
                peak_mb=[child["peak_mb"] for child in said], load=round(os.getloadavg()[0], 1),
                metrics=said[0]["numbers"])

# ---- The command
# The largest world comes first. Steps that have a row already are not measured again.
def _jobs(steps, worlds):
    "Return (step, fraction of COCO, processes) of all measurements, full COCO first."
    jobs = [(name, part, n) for name in steps for part in _STEPS[name].worlds
            for n in _STEPS[name].processes if part in worlds]
    return sorted(jobs, key=lambda job: (job[1], job[2]))

def bench_scale(
    out:str="results/scale.jsonl", # file that rows are appended to
    worlds:str="_runs/scale", # folder of the worlds, which are written if missing
    steps:str="all",         # steps to time, separated by commas (default: all)
    parts:str="1,4,16",      # fractions of full COCO: 16 is a sixteenth
    stored:int=40_000,       # images with stored features in full COCO, 74 KB each
):
    "Time every step of the coco preset on files of full COCO's size, and append result rows."
    names = choice(None if steps == "all" else steps, _STEPS, "steps")
    chosen = [int(part) for part in choice(parts, ("1", "4", "16"), "parts")]
    size = replace(WorldSize(), stored=stored)
    with locked(out):
        measured = read_rows(out) if Path(out).exists() else []
        done = {(r["row"], r["part"], r["processes"]) for r in measured}
        for job in progress(_jobs(names, chosen), "steps"):
            if job not in done: append_row(out, _measured_row(*job, Path(worlds), size))

def _measured_row(name, part, processes, worlds, size):
    "Write the world if it is missing, and measure a step on it."
    size = size if part == 1 else size.share(part)
    root = make_world(worlds/f"world-{part}", size)
    return new_row("scale", name, part=part, images=size.images, processes=processes,
                   command="benchmarks/scale.py", config=dict(preset="coco", world=asdict(size)),
                   threads=1, **_measure(name, root, processes))

if __name__ == "__main__": script(bench_scale)