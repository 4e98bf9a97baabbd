"""Measure everything that waits for a GPU, in steps that can be interrupted: a second call goes on with the next step.

    python benchmarks/gpu.py _runs/gpu --peer PYTHON --data COCO --minutes 13    # `make gpu`; small: --small

Measuring comes first and takes about seven minutes on one GPU; the rest of the time is for training the captioner at
the paper's size on `lite`. Rows are appended to gpu.jsonl in the folder, with the step's name; chapter 64 shows those in
results/gpu.jsonl. A step that fails is named with its last lines, and the next one begins."""

import subprocess, sys, time, warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from search import _BenchCase, _NO_END, _batch, _groups, _quickest
from noc_nb.commands.command import script
from noc_nb.core import BOS, EOS, NocError, default_device
from noc_nb.fast.pool import Pool
from noc_nb.fast.modes import grid_beam_search
from noc_nb.lab.results import append_row, new_row, read_rows

HERE = Path(__file__).resolve().parent
FULL = SimpleNamespace(images=(10, 50, 200), repeats=5, sizes=[],
                       large="--images 2 --width 1280 --words 32000 --layers 10",  # half a billion parameters
                       train=["repeats=5"], page="5", model=["captioner.d_model=512", "captioner.d_ff=2048"])
SMALL = SimpleNamespace(images=(2,), repeats=1, sizes="--width 16 --words 60 --layers 1".split(),
                        large="--images 1 --width 16 --words 60 --layers 1",
                        train="images=2 captions=4 words=60 known=10 repeats=1".split(), page="1",
                        model=["captioner.d_model=16", "captioner.d_ff=32", "xe.epochs=1", "scst.epochs=1"])

# ---- Limits
# A search step cannot be faster than its matrix products, each of which is at least one launch.
def products(case, rows):
    "Return the shapes (rows, in, out) of a decoder step's matrix products for so many hypotheses."
    d = case.d
    layer = [(rows, d, 3*d), (rows, d, d), (rows, d, d), (rows, d, d), (rows, d, 4*d), (rows, 4*d, d)]
    return case.layers*layer + [(rows, 300, d), (rows, d, 300), (rows, 300, case.v)]

def limit(case, rows):
    "Return the shortest time of a step's matrix products alone, in seconds."
    pairs = [(case.place(torch.randn(n, i)), case.place(torch.randn(o, i))) for n, i, o in products(case, rows)]
    def run():
        for x, w in pairs: F.linear(x, w)
    return _quickest(run)

def limits(out, o, small):
    "Append a row with the limits of each batch size, in both formats."
    for images in small.images:
        for dtype in "float32", "bfloat16":
            case = replace(base(small), images=images, dtype=dtype)
            found = {str(rows): limit(case, rows) for rows in (images*case.k, images*case.k*4)}
            yield dict(case="limit", config=dict(images=images, dtype=dtype, k=case.k),
                       metrics=dict(step_seconds=found, products=len(products(case, 1))))

def base(small):
    "Return the case of the paper's size, or a small one."
    return _BenchCase(d=16, v=60, layers=1, images=2, max_len=6) if small is SMALL else _BenchCase()

# ---- One search step, by kernels and synchronisations
def run_search(case, captioner, max_len):
    "Search once with the bank at three constraints, as `benchmarks/search.py` does."
    batch, groups, pool = _batch(case), _groups(case), Pool(captioner)
    state = pool.start(batch.features, batch.mask, max_len)
    grid_beam_search(pool.step, state, groups, bos=BOS, eos=EOS, k=case.k, max_len=max_len, forbidden=_NO_END,
                     reorder=pool.reorder, absorb=False, mode="bank")

def waits(case, captioner, max_len):
    "Return place in our code -> how often the search waited for the GPU there."
    if not torch.cuda.is_available(): return None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try: run_search(case, captioner, max_len)
        finally: torch.cuda.set_sync_debug_mode("default")
    found = {}
    for w in seen:
        place = f"{Path(w.filename).name}:{w.lineno}"
        found[place] = found.get(place, 0) + 1
    return found

@torch.no_grad()
def profiled(out, o, small):
    "Yield a row: kernels, launches and synchronisations of one step at 50 x 5, as the difference of two lengths."
    case = replace(base(small), images=min(50, max(small.images)), n=3)
    captioner = case.captioner()
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA]*cuda
    tables, places = [], []
    for steps in case.max_len - 1, case.max_len:                       # the difference is one step
        run_search(case, captioner, steps)
        with profile(activities=activities) as p: run_search(case, captioner, steps)
        names = {}
        for e in p.key_averages():
            used = e.self_device_time_total if cuda else e.self_cpu_time_total
            names[e.key] = e.count, used
        tables.append(names)
        places.append(waits(case, captioner, steps))
    few, many = tables
    kernels = {name: dict(count=count - few.get(name, (0, 0))[0], us=round(used - few.get(name, (0, 0))[1], 1))
               for name, (count, used) in many.items()}
    more = [(name, kernel) for name, kernel in kernels.items() if kernel["count"] > 0]
    kernels = dict(sorted(more, key=lambda item: -item[1]["us"]))
    launches = kernels.get("cudaLaunchKernel", {}).get("count")
    yield dict(case="profile", config=dict(images=case.images, k=case.k, n=case.n),
               metrics=dict(kernels=kernels, launches=launches, waits=places,
                            limit_seconds=limit(case, case.images*case.k)))

# ---- The other scripts, as they are typed
def typed(*words):
    "Return a step that runs a script; its rows go to a file of its own beside the others."
    def step(out, o, small):
        rows = out/"step.jsonl"
        rows.unlink(missing_ok=True)
        command = [sys.executable, *(str(rows) if w == "ROWS" else str(w) for w in words)]
        peer = ["--peer", o.peer] if o.peer and "search.py" in command[1] else []
        done = subprocess.run(command + peer, cwd=HERE.parent, stdout=sys.stderr)
        if done.returncode: raise RuntimeError(f"{' '.join(map(str, words))}: ended with {done.returncode}")
        yield from read_rows(rows)
        rows.unlink()
    return step

def steps(small):
    "Return name -> function of all steps, the measurements first."
    found = {"limits": limits, "profile": profiled}
    script_, repeats = HERE/"search.py", ["--repeats", small.repeats]
    for dtype in "float32", "bfloat16":
        for images in small.images:
            cases = "--cases", "differ,shared,plain", "--images", images, "--dtype", dtype
            found[f"search {images} {dtype}"] = typed(script_, "--out", "ROWS", *cases, *repeats, *small.sizes)
        found[f"generate {dtype}"] = typed(script_, "--out", "ROWS", "--cases", "generate", "--dtype", dtype, *repeats,
                                           *small.large.split())
    found["training steps"] = typed(HERE/"training.py", "--out", "ROWS", "--set", *small.train)
    found["page"] = typed(HERE/"page.py", "ROWS", small.page)
    return found

def train(out, o, small, left):
    "Train the captioner at the paper's size and score it on val, as far as the time goes; a second call goes on."
    command = ["--preset", "lite", "--data", o.data, "--part", "val", "--variant", "d=512, three layers",
               "--rows", "none,selector", "--training", "xe,cider_dgbs", "--tables", "1", "--metrics", "C,B4,R",
               "--set", *small.model, "--out", out/"large", "--resume"]
    code = "import sys; from noc_nb.commands.cli import main; sys.argv = ['noc_reproduce', *sys.argv[1:]]; main()"
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, command)])
    try: process.wait(max(left, 1))
    except subprocess.TimeoutExpired:
        process.send_signal(2)                                        # noc_reproduce writes a checkpoint and stops
        process.wait(60)

def bench_gpu(
    out:str="_runs/gpu",  # folder of gpu.jsonl and of the trained models
    peer:str=None,        # Python of an environment with transformers==4.55.4
    data:str=None,        # folder of COCO, for the training; none: only the measurements
    minutes:float=13.,    # time for everything
    small:bool=False,     # the smallest sizes, to try it without a GPU
):
    "Run the steps that are not in gpu.jsonl yet, then train with the time that is left."
    o, size, start = SimpleNamespace(peer=peer, data=data), SMALL if small else FULL, time.time()
    folder = Path(out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder/"gpu.jsonl"
    done = {row["step"] for row in read_rows(file)} if file.exists() else set()
    for name, step in steps(size).items():
        if name in done or time.time() - start > 60*minutes: continue
        print(f"{time.time() - start:4.0f} s  {name}", file=sys.stderr)
        try: found = [*step(folder, o, size)]
        except (RuntimeError, OSError, NocError) as e:
            print(f"{name}: {e}")
            continue
        for row in found:
            if "device" not in row: row = new_row("bench", name, command="benchmarks/gpu.py", **row)
            append_row(file, row | dict(step=name))
    if data: train(folder, o, size, 60*minutes - (time.time() - start))
    print(f"rows in {file}: {len(list(read_rows(file)))}; device: {default_device()}")

if __name__ == "__main__": script(bench_gpu)
