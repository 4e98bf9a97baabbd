"""docs/forms.md lists the forms of files that the commands read, and the tools that write them. `python tests/forms.py`
generates that page from the rows below, and test_forms.py gives the small example file of each row to each command."""
import base64, gzip, io, json, socket, tarfile
from pathlib import Path
import numpy as np
import pyarrow, pyarrow.parquet
from PIL import Image
from book import ROOT
from noc_nb.constraints import COCO_CLASSES
from noc_nb.files.store import RegionStore, read_hdf5, read_npz, read_tsv
from noc_nb.lab.disk import read_json
from noc_nb.models import source as sources
from noc_nb.models.photos import random_weights
from noc_nb.regions import Regions

PAGE = ROOT/"docs/forms.md"
TEXTS = {"a.jpg": ["A dog."], "b.jpg": ["Two cats", "Cats"]}
PAIRS = [(name, text) for name, texts in TEXTS.items() for text in texts]
IDS = {"a.jpg": 7, "b.jpg": 9}
IMAGES = [dict(id=i, file_name=name, width=100, height=100) for name, i in IDS.items()]
BOX = dict(image_id=7, category_id=18, bbox=[0, 0, 50, 50], score=.5)

def written(path, content):
    "Write a text, JSON, a Parquet file, the files of a folder, or what a function writes. Return the path."
    path.parent.mkdir(parents=True, exist_ok=True)
    codes = {"UTF-16": "utf-16", "UTF-16LE": "utf-16-le"}
    if callable(content): content(path)
    elif isinstance(content, str): path.write_text(content, codes.get(path.stem, "utf-8"))
    elif path.suffix == ".parquet": pyarrow.parquet.write_table(pyarrow.table(content), path)
    elif path.suffix == ".gz": path.write_bytes(gzip.compress(json.dumps(content).encode()))
    elif path.suffix == ".json": path.write_text(json.dumps(content))
    else:                                               # a file may have others beside it
        for name, text in content.items(): written((path.parent if path.suffix else path)/name, text)
    return path

def rows(**columns): return [dict(zip(columns, row)) for row in zip(*columns.values())]

NAMES, SAID = zip(*PAIRS)
COCO = rows(id=[1, 2, 3], image_id=[IDS[name] for name in NAMES], caption=SAID)
KARPATHY = dict(images=[dict(filename=name, filepath="val2014", cocoid=IDS[name], split=part,
                             sentences=[dict(raw=text) for text in TEXTS[name]])
                        for name, part in (("a.jpg", "restval"), ("b.jpg", "test"))], dataset="coco")

# ---- ways to read a form: functions of `run`, which types a command, and the form's path, that return the answer

def read_lines(run, *words):
    "Caption images. Return the answers by the first letter of the photo's name, or else by id."
    status, told = run("noc_caption", *words, "--out", "c.jsonl", "--model", "lite")
    assert status == 0, told
    lines = [json.loads(line) for line in Path("c.jsonl").read_text().splitlines()]
    return {Path(line.get("file") or str(line["image_id"])).name.partition(".")[0]: line for line in lines}

def drawn(regions, classes):
    boxes = zip(regions.labels.tolist(), regions.boxes.tolist())
    return seen(dict(object=classes[c].name, box=box) for c, box in boxes)

def seen(boxes): return [(b["object"], [round(x, 3) for x in b["box"]]) for b in boxes]

def names_for(path): return ("--data", truth()) if path.name in ("results.json", "found.parquet") else ()   # only ids

def photos_in(folder="photos"):
    return written(Path(folder), {name: lambda path: photo(path, (100, 100)) for name in TEXTS})

def captioned(run, path):
    "Return the boxes that `noc_caption` read."
    lines = read_lines(run, path, "--images", photos_in(), *names_for(path))
    return {name: seen(line["boxes"]) for name, line in lines.items()}

def served(run, path):
    "Return the boxes of the examples that `noc_app` would serve."
    studio, = stopped(run, "noc_nb.pages.app._page", *app(), "--detections", path, "--images", photos_in(),
                      *names_for(path))
    views = {Path(e.name).stem: e for e in map(studio.example, range(2))}
    return {name: drawn(v.regions, v.pipeline.classes) for name, v in views.items()}

def app():
    with socket.socket() as s:                               # other tests may serve pages at the same time
        s.bind(("127.0.0.1", 0))
        return "noc_app", "--port", s.getsockname()[1]

def stopped(run, function, *words):
    "Run a command until it calls a function, and return the arguments of the call."
    from unittest import mock
    class Stop(Exception): pass
    with mock.patch(function, side_effect=Stop) as call:
        try: raise AssertionError(run(*words))
        except Stop: return call.call_args.args[:1]

def trained_on(part, option, path):
    "Return the words of a command that trains, with an option."
    Path("empty").mkdir(exist_ok=True)
    boxes = found(1 if option == "--classes" else 18)
    files = {"--captions": truth(), "--detections": boxes, option: path}
    words = [word for pair in files.items() for word in pair]
    held = ("cat", "--drop-heldout") if option == "--classes" else ("zebra",)
    return [*part.split(), "--data", "empty", "--heldout", *held, "--out", "run", *words]

def loaded(run, *about):
    "Return the data on which a command trains."
    return stopped(run, "noc_nb.commands.reproduce._say_left_out", *trained_on(*about))[0]

def training(option, answer):
    "Return the ways in which the commands that train read an option, and `answer` about their data."
    def way(part): return lambda run, path: answer(loaded(run, part, option, path))
    return {f"{part.partition(' ')[0]} {option}": way(part) for part in TRAINING}

TRAINING = "noc_train xe", "noc_reproduce --rows none --training xe"

def trained_boxes(data):
    return {name: drawn(data.regions[i], data.classes) for name, i in zip("ab", data.captions)}

def scored(run, *words):
    "Return the images of a report, by name: caption and references."
    status, told = run("noc_eval", *words, "--metrics", "R", "--samples", "9", "--out", "report")
    assert status == 0, told
    table = pyarrow.parquet.read_table("report/images.parquet").to_pylist()
    return {name: row for name, row in zip(TEXTS, table)}

def ours(): return written(Path("own/ours.json"), rows(image_id=[7, 9], file_name=[*TEXTS], caption=["A dog.", "Cats"]))
def truth(): return written(Path("own/truth.json"), dict(images=IMAGES, annotations=COCO))

def system(run, path):
    return {name: x["caption"] for name, x in scored(run, "--captions", path, "--data", truth()).items()}

def references(run, path):
    return {name: x["references"] for name, x in scored(run, "--captions", ours(), "--data", path).items()}

VALUE = dict(x=0, y=0, width=50, height=50, rotation=0, rectanglelabels=["Dog"])
SHAPE = dict(type="rectanglelabels", original_width=100, original_height=100, image_rotation=0, value=VALUE)
FEATURES = np.eye(2, 4, dtype=np.float32)
CORNERS = np.array([[0, 0, 50, 50], [10, 10, 60, 60]], np.float32)

def found_in(run, path):
    "Return the features that a captioner sees, for the first image of a region store."
    source, *_ = stopped(run, "noc_nb.models.source._with_features", "noc_caption", found(), "--model", "lite",
                         "--images", photos_in(), "--features", path)
    return as_rows(sources._with_features(source, path, "found.json").seen([7])[0])

def as_rows(regions): return sorted(map(tuple, regions.features.float().tolist()), reverse=True)

def imported(read):
    "Return a way: a line of Python writes a store, whose boxes and features `noc_caption` then reads."
    def way(run, path):
        RegionStore.write("own/store", read(path))
        return found_in(run, "own/store")
    return way

def hdf5(path, **more):
    import h5py
    with h5py.File(path, "w") as f:
        for name, array in dict(features=FEATURES, boxes=CORNERS, **more).items(): f[f"7_{name}"] = array

def npz(path):
    path.mkdir()
    np.savez(path/"7.npz", x=FEATURES, bbox=CORNERS, image_w=100, image_h=100)

def text(array): return base64.b64encode(array.tobytes()).decode()

def store(path):
    RegionStore.write(path, [Regions(CORNERS/100, [18, 17], [.9, .8], FEATURES, i, (100, 100)) for i in (7, 9)])

def photo(path, size=(9, 9)): Image.new("RGB", size).save(path)

def encoded(name):
    out = io.BytesIO()
    Image.new("RGB", (9, 9)).save(out, "JPEG")
    return out.getvalue()

LOOK = "--detector", "fasterrcnn_mobilenet_v3_large_320_fpn", "--weights"

def looked(run, path):
    "Return the names of the photos that `noc_caption` opened, and in which it ran a detector."
    lines = read_lines(run, path, *LOOK, random_weights("w.pth", LOOK[1]))
    return {name: "error" not in line for name, line in lines.items()}

def stored(run, path):
    status, told = run("noc_features", path, *LOOK, random_weights("w.pth", LOOK[1]), "--features", "none",
                       "--size", 32, "--workers", 0, "--out", "own/new")
    assert status == 0, told
    return {Path(name).stem: RegionStore("own/new")[i].size == (9, 9) for name, i in RegionStore("own/new").names}

def with_boxes(run, path):
    lines = read_lines(run, found(), "--images", path)
    return {name: bool(line["boxes"]) == (name == "a") for name, line in lines.items()}

def on_the_page(run, path):
    scored(run, "--captions", ours(), "--data", truth(), "--images", path)
    return dict.fromkeys("ab", Path("report/report.html").read_text().count("data:image/jpeg") >= 2)

def in_app(run, path):
    studio, = stopped(run, "noc_nb.pages.app._page", *app(), "--detections", found(), "--images", path)
    return {Path(name).stem: look()[1].size == (9, 9) for look, name, _ in studio.examples}

def archive(path):
    with tarfile.open(path, "w") as tar:
        for name in TEXTS:
            about = tarfile.TarInfo(name)
            about.size = len(encoded(name))
            tar.addfile(about, io.BytesIO(encoded(name)))

def beside_photos(path, texts):
    with tarfile.open(path, "w") as tar:
        for n, (name, own) in enumerate(texts.items()):
            stem, said = name[:-4], dict(caption=own) if n else None
            for ending, data in (("jpg", encoded(name)), *([("json", json.dumps(said).encode())] if said else [
                    ("txt", "\n".join(own).encode()), ("json", b'{"width": 9}')])):
                about = tarfile.TarInfo(f"{stem}.{ending}")
                about.size = len(data)
                tar.addfile(about, io.BytesIO(data))

def root(path):
    written(path/"annotations/captions_val2014.json", dict(images=IMAGES, annotations=COCO))
    written(path/"val2014", dict.fromkeys(TEXTS, photo))

SPLIT, CLASSES = dict(train=[7], test=[9]), {1: "dog", 2: "cat"}

def found(label=18):
    return written(Path("own/found.json"), dict(images=IMAGES, annotations=[dict(BOX, category_id=label)]))

def parts(run, path):
    def ids(part): return [IDS[b] for b in scored_ids(run, "--split", path, "--part", part)]
    return {part: ids(part) for part in SPLIT}

def scored_ids(run, *words):
    scored(run, "--captions", ours(), "--data", truth(), *words)
    table = pyarrow.parquet.read_table("report/images.parquet")
    return [name for name, i in IDS.items() if i in table["image_id"].to_pylist()]

def named_boxes(run, path): return [b for b, _ in captioned_with(run, found(1), "--classes", path)]
def captioned_with(run, path, *words): return seen(read_lines(run, path, "--images", photos_in(), *words)["a"]["boxes"])
def classes_in_app(run, path):
    studio, = stopped(run, "noc_nb.pages.app._page", *app(), "--detections", found(1), "--images", photos_in(),
                      "--classes", path)
    return [studio.photos.classes[1].name]
def classes_scored(run, path):
    scored(run, "--captions", ours(), "--data", truth(), "--classes", path)
    assert read_json("report/report.json")["about"]["words"] == "the forms of 2 classes"
    return [COCO_CLASSES[18].name]

def added(run, path):
    line = read_lines(run, found(), "--images", photos_in(), "--add-words", path, "--objects", "okapi")["a"]
    return ["okapi"] if "okapi" in line["caption"] else []
def synonyms(run, path):
    said = written(Path("own/puppy.json"), rows(image_id=[7, 9], caption=["A puppy.", "A plate."]))
    scored(run, "--captions", said, "--data", truth(), "--synonyms", path)
    report = read_json("report/report.json")
    return report["about"]["words"][:12], report["scores"]["quality"]["CHAIR recall"]

def caption_forms(texts):
    pairs = [(name, text) for name, own in texts.items() for text in own]
    names, said = zip(*pairs)
    coco = rows(id=[*range(len(pairs))], image_id=[IDS[name] for name in names], caption=said)
    def table(sign, head="file_name{}caption"): return "\n".join([head.format(sign), *map(sign.join, pairs)]) + "\n"
    karpathy = dict(images=[dict(filename=name, filepath="val2014", cocoid=IDS[name], split="test",
                                 sentences=[dict(raw=text) for text in own]) for name, own in texts.items()])
    return [
        ("COCO's `annotations`, with `images`", "COCO, nocaps, most annotation tools", "captions.json",
         dict(images=IMAGES, annotations=coco)),
        ("the same, compressed by gzip", "the same tools", "captions.json.gz", dict(images=IMAGES, annotations=coco)),
        ("`annotations` alone", "scripts", "alone.json", dict(annotations=coco)),
        ("a list of objects with `image_id`", "COCO's results format, VLM evaluation kits", "results.json", coco),
        ("a list of objects with `file_name`", "scripts", "named.json", rows(file_name=names, caption=said)),
        ("an object that maps names or ids to captions", "scripts", "dictionary.json", texts),
        ("Karpathy's `images` with `sentences`", "dataset_coco.json and similar files", "dataset_coco.json", karpathy),
        ("one JSON object per line", "`noc_caption`; datasets' `metadata.jsonl`", "lines.jsonl",
         "".join(json.dumps(row) + "\n" for row in rows(file_name=names, text=said))),
        ("CSV", "pandas; datasets' `metadata.csv`", "t.csv", table(",")),
        ("CSV with a byte order mark and semicolons", "Excel, in much of Europe", "s.csv", "\ufeff" + table(";")),
        ("a table in UTF-16, with tabs", "Excel's Unicode text", "UTF-16.txt", table("\t")),
        ("the same without a byte order mark", "scripts on Windows", "UTF-16LE.txt", table("\t")),
        ("`image_name| comment`", "Flickr30k's results.csv", "bars.csv", table("|", "image_name{} comment")),
        ("`image,caption`", "Flickr8k's captions.txt", "captions.txt", table(",", "image,caption")),
        ("Parquet, by `file_name` or `image_id`", "datasets, pandas", "t.parquet",
         dict(file_name=list(texts), captions=list(texts.values()))),
        ("a cell with a list, as Python or JSON writes it", "pandas", "lists.csv", "file_name,captions\n" + "".join(
            f'{name},"{listed(own)}"\n' for name, listed, own in zip(
                texts, (repr, lambda own: json.dumps(own).replace('"', '""')), texts.values()))),
        ("`data` with `image_name` and `caption_str`", "TextCaps", "TextCaps_0.1_val.json", dict(data=[
            dict(image_id=f"{n}a0f", image_name=name, caption_str=text) for n, (name, text) in enumerate(pairs)])),
        ("COCO's, without `is_precanned` and `is_rejected`", "VizWiz-Captions", "val.json", dict(
            images=IMAGES, annotations=[*coco, dict(id=98, image_id=7, caption="Blurred.", is_rejected=True), dict(
                id=99, image_id=7, caption="Quality issues are too severe.", is_precanned=True, is_rejected=False)])),
        ("`image_name| comment_number| comment`", "Flickr30k's results.csv; a line lacks a bar", "results.csv",
         "image_name| comment_number| comment\n" + "".join(
             f"{name}| {n}{'' if n == 1 else '|'} {text}\n" for name, own in texts.items()
             for n, text in enumerate(own))),
        ("`a.jpg#0`, a tab and a caption", "Flickr30k's and Flickr8k's .token", "results_20130124.token",
         "".join(f"{name}#{n}\t{text}\n" for name, own in texts.items() for n, text in enumerate(own))),
        ("Parquet with `image` and `caption_0`, `caption_1`, …", "datasets", "train-00000-of-00001.parquet",
         dict(image=[dict(bytes=b"", path=name) for name in texts],
              **{f"caption_{n}": [dict(enumerate(own)).get(n) for own in texts.values()] for n in range(2)})),
        ("JSON lines with `image` and `captions`", "datasets", "train.jsonl", "".join(
            json.dumps(dict(image=dict(bytes=None, path=name), captions=own)) + "\n" for name, own in texts.items())),
        ("captions beside photos in a tar file, as .txt or .json", "webdataset, img2dataset", "00000.tar",
         lambda path: beside_photos(path, texts)),
        ("a folder of `.txt` or `.caption` files, one caption per line", "kohya's sd-scripts, TagGUI", "texts",
         {name.replace("jpg", "txt"): "\n".join(own) + "\n" for name, own in texts.items()})]

REFERENCES, SINGLE = caption_forms(TEXTS), caption_forms({name: own[:1] for name, own in TEXTS.items()})

def expect(answer, ways): return {name: (way, answer) for name, way in ways.items()}

DOG = {"a": [("dog", [0, 0, .5, .5])], "b": []}
BOXED = expect(DOG, {"noc_caption": captioned, "noc_app --detections": served,
                     **training("--detections", trained_boxes)})
EYE = [(1, 0, 0, 0), (0, 1, 0, 0)]
EACH = dict.fromkeys("ab", True)

# section: command and option -> (function that returns its answer, the answer); then form, tool, file name, content
FORMS = {
    "Captions": ({"noc_eval --captions": (system, {name: own[0] for name, own in TEXTS.items()}),
                  "noc_eval --data": (references, TEXTS),
                  **expect(TEXTS, training("--captions", lambda data: dict(
                      zip(TEXTS, data.captions.values()))))}, REFERENCES),
    "Splits": (expect(SPLIT, {
        "noc_eval --split": parts, **training("--split", lambda data: {part: data.splits[part] for part in SPLIT})}), [
        ("lists of image ids, by part", "scripts", "split.json", dict(SPLIT, val=[])),
        ("the published split of held-out COCO", "Neural Baby Talk's split_noc_coco.json", "split_noc_coco.json",
         dict(train={"7": 1}, val_train={}, test_train={"9": 1}, val={}, test={"9": 1})),
        ("Karpathy's captions with `split`", "dataset_coco.json", "k.json", KARPATHY)]),
    "Detections": (BOXED, [
        ("a list of boxes", "COCO's results format: detectron2, mmdetection", "results.json", [BOX]),
        ("an object with `annotations`", "COCO", "found.json", dict(images=IMAGES, annotations=[BOX])),
        ("the same without scores: boxes that people drew", "COCO; CVAT, Roboflow, supervision", "drawn.json",
         dict(images=IMAGES, annotations=[{k: BOX[k] for k in BOX if k != "score"}])),
        ("Parquet with `cx`, `cy`, `w`, `h`", "`write_detections`", "found.parquet",
         dict(image_id=[7], category_id=[18], cx=[.25], cy=[.25], w=[.5], h=[.5], score=[.5]))]),
    "Boxes of annotation tools": (BOXED, [
        ("a folder of labels, with `data.yaml`, `classes.txt` or `obj.names`", "ultralytics, Roboflow", "yolo",
         {"labels/a.txt": "16 0.25 0.25 0.5 0.5\n", "data.yaml": "names: {0: person, 16: dog}\n"}),
        ("the same with confidences, in the folder or in `labels/`", "`yolo predict save_txt save_conf`", "predict",
         {"a.txt": "1 0.25 0.25 0.5 0.5 0.9\n", "classes.txt": "cat\ndog\n"}),
        ("the same with outlines, whose bounding boxes are used", "segmentation, oriented boxes", "outlines",
         {"labels/a.txt": "0 0 0 0.5 0.1 0.4 0.5\n", "classes.txt": "dog\n"}),
        ("the same with key points; data.yaml has `kpt_shape`", "pose estimation", "pose",
         {"labels/a.txt": "0 0.25 0.25 0.5 0.5 0.1 0.1 2 0.4 0.4 1\n",
          "data.yaml": "names: [dog]\nkpt_shape: [2, 3]\n"}),
        ("the same with tracks", "`yolo track save_txt save_conf`", "track",
         {"labels/a.txt": "0 0.25 0.25 0.5 0.5 0.9 7\n", "classes.txt": "dog\n"}),
        ("a folder of JSON files, with `classes.txt` beside it", "mmdetection's `preds`", "preds",
         {"a.json": json.dumps(dict(labels=[0], scores=[.9], bboxes=[[0, 0, 50, 50]])), "classes.txt": "dog\n"}),
        ("a folder of JSON files with `shapes`", "labelme", "labelme",
         {"a.json": json.dumps(dict(version="5.5.0", flags={}, shapes=[
             dict(label="dog", points=[[50, 50], [0, 0]], shape_type="rectangle"),
             dict(label="dog", points=[[5, 5]], shape_type="point")], imagePath="a.jpg",
             imageHeight=100, imageWidth=100))}),
        ("a folder of XML files, named like the photos", "Pascal VOC; LabelImg, Roboflow", "voc",
         {"a.xml": "<annotation><filename>a.jpg</filename><size><width>100</width><height>100</height></size>"
                   "<object><name>dog</name><difficult>0</difficult><bndbox><xmin>0</xmin><ymin>0</ymin>"
                   "<xmax>50</xmax><ymax>50</ymax></bndbox></object></annotation>"}),
        ("one XML file, \"CVAT for images\"", "CVAT", "cvat.xml",
         '<?xml version="1.0" encoding="utf-8"?>\n<annotations><version>1.1</version><image id="0" name="a.jpg" '
         'width="100" height="100"><box label="dog" source="manual" occluded="0" xtl="0.0" ytl="0.0" xbr="50.0" '
         'ybr="50.0" z_order="0"></box></image><image id="1" name="b.jpg" '
         'width="100" height="100"></image></annotations>'),
        ("CSV, with `*class-descriptions*.csv` beside it", "Open Images", "train-annotations-bbox.csv",
         {"train-annotations-bbox.csv": "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsGroupOf\n"
                                        "a,xclick,/m/0bt9lr,1,0.0,0.5,0.0,0.5,0,0\n"
                                        "b,xclick,/m/0bt9lr,1,0.0,0.5,0.0,0.5,0,1\n",
          "class-descriptions-boxable.csv": "/m/0bt9lr,Dog\n"}),
        ("JSON with a list of tasks", "Label Studio", "tasks.json",
         [dict(id=1, data=dict(image="/data/upload/1/0a1b2c3d-a.jpg"), annotations=[dict(result=[SHAPE])]),
          dict(id=2, data=dict(image="/data/upload/1/0a1b2c3e-b.jpg"), annotations=[dict(result=[])])])]),
    "Regions with features": (expect(EYE, {"noc_caption --features": found_in,
                                            **training("--features", lambda data: as_rows(data.features[7]))}), [
        ("a region store", "`noc_features`", "store", store)]),
    "Features in HDF5": ({"RegionStore.write(STORE, read_hdf5(FILE))": (imported(read_hdf5), EYE)}, [
        ("`<id>_features`, perhaps `_boxes`", "several projects", "found.hdf5", hdf5),
        ("the same with `_cls_prob`", "M²'s coco_detections.hdf5", "coco_detections.hdf5",
         lambda path: hdf5(path, cls_prob=FEATURES))]),
    "Features in a table": ({"RegionStore.write(STORE, read_tsv(FILE))": (imported(read_tsv), EYE)}, [
        ("a table with base64", "bottom-up attention", "trainval.tsv",
         f"7\t100\t100\t2\t{text(CORNERS)}\t{text(FEATURES)}\n")]),
    "Features in a folder": ({"RegionStore.write(STORE, read_npz(FOLDER))": (imported(read_npz), EYE)}, [
        ("a folder of `<id>.npz`", "bottom-up attention in PyTorch", "npz", npz)]),
    "Photos": ({"noc_caption": (looked, EACH), "noc_features": (stored, EACH),
                "noc_caption --images": (with_boxes, EACH),
                "noc_app --images": (in_app, EACH), "noc_eval --images": (on_the_page, EACH)}, [
        ("a folder, with subfolders; photos are recognised by suffix or first bytes", "cameras, scripts", "photos",
         {"x/a.jpg": photo, "b.jpg": photo}),
        ("a folder in COCO's layout", "COCO", "COCO", root),
        ("tar archives", "webdataset, img2dataset", "00000.tar", archive),
        ("Parquet with a column of images", "datasets", "photos.parquet",
         dict(image=[dict(bytes=encoded(name), path=name) for name in TEXTS])),
        ("a list of file names, one per line", "scripts", "names.txt",
         {"names.txt": "a.jpg\nb.jpg\n", **dict.fromkeys(TEXTS, photo)})]),
    "Classes": (expect(["dog"], {
        "noc_caption --classes": named_boxes, "noc_app --classes": classes_in_app, "noc_eval --classes": classes_scored,
        **training("--classes", lambda data: [data.classes[1].name])}), [
        ("one name per line", "darknet's .names", "coco.names", "dog\ncat\n"),
        ("the same in UTF-16", "Notepad", "UTF-16.txt", "dog\ncat\n"),
        ("a table with names in its last column", "Open Images's descriptions", "classes.csv", "/m/1,dog\n/m/2,cat\n"),
        ("an object that maps ids to names", "transformers' id2label", "names.json", {"1": "dog", "2": "cat"}),
        ("COCO's `categories`", "COCO", "instances.json", dict(categories=rows(id=[1, 2], name=["dog", "cat"])))]),
    "Words": (expect(["okapi"], {"noc_caption --add-words": added, 
        "noc_train --vectors": lambda run, path: [*loaded(run, TRAINING[0], "--vectors", path).vectors]}), [
        ("one word and its numbers per line", "GloVe", "glove.txt", f"okapi{' .1'*300}\n"),
        ("the same after a line with two sizes", "word2vec's text format, fastText", "vec.txt",
         f"1 300\nokapi{' .1'*300}\n")]),
    "CHAIR's words": ({"noc_eval --synonyms": (synonyms, ("synonyms.txt", 50))}, [
        ("one line per object, its name first", "Hallucination's synonyms.txt", "synonyms.txt",
         "".join(f"{c.name}, {'puppy' if c.name == 'dog' else c.name}\n" for c in COCO_CLASSES.values()))])}

# form, what marks it, what we do
QUALIFIERS = [
    ("COCO's boxes", "`iscrowd`, `ignore`", "left out, with a line that counts them"),
    ("COCO's boxes", "`attributes.rotation`, `rotation`, five numbers in `bbox`",
     "refused: a rotated box is its image's fault"),
    ("COCO's boxes", "`bbox_mode`", "1 (XYWH_ABS) and 0 (XYXY_ABS) are obeyed; others are refused"),
    ("COCO's boxes", "no number over 1", "refused, as the boxes look relative"),
    ("Open Images", "`IsGroupOf`, `IsDepiction`", "left out, with a line that counts them"),
    ("CVAT, Label Studio", "`rotation`", "refused: a rotated box is its image's fault"),
    ("VizWiz-Captions", "`is_precanned`, `is_rejected`", "left out, with a line that counts them"),
    ("YOLO's labels", "`task`, `kpt_shape`, `save_conf` in data.yaml",
     "decide what the numbers are; labels that can be read in two ways are refused without them")]

# form, file name, content, what each command that reads boxes says about it ("…": any text)
REFUSED = [
    ("a pickle of detectron2", "instances_predictions.pth", "x", "a pickle, which can run any program when it is read: "
     "expected JSON: coco_instances_results.json, which detectron2 writes beside it"),
    ("a pickle of mmdetection", "results.pkl", "x", "a pickle, … or what mmdetection's tools/test.py writes with "
     "--cfg-options test_evaluator.outfile_prefix=results"),
    ("panoptic segments", "panoptic.json", dict(images=IMAGES, annotations=[dict(image_id=7, segments_info=[])]),
     "panoptic segments: expected boxes: `python converters/panoptic2detection_coco_format.py --input_json_file IN "
     "--output_json_file OUT`, from panopticapi"),
    ("frames of several clips", "clips.json", dict(videos=[dict(id=1)], annotations=[dict(video_id=1, bboxes=[])]),
     "frames of several clips: expected one file for each clip, with the image_id and the bbox of each frame's "
     "objects"),
    ("segmentations without boxes", "masks.json",
     [dict(image_id=7, category_id=18, segmentation=dict(size=[9, 9], counts="0"), score=.5)],
     "segmentations without boxes: expected boxes: in Python, `ann[\"bbox\"] = mask.toBbox(coco.annToRLE(ann))."
     "tolist()`, with COCO and mask of pycocotools, for each annotation"),
    ("rotated boxes", "turned.json", [dict(BOX, bbox=[9, 9, 5, 5, 45])],
     "expected a box that is not rotated, such as the bounds of its four corners"),
    ("CVAT's video", "video.xml", "<annotations><track/></annotations>",
     "a video: expected its export as CVAT for images"),
    ("another table", "own.csv", "image,x\n", "expected boxes in a format from docs/forms.md; the nearest is Open "
     "Images's, with ImageID, LabelName, XMin, XMax, YMin and YMax"),
    ("an archive", "boxes.zip", "PK", "an archive: expected the folder that it unpacks to"),
    ("mmdetection's `preds` without names", "preds",
     {"a.json": '{"labels": [0], "scores": [0.5], "bboxes": [[0, 0, 5, 5]]}'}, "classes without names: expected "
     "classes.txt beside it, with the names in model.dataset_meta[\"classes\"], one per line"),
    ("labels with two meanings", "labels", {"a.txt": "0 0.2 0.1 0.6 0.1 0.6 0.9 0.2 1\n", "classes.txt": "dog\n"},
     "can be boxes, outlines or key points, with or without a confidence: expected in …data.yaml a line `task: "
     "segment` (or detect, obb), or `kpt_shape: [17, 3]`, and `save_conf: true` or `false`")]

# a form of captions with one unusable entry, and what the commands say about it
BAD = {
    "captions.json": (dict(images=IMAGES, annotations=[*COCO, dict(id=4, image_id=99, caption="A cow.")]),
                      "annotation 4 (image 99): expected an image of this file"),
    "none.json": (dict(images=IMAGES, annotations=[dict(id=0, image_id=7, caption=None), *COCO]),
                  "annotation 0 (image 7): caption: expected a string, found none"),
    "dataset_coco.json": (dict(images=[*(image | dict(split="test") for image in KARPATHY["images"]),
                                       dict(cocoid=4, split="test")]), "image 2: "),
    "t.csv": ("file_name,caption\na.jpg,A dog.\nb.jpg,Two cats\nb.jpg,A cat, too\nb.jpg,Cats\n",
              "line 4: does not have 2 cells"),
    "lines.jsonl": ("".join(f"{line}\n" for line in (json.dumps(COCO[0]), '{"image_id": 9, "capt', "", *map(
        json.dumps, COCO[1:]))), "line 2: not JSON: expected an object"),
    "list.json": ([*COCO, dict(image_id="²", caption="A cow.")], "entry 3: image '²'")}

def page():
    "Return the page in Markdown."
    head = ("# Forms of files\n\n> The forms of files that the commands read, and the tools that write them\n\n"
            "`tests/test_forms.py` gives each example to each command. Text is UTF-8, with or without a byte order\n"
            "mark, or UTF-16. Photos are matched by name ([data.md](data.md)); suffixes are ignored if one of the\n"
            "names has none. If no name fits, but the numbers at the ends of all names do, they decide, and a line\n"
            "says so.\n")
    def section(title, ways, forms):
        lines = [f"| {form} | {tool} | `{file}` |" for form, tool, file, _ in forms]
        read = ", ".join(f"`{way}`" for way in ways)
        top = f"\n## {title}\n\nRead by {read}.\n\n| form | written by | example |\n|---|---|---|"
        return "\n".join([top, *lines]) + "\n"
    marks = "".join(f"| {form} | {mark} | {what} |\n" for form, mark, what in QUALIFIERS)
    refused = "".join(f"| {form} | {line} |\n" for form, _, _, line in REFUSED)
    drawn = ("\n## Drawn cases\n\n"
             "Tests also draw files, whose meaning they know. CI draws 300 folders of labels and 200 tables, the same\n"
             "ones each time; 48 folders with broken photos; and 36 cases of each promise on the hub's card.\n"
             "`make drawn` draws 500 other folders of labels, 200 other tables, 300 folders with broken photos and\n"
             "200 cases of each promise; the last two begin with CI's.\n")
    tail = (f"\n## Marks\n\nWhat a file says about its boxes and captions is obeyed, or refused by name.\n\n"
            f"| form | mark | what we do |\n|---|---|---|\n{marks}\n## Refused\n\n"
            "Each command that reads boxes ends with this line, after the name of the file.\n\n"
            f"| form | line |\n|---|---|\n{refused}\n"
            "An unusable entry of a captions file, or a line of JSON lines that is not JSON, is refused with its\n"
            "place, or left out with `--skip-bad`.\n")
    return head + "".join(section(title, *about) for title, about in FORMS.items()) + tail + drawn

if __name__ == "__main__": PAGE.write_text(page(), encoding="utf-8")
