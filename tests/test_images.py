"Test the path from photos to regions: unusual files, killed runs, memory, and torchvision's detectors."
import json, multiprocessing, os, struct, subprocess, sys, tarfile, time, tracemalloc, zlib
from pathlib import Path
import numpy as np
import pytest, torch, torchvision
from PIL import Image
from noc_nb.core import NocError
from noc_nb.files.boxes import read_detections
from noc_nb.files.store import RegionStore
from noc_nb.models.detector import Detector
from noc_nb.models.photos import _detect_files, _extract, image_files, open_image, random_weights

SMALL = "fasterrcnn_mobilenet_v3_large_320_fpn"
ENV = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

@pytest.fixture(scope="module")
def weights(tmp_path_factory): return random_weights(tmp_path_factory.mktemp("weights")/"w.pth", SMALL)

@pytest.fixture
def photos(tmp_path):
    "Write twelve photos and three files that are not photos; return their folder."
    folder, rng = tmp_path/"photos", np.random.default_rng(0)
    folder.mkdir()
    for n in range(12):
        Image.fromarray(rng.integers(0, 256, (60 + 20*(n % 3), 80, 3), np.uint8)).save(folder/f"p{n:02}.jpg")
    (folder/"p03b.jpg").write_bytes(b"")
    (folder/"p05b.png").write_bytes((folder/"p05.jpg").read_bytes()[:200])
    (folder/"p07b.jpg").symlink_to(folder/"p07b.jpg")
    return folder

def content(folder): return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir())}

# ---- hostile input

@pytest.mark.parametrize("name", ["../../escape.jpg", "/etc/escape.jpg", "a/../../b.jpg", "x\ny.jpg", "<script>.jpg",
                                  "\udcff.jpg"])
def test_names_in_a_shard_are_never_used_as_paths(tmp_path, name):
    Image.new("RGB", (9, 9)).save(tmp_path/"x.jpg")
    inside = tmp_path/"in"; inside.mkdir()
    with tarfile.open(inside/"s.tar", "w") as tar: tar.add(tmp_path/"x.jpg", name)
    before = sorted(p for p in tmp_path.rglob("*"))
    [f] = image_files(inside)
    assert open_image(f).size == (9, 9)
    f.name.encode("utf-8")   # the name can be written to a file
    assert sorted(p for p in tmp_path.rglob("*")) == before and f.path == inside/"s.tar"

@pytest.mark.parametrize("side", [9_000, 30_000])
def test_a_huge_header_takes_no_memory(tmp_path, side):
    "A small file whose header claims too many pixels gives an error, and needs little memory."
    def u32(n): return struct.pack(">I", n)
    def chunk(kind, data): return u32(len(data)) + kind + data + u32(zlib.crc32(kind + data))
    row, packer = b"\0" + bytes(side//8), zlib.compressobj(1)
    pixels = packer.compress(row*100) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    (tmp_path/"huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    tracemalloc.start()
    with pytest.raises(NocError, match="expected a whole image of at most 80,000,000"): open_image(tmp_path/"huge.png")
    peak = tracemalloc.get_traced_memory()[1]; tracemalloc.stop()
    assert peak < 2_000_000

@pytest.mark.parametrize("n", [0, 10_000])
def test_images_with_no_or_ten_thousand_boxes_are_stored(tmp_path, n):
    rng = np.random.default_rng(0)
    def box(): return [*rng.uniform(0, 50, 2), 9, 9]
    found = [dict(image_id=1, category_id=18, bbox=box(), score=rng.random()) for _ in range(n)]
    (tmp_path/"d.json").write_text(json.dumps(found))
    table = read_detections(tmp_path/"d.json", {1: (100, 100)}).take([1], {1: (100, 100)})
    store = RegionStore.write(tmp_path/"s", table)
    assert len(store[1]) == n and store.batch([1], k=50).labels.shape == (1, min(50, max(n, 1)))
    assert (np.diff(store.scores) <= 0).all()

# ---- runs that are killed

@pytest.mark.slow
def test_an_extraction_that_is_killed_and_resumed_gives_the_same_bytes(tmp_path, photos, weights):
    "After three kills at random moments, a resumed run with another number of workers writes the same bytes."
    torch.set_num_threads(1)   # so that this process can fork
    detector, files = Detector(SMALL, weights, size=64, device="cpu"), image_files(photos)
    rng, kills = np.random.default_rng(0), 0
    _extract(files, tmp_path/"straight", detector, part=2)
    def done(): return len(list(tmp_path.glob("killed.parts/0*")))
    for _ in range(3):
        kw = dict(part=2, resume=True)
        args = files, tmp_path/"killed", detector
        run = multiprocessing.get_context("fork").Process(target=_extract, args=args, kwargs=kw)
        at = done() + 1 + rng.integers(2); run.start()
        while run.is_alive() and done() < at: time.sleep(.002)
        time.sleep(rng.uniform(0, .1))
        kills += run.is_alive(); run.kill(); run.join()
    _extract(files, tmp_path/"killed", detector, workers=1, part=2, resume=True)
    assert kills >= 2 and content(tmp_path/"killed") == content(tmp_path/"straight")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["killed", "photos", "straight"]
    failed = [json.loads(l) for l in (tmp_path/"killed"/"failed.jsonl").read_text().splitlines()]
    assert [f["name"] for f in failed] == ["p03b.jpg", "p05b.png", "p07b.jpg"] and all(f["why"] for f in failed)
    assert len(RegionStore(tmp_path/"killed", verify=True)) == 12

# ---- memory

@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_records(tmp_path):
    "Writing and reading 100,000 records needs no more memory than 10,000, except for the index of ids."
    code = """
import sys
import numpy as np
from noc_nb.files.store import RegionStore
from noc_nb.lab.table import RegionTable
def tables(count, k=100):
    for at in range(0, count, k):
        boxes = np.tile(np.array([0, 0, 1, 1], np.float32), (k*10, 1)); ones = np.ones(k*10, np.int32)
        features = np.ones((k*10, 32), np.float16)
        yield RegionTable(np.arange(at, at + k), np.arange(k + 1)*10, boxes, ones, ones, features)
store = RegionStore.write(sys.argv[1], tables(int(sys.argv[2])))
for at in range(0, len(store), 5000): store.batch(range(at, at + 50))
status = dict(l.split(":") for l in open("/proc/self/status").read().splitlines())
print(int(status["RssAnon"].split()[0])//1024)
"""
    def used(n): # in MB
        command = [sys.executable, "-c", code, tmp_path/str(n), str(n)]
        return int(subprocess.run(command, env=ENV, capture_output=True, check=True).stdout)
    mb = {n: used(n) for n in (10_000, 100_000)}
    print(mb)
    assert mb[100_000] - mb[10_000] < 50

# ---- torchvision's detectors

@pytest.mark.slow
def test_the_default_detector_is_torchvisions_own(tmp_path, photos, monkeypatch):
    "The default detector gives torchvision's boxes and scores, and reads weights from torchvision's folder."
    name = "fasterrcnn_resnet50_fpn"
    published = Path(torchvision.models.get_model_weights(name).DEFAULT.url).name
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    path = random_weights(tmp_path/"hub"/"checkpoints"/published, name)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path/"hub"))
    own = torchvision.models.get_model(name, weights="DEFAULT", progress=False).eval()
    own.transform.min_size, own.transform.max_size = (160,), 266
    images = [open_image(photos/f"p0{n}.jpg") for n in (0, 2)]
    for source in "default", path:
        detector = Detector(weights=source, size=160, device="cpu", min_score=.5)
        for image, found in zip(images, detector(images)):
            with torch.no_grad(): [d] = own([torchvision.transforms.functional.to_tensor(image)])
            keep = torch.isin(d["labels"], detector.labels) & (d["scores"] >= .5)
            assert len(found) > 5 and found.features.shape == (len(found), 1024) and found.size == image.size
            torch.testing.assert_close(found.scores[:5], d["scores"][keep][:5], atol=1e-3, rtol=0)
            boxes = found.boxes[:5]*torch.tensor([*image.size]*2)
            torch.testing.assert_close(boxes, d["boxes"][keep][:5], atol=.1, rtol=0)

@pytest.mark.slow
@pytest.mark.parametrize("name", ["ssdlite320_mobilenet_v3_large", "retinanet_resnet50_fpn"])
def test_detectors_without_a_box_head_give_no_features(name, photos):
    detector = Detector(name, None, None, min_score=0., device="cpu", size=None if "ssd" in name else 96)
    [found] = detector([open_image(photos/"p01.jpg")])
    assert found.features is None and ((found.boxes >= 0) & (found.boxes <= 1)).all()

@pytest.mark.slow
def test_a_resnet101_gives_2048_features_in_any_process(weights, photos):
    "ResNet-101 gives 2,048 numbers per region, and decoding in another process changes nothing."
    torch.manual_seed(0)
    detector = Detector(SMALL, weights, "resnet101", .5, "cpu", 64, feature_weights=None)
    files = image_files(photos)[:5]
    here, there = (list(_detect_files(files, detector, workers, window=3)) for workers in (0, 1))
    for r, s in zip(here, there, strict=True):
        assert type(r) is NocError and str(r) == str(s) or len(r.features.T) == 2048 and s.features.equal(r.features)
