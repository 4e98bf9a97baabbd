"noc_caption on files that nobody would send on purpose, killed at any moment, and its page in a real browser."
import json, multiprocessing, os, random, subprocess, sys, tarfile, time, zlib
from pathlib import Path
import pytest
import torch
from PIL import Image
from noc_nb.captioner import Captioner
from noc_nb.core import NocError
from noc_nb.encoder import CaptionerConfig
from noc_nb.gallery import (caption_all, caption_files, caption_lines, detected, from_table, open_source, photos,
                            write_report)
from noc_nb.heldout import COCO_CLASSES
from noc_nb.pipeline import NovelCaptioner
from noc_nb.detector import Detector, open_image
from noc_nb.formats import write_detections
from noc_nb.regions import Regions, RegionStore, table_of
from noc_nb.selector import RegionSelector, SelectorConfig
from noc_nb.toy import make_toy
from noc_nb.vocab import Vocab

CHROMIUM = "/usr/bin/chromium"
EVIL = '<img src=x onerror="document.title=1">'

@pytest.fixture(scope="module")
def toy():
    torch.set_num_threads(1)
    return NovelCaptioner.from_pretrained("toy", device="cpu")

@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"), train=1, val=40, test=1)

def some_regions(images):
    "A detector that finds a dog and a kite in everything."
    return [Regions([[.1, .1, .6, .9], [.5, .1, .9, .4]], [2, 30], [.9, .8], size=i.size) for i in images]

def small_pipeline():
    "Random weights over COCO's classes: what it says is nonsense, what it must say is said."
    words = sorted({w for c in COCO_CLASSES.values() for f in c.forms for w in f.split()} | {"a", "on", "the"})
    vocab = Vocab.build([words]*9, 1)
    captioner = Captioner(CaptionerConfig(d_feature=306, d_word=16, d_model=16, heads=2, d_ff=16, layers=1, memory=2,
                                          max_regions=20), vocab.tokens)
    vectors = {i: torch.randn(300, generator=torch.Generator().manual_seed(i)) for i in COCO_CLASSES}
    selector = RegionSelector(SelectorConfig(d_model=16, heads=2, d_ff=16))
    return NovelCaptioner(selector, captioner, COCO_CLASSES, vectors)

# ---- what comes in

def hostile(folder):
    "A folder of files that somebody may send."
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

def test_hostile_files_are_lines(toy, tmp_path):
    src = tmp_path/"photos"; src.mkdir()
    hostile(src)
    lines = caption_lines(toy, source := photos(src, some_regions), source.ids)
    good = {line["image_id"] for line in lines if "caption" in line}
    assert good == {1, 2, 3, 4, 5, 9, 12} and len(lines) == 11
    assert all("\n" not in line["error"] and line["file"] in line["error"] for line in lines if "error" in line)
    assert next(line for line in lines if line["image_id"] == 5)["size"] == (60, 80)
    out = caption_all(toy, source, tmp_path/"lines.jsonl")
    show = lambda line: open_image(source.files[line["image_id"]])
    write_report(tmp_path/"page.html", out, show, title=EVIL)
    page = (tmp_path/"page.html").read_text()
    assert "<img" not in page and "&lt;img" in page and page.count("<article") == 7
    assert not list(tmp_path.rglob("000012.jpg"))

def test_no_and_ten_thousand_boxes(toy):
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(10_000, 2, generator=generator)*.9
    many = Regions(torch.cat([corner, corner + .05], 1), torch.randint(1, 32, (10_000,), generator=generator),
                   torch.linspace(1, .2, 10_000), image_id=1)
    lines = caption_lines(toy, from_table(table_of([many, Regions.empty(2)])), [1, 2])
    assert len(lines[0]["boxes"]) <= 60 and len(json.dumps(lines[0])) < 20_000 and lines[0]["caption"]
    assert lines[1]["boxes"] == [] and lines[1]["reason"] == "nothing selected: nothing was detected"

def test_every_kind_of_detections_gives_the_same_lines(toy, world, tmp_path):
    source = detected(world/"detections/simulated.json", world, classes=toy.classes)
    lines = caption_lines(toy, source, source.ids[:10])
    table = table_of(source.regions(source.ids[:10]))
    RegionStore.write(tmp_path/"store", table)
    write_detections(tmp_path/"found.parquet", table)
    for src in tmp_path/"store", tmp_path/"found.parquet":
        other = caption_lines(toy, again := open_source(src, classes=toy.classes), again.ids)
        assert [(x["caption"], x["constraints"]) for x in other] == [(x["caption"], x["constraints"]) for x in lines]

def test_sizes_come_from_the_images(toy, world, tmp_path):
    "Eight images of the world are drawn; they are the images to caption, detected or not."
    drawn = [int(p.stem[-12:]) for p in sorted((world/"images").iterdir())]
    items = [d for d in json.loads((world/"detections/simulated.json").read_text()) if d["image_id"] in drawn[1:]]
    (tmp_path/"found.json").write_text(json.dumps(items))
    source = detected(tmp_path/"found.json", images=world/"images", classes=toy.classes)
    assert source.ids == drawn
    lines = caption_lines(toy, source, source.ids)
    known = caption_lines(toy, s := detected(tmp_path/"found.json", world, classes=toy.classes), s.ids)
    assert [x["boxes"] for x in lines[1:]] == [x["boxes"] for x in known]
    assert lines[0]["reason"].endswith("nothing was detected")

@pytest.mark.parametrize("arguments, message", [
    (dict(src="none"), "no such file"), (dict(src="."), "expected images"),
    (dict(src="found.json"), "expected an image of this data set"),
    (dict(src="found.json", data="empty"), "no annotations"), (dict(src="found.json", images="none"), "no such file"),
    (dict(src="torn.json"), "not JSON"), (dict(src="a.jpg", data="."), "go with a detections file"),
    (dict(src="found.json", max_objects=-1), "--max-objects -1"),
    (dict(src="found.json", model="huge"), "no such folder")])
def test_bad_arguments_are_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir(); Path("torn.json").write_text("[{"); Path("a.jpg").write_bytes(b"")
    Path("found.json").write_text('[{"image_id":1,"category_id":2,"bbox":[0,0,1,1],"score":1}]')
    if arguments["src"] == ".": Path("a.jpg").unlink()
    with pytest.raises(NocError, match=message) as e: caption_files(**{"out": "x.jsonl", "model": "toy", **arguments})
    assert "\n" not in str(e.value) and not Path("x.jsonl").exists()

@pytest.mark.slow
def test_random_detector_to_caption(tmp_path):
    "torchvision's architecture with random weights: photo, regions, features, caption."
    torch.manual_seed(0)
    Image.effect_noise((120, 90), 90).convert("RGB").save(tmp_path/"1.jpg")
    detector = Detector(weights=None, features=None, min_score=0., size=64, device="cpu")
    line, = caption_lines(small_pipeline(), source := photos(tmp_path, detector), source.ids, objects=["zebra"])
    assert line["constraints"] == [dict(object="zebra", word="zebra", span=line["constraints"][0]["span"])]
    assert "zebra" in line["caption"].split() and line["file"] == "1.jpg"

# ---- killed and resumed

@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_lines(toy, world, tmp_path):
    source = detected(world/"detections/simulated.json", world, classes=toy.classes)
    rng, out, fork = random.Random(0), tmp_path/"killed.jsonl", multiprocessing.get_context("fork")
    start = time.time()
    whole = caption_all(toy, source, tmp_path/"whole.jsonl", batch=4).read_bytes()
    took, kills = time.time() - start, 0
    while not out.exists():
        child = fork.Process(target=caption_all, args=(toy, source, out), kwargs=dict(resume=True, batch=4))
        child.start()
        child.join(rng.uniform(.05, .3)*took if kills < 6 else None)
        kills += child.is_alive()
        child.kill(); child.join()
    assert kills and out.read_bytes() == whole and not list(tmp_path.glob(".*.part"))

@pytest.mark.slow
def test_the_command(world, tmp_path):
    command = [Path(sys.executable).with_name("noc_caption"), world/"detections/simulated.json", "--model", "toy"]
    run = lambda *args: subprocess.run([*command, *args], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    done = run("--data", world, "--html", "page.html", "--max-objects", "1", "--min_score", ".6")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    assert all(len(x["constraints"]) <= 1 for x in lines) and (tmp_path/"page.html").exists()
    assert all(s["score"] >= .6 for x in lines for s in x["selected"])
    bad = run()
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1) and "expected an image of this data set" in bad.stderr

MEASURE = """
import resource, sys, numpy as np, torch
sys.path.insert(0, "tests")
from dataclasses import replace
from test_gallery import small_pipeline
from noc_nb.gallery import caption_all, from_table, write_report
from noc_nb.regions import group_regions
torch.set_num_threads(1); torch.manual_seed(0)
n, out, rng = int(sys.argv[1]), sys.argv[2], np.random.default_rng(0)
corner = rng.random((10*n, 2))*.8
table = group_regions(np.repeat(np.arange(n), 10), rng.random(10*n), np.concatenate([corner, corner + .1], 1),
                      rng.integers(2, 10, 10*n), rng.random(10*n), {i: (640, 480) for i in range(n)})
pipeline = small_pipeline()
pipeline.search = replace(pipeline.search, k=1, max_len=4)
lines = caption_all(pipeline, from_table(table), out, batch=250, max_objects=0)
write_report(out + ".html", lines)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss//1024)
"""

@pytest.mark.slow
def test_memory_is_flat(tmp_path):
    "100,000 detections of 10,000 images take hardly more memory than 5,000 of 500."
    def peak(n):
        done = subprocess.run([sys.executable, "-c", MEASURE, str(n), str(tmp_path/f"{n}.jsonl")], capture_output=True,
                              text=True, cwd=Path(__file__).parents[1], timeout=600)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)
    few, many = peak(500), peak(10_000)
    print(f"{few} MB for 500 images, {many} MB for 10,000")
    assert many - few < 120
    assert (tmp_path/"10000.jsonl.html").stat().st_size < 5_000_000

# ---- the page in a browser

@pytest.mark.slow
def test_page_in_a_browser(toy, world, tmp_path):
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install noc_nb[app]")
    if not os.path.exists(CHROMIUM): pytest.skip(f"{CHROMIUM} is not there: apt-get install chromium")
    source = detected(world/"detections/simulated.json", world, classes=toy.classes)
    lines = [x for x in caption_lines(toy, source, source.ids[:20]) if len(x["constraints"]) > 1][:6]
    lines[0]["file"] = lines[0]["boxes"][0]["object"] = EVIL
    write_report(tmp_path/"page.html", [*lines, dict(image_id=9, file=EVIL, error=EVIL)])
    with sync.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
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
        browser.close()
