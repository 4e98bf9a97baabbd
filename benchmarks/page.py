"""Measure how long the page of `noc_app` takes for a picture: `python benchmarks/page.py FILE.jsonl [REPEATS]` appends
a row for each pipeline of the package. The pictures are toy scenes; their boxes get classes that the pipeline has."""
import sys
from dataclasses import replace
from statistics import median
import torch
from search import clock
from noc_nb.lab.results import append_row, new_row
from noc_nb.models.pipeline import NovelCaptioner, shipped
from noc_nb.pages.app import _propose, _stage, _toy_scene, _view

def seconds(pipeline, repeats):
    "Return the median seconds for opening an image and for a new price, without the first run."
    known, opened, changed = torch.tensor([*pipeline.classes]), [], []
    for n in range(repeats + 1):
        image, regions = _toy_scene(n)
        regions = replace(regions, labels=known[regions.labels % len(known)])
        start = clock()
        v = _view(pipeline, image, regions)
        middle = clock()
        _stage(_propose(v))
        opened.append(middle - start)
        changed.append(clock() - middle)
    return dict(open_seconds=median(opened[1:]), change_seconds=median(changed[1:]))

def main(out, repeats=5):
    for name in shipped():
        metrics = seconds(NovelCaptioner.from_pretrained(name), int(repeats))
        row = new_row("bench", "page", variant=name, command=f"benchmarks/page.py FILE {repeats}", metrics=metrics,
                      threads=torch.get_num_threads())
        append_row(out, row)
        print(f"page {name}: opened in {metrics['open_seconds']:.3f} s, changed in {metrics['change_seconds']:.3f} s")

if __name__ == "__main__": main(*sys.argv[1:])
