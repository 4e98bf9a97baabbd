"Test how boxes are read: their classes, the photo's orientation and size, and the errors for bad boxes."
import builtins, json, os, subprocess, sys
from collections import Counter
from pathlib import Path
import numpy as np
import pyarrow, pyarrow.parquet
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image, ImageOps
from book import ROOT
from noc_nb.commands import reproduce
from noc_nb.commands.cli import noc_reproduce
from noc_nb.commands.cli import commands
from noc_nb.commands.distributed import caption_shards
from noc_nb.constraints import COCO_CLASSES
from noc_nb.core import NocError
from noc_nb.files.boxes import open_detections, read_detections, relabel
from noc_nb.files.captions import read_captions
from noc_nb.files.dataset import load_data
from noc_nb.files.drawing import make_toy
from noc_nb.files.store import RegionStore
from noc_nb.lab.disk import write_json
from noc_nb.models.classes import read_classes
from noc_nb.models.photos import image_files, open_image
from noc_nb.models.pipeline import CaptionOptions
from noc_nb.models.source import Job, detected, _frame_of
from noc_nb.pages.gallery import _caption_files
from test_photos import typed          # noqa: F401

SIZE = {7: (640, 480), 8: (640, 480), 9: (640, 480)}
NAMES = {c.name: i for i, c in COCO_CLASSES.items()}

def box(image, bbox=(64, 48, 320, 240), label=18, **more):
    return dict(image_id=image, category_id=label, bbox=[*bbox], score=.9) | more

def whole(names, boxes, categories=None, **size):
    images = [dict(id=i, file_name=name, **size) for i, name in names.items()]
    content = dict(images=images, annotations=boxes)
    return content if categories is None else content | dict(categories=categories)

def lines(path): return [json.loads(line) for line in Path(path).read_text().splitlines()]

# ---- classes

LABELS = st.lists(st.sampled_from([*NAMES, "Duck", "okapi", "DOG", "aeroplane", "tv_monitor"]), min_size=1, max_size=30,
                  unique=True)
MEANT = NAMES | {"DOG": 18, "aeroplane": NAMES["airplane"], "tv_monitor": NAMES["tv"]}

@settings(max_examples=300, deadline=None)
@given(LABELS, st.data())
def test_categories_are_matched_by_name_in_any_numbering(names, data):
    ids = data.draw(st.lists(st.integers(0, 10**6), min_size=len(names), max_size=len(names), unique=True))
    drawn = data.draw(st.lists(st.sampled_from([*range(len(names))]), min_size=1, max_size=50))
    expected = [MEANT.get(names[n], -1) for n in drawn]                # the expected labels depend on names alone
    labels, categories = np.array([ids[n] for n in drawn]), dict(zip(ids, names))
    if set(expected) == {-1}:
        with pytest.raises(NocError, match="expected names of the classes"):
            relabel(labels, categories, COCO_CLASSES, "d.json")
    else: assert relabel(labels, categories, COCO_CLASSES, "d.json").tolist() == expected

@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 95), min_size=1, max_size=12))
def test_numbers_without_names_are_read_as_cocos_or_refused(labels):
    coco, others = set(labels) <= COCO_CLASSES.keys(), [n for n in (0, 1) if set(labels) <= {*range(n, n + 80)}]
    if coco: assert relabel(np.array(labels), None, COCO_CLASSES, "d.json").tolist() == labels
    else:
        with pytest.raises(NocError) as e: relabel(np.array(labels), None, COCO_CLASSES, "d.json")
        assert [n for n in (0, 1) if f"--classes coco80 --first {n} (" in str(e.value)] == others
        assert others or "a known category_id, 1 to 90" in str(e.value)

def test_a_numbering_that_fits_twice_is_reported_with_its_commonest_classes(typed):
    Image.new("RGB", (640, 480)).save("7.jpg")
    write_json(Path("d.json"), [box(7, label=n) for n in (18, 18, 18, 3, 3, 62)])
    _, told = typed("noc_caption", "d.json", "--images", ".", "--model", "lite", "--out", "c.jsonl")
    line, = [x for x in told if "no categories" in x]
    assert "COCO's ids, which run up to 90 (dog 3, car 2, chair 1)" in line
    assert "--classes coco80 --first 0 (sheep 3, motorcycle 2, tv 1, …)" in line
    assert "--classes coco80 --first 1 (horse 3, car 2, toilet 1, …)" in line

def test_one_option_settles_yolos_numbers(typed):
    "YOLO's results with text ids and classes from 0 need one option; each line keeps the original id."
    for name in "beach", "my dog (1)": Image.new("RGB", (640, 480)).save(f"{name}.jpg")
    write_json(Path("d.json"), [box("my dog (1)", label=16), box("beach", label=0), box("beach", label=16)])
    words = "noc_caption", "d.json", "--images", ".", "--model", "lite", "--out", "c.jsonl"
    status, told = typed(*words)
    assert status == 2 and "--classes coco80 --first 0 (dog 2, person 1, …)" in told[-1]
    assert typed(*words, "--classes", "coco80", "--first", 0)[0] == 0
    found = {x["file"]: (x["image_id"], [b["object"] for b in x["boxes"]]) for x in lines("c.jsonl")}
    assert found["my dog (1).jpg"] == ("my dog (1)", ["dog"]) and found["beach.jpg"][0] == "beach"
    assert "dog" in found["beach.jpg"][1]

def test_every_command_with_classes_also_offers_first():
    import inspect
    for name, f in commands().items():
        options = inspect.signature(f).parameters
        numbers = "number" in str(options.get("classes"))
        if "classes" in options and options["classes"].annotation is str and not numbers:
            assert "first" in options or name == "noc_features", name

def test_a_store_keeps_the_names_of_its_classes(tmp_path):
    write_json(tmp_path/"d.json", [box(7, label=5), box(8, label=6), box(9, label=7)])
    table = read_detections(tmp_path/"d.json", SIZE)
    store = RegionStore.write(tmp_path/"store", table, classes={5: "dog", 6: "okapi", 7: "Cat"})
    source = detected(store.folder, classes=COCO_CLASSES)
    assert [r.labels.tolist() for r in source.regions([7, 8, 9])] == [[18], [], [17]]

def test_a_file_without_the_models_classes_is_refused(tmp_path):
    write_json(tmp_path/"d.json", whole({7: "7.jpg"}, [box(7, label=3)], [dict(id=3, name="okapi")], width=640,
                                        height=480))
    with pytest.raises(NocError, match="categories okapi 1: expected names of the classes, like person.*--classes"):
        detected(tmp_path/"d.json", classes=COCO_CLASSES)
    assert [c.name for c in read_classes(tmp_path/"d.json").values()] == ["okapi"]

# ---- orientation and size

def painted(turn, width, height):
    "Return a photo with a red corner, and EXIF data with this orientation."
    image = Image.new("RGB", (width, height))
    image.paste((255, 0, 0), (0, 0, width//4, height//2))
    exif = image.getexif()
    exif[0x0112] = turn
    return image, exif

@settings(max_examples=300, deadline=None)
@given(st.integers(1, 8), st.integers(40, 400), st.integers(40, 400), st.sampled_from(["as shown", "stored", "other"]),
       st.integers(1, 60))
def test_boxes_are_read_in_the_frame_whose_size_the_file_states(turn, width, height, kind, tenths):
    stored, shown = (width, height), (height, width) if turn > 4 else (width, height)
    scale = tenths/10
    said = shown if kind == "as shown" else stored
    said = tuple(max(1, round(s*scale)) for s in said)
    if kind == "other": said = (shown[0]*3*tenths, shown[1]*tenths)    # another ratio: three times as wide
    fits = {name: abs(said[0]/size[0] - said[1]/size[1]) <= 1/min(size) for name, size in
            (("shown", shown), ("stored", stored))}                    # tolerance for rounding both sides
    scaled = 1 if fits["shown"] else turn if fits["stored"] else None
    expected = 1 if said == shown else turn if said == stored else scaled
    assert _frame_of(said, stored, turn) == expected
    if kind != "other": assert expected in (1, turn)

@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("scale", [1, .5])
def test_a_box_is_turned_together_with_its_photo(tmp_path, turn, scale):
    "If ImageOps rotates a photo, we rotate the box of its red corner in the same way."
    image, exif = painted(turn, 80, 40)
    (tmp_path/"in").mkdir()
    image.save(tmp_path/"in/a.png", exif=exif)
    width, height = int(80*scale), int(40*scale)
    write_json(tmp_path/"d.json", whole({7: "a.png"}, [box(7, (0, 0, width/4, height/2))], width=width, height=height))
    regions, = detected(tmp_path/"d.json", images=tmp_path/"in").regions([7])
    shown = np.asarray(open_image(tmp_path/"in/a.png"))[..., 0]
    if turn in (2, 3, 4): return                    # same size: boxes are taken as displayed
    red = np.argwhere(shown > 128)
    top, left, bottom, right = *red.min(0), *(red.max(0) + 1)
    there = np.array([left, top, right, bottom])/np.tile(shown.shape[::-1], 2)
    np.testing.assert_allclose(regions.boxes[0].numpy(), there, atol=1e-6)
    assert regions.size == ImageOps.exif_transpose(Image.open(tmp_path/"in/a.png")).size

def test_a_photo_of_another_shape_fails_and_one_without_a_size_is_upright(typed):
    Path("in").mkdir()
    for name in "abcd": Image.new("RGB", (640, 480)).save(f"in/{name}.jpg")
    sizes = {"a": (480, 640), "b": (320, 240), "c": (-1, -1), "d": (None, None)}
    images = [dict(id=i, file_name=f"{name}.jpg", width=w, height=h)
              for i, (name, (w, h)) in enumerate(sizes.items())]
    boxes = [box(i, (0, 0, 160, 120)) for i in range(4)]
    write_json(Path("d.json"), dict(images=images, annotations=boxes))
    status, told = typed("noc_caption", "d.json", "--images", "in", "--model", "lite", "--out", "c.jsonl")
    a, b, c, d = lines("c.jsonl")
    shape = "expected 640 x 480, the size of the photo, or the same ratio"
    assert status == 0 and a["error"] == f"a.jpg: 480 x 640 in d.json: {shape}"
    assert b["boxes"][0]["box"] == [0, 0, .5, .5] and c["boxes"][0]["box"] == d["boxes"][0]["box"] == [0, 0, .25, .25]
    assert any("no width and height of 2 images; their boxes are taken as pixels of the upright" in x for x in told)

# ---- bad boxes

BAD = {"outside": box(8, (900, 0, 20, 20)), "flat": box(8, (5, 5, 0, 9)), "no numbers": box(8) | dict(bbox=None),
       "three": box(8) | dict(bbox=[1, 2, 3]), "score": box(8) | dict(score="high"),
       "NaN": box(8, (5, float("nan"), 5, 5))}

@pytest.mark.parametrize("what", BAD)
def test_a_bad_box_fails_only_its_image(typed, what):
    Path("in").mkdir()
    for i in (7, 8, 9): Image.new("RGB", (640, 480)).save(f"in/{i}.jpg")
    Path("d.json").write_text(json.dumps([box(7), box(8), BAD[what], box(9, (-30, 0, 340, 240))]))
    words = "noc_caption", "d.json", "--images", "in", "--model", "lite"
    status, told = typed(*words, "--out", "c.jsonl")
    seven, eight, nine = lines("c.jsonl")
    assert status == 0 and seven["caption"] and "3 images, 1 without a caption" in told[-1]
    assert eight["error"].startswith("d.json: detection 2 (image 8)") and "expected" in eight["error"]
    if what in ("outside", "flat"):
        assert "in 640 x 480" in eight["error"] and str(BAD[what]["bbox"][0]) in eight["error"]
    assert nine["counts"] == dict(clipped=1) and nine["boxes"][0]["box"][0] == 0 and "counts" not in seven
    assert typed(*words, "--out", "s.jsonl", "--strict")[0] == 2 and len(lines("s.jsonl")) == 3
    with pytest.raises(NocError, match="--skip-bad leaves them out"): read_detections("d.json", SIZE)
    assert read_detections("d.json", SIZE, skip_bad=True).counts["bad"] == 1

def test_a_training_joins_boxes_by_name_and_counts_what_it_skips(tmp_path):
    captions = [dict(id=i, image_id=i, caption="a dog") for i in (7, 8, 9)]
    names = {7: "val/a.jpg", 8: "val/b.jpg", 9: "val/c.jpg"}
    write_json(tmp_path/"annotations/captions_val2014.json", whole(names, captions, width=640, height=480))
    others = {70: "a.jpg", 7: "b.jpg", 99: "x.jpg"}                   # other ids for the same photos
    boxes = [box(70), box(7, (0, 0, 64, 48), 17), box(99), box(70, (900, 0, 9, 9))]
    write_json(tmp_path/"d.json", whole(others, boxes, width=640, height=480))
    def load(**kw): return load_data(tmp_path, None, str(tmp_path/"d.json"), heldout="zebra", **kw)
    with pytest.raises(NocError, match=r"d.json: detection 3 \(image 7\): box .* in 640 x 480: expected a box"): load()
    data = load(skip_bad=True)
    assert [data.regions[i].labels.tolist() for i in (7, 8, 9)] == [[18], [17], []]
    assert data.counts["bad"] == 1 and data.counts["others"] == 1

def test_a_list_of_boxes_names_the_photos_of_captions(tmp_path):
    write_json(tmp_path/"d.json", [box(4, file_name="x/a.jpg"), box(9, file_name="x/b.jpg")])
    columns = {name: [.5, .5] for name in ("cx", "cy", "w", "h", "score")} | dict(file_name=["x/a.jpg", "x/b.jpg"])
    table = pyarrow.table(dict(image_id=[4, 9], category_id=[18, 17], **columns))
    pyarrow.parquet.write_table(table, tmp_path/"d.parquet")
    write_json(tmp_path/"captions.json", {"b.jpg": ["a dog"], "a.jpg": ["a cat", "cats"]})
    def load(name): return load_data(tmp_path, None, str(tmp_path/name), tmp_path/"captions.json", heldout="zebra")
    with pytest.raises(NocError, match=r"\(image 4\): expected an image whose width and height"): load("d.json")
    data = load("d.parquet")
    assert data.captions == {4: ["a cat", "cats"], 9: ["a dog"]}
    assert [data.regions[i].labels.tolist() for i in (4, 9)] == [[18], [17]]

def test_files_that_are_skipped_in_a_folder_are_reported(typed):
    Path("in").mkdir()
    Image.new("RGB", (64, 48)).save("in/a.jpg")
    Path("in/a.jpg").rename("in/a.jfif")
    Image.new("RGB", (64, 48)).save("in/b.png")
    Path("in/b.png").rename("in/b")                                   # recognised by its first bytes
    for name in "a.txt", "b.txt", "a.json", "Thumbs.db": Path(f"in/{name}").write_text("x")
    Path("in/c.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(99))
    assert [f.name for f in image_files("in")] == ["a.jfif", "b", "c.heic"]
    with pytest.raises(NocError, match="c.heic: .*pillow-heif"): open_image("in/c.heic")
    write_json(Path("d.json"), whole({1: "a.jfif", 2: "b"}, [box(1, (0, 0, 9, 9)), box(2, (0, 0, 9, 9))]))
    _, told = typed("noc_caption", "d.json", "--images", "in", "--model", "lite", "--out", "c.jsonl")
    assert "in: other files, which are not images: 1 .db, 1 .json, 2 .txt" in told

def test_images_without_boxes_can_be_left_out(typed):
    Path("in").mkdir()
    for i in (7, 8): Image.new("RGB", (640, 480)).save(f"in/{i}.jpg")
    write_json(Path("d.json"), [box(7), box(12)])
    words = "noc_caption", "d.json", "--images", "in", "--model", "lite", "--out"
    _, told = typed(*words, "all.jsonl")
    assert [x["image_id"] for x in lines("all.jsonl")] == [7, 8]
    assert "d.json: images without a photo in in, 1 of 2: 12" in told
    typed(*words, "some.jsonl", "--only-detected")
    assert [x["image_id"] for x in lines("some.jsonl")] == [7]

def test_captions_are_written_beside_the_photos_and_read_again(typed):
    for name in "a.jpg", "sub/b.png", "c.jpg":
        Path("in", name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (640, 480)).save(Path("in", name))
    names, outside = {1: "a.jpg", 2: "sub/b.png", 3: "c.jpg"}, (900, 0, 9, 9)
    write_json(Path("d.json"), whole(names, [box(1), box(2), box(3, outside)], width=640, height=480))
    Path("in/a.txt").write_text("by hand")
    words = "noc_caption", "d.json", "--images", "in", "--model", "lite", "--txt"
    _, told = typed(*words, "in", "--out", "c.jsonl")
    said = {x["file"]: x.get("caption") for x in lines("c.jsonl")}
    assert "--txt in: 1 texts written; 1 existing files are kept (--overwrite replaces them)" in told
    assert read_captions("in").texts == {1: ["by hand"], 2: [said["sub/b.png"]]} and not Path("in/c.txt").exists()
    assert "--txt in: 2 texts written" in typed(*words, "in", "--overwrite")[1]
    assert Path("in/a.txt").read_text() == said["a.jpg"] + "\n"
    Image.new("RGB", (9, 9)).save("in/a.png")
    write_json(Path("d.json"), whole(names | {4: "a.png"}, [box(1), box(2)], width=640, height=480))
    assert "a.jpg and a.png would share a .txt file" in typed(*words, "new")[1][-1]

@pytest.mark.parametrize("content", [[box(7), box(8)], whole({7: "a.jpg", 8: "b.jpg"}, [box(7), box(8)])])
def test_each_file_is_opened_at_most_twice_and_each_number_checked_once(typed, monkeypatch, content):
    "A file is opened once to find its kind and once to be read."
    write_json(Path("d.json"), content)
    write_json(Path("i.json"), whole({7: "a.jpg", 8: "b.jpg"}, [], width=640, height=480))
    opened, called, real = Counter(), Counter(), open
    def counted(path, *args, **kw):
        opened[str(path)] += 1
        return real(path, *args, **kw)
    def count(frame, event, _):
        if event == "call" and "noc_nb" in frame.f_code.co_filename: called[frame.f_code.co_name] += 1
    monkeypatch.setattr(builtins, "open", counted)
    sys.setprofile(count)
    try: status, _ = typed("noc_caption", "d.json", "--data", "i.json", "--model", "lite", "--out", "c.jsonl")
    finally: sys.setprofile(None)
    assert status == 0 and [line["image_id"] for line in lines("c.jsonl")] == [7, 8]
    assert (opened["d.json"], opened["i.json"]) == (2, 2)
    assert called["_check_finite"] == 2 and called["require"] <= 400, called.most_common(20)    # two images

def test_text_ids_follow_the_order_of_the_file(tmp_path):
    write_json(tmp_path/"d.json", [box("b"), box(41), box("a"), box("b")])
    found = open_detections(tmp_path/"d.json")
    assert found.texts == {42: "b", 43: "a"} and found.rows["image"].tolist() == [42, 41, 43, 42]

def texts_and_numbers(folder, kind):
    "Write boxes of photos with text ids, as YOLO does, and of one photo called 41; return the path."
    if kind == "json": write_json(folder/"d.json", [box("b"), box(41), box("a"), box("b", (-5, 0, 99, 99), 17)])
    else:
        columns = dict.fromkeys(("cx", "cy", "w", "h"), [.5]*4) | dict(score=[.9]*4, category_id=[18, 18, 18, 17])
        table = pyarrow.table(dict(image_id=["b", "41", "a", "b"]) | columns)
        pyarrow.parquet.write_table(table, folder/"d.parquet")
    return folder/f"d.{kind}"

@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_text_ids_work_in_files_and_in_shards(tmp_path, kind):
    for name in "a.jpg", "b.png", "41.jpg":
        (tmp_path/"in").mkdir(exist_ok=True)
        Image.new("RGB", SIZE[7]).save(tmp_path/"in"/name)
    job = Job(texts_and_numbers(tmp_path, kind), "lite", images=tmp_path/"in", options=CaptionOptions(batch=2))
    _caption_files(job, tmp_path/"c.jsonl")
    expected = {x["file"]: x for x in lines(tmp_path/"c.jsonl")}
    assert {name: (x["image_id"], [b["object"] for b in x["boxes"]]) for name, x in expected.items()} == {
        "41.jpg": ("41" if kind == "parquet" else 41, ["dog"]), "a.jpg": ("a", ["dog"]),
        "b.png": ("b", ["dog", "cat"])}
    caption_shards(job, tmp_path/"shards", shard=2)
    assert {x["file"]: x for x in lines(tmp_path/"shards/captions.jsonl")} == expected
    assert kind == "parquet" or expected["b.png"]["counts"] == {"clipped": 1}

@pytest.mark.parametrize("options, split", [
    (dict(captions="own.json", split="halves.json"), "halves"), (dict(detections="drawn/labels"), "toy")])
def test_a_run_uses_the_data_that_its_settings_name(tmp_path, monkeypatch, options, split):
    class Begun(Exception): pass
    def begun(run, data, *_, **more): raise Begun(run.preset.split, data.regions)
    monkeypatch.setattr(reproduce, "Experiment", begun)
    monkeypatch.chdir(tmp_path)
    make_toy("toy", train=30, val=10, test=10, pictures=0)
    captions = json.loads(Path("toy/annotations/captions_train2014.json").read_text())
    write_json(Path("own.json"), captions)
    train = [image["id"] for image in captions["images"]]
    write_json(Path("halves.json"), dict(train=train[:10], val=train[10:20], test=train[20:]))
    Path("drawn/labels").mkdir(parents=True)
    Path("drawn/data.yaml").write_text("names: [dog]")
    Path("drawn/labels", captions["images"][0]["file_name"]).with_suffix(".txt").write_text("0 .5 .5 .2 .2\n")
    with pytest.raises(Begun) as e:
        noc_reproduce("toy", "toy", out="run", rows="none", training="xe", metrics="C", tables="1", **options)
    name, regions = e.value.args
    assert name == split and (len(regions.boxes) == 1) == ("detections" in options)

@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of POSIX")
def test_a_terminal_shows_names_and_captions_and_a_pipe_whole_lines(tmp_path):
    Image.new("RGB", (640, 480)).save(tmp_path/"7.jpg")
    (tmp_path/"d.json").write_text(json.dumps([box(7)]))
    code = "import sys; from noc_nb.commands.cli import main; sys.argv[0] = 'noc_caption'; main()"
    command = [sys.executable, "-c", code, "d.json", "--images", ".", "--model", "lite"]
    env = os.environ | dict(PYTHONPATH=str(ROOT))
    piped = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    ours, theirs = os.openpty()
    subprocess.run(command, cwd=tmp_path, env=env, stdout=theirs, stderr=subprocess.DEVNULL, check=True)
    os.close(theirs)
    assert os.read(ours, 10_000).decode().split("\r\n")[0] == f"7.jpg: {json.loads(piped.stdout)['caption']}"
    assert "1 image, 0 without a caption; --out FILE keeps the lines" in piped.stderr
