"""Test what a small file can do to the readers of boxes and names: each odd file or number costs one line, at once."""
import json, os, signal, time
from contextlib import contextmanager
import pytest
from noc_nb.core import NocError
from noc_nb.files.boxes import open_detections
from noc_nb.files.captions import read_captions, read_system
from noc_nb.files.exports import read_export
from noc_nb.models.classes import read_classes
from noc_nb.models.source import _from_table
from noc_nb.scores.task import read_references

LARGE = "9"*400

@contextmanager
def at_once(seconds=1):
    "Fail if the block uses more CPU time, or waits for a minute."
    def late(*_): raise AssertionError("it hangs")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    start = time.process_time()
    try: yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - start < seconds

# ---- writers of an export of two photos; the first of them has an odd value

def yolo(root, label="0", **_):
    for n, line in enumerate((f"{label} .5 .5 .2 .2", "0 .5 .5 .2 .2"), 1): (root/f"{n}.txt").write_text(line)

def voc(root, number="5", **_):
    for n, left in enumerate((number, 5), 1):
        corners = f"<xmin>{left}</xmin><ymin>3</ymin><xmax>20</xmax><ymax>20</ymax>"
        thing = f"<object><name>dog</name><bndbox>{corners}</bndbox></object>"
        size = "<size><width>40</width><height>30</height></size>"
        (root/f"{n}.xml").write_text(f"<annotation>{size}{thing}</annotation>")

def cvat(root, number="5", **_):
    box = '<box label="dog" xtl="{}" ytl="3" xbr="20" ybr="20"/>'
    images = (f'<image name="{n}" width="40" height="30">{box.format(left)}</image>'
              for n, left in enumerate((number, 5), 1))
    (root/"cvat.xml").write_text(f"<annotations>{''.join(images)}</annotations>")

def open_images(root, number=".1", score=".9", **_):
    rows = f"1,Dog,{score},{number},.5,.1,.5\n2,Dog,.9,.1,.5,.1,.5\n"
    (root/"oi.csv").write_text("ImageID,LabelName,Confidence,XMin,XMax,YMin,YMax\n" + rows)

def studio(root, score=".9", **_):
    def task(n, score):
        value = '{"x": 10, "y": 10, "width": 20, "height": 20, "rectanglelabels": ["dog"]}'
        result = f'[{{"value": {value}, "score": {score}}}]'
        return f'{{"data": {{"image": "/{n}.jpg"}}, "annotations": [{{"result": {result}}}]}}'
    (root/"studio.json").write_text(f"[{task(1, score)}, {task(2, .9)}]")

def found(root):
    "Return the number of boxes of each photo's export, or the error."
    files = [*root.iterdir()]
    detections = read_export(root if len(files) > 1 else files[0])
    table, errors, _ = detections.table(detections.sizes, None, None)
    source = _from_table(table, sorted({*table, *errors}), failed={i: NocError(e) for i, e in errors.items()})
    names = {i: name.strip("/").partition(".")[0] for name, i in detections.names}
    return {names[i]: r if isinstance(r, NocError) else len(r) for i, r in zip(source.ids, source.regions(source.ids))}

NUMBERS = {"label": ([yolo], ("9223372036854775808", LARGE, "nan", "inf", "²")),
           "number": ([voc, cvat, open_images], (LARGE, "9"*5000, "nan", "²", "")),
           "score": ([open_images, studio], ("NaN", "-1"))}

@pytest.mark.parametrize("write, kind, value", [
    (write, kind, value) for kind, (writers, values) in NUMBERS.items() for write in writers for value in values])
def test_an_odd_number_fails_only_its_photo(tmp_path, recwarn, write, kind, value):
    write(tmp_path, **{kind: value})
    with at_once(): lines = found(tmp_path)
    assert lines["2"] == 1 and isinstance(lines["1"], NocError)
    assert "\n" not in str(lines["1"]) and len(str(lines["1"])) < 400
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]       # a second line

@pytest.mark.parametrize("write", [yolo, voc])
@pytest.mark.parametrize("link", [False, True])
def test_a_pipe_among_the_files_is_not_opened(tmp_path, write, link):
    folder = tmp_path/"export"
    folder.mkdir()
    write(folder)
    [first] = folder.glob("1.*")
    first.unlink()
    os.mkfifo(tmp_path/"pipe" if link else first)
    if link: first.symlink_to(tmp_path/"pipe")
    with at_once(): lines = found(folder)
    assert lines["2"] == 1 and "is not a regular file" in str(lines["1"])

@pytest.mark.parametrize("read", [read_captions, read_system, read_references])
def test_a_pipe_of_captions_is_not_opened(tmp_path, read):
    os.mkfifo(tmp_path/"refs.csv")
    with at_once(), pytest.raises(NocError, match="refs.csv: is not a regular file"): read(tmp_path/"refs.csv")

def test_aliases_in_a_file_of_names_do_not_expand(tmp_path):
    "Nine lines of YAML with aliases would be a text of 10**9 words."
    rows = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}']*10)}]" for n in range(1, 9)]
    bomb = "\n".join(["a0: &a0 [x, x]", *rows, "names: {0: *a8}"])
    (tmp_path/"data.yaml").write_text(bomb)
    (tmp_path/"labels").mkdir()
    yolo(tmp_path/"labels")
    for read in lambda: read_classes(tmp_path/"data.yaml", 0), lambda: read_export(tmp_path/"labels"):
        with at_once(), pytest.raises(NocError, match="data.yaml: expected names of classes .an alias"): read()
    (tmp_path/"data.yaml").write_text("names: [dog]\n#" + "x"*400_000)
    with at_once(), pytest.raises(NocError, match="names of classes .YAML of more than 400,000 characters"):
        read_export(tmp_path/"labels")
    (tmp_path/"data.yaml").write_text("names: {0: dog, 1: cat}")
    assert [c.name for c in read_classes(tmp_path/"data.yaml", 0).values()] == ["dog", "cat"]

def test_a_table_of_twenty_thousand_columns_is_refused(tmp_path):
    open_images(tmp_path)
    head, *rows = (tmp_path/"oi.csv").read_text().splitlines()
    (tmp_path/"oi.csv").write_text("\n".join([head + ",x"*20_000, *(row + ","*20_000 for row in rows)]))
    with at_once(), pytest.raises(NocError, match="oi.csv: expected boxes in a format"): found(tmp_path)

@pytest.mark.parametrize("key", ["image_id", "category_id", "score"])
def test_a_long_number_in_json_gives_one_line(tmp_path, key):
    box = dict(image_id=1, category_id=18, bbox=[1, 2, 3, 4], score=.5) | {key: int(LARGE)}
    (tmp_path/"d.json").write_text(json.dumps([box]))
    with at_once(), pytest.raises(NocError, match="d.json: line 1: item 0: not JSON"):
        open_detections(tmp_path/"d.json")

CAPTIONS = {"c.csv": ("image_id,caption\n7,a dog\n%s,a cat\n", "line 3"),
            "c.token": ("%s#0\ta dog\n", "line 1"),
            "c.jsonl": ('{"image_id": 7, "caption": "a dog"}\n{"image_id": "%s", "caption": "a cat"}\n', "line 2"),
            "c.json": ('[{"image_id": %s, "caption": "a cat"}]', "entry 0"),
            "coco.json": ('{"images": [], "annotations": [{"image_id": %s, "caption": "a cat"}]}', "annotation 0"),
            "images.json": ('{"images": [{"id": %s}], "annotations": []}', "image ")}

@pytest.mark.parametrize("number", ["²", LARGE])
@pytest.mark.parametrize("name", CAPTIONS)
def test_an_odd_number_among_captions_is_refused_in_one_line(tmp_path, name, number):
    "Captions and references with such a number are refused in one short line that names the file and the place."
    text, place = CAPTIONS[name]
    shown = json.dumps(number) if number == "²" and name.endswith(".json") else number
    (tmp_path/name).write_text(text % shown)
    for read in (read_captions, read_system)[:1 if name == "images.json" else 2]:
        with at_once(), pytest.raises(NocError, match=f"{name}: {place}") as e: read(tmp_path/name)
        assert json.dumps(number)[1:30] in str(e.value) or number in str(e.value)
        assert len(str(e.value)) < 300 and "\n" not in str(e.value)
