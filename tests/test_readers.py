"Test that the time per item and the memory of readers do not grow with the number of items."
import gzip, itertools, json, sys, time, tracemalloc
import numpy as np
import pyarrow, pyarrow.parquet
import pytest
from noc_nb.cider import CiderD
from noc_nb.constraints import COCO_CLASSES
from noc_nb.data import CocoData, SelectorExamples
from noc_nb.fast.cider import CiderD
from noc_nb.fast.decode import Decoded
from noc_nb.files.boxes import ground_truth, read_detections
from noc_nb.files.captions import read_captions, read_system
from noc_nb.files.images import json_items
from noc_nb.files.store import RegionStore
from noc_nb.files.vectors import read_vectors
from noc_nb.heldout import COCO_HELDOUT
from noc_nb.lab.disk import write_json
from noc_nb.lab.results import append_row, read_results, read_rows, write_results
from noc_nb.pages.gallery import _read_lines
from noc_nb.vocab import Vocab, tokenize

COUNTS = 5_000, 20_000, 80_000
FEWER = 2_000, 8_000, 32_000      # for readers that take longer per item

def sizes_of(count): return {i: (640, 480) for i in range(1, count//5 + 1)}   # five items per image

def images_of(count): return [dict(id=i, width=w, height=h) for i, (w, h) in sizes_of(count).items()]

def results(count):
    rng = np.random.default_rng(0)
    corners, scores = rng.uniform(0, 300, (count, 2)).round(2).tolist(), rng.random(count).round(6).tolist()
    return [dict(image_id=1 + n//5, category_id=18, bbox=[*corner, 99.5, 64.25], score=score)
            for n, (corner, score) in enumerate(zip(corners, scores))]

def detections_json(folder, count):
    write_json(folder/"d.json", results(count))
    return lambda: read_detections(folder/"d.json", sizes_of(count))

def detections_gz(folder, count):
    with gzip.open(folder/"d.json.gz", "wt", compresslevel=1) as f: json.dump(results(count), f)
    return lambda: read_detections(folder/"d.json.gz", sizes_of(count))

def detections_parquet(folder, count):
    half = np.full(count, .5)
    columns = dict(image_id=1 + np.arange(count)//5, category_id=np.full(count, 18), cx=half, cy=half, w=half/4,
                   h=half/4, score=half)
    pyarrow.parquet.write_table(pyarrow.table(columns), folder/"d.parquet")
    return lambda: read_detections(folder/"d.parquet", sizes_of(count))

def captions(folder, count):
    items = [dict(id=n, image_id=1 + n//5, caption=f"A dog runs over {n} meadows.") for n in range(count)]
    write_json(folder/"c.json", dict(images=images_of(count), annotations=items))
    return lambda: read_captions(folder/"c.json")

def instances(folder, count):
    items = [dict(id=n, iscrowd=0, **item) for n, item in enumerate(results(count))]
    categories = [dict(id=18, name="dog")]
    write_json(folder/"i.json", dict(images=images_of(count), categories=categories, annotations=items))
    return lambda: ground_truth(folder/"i.json")

def take(folder, count):
    table = detections_parquet(folder, count)()
    ids = list(table)[::-1]
    return lambda: table.take(ids)

def some_texts(count):
    rng, words = np.random.default_rng(0), np.array(list(map("".join, itertools.product("abcdefgh", repeat=4))))
    return [" ".join(row) for row in words[rng.integers(0, len(words), (count, 9))].tolist()]

def vectors(folder, count):
    numbers = " ".join(["0.25"]*20)
    (folder/"v.txt").write_text("".join(f"word{n} {numbers}\n" for n in range(count)))
    return lambda: read_vectors(folder/"v.txt")

def store(folder, count):
    table = detections_parquet(folder, count)()
    table.features = np.ones((len(table.boxes), 16), np.float16)
    RegionStore.write(folder/"store", table)
    ids = table.ids.tolist()
    def read():
        found = RegionStore(folder/"store", verify=True)
        for start in range(0, len(ids), 50): found.batch(ids[start:start + 50])
    return read

def coco_results(folder, count):
    write_results(folder/"r.json", {i: Decoded(text, -1.) for i, text in enumerate(some_texts(count))})
    return lambda: (read_results(folder/"r.json"), read_system(folder/"r.json"))

def json_lines(folder, count):
    with open(folder/"r.jsonl", "w") as f:
        for i, text in enumerate(some_texts(count)): print(json.dumps(dict(image_id=i, caption=text)), file=f)
    return lambda: (list(_read_lines(folder/"r.jsonl")), read_system(folder/"r.jsonl"), read_rows(folder/"r.jsonl"))

def rows(folder, count):
    def append():
        (folder/"rows.jsonl").unlink(missing_ok=True)
        for n in range(count): append_row(folder/"rows.jsonl", dict(row=n))
    return append

def examples(folder, count):
    table = detections_parquet(folder, count)()
    texts = {i: [f"A dog and a cat on {i} mats"] for i in table}
    split = dict(train=list(table), val=[], test=[])
    def make():
        data = CocoData("own", folder, texts, table, split, {}, COCO_CLASSES, COCO_HELDOUT, {})
        SelectorExamples(data, min_refs=1)
    return make

def vocabulary(folder, count):
    texts = some_texts(count)
    return lambda: Vocab.build(map(tokenize, texts), 5)

def document_frequencies(folder, count):
    texts = some_texts(count)
    tokens = [text.split() for text in texts]
    return lambda: CiderD({i: tokens[i:i + 5] for i in range(0, count, 5)})

def one_caption(folder, count):
    "Write one caption of `count` words, with strings for which the tokeniser's rules look far ahead."
    text = " ".join(["a+b.com", "x@y", "1,a", "well-known", "www.", "<!b", "it's"]*(count//7))
    return lambda: tokenize(f"{text} {'a+'*count} a.com")

def seconds(work):
    began = time.process_time()
    work()
    return time.process_time() - began

def calls(work):
    "Return the number of calls of functions, both Python's and C's."
    count = 0
    def called(frame, event, function):
        nonlocal count
        count += event.endswith("call")
    sys.setprofile(called)
    try: work()
    finally: sys.setprofile(None)
    return count

READERS = {reader: COUNTS for reader in (detections_json, detections_gz, detections_parquet, captions, instances, take,
                                         coco_results, json_lines, vocabulary)}
READERS |= {reader: FEWER for reader in (vectors, store, rows, examples, document_frequencies)}
READERS[one_caption] = 400, 1_600, 6_400

@pytest.mark.parametrize("reader", READERS)
def test_the_cost_of_an_item_does_not_grow(tmp_path, reader):
    "Calls per item, an exact count, do not grow, and neither does the time per item, a rough measure."
    work, counts = {}, READERS[reader]
    for count in counts:
        (tmp_path/str(count)).mkdir()
        work[count] = reader(tmp_path/str(count), count)
    few, more = [calls(work[count])/count for count in counts[:2]]
    assert more < 1.1*few, f"{few} and {more} calls an item"
    best = np.full(3, np.inf)
    for _ in range(12):                      # in turn, and again if the machine was busy
        best = np.minimum(best, [seconds(work[count])/count for count in counts])
        if best[2] < 4*min(best): return     # a quadratic reader would take sixteen times as long
    raise AssertionError(f"{1e6*best} µs an item")

@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_is_read_in_little_memory(tmp_path, indent):
    "Reading a list item by item needs little memory, with the JSON on one line or on many."
    write_json(tmp_path/"d.json", results(20_000), indent)
    tracemalloc.start()
    count = sum(1 for _ in json_items(tmp_path/"d.json"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000 and peak < 1_000_000

def test_a_cut_archive_is_an_error(tmp_path):
    write_json(tmp_path/"d.json.gz", results(1000))
    data = (tmp_path/"d.json.gz").read_bytes()
    (tmp_path/"d.json.gz").write_bytes(data[:len(data)//2])
    with pytest.raises(ValueError, match="d.json.gz: "): list(json_items(tmp_path/"d.json.gz"))
    with gzip.open(tmp_path/"e.json.gz", "wb") as f: f.write(b"[1,\n2,\n3")
    with pytest.raises(ValueError, match="e.json.gz: line 3: item 3: not JSON"): list(json_items(tmp_path/"e.json.gz"))
