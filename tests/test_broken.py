"""Test that a broken photo costs its own line alone, however photos, boxes and captioners are combined.

The lines of the other photos equal those of a run without the broken ones. DRAWN_CASES sets the number of cases
(CI: 48, `make drawn`: 300)."""
import io, os, random, struct, tarfile, zlib
from itertools import product
from pathlib import Path
import numpy as np
import pyarrow, pyarrow.parquet
import pytest
pytest.importorskip("transformers")
from PIL import Image
from noc_nb.core import NocError
from noc_nb.files.store import RegionStore
from noc_nb.lab.disk import write_json
from noc_nb.models.captioners import PhotoCaptioner
from noc_nb.models.pipeline import CaptionOptions
from noc_nb.models.pretrained import quiet
from noc_nb.models.source import Job
from noc_nb.pages.gallery import CaptionRun
from noc_nb.regions import Regions
from tiny_models import save_blip, save_detector

CASES = int(os.environ.get("DRAWN_CASES", 48))
pytestmark = pytest.mark.usefixtures("one_thread")

# ---- photos, whole and broken

def size(i): return 40 + 2*i, 30

def whole(i):
    "Return a photo as a PNG. Photos differ in size and content, so that a line shows whose it is."
    pixels = np.random.default_rng(i).integers(0, 256, (6, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size(i)).save(file, "png")
    return file.getvalue()

def png(width, height):
    "Return a PNG whose header claims a size."
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")

BROKEN = {
    "empty": lambda i: b"", "truncated": lambda i: whole(i)[:len(whole(i))//2], "text": lambda i: b"no photo\n",
    "no pixels": lambda i: png(0, 30), "bomb": lambda i: png(30_000, 30_000), "other format": lambda i: b"%PDF-1.7\n",
    "folder": lambda i: Path.mkdir, "link": lambda i: lambda path: path.symlink_to("nowhere.png"),
    "pipe": lambda i: os.mkfifo}

def in_folder(photos, to):
    to.mkdir()
    for name, content in photos.items():
        if callable(content): content(to/name)
        else: (to/name).write_bytes(content)
    return to

def in_list(photos, to):
    in_folder(photos, to)
    names = to.with_suffix(".txt")
    names.write_text("".join(f"{to.name}/{name}\n" for name in photos))
    return names

def in_tar(photos, to):
    kinds = {Path.mkdir: tarfile.DIRTYPE, os.mkfifo: tarfile.FIFOTYPE}
    with tarfile.open(to.with_suffix(".tar"), "w") as tar:
        for name, content in photos.items():
            member = tarfile.TarInfo(name)
            if callable(content):
                member.type, member.linkname = kinds.get(content, tarfile.SYMTYPE), "nowhere.png"
                content = b""
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return to.with_suffix(".tar")

def in_parquet(photos, to):
    rows = dict(bytes=[None if callable(c) else c for c in photos.values()], name=[*photos])
    pyarrow.parquet.write_table(pyarrow.table(rows), to.with_suffix(".parquet"))
    return to.with_suffix(".parquet")

# ---- boxes

IDS = range(1, 6)
BOXES = [dict(image_id=i, category_id=17 + i, bbox=[2*i, 3, 12, 9 + i], score=.9) for i in IDS]
LISTED = [dict(id=i, file_name=f"{i}.png", width=size(i)[0], height=30) for i in IDS]

def sized(root):
    write_json(root/"sized.json", dict(images=LISTED, annotations=BOXES))
    return root/"sized.json"

def unsized(root):
    "Write boxes in pixels of photos whose sizes only the photos tell."
    write_json(root/"unsized.json", [box | dict(file_name=f"{box['image_id']}.png") for box in BOXES])
    return root/"unsized.json"

def stored(root):
    def regions(i): return Regions([[.1, .1, .5, .1*i + .2]], [17 + i], [.9], image_id=i, size=size(i))
    RegionStore.write(root/"stored", map(regions, IDS))
    return root/"stored"

PLACES = in_folder, in_list, in_tar, in_parquet
FILES = sized, unsized, stored
WAYS = [way for way in product(PLACES, (*FILES, "detector", None), ("ours", "theirs"))
        if way[1:] != (None, "ours")]                            # our captioner needs regions

@pytest.fixture(scope="module")
def models(tmp_path_factory):
    "Return the folder of a captioner, and what each kind of boxes adds to a job."
    root = tmp_path_factory.mktemp("models")
    with quiet():
        save_blip(root/"captioner")
        save_detector("RT-DETR", root/"detector", ["person", "dog", "cat", "zebra"])
    more = {write: dict(src=str(write(root))) for write in FILES}
    more |= {"detector": dict(detector=str(root/"detector")), None: {}}
    return str(root/"captioner"), more, {}

def lines(models, way, photos, to, batch):
    "Caption photos. Return a line for each image id."
    captioner, more, pipelines = models
    place, found, whose = way
    photos = str(place(photos, to))
    more = more[found] | (dict(images=photos) if found in FILES else dict(src=photos))
    if whose == "theirs": more["captioner"] = captioner
    words = None if found else "cat"
    job = Job(**more, options=CaptionOptions(objects=words, batch=batch))
    key = whose, job.detector
    with quiet():
        if key not in pipelines: pipelines[key] = job.pipeline()
        source = job.source(pipelines[key])
        return {line["image_id"]: line for line in CaptionRun(pipelines[key], source, job.options).lines(source.ids)}

# ---- the property

def same(a, b):
    "Compare lines; in a batch of another size, the sums in matrix products are rounded differently."
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple): return len(a) == len(b) and all(map(same, a, b))
    return abs(a - b) < 2e-3 if isinstance(a, float) else a == b

@pytest.mark.parametrize("case", range(CASES))
def test_a_broken_photo_fails_only_its_own_line(models, tmp_path, case):
    rng = random.Random(case)
    way = WAYS[case % len(WAYS)]
    broken = {i: rng.choice([*BROKEN]) for i in rng.sample(IDS, rng.randint(1, 4))}
    photos = {f"{i}.png": BROKEN[broken[i]](i) if i in broken else whole(i) for i in IDS}
    batch = rng.randint(1, 5)
    found = lines(models, way, photos, tmp_path/"photos", batch)
    rest = {name: content for name, content in photos.items() if int(name[0]) not in broken}
    alone = lines(models, way, rest, tmp_path/"rest", batch)
    assert alone.keys() == set(IDS) - broken.keys() and all("caption" in line for line in alone.values())
    for i, line in alone.items(): assert same(line, found[i] | dict(file=line["file"])), (way, broken)
    if way[1:] == (sized, "ours") or way[1:] == (stored, "ours"): return     # these need no photo
    for i in broken.keys() & found.keys():
        assert f"{i}.png" in found[i]["error"] and "\n" not in found[i]["error"], (way, broken)

@pytest.mark.parametrize("found", [sized, "detector", None])
def test_a_photo_that_the_captioner_refuses_fails_only_its_own_line(models, tmp_path, monkeypatch, found):
    "Some processors refuse photos of odd shapes, and end with an error about the whole batch."
    way, photos = (in_folder, found, "theirs"), {f"{i}.png": whole(i) for i in IDS}
    rest = {name: content for name, content in photos.items() if name != "3.png"}
    alone = lines(models, way, rest, tmp_path/"rest", 3)
    inputs = PhotoCaptioner._inputs
    def odd(self, photos):
        if any(photo.size == size(3) for photo in photos): raise ValueError("absolute aspect ratio\nmust be small")
        return inputs(self, photos)
    monkeypatch.setattr(PhotoCaptioner, "_inputs", odd)
    for batch in 1, 3, 5:
        there = lines(models, way, photos, tmp_path/f"all{batch}", batch)
        error = there.pop(3)["error"]
        assert error.startswith("3.png: the captioner does not take this photo (") and "aspect ratio)" in error
        assert all(same(line, there[i] | dict(file=line["file"])) for i, line in alone.items())
        assert there.keys() == alone.keys()
    def none(self, photos): raise ValueError("no such prompt")
    monkeypatch.setattr(PhotoCaptioner, "_inputs", none)
    with pytest.raises(NocError, match="the model does not accept it .*no such prompt"):
        lines(models, way, photos, tmp_path/"none", 3)
