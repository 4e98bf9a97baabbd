"""Measure the cost of the search, and compare it with transformers 4.55.4, the last version with constraints.

    python benchmarks/search.py --peer PYTHON     # PYTHON of an environment with transformers==4.55.4

Rows are appended to results/bench.jsonl; chapter 64 shows them. The models of both sides have random weights, the same
vocabulary, widths, layers and number format, and about as many parameters; both run on the same number of threads. No
caption may end before its last token, so both sides take the same number of steps. The two sides run in turn, and
medians are compared."""

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
from noc_nb.core import BOS, EOS, PAD, SPECIALS, UNK, NocError, default_device
from noc_nb.data import CaptionBatch
from noc_nb.encoder import CaptionerConfig
from noc_nb.fast.pool import Pool
from noc_nb.fast.modes import beam_search, grid_beam_search
from noc_nb.lab.config import Config, check_range
from noc_nb.lab.progress import keep_blocks, progress
from noc_nb.lab.results import append_row, new_row
from noc_nb.lab.runs import locked
from noc_nb.words.generate import grid_beam

# ---- One case
# A case defines what is searched and how. With `differ` each image has different constraints; with `shared` all images
# have the same.
@dataclass(frozen=True)
class _BenchCase(Config):
    "A case to measure; the default sizes are those of the paper's captioner."
    mode:str = "bank"       # "bank", "grid", "cbs", or "beam" for a plain beam search
    constraints:str = "differ" # "differ" or "shared"
    n:int = 3               # number of constraints per image, each a single word
    k:int = 5               # beam size
    images:int = 50         # images per batch
    max_len:int = 20        # tokens per caption, without an end token
    v:int = 10201           # words in the vocabulary
    regions:int = 50        # regions per image
    d:int = 512             # model width; the feed-forward network is four times as wide
    layers:int = 3          # layers in the encoder, and in the decoder
    threads:int = 2         # CPU threads
    dtype:str = "float32"   # number format: "float32" or "bfloat16"
    given:str = "ids"       # form of words for `generate`: "ids", "texts", or texts with "prices"

    def captioner(self)->Captioner:
        "Build a captioner with random weights, in eval mode."
        torch.manual_seed(0)
        sizes = dict(d_model=self.d, d_ff=4*self.d, layers=self.layers, max_len=self.max_len)
        words = [*SPECIALS, *(f"w{i}" for i in range(self.v - len(SPECIALS)))]
        return self.place(Captioner(CaptionerConfig(**sizes), words).eval())

    def place(self, x):
        "Move a model or tensor to the device and convert it to the case's number format."
        half = self.dtype == "bfloat16" and (not isinstance(x, Tensor) or x.is_floating_point())
        return x.to(default_device(), torch.bfloat16 if half else None)

_NO_END = PAD, BOS, EOS, UNK   # no caption ends before its last token

def _words(case):
    "Draw n constraint words for every image, as ids."
    rng = random.Random(0)
    rows = [rng.sample(range(len(SPECIALS), case.v), case.n) for _ in range(case.images)]
    return [rows[0]]*case.images if case.constraints == "shared" else rows

def _groups(case):
    "Return the constraint words as constraint groups."
    def one_word_groups(row): return [[(word,)] for word in row]
    return list(map(one_word_groups, _words(case)))

def _batch(case):
    "Draw random regions for a batch of images."
    torch.manual_seed(1)
    mask = torch.ones(case.images, case.regions, dtype=torch.bool)
    features = torch.randn(case.images, case.regions, 2048)
    return CaptionBatch(case.place(features), case.place(mask), None, list(range(case.images)))

# ---- Our side
# A run goes from region features to captions. Its time is divided into four phases: the encoder, the decoder's steps,
# the reordering of the decoder's keys and values, and the rest, which is the search itself.
@torch.no_grad()
def _run_ours(case, captioner):
    "Caption a batch once; return seconds, CPU seconds, the phases and the hypotheses scored."
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
    else: grid_beam_search(step, state, groups, absorb=False, mode=case.mode, **how)
    seconds, cpu = clock() - start, time.process_time() - cpu
    phases["search"] = seconds - sum(phases.values())
    return dict(seconds=seconds, cpu_seconds=cpu, asked=sum(asked), phases=phases)

# The *floor* is the share of the time that the machine would need if it did nothing but multiply matrices at its best
# measured speed: the number of hypotheses scored, times the operations of each, divided by that speed. (The speed is
# that of the shortest of many runs. `torch.utils.benchmark` gives a median, so it is not used.)
def clock()->float:
    "Wait until the device has finished, and return the time in seconds."
    if torch.cuda.is_available(): torch.cuda.synchronize()
    return time.perf_counter()

def _quickest(f, times=30):
    "Return the shortest of many run times, in seconds."
    return min(repeat(f, timer=clock, repeat=times, number=1))

def _matmul_speed(threads=2, rows=500, like=torch.empty(0)):
    "Return the best speed (multiplications and additions per second) of a feed-forward product."
    torch.set_num_threads(threads)
    x, w = torch.randn(rows, 512).to(like), torch.randn(2048, 512).to(like)
    return 2*rows*512*2048 / _quickest(lambda: F.linear(x, w))

def _flops(case, asked):
    "Count multiplications and additions in matrix products, except those of attention scores."
    d, l, n = case.d, case.layers, case.images*case.regions
    encoder = n*(2048*d + l*(4 + 8)*d*d + l*2*d*d)      # with the decoder's keys and values
    return 2*(encoder + asked*(l*(6 + 8)*d*d + 2*300*d + 300*case.v))

# The peak memory is measured by a thread that reads the size of the process while the search runs.
class _PeakMemory:
    "Records by how many MB the process grew; None if the system does not report it."
    def __enter__(self):
        try: ctypes.CDLL(None).malloc_trim(0)           # otherwise free memory would hide growth
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

# ---- The baseline
# transformers 4.55.4 is the last version with constraints; later versions have none. It needs a separate virtual
# environment, whose Python is an option of the command. It runs as a process that reads one case per line and
# answers with seconds.
def _bart(case):
    "Return the configuration of the baseline's model, a BART with the sizes of the case."
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
    "transformers 4.55.4, running in another Python."
    expected = "expected a Python with transformers==4.55.4"

    def __init__(self, python):
        self.python, pipes = python, dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try: self.process = subprocess.Popen([str(python), "-c", _BASELINE], text=True, **pipes)
        except OSError as e:
            raise NocError(f"{python}: cannot be run ({e.strerror}); {self.expected}") from None

    def run(self, case):
        "Run a case once; return seconds and the model's number of parameters, or raise `NocError`."
        try:
            about = dict(words=_words(case), bart=_bart(case))
            self.process.stdin.write(json.dumps(asdict(case) | about) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError: answer = ""
        if answer: return json.loads(answer)
        last = (self.process.stderr.read().strip().splitlines() or ["no answer"])[-1]
        raise NocError(f"{self.python}: {last}; {self.expected}")

    def close(self):
        "End the process of the baseline."
        self.process.stdin.close()
        self.process.wait()

# ---- Both sides in turn
# If constraints differ, the baseline can caption only one image at a time, so it gets fewer images: `peer_images`.
# (In options and rows the baseline is called `peer`.) On a machine with other users, wall-clock time also depends on
# their programs, so rows have CPU seconds as well.
@dataclass
class _Bench:
    "The settings that all measurements share."
    base:_BenchCase            # case with the sizes
    repeats:int = 5           # runs of each side, whose median is used
    baseline:_Baseline = None # baseline to compare with, or None
    baseline_images:int = 10  # images in the baseline's run if constraints differ

    def runs(self, case, captioner, limit=math.inf):
        "Return runs by side, the baseline's case, our memory. Start no run after `limit` seconds."
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
        "Return the metrics of a row; `speed` is that of `_matmul_speed`."
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
        "Return a row's metrics: `generate` with words and without, on our side and the baseline's."
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
        "Measure all cases of some groups, and append and return their rows."
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
        "Raise `NocError` for an unknown group, or a number that is out of range."
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
    "Return the median seconds of some runs."
    return median(run[clock] for run in runs)

def _each(runs, clock="seconds"): return [round(run[clock], 4) for run in runs]

# ---- The cases
# `differ` and `shared` compare with the baseline at 1, 3 and 5 constraints; `plain` compares beam search without
# constraints. `generate` measures the search of chapter 116: the same BART on both sides, with `grid_beam` on ours and
# `force_words_ids` on the baseline's, each beside its own beam search without words; three words are also given as
# texts, and with prices. `step` does the same with a model so small that the search takes nearly all the time. `scale`
# measures how our time and memory grow: with n from 0 to 8 (for the finite-state machine only to 4, because each
# constraint doubles its states), with k from 1 to 10, and with the batch from 1 to 500.
def _cases(group, base):
    "Return the cases of a group. Raise `NocError` if there is no such group."
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

# In these groups the model is one of transformers. Search with words is compared with the library's own beam search on
# the same model, in alternating runs. On a busy machine wall-clock seconds are not reliable, so CPU seconds are
# recorded, too.
def _beside_own(case, runs):
    "Compute the metrics of a row from the runs of each side."
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
    "Build a tokenizer with v words: one letter, and numbers."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({"a": 0} | {str(i): i for i in range(1, v)}, "a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)

def _asked(case):
    "Return the arguments that give the words to `grid_beam`."
    words = _words(case)[0]
    if case.given == "ids": return dict(words=[[word] for word in words])
    prices = dict(prices=[-1., 0., 1.][:case.n]) if case.given == "prices" else {}
    return dict(words=[*map(str, words)], processor=_tokenizer(case.v)) | prices

@torch.no_grad()
def _run_generate(case, model):
    "Run `generate` on a batch; return seconds, CPU seconds and the number of decoder calls."
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
# Without `--peer` the baseline is not measured, and the command prints a line about it. If the machine has a GPU, both
# sides run on it: `make gpu` measures all rows there, in 32 and 16 bits, and those of training.py.
def _line(row):
    "Describe a row in one line."
    c, m = row["config"], row["metrics"]
    text = (f"{row['case']} {c['mode']} n={c['n']} k={c['k']} images={c['images']} {c['given']}: "
            f"{m['images_per_s']:.1f} images/s")
    if "cost" in m: text += f", {m['cost']:.2f} times its own beam search"
    if "times" not in m: return text
    return f"{text}, baseline {m['peer_images_per_s']:.1f}, {m['times']:.1f} times"

def bench_search(
    out:str="results/bench.jsonl",  # rows are appended here
    peer:str=None,                  # Python of an environment with transformers==4.55.4
    cases:str="differ,shared,plain,scale", # groups of cases, separated by commas
    images:int=50,                  # images per batch
    peer_images:int=10,             # images in the baseline's run if constraints differ
    repeats:int=5,                  # runs of each side
    width:int=512,                  # width of the model
    words:int=10201,                # words in the vocabulary
    layers:int=3,                   # layers in the encoder, and in the decoder
    dtype:Literal["float32", "bfloat16"]="float32", # number format of both sides
):
    "Measure the searches and transformers 4.55.4, and append rows with table=bench."
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
    keep_blocks()                                                       # as in `noc_caption`
    if peer: bench.baseline, command = _Baseline(peer), command + " --peer PYTHON"
    else: print("no --peer: transformers 4.55.4 is not measured")
    with locked(out):
        for row in bench._run(groups, out, command): print(_line(row))
    if bench.baseline: bench.baseline.close()

if __name__ == "__main__": script(bench_search)