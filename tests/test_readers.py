"What reading costs: seconds an item do not grow with the number of items, nor does memory while a list is read."
import gzip, json, time, tracemalloc
import numpy as np
import pyarrow, pyarrow.parquet
import pytest
from noc_nb.core import write_json
from noc_nb.data import read_captions
from noc_nb.regions import ground_truth, json_items, read_detections

COUNTS = 5_000, 20_000, 80_000

def sizes_of(count): return {i: (640, 480) for i in range(1, count//5 + 1)}   # five items an image

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

def seconds(work):
    began = time.process_time()
    work()
    return time.process_time() - began

@pytest.mark.parametrize("reader", [detections_json, detections_gz, detections_parquet, captions, instances, take])
def test_seconds_an_item_do_not_grow(tmp_path, reader):
    work = {}
    for count in COUNTS:
        (tmp_path/str(count)).mkdir()
        work[count] = reader(tmp_path/str(count), count)
    rounds = [[seconds(work[count])/count for count in COUNTS] for _ in range(3)]   # in turn: the machine may be busy
    small, middle, large = np.min(rounds, 0)
    assert large/middle < 1.5 and large/small < 1.5, f"{1e6*np.array([small, middle, large])} µs an item"

@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_is_read_in_little_memory(tmp_path, indent):
    "All on one line, or a line a number."
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
