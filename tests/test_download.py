"""Test `noc_data` with a local server: from an empty folder to rows and scores, and with faults of all kinds.

The files have the form of the true ones: COCO's archives and names, the published split, GloVe's archive, nocaps."""
import errno, gzip, hashlib, io, json, os, random, shlex, shutil, subprocess, sys, threading, time, zipfile
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
import pytest
from PIL import Image
from noc_nb.commands.cli import noc_data
from noc_nb.commands.cli import main
from noc_nb.core import NocError, asset
from noc_nb.files import download
from noc_nb.files.download import _downloads, fetch, _fetch_data
from noc_nb.files.drawing import make_toy
from noc_nb.lab.disk import read_json
from noc_nb.models.photos import random_weights
from noc_nb.scores import java

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["captioner.d_model=32", "captioner.heads=2", "captioner.d_ff=64", "captioner.layers=1", "selector.d_model=32",
         "selector.heads=2", "selector.d_ff=64", "train_selector.epochs=1", "xe.epochs=1", "min_count=1", "search.k=2"]

class Answer(BaseHTTPRequestHandler):
    "Serve `server.files`; support ranges if `server.ranges`; stop once after `server.limits[name]` bytes."
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        name, server, start = self.path.rpartition("/")[2], self.server, 0
        if name not in server.files: return self.send_error(404)
        whole = server.files[name]
        tag = f'"{hashlib.sha256(whole).hexdigest()}"'
        if server.ranges and self.headers["If-Range"] == tag: start = int(self.headers["Range"][6:-1])
        server.asked.append((name, start))
        self.send_response(206 if start else 200)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(whole) - start))
        self.end_headers()
        self.wfile.write(whole[start:start + server.limits.pop(name, len(whole))])
        self.wfile.flush()
        server.open.wait(20)
        self.close_connection = True

@pytest.fixture
def served(tmp_path, monkeypatch):
    "Start a server, and change to an empty folder."
    monkeypatch.chdir(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.files, server.asked, server.limits, server.ranges = {}, [], {}, True
    server.open = threading.Event()      # until it is set, the server does not close connections
    server.open.set()
    server.base = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=[.02], daemon=True).start()
    yield server
    server.open.set()
    server.shutdown()
    server.server_close()

def serve(server, name, data):
    "Serve a file; return its entry in the table of downloads."
    server.files[name] = data
    return dict(address=f"{server.base}/{name}", bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

def zipped(files):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in files.items(): z.writestr(name, data)
    return packed.getvalue()

def jpeg(n=0):
    file = io.BytesIO()
    Image.effect_noise((90, 70), 50 + n).convert("RGB").save(file, "JPEG")
    return file.getvalue()

# ---- COCO, from an empty folder to rows

def cut(root, split):
    "Choose a few images of a COCO folder. Return name -> text of the annotation files, and the published split."
    captions, instances = ({part: read_json(root/f"annotations/{kind}_{part}2014.json") for part in ("train", "val")}
                           for kind in ("captions", "instances"))
    refs = defaultdict(list)
    for part in captions.values():
        for a in part["annotations"]: refs[a["image_id"]].append(a)
    def some(ids, n): return [i for i in sorted(ids) if len(refs[i]) >= 5][:n]
    chosen = dict(train=some(split["train"], 40))
    for part in "val", "test":
        novel = some(split[f"novel_{part}"], 6)
        chosen |= {part: sorted({*some(split[part], 12), *novel}), f"novel_{part}": novel}
    kept, files = {i for ids in chosen.values() for i in ids}, {}
    for kind, parts in dict(captions=captions, instances=instances).items():
        for part, coco in parts.items():
            lists = {key: [x for x in coco[key] if x.get("image_id", x["id"]) in kept]
                     for key in ("images", "annotations")}
            files[f"annotations/{kind}_{part}2014.json"] = json.dumps(coco | lists)
    files["annotations/person_keypoints_val2014.json"] = "{}"
    names = dict(train="train", val_train="val", test_train="test", val="novel_val", test="novel_test")
    return files, {name: {str(i): 1 for i in chosen[part]} for name, part in names.items()}

def published(root):
    "Return the published split of a COCO folder with the names that ours has."
    theirs = read_json(root/"splits/split_noc_coco.json")
    names = dict(train="train", val="val_train", test="test_train", novel_val="val", novel_test="test")
    return {part: list(map(int, theirs[name])) for part, name in names.items()}

def small_coco(server, root=None):
    "Return the package's table of downloads with small files, cut from COCO, or from the toy world without COCO."
    if root: split = published(root)
    else:
        root = make_toy("toy", train=60, val=20, test=20)
        split = read_json(root/"splits/toy.json")
        Path("COCO").mkdir()
        for name in "classes.json", "heldout.json": shutil.copy(root/name, "COCO")
    annotations, split = cut(root, split)
    lines, = map(text_of, (root/"vectors").iterdir())
    photos = {part: [image["file_name"].replace(".png", ".jpg") for image in
                     json.loads(annotations[f"annotations/captions_{part}2014.json"])["images"]]
              for part in ("train", "val")}
    archives = {part: zipped({f"{part}2014/{name}": jpeg() for name in names}) for part, names in photos.items()}
    data = {"annotations_trainval2014.zip": zipped(annotations), "split_noc_coco.json": json.dumps(split).encode(),
            "glove.6B.zip": zipped({"glove.6B.50d.txt": "the 1 2\n", "glove.6B.300d.txt": lines}),
            "train2014.zip": archives["train"], "val2014.zip": archives["val"]}
    table = json.loads(asset("downloads.json"))
    for row in table["coco"]["files"]:
        name = row["address"].rpartition("/")[2]
        row |= serve(server, name, data[name])
        if row.get("photos"): row["count"] = len(photos[name[:-8]])
    return table

def text_of(path): return (gzip.open if path.suffix == ".gz" else open)(path, "rb").read()

def ask(table, what, **more):
    options = dict(what=what, out=what.upper(), images=False, from_=None, list=False)
    download._run_data(SimpleNamespace(**options | more), table)

def type_next(printed, monkeypatch, *more):
    "Run the commands that `noc_data` printed, with options that make them small."
    lines = printed.partition("Next:\n")[2].splitlines()
    assert len(lines) >= 1
    for line, options in zip(lines, more):
        monkeypatch.setattr(sys, "argv", [*shlex.split(line), *map(str, options)])
        main()

def test_a_downloaded_coco_gives_rows(served, monkeypatch, capsys): from_nothing_to_rows(served, monkeypatch, capsys)

def test_real_captions_of_a_downloaded_coco_give_rows(served, coco, monkeypatch, capsys):
    from_nothing_to_rows(served, monkeypatch, capsys, coco)

def from_nothing_to_rows(served, monkeypatch, capsys, root=None):
    table = small_coco(served, root)
    ask(table, "coco", images=True)
    assert sorted(p.name for p in Path("COCO/annotations").iterdir()) == [
        f"{kind}_{part}2014.json" for kind in ("captions", "instances") for part in ("train", "val")]
    there = [p for p in Path("COCO").rglob("*") if p.is_file()]
    assert not [p for p in there if p.suffix in (".part", ".version") or p.name.startswith("tmp")]
    assert [p.name for p in there if p.suffix == ".zip"] == ["glove.6B.zip"]   # all other archives are deleted
    served.asked.clear()
    ask(table, "coco", images=True)
    assert not served.asked                                             # no file is missing
    small = ["--tables", 1, "--rows", "selector", "--training", "xe", "--metrics", "C", "--out", "run", "--set", *SMALL]
    type_next(capsys.readouterr().out, monkeypatch, small)
    assert "its ground-truth boxes are used as regions" in capsys.readouterr().err
    rows = list(map(json.loads, Path("run/rows.jsonl").read_text().splitlines()))
    assert len(rows) > 1 and {r["detections"] for r in rows} == {"gt"}
    assert all("--detections gt" in r["command"] for r in rows)

# ---- nocaps, from an empty folder to scores

def test_a_downloaded_nocaps_gives_scores(served, monkeypatch, capsys, tmp_path):
    table, images, annotations = json.loads(asset("downloads.json")), [], []
    names = ["0013ea2087020901", "0c1f3e", "00a1b2c3d4e5f607", "00c7"]
    for i, name in enumerate(names):
        domain = ("in-domain", "near-domain", "out-domain", "out-domain")[i]
        images.append(dict(id=i, open_images_id=name, width=90, height=70, file_name=f"{name}.jpg", license=0,
                           coco_url=f"{served.base}/val/{name}.jpg", date_captured="2018-11-06 11:04:33",
                           domain=domain))
        texts = [f"A dog stands in front of house {n}." for n in range(10)]
        annotations += [dict(id=10*i + n, image_id=i, caption=text) for n, text in enumerate(texts)]
        served.files[f"{name}.jpg"] = jpeg(i)
    captions, photos = table["nocaps"]["files"]
    captions |= serve(served, "nocaps_val_4500_captions.json", json.dumps(
        dict(licenses=[], info={}, images=images, annotations=annotations)).encode()) | dict(bytes=None, sha256=None)
    photos["count"] = len(names)
    missing = served.files.pop("00c7.jpg")
    with pytest.raises(NocError, match=r"00c7.jpg: cannot be fetched .*\(photos that failed: 1\)"): ask(table, "nocaps")
    served.files["00c7.jpg"] = missing
    served.asked.clear()
    ask(table, "nocaps")
    assert [name for name, _ in served.asked] == ["00c7.jpg"]
    printed = capsys.readouterr().out
    checksum = hashlib.sha256(served.files["nocaps_val_4500_captions.json"]).hexdigest()
    note = Path("NOCAPS/annotations/nocaps_val_4500_captions.sha256")
    assert checksum in printed and note.read_text() == f"{checksum}  nocaps_val_4500_captions.json\n"

    weights = random_weights(tmp_path/"w.pth", "fasterrcnn_mobilenet_v3_large_320_fpn")
    look = "--detector", "fasterrcnn_mobilenet_v3_large_320_fpn", "--weights", weights
    type_next(printed, monkeypatch, look, ["--metrics", "C,R", "--samples", 20])
    made = list(map(json.loads, Path("captions.jsonl").read_text().splitlines()))
    assert {line["image_id"]: Path(line["file"]).stem for line in made} == dict(enumerate(names))
    report = Path("report/report.md").read_text(encoding="utf-8")
    assert all(domain in report for domain in ("in-domain", "near-domain", "out-domain"))

    captions_file = note.with_suffix(".json")
    captions_file.write_text(captions_file.read_text() + " ")
    with pytest.raises(NocError, match=f"SHA-256 .* expected {checksum}, stored in {note}; delete"):
        ask(table, "nocaps")
    note.unlink()
    ask(table, "nocaps")

# ---- files without a published checksum

def some_captions(server, url):
    "Serve a file of captions that lists a photo, without a checksum; return a table of both."
    images = [dict(id=1, file_name="1.jpg", coco_url=url)]
    row = serve(server, "c.json", json.dumps(dict(images=images)).encode()) | dict(bytes=None, sha256=None)
    row |= dict(what="captions", to="annotations/c.json", kept=9)
    photos = dict(what="photos", to="images", members=["*.jpg"], address="coco_url", listed=row["to"], kept=9)
    return dict(small=dict(files=[row, photos], next=[]))

@pytest.mark.parametrize("body", [b"<html>busy</html>", b'{"images": [{"id": 1}', b'{"error": "busy"}', b""])
def test_an_unexpected_file_is_not_kept(served, body):
    table = some_captions(served, f"{served.base}/1.jpg")
    served.files["1.jpg"], right = jpeg(), served.files["c.json"]
    served.files["c.json"] = body
    with pytest.raises(NocError, match="c.json: .*expected .* not put in place") as told: ask(table, "small")
    assert "\n" not in str(told.value) and not [*Path("SMALL").rglob("c.*")]
    served.files["c.json"] = right
    ask(table, "small")
    assert Path("SMALL/annotations/c.json").read_bytes() == right and Path("SMALL/annotations/c.sha256").exists()

@pytest.mark.parametrize("photo", [jpeg()[:-200], b"\xff\xd8 no photo", b"", b"<html>busy</html>"])
def test_a_photo_that_cannot_be_decoded_is_not_kept(served, photo):
    table = some_captions(served, f"{served.base}/1.jpg")
    served.files["1.jpg"] = photo
    with pytest.raises(NocError, match="1.jpg: expected a whole JPEG photo .*photos that failed: 1"):
        ask(table, "small")
    assert not [*Path("SMALL/images").rglob("*.jpg")]

@pytest.mark.parametrize("url", [5, None, ["a"]])
def test_an_address_that_is_not_text_is_refused(served, url):
    with pytest.raises(NocError, match="c.json: 1.jpg: coco_url .*: expected an address"):
        ask(some_captions(served, url), "small")

# ---- what stops a download

BLOB = bytes(range(256))*8000                                                  # 2 MB

def test_a_killed_download_continues(served):
    row = serve(served, "blob", BLOB)
    served.open.clear()
    served.limits["blob"] = len(BLOB)//2
    code = "import sys; from noc_nb.files.download import fetch; _, url, n, s = sys.argv; fetch(url, 'got', int(n), s)"
    child = subprocess.Popen([sys.executable, "-c", code, row["address"], str(len(BLOB)), row["sha256"]])
    part, until = Path("got.part"), time.monotonic() + 60
    while not (part.exists() and part.stat().st_size >= 1 << 18) and time.monotonic() < until: time.sleep(.05)
    child.kill()
    child.wait()
    served.open.set()
    left = part.stat().st_size
    assert not Path("got").exists() and 0 < left < len(BLOB)
    fetch(row["address"], "got", row["bytes"], row["sha256"])
    assert served.asked == [("blob", 0), ("blob", left)] and Path("got").read_bytes() == BLOB
    assert not part.exists() and not Path("got.version").exists()

def test_a_download_without_ranges_starts_again(served):
    row = serve(served, "blob", BLOB)
    served.ranges, served.limits["blob"] = False, len(BLOB)//2
    fetch(row["address"], "got", row["bytes"], row["sha256"])
    assert served.asked == [("blob", 0)]*2 and Path("got").read_bytes() == BLOB

@pytest.mark.parametrize("known", [True, False])
def test_two_versions_of_a_file_are_never_mixed(served, known):
    "If the file on the server changes during a download, the whole new file is downloaded, or an error raised."
    row = serve(served, "blob", BLOB)
    Path("got.part").write_bytes(BLOB[:1000])
    Path("got.version").write_text(f'"{row["sha256"]}"')
    serve(served, "blob", BLOB[::-1])
    if not known: assert fetch(row["address"], "got").read_bytes() == BLOB[::-1]
    else:
        with pytest.raises(NocError, match="does not match the known hash"):
            fetch(row["address"], "got", row["bytes"], row["sha256"])
        assert not Path("got").exists()
        serve(served, "blob", BLOB)                                            # a later download works
        assert fetch(row["address"], "got", row["bytes"], row["sha256"]).read_bytes() == BLOB
    assert {start for _, start in served.asked} == {0}

def test_a_complete_part_is_not_downloaded_again(served):
    row = serve(served, "blob", BLOB)
    Path("got.part").write_bytes(BLOB)
    assert fetch(row["address"], "got", row["bytes"], row["sha256"]).read_bytes() == BLOB and not served.asked

class Full:
    "A file on a disk with room for `room` more bytes."
    def __init__(self, file, room): self.file, self.room = file, room
    def __getattr__(self, name): return getattr(self.file, name)
    def __enter__(self): return self
    def __exit__(self, *why): self.file.close()
    def write(self, data):
        self.room -= len(data)
        if self.room < 0: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

def a_world(server):
    "Return a table of two files, after downloading the first."
    rows = [dict(what=name, to=f"files/{name}", kept=9) | serve(server, name, data)
            for name, data in dict(first=b"first", second=BLOB).items()]
    table = dict(small=dict(files=rows, next=[]))
    _fetch_data(_downloads(table)["small"][:1], "SMALL")
    return table

FAULTS = {
    "checksum": (lambda server, row, patch: row.update(sha256="0"*64), "hash of downloaded file .second. does not"),
    "size": (lambda server, row, patch: row.update(bytes=7),
             "second: has 2,048,000 bytes: expected 7 bytes; .*has changed"),
    "no network": (lambda server, row, patch: row.update(address="http://127.0.0.1:9/second"), "refused.*continues"),
    "no such file": (lambda server, row, patch: server.files.pop("second"), "second: cannot be fetched .404"),
    "full disk": (lambda server, row, patch: patch.setattr(download, "open", raising=False,
                  value=lambda *args: Full(open(*args), 10**6)), "No space left on device.*saved files are intact"),
    "small disk": (lambda server, row, patch: row.update(kept=10**18), "GB are free: expected"),
    "a mistyped folder": (lambda server, row, patch: row.update(source="nowhere"), "--from nowhere: expected an"),
}

@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_gives_one_line_and_keeps_what_is_there(served, monkeypatch, fault):
    table = a_world(served)
    good = json.loads(json.dumps(table))
    spoil, message = FAULTS[fault]
    row, limit = table["small"]["files"][1], served.files["second"]
    with monkeypatch.context() as patch:
        spoil(served, row, patch)
        source = row.pop("source", None)
        with pytest.raises(NocError, match=message) as told: ask(table, "small", from_=source)
    assert "\n" not in str(told.value)
    assert Path("SMALL/files/first").read_bytes() == b"first" and not Path("SMALL/files/second").exists()
    served.files["second"] = limit
    served.asked.clear()
    ask(good, "small")
    assert Path("SMALL/files/second").read_bytes() == BLOB
    if fault == "full disk": assert served.asked[0][1] > 0                     # the part that was written is used

def test_existing_files_are_not_downloaded(served):
    "A mirror is an address, or a folder, whose files are not changed; files that the folder lacks are downloaded."
    table = a_world(served)
    packed = zipped({"deep/a.json": "[1]", "deep/b.txt": "no"})
    row = dict(what="zip", to="lists", members=["*.json"], kept=9) | serve(served, "z.zip", packed)
    table["small"]["files"].append(row)
    Path("mine").mkdir()
    Path("mine/z.zip").write_bytes(served.files.pop("z.zip"))
    served.asked.clear()
    ask(table, "small", from_="mine")
    assert [name for name, _ in served.asked] == ["second"]
    assert Path("mine/z.zip").read_bytes() == packed and Path("SMALL/lists/a.json").read_text() == "[1]"
    assert not Path("SMALL/lists/b.txt").exists()
    shutil.rmtree("SMALL")
    for row in table["small"]["files"]: row["address"] = f"http://127.0.0.1:9/{row['address'].rpartition('/')[2]}"
    served.files["z.zip"] = packed
    ask(table, "small", from_=served.base)
    assert Path("SMALL/files/second").read_bytes() == BLOB and Path("SMALL/lists/a.json").exists()
    Path("mine/z.zip").write_bytes(b"other")
    shutil.rmtree("SMALL/lists")
    with pytest.raises(NocError, match="mine/z.zip: SHA-256 .* expected"): ask(table, "small", from_="mine")

def test_unpacking_continues_after_a_kill(served, monkeypatch):
    "After a kill between two members of an archive, unpacking continues without another download."
    packed = zipped({f"{k}.json": f"[{k}]" for k in range(4)})
    row = dict(what="zip", to="lists", members=["*.json"], count=4, kept=9) | serve(served, "z.zip", packed)
    table, whole = dict(small=dict(files=[row], next=[])), download.whole_file
    def dies(path, *mode):
        if Path(path).name == "2.json": raise KeyboardInterrupt
        return whole(path, *mode)
    with monkeypatch.context() as patch:
        patch.setattr(download, "whole_file", dies)
        with pytest.raises(KeyboardInterrupt): ask(table, "small")
    first = Path("SMALL/lists/0.json").stat().st_mtime_ns
    assert sorted(os.listdir("SMALL/lists")) == ["0.json", "1.json"]
    ask(table, "small")
    assert len(os.listdir("SMALL/lists")) == 4 and len(served.asked) == 1
    assert Path("SMALL/lists/0.json").stat().st_mtime_ns == first and not Path("SMALL/.noc_data").exists()

def test_the_table_of_downloads_is_complete():
    "Every file of COCO has a size and a checksum, and every file has an address and a licence, which may be unknown."
    for name, files in _downloads().items():
        for file in files:
            if name == "coco": assert file.bytes > 10**6 and len(file.sha256) == 64
            assert file.licence and (file.listed or file.address.startswith("https://"))
    assert {f.to for f in _downloads()["coco"]} == {"annotations", "splits/split_noc_coco.json", "vectors/glove.6B.zip",
                                                   "images/train2014", "images/val2014"}

def test_spice_comes_by_the_same_downloader(served, monkeypatch, capsys):
    "An interrupted download of CoreNLP's archive continues, its jars are checked, and the archive is deleted."
    jars = {"g:core:1": random.Random(0).randbytes(10**6), "g:core:1:models": b"models"}
    packed = zipped({f"full/{java._jar_name(c)}": data for c, data in jars.items()} | {"full/other.jar": b""})
    serve(served, "stanford-corenlp-full-2015-12-09.zip", packed)
    whole = java.fetch
    sums = {c: hashlib.sha256(data).hexdigest() for c, data in jars.items()}
    monkeypatch.setenv("NOC_CACHE", "cache")
    monkeypatch.setattr(java, "_NLP", "g:core:1")
    monkeypatch.setattr(java, "_SPICE_JARS", sums)
    monkeypatch.setattr(java.shutil, "which", lambda name: None)                # Maven is not installed
    monkeypatch.setattr(java, "fetch", lambda url, to: whole(f"{served.base}/{Path(url).name}", to))
    served.limits["stanford-corenlp-full-2015-12-09.zip"] = 600_000
    noc_data("spice")
    folder = Path("cache/spice")
    assert f"SPICE is ready: {folder}" in capsys.readouterr().out
    assert sorted(p.name for p in folder.iterdir()) == ["core-1-models.jar", "core-1.jar"]
    assert [p.name for p in Path("cache").iterdir()] == ["spice"]
    assert [start > 0 for _, start in served.asked] == [False, True]
    for option in dict(out="x"), dict(list=True):
        with pytest.raises(NocError, match="noc_data spice: expected no option but --from; the variable NOC_CACHE"):
            noc_data("spice", **option)
