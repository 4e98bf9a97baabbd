"Test that readers of damaged files give a result, or one line that names the file."
import asyncio, base64, gc, gzip, importlib, inspect, io, json, math, os, random, re, shutil, subprocess, sys, tarfile
import time, zipfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
import h5py
import numpy as np
import pyarrow, pyarrow.parquet
import pytest
import torch
from PIL import Image
from noc_nb.captioner import Captioner
from noc_nb.encoder import CaptionerConfig
from noc_nb.commands.cli import noc_app
from noc_nb.commands.cli import main
from noc_nb.commands.reproduce import _part, _picture, _preset_of
from noc_nb.constraints import COCO_CLASSES
from noc_nb.core import NocError, set_seed
from noc_nb.data import CocoData
from noc_nb.fast.modes import beam_search, grid_beam_search
from noc_nb.fast.search import SearchConfig
from noc_nb.files.boxes import ground_truth, read_detections
from noc_nb.files.captions import read_captions, read_split, read_system
from noc_nb.files.dataset import load_data
from noc_nb.files.drawing import make_toy
from noc_nb.files.store import RegionStore, read_hdf5, read_npz, read_tsv
from noc_nb.files.vectors import read_vectors
from noc_nb.heldout import COCO_HELDOUT
from noc_nb.lab.config import load_config
from noc_nb.lab.disk import read_json, write_json
from noc_nb.lab.experiment import Experiment
from noc_nb.lab.models import PRESETS, Run, average_neighbours
from noc_nb.lab.objects import load_classes, load_heldout
from noc_nb.lab.results import PaperTable, append_row, read_results, read_rows
from noc_nb.lab.runs import begin
from noc_nb.lab.saving import _load_vocab, _save_vocab
from noc_nb.models.photos import image_files, open_image
from noc_nb.models.pipeline import CaptionOptions, NovelCaptioner, pipeline_folder
from noc_nb.models.source import _from_table, Job
from noc_nb.lab.novelty import selection_f1
from noc_nb.pages import app, gallery
from noc_nb.pages.app import _act, _OwnNames, _shown, _Studio, _View
from noc_nb.pages.gallery import _caption_files, _read_lines, _Summary, CaptionRun
from noc_nb.pages.viz import show_bars, show_boxes, show_looks
from noc_nb.lab.table import check_vectors, checked, table_of
from noc_nb.regions import RegionDict, Regions
from noc_nb.scores.java import _cache_folder
from noc_nb.scores.page import Part, write_files
from noc_nb.scores.report import evaluate_file
from noc_nb.scores.task import make_task
from noc_nb.vocab import Vocab, word_table
from noc_nb.selector import SelectorConfig

BOXES = [[.1, .1, .5, .5], [.2, .3, .9, .8]]

def regions():
    "Return an image with two regions."
    return checked(Regions(BOXES, [18, 1], [.9, .8], torch.ones(2, 4), 7, (640, 480)))

def json_file(folder):
    write_json(folder/"d.json", [dict(image_id=7, category_id=18, bbox=[10, 20, 30, 40], score=.5)]*3)
    return folder/"d.json", lambda path: read_detections(path, {7: (640, 480)})

def zipped_json(folder):
    write_json(folder/"d.json.gz", [dict(image_id=7, category_id=18, bbox=[10, 20, 30, 40], score=.5)]*9)
    return folder/"d.json.gz", lambda path: read_detections(path, {7: (640, 480)})

def captions(folder):
    items = [dict(id=n, image_id=7, caption="A dog.") for n in range(3)]
    write_json(folder/"c.json", dict(images=[dict(id=7, width=640, height=480)], annotations=items))
    return folder/"c.json", read_captions

def instances(folder):
    box = dict(id=1, image_id=7, category_id=18, bbox=[10, 20, 30, 40], iscrowd=0)
    write_json(folder/"i.json", dict(images=[dict(id=7, width=640, height=480)], annotations=[box],
                                     categories=[dict(id=18, name="dog")]))
    return folder/"i.json", ground_truth

def vocabulary(folder):
    _save_vocab(folder/"v.json", Vocab(["dog", "cat"]))
    return folder/"v.json", _load_vocab

def parquet(folder):
    columns = dict(image_id=[7, 9], category_id=[18, 1], cx=[.5]*2, cy=[.5]*2, w=[.1]*2, h=[.1]*2, score=[.5]*2)
    pyarrow.parquet.write_table(pyarrow.table(columns), folder/"d.parquet")
    return folder/"d.parquet", read_detections

LINES = b"dog 1 2 3\ncat 4 5 6\nbus .5 .25 -1\n"

def vectors(folder):
    (folder/"v.txt").write_bytes(LINES)
    return folder/"v.txt", read_vectors

def zipped_vectors(folder):
    (folder/"v.txt.gz").write_bytes(gzip.compress(LINES, mtime=0))
    return folder/"v.txt.gz", read_vectors

def archived_vectors(folder):
    with zipfile.ZipFile(folder/"v.zip", "w", zipfile.ZIP_DEFLATED) as z: z.writestr("v.txt", LINES)
    return folder/"v.zip", read_vectors

def columns():
    "Return the regions as columns of a file of features, with boxes in pixels."
    r = regions()
    boxes = r.boxes.numpy()*np.array([*r.size]*2, np.float32)
    return dict(features=r.features.numpy(), boxes=boxes, labels=r.labels.numpy(), scores=r.scores.numpy(), size=r.size)

def hdf5(folder):
    with h5py.File(folder/"f.hdf5", "w") as f:
        for name, column in columns().items(): f[f"7_{name}"] = column
    return folder/"f.hdf5", lambda path: list(read_hdf5(path))

def npz(folder):
    (folder/"npz").mkdir()
    features, boxes, labels, scores, (width, height) = columns().values()
    np.savez(folder/"npz/7.npz", x=features, bbox=boxes, image_w=width, image_h=height, labels=labels, scores=scores)
    return folder/"npz/7.npz", lambda path: list(read_npz(path.parent))

def tsv(folder):
    texts = [base64.b64encode(np.asarray(columns()[name], "<f4")).decode() for name in ("boxes", "features")]
    (folder/"f.tsv").write_text("\t".join(["7", "640", "480", "2", *texts]) + "\n")
    return folder/"f.tsv", lambda path: list(read_tsv(path))

def jpeg(size=16):
    data = io.BytesIO()
    Image.effect_noise((size, size), 60).save(data, "JPEG")
    return data.getvalue()

def write_tar(path, count, **options):
    with tarfile.open(path, "w", **options) as tar:
        for n in range(1, count + 1):
            info = tarfile.TarInfo(f"{n:06}.jpg")
            data = jpeg()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))

def open_all(path):
    "Return the images that can be opened, and the errors of the others."
    whole, failed = [], []
    for file in image_files(path):
        try: whole.append(open_image(file))
        except NocError as e: failed.append(str(e))
    return whole, failed

def tar(folder):
    write_tar(folder/"shard.tar", 3)
    return folder/"shard.tar", open_all

def photo_parquet(folder):
    pyarrow.parquet.write_table(pyarrow.table(dict(image=[jpeg()]*3)), folder/"p.parquet")
    return folder/"p.parquet", open_all

def photo(folder):
    (folder/"7.jpg").write_bytes(jpeg())
    return folder/"7.jpg", open_all

def store(folder):
    RegionStore.write(folder/"store", [regions()])
    return folder/"store/features.npy", lambda path: list(RegionStore(path.parent).values())

def store_meta(folder):
    return store(folder)[0].with_name("meta.json"), store(folder/"again")[1]

def rows(folder):
    for n in range(3): append_row(folder/"rows.jsonl", dict(schema=1, row="oracle", seed=n))
    return folder/"rows.jsonl", read_rows

def mutations(data, count, seed=0):
    "Yield copies of a file with some bytes flipped, cut off, inserted, overwritten or removed."
    rng = random.Random(seed)
    for n in range(count):
        at, length, b = rng.randrange(len(data)), rng.randrange(1, 9), bytearray(data)
        if n % 5 == 0:
            for _ in range(length): b[rng.randrange(len(b))] ^= 1 << rng.randrange(8)
        elif n % 5 == 1: del b[at:]
        elif n % 5 == 2: b[at:at] = rng.randbytes(length)
        elif n % 5 == 3: b[at:at+length] = bytes([rng.choice([0, 255, 57])])*length
        else: del b[at:at+length]
        yield bytes(b)

READERS = [json_file, zipped_json, captions, instances, vocabulary, parquet, vectors, zipped_vectors, archived_vectors,
           hdf5, npz, tsv, tar, photo_parquet, photo, store, store_meta, rows]

@pytest.mark.parametrize("make", READERS)
def test_a_damaged_file_gives_a_result_or_one_line(tmp_path, make):
    path, read = make(tmp_path)
    read(path)
    good, refused = path.read_bytes(), 0
    for data in mutations(good, 300):
        path.write_bytes(data)
        try: read(path)
        except NocError as e:
            assert "\n" not in str(e) and str(tmp_path) in str(e)
            refused += 1
    if read is not open_all: assert refused > 5

# ---- photos in tars

def member(path, n):
    "Return the position of the header of the n-th member of a tar file."
    with tarfile.open(path) as t: return t.getmembers()[n].offset

@pytest.mark.parametrize("options", [dict(format=tarfile.GNU_FORMAT), dict(format=tarfile.PAX_FORMAT)])
def test_photos_after_a_damaged_header_are_reported(tmp_path, options):
    write_tar(tmp_path/"s.tar", 20, **options)
    data = bytearray((tmp_path/"s.tar").read_bytes())
    data[member(tmp_path/"s.tar", 5) + 150] ^= 255                  # a byte of its checksum
    (tmp_path/"s.tar").write_bytes(data)
    whole, failed = open_all(tmp_path/"s.tar")
    assert len(whole) == 5 and len(failed) == 1 and "s.tar: expected a whole tar file; after 5 members" in failed[0]

def test_a_tar_that_is_cut_between_members_is_reported(tmp_path):
    write_tar(tmp_path/"s.tar", 20)
    data = (tmp_path/"s.tar").read_bytes()
    (tmp_path/"s.tar").write_bytes(data[:member(tmp_path/"s.tar", 5)])
    whole, failed = open_all(tmp_path/"s.tar")
    assert len(whole) == 5 and "its end mark is missing" in failed[0]

def test_a_damaged_shard_takes_no_id_of_a_photo(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path/"photo_12.jpg")
    (tmp_path/"shard.tar").write_bytes(b"nothing")
    assert [(f.id, f.name) for f in image_files(tmp_path)] == [(12, "photo_12.jpg"), (-1, "shard.tar")]
    damaged = image_files(tmp_path, {})[-1]
    with pytest.raises(NocError, match="shard.tar: expected a whole tar file"): open_image(damaged)

def test_only_regular_files_are_opened(tmp_path):
    for name in "p.jpg", "p.tar", "p.parquet", "p.json", "p.txt": os.mkfifo(tmp_path/name)
    assert open_all(tmp_path)[0] == [] and len(open_all(tmp_path)[1]) == 3
    for read, name in ((read_json, "p.json"), (image_files, "p.txt"), (read_detections, "p.parquet"),
                       (read_vectors, "p.txt"), (read_rows, "p.json"), (lambda f: list(read_tsv(f)), "p.txt"),
                       (lambda f: list(read_hdf5(f)), "p.json")):
        with pytest.raises(NocError, match="is not a regular file"): read(tmp_path/name)

# ---- sizes and links that a file claims

def test_claimed_sizes_are_compared_with_the_file(tmp_path):
    data = io.BytesIO()
    header = dict(descr="<f4", fortran_order=False, shape=(10**6, 4000))
    np.lib.format.write_array_header_1_0(data, header)
    with zipfile.ZipFile(tmp_path/"7.npz", "w") as z: z.writestr("x.npy", data.getvalue())
    expected = "7.npz: expected an archive with features"
    with pytest.raises(NocError, match=expected): list(read_npz(tmp_path))
    with h5py.File(tmp_path/"f.hdf5", "w") as f: f.create_dataset("7_features", (10**6, 4000), "f4")
    with pytest.raises(NocError, match="image 7: .* claims 16,000,000,000 bytes"): list(read_hdf5(tmp_path/"f.hdf5"))
    null = pyarrow.table(dict(image_id=pyarrow.nulls(10**6), category_id=pyarrow.nulls(10**6)))
    names = "cx", "cy", "w", "h", "score"
    for name in names: null = null.append_column(name, pyarrow.nulls(10**6))
    pyarrow.parquet.write_table(null, tmp_path/"d.parquet")
    expected = "column image_id: expected numbers, found none"
    with pytest.raises(NocError, match=expected): read_detections(tmp_path/"d.parquet")

def test_hdf5_reads_no_other_file(tmp_path):
    (tmp_path/"secret").write_bytes(bytes(64))
    with h5py.File(tmp_path/"other.hdf5", "w") as f: f["7_features"] = np.ones((2, 4), np.float32)
    with h5py.File(tmp_path/"raw.hdf5", "w") as f:
        f.create_dataset("7_features", (2, 4), "f4", external=[(str(tmp_path/"secret"), 0, 64)])
    link = h5py.ExternalLink(str(tmp_path/"other.hdf5"), "7_features")
    with h5py.File(tmp_path/"link.hdf5", "w") as f: f["7_features"] = link
    with h5py.File(tmp_path/"virtual.hdf5", "w") as f:
        layout = h5py.VirtualLayout((2, 4), "f4")
        layout[:] = h5py.VirtualSource(str(tmp_path/"other.hdf5"), "7_features", (2, 4))
        f.create_virtual_dataset("7_features", layout)
    for name in "raw", "link", "virtual":
        with pytest.raises(NocError, match=f"{name}.hdf5: image 7: expected data sets of numbers"):
            list(read_hdf5(tmp_path/f"{name}.hdf5"))

def test_odd_archives_and_numbers_give_one_line(tmp_path):
    (tmp_path/"n.json").write_text("[" + "9"*5000 + "]")
    with pytest.raises(NocError, match="n.json: expected a JSON file"): read_json(tmp_path/"n.json")
    with pytest.raises(NocError, match="expected a JSON file"): read_json("a\0b.json")
    with zipfile.ZipFile(tmp_path/"7.npz", "w") as z: z.writestr("x.npy", b"no array")
    with pytest.raises(NocError, match="7.npz: image 7: features: expected a row of numbers"): list(read_npz(tmp_path))
    (tmp_path/"7.npz").write_bytes(b"")
    with pytest.raises(NocError, match="7.npz: expected an archive with features"): list(read_npz(tmp_path))
    twice = pyarrow.Table.from_arrays([pyarrow.array([7])]*2, ["image_id", "image_id"])
    pyarrow.parquet.write_table(twice, tmp_path/"d.parquet")
    with pytest.raises(NocError, match="column image_id: occurs twice"): read_detections(tmp_path/"d.parquet")
    with zipfile.ZipFile(tmp_path/"v.zip", "w") as z: z.writestr("v.txt", LINES)
    data = bytearray((tmp_path/"v.zip").read_bytes())
    for at in (6, data.index(b"PK\1\2") + 8): data[at] |= 1           # the flag for encryption
    (tmp_path/"v.zip").write_bytes(data)
    expected = "v.zip: expected word vectors in UTF-8 .*encrypted"
    with pytest.raises(NocError, match=expected): read_vectors(tmp_path/"v.zip")

# ---- rows

def test_a_torn_last_row_is_left_out(tmp_path, capsys):
    for n in range(2): append_row(tmp_path/"rows.jsonl", dict(n=n))
    with open(tmp_path/"rows.jsonl", "ab") as f: f.write(b'{"n": "\xc3')
    assert [r["n"] for r in read_rows(tmp_path/"rows.jsonl")] == [0, 1]
    assert "rows.jsonl: the last line is incomplete" in capsys.readouterr().err
    append_row(tmp_path/"rows.jsonl", dict(n=2))
    assert [r["n"] for r in read_rows(tmp_path/"rows.jsonl")] == [0, 1, 2]

# ---- NaN

def test_a_nan_feature_fails_only_its_image():
    images = [Regions(BOXES, [18, 1], [.9, .8], torch.ones(2, 4), i, (640, 480)) for i in (7, 8, 9)]
    images[1].features[1, 2] = torch.nan
    class Pipeline:
        def __call__(self, images, seen, **options): return [r.image_id for r in images]
    source = _from_table(table_of(images))
    asked = []
    line, gallery._line = gallery._line, lambda pipeline, regions, caption, name: asked.append(caption) or {}
    try: lines = CaptionRun(Pipeline(), source).lines([7, 8, 9])
    finally: gallery._line = line
    expected = [None, "image 8: features: expected finite numbers", None]
    assert asked == [7, 9] and [x.get("error") for x in lines] == expected

def test_a_user_without_a_home_folder_gets_a_cache(monkeypatch):
    from pathlib import Path
    def homeless(): raise RuntimeError("Could not determine home directory.")
    monkeypatch.delenv("NOC_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert _cache_folder() == Path.cwd()/".cache/noc_nb"

# ---- terminals, logs and names of files

STREAMS = """
import os, sys
from noc_nb.commands.command import _open_streams
_open_streams()
print("·é")
print("caf\\udce9", file=sys.stderr)
with open(sys.argv[1], "x") as f: f.write(str(f.fileno() > 2))
"""

@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_command_works_with_closed_and_ascii_outputs(tmp_path, closed):
    "A command works with outputs that are closed or support only ASCII, and no later file gets their descriptors."
    line = f'"{sys.executable}" -c "$CODE" "{tmp_path}/f" {closed}'
    env = dict(os.environ, CODE=STREAMS, PYTHONIOENCODING="ascii")
    done = subprocess.run(line, shell=True, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path/"f").read_text() == "True"
    if not closed: assert (done.stdout, done.stderr) == ("??\n", "caf?\n")

@pytest.mark.parametrize("work, told", [("print('x')", "output: No space left on device"),
                                        ("__import__('torch').empty(1 << 50)", "not enough memory")])
def test_a_full_disk_or_memory_gives_one_line(work, told):
    code = f"from noc_nb.commands.command import _polite; _polite(lambda: {work})"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, f"error: {told}\n")

def evaluated(folder, captions, **kw):
    "Return a report on captions of two images."
    refs = [dict(id=n, image_id=n//2, caption=c) for n, c in enumerate(["a dog", "the dog", "a bus", "one bus"])]
    write_json(folder/"refs.json", dict(images=[dict(id=0), dict(id=1)], annotations=refs))
    return evaluate_file(captions, folder/"refs.json", metrics=("C",), samples=10, **kw)

def test_file_names_may_be_any_bytes(tmp_path, monkeypatch):
    "File names that are not UTF-8 do not stop the output of lines to an ASCII terminal, of a page, or of a report."
    folder, odd = tmp_path/os.fsdecode(b"nu\xe9"), os.fsdecode(b"\xe9")
    folder.mkdir()
    for name in "café1.jpg", f"{odd}2.jpg": Image.new("RGB", (64, 48)).save(folder/name)
    write_json(folder/f"{odd}.json", [dict(image_id=1, category_id=18, bbox=[1, 2, 30, 40], score=.9)])
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    job = Job(folder/f"{odd}.json", "toy", images=folder)
    counts = _caption_files(job, None, folder/f"{odd}.html").counts
    assert (counts["good"], counts["bad"]) == (2, 0)
    terminal.flush()
    lines = [json.loads(line) for line in terminal.buffer.getvalue().splitlines()]
    assert {line["file"] for line in lines} == {"café1.jpg", "\ufffd2.jpg"}
    assert "<!doctype html>" in (folder/f"{odd}.html").read_text().lower()
    write_json(folder/f"{odd}s.json", [dict(image_id=i, caption="a dog") for i in (0, 1)])
    evaluated(folder, folder/f"{odd}s.json", out=folder/f"{odd}out")
    assert read_json(folder/f"{odd}out/report.json")["captions"] == "?s.json"

def test_a_report_is_written_even_if_the_terminal_fails(tmp_path):
    write_json(tmp_path/"s.json", [dict(image_id=i, caption="a dog") for i in (0, 1)])
    def full(report): raise OSError(28, "No space left on device")
    with pytest.raises(OSError): evaluated(tmp_path, tmp_path/"s.json", out=tmp_path/"out", show=full)
    assert read_json(tmp_path/"out/report.json")["counts"]["scored"] == 2

# ---- compressed text

def test_a_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("noc_nb.lab.disk._MUCH", 1 << 24)
    (tmp_path/"b.json.gz").write_bytes(bomb := gzip.compress(b" "*(1 << 20))*20)
    (tmp_path/"b.gz").write_bytes(bomb)
    with zipfile.ZipFile(tmp_path/"b.zip", "w", zipfile.ZIP_DEFLATED) as z:
        with z.open("b.txt", "w") as f:
            for _ in range(20): f.write(b" "*(1 << 20))
    for read, name in (read_json, "b.json"), (read_vectors, "b.gz"), (read_vectors, "b.zip"):
        with pytest.raises(NocError, match=f"{name}.*it holds more than 16,777,216 bytes, once unpacked"):
            read(tmp_path/name)

def test_a_parquet_file_that_claims_too_many_rows_is_refused(tmp_path):
    rows = 1 << 20
    zeros = pyarrow.table({name: np.zeros(rows, np.int64) for name in ("image_id", "category_id")})
    with pyarrow.parquet.ParquetWriter(tmp_path/"d.parquet", zeros.schema) as f:
        for _ in range(20): f.write_table(zeros)
    with pytest.raises(NocError, match="it claims to have 20,971,520 rows"): read_detections(tmp_path/"d.parquet")

def test_half_characters_are_refused_or_replaced(tmp_path):
    (tmp_path/"n.json").write_text('["dog", "\\ud83d\\ude00"]')
    assert read_json(tmp_path/"n.json") == ["dog", "😀"]
    (tmp_path/"n.json").write_text('["dog", "\\uD800"]')
    with pytest.raises(NocError, match="n.json: expected a JSON file .*surrogates not allowed"):
        read_json(tmp_path/"n.json")
    append_row(tmp_path/"rows.jsonl", dict(variant="\udce9"))       # as typed in a terminal that is not UTF-8
    assert read_rows(tmp_path/"rows.jsonl") == [dict(variant="?")]

@pytest.mark.parametrize("text", ["dog\n", "dog\t1\t2\n", "\n2 0\ndog\n"])
def test_words_without_numbers_are_refused_as_vectors(tmp_path, text):
    (tmp_path/"v.txt").write_text(text)
    with pytest.raises(NocError, match="v.txt: line .: expected a word and "): read_vectors(tmp_path/"v.txt")
    (tmp_path/"v.txt").write_bytes(b"\xef\xbb\xbf" + LINES)
    assert [*read_vectors(tmp_path/"v.txt")] == ["dog", "cat", "bus"]

# ---- changed files of an earlier run

def lines_altered(data, rng):
    "Return a damaged copy of a file of lines."
    lines = data.splitlines(keepends=True)
    n, kind = rng.randrange(len(lines)), rng.randrange(5)
    if kind == 0: lines.insert(n, lines[n])
    elif kind == 1: del lines[n]
    elif kind == 2: lines[n], lines[n - 1] = lines[n - 1], lines[n]
    elif kind == 3: lines[n] = lines[n][:rng.randrange(len(lines[n]))]
    elif kind == 4: lines[n] = rng.choice([b"\n", b"{}\n", b"[1]\n", b"\0\xff\n", lines[n][:-1], b"["*100_000 + b"\n"])
    return b"".join(lines)

def test_lines_that_were_cut_or_moved_are_made_again(tmp_path, monkeypatch):
    toy, rng = NovelCaptioner.from_pretrained("toy", device="cpu"), random.Random(0)
    source = _from_table(table_of(Regions(BOXES, [18, 2], [.9, .8], None, i, (640, 480)) for i in range(10)))
    by_2, made = CaptionOptions(batch=2), []
    whole = gallery._caption_all(toy, source, tmp_path/"whole.jsonl", by_2).read_bytes()
    lines = {json.loads(line)["image_id"]: json.loads(line) for line in whole.splitlines()}
    def known(run, ids):
        if len(made) == 3: raise KeyboardInterrupt
        made.append(ids)
        return [lines[i] for i in ids]
    monkeypatch.setattr(CaptionRun, "lines", known)
    for n in range(44):
        out, part = tmp_path/f"{n}.jsonl", tmp_path/f".{n}.jsonl.part"
        made.clear()
        with pytest.raises(KeyboardInterrupt): gallery._caption_all(toy, source, out, by_2)
        part.write_bytes(lines_altered(part.read_bytes(), rng))
        for again in (1, 2, 3):
            made.clear()
            if again < 3: made.append(0)
            try: gallery._caption_all(toy, source, out, by_2, resume=True)
            except KeyboardInterrupt: continue
        assert out.read_bytes() == whole and not part.exists()

def test_changed_content_is_detected_whatever_its_time(tmp_path):
    "A run notices other content even if the file's time is the same; a store notices altered arrays."
    about, photo, other = tmp_path/"run.json", tmp_path/"1.jpg", tmp_path/"2.jpg"
    def start(resume=True): return begin(about, "c.jsonl", dict(k=5), resume, about.exists(), {"1.jpg": photo})
    def copied(): shutil.copy2(other, photo)
    def touched():
        when = os.stat(photo)
        photo.write_bytes(other.read_bytes())
        os.utime(photo, ns=(when.st_atime_ns, when.st_mtime_ns))
    def linked():
        photo.unlink()
        photo.symlink_to(other)
    def moved(): os.replace(other, photo)
    for change in copied, touched, linked, moved:
        photo.unlink(missing_ok=True)
        about.unlink(missing_ok=True)
        for path, byte in (photo, b"a"), (other, b"b"):
            path.write_bytes(byte*1000)
            os.utime(path, (1, 1))
        start(False)
        assert start()
        change()
        with pytest.raises(NocError, match="1.jpg: other content"): start()
    path, read = store(tmp_path)
    RegionStore(path.parent).verify()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(NocError, match="features.npy: was altered"): RegionStore(path.parent).verify()
    named = RegionStore.write(tmp_path/"named", [Regions(BOXES, [18, 1], [.9, .8], None, 7)], {"images.jsonl": "7 a\n"})
    named.verify()
    (tmp_path/"named/images.jsonl").write_text("7 b\n")
    with pytest.raises(NocError, match="images.jsonl: was altered"): RegionStore(tmp_path/"named").verify()

def test_a_run_overwrites_no_folder_of_others(tmp_path, monkeypatch):
    "A run does not overwrite folders with other data, another tool's `run.json`, a picture, or an older report."
    monkeypatch.chdir(tmp_path)
    run = "noc_reproduce", "--preset", "toy", "--tables", "1", "--rows", "none", "--training", "xe", "--metrics", "C"
    files = "data/annotations/captions_train2014.json", "run.json", "table1.png", "data/beach.jpg"
    for n, name in enumerate(files):
        file = tmp_path/f"{n}"/name
        file.parent.mkdir(parents=True)
        file.write_text('{"mine": 1}')
        monkeypatch.setattr(sys, "argv", [*run, "--out", str(n), *["--resume"]*(n < 2)])
        with pytest.raises(SystemExit, match="2"): main()
        assert file.read_text() == '{"mine": 1}'
    write_json(tmp_path/"s.json", [dict(image_id=i, caption="a dog") for i in (0, 1)])
    evaluated(tmp_path, tmp_path/"s.json", out=tmp_path/"out")
    os.rename("out", "out.old")
    before = {path.name: path.read_bytes() for path in (tmp_path/"out.old").iterdir()}
    for _ in range(2): evaluated(tmp_path, tmp_path/"s.json", out=tmp_path/"out")
    assert {path.name: path.read_bytes() for path in (tmp_path/"out.old").iterdir()} == before

# ---- the page

def test_the_server_answers_only_its_own_names_and_pages():
    "The server refuses requests for other host names (DNS rebinding), and requests from other pages."
    async def app(scope, receive, send): await send({"status": 200})
    guard = _OwnNames(app, {"localhost", "here"})
    def status(*hosts, origin=None, server="192.168.0.7"):
        sent = []
        async def send(message): sent.append(message)
        headers = [(b"host", host.encode()) for host in hosts] + [(b"origin", o.encode()) for o in [origin] if o]
        scope = dict(type="http", headers=headers, server=(server, 7860))
        asyncio.run(guard(scope, None, send))
        return sent[0]["status"]
    for host in "192.168.0.7", "192.168.0.7:7860", "localhost:7860", "Here": assert status(host) == 200
    assert status("[::1]:7860", server="::1") == status("10.0.0.1", server="::ffff:10.0.0.1") == 200
    for host in "evil.org:7860", "localhost.evil.org", "127.0.0.1.evil.org", "", "é", "10.0.0.1", "0x7f.1":
        assert status(host) == 421
    assert status("localhost", "evil.org") == 421
    assert status("here:7860", origin="http://here:7860") == 200
    for page in ("http://evil.org", "null", "http://here", "http://here:7861", "http://localhost:7860", "http://[",
                 "here:7860.evil.org"):
        assert status("here:7860", origin=page) == 421

def test_the_server_answers_a_public_name_that_it_is_given(tmp_path, monkeypatch):
    class Stopped(Exception): pass
    def page(studio, max_mb, hosts):
        raise Stopped(_OwnNames(None, hosts).names)
    monkeypatch.setattr(app, "_page", page)
    with pytest.raises(Stopped) as names: noc_app(model="toy", port=17862, host_name="Captions.example.org, b.org")
    assert {"captions.example.org", "b.org", "127.0.0.1", "localhost"} <= names.value.args[0]
    for name in "https://b.org", "b.org:80", "b org":
        with pytest.raises(NocError, match="--host-name .*: expected names without a port"):
            noc_app(model="toy", port=17862, host_name=name)

@pytest.mark.parametrize("proxy, told", [("http://127.0.0.1:9", "error: HTTP_PROXY: .*: expected NO_PROXY=localhost"),
                                         ("socks5://127.0.0.1:9", "error: noc_app: gradio cannot be imported .*SOCKS")])
def test_a_proxy_without_its_exception_gives_one_line(tmp_path, proxy, told):
    names = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"), proxy)
    code = "import sys; sys.argv[1:] = ['--model', 'toy', '--port', '17863']; sys.argv[0] = 'noc_app'\n" \
           "from noc_nb.commands.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | names | dict(NO_PROXY="", no_proxy=""),
                         capture_output=True, text=True, timeout=100)
    assert run.returncode == 2 and re.match(told, run.stderr.splitlines()[-1]) and "Traceback" not in run.stderr

def test_the_page_takes_any_words():
    "Invalid characters and very long inputs neither stop the page nor take long."
    studio = _Studio(most=1)
    act = partial(_act, studio, _act(studio, _View(), "example", [0]))
    def stage(do, *values):
        for html in _shown(studio, act(do, values))[1:]: html.encode("utf-8", "replace")
    def box(corners): stage("box", "dog", corners)
    box([])                                                                    # the first caption takes some seconds
    start = time.process_time()
    for name in "\udce9", "x"*5_000_000, "dog "*100_000, None, 7, float("nan"):   # the page has no such object
        assert "expected one that the page shows" in act("tick", [name, True]).wrong
        assert "expected a number" in act("price", [name, 1.]).wrong
    for do in "_studio", "__init__", "__class__", "nothing":
        with pytest.raises(NocError, match="an action"): act(do, [])
    for corners in [1.]*1_000_000, [.1, .1, float("nan"), .5], ["\udce9"]*4, {}:   # boxes as a browser may send them
        box(corners)
    for line in "\udce9", "x"*5_000_000, "dog,"*1_000_000, "cat|"*1_000_000, "dog=nan", "=", "\0":
        stage("say", line)
    assert time.process_time() - start < 30    # seconds, for what is linear; a quadratic form takes hours

def test_the_memory_of_large_uploads_is_freed(tmp_path):
    studio = _Studio(object(), lambda images: (_ for _ in ()).throw(NocError("seen")), most=0)
    Image.new("1", (16_000, 3_000)).save(tmp_path/"large.png")
    Image.new("1", (16_000, 5_000)).save(tmp_path/"larger.png")
    with pytest.raises(NocError, match="at most 50,000,000 pixels"): studio.upload(tmp_path/"larger.png")
    def memory(): return int(open("/proc/self/statm").read().split()[1])*os.sysconf("SC_PAGE_SIZE") >> 20
    before = memory()
    for _ in range(4):
        with pytest.raises(NocError, match="seen"): studio.upload(tmp_path/"large.png")
    gc.collect()
    assert memory() - before < 200                          # a photo needs 144 MB

# ---- absurd sizes, and names in pictures

@pytest.mark.parametrize("setting", ["captioner.layers=2000", "captioner.d_ff=1000000", "limit=63",
                                     "search.k=99999", "search.max_len=1000000", "captioner.memory=1000000",
                                     "captioner.max_len=-1", "xe.peak=Infinity", "scst.min_refs=-1",
                                     "prices.unseen=NaN",
                                     f"xe.seed={2**64}", f"min_count={10**12}", "train_selector.keep=-1"])
def test_sizes_outside_their_range_are_refused(setting):
    with pytest.raises(NocError, match=r"expected -?\d+ (to|or more)"): _preset_of("toy", [setting])

def test_a_mistyped_path_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("noc_nb.lab.saving.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(NocError, match="runs/xe: no such folder"): _part(Captioner, "runs/xe")

def test_names_are_not_drawn_as_formulas(tmp_path):
    odd = "$\\frac{", "$_{$", "a $ b ^ $"
    for name in odd: _picture([(name, ["", "", "x"], [[name, "Ours", "1.0"]])]*2, tmp_path/"t.png")
    figures = [show_bars({name: 1. for name in odd}).figure, show_boxes([[0, 0, 1, 1]]*3, odd).figure,
               show_looks(odd, np.ones((3, 1)), [[0, 0, 1, 1]], [odd[0]])]
    for figure in figures: figure.savefig(tmp_path/"f.png")

# ---- unexpected values in files and calls

ODD = [None, True, 0, -1, 1.5, 10**25, 2**63, "", "a", "\0", "\ud800", [], [[]], {}, {"a": {}}, "9"*400,
       float("nan"), float("inf")]

def altered(content, rng):
    "Return a copy of JSON content with a value replaced, removed or added."
    content, spots = json.loads(json.dumps(content)), []
    def walk(part):
        for key in part if isinstance(part, dict) else range(len(part)):
            spots.append((part, key))
            if isinstance(part[key], (dict, list)): walk(part[key])
    walk(content)
    part, key = rng.choice(spots)
    kind = rng.randrange(8)
    if kind == 0: del part[key]
    elif kind == 1 and isinstance(part, list): part.append(rng.choice(ODD))
    else: part[key] = rng.choice(ODD)
    return content if rng.randrange(30) else rng.choice(ODD)

IMAGES = [dict(id=i, width=640, height=480, file_name=f"{i}.jpg") for i in (1, 2, 3)]
BOXED = [dict(id=i, image_id=i, category_id=c, bbox=[10, 20, 30, 40], score=.5) for i, c in ((1, 18), (2, 6))]
LINE = dict(image_id=1, file="1.jpg", size=[640, 480], caption="a dog", score=-1., reason=None,
            candidates=[dict(object="dog", selector=.5, price=None, word="dog", span=[1, 2], cost=None)],
            boxes=[dict(object="dog", box=[.1, .1, .2, .2], score=.5, selector=.5)])

def json_readers(folder):
    "Return name -> (valid content, function that reads it)."
    captions = [dict(id=n, image_id=n//2 + 1, caption=c) for n, c in enumerate(("a dog", "dogs", "a bus", "buses"))]
    row = dict(table="main", row="selector", training="xe", lambda0=.2, metrics={"in": {"C": 90.}, "f1": {"bus": 1.}})
    def page(path): _Summary().read(_read_lines(path), path).write(folder/"page.html")
    def tables(path):
        for number in (1, 2, 3): PaperTable(read_rows(path), number).view()
    return {
        "captions": (dict(images=IMAGES, annotations=captions), read_captions),
        "instances": (dict(images=IMAGES, annotations=BOXED, categories=[dict(id=6), dict(id=18)]), ground_truth),
        "detections": (BOXED, lambda path: read_detections(path, {1: (640, 480), 2: (640, 480)})),
        "split": (dict(train=[1], val=[2], test=[3], novel_val=[2], novel_test=[]), lambda p: read_split(p, {1, 2, 3})),
        "classes": ([asdict(COCO_CLASSES[i]) for i in (1, 2)], load_classes),
        "heldout": (vars(COCO_HELDOUT), load_heldout),
        "search": (vars(SearchConfig()), partial(load_config, SearchConfig)),
        "vocab": (dict(tokens=["dog", "cat"]), _load_vocab),
        "system": ([dict(image_id=i, caption="a dog") for i in (1, 2)], read_system),
        "results": ([dict(image_id=1, caption="a dog", score=1., spans=[[1, 2]])], read_results),
        "task": (dict(images=IMAGES, annotations=captions), make_task),
        "row.jsonl": (row, tables), "line.jsonl": (LINE, page)}

NAMES = ("captions instances detections split classes heldout search vocab system results task "
         "row.jsonl line.jsonl").split()

@pytest.mark.parametrize("name", NAMES)
def test_an_odd_value_gives_a_result_or_one_line(tmp_path, name):
    good, read = json_readers(tmp_path)[name]
    path, rng = tmp_path/(name if "." in name else f"{name}.json"), random.Random(name)
    (path).write_text(json.dumps(good, default=list) + "\n")
    read(path)
    for _ in range(50):
        path.write_text(json.dumps(altered(json.loads(json.dumps(good, default=list)), rng)) + "\n")
        try: read(path)
        except NocError as e: assert "\n" not in str(e)

@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [150, 3_000, 100_000])
def test_deeply_nested_json_gives_one_line_at_once(tmp_path, name, depth):
    "Deeply nested JSON gives one line at once, as a whole file and as a value in a valid file."
    good, read = json_readers(tmp_path)[name]
    path = tmp_path/(name if "." in name else f"{name}.json")
    deep, inside = "["*depth + "]"*depth, json.dumps(good, default=list)
    started = time.process_time()
    for text in deep, inside[:-1] + f', "x": {deep}}}' if inside[0] == "{" else inside[:-1] + f", {deep}]":
        path.write_text(text + "\n")
        try: read(path)                       # readers of rows may ignore an unknown key
        except NocError as e: assert "\n" not in str(e)
        else: assert path.suffix == ".jsonl" and depth < 1_000
    assert time.process_time() - started < 5

READING = """files.boxes files.captions files.dataset files.exports files.store files.images files.vectors lab.disk
lab.objects lab.results lab.saving models.classes models.photos models.source scores.report scores.task""".split()

def readers():
    "Yield every public function or class method of the package that reads a file and needs only its path."
    for where in READING:
        module = importlib.import_module(f"noc_nb.{where}")
        own = {name: x for name, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__}
        methods = {f"{name}.{key}": f for name, x in own.items() if inspect.isclass(x)
                   for key, f in inspect.getmembers(x, inspect.ismethod) if not key.startswith("_")}
        for name, f in (own | methods).items():
            if not inspect.isroutine(f) or name.startswith(("_", "write", "random")): continue
            given = [*inspect.signature(f).parameters.values()]
            needed = [p for p in given[1:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
            if given and given[0].name in ("path", "data", "src", "file") and not needed: yield name, f

@pytest.mark.parametrize("ending", ["json", "jsonl", "json.gz"])
def test_every_public_reader_refuses_deeply_nested_json(tmp_path, ending):
    "Each reader gives one line at once, or reads only the first bytes."
    text, path = b'{"images": [' + b"["*100_000 + b"]"*100_000 + b"]}\n", tmp_path/f"deep.{ending}"
    path.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    called = []
    for name, read in readers():
        started = time.process_time()
        try:
            found = read(path)
            if inspect.isgenerator(found): list(found)
        except NocError as e: assert "\n" not in str(e), name
        assert time.process_time() - started < 3, name
        called.append(name)
    some = "read_captions", "open_detections", "CocoFile.read", "read_rows", "read_classes", "make_task"
    assert {*some} <= {*called}

TERMINAL = """
import os, sys, warnings
from noc_nb.commands.command import script
TEXT, END = "dog\\x1b]0;mine\\x07 \\x9b2J \\x1b[31m \\u202egod\\u2066", os.environ["END"]
def noc_odd():
    "Say the same in every way."
    from noc_nb.core import NocError
    from noc_nb.lab.progress import note, progress, say
    note(TEXT)
    for _ in progress([1, 2], TEXT, mininterval=0): say(TEXT)
    warnings.warn(TEXT)
    print(TEXT)
    if END: raise NocError(TEXT) if END == "bad" else AssertionError(TEXT)
sys.argv = ["noc_odd"]
script(noc_odd)
"""

@pytest.mark.parametrize("end", ["bad", "bug"])
def test_no_text_controls_a_terminal(tmp_path, end):
    "Control characters in texts are escaped in all kinds of output; only the progress bar moves the cursor."
    import pty
    ours, theirs = pty.openpty()
    env = dict(os.environ, END=end, COLUMNS="200")
    (tmp_path/"odd.py").write_text(TERMINAL)
    child = subprocess.Popen([sys.executable, tmp_path/"odd.py"], stdout=theirs, stderr=theirs, stdin=theirs, env=env)
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096): seen += part
    except OSError: pass                                # the terminal was closed
    child.wait()
    text = seen.decode()
    assert text.count(r"dog\u001b]0;mine\u0007 \u009b2J \u001b[31m \u202egod\u2066") >= 4
    assert not re.search(r"[\x07\x9b\u202e\u2066]|\x1b(?!\[A|\[K)", text)

def test_no_report_contains_control_characters(tmp_path):
    parts, bars = [Part("\u202egod", "\u2066\x07")], {"a": (1., None, "1", "holds")}
    write_files(tmp_path, "report", {}, "dog\x1b[31m", parts, bars, "")
    for kind in "md", "html":
        text = (tmp_path/f"report.{kind}").read_text(encoding="utf-8")
        assert r"\u202egod" in text and r"dog\u001b[31m" in text
        assert not re.search("[\x07\x1b\u202e\u2066]", text)

def test_a_run_that_was_altered_gives_rows_or_one_line(tmp_path, monkeypatch):
    "A run whose settings, rows or captions were altered gives rows, or one line."
    data, rng, out = load_data(make_toy(tmp_path/"toy", 40, 8, 8), "toy"), random.Random(0), tmp_path/"run"
    def run():
        experiment = Experiment(Run(PRESETS["toy"], variant="shipped"), data, out, True, ("C",), pipeline_folder("toy"))
        return experiment.complete([("none", "xe", None), ("top1", "xe", None)])
    run()
    captions = out/"captions/xe-top1.json.gz"
    for file, lines in (out/"run.json", False), (out/"rows.jsonl", True), (captions, False):
        good = read_rows(file) if lines else read_json(file)
        for _ in range(25):
            changed = altered(good, rng)
            if lines and isinstance(changed, list): file.write_text("".join(json.dumps(x) + "\n" for x in changed))
            elif not lines:
                text = json.dumps(changed).encode()
                file.write_bytes(gzip.compress(text) if file == captions else text)
                (out/"rows.jsonl").unlink(missing_ok=True)
            try: run()
            except NocError as e: assert "\n" not in str(e)
        if not lines: write_json(file, good)
        run()
    logged = len(read_rows(out/"test_log.jsonl"))
    (out/"rows.jsonl").unlink()
    def full(file, row):
        if file.name == "rows.jsonl": raise OSError("no room")
        append_row(file, row)
    monkeypatch.setattr("noc_nb.lab.experiment.append_row", full)       # the log has its line even so
    with pytest.raises(OSError): run()
    assert len(read_rows(out/"test_log.jsonl")) == logged + 1

def test_odd_scores_and_settings_of_a_search_are_refused():
    state, settings = torch.zeros(2, 1), dict(bos=0, eos=1, k=2, max_len=4)
    def step(tokens, state): return torch.zeros(len(tokens), 6), state
    def search(step=step, **changes):
        with pytest.raises(NocError): beam_search(step, state, **settings | changes)
        with pytest.raises(NocError): grid_beam_search(step, state, [[[(2,)]], []], **settings | changes)
    scores = torch.zeros(2, 6)
    for odd in (None, 1, [], "a", torch.tensor(1.), torch.zeros(2), scores.long(), scores.to_sparse(),
                scores.to(torch.float8_e4m3fn)):
        search(lambda tokens, state: (odd, state))
    for odd in (float("nan"), float("inf"), 10**9, "1", 1j, 50, None): search(length_penalty=odd)
    for odd in (0, -1, True, 1.5, "2", None, 10**6): search(k=odd), search(max_len=odd)
    for odd in (-1, 6, 1.5, "1", None): search(eos=odd)
    for odd in (-1, 2**63, 1.5, "1", None, True): search(bos=odd)
    for odd in (None, 2, "ab", [2**63], [-1], [None], [1.5]): search(forbidden=odd)
    def grid(step=step, musts=[[[(2,)]], []], **changes):
        with pytest.raises(NocError): grid_beam_search(step, state, musts, **settings | changes)
    for odd in (None, "1", 1.5, 2**63): grid(pad=odd)
    for odd in (1, [1, 1], [None, None], [["1"], []], [[True], []], [[1], [1]], [[1e39], []]): grid(prices=odd)
    for odd in (2**63, -1, None, 1.5): grid(musts=[[[(odd,)]], []])
    grid(musts=[[[(2, 3)*2500]], []])                                # would need 2.4 GB and minutes

def test_odd_settings_of_a_pipeline_are_refused():
    for odd in (0, -1, 1.5, "1", float("nan"), None, []):
        with pytest.raises(NocError, match="batch="): CaptionOptions(batch=odd)
    for odd in (-1, 2, "a", float("nan"), [], torch.zeros(2)):
        for name in ("min_prob", "min_detection"):
            with pytest.raises(NocError, match=f"{name}="): CaptionOptions(**{name: odd})
    for odd in (1, [None], [["dog"]], [1], lambda: 1):
        with pytest.raises(NocError, match="expected names, a string"): CaptionOptions(objects=odd)
    for odd in ("dog|", "-", "=3", "dog=much", "-dog=2", "dog, -dog"):
        with pytest.raises(NocError, match="words: "): CaptionOptions(objects=odd)
    for odd in (1.5, "1", None, 2**65):
        with pytest.raises(NocError, match="seed="): set_seed(odd)

def odd_regions():
    "Yield (message, Regions) for all that is refused: conversions that would change a number, and impossible boxes."
    columns = dict(boxes=BOXES, labels=[18, 1], scores=[.9, .8], features=None)
    anything = [["a"]], "a", None, {}, [1, 2, 3]
    boxes = [BOXES], sum(BOXES, []), torch.tensor(BOXES).to_sparse(), [[True]*4]*2
    odd = dict(boxes=[*anything, *boxes], scores=([2, .5], [.5, -1], [True, True], ["a", "b"], [1j, 0], [[.5], [.5]]),
               labels=[*anything, [18.7, 1], [True, False], [18, None], ["18", "1"], [18, float("nan")], [[18], [1]]],
               features=("ab", [1, 2], [["a"], ["b"]]))
    for name, values in odd.items():
        for value in values: yield "image 7: regions: ", Regions(**columns | {name: value}, image_id=7)
    outside = (-.2, 0, .5, .5), (.5, .1, .2, .9), (0, .6, .5, .4), (10, 20, 300, 400)
    for box in outside: yield "image 7: box ", Regions([box], [18], [.5], None, 7)
    yield "image 7: regions: lengths [1, 2, 1]", Regions(BOXES[:1], [18, 18], [.5], None, 7)

def test_odd_regions_in_memory_are_refused_everywhere(tmp_path):
    "`Regions` that a program makes are refused by the pipeline, the trainings, the writers and the detectors' readers."
    from noc_nb.files.store import write_detections
    from noc_nb.lab.models import train_selector_in, train_xe_in
    from noc_nb.lab.train import TrainConfig
    from noc_nb.models.source import Source
    from noc_nb.toy import toy_data
    pipeline, data = NovelCaptioner.from_pretrained("toy"), toy_data(2, 1, 1)
    def with_one(odd): return replace(data, regions=RegionDict(data.regions) | {7: odd})
    def of_source(odd): raise Source([7], lambda ids: [odd], {}, str).batch([7])[2][7]
    ways = [checked, pipeline, lambda odd: pipeline([odd]), of_source, lambda odd: table_of([odd]),
            lambda odd: RegionStore.write(tmp_path/"store", [odd]),
            lambda odd: write_detections(tmp_path/"d.json", {7: odd}),
            lambda odd: train_selector_in(tmp_path/"selector", with_one(odd), SelectorConfig(), TrainConfig()),
            lambda odd: train_xe_in(tmp_path/"xe", with_one(odd), CaptionerConfig(), TrainConfig())]
    for message, odd in odd_regions():
        for way in ways:
            with pytest.raises(NocError, match=re.escape(message)): way(odd)
    endless = Regions([BOXES[0], [0, math.nan, 1, 1]], [2, 2], [.9, .8], None, 7)
    for way in pipeline, of_source:
        with pytest.raises(NocError, match="image 7: boxes: expected finite numbers"): way(endless)

def test_a_data_set_in_memory_is_checked(tmp_path):
    "Before a training, captions, regions, features and word vectors that do not fit together are refused."
    from noc_nb.lab.models import train_selector_in, train_xe_in
    from noc_nb.lab.train import TrainConfig
    from noc_nb.toy import toy_data
    data = toy_data(3, 1, 1)
    lost = {word: v for word, v in data.word_vectors.items() if word != "penguin"}
    moved, strange = (RegionDict(data.regions) for _ in "ab")
    moved[1] = data.regions[2]
    strange[1] = replace(data.regions[1], labels=data.regions[1].labels + 100)
    refused = {"regions: image 1: image_id=2: expected its own id": dict(regions=moved),
               "image 1: caption 7: expected a string": dict(captions=data.captions | {1: ["a dog", 7]}),
               "symbolic features: category 10": dict(regions=strange),
               "features: regions without features: expected": dict(features=data.regions),
               "no vector for penguin: expected": dict(word_vectors=lost),
               "./vectors: expected a file of word vectors": dict(word_vectors=None)}
    for message, parts in refused.items():
        with pytest.raises(NocError, match=re.escape(message)):
            train_xe_in(tmp_path/"xe", replace(data, **parts), CaptionerConfig(), TrainConfig())
    for message, parts in [*refused.items()][:2]:
        with pytest.raises(NocError, match=re.escape(message)):
            train_selector_in(tmp_path/"selector", replace(data, **parts), SelectorConfig(), TrainConfig())

def test_regions_of_a_table_need_image_ids():
    "A table needs the number of each image; gradients are removed."
    for image_id in (None, "7", 7.5, 2**70):
        with pytest.raises(NocError, match="the number of their image"):
            table_of([Regions(BOXES, [18, 1], [.9, .8], None, image_id)])
    learnt = [torch.tensor(x, requires_grad=True) for x in (BOXES, [.9, .8], [[1.], [2.]])]
    table = table_of([Regions(learnt[0], np.array([18., 1.]), learnt[1], learnt[2], 7)])
    assert table.features.tolist() == [[1.], [2.]] and table.labels.tolist() == [18, 1]

def test_lists_in_the_place_of_numbers_are_refused(tmp_path):
    good = dict(image_id=7, category_id=18, bbox=[10, 20, 30, 40], score=.5)
    for key, odd in [("image_id", [7]), ("image_id", True), ("image_id", 7.5), ("category_id", [[18]]), ("score", [.5]),
                     ("score", True), ("bbox", [[10, 20], [30, 40]]), ("bbox", [[10], [20], [30], [40]]),
                     ("bbox", [True, 1, 2, 3]), ("bbox", [[10, 20, 30, 40]])]:
        for others in [], [good]:
            write_json(tmp_path/"d.json", [*others, good | {key: odd}])
            with pytest.raises(NocError, match=f"d.json: detection {len(others)} .*: {key}: expected"):
                read_detections(tmp_path/"d.json", {7: (640, 480)})

def test_parts_that_do_not_fit_together_are_refused():
    "Words, regions, data or captioners that do not fit together give one line that names the image, word or part."
    vectors = {"hot": np.array([1., 3.]), "dog": np.array([3., 5.])}
    vocab = Vocab(["a", "dog", "zebra"])
    def regions(score=1., features=None, image=7):
        return checked(Regions([(0, 0, 1, 1)], [18], [score], features, image_id=image))
    table = table_of([regions()])
    small = CocoData("small", Path("small"), {7: ["a dog"]}, table, dict(train=[7]), {}, COCO_CLASSES, COCO_HELDOUT, {})
    tiny = CaptionerConfig(d_feature=12, d_word=8, d_model=16, heads=4, d_ff=32, layers=1, memory=3, max_len=7)
    def captioner(**parts): return Captioner(tiny, vocab.tokens, **parts)
    def estranged(): return average_neighbours(captioner(), {"okapi": ["a"]})
    refused = {
        "vocabulary: expected every word once": lambda: Vocab(["a", "dog", "a"]),
        "no vector for zebra: expected one": lambda: word_table(vocab, vectors, ["zebra"]),
        ", w28, w29 and 3 more: ": lambda: check_vectors(vectors, [f"w{n}" for n in range(33)]*2),
        "image 7: scores: expected finite": lambda: checked(regions(score=math.nan), finite=True),
        "image 7: features: expected finite": lambda: checked(regions(features=[[1., -math.inf]]), finite=True),
        "regions: no image 8 among 1 images": lambda: table[8],
        "image 7: is in two of the tables": lambda: table_of([regions(), regions()]),
        "image None: expected regions with the number": lambda: table_of([Regions.empty()]),
        "small: part 'all': expected one of train": lambda: small.ids("all"),
        "small/vectors: expected a file of word vectors, which tell the captioner": lambda: small.vectors,
        "known words: expected shape (7,)": lambda: captioner(known=torch.ones(6).bool()),
        "neighbours: 'okapi': expected a word of the captioner": estranged,
        "image 2: missing": lambda: selection_f1({1: []}, {1: ["a"], 2: ["b"]}, [1, 2], {"bus": set()}, COCO_HELDOUT),
        f"seed={2**64}: expected a": lambda: set_seed(2**64),
    }
    for message, call in refused.items():
        with pytest.raises(NocError, match=re.escape(message)): call()
