"Test noc_caption with damaged files, with kills at random moments, and its page in a browser."
import json, multiprocessing, os, random, re, shutil, subprocess, sys, tarfile, time, weakref, zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote
import numpy as np
import pyarrow, pyarrow.parquet
import pytest
import torch
from PIL import Image
from noc_nb.captioner import Captioner
from noc_nb.commands.cli import noc_caption
from noc_nb.commands.cli import main
from noc_nb.constraints import COCO_CLASSES
from noc_nb.core import NocError
from noc_nb.encoder import CaptionerConfig
from noc_nb.fast.search import SearchConfig
from noc_nb.files.drawing import make_toy
from noc_nb.lab.runs import locked
from noc_nb.lab.table import table_of
from noc_nb.models.photos import _extract, image_files, open_image
from noc_nb.models.pipeline import CaptionOptions, NovelCaptioner, PipelineConfig
from noc_nb.models.source import Job, detected, _from_photos, _from_table
from noc_nb.pages.app import _Studio
from noc_nb.pages.gallery import _caption_all, _caption_files, CaptionRun, _pictures, _read_lines, _Summary
from noc_nb.regions import Regions
from noc_nb.selector import RegionSelector, SelectorConfig
from noc_nb.vocab import Vocab

EVIL = '<img src=x onerror="document.title=1">'

@pytest.fixture(scope="module")
def toy():
    torch.set_num_threads(1)
    return NovelCaptioner.from_pretrained("toy", device="cpu")

@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"), train=1, val=40, test=1)

def some_regions(images):
    "Return a dog and a kite for each image: a stand-in for a detector."
    return [Regions([[.1, .1, .6, .9], [.5, .1, .9, .4]], [2, 30], [.9, .8], size=i.size) for i in images]

class Stub:
    "A stand-in for a detector of files, with the regions of `some_regions`."
    limits, about = (64, 64), staticmethod(dict)
    def detect(self, images): return some_regions(SimpleNamespace(size=size) for _, size in images)

def small_pipeline():
    "Build a pipeline with COCO's classes and random weights. Its captions are nonsense but satisfy their constraints."
    words = sorted({w for c in COCO_CLASSES.values() for f in c.forms for w in f.split()} | {"a", "on", "the"})
    vocab = Vocab.build([words]*9, 1)
    captioner = Captioner(CaptionerConfig(d_feature=306, d_word=16, d_model=16, heads=2, d_ff=16, layers=1, memory=2,
                                          max_regions=20), vocab.tokens)
    vectors = {i: torch.randn(300, generator=torch.Generator().manual_seed(i)) for i in COCO_CLASSES}
    selector = RegionSelector(SelectorConfig(d_model=16, heads=2, d_ff=16))
    return NovelCaptioner(selector, captioner, COCO_CLASSES, vectors)

# ---- inputs

def hostile(folder):
    "Write a folder with the files that a user may pass."
    photo = Image.effect_noise((80, 60), 90).convert("RGB")
    photo.save(folder/"1.jpg")
    photo.convert("CMYK").save(folder/"2.jpg")
    Image.new("I;16", (80, 60), 40_000).save(folder/"3.png")
    photo.save(folder/"4.gif", save_all=True, append_images=[photo.rotate(90)])
    turned = Image.Exif(); turned[0x0112] = 6
    photo.save(folder/"5.jpg", exif=turned)
    (folder/"6.jpg").write_bytes((folder/"1.jpg").read_bytes()[:700])
    (folder/"7.jpg").write_bytes(b"")
    chunk = b"IHDR" + (30_000).to_bytes(4, "big")*2 + bytes([8, 2, 0, 0, 0])
    (folder/"8.png").write_bytes(b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + chunk
                                 + zlib.crc32(chunk).to_bytes(4, "big"))
    photo.save(folder/f"{EVIL.replace('/', '')}9.jpg")
    (folder/"loop").symlink_to(folder)
    (folder/"10.jpg").symlink_to("10.jpg")
    with tarfile.open(folder/"shard-11.tar", "w") as tar: tar.add(folder/"1.jpg", "../../000012.jpg")

@pytest.fixture
def src(tmp_path):
    "Return a folder with the files that `hostile` writes."
    (tmp_path/"photos").mkdir()
    hostile(tmp_path/"photos")
    return tmp_path/"photos"

@pytest.mark.parametrize("pairs", (True, False))
def test_photos_in_parquet_give_the_same_lines_as_a_folder(toy, src, tmp_path, pairs):
    "Photos in Parquet, broken ones too, give the same lines as in a folder, with structs of Hugging Face or columns."
    inside = [f for f in image_files(src) if f.id not in (7, 10)]      # an empty file and a link to itself
    data, names = [f.open().read() for f in inside], [f.name for f in inside]
    table = dict(image=[dict(bytes=b, path=n) for b, n in zip(data, names)]) if pairs else dict(key=names, jpg=data)
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path/"photos.parquet", row_group_size=4)
    def lines(source):
        made = CaptionRun(toy, source).lines([f.id for f in inside])
        return [{k: v for k, v in line.items() if k not in ("file", "error")} for line in made]
    source = _from_photos(image_files(tmp_path/"photos.parquet"), Stub())
    assert lines(source) == lines(_from_photos(image_files(src), Stub()))
    assert source.ids == [f.id for f in inside] and source.name(6).startswith("photos.parquet/")

def test_hostile_photos_give_a_line_each(toy, src, tmp_path):
    lines = CaptionRun(toy, source := _from_photos(image_files(src), Stub())).lines(source.ids)
    good = {line["image_id"] for line in lines if "caption" in line}
    assert good == {1, 2, 3, 4, 5, 9, 12} and len(lines) == 11
    assert all("\n" not in line["error"] and line["file"] in line["error"] for line in lines if "error" in line)
    assert next(line for line in lines if line["image_id"] == 5)["size"] == (60, 80)
    out = _caption_all(toy, source, tmp_path/"lines.jsonl")
    show = lambda line: (open_image(source.files[line["image_id"]]), None)
    _Summary(picture=show).read(_read_lines(out)).write(tmp_path/"page.html", EVIL)
    page = (tmp_path/"page.html").read_text()
    assert "<img" not in page and "&lt;img" in page and page.count("<article") == 7
    assert not list(tmp_path.rglob("000012.jpg"))

def test_one_photo_is_open_at_a_time(toy, src, monkeypatch):
    "Only one photo is open at a time, because fifty photos of 80 million pixels would need 12 GB."
    seen, alive = [], []
    def opened(file):
        alive.append(sum(r() is not None for r in seen))
        image = open_image(file); seen.append(weakref.ref(image))
        return image
    monkeypatch.setattr("noc_nb.models.photos.open_image", opened)
    source = _from_photos(image_files(src), Stub())
    assert len(source.regions(source.ids)) == 11 and len(seen) == 7 and max(alive) <= 1

def test_hostile_images_with_detections_give_a_caption_or_a_reason(toy, src, tmp_path):
    "A truncated image can be captioned if its size is readable; otherwise its line gives the reason."
    items = [dict(image_id=i, category_id=2, bbox=[6, 6, 40, 40], score=.9) for i in range(1, 30)]
    (tmp_path/"found.json").write_text(json.dumps(items))
    job = Job(tmp_path/"found.json", "toy", images=src)
    counts = _caption_files(job, tmp_path/"c.jsonl", tmp_path/"c.html").counts
    lines = {x["image_id"]: x for x in _read_lines(tmp_path/"c.jsonl")}
    assert (counts["good"], counts["bad"]) == (8, 3) and {i for i, x in lines.items() if "error" in x} == {7, 8, 10}
    assert all(lines[i]["file"] in lines[i]["error"] for i in (7, 8, 10)) and lines[5]["size"] == [60, 80]
    page = (tmp_path/"c.html").read_text()
    assert page.count("<article") == 8 and page.count("<image") == 7 and "<img" not in page

def test_readable_photos_among_hostile_files_become_a_store(src, tmp_path):
    store = _extract(image_files(src), tmp_path/"store", Stub(), part=3)
    failed = [json.loads(text) for text in (tmp_path/"store/failed.jsonl").read_text().splitlines()]
    assert set(store) == {1, 2, 3, 4, 5, 9, 12} and {f["id"] for f in failed} == {6, 7, 8, 10}
    again = detected(tmp_path/"store", images=src)             # the store contains the names of its images
    assert again.ids == [f.id for f in image_files(src)] and again.name(12).endswith("000012.jpg")

def test_hostile_uploads_give_regions_or_one_line(toy, src):
    studio = _Studio(toy, some_regions, most=1)
    for f in image_files(src):
        if f.id in (1, 2, 3, 4, 5, 9): assert len(studio.upload(f.path).regions) == 2
        elif f.id != 12:
            with pytest.raises(NocError, match="expected a") as e: studio.upload(f.path)
            assert "\n" not in str(e.value)
    files = image_files(src)
    table = table_of(Regions([[.1, .1, .6, .9]], [2], [.9], image_id=f.id) for f in files)
    page = _Studio(toy, source=_from_table(table, files={f.id: f for f in files}))
    assert len(page.examples) == 7 and all(page.example(n).free.caption for n in range(7))   # those that open

def test_images_with_unknown_ids_get_minus_1(toy, tmp_path):
    (tmp_path/"in").mkdir()
    for name in "beach.jpg", "x-7.jpg": Image.new("RGB", (80, 60)).save(tmp_path/"in"/name)
    (tmp_path/"d.json").write_text('[{"image_id":7,"category_id":2,"bbox":[0,0,20,20],"score":1}]')
    run = lambda: detected(tmp_path/"d.json", images=tmp_path/"in", classes=toy.classes)
    missing = CaptionRun(toy, run()).lines(run().ids)[-1]
    assert missing["image_id"] == -1
    assert missing["error"].startswith("beach.jpg: expected a name that ends in the image's id, or that is listed with")
    (tmp_path/"in"/"beach.jpg").rename(tmp_path/"in"/"beach 007.jpg")
    with pytest.raises(NocError, match="x-7.jpg: image 7: is already beach 007.jpg"): run()
    (tmp_path/"in"/"beach 007.jpg").rename(tmp_path/"in"/"beach 8.jpg")
    assert {i: len(r) for i, r in zip((8, 7), run().regions([8, 7]))} == {8: 0, 7: 1}
    (tmp_path/"in"/"x-7.jpg").unlink()
    with pytest.raises(NocError, match="d.json: none of its images is in"): run()

def test_boxes_may_come_with_sizes_and_without_scores(toy, tmp_path):
    "With the sizes of the images, no photos are needed; boxes without scores are true ones, and not mixed with others."
    (tmp_path/"in").mkdir()
    Image.new("RGB", (80, 60)).save(tmp_path/"in/beach.jpg")
    boxes = [dict(image_id=7, category_id=2, bbox=[0, 0, 20, 20], score=1)]
    images = [dict(id=7, file_name="beach.jpg")]
    def write(name, content):
        (tmp_path/name).write_text(json.dumps(content))
        return tmp_path/name
    whole = write("whole.json", dict(images=images, annotations=boxes))
    sized = dict(images=[dict(images[0], width=80, height=60)], annotations=boxes)
    one, = detected(write("sized.json", sized), classes=toy.classes).regions([7])
    assert one.size == (80, 60) and torch.allclose(one.boxes, torch.tensor([[0, 0, .25, 1/3]]))
    with pytest.raises(NocError, match="boxes in pixels: expected --data or --images"): detected(whole)
    unscored = {key: boxes[0][key] for key in boxes[0] if key != "score"}
    write("drawn.json", dict(images=images, annotations=[unscored, unscored | dict(bbox=[0, 0, 40, 40])]))
    found = detected(tmp_path/"drawn.json", images=tmp_path/"in").regions([7])[0]
    assert found.scores.tolist() == [1, 1] and found.boxes[:, 2].tolist() == [.5, .25]       # the largest box first
    write("mixed.json", dict(images=images, annotations=[unscored, *boxes]))
    failed = detected(tmp_path/"mixed.json", images=tmp_path/"in").regions([7])[0]
    assert "detection 0 (image 7): score: expected a number" in str(failed)

def test_images_with_no_or_ten_thousand_boxes_are_captioned(toy):
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(10_000, 2, generator=generator)*.9
    many = Regions(torch.cat([corner, corner + .05], 1), torch.randint(1, 32, (10_000,), generator=generator),
                   torch.linspace(1, .2, 10_000), image_id=1)
    lines = CaptionRun(toy, _from_table(table_of([many, Regions.empty(2)]))).lines([1, 2])
    assert len(lines[0]["boxes"]) <= 60 and len(json.dumps(lines[0])) < 20_000 and lines[0]["caption"]
    assert lines[1]["boxes"] == [] and lines[1]["reason"] == "no candidates: nothing was detected"

@pytest.mark.parametrize("arguments, message", [
    (dict(src="none"), "no such file"), (dict(src="."), "expected images"),
    (dict(src="found.json"), "expected --data or --images"),
    (dict(src="found.json", images="."), "none of its images is in"),
    (dict(src="found.json", data="empty"), "no annotations"), (dict(src="found.json", images="none"), "no such file"),
    (dict(src="torn.json", images=".in"), "not JSON"), (dict(src="a.jpg", data="."), "need detections"),
    (dict(src="found.json", form="verbs"), "form=verbs: expected one of"),
    (dict(src="found.json", model="huge"), "no such folder")])
def test_bad_arguments_give_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in "empty", ".in": Path(name).mkdir()
    for name in "a.jpg", ".in/7.jpg": Path(name).write_bytes(b"")
    Path("torn.json").write_text("[{")
    Path("found.json").write_text('[{"image_id":1,"category_id":2,"bbox":[0,0,9,9],"score":1}]')
    if arguments["src"] == ".": Path("a.jpg").unlink()
    with pytest.raises(NocError, match=message) as e: _caption_files(Job(**{"model": "toy"} | arguments), "x.jsonl")
    assert "\n" not in str(e.value) and not Path("x.jsonl").exists()

# ---- killed and resumed

@pytest.mark.slow
def test_a_killed_and_resumed_run_gives_the_same_lines(toy, world, tmp_path):
    source = detected(world/"detections/simulated.json", world, classes=toy.classes)
    rng, out, fork = random.Random(0), tmp_path/"killed.jsonl", multiprocessing.get_context("fork")
    start = time.time()
    by_4 = CaptionOptions(batch=4)
    whole = _caption_all(toy, source, tmp_path/"whole.jsonl", by_4).read_bytes()
    took, kills = time.time() - start, 0
    while not out.exists():
        child = fork.Process(target=_caption_all, args=(toy, source, out, by_4, True))
        child.start()
        child.join(rng.uniform(.05, .3)*took if kills < 6 else None)
        kills += child.is_alive()
        child.kill(); child.join()
    assert kills and out.read_bytes() == whole and not [*tmp_path.glob(".*.part"), *tmp_path.glob(".*.lock")]

@pytest.mark.slow
def test_the_command_writes_captions_and_a_page(world, tmp_path):
    command = [Path(sys.executable).with_name("noc_caption"), world/"detections/simulated.json", "--model", "toy"]
    run = lambda *args: subprocess.run([*command, *args], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    done = run("--data", world, "--html", "page.html", "--max-objects", "1", "--min_prob", ".6",
               "--min-detection", ".7")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    assert all(len(x["candidates"]) <= 1 for x in lines) and (tmp_path/"page.html").exists()
    assert all(c["selector"] >= .6 for x in lines for c in x["candidates"])
    for c, boxes in ((c, x["boxes"]) for x in lines for c in x["candidates"]):
        assert max(box["score"] for box in boxes if box["object"] == c["object"]) >= .7
    old = run("--min_score=.6")
    said = re.fullmatch("error: --min-score: expected --min-prob .* or --min-detection .*\n", old.stderr)
    assert old.returncode == 2 and said
    bad = run()
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1) and "expected --data or --images" in bad.stderr

MEASURE = """
import sys
from pathlib import Path
import torch
from noc_nb.commands.command import peak_mb
from noc_nb.models.pipeline import CaptionOptions
from noc_nb.models.source import Job
from noc_nb.pages.gallery import _caption_files
folder, n = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
job = Job(folder/f"{n}.json", folder/"small", data=folder/n, options=CaptionOptions(max_objects=0, batch=100))
_caption_files(job, folder/f"{n}.jsonl", folder/f"{n}.html")
print(peak_mb())
"""

def records(folder, n):
    "Write detections of n images, fifty boxes each, and a file with the sizes of the images."
    rng = np.random.default_rng(0)
    (folder/f"{n}/annotations").mkdir(parents=True)
    images = [dict(id=i, width=640, height=480, file_name=f"{i}.jpg") for i in range(n)]
    (folder/f"{n}/annotations/captions_x.json").write_text(json.dumps(dict(images=images)))
    boxes, scores = rng.integers(0, 400, (50*n, 2)).tolist(), rng.random(50*n).round(4).tolist()
    found = [dict(image_id=i//50, category_id=2 + i % 8, bbox=[*box, 64., 48.], score=s)
             for i, (box, s) in enumerate(zip(boxes, scores))]
    (folder/f"{n}.json").write_text(json.dumps(found))

@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(tmp_path):
    "Captioning 2,000 images with 100,000 detections needs hardly more memory than 100 images with 5,000."
    torch.manual_seed(0)
    pipeline = small_pipeline()
    pipeline.cfg = PipelineConfig(SearchConfig(k=1, max_len=4))
    pipeline.save_pretrained(tmp_path/"small")
    def peak(n):
        records(tmp_path, n)
        done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path, str(n)], capture_output=True, text=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)
    few, many = peak(100), peak(2_000)
    print(f"{few} MB for 5,000 records, {many} MB for 100,000")
    assert many - few < 60
    assert (tmp_path/"2000.html").stat().st_size < 5_000_000

# ---- files that a run must not change

@pytest.fixture
def command(world, tmp_path, monkeypatch, capsys):
    "Return a function that runs noc_caption on the world's detections, as from a shell, in an empty folder."
    monkeypatch.chdir(tmp_path)
    source = world/"detections/simulated.json"
    def run(*args):
        typed = ["noc_caption", source, "--data", world, "--model", "toy", *args]
        monkeypatch.setattr(sys, "argv", [str(text) for text in typed])
        try: code = main() or 0
        except SystemExit as e: code = e.code
        return subprocess.CompletedProcess(typed, code, *capsys.readouterr())
    return run

def one_line(done, *parts):
    "Check that a command failed with one line that contains these parts."
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    for part in parts: assert part in done.stderr

def test_resuming_with_other_settings_names_them(command, tmp_path):
    "A complete output is not resumed with other settings; the error names the setting."
    assert command("--out", "c.jsonl").returncode == 0
    before = (tmp_path/"c.jsonl").read_bytes()
    one_line(command("--out", "c.jsonl", "--resume", "--objects", "kite"), "objects: null in the record", '"kite" now')
    one_line(command("--out", "c.jsonl", "--resume", "--max-objects", "1"), "max_objects: null in the record, 1 now")
    one_line(command("--out", "c.jsonl", "--resume", "--batch", "7"), "c.jsonl: batch: 50 in the record, 7 now")
    assert command("--out", "c.jsonl", "--resume").returncode == 0
    assert (tmp_path/"c.jsonl").read_bytes() == before

def test_each_photo_may_have_words_of_its_own(command, world, tmp_path):
    "Words and names by photo, in JSON or a table, reach lines, texts and page; an unknown word is its photo's error."
    assert command("--out", "chosen.jsonl").returncode == 0
    read = lambda name: [json.loads(text) for text in (tmp_path/name).read_text().splitlines()]
    one, two, three, *rest = read("chosen.jsonl")
    names = {i: name for name, i in detected(world/"detections/simulated.json", world).names}
    name = names[one["image_id"]]
    words = {name: ["dog:Rex Müller"], str(two["image_id"]): "kite=50, penguin", names[three["image_id"]]: ["xqzt"]}
    (tmp_path/"words.json").write_text(json.dumps(words))
    (tmp_path/"words.csv").write_text("file,objects\n" + "".join(
        f'{key},"{x if isinstance(x, str) else x[0]}"\n' for key, x in words.items()))
    out = "--objects", "words.json", "--html", "page.html", "--txt", "texts", "--out", "own.jsonl"
    assert command(*out).returncode == 0 and command("--objects", "words.csv", "--out", "table.jsonl").returncode == 0
    named, priced, wrong, *others = own = read("own.jsonl")
    assert others == rest and read("table.jsonl") == own
    [dog], caption = named["candidates"], named["caption"].split()
    assert (dog["object"], dog["word"]) == ("dog", "Rex Müller") and caption[slice(*dog["span"])] == ["Rex", "Müller"]
    assert {"kite", "penguin"} <= {*priced["caption"].split()}
    assert wrong["error"].startswith(f"{names[three['image_id']]}: object 'xqzt': expected another word")
    [text] = (path.read_text() for path in (tmp_path/"texts").rglob(Path(name).stem + ".txt"))
    assert text.strip() == named["caption"]
    assert '<mark class="k0">Rex Müller</mark>' in (tmp_path/"page.html").read_text()
    (tmp_path/"words.json").write_text(json.dumps(words | {name: "dog:Fido"}))
    one_line(command(*out[:2], "--out", "own.jsonl", "--resume"), "own.jsonl: objects: other content")
    (tmp_path/"words.json").write_text(json.dumps({f"x{name}": "dog", **words}))
    one_line(command(*out[:2]), f"'x{name}': expected the name of an image, such as {name}")

def test_resuming_detects_a_replaced_photo(command, world, tmp_path):
    "A replaced photo is detected even if name and time are the same; older runs without checksums resume and add them."
    shutil.copytree(world/"images", tmp_path/"photos")
    typed = "--images", "photos", "--out", "c.jsonl"
    assert command(*typed).returncode == 0
    before, about = (tmp_path/"c.jsonl").read_bytes(), tmp_path/".c.jsonl.run.json"
    photo = min((tmp_path/"photos").glob("*.png"))
    content, times = photo.read_bytes(), os.stat(photo)
    Image.open(photo).rotate(180).save(photo)
    os.utime(photo, ns=(times.st_atime_ns, times.st_mtime_ns))
    one_line(command(*typed, "--resume", "--html", "r.html"), f"c.jsonl: {photo.name}: other content")
    assert not (tmp_path/"r.html").exists()
    older = {key: value for key, value in json.loads(about.read_text()).items() if key != "files"}
    about.write_text(json.dumps(older))
    assert command(*typed, "--resume").returncode == 0 and "files" in json.loads(about.read_text())
    photo.write_bytes(content)
    one_line(command(*typed, "--resume"), f"c.jsonl: {photo.name}: other content")
    assert (tmp_path/"c.jsonl").read_bytes() == before

def test_images_without_boxes_are_reported(toy, tmp_path, monkeypatch, capsys):
    "A photo without detections is captioned, and both the summary and the page report it."
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for name in "IMG_2041.jpg", "7.jpg", "8.jpg": Image.new("RGB", (80, 60)).save(f"in/{name}")
    Path("7.json").write_text('[{"image_id":7,"category_id":2,"bbox":[0,0,20,20],"score":1}]')
    noc_caption("7.json", "c.jsonl", "c.html", images="in", model="toy", objects="cup")
    said = capsys.readouterr().err
    assert "3 images, 0 without a caption, 2 without boxes (8.jpg, IMG_2041.jpg); lines in c.jsonl" in said
    page = Path("c.html").read_text()
    assert page.count('<p class="why"><b>no boxes</b></p>') == 2 and "<b>2</b> have <b>no boxes</b>" in page
    Path("in/8.jpg").unlink(), Path("in/IMG_2041.jpg").unlink()
    noc_caption("7.json", "d.jsonl", "d.html", images="in", model="toy")
    assert "without boxes" not in capsys.readouterr().err and "no boxes" not in Path("d.html").read_text()

def test_two_runs_never_write_one_output(command, tmp_path):
    with locked(tmp_path/"c.jsonl"):
        one_line(command("--out", "c.jsonl"), "c.jsonl: another run is writing it")
    assert list(tmp_path.iterdir()) == []

def test_an_output_never_replaces_another_file(command, world, tmp_path):
    "An output never replaces an input or a link to it, the other output, a device, a user's page or the run's files."
    source = world/"detections/simulated.json"
    before = source.read_bytes()
    one_line(command("--html", source), f"--html {source}: is an input")
    one_line(command("--out", "x", "--html", "./x"), "is an input or another output")
    for option in "--out", "--html":
        one_line(command(option, tmp_path), f"{option} {tmp_path}: expected a regular file")
        os.mkfifo(tmp_path/"pipe")
        one_line(command(option, "pipe"), f"{option} pipe: expected a regular file")
        (tmp_path/"pipe").unlink()
    (tmp_path/"own.html").write_text("<!doctype html><p>mine")
    one_line(command("--html", "own.html"), "own.html: exists and is not a page of noc_caption")
    assert source.read_bytes() == before and (tmp_path/"own.html").read_text() == "<!doctype html><p>mine"
    assert [p.name for p in tmp_path.iterdir()] == ["own.html"]
    os.link(source, tmp_path/"link.html")
    one_line(command("--html", "link.html"), "--html link.html: is an input")
    one_line(command("--out", "c.jsonl", "--html", ".c.jsonl.run.json"), "is an input or another output")
    for _ in range(2): assert command("--html", "page.html").returncode == 0

# ---- the size of the page, and the captions that it shows

def test_a_card_takes_eleven_kilobytes_and_links_to_its_photo(coco, tmp_path):
    "367 photos make a page of at most 4 MB, and each small picture links to its photo, which stays where it is."
    pipeline = NovelCaptioner.from_pretrained("lite", device="cpu")
    source = detected(coco/"detections/picodet_s_416.json", images=coco/"images", classes=pipeline.classes)
    ids = source.ids[::12]
    lines = CaptionRun(pipeline, source).lines(ids)
    summary = _Summary(pipeline.class_names(), _pictures(source, tmp_path)).read(lines)
    summary.write(tmp_path/"page.html")
    page = (tmp_path/"page.html").read_text()
    assert len(page) < 4_000_000/367*len(ids) and "<script" not in page
    links = re.findall(r'class="photo" href="([^"]*)"', page)
    photos = [Path(os.path.normpath(tmp_path/unquote(link))) for link in links]
    assert photos == [source.files[i].path for i in ids]

def chosen_line(n, caption, *left, boxes=1):
    "Return a line whose `left` objects, as (name, price), are not mentioned."
    objects = [dict(object=name, word=None, span=None, selector=.5, price=price, cost=None) for name, price in left]
    box = dict(object="dog", box=[.1, .1, .9, .9], score=.9, selector=.5)
    return dict(image_id=n, file=f"{n}.jpg", size=[40, 30], caption=caption, candidates=objects, boxes=[box]*boxes,
                reason=None)

@pytest.mark.slow
def test_lists_choose_the_captions_that_are_shown(tmp_path, browser):
    "Without a script, two lists choose captions by outcome and by word, even if the word is HTML."
    lines = [chosen_line(1, "a dog", ("cat", 3.)), chosen_line(2, "a cat", ("bus", None), boxes=0),
             chosen_line(3, "a dog and a cat", (EVIL, 1.), ("kite", None)), chosen_line(4, "a bus")]
    _Summary(picture=lambda line: (Image.new("RGB", (40, 30)), "1.jpg")).read(lines).write(tmp_path/"page.html")
    page = browser.new_page(viewport=dict(width=390, height=844))
    page.goto((tmp_path/"page.html").as_uri())
    outcome, word = page.get_by_label("Which captions"), page.get_by_label("With a word")
    def shown(): return [int(file.split(".")[0]) for file in page.locator(".file:visible").all_inner_texts()]
    def choose(part, text):
        names = part.locator("option").all_inner_texts()
        part.select_option(index=[name.rpartition(" (")[0] or name for name in names].index(text))
    assert shown() == [1, 2, 3, 4] and outcome.inner_text().split("\n")[1:] == [
        "left out (2)", "not said (2)", "no boxes (1)"]
    expected = {"left out": [1, 3], "not said": [2, 3], "no boxes": [2], "all captions": [1, 2, 3, 4]}
    for text, ids in expected.items():
        choose(outcome, text)
        assert shown() == ids
    for text, ids in {"dog": [1, 3], "cat": [1, 2, 3], "bus": [2, 4], EVIL: [3], "any": [1, 2, 3, 4]}.items():
        choose(word, text)
        assert shown() == ids
    choose(outcome, "not said"), choose(word, "cat")
    assert shown() == [2, 3] and page.title() == "Captions"
    assert page.locator(".photo").first.evaluate("p => getComputedStyle(p).contentVisibility") == "auto"
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()

# ---- in 16 bits

@pytest.mark.parametrize("mode", ["grid", "bank"])
@pytest.mark.parametrize("options", [CaptionOptions(("penguin", "cup")), CaptionOptions(price_weight="must")])
def test_captions_in_16_bits_keep_their_musts(world, mode, options):
    "In 16 bits every must is mentioned, and most captions and their scores are nearly those of 32 bits."
    def lines(dtype):
        job = Job(world/"detections/simulated.json", "toy", data=world, dtype=dtype)
        pipeline = job.pipeline()
        assert {p.dtype for p in pipeline.captioner.parameters()} == {getattr(torch, dtype)}
        pipeline.cfg = replace(pipeline.cfg, search=replace(pipeline.cfg.search, mode=mode))
        source = job.source(pipeline)
        return CaptionRun(pipeline, source, options).lines(source.ids)
    exact, near = lines("float32"), lines("bfloat16")
    candidates = [c for line in near for c in line["candidates"]]
    assert len(candidates) > len(near) and all(c["word"] for c in candidates)
    apart = [b["score"] - a["score"] for a, b in zip(exact, near) if a["caption"] == b["caption"]]
    assert len(apart) > .7*len(near) and 0 < max(map(abs, apart)) < .25
    assert abs(sum(b["score"] - a["score"] for a, b in zip(exact, near)))/len(near) < .15

def test_a_machine_without_bfloat16_computes_in_32_bits_and_says_so(command, tmp_path, monkeypatch):
    "Without bfloat16 the command computes in 32 bits and says so; a run cannot resume in the other precision."
    def made(out, has, *more):
        monkeypatch.setattr("noc_nb.pages.gallery._has_bfloat16", lambda device: has)
        return command("--out", out, "--dtype", "bfloat16", *more)
    assert command("--out", "wide.jsonl").returncode == 0
    without, has = made("without.jsonl", False), made("half.jsonl", True)
    told = [line for line in without.stderr.splitlines() if "bfloat16" in line]
    assert len(told) == 1 and told[0].startswith("--dtype bfloat16: ") and told[0].endswith("computing in 32 bits")
    assert has.returncode == 0 and "bfloat16" not in has.stderr
    wide, fallen, half = ((tmp_path/f"{name}.jsonl").read_bytes() for name in ("wide", "without", "half"))
    assert fallen == wide and half != wide
    assert made("half.jsonl", True, "--resume").returncode == made("without.jsonl", False, "--resume").returncode == 0
    for out, has in ("half", False), ("without", True):
        again = made(f"{out}.jsonl", has, "--resume")
        assert again.returncode == 2 and f"{out}.jsonl: model: other content" in again.stderr

def test_eight_bits_are_refused(command, tmp_path):
    "The option of earlier versions is refused, and the error lists the options that exist."
    refused = command("--dtype", "int8")
    *_, last = refused.stderr.splitlines()
    assert refused.returncode == 2 and all(word in last for word in ("--dtype", "int8", "float32", "bfloat16"))
    with pytest.raises(NocError, match="dtype=int8: expected one of float32, bfloat16"): Job("x", dtype="int8")

# ---- the page in a browser

@pytest.mark.slow
def test_the_page_runs_no_script_of_a_caption(toy, world, tmp_path, browser):
    source = detected(world/"detections/simulated.json", world, classes=toy.classes)
    lines = [x for x in CaptionRun(toy, source).lines(source.ids[:20]) if len(x["candidates"]) > 1][:6]
    lines[0]["file"] = lines[0]["boxes"][0]["object"] = EVIL
    _Summary().read([*lines, dict(image_id=9, file=EVIL, error=EVIL)]).write(tmp_path/"page.html")
    page, asked = browser.new_page(viewport=dict(width=1200, height=900)), []
    page.on("request", lambda r: asked.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
    page.goto((tmp_path/"page.html").as_uri())
    card = page.locator("article").nth(1)
    assert page.locator("article").count() == len(lines) and page.locator("article svg rect").count() > len(lines)
    other = card.locator("rect.k1:not(.tag)").first
    before = other.evaluate("r => getComputedStyle(r).opacity")
    card.locator("mark.k0").first.hover()
    assert (before, other.evaluate("r => getComputedStyle(r).opacity")) == ("1", "0.12")
    assert page.get_by_text(EVIL).count() == 3 and page.title() == "Captions" and page.locator("img").count() == 0
    assert asked == []
    page.screenshot(path=tmp_path/"shot.png")
    assert len(Image.open(tmp_path/"shot.png").convert("RGB").getcolors(1_000_000)) > 20
