"""Judge the paper's claims, and compare systems and variants, on committed captions.

    NOC_DATA=DIR python benchmarks/claims.py claims      # results/claims.jsonl
    NOC_DATA=DIR python benchmarks/claims.py systems     # results/systems.jsonl
    NOC_DATA=DIR python benchmarks/claims.py variants OUT.jsonl BASE RUN...

A claim is the difference of two lines of a table, a system the captions of three training runs, and a variant a run of
`noc_reproduce` that is compared, line by line, with a plain run (`BASE`). The draws of the bootstrap are of images."""
import sys
from functools import cache
from pathlib import Path

import numpy as np

from noc_nb.commands.command import script
from noc_nb.core import require
from noc_nb.files.captions import read_system
from noc_nb.lab.disk import find_data, read_json
from noc_nb.lab.metrics import CaptionScorer
from noc_nb.lab.novelty import interval, nonnovel_weight
from noc_nb.lab.progress import progress
from noc_nb.lab.results import (append_row, captions_file, metric, new_row, read_rows, score_place,
                                table_line, write_rows)
from noc_nb.lab.verdict import Claim, claim_keys, gap
from noc_nb.scores.task import make_task

_PLACES = {c: score_place(c) for c in ("in_C", "out_C", "pooled_C", "out_F1")}

def _drawing(task, samples=1000, **protocol):
    "Return a function from a file of captions to the bootstrap samples of its scores."
    scorer = CaptionScorer(task.refs, ("C",))
    @cache
    def drawn(path):
        captions, _ = task.match(read_system(path), path)
        return task.judge(captions, scorer, **protocol).bootstrap(samples)
    return drawn

def _task(data, split, part="test"):
    root = find_data(data)
    require(root, "data: no folder", "a COCO root, or the variable NOC_DATA")
    return make_task(root, split, part)

# ---- Claims: each is judged on the captions of its two lines. The detections, features and seeds of a row are those of
# the result row of the better line whose CIDEr-D equals that of the captions.
def _row_of(rows, line, drawn):
    "Return detections, features and seed of a line's captions, from the row with their CIDEr-D."
    score = drawn["in", "C"][0]
    about = dict.fromkeys(("detections", "features", "seed"))
    for r in rows:
        if r.get("variant") or (r["row"], r.get("training"), r.get("lambda0")) != line: continue
        now = metric(r, "in_C")
        if now is not None and np.isclose(now, score): return {k: r[k] for k in {*about, "world"} & r.keys()}
    return about

def write_claims(
    results:str="results", # folder with rows and captions/; rows are appended to claims.jsonl
    data:str=None,         # folder in COCO's layout; default: the variable NOC_DATA
    split:str="lite",      # name in the data's splits/, and first part of caption files' names
    samples:int=20_000,    # number of bootstrap samples
):
    "Compute every claim that has captions. Raise `NocError` if data or captions are missing."
    folder = Path(results)/"captions"
    def file(line): return captions_file(folder, line, f"{split}-")
    claims = Claim.read("paper") + Claim.read("known")
    claims = [c for c in claims if file(c.better).exists() and file(c.worse).exists()]
    name = file(table_line("none", "xe")).name
    require(claims, f"{folder}: no captions of any claim", f"files like {name}")
    task = _task(data, split)
    run_rows = read_rows(results, data=split, split="test")
    of_file = _drawing(task, samples)
    def drawn(line): return of_file(file(line))
    def known(line): return _row_of(run_rows, line, drawn(line))
    about = dict(variant=None, data=split, split="test", command="benchmarks/claims.py claims")
    about |= claim_keys(task.refs, task.novel, samples)
    rows = [claim.row(drawn, known, **about) for claim in progress(claims, "claims")]
    for row in rows: append_row(Path(results)/"claims.jsonl", row)
    return rows

# ---- Systems: the paper's DGBS is compared with two captioners, one that was trained on plain CIDEr, and our mixed one,
# which was trained without constraints for half of the images of each step. Musts are constraints that every caption has
# to satisfy, prices are constraints that the search may leave out at a cost, free means without constraints.
_SYSTEMS = {"plain CIDEr, free": "cider-none", "DGBS, free": "cider_dgbs-none",
            "mixed, free": "mix-cider_dgbs-none", "DGBS, musts": "borrow-cider_dgbs-selector-0.2",
            "DGBS, prices": "prices-cider_dgbs-selector-0.2",
            "mixed, prices": "mix-cider_dgbs-selector-0.2"}
_RIVALS = {"DGBS, free": "plain CIDEr, free", "mixed, free": "plain CIDEr, free",
           "DGBS, musts": "plain CIDEr, free", "DGBS, prices": "DGBS, musts",
           "mixed, prices": "DGBS, prices"}

def write_systems(
    results:str="results", # folder with captions/; rows are appended to systems.jsonl
    data:str=None,         # folder in COCO's layout; default: the variable NOC_DATA
    split:str="lite",      # the same as in `write_claims`
    samples:int=20_000,    # number of bootstrap samples
):
    "Compare systems of three training runs with their rivals. Raise `NocError` without data."
    drawn = _drawing(_task(data, split), samples)
    def side(name):
        starts = [f"captions/{split}-{seed}" for seed in ("", "seed1-", "seed2-")]
        return [drawn(Path(results)/f"{start}{_SYSTEMS[name]}.json.gz") for start in starts]
    rows = []
    for name, rival in progress(_RIVALS.items(), "systems"):
        sides = side(rival), side(name)
        gaps = {c: gap(*(np.array([run[place] for run in runs]) for runs in sides), paired=True)
                for c, place in _PLACES.items()}
        rows.append(new_row("bench", "systems", system=name, rival=rival, data=split, split="test",
                            detections="simulated", seed=[0, 1, 2], metrics=gaps, seconds=0.,
                            config=dict(samples=samples, seed=0), command="benchmarks/claims.py systems"))
    for row in rows: append_row(Path(results)/"systems.jsonl", row)
    return rows

# ---- Variants: one switch of the plain run is changed, and the rest stays the same. The key `rival` of a row names the
# line and the variant on the other side.
def _same_images(base, folder):
    "Return split, part and detections of two runs. Raise `NocError` if they differ."
    runs = [read_json(Path(f)/"run.json") for f in (base, folder)]
    expected, actual = [(r["preset"]["split"], r["part"], r["detections"]) for r in runs]
    require(actual == expected, f"{folder}: a run on {actual}", f"{expected}, as in {base}")
    return expected

def _variant_rows(base, folder, drawn, against):
    "Yield row, line and Δ for every row of a variant whose captions exist in both runs."
    for r in read_rows(Path(folder)/"rows.jsonl"):
        line = table_line(r["row"], r["training"], r["lambda0"])
        plain = captions_file(Path(base)/"captions", against or line)
        other = captions_file(Path(folder)/"captions", line)
        if not (r["training"] and plain.exists() and other.exists()): continue
        deltas = {c: drawn(other)[place] - drawn(plain)[place] for c, place in _PLACES.items()}
        yield r, line, {c: dict(difference=float(x[0]), interval=interval(x)) for c, x in deltas.items()}

def write_variants(
    path,             # path of the .jsonl file, which is replaced
    base,             # folder of the plain run
    others,           # folders of the variants' runs
    data=None,        # folder in COCO's layout; default: the variable NOC_DATA
    samples:int=1000, # number of bootstrap samples
    against=None,     # line of the plain run with which all are compared; default: the same line
):
    "Compare variants with the plain run. Raise `NocError` if their images differ."
    for folder in (base, *others): split, part, _ = _same_images(base, folder)
    task = _task(data, split, part)
    weight = nonnovel_weight(list(task.refs), task.novel) if part == "val" else 1.
    drawn = _drawing(task, samples, fp_weight=weight)
    [variant] = {r["variant"] for r in read_rows(Path(base)/"rows.jsonl")}
    copied = "training", "lambda0", "variant", "data", "split", "detections", "features", "seed", "command"
    rows = []
    for folder in progress(others, "variants"):
        for r, line, metrics in _variant_rows(base, folder, drawn, against):
            rival = dict(line=(against or line)[0], variant=variant)
            rows.append(new_row("bench", "claim", line=line[0], metrics=metrics, rival=rival,
                                **{key: r[key] for key in copied},
                                **claim_keys(task.refs, task.novel, samples, weight)))
    write_rows(path, rows)
    return rows

if __name__ == "__main__":
    name = sys.argv.pop(1) if sys.argv[1:] else ""
    if name == "variants": write_variants(*sys.argv[1:3], sys.argv[3:])
    elif name in ("claims", "systems"): script(dict(claims=write_claims, systems=write_systems)[name])
    else: sys.exit(f"benchmarks/claims.py {name}: expected claims, systems or variants")
