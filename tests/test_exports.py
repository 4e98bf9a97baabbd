"""Exports of annotation tools: each form gives the boxes that COCO's gives, in every command; broken ones say which."""
import ast, csv, io, json, os, re
from pathlib import Path
from tempfile import TemporaryDirectory
import numpy as np
import pandas
import pytest
from hypothesis import event, example, given, settings, strategies as st
from PIL import Image
from forms import stopped
from noc_nb.constraints import COCO_CLASSES
from noc_nb.core import NocError
from noc_nb.files.boxes import open_detections
from noc_nb.files.captions import read_captions
from noc_nb.files.exports import read_export
from noc_nb.lab.disk import write_json
from test_photos import typed          # noqa: F401

NAMES = [c.name for c in COCO_CLASSES.values()]
SIZE = 640, 480
upto = st.integers
lines = st.tuples(upto(0, 79), upto(0, 300), upto(0, 200), upto(8, 340), upto(8, 280))
worlds = st.dictionaries(st.sampled_from(("a", "sub/b", "c.v2", "d e")), st.lists(lines, min_size=1, max_size=5),
                         min_size=1)

# ---- each tool's form, written by hand: photo -> (class, left, top, width, height) in pixels

def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

def yolo(folder, world):
    write(folder/"data.yaml", json.dumps(dict(names=NAMES)))
    for name, boxes in world.items():
        rows = (((x + w/2)/640, (y + h/2)/480, w/640, h/480) for _, x, y, w, h in boxes)
        text = "".join("%d %.8f %.8f %.8f %.8f\n" % (b[0], *r) for b, r in zip(boxes, rows))
        write(folder/f"labels/{name}.txt", text)
    return folder/"labels"

def voc(folder, world):
    for name, boxes in world.items():
        things = "".join(f"<object><name>{NAMES[n]}</name><bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin>"
                         f"<xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox>"
                         "<part><bndbox><xmin>1</xmin></bndbox></part></object>"
                         for n, x, y, w, h in boxes)
        write(folder/f"Annotations/{name}.xml", "<annotation><size><width>640</width><height>480</height>"
              f"<depth>3</depth></size>{things}</annotation>")
    return folder

def cvat(folder, world):
    def image(i, name):
        boxes = "".join(f'<box label="{NAMES[n]}" xtl="{x}.0" ytl="{y}.0" xbr="{x + w}.0" ybr="{y + h}.0" '
                        'rotation="0.0"></box>' for n, x, y, w, h in world[name])
        return f'<image id="{i}" name="{name}.jpg" width="640" height="480">{boxes}</image>'
    write(folder/"annotations.xml", f"<annotations>{''.join(image(*x) for x in enumerate(world))}</annotations>")
    return folder

def open_images(folder, world):
    write(folder/"oidv7-class-descriptions-boxable.csv", "LabelName,DisplayName\n" + "".join(
        f"/m/{n},{name.title()}\n" for n, name in enumerate(NAMES)))
    rows = (f"{name},xclick,/m/{n},1,{x/640},{(x + w)/640},{y/480},{(y + h)/480},0\n"
            for name, boxes in world.items() for n, x, y, w, h in boxes)
    write(folder/"train.csv", "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsGroupOf\n" + "".join(rows))
    return folder/"train.csv"

def studio(folder, world):
    def shape(n, x, y, w, h):
        value = dict(x=x/6.4, y=y/4.8, width=w/6.4, height=h/4.8, rotation=0, rectanglelabels=[NAMES[n]])
        return dict(type="rectanglelabels", original_width=640, original_height=480, image_rotation=0, value=value)
    tasks = [dict(id=i, data=dict(img=f"/data/local-files/?d={name}.jpg"), predictions=[],
                  annotations=[dict(was_cancelled=True, result=[]), dict(result=[shape(*b) for b in boxes])])
             for i, (name, boxes) in enumerate(world.items())]
    write_json(folder/"tasks.json.gz", tasks)
    return folder/"tasks.json.gz"

def voc_of_cvat(folder, world):
    "Write the VOC export of CVAT, with positions in decimals from 0; return its folder."
    voc(folder, world)
    for path in folder.rglob("*.xml"):
        def shifted(m): return f"<{m[1]}>{float(m[2]) - (m[1][2] == 'i')}<"
        path.write_text(re.sub(r"<(.m(?:in|ax))>(\d+)<", shifted, path.read_text()))
    return folder/"Annotations"

TOOLS = yolo, voc, voc_of_cvat, cvat, open_images, studio

def in_pixels(table, i):
    "Return an image's labels and boxes in whole pixels, sorted, because boxes of one size may have any order."
    regions = table[i]
    return sorted(zip(regions.labels.tolist(), np.rint(regions.boxes.numpy()*[640, 480, 640, 480]).tolist()))

@settings(max_examples=30, deadline=None)
@given(worlds)
@example({"a": [(0, 0, 0, 8, 8), (1, 0, 1, 8, 8)]})
def test_each_form_gives_the_same_boxes_as_cocos_form(world):
    with TemporaryDirectory() as folder:
        ids = {name: i for i, name in enumerate(sorted(world), 1)}
        coco = [dict(image_id=ids[name], category_id=[*COCO_CLASSES][n], bbox=box, iscrowd=0)
                for name in ids for n, *box in world[name]]
        images = [dict(id=i, file_name=f"{name}.jpg", width=640, height=480) for name, i in ids.items()]
        write_json(Path(folder)/"coco.json", dict(images=images, annotations=coco))
        expected, *_ = open_detections(Path(folder)/"coco.json").table(None, COCO_CLASSES)
        for tool in TOOLS:
            found = read_export(tool(Path(folder)/tool.__name__, {name: world[name] for name in ids}))
            assert [name.removesuffix(".jpg") for name, _ in found.names] == [*ids], tool
            table, errors, _ = found.table(None, COCO_CLASSES)
            assert not errors, tool
            for i in ids.values(): assert in_pixels(table, i) == in_pixels(expected, i), tool

WORLD = {"a": [(16, 64, 48, 320, 240)], "sub/b": [(15, 64, 48, 320, 240)]}

unit = st.integers(1, 999).map(lambda n: n/1000)
spots = st.tuples(unit, unit)

@st.composite
def labelled(draw):
    """Return lines as ultralytics writes them, one list per photo, with the boxes that they mean, and what data.yaml
    says about them: task, kpt_shape, save_conf."""
    task = draw(st.sampled_from(("detect", "segment", "obb", "pose")))
    shape = (draw(st.integers(1, 17)), draw(st.sampled_from((2, 3))))
    conf, track = draw(st.booleans()), draw(st.booleans())
    def line():
        (x1, y1), (x2, y2) = draw(st.tuples(spots, spots).filter(
            lambda p: min(abs(p[0][0] - p[1][0]), abs(p[0][1] - p[1][1])) > .01))
        left, top, right, bottom = min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)
        def inside(): return left + draw(unit)*(right - left), top + draw(unit)*(bottom - top)
        body = [(left + right)/2, (top + bottom)/2, right - left, bottom - top]
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        if task == "obb": body = [z for corner in corners for z in corner]
        if task == "segment":
            more = [inside() for _ in range(draw(st.integers(0, 5)))]
            body = [z for spot in (*corners, *more) for z in spot]
        for _ in range(shape[0] if task == "pose" else 0): body += (*inside(), draw(unit))[:shape[1]]
        score = draw(unit)
        words = [draw(st.integers(0, 3)), *body] + [score]*conf + [draw(st.integers(1, 40))]*track
        return " ".join("%.8g" % z for z in words), (words[0], [left, top, right, bottom], score if conf else 1.)
    photos = [[line() for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 4)))]
    more = f"task: {task}\nsave_conf: {conf}\n" + (f"kpt_shape: {[*shape]}\n" if task == "pose" else "")
    return photos, more, task == "detect" and not track

@settings(max_examples=int(os.environ.get("DRAWN", 300)), deadline=None, derandomize="DRAWN" not in os.environ)
@given(labelled())
def test_drawn_folders_are_read_as_they_were_meant(drawn):
    "A folder is read as it was meant, or it is refused; it is not refused if data.yaml says what it means."
    photos, more, plain = drawn
    for about in more, "":
        with TemporaryDirectory() as folder:
            write(Path(folder)/"data.yaml", f"names: [dog, cat, bus, cow]\n{about}")
            for n, lines in enumerate(photos):
                write(Path(folder)/f"labels/{n}.txt", "\n".join(text for text, _ in lines))
            try: found = read_export(Path(folder)/"labels")
            except NocError as e:
                assert "save_conf: true" in str(e) and not about and not plain
                return event("refused")
        table, errors, _ = found.table(None, None)
        assert not errors
        for n, lines in enumerate(photos):
            r = table[dict(found.names)[str(n)]]
            rows = sorted((c, *b, s) for c, b, s in zip(r.labels.tolist(), r.boxes.tolist(), r.scores.tolist()))
            np.testing.assert_allclose(rows, sorted((c, *b, s) for _, (c, b, s) in lines), atol=2e-6)

def test_a_folder_with_photos_beside_their_labels_is_a_folder_of_photos(tmp_path):
    from noc_nb.models.source import _holds_regions
    yolo(tmp_path, WORLD)
    assert _holds_regions(tmp_path)
    Image.new("RGB", SIZE).save(tmp_path/"a.jpg")
    assert not _holds_regions(tmp_path) and _holds_regions(tmp_path, "images")

def cvat_of(boxes, size=9):
    return f'<annotations><image name="a" width="{size}" height="{size}">{boxes}</image></annotations>'

HEAD = "ImageID,LabelName,XMin,XMax,YMin,YMax\n"
BOX = '<box label="dog" xtl="0" ytl="0" xbr="9" ybr="9"'
BAD = [("turned.xml", cvat_of(f'{BOX} rotation="45"/>'),
        r"turned.xml: detection 0 \(image a\): expected a box that is not rotated"),
       ("far.xml", cvat_of(f"{BOX}/>", 4),
        r"far.xml: detection 0 \(image a\): box .0.0, 0.0, 9.0, 9.0. in 4 x 4: expected a box in the image"),
       ("none.xml", cvat_of('<box label="dog" xtl="x"/>'),
        r"none.xml: detection 0 \(image a\): expected four numbers, found .'x', None, None, None"),
       ("twice.xml", f"{cvat_of('')[:-14]}<image name='a'/></annotations>", "twice.xml: photo 'a': expected a name"),
       ("video.xml", "<annotations><track/></annotations>", "a video: expected its export as CVAT for images"),
       ("bomb.xml", '<!DOCTYPE a [<!ENTITY b "c">]><annotations>&b;</annotations>', "a document type: expected XML"),
       ("cut.xml", "<annotations><image", "cut.xml: expected XML"),
       ("odd.xml", cvat_of(f'{BOX} rotation="x"/>'), "expected a box that is not rotated"),
       ("i.csv", f"{HEAD},Dog,0,1,0,1\n", "i.csv: row 0: expected an ImageID"),
       ("min.json", '[{"image": "a.jpg", "annotator": 1, "label": []}]', "JSON-MIN .*: expected its export as JSON"),
       ("odd.json", '[{"data": {"image": "a.jpg"}, "annotations": [7]}]', "odd.json: expected Label Studio's tasks"),
       ("m.csv", f"{HEAD}a,/m/1,0,1,0,1\n", "labels like /m/1, but no .*: expected the file"),
       ("x.csv", f"{HEAD}a,Dog,0,x,0,1\n", r"row 0 \(image a\).*: expected four finite"),
       ("all.zip", "PK", "all.zip: an archive: expected the folder"),
       ("own.csv", "image,x\n", "own.csv: expected boxes in a format from docs/forms.md"),
       ("labels/a.txt", "18 .5 .5 .2 .2 1\n18 .5 .5 .2\n",
        r"labels: row 1 \(image a\): expected a class, then four numbers, then a confidence, as .*, found"),
       ("labels/a.txt", "18 .5 .5 .2 .2\n1.5 .5 .5 .2 .2\n", "row 1 .*: expected a class, then four numbers, as"),
       ("labels/a.txt", "16 .5 .5 .2 .2\n0 .5 .5 .2 .2\n", r"row 1 \(image a\): category_id 0: .*coco80 --first 0")]

def test_a_broken_file_fails_only_its_photo(tmp_path):
    for tool, name in (yolo, "sub/b.txt"), (voc, "sub/b.xml"):
        folder = tool(tmp_path/tool.__name__, WORLD)
        (next(folder.rglob("b.*"))).write_bytes(b"\xff<")
        table, errors, _ = read_export(folder).table(None, COCO_CLASSES)
        assert [table[i].labels.tolist() for i in table] == [[18]]
        line, = errors.values()
        assert f"(image sub/b): {folder}" in line and f"{name}: expected" in line and "\n" not in line

@pytest.mark.parametrize("name, text, line", BAD, ids=[name for name, *_ in BAD])
def test_the_error_names_the_wrong_entry(tmp_path, name, text, line):
    write(tmp_path/name, text)
    with pytest.raises(NocError, match=line):
        _, errors, _ = read_export((tmp_path/name).parent if "/" in name else tmp_path/name).table(None, COCO_CLASSES)
        for text in errors.values(): raise NocError(text)

FOUND = dict(image_id=42, category_id=1, bbox=[0, 0, 50, 50], score=.5)
LISTED = dict(id=42, file_name="COCO_val2014_000000000042.jpg", width=100, height=100)
OWN = [dict(id=1, name="zebra"), dict(id=2, name="dog")]

def boxes_with(typed, found, data, photo=LISTED["file_name"]):
    "Caption a photo with detections and the file of `--data`; return the status, the boxes' names and what was told."
    Path("photos").mkdir(exist_ok=True)
    Image.new("RGB", (100, 100)).save(Path("photos", photo))
    write_json(Path("found.json"), found)
    write_json(Path("val.json"), data)
    Path("c.jsonl").unlink(missing_ok=True)
    status, told = typed("noc_caption", "found.json", "--data", "val.json", "--images", "photos", "--model", "lite",
                         "--out", "c.jsonl")
    if status: return status, [], told[-1]
    lines = [json.loads(line) for line in Path("c.jsonl").read_text().splitlines()]
    return status, [b["object"] for line in lines for b in line.get("boxes", ())], "\n".join(told)

def test_names_may_be_in_the_other_file(typed):
    data = dict(images=[LISTED], categories=OWN)
    status, names, told = boxes_with(typed, [FOUND], data)
    assert (status, names) == (0, ["zebra"]) and "no categories" not in told
    found = dict(images=[LISTED], categories=OWN[::-1], annotations=[FOUND])
    assert boxes_with(typed, found, data)[1] == ["zebra"]
    found["categories"] = [dict(id=1, name="dog")]
    status, _, told = boxes_with(typed, found, data)
    assert status == 2 and told == "error: found.json: category 1: 'dog': expected 'zebra', as in val.json"

@pytest.mark.parametrize("where", ["captions", "annotations/instances_own.json"])
def test_training_reads_names_from_every_file(typed, where):
    "The names of classes may be in the file of captions, or in the data set's boxes; two that disagree are refused."
    captions = dict(images=[LISTED], annotations=[dict(image_id=42, caption="a dog")])
    boxes = dict(images=[LISTED], annotations=[])
    (captions if where == "captions" else boxes)["categories"] = OWN
    Path("own/annotations").mkdir(parents=True)
    for name, content in ("captions_own", captions), ("instances_own", boxes):
        write_json(Path(f"own/annotations/{name}.json"), content)
    write_json(Path("split.json"), dict(train=[42], val=[], test=[]))
    words = ("noc_train", "xe", "--data", "own", "--split", "split.json", "--heldout", "cow", "--out", "run",
             "--detections", "found.json")
    for more in (), ("--captions", "own/annotations/captions_own.json"):
        write_json(Path("found.json"), [FOUND])
        data, = stopped(typed, "noc_nb.commands.reproduce._say_left_out", *words, *more)
        assert [data.classes[i].name for i in data.regions[42].labels.tolist()] == ["zebra"]
        write_json(Path("found.json"), dict(images=[LISTED], annotations=[FOUND], categories=[dict(id=1, name="dog")]))
        status, told = typed(*words, *more)
        assert status == 2 and "found.json: category 1: 'dog': expected 'zebra', as in" in told[-1], told

@pytest.mark.parametrize("image", [42, 42., "42", "42.0", "000000000042", "000000000042.jpg", LISTED["file_name"]])
@pytest.mark.parametrize("photo", [LISTED["file_name"], "000000000042.jpg"])
def test_digits_of_a_name_are_tried_if_no_name_fits(typed, image, photo):
    "The names of 2017 fit the files of 2014; digits in a name are tried if no name fits, and a line says so."
    status, names, told = boxes_with(typed, [dict(FOUND, image_id=image)], dict(images=[LISTED], categories=OWN), photo)
    assert (status, names) == (0, ["zebra"]), told
    assert ("by their numbers" in told) == (photo != LISTED["file_name"] or str(image).partition(".")[0] in (
        "42", "000000000042") and isinstance(image, str))
    status, _, told = boxes_with(typed, [dict(FOUND, image_id="7")], dict(images=[LISTED]))
    assert status == 2 and told.startswith("error: found.json")

@pytest.mark.parametrize("mark, line", [
    (dict(iscrowd=1), "1 iscrowd"), (dict(ignore=1), "1 ignore"),
    (dict(attributes=dict(rotation=30.)), "is not rotated"),
    (dict(rotation=1.), "is not rotated"), (dict(bbox_mode=4), "bbox_mode: expected 1"),
    (dict(bbox=[.1, .2, .5, 1]), ": no number of its boxes is over 1: expected left, top, width and height in pixels")])
def test_qualifiers_are_obeyed_or_refused(typed, mark, line):
    other = [dict(FOUND, category_id=2)] if "bbox" not in mark else []
    status, names, told = boxes_with(typed, dict(images=[LISTED], annotations=[*other, FOUND | mark], categories=OWN),
                                     dict(images=[LISTED]))
    said = told + (Path("c.jsonl").read_text() if Path("c.jsonl").exists() else "")
    assert line in said and "zebra" not in names

def test_corners_are_read_as_corners(typed):
    found = dict(images=[LISTED], annotations=[dict(FOUND, bbox=[50, 50, 60, 70], bbox_mode=0)], categories=OWN)
    write_json(Path("found.json"), found)
    table, *_ = open_detections("found.json").table(None, None)
    np.testing.assert_allclose(table[42].boxes, [[.5, .5, .6, .7]])

def test_an_image_without_boxes_gets_a_line(typed):
    images = [LISTED, dict(LISTED, id=43, file_name="b.jpg")]
    write_json(Path("found.json"), dict(images=images, annotations=[FOUND], categories=OWN))
    assert typed("noc_caption", "found.json", "--model", "lite", "--out", "c.jsonl")[0] == 0
    lines = [json.loads(line) for line in Path("c.jsonl").read_text().splitlines()]
    assert [(x["image_id"], len(x["boxes"])) for x in lines] == [(42, 1), (43, 0)]

# ---- captions: drawn tables, with pandas as a second reader

said = st.text("ab ,;\"'é|.", min_size=1, max_size=12).map(lambda text: f"a{text}b")

# how a table names image i, and how another file does
LISTED_AS = {"{}": "{}.jpg", "{}.0": "{}.jpg", " {}": "{}.jpg", "x/{}.png": "{}.png", "b{}": "b{}.jpg",
             "COCO_val2014_{:012}.jpg": "{:012}.jpg", "{:012}.jpg": "COCO_train2014_{:012}.jpg"}

@st.composite
def tables(draw):
    "Return a table of captions as bytes, its delimiter, and the captions that it means, by image."
    ids = draw(st.lists(st.integers(1, 10**12 - 1), min_size=1, max_size=4, unique=True))
    world = {i: draw(st.lists(said, min_size=1, max_size=3)) for i in ids}
    form = draw(st.sampled_from([*LISTED_AS]))
    key = "image_id" if draw(st.booleans()) and form.startswith(("{}", " ")) else draw(st.sampled_from((
        "file_name", "filename", "image", "image_name", "path")))
    listed = draw(st.sampled_from((None, repr, json.dumps)))
    cells = ((i, text) for i, own in world.items() for text in ([listed(own)] if listed else own))
    sign = draw(st.sampled_from(",;\t"))
    end = draw(st.sampled_from(("\n", "\r\n")))
    columns = draw(st.permutations([key, draw(st.sampled_from(("caption", "captions", "text", "comment"))), "extra"]))
    out = io.StringIO()
    file = csv.writer(out, delimiter=sign, lineterminator=end, quoting=draw(st.sampled_from((
        csv.QUOTE_MINIMAL, csv.QUOTE_ALL))))
    file.writerow(columns)
    for i, text in cells:
        row = {key: form.format(i), "extra": draw(st.sampled_from(("", "1", "a, b")))}
        file.writerow([row.get(name, text) for name in columns])
    code = draw(st.sampled_from(("utf-8", "utf-8-sig", "utf-16")))
    return out.getvalue().encode(code), code, sign, world, form

@settings(max_examples=int(os.environ.get("DRAWN_TABLES", 200)), deadline=None,
          derandomize="DRAWN_TABLES" not in os.environ)
@given(tables())
def test_drawn_tables_are_read_as_pandas_reads_them(drawn):
    content, code, sign, world, form = drawn
    with TemporaryDirectory() as folder:
        path = Path(folder)/"t.csv"
        path.write_bytes(content)
        found = read_captions(path, lambda: [(LISTED_AS[form].format(i), i) for i in world])
        frame = pandas.read_csv(path, sep=sign, dtype=str, keep_default_na=False, encoding=code)
        names = [name for name in frame if name in ("caption", "captions", "text", "comment")]
        key = next(name for name in frame if name not in ("extra", *names))
        theirs = {}
        for cell, text in zip(frame[key], frame[names[0]]):
            listed = text[:1] == "[" and ast.literal_eval(text) if text else False
            theirs.setdefault(cell, []).extend(listed or [text])
    assert [*theirs.values()] == [*world.values()] and [*theirs] == [form.format(i) for i in world]
    assert found.texts == world
