#!/usr/bin/env python3
"""Check that the working tree has the same results as REVISION:   python tests/same.py REVISION

Checks REVISION out beside a copy of the working tree, runs the commands of both on this machine with the same seeds,
and compares what they write. Prints "the same", or the differences, and exits with 0 or 1. Needs `NOC_DATA`, and takes
some minutes. It uses only commands and files, because modules may have other names in the two trees. If the trees have
different versions of the toy world, its results are not compared."""
import gzip, hashlib, json, os, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from pathlib import Path

import pandas as pd
from safetensors import safe_open

HERE = Path(__file__).resolve().parent.parent
CHANGING = {"time", "seconds", "commit", "device"}   # keys of rows and reports that differ between two equal runs
TOY = ["--metrics", "C,B4", "--rows", "none,top2,selector", "--tables", "1", "--part", "val",
       "--set", "xe.epochs=1", "train_selector.epochs=2"]
WORDS = {"musts": ["--price-weight", "must"], "prices": ["--price-weight", "1"], "none": ["--objects", ""]}

def checked_out(revision, folder):
    "Copy the files of a revision, or of the working tree (None), to a folder outside git."
    folder.mkdir()
    files = ["settings.ini", "noc_nb"]
    archive = ["git", "archive", revision, *files] if revision else ["tar", "c", "--exclude=__pycache__", *files]
    content = subprocess.run(archive, cwd=HERE, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", folder], input=content, check=True)
    return folder

def run(tree, out, command, *options):
    "Run one of the console commands of a tree, as its `settings.ini` names them, from the folder `out`."
    ini = ConfigParser(delimiters=["="])
    ini.read(tree/"settings.ini", encoding="utf-8")
    scripts = dict(entry.split("=") for entry in ini["DEFAULT"]["console_scripts"].split())
    module, function = scripts[command].split(":")
    code = f"import sys, {module} as module; sys.argv[0] = {command!r}; module.{function}()"
    variables = os.environ | dict(PYTHONPATH=str(tree), OMP_NUM_THREADS="1", NOC_COMMIT="same", PYTHONHASHSEED="0")
    done = subprocess.run([sys.executable, "-c", code, *map(str, options)], cwd=out, env=variables, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode: sys.exit(f"{tree}: {command} ended with {done.returncode}:\n{done.stderr[-2000:]}")

def inputs(coco, folder):
    "Write the inputs of both sides: boxes of 200 `lite` val images, and ten photos with their boxes."
    ids = json.loads((coco/"splits/lite.json").read_text())["val"][:200]
    boxes = pd.read_parquet(coco/"detections/simulated.parquet")
    boxes[boxes.image_id.isin(ids)].to_parquet(folder/"val.parquet")
    (folder/"val.txt").write_text("\n".join(map(str, ids)))
    photos = sorted((coco/"images").glob("*.jpg"))[:10]
    (folder/"photos").mkdir()
    for photo in photos: (folder/"photos"/photo.name).symlink_to(photo)
    found = json.loads((coco/"detections/picodet_s_416.json").read_text())
    ten = {int(photo.stem[-12:]) for photo in photos}
    (folder/"photos.json").write_text(json.dumps([box for box in found if box["image_id"] in ten]))

def work(tree, coco, given, out):
    "Run all commands in one tree, and write their files to `out`."
    out.mkdir()
    run(tree, out, "noc_reproduce", "--preset", "toy", "--out", "toy", *TOY)
    for name, options in WORDS.items():
        run(tree, out, "noc_caption", given/"val.parquet", "--model", "lite", "--out", f"{name}.jsonl", *options)
        run(tree, out, "noc_eval", "--captions", f"{name}.jsonl", "--data", coco, "--split", given/"val.txt",
            "--metrics", "C,B4,R", "--out", f"report_{name}")
    run(tree, out, "noc_caption", given/"photos.json", "--images", given/"photos", "--out", "photos.jsonl")

def weights(tree):
    "Return checksum and state-dict keys of every shipped weights file, by model and part."
    shipped = {}
    for path in (tree/"noc_nb").rglob("*.safetensors"):
        with safe_open(path, "pt") as file: keys = sorted(file.keys())
        name = "/".join(path.parts[-3:]).removeprefix("models/")
        shipped[name] = dict(sum=hashlib.sha256(path.read_bytes()).hexdigest(), keys=" ".join(keys))
    return shipped

def content(path):
    "Read a file of JSON or JSON lines, compressed or not."
    text = (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8").read()
    return [*map(json.loads, text.splitlines())] if ".jsonl" in path.name else json.loads(text)

def facts(tree, out):
    "Return the results of one side that are compared."
    names = "toy/rows.jsonl", "toy/captions/*", "*.jsonl", "report_*/report.json"
    files = [path for name in names for path in sorted(out.glob(name))]
    return {str(path.relative_to(out)): content(path) for path in files} | {"weights": weights(tree)}

def world(out):
    "Return the version of the toy world of one side."
    file = out/"toy/data/toy_world.json"
    return content(file)["version"] if file.exists() else 1

def without_toy(found):
    "Leave out the results of the toy world."
    kept = {name: part for name, part in found.items() if not name.startswith("toy/")}
    return kept | {"weights": {name: x for name, x in found["weights"].items() if not name.startswith("toy/")}}

def differences(there, here, place=""):
    "Yield every place at which two nested structures differ, with both values."
    if isinstance(there, list) and isinstance(here, list):
        there, here = dict(enumerate(there)), dict(enumerate(here))
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*there, *(here.keys() - there.keys())]:
            if key in CHANGING: continue
            yield from differences(there.get(key, "nothing"), here.get(key, "nothing"), f"{place}: {key}".strip(": "))
    elif there != here: yield f"{place}: {str(there)[:100]!r} there, {str(here)[:100]!r} here"

def main(revision, most=20):
    "Compare both sides, and print a limited number of differences for each file."
    coco = Path(os.environ.get("NOC_DATA") or sys.exit("set NOC_DATA to the folder of COCO")).resolve()
    with tempfile.TemporaryDirectory(prefix="same-") as folder:
        folder = Path(folder)
        inputs(coco, folder)
        trees = {folder/"there": checked_out(revision, folder/"revision"),
                 folder/"here": checked_out(None, folder/"working")}
        with ThreadPoolExecutor(2) as both: [*both.map(lambda out: work(trees[out], coco, folder, out), trees)]
        there, here = (facts(tree, out) for out, tree in trees.items())
        versions = [world(out) for out in trees]
    if len({*versions}) > 1:
        print("versions {} and {} of the toy world: its results are not compared".format(*versions))
        there, here = without_toy(there), without_toy(here)
    equal = True
    for name in [*there, *(here.keys() - there.keys())]:
        found = [*differences(there.get(name, "nothing"), here.get(name, "nothing"), name)]
        print(*found[:most], sep="\n", end="\n" if found else "")
        if len(found) > most: print(f"{name}: {len(found) - most:,} more differences")
        equal = equal and not found
    print("the same" if equal else "not the same")
    return not equal

if __name__ == "__main__":
    if len(sys.argv) != 2: sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
