"""Write a data set of full COCO's size, so that timing does not need COCO; benchmarks/scale.py uses it.

The content is the toy world's; the counts and the layout are COCO's: 82,783 + 40,504 images with five captions each,
about 912,180 boxes with outlines, 3.2 million detections, as many word vectors as GloVe has, and a store of region
features. No picture is drawn."""

import itertools, math, random
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from noc_nb.files.drawing import write_part
from noc_nb.files.store import RegionStore, write_items
from noc_nb.heldout import novel_images, words_of
from noc_nb.lab.config import Config
from noc_nb.lab.disk import whole_file, write_json
from noc_nb.lab.objects import save_classes, save_heldout
from noc_nb.lab.progress import progress
from noc_nb.lab.table import RegionTable
from noc_nb.toy import TOY_CLASSES, TOY_HELDOUT, VAL, detect, toy_image

# ---- Counts
# In a smaller world every count is a fraction of COCO's, except for word vectors, of which every run reads all.
@dataclass(frozen=True)
class WorldSize(Config):
    "The counts of a world; the defaults are those of full COCO."
    train:int = 82_783       # images of train2014
    kept:int = 70_194        # training images without a caption that mentions a held-out object
    half:int = 20_252        # images in each half of val2014
    novel_val:int = 3_018    # novel images in the first half
    novel_test:int = 3_024   # novel images in the second half
    vectors:int = 400_000    # words with a vector, as in GloVe's file of 6 billion words
    width:int = 300          # numbers per vector
    stored:int = 0           # images with stored features
    regions:int = 36         # regions per stored image
    feature:int = 1024       # numbers per region, 16 bits each

    @property
    def images(self)->int: return self.train + 2*self.half

    def share(self, n:int):
        "Return the counts of a world with 1/n of the images."
        names = "train", "kept", "half", "novel_val", "novel_test"
        return replace(self, **{name: getattr(self, name)//n for name in names}, stored=0)

# ---- The published split
# The lists have the names and the lengths of the published file. The images that mention a held-out object are drawn
# first; then each image gets a scene with or without such a mention. There are ten thousand scenes, which are reused
# with other words and other false detections: the content of a picture does not matter for timing.
def _split_lists(size, seed=0):
    "Return the lists of the published split file, name -> image ids, for images 1, 2, 3 ..."
    rng, first = random.Random(f"{seed}/split"), size.train + 1
    val2014 = list(range(first, first + 2*size.half))
    rng.shuffle(val2014)
    val, test = sorted(val2014[:size.half]), sorted(val2014[size.half:])
    return dict(train=sorted(rng.sample(range(1, first), size.kept)), val_train=val,
                test_train=test, val=sorted(rng.sample(val, size.novel_val)),
                test=sorted(rng.sample(test, size.novel_test)))

def _scene(seed, n, mentioning):
    "Return the n-th scene, with captions that mention a held-out object or do not."
    if not mentioning: return toy_image(seed, n + 1)
    for attempt in itertools.count():
        scene, captions = toy_image(seed, VAL + 1000*n + attempt)
        if any(novel_images({n: captions}, TOY_HELDOUT).values()): return scene, captions

# ---- The vocabulary
# The toy world has some 250 words. COCO's captions have about 27,000, of which some 10,000 occur at least five times;
# this number determines the size of the captioner's last layer and of CIDEr's tables. So each caption ends in a coined
# word, drawn by the law of Zipf and Mandelbrot: the word of rank r has the weight (r + 50)^-1.1. In three captions of
# a hundred the word has a hyphen, because as many of COCO's captions cannot be tokenised by the fast path.
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
_COINED = 30_000
_WEIGHTS = list(itertools.accumulate((rank + 50)**-1.1 for rank in range(_COINED)))

def _coined(rank):
    "Return the coined word of a rank, with four syllables."
    syllables = []
    for _ in range(3):
        rank, k = divmod(rank, len(_SYLLABLES))
        syllables.append(_SYLLABLES[k])
    return "".join(syllables) + "zu"

def _with_words(captions, rng):
    "Yield captions with a coined word at the end."
    for text, rank in zip(captions, rng.choices(range(_COINED), cum_weights=_WEIGHTS, k=5)):
        word = _coined(rank)
        if rng.random() < .03: word = f"well-{word}"
        yield f"{text[:-1]} {word}."

# ---- COCO's files
# They are written like the toy world's. In COCO's files every box has an outline, which takes most of the space; here
# it is an oval with 24 corners. Each scene and its detections are generated once.
_OVAL = [((1 + math.cos(k*math.pi/12))/2, (1 + math.sin(k*math.pi/12))/2) for k in range(24)]

def _outlined(box):
    "Return the annotation of a box with an outline."
    x, y, w, h = box["bbox"]
    outline = [round(v, 2) for a, b in _OVAL for v in (x + w*a, y + h*b)]
    return box | dict(segmentation=[outline])

def _found(seed, n, scene):
    "Return the toy world's detections: (d,6) class, centre, width and height, score."
    rows = []
    for label, (x1, y1, x2, y2), score in detect(random.Random(f"{seed}/{n}/found"), scene):
        rows.append((label, (x1 + x2)/2, (y1 + y2)/2, x2 - x1, y2 - y1, score))
    return np.array(rows).reshape(-1, 6)

@lru_cache(maxsize=None)
def _made(seed, n, mentioning):
    "Generate a scene, its captions and detections."
    scene, captions = _scene(seed, n, mentioning)
    return scene, captions, _found(seed, n, scene)

def _image(seed, i, mentioning): return _made(seed, i % (2000 if mentioning else 8000), mentioning)

def _write_annotations(root, part, ids, mentioning, seed):
    "Write the captions and instances of train2014 or val2014."
    images = {}
    for i in progress(ids, part):
        scene, captions, _ = _image(seed, i, i in mentioning)
        few = slice(9 + i % 2)                         # COCO has 7.4 boxes per image
        scene = replace(scene, labels=scene.labels[few], boxes=scene.boxes[few])
        images[i] = scene, list(_with_words(captions, random.Random(f"{seed}/{i}")))
    write_part(root, part, images, seed, _outlined)

# A detector that reports everything with a score of .05 or more has 26 boxes per image; the toy world's detector has
# nine. The other boxes get random places and classes. All detections are written as Parquet and as a list in COCO's
# results format, plain and compressed.
_NAMES = "category_id", "cx", "cy", "w", "h", "score"

def _false(rng, count):
    "Draw false detections (count,6), with the columns of `_found`."
    labels, sides = rng.choice(list(TOY_CLASSES), count), rng.uniform(.03, .2, (2, count))
    corners, scores = rng.random((2, count))*(1 - sides), .05 + rng.exponential(.08, count)
    return np.stack([labels, *(corners + sides/2), *sides, scores.clip(.05, .95).round(4)], 1)

def _detections(ids, mentioning, seed):
    "Return a table with the detections of all images, image by image."
    rng = np.random.default_rng(seed)
    detected = [_image(seed, i, i in mentioning)[2] for i in ids]
    images = [np.full(len(rows), i) for i, rows in zip(ids, detected)]
    true = np.concatenate(detected)
    invented = np.sort(rng.choice(ids, round(17.36*len(ids))))
    images, rows = np.append(np.concatenate(images), invented), _false(rng, len(invented))
    rows = np.concatenate([true, rows])
    order = np.argsort(images, kind="stable")
    columns = {name: column.astype(np.float32) for name, column in zip(_NAMES, rows[order].T)}
    columns["category_id"] = columns["category_id"].astype(int)
    return pyarrow.table(dict(image_id=images[order], **columns))

def _results(table, seed, mentioning):
    "Yield detections in COCO's results format."
    for row in (row for batch in table.to_batches(10_000) for row in batch.to_pylist()):
        i, w, h = row["image_id"], row["w"], row["h"]
        scene, *_ = _image(seed, i, i in mentioning)
        x, y = row["cx"] - w/2, row["cy"] - h/2
        bbox = [round(part*side, 2) for part, side in zip((x, y, w, h), scene.size*2)]
        yield dict(image_id=i, category_id=row["category_id"], bbox=bbox,
                   score=round(row["score"], 4))

def _write_detections(root, ids, mentioning, seed):
    "Write all files of detections, the Parquet file last: if it exists, so do the others."
    table = _detections(ids, mentioning, seed)
    for file in "simulated.json", "simulated.json.gz":
        write_items(root/"detections"/file, _results(table, seed, mentioning))
    with whole_file(root/"detections/simulated.parquet", "wb") as f:
        pyarrow.parquet.write_table(table, f)

# ---- Vectors and features
# Vectors and features are random numbers, because only their sizes matter. The file of vectors has the words of the
# classes, the coined words and others, 400,000 as in GloVe's file.
def _write_vectors(root, size, seed):
    rng = random.Random(f"{seed}/vectors")
    numbers = [f"{rng.gauss(0, .4):.4f}" for _ in range(50_000 + size.width)]
    words = [*words_of(TOY_CLASSES, TOY_HELDOUT), *map(_coined, range(_COINED))]
    words += [f"word{n}" for n in range(size.vectors - len(words))]
    with whole_file(root/f"vectors/random.{size.width}d.txt") as f:
        for word in words[:size.vectors]:
            start = rng.randrange(50_000)
            f.write(f"{word} {' '.join(numbers[start:start + size.width])}\n")

def _feature_tables(size, seed, images=200):
    "Yield tables with random features, some images at a time."
    rng, n = np.random.default_rng(seed), size.regions
    pool = rng.standard_normal((4096, size.feature), np.float32).astype(np.float16)
    labels = np.array(list(TOY_CLASSES), np.int32)
    for first in range(1, size.stored + 1, images):
        ids = np.arange(first, min(first + images, size.stored + 1))
        rows = len(ids)*n
        corner, extent = rng.uniform(0, .5, (2, rows, 2)).astype(np.float32)
        boxes = np.concatenate([corner, corner + extent], 1)
        yield RegionTable(ids, np.arange(0, rows + 1, n), boxes, rng.choice(labels, rows),
                          rng.random(rows, np.float32), pool[rng.integers(len(pool), size=rows)])

def _write_features(root, size, seed):
    RegionStore.write(root/"features", _feature_tables(size, seed))

# ---- All of it
# Existing files are not written again. So an interrupted run continues where it stopped, and a finished world takes no
# time.
def make_world(
    root,           # folder of the world, created if missing
    size:WorldSize, # counts of the world
    seed:int=0,     # seed of the world
)->Path:            # the folder of the world
    "Write the missing files of a world of any size, in COCO's layout."
    root, lists = Path(root), _split_lists(size, seed)
    train, val2014 = range(1, size.train + 1), range(size.train + 1, size.images + 1)
    mentioning = set(train) - set(lists["train"]) | {*lists["val"], *lists["test"]}
    def once(name, make, *args):
        if not (root/name).exists(): make(root, *args)
    for part, ids in dict(train2014=train, val2014=val2014).items():
        once(f"annotations/captions_{part}.json", _write_annotations, part, ids, mentioning, seed)
    ids = range(1, size.images + 1)
    once("detections/simulated.parquet", _write_detections, ids, mentioning, seed)
    once(f"vectors/random.{size.width}d.txt", _write_vectors, size, seed)
    save_classes(root/"classes.json", TOY_CLASSES)
    save_heldout(root/"heldout.json", TOY_HELDOUT)
    def published(ids): return {str(i): 1 for i in ids}
    lists = {part: published(ids) for part, ids in lists.items()}
    write_json(root/"splits/split_noc_coco.json", lists)
    if size.stored: once("features", _write_features, size, seed)
    return root


