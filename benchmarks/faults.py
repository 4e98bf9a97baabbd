"""Count the faults that readers mark in the captions of a pipeline on `val`, beside those of people's captions.

    python benchmarks/faults.py
    python benchmarks/faults.py --model FOLDER --ways prices --set prices.weight=1 --variant "mixed captioner"

The ways: `prices` are the pipeline's own prices, with `musts` every selected class has to be mentioned, and `free`
captions have no constraint. A row for each way is appended to results/faults.jsonl; chapter 69 shows them. Chapter 121
defines the faults. In `natural`, an image that is not novel has the weight that false positives have in F1 on `val`, so
that the mixture of images is that of the published split. People's rate is the mean over an image's references."""

from dataclasses import asdict

import numpy as np

from noc_nb.commands.command import one_thread, script
from noc_nb.core import require
from noc_nb.files.dataset import load_data
from noc_nb.lab.config import override
from noc_nb.lab.disk import find_data
from noc_nb.lab.novelty import _resamples, interval, nonnovel_weight
from noc_nb.lab.progress import say
from noc_nb.lab.results import append_row, new_row
from noc_nb.models.pipeline import NovelCaptioner
from noc_nb.scores.quality import BESIDE, FAULTS, quality_numbers, quality_scores
from noc_nb.scores.task import make_task

WAYS = dict(prices={}, musts=dict(price_weight="must"), free=dict(objects=()))

def _rates(numbers, draws):
    "Return name -> rate in percent, and the ends of its interval, for each fault; None: unknown."
    scores = quality_scores(draws @ numbers)
    names = [f"{fault}{side}" for fault in FAULTS for side in ("", *BESIDE)]
    def rounded(x): return None if np.isnan(x[0]) else [round(v, 2) for v in (float(x[0]), *interval(x))]
    return {name: rounded(scores[name]) for name in names}

def _weights(task):
    "Return the weight of each image with which the mixture of images is that of the published split."
    novel, weight = set().union(*task.novel.values()), nonnovel_weight(task.refs, task.novel)
    return np.array([1. if i in novel else weight for i in task.refs])

def bench_faults(
    model:str="lite",     # pipeline of the package, or its folder
    ways:str="prices,musts,free", # some of these, as above
    set:list=None,        # changes to the pipeline's configuration, as key=value
    variant:str=None,     # name of the row (default: the model's)
    data:str=None,        # folder in COCO's layout (default: the variable NOC_DATA)
    split:str="lite",     # name of the split
    out:str="results/faults.jsonl", # rows are appended here
):
    "Caption `val` in each way, and count faults."
    one_thread()
    require(WAYS.keys() >= {*ways.split(",")}, f"--ways {ways}", f"some of {', '.join(WAYS)}")
    pipeline, data = NovelCaptioner.from_pretrained(model), data or find_data()
    pipeline.cfg = override(pipeline.cfg, set)
    task, regions = make_task(data, split, "val"), load_data(data, split).regions
    draws = np.vstack([np.ones(len(task.refs)), _resamples(len(task.refs), 1000)])
    typed = f"benchmarks/faults.py --model {model} --ways {ways} --split {split}"
    if set: typed += f" --set {' '.join(set)}"
    for way in ways.split(","):
        found = pipeline([regions[i] for i in task.refs], **WAYS[way])
        captions = {i: c.caption for i, c in zip(task.refs, found)}
        numbers = quality_numbers(captions, task.refs, task.forms, task.truth, task.training_words)
        counts = numbers.sum(0)[-8:-4].astype(int).tolist()
        row = new_row("bench", "faults", variant=variant or model, way=way, command=typed, data=split, split="val",
                      config=asdict(pipeline.cfg), counts=dict(images=len(captions), **dict(zip(FAULTS, counts))),
                      metrics=_rates(numbers, draws), natural=_rates(numbers, draws*_weights(task)))
        append_row(out, row)
        say(f"{row['variant']}, {way}: {row['counts']}")

if __name__ == "__main__": script(bench_faults)
