"""What the search costs, beside transformers 4.55.4, the last version with constraints inside.

    python benchmarks/search.py --peer PYTHON     # PYTHON of an environment with transformers==4.55.4

Rows are appended to results/bench.jsonl; chapter 64 shows them. Both sides have random weights, the same vocabulary,
widths, layers and threads, numbers of one kind, and about as many parameters. No caption may end before its last
token, so that both sides do the same number of steps. Runs of the two sides take turns, and the median counts."""

import ctypes, json, math, random, subprocess, threading, time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from noc_nb.captioner import Captioner
from noc_nb.commands.command import script
from noc_nb.core import NocError, default_device
from noc_nb.data import CaptionBatch
from noc_nb.encoder import CaptionerConfig
from noc_nb.fast.machine import constrained_beam_search
from noc_nb.fast.pool import Pool
from noc_nb.fast.search import beam_search, grid_beam_search
from noc_nb.lab.config import Config, check_range
from noc_nb.lab.progress import progress, keep_blocks
from noc_nb.lab.results import append_row, new_row
from noc_nb.lab.runs import locked
from noc_nb.models.generate import grid_beam
from noc_nb.vocab import BOS, EOS, PAD, SPECIALS, UNK

# ---- One case
# A case says what is searched and how. `differ`: each image has its own constraints; `shared`: all have the same.
@dataclass(frozen=True)
class _BenchCase(Config):
    "What is measured; the sizes are those of the paper's captioner."
    mode:str = "bank"       # "bank", "grid", "cbs", or "beam" for a plain beam search
    constraints:str = "differ" # "differ" or "shared"
    n:int = 3               # constraints of an image, single words
    k:int = 5               # beam
    images:int = 50         # in one batch
    max_len:int = 20        # tokens, none of them the end
    v:int = 10201           # words
    regions:int = 50        # of an image
    d:int = 512             # width; four times that in the feed-forward network
    layers:int = 3          # of the encoder, and of the decoder
    threads:int = 2         # of the CPU
    dtype:str = "float32"   # of numbers: "float32" or "bfloat16"
    given:str = "ids"       # how `generate` gets the words: "ids", "texts", or texts with "prices"

    def captioner(self)->Captioner:
        "With random weights, in eval mode."
        torch.manual_seed(0)
        sizes = dict(d_model=self.d, d_ff=4*self.d, layers=self.layers, max_len=self.max_len)
        words = [*SPECIALS, *(f"w{i}" for i in range(self.v - len(SPECIALS)))]
        return self.place(Captioner(CaptionerConfig(**sizes), words).eval())

    def place(self, x):
        "Put a model or tensor where it is measured, in the numbers that are measured."
        half = self.dtype == "bfloat16" and (not isinstance(x, Tensor) or x.is_floating_point())
        return x.to(default_device(), torch.bfloat16 if half else None)

_NO_END = PAD, BOS, EOS, UNK   # no caption ends before its last token

def _words(case):
    "A list of n word ids for every image: those that are forced."
    rng = random.Random(0)
    rows = [rng.sample(range(len(SPECIALS), case.v), case.n) for _ in range(case.images)]
    return [rows[0]]*case.images if case.constraints == "shared" else rows

def _groups(case):
    "The forced words as constraints."
    def one_word_groups(row): return [[(word,)] for word in row]
    return list(map(one_word_groups, _words(case)))

def _batch(case):
    "Random regions."
    torch.manual_seed(1)
    mask = torch.ones(case.images, case.regions, dtype=torch.bool)
    features = torch.randn(case.images, case.regions, 2048)
    return CaptionBatch(case.place(features), case.place(mask), None, list(range(case.images)))

# ---- Our side
# From region features to captions: encoder, search, and everything between. A clock stands at every door, so that
# the time falls into four phases: the encoder, the decoder's steps, the reordering of its memory, and the rest,
# which is the search itself.
@torch.no_grad()
def _run_ours(case, captioner):
    "Caption a batch once: seconds, those of the CPU and of each phase, and hypotheses asked about."
    batch, groups, asked = _batch(case), _groups(case), []
    phases, pool = dict(encoder=0., decoder=0., reorder=0.), Pool(captioner)
    def timed(phase, f, *args):
        start = clock()
        out = f(*args)
        phases[phase] += clock() - start
        return out
    def step(tokens, state):
        asked.append(len(tokens))
        return timed("decoder", pool.step, tokens, state)
    def reorder(state, index): return timed("reorder", pool.reorder, state, index)
    how = dict(bos=BOS, eos=EOS, k=case.k, max_len=case.max_len, forbidden=_NO_END, reorder=reorder)
    start, cpu = clock(), time.process_time()
    state = timed("encoder", pool.start, batch.features, batch.mask, case.max_len)
    if case.mode == "beam": beam_search(step, state, **how)
    elif case.mode == "cbs": constrained_beam_search(step, state, groups, **how)
    else: grid_beam_search(step, state, groups, absorb=False, mode=case.mode, **how)
    seconds, cpu = clock() - start, time.process_time() - cpu
    phases["search"] = seconds - sum(phases.values())
    return dict(seconds=seconds, cpu_seconds=cpu, asked=sum(asked), phases=phases)

# Hypotheses that the model was asked about are counted; together with the number of multiplications of each, they
# say how long the machine would need if it did nothing but multiply matrices at the best speed it shows. That is the
# floor. (The shortest of many runs is wanted, which `torch.utils.benchmark` does not give: its answer is a median.)
def clock()->float:
    "Seconds, read when the device has done all that it was asked for."
    if torch.cuda.is_available(): torch.cuda.synchronize()
    return time.perf_counter()

def _quickest(f, times=30):
    "The shortest time of many, in seconds."
    return min(repeat(f, timer=clock, repeat=times, number=1))

def _matmul_speed(threads=2, rows=500, like=torch.empty(0)):
    "The best speed, in multiplications and additions a second, at the product a decoder does most."
    torch.set_num_threads(threads)
    x, w = torch.randn(rows, 512).to(like), torch.randn(2048, 512).to(like)
    return 2*rows*512*2048 / _quickest(lambda: F.linear(x, w))

def _flops(case, asked):
    "Multiplications and additions in matrix products, without attention itself."
    d, l, n = case.d, case.layers, case.images*case.regions
    encoder = n*(2048*d + l*(4 + 8)*d*d + l*2*d*d)      # with the decoder's keys and values
    return 2*(encoder + asked*(l*(6 + 8)*d*d + 2*300*d + 300*case.v))

# Memory is looked at from beside: a thread reads the size of the process while the search runs.
class _PeakMemory:
    "Notes by how many megabytes the process grew; None where the system does not say."
    def __enter__(self):
        try: ctypes.CDLL(None).malloc_trim(0)           # what is free now shall not hide growth
        except (AttributeError, OSError): pass
        self.start, self.peak, self.done = self._now(), 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.mb = None if self.start is None else round((self.peak - self.start) / 2**20, 1)

    def _watch(self):
        while self.start is not None and not self.done.wait(.002):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now():
        try: return int(Path("/proc/self/statm").read_text().split()[1])*4096
        except OSError: return None

# ---- The other side
# transformers 4.55.4 is the last version that could be installed beside this package and has constraints inside
# (later versions have none). It lives in a virtual environment of its own, whose Python the command is given. It
# runs as a process that gets cases, one a line, and answers with seconds.
def _bart(case):
    "Settings of the baseline's model: a BART of the case's sizes."
    d, layers = case.d, case.layers
    return dict(vocab_size=case.v, d_model=d, encoder_layers=layers, decoder_layers=layers,
                encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=4*d,
                decoder_ffn_dim=4*d, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
                eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
                forced_bos_token_id=None)

_BASELINE = '''
import json, sys, time, torch, warnings
warnings.filterwarnings("ignore")
from transformers import BartConfig, BartForConditionalGeneration, logging
logging.set_verbosity_error()
models = {}
for line in sys.stdin:
    c = json.loads(line)
    torch.set_num_threads(c["threads"])
    torch.manual_seed(0)
    sizes = c["v"], c["d"], c["layers"], c["dtype"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = torch.bfloat16 if c["dtype"] == "bfloat16" else None
    if sizes not in models:
        model = BartForConditionalGeneration(BartConfig(**c["bart"])).eval()
        models[sizes] = model.to(device, half)
    model = models[sizes]
    ids = torch.randint(4, c["v"], (c["images"], c["regions"])).to(device)
    how = dict(num_beams=c["k"], do_sample=False, max_new_tokens=c["max_len"],
               min_new_tokens=c["max_len"])
    alone = c["mode"] != "beam" and c["constraints"] == "differ"
    start, cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
        if c["mode"] == "beam": model.generate(ids, **how)
        elif alone:
            for row, words in zip(ids, c["words"]):
                model.generate(row[None], force_words_ids=[[w] for w in words], **how)
        else: model.generate(ids, force_words_ids=[[w] for w in c["words"][0]], **how)
    if device == "cuda": torch.cuda.synchronize()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    parameters = sum(p.numel() for p in model.parameters())
    answer = dict(seconds=seconds, cpu_seconds=cpu, parameters=parameters)
    print(json.dumps(answer), flush=True)
'''

class _Baseline:
    "transformers 4.55 in another Python. Raises `NocError` if it does not answer."
    expected = "expected a Python with transformers==4.55.4"

    def __init__(self, python):
        self.python, pipes = python, dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try: self.process = subprocess.Popen([str(python), "-c", _BASELINE], text=True, **pipes)
        except OSError as e:
            raise NocError(f"{python}: cannot be run ({e.strerror}); {self.expected}") from None

    def run(self, case):
        "Seconds for one run of a case, and the model's parameters."
        try:
            about = dict(words=_words(case), bart=_bart(case))
            self.process.stdin.write(json.dumps(asdict(case) | about) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError: answer = ""
        if answer: return json.loads(answer)
        last = (self.process.stderr.read().strip().splitlines() or ["no word"])[-1]
        raise NocError(f"{self.python}: {last}; {self.expected}")

    def close(self):
        "End the process."
        self.process.stdin.close()
        self.process.wait()

# ---- Both sides in turn
# Where constraints differ, the baseline gets one image at a time, as it must, and so fewer of them: `peer_images`.
# (In options and rows the baseline is called `peer`.) Where others use the machine, too, the clock tells more of
# them than of us; the processor's seconds stand in the rows as well.
@dataclass
class _Bench:
    "What all measurements share."
    base:_BenchCase            # sizes
    repeats:int = 5           # runs of each side; the median counts
    baseline:_Baseline = None # the other side, or nobody
    baseline_images:int = 10  # images of the other side's run where constraints differ

    def runs(self, case, captioner, limit=math.inf):
        "Runs by side, the baseline's case, our memory. No run is begun after `limit` seconds."
        torch.set_num_threads(case.threads)
        alone = case.mode != "beam" and case.constraints == "differ"
        theirs = replace(case, images=min(self.baseline_images, case.images)) if alone else case
        _run_ours(replace(case, images=min(case.images, 2)), captioner)     # to warm up
        if self.baseline: self.baseline.run(replace(theirs, images=1))
        runs, start = dict(ours=[], peer=[]), time.perf_counter()
        with _PeakMemory() as memory:
            while len(runs["ours"]) < self.repeats:
                if runs["ours"] and time.perf_counter() - start >= limit: break
                runs["ours"].append(_run_ours(case, captioner))
                if self.baseline: runs["peer"].append(self.baseline.run(theirs))
        return runs, theirs, memory.mb

    def _measure(self, case:_BenchCase, captioner:Captioner, speed=None, limit=math.inf)->dict:
        "Metrics of a row; `speed` is from `_matmul_speed`."
        runs, theirs, memory = self.runs(case, captioner, limit)
        ours, others = runs["ours"], runs["peer"]
        seconds, asked = _middle(ours), ours[0]["asked"]
        share = {}
        for phase in ours[0]["phases"]:
            share[phase] = median(run["phases"][phase] / run["seconds"] for run in ours)
        out = dict(images_per_s=case.images / seconds, asked_per_image=asked / case.images,
                   peak_mb=memory, share=share, seconds=_each(ours),
                   cpu_seconds=_each(ours, "cpu_seconds"),
                   parameters=sum(p.numel() for p in captioner.parameters()))
        if speed: out |= dict(floor=_flops(case, asked) / speed / seconds, matmul_gflops=speed / 1e9)
        if not others: return out
        out |= dict(peer_images_per_s=theirs.images / _middle(others),
                    peer_parameters=others[0]["parameters"], peer_seconds=_each(others),
                    peer_cpu_seconds=_each(others, "cpu_seconds"))
        share = theirs.images / case.images
        cpu_times = _middle(others, "cpu_seconds") / share / _middle(ours, "cpu_seconds")
        return out | dict(times=out["images_per_s"] / out["peer_images_per_s"], cpu_times=cpu_times)

    def _measure_generate(self, case:_BenchCase)->dict:
        "Metrics of a row: words in `generate`, and its own beam search, here and in the baseline."
        from transformers import BartConfig, BartForConditionalGeneration
        torch.set_num_threads(case.threads)
        torch.manual_seed(0)
        model = case.place(BartForConditionalGeneration(BartConfig(**_bart(case))).eval())
        plain = replace(case, mode="beam", n=0)
        sides = dict(ours=lambda: _run_generate(case, model), own=lambda: _run_generate(plain, model))
        if self.baseline:
            sides |= dict(peer=lambda: self.baseline.run(case),
                          peer_own=lambda: self.baseline.run(plain))
        runs = {name: [] for name in sides}
        for n in range(self.repeats + 1):                        # in turn; the first is to warm up
            for name, run in sides.items(): runs[name] += [run()]*bool(n)
        return _beside_own(case, runs)

    def _run(self, groups:list, out, command:str="")->list:
        "Measure the cases of some groups and append rows."
        cases = [(group, case) for group in groups for case in _cases(group, self.base)]
        captioner, rows = self.base.captioner(), []
        speed = _matmul_speed(self.base.threads, like=next(captioner.parameters()))
        for group, case in progress(cases, "cases"):
            start = time.time()
            if group in ("generate", "step"): found = self._measure_generate(case)
            elif group == "scale":
                found = replace(self, baseline=None)._measure(case, captioner, speed, limit=5.)
            else: found = self._measure(case, captioner, speed)
            seconds = round(time.time() - start, 1)
            rows.append(new_row("bench", "search", case=group, config=asdict(case), metrics=found,
                                repeats=self.repeats, command=command, seconds=seconds))
            append_row(out, rows[-1])
        return rows

    def _check(self, groups:list):
        "Raises `NocError` for an unknown group, or a number that leaves nothing to measure."
        base = self.base
        if base.dtype not in ("float32", "bfloat16"):
            raise NocError(f"--dtype {base.dtype}: expected float32 or bfloat16")
        check_range("--", 1, images=base.images, peer_images=self.baseline_images,
                    repeats=self.repeats, threads=base.threads, width=base.d)
        constraints = [case.n for group in groups for case in _cases(group, base)]
        least = len(SPECIALS) + max(1, *constraints)
        if base.v >= least: return
        raise NocError(f"--words {base.v}: expected {least} or more, {len(SPECIALS)} of them special")

def _middle(runs, clock="seconds"):
    "The median of their seconds."
    return median(run[clock] for run in runs)

def _each(runs, clock="seconds"): return [round(run[clock], 4) for run in runs]

# ---- The cases
# `differ` and `shared` compare with the baseline at 1, 3 and 5 constraints, `plain` compares beam search without
# any. `generate` is about chapter 116: the same BART on both sides, with `grid_beam` here and `force_words_ids`
# there, and beside each its own beam search without words; three words are also given as texts, and with prices.
# `step` does so with a model that is so small that nearly all the time is the search's. `scale` shows how our own
# cost grows, in time and memory: with n from 0 to 8 (the finite-state machine only to 4, since each constraint
# doubles its states), with k from 1 to 10, and with the batch from 1 to 500.
def _cases(group, base):
    "The cases of a group, by its name. Raises `NocError` for an unknown one."
    both, few = ("bank", "grid"), replace(base, images=min(base.images, 10))
    def each(case, field, values, modes=both):
        return [replace(case, mode=mode, **{field: x}) for x in values for mode in modes]
    if group in ("differ", "shared"): return each(replace(base, constraints=group), "n", (1, 3, 5))
    if group == "plain": return [replace(base, mode="beam", n=0)]
    three, kinds = replace(base, mode="bank", constraints="shared"), ("ids", "texts", "prices")
    if group == "step":
        tiny = replace(three, v=60, d=16, layers=2, regions=4, images=2, threads=1)
        return [replace(tiny, given=given) for given in kinds]
    if group == "generate":
        given = [replace(three, given=given) for given in kinds[1:]]
        return each(three, "n", (1, 3, 5), ["bank"]) + given
    if group != "scale":
        known = "differ, shared, plain, generate, step or scale"
        raise NocError(f"cases {group!r}: expected {known}")
    return [*each(few, "n", range(9)), replace(few, mode="beam", n=0),
            *each(few, "n", range(5), ["cbs"]),
            *each(few, "k", (1, 2, 3, 7, 10)), *each(base, "images", (1, 50, 100, 200, 500))]

# Inside `generate` the model is one of transformers'. The library's own beam search on the same model is what the
# words are measured against, in runs that take turns. Where many work on one machine, seconds say little; the
# seconds of the processor are noted too.
def _beside_own(case, runs):
    "Metrics of a row, from the runs of each side."
    def middle(name, key): return median(run[key] for run in runs[name])
    ours, own = runs["ours"][0], runs["own"][0]
    out = dict(images_per_s=case.images / middle("ours", "seconds"), passes=ours["passes"],
               own_passes=own["passes"], cost=middle("ours", "seconds") / middle("own", "seconds"),
               cpu_cost=middle("ours", "cpu_seconds") / middle("own", "cpu_seconds"))
    for key in "seconds", "cpu_seconds":
        out[f"all_{key}"] = {}
        for name in runs: out[f"all_{key}"][name] = [round(run[key], 4) for run in runs[name]]
    if "peer" not in runs: return out
    return out | dict(
        peer_images_per_s=case.images / middle("peer", "seconds"),
        peer_cost=middle("peer", "seconds") / middle("peer_own", "seconds"),
        times=middle("peer", "seconds") / middle("ours", "seconds"),
        cpu_times=middle("peer", "cpu_seconds") / middle("ours", "cpu_seconds"))

@cache
def _tokenizer(v):
    "One with v words: letters and numbers."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({"a": 0} | {str(i): i for i in range(1, v)}, "a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)

def _asked(case):
    "Arguments of `grid_beam`."
    words = _words(case)[0]
    if case.given == "ids": return dict(words=[[word] for word in words])
    prices = dict(prices=[-1., 0., 1.][:case.n]) if case.given == "prices" else {}
    return dict(words=[*map(str, words)], processor=_tokenizer(case.v)) | prices

@torch.no_grad()
def _run_generate(case, model):
    "Seconds, CPU seconds and forward passes of `generate` for a batch."
    torch.manual_seed(1)
    ids, passes = case.place(torch.randint(4, case.v, (case.images, case.regions))), []
    how = dict(num_beams=case.k, do_sample=False, max_new_tokens=case.max_len,
               min_new_tokens=case.max_len, attention_mask=torch.ones_like(ids))
    if case.mode != "beam": how |= dict(custom_generate=grid_beam, mode=case.mode) | _asked(case)
    hook = model.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    start, cpu = clock(), time.process_time()
    model.generate(ids, **how)
    out = dict(seconds=clock() - start, cpu_seconds=time.process_time() - cpu)
    hook.remove()
    return out | dict(passes=len(passes))

# ---- The command
# Without `--peer` the other side is left out, and a line says so. Both sides run on the machine's GPU where it has
# one: `make gpu` makes all rows there, of 32 and 16 bits, and those of training.py.
def _line(row):
    "A row in words."
    c, m = row["config"], row["metrics"]
    text = (f"{row['case']} {c['mode']} n={c['n']} k={c['k']} images={c['images']} {c['given']}: "
            f"{m['images_per_s']:.1f} images/s")
    if "cost" in m: text += f", {m['cost']:.2f} times its own beam search"
    if "times" not in m: return text
    return f"{text}, baseline {m['peer_images_per_s']:.1f}, {m['times']:.1f} times"

def bench_search(
    out:str="results/bench.jsonl",  # rows are appended here
    peer:str=None,                  # Python of an environment with transformers==4.55.4
    cases:str="differ,shared,plain,scale", # groups of cases, with commas between them
    images:int=50,                  # images of a batch
    peer_images:int=10,             # images of the baseline's run where constraints differ
    repeats:int=5,                  # runs of each side
    width:int=512,                  # of the model
    words:int=10201,                # of the vocabulary
    layers:int=3,                   # of the model's encoder, and of its decoder
    dtype:Literal["float32", "bfloat16"]="float32", # of both sides
):
    "Measure the searches beside transformers 4.55 and append rows with table=bench."
    threads = torch.get_num_threads()
    base = _BenchCase(images=images, threads=threads, d=width, v=words, dtype=dtype,
                     layers=layers)
    bench, groups = _Bench(base, repeats, baseline_images=peer_images), cases.split(",")
    bench._check(groups)
    command = (f"benchmarks/search.py --cases {cases} --images {images} "
               f"--peer_images {peer_images} --repeats {repeats} --threads {threads} "
               f"--width {width} --words {words}")
    if layers != 3: command += f" --layers {layers}"
    if dtype != "float32": command += f" --dtype {dtype}"
    keep_blocks()                                                       # as `noc_caption` does
    if peer: bench.baseline, command = _Baseline(peer), command + " --peer PYTHON"
    else: print("no --peer: transformers 4.55.4 is left out")
    with locked(out):
        for row in bench._run(groups, out, command): print(_line(row))
    if bench.baseline: bench.baseline.close()

if __name__ == "__main__": script(bench_search)