"Test how photos are matched to images: by name, and never to a photo that the file does not name."
import gzip, json, sys, tarfile, unicodedata
from pathlib import Path
from tempfile import TemporaryDirectory
import pyarrow, pyarrow.parquet
import pytest
from hypothesis import assume, given, settings, strategies as st
from PIL import Image
from noc_nb.commands.cli import main
from noc_nb.commands.reproduce import _check_names
from noc_nb.core import NocError
from noc_nb.files.images import _fits, match_photos, name_parts
from noc_nb.files.store import RegionStore
from noc_nb.lab.disk import write_json
from noc_nb.lab.progress import command_lines
from noc_nb.models.photos import _FORMATS, _image_formats, image_files, open_image
from noc_nb.models.pipeline import NovelCaptioner
from noc_nb.models.source import detected
from noc_nb.pages.app import _paths, _Studio
from noc_nb.regions import Regions
from noc_nb.scores.report import read_report
from noc_nb.scores.task import photos_by_id

SIZE = 40, 30

def paint(path, n):
    "Save a photo whose colour encodes its number."
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", SIZE, (20*n, 0, 0)).save(path, format="png")

def shown(image): return image.getpixel((0, 0))[0]//20

def box(i, **more): return dict(image_id=i, category_id=2, bbox=[i, 0, 5, 5], score=.9, **more)

def entries(names, annotations=()):
    images = [dict(id=i, file_name=name) if name else dict(id=i) for i, name in names.items()]
    return dict(images=images, annotations=list(annotations))

# ---- a property, checked by code that uses none of the package's functions

FOLDERS, FILES = ("a", "b", "caf\u00e9"), ("7.jpg", "8.jpg", "IMG_7.jpg", "\u00e9.jpg", "A.jpg", "a.jpg")
paths = st.builds(lambda folders, file: "/".join([*folders, file]),
                  st.lists(st.sampled_from(FOLDERS), max_size=2), st.sampled_from(FILES))
forms = st.sampled_from(("NFC", "NFD"))

@st.composite
def spellings(draw, photos):
    "Draw a name as a file may spell it: of a photo, with other folders or another spelling, or of no photo."
    parts = draw(st.one_of(st.sampled_from(photos), paths)).split("/")
    parts = draw(st.lists(st.sampled_from((*FOLDERS, "data", ".")), max_size=2)) + parts[draw(st.integers(0, 2)):]
    name = draw(st.sampled_from("/\\")).join(parts)
    name = draw(st.sampled_from(("", "", "./", "../", "/", "C:\\"))) + name
    if draw(st.integers(0, 9)) == 0: name = name.upper()
    return unicodedata.normalize(draw(forms), name)

@st.composite
def cases(draw):
    "Draw the photos of a folder, names for images, some empty, and the kind of file that contains them."
    photos = draw(st.lists(paths, min_size=1, max_size=6, unique=True))
    photos = [unicodedata.normalize(draw(forms), name) for name in photos]
    ids = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6, unique=True))
    names = {i: draw(st.one_of(spellings(photos), spellings(photos), st.just(""))) for i in ids}
    return photos, names, draw(st.sampled_from(("images", "boxes", "data")))

def plain(name):
    parts = unicodedata.normalize("NFC", name).replace("\\", "/").split("/")
    return [part for part in parts if part not in ("", ".", "..")]

def shared(a, b):
    "Return the number of parts of the shorter name if the longer one ends with it, else 0."
    k = min(len(a), len(b))
    return k if k and a[len(a)-k:] == b[len(b)-k:] else 0

def expected(names, photos):
    "Compare every name with every photo. Return image -> photo, the ambiguous images, and the unnamed photos."
    bare = not any(name.lower().endswith(".jpg") for name in names.values())   # `labels/a` names a.jpg
    parts = {p: plain(p.removesuffix(".jpg") if bare else p) for p in photos}
    length = {(i, p): shared(plain(name), parts[p]) for i, name in names.items() for p in photos}
    found, unsure, spare = {}, set(), set(photos)
    for k in range(9, 0, -1):                                      # longer matches first
        level = {(i, p) for (i, p), n in length.items() if n == k and p in spare and i not in {*found, *unsure}}
        for i, p in level:
            if any((j == i) != (q == p) for j, q in level): unsure.add(i)
            else: found[i] = p
        spare -= {p for _, p in level}
    return found, unsure, spare

def write(folder, names, how):
    "Write a file of detections, and perhaps one for --data; return their paths."
    boxes = [box(i) for i in names]
    if how == "images": write_json(folder/"found.json", entries(names, boxes))
    elif how == "boxes":
        write_json(folder/"found.json", [box(i, file_name=name) if name else box(i) for i, name in names.items()])
    else:
        write_json(folder/"found.json", boxes)
        write_json(folder/"names.json", entries(names))
    return folder/"found.json", folder/"names.json" if how == "data" else None

@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_caption_never_gets_a_photo_that_its_file_does_not_name(case):
    photos, names, how = case
    assume(any(names.values()))
    found, unsure, spare = expected(names, photos)
    keys = [tuple(plain(name)) for name in names.values() if plain(name)]
    with TemporaryDirectory() as folder:
        folder = Path(folder)
        for n, name in enumerate(photos): paint(folder/"in"/name, n)
        files = write(folder, names, how)
        if len(set(keys)) < len(keys) or not (found or unsure):
            with pytest.raises(NocError, match="names image .* and image|none of its"):
                detected(*files, images=folder/"in")
            return
        source = detected(*files, images=folder/"in")
        seen = {i: source.photo(i) for i in source.ids}
        beside = {i: photos[shown(photo)] for i, photo in seen.items() if not isinstance(photo, NocError)}
        for i, photo in beside.items():                            # every caption has the photo that its file names
            left = source.regions([i])[0].boxes[0, 0].item()*SIZE[0]
            assert found[i] == photo and round(left) == i
        assert beside == found                                     # and every named photo is found
        refused = {i: str(photo) for i, photo in seen.items() if i not in beside}
        assert {i for i in refused if i > 0} == unsure and all("fits" in refused[i] for i in unsure)
        unnamed = {text for i, text in refused.items() if i < 0}
        assert unnamed == {f"{p}: expected its name in {files[how == 'data']}" for p in spare}

# ---- formats that only some versions of Pillow can read

@pytest.mark.parametrize("kind, ending, brings", [("AVIF", "avif", "Pillow 11.3"), ("HEIF", "heic", "pillow-heif")])
def test_photos_of_phones_are_decoded_or_the_error_names_a_package(tmp_path, monkeypatch, kind, ending, brings):
    monkeypatch.setattr("noc_nb.models.photos._image_formats", lambda: _FORMATS)
    (tmp_path/f"x.{ending}").write_bytes(b"\0\0\0\x18ftyp" + ending.encode() + bytes(99))
    with pytest.raises(NocError, match=f"x.{ending}: expected a whole image .*{brings}"):
        open_image(tmp_path/f"x.{ending}")
    monkeypatch.undo()
    if kind not in _image_formats(): pytest.skip(f"nothing here reads {kind}: {brings} does")
    red = Image.new("RGB", (64, 48), (200, 0, 0))
    red.save(tmp_path/f"a.{ending}", kind)
    (tmp_path/f"a.{ending}").rename(tmp_path/"a")                     # recognised by its first bytes
    files = {f.name: open_image(f) for f in image_files(tmp_path) if f.name == "a"}
    assert files["a"].size == (64, 48) and abs(files["a"].getpixel((9, 9))[0] - 200) < 9

# ---- the commands

@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    "Return a function that runs a command in an empty folder, and returns its exit status and lines of standard error."
    monkeypatch.chdir(tmp_path)
    def run(*words):
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        try: main()
        except SystemExit as e: return e.code, capsys.readouterr().err.splitlines()
        return 0, capsys.readouterr().err.splitlines()
    return run

def test_digits_do_not_decide_where_names_do(typed):
    "If a file names its photos, digits in names do not matter, even if they are the ids of other images."
    for n, name in enumerate(("IMG_0007", "IMG_0012", "IMG_0013")): paint(f"photos/{name}.jpg", n)
    names = {12: "frames/IMG_0007.jpg", 7: "frames/IMG_0012.jpg", 13: "frames/IMG_0099.jpg"}
    write_json(Path("found.json"), entries(names, map(box, names)))
    status, told = typed("noc_caption", "found.json", "--images", "photos", "--model", "toy", "--out", "c.jsonl")
    assert status == 0 and told == [
        "found.json: images without a photo in photos, 1 of 3: 'frames/IMG_0099.jpg'",
        "photos: photos that found.json does not name, 1 of 3: 'IMG_0013.jpg'",
        "found.json: no width and height of 2 images; their boxes are taken as pixels of the upright photos",
        "3 images, 1 without a caption; lines in c.jsonl"]
    lines = [json.loads(line) for line in Path("c.jsonl").read_text().splitlines()]
    assert [(line["image_id"], line["file"]) for line in lines] == [
        (12, "IMG_0007.jpg"), (7, "IMG_0012.jpg"), (-1, "IMG_0013.jpg")]
    assert [round(line["boxes"][0]["box"][0]*SIZE[0]) for line in lines[:2]] == [12, 7]
    assert lines[2]["error"] == "IMG_0013.jpg: expected its name in found.json"

def test_a_file_of_other_photos_is_refused_in_one_line(typed):
    paint("photos/IMG_0007.jpg", 0)
    write_json(Path("found.json"), entries({7: "frames/IMG_0007.JPG", 8: "b.jpg"}, map(box, (7, 8))))
    assert typed("noc_caption", "found.json", "--images", "photos", "--model", "toy") == (2, [
        "error: found.json: none of its 2 names matches a photo in photos: expected names like 'IMG_0007.jpg', "
        "found 'frames/IMG_0007.JPG'; 'frames/IMG_0007.JPG' and 'IMG_0007.jpg' differ in case"])

def test_a_name_that_fits_two_photos_fails_its_image(typed):
    for n, name in enumerate(("a.jpg", "sub/a.jpg", "b.jpg")): paint(f"photos/{name}", n)
    write_json(Path("found.json"), entries({7: "a.jpg", 8: "b.jpg"}, map(box, (7, 8))))
    status, told = typed("noc_caption", "found.json", "--images", "photos", "--model", "toy", "--out", "c.jsonl")
    assert status == 0 and told[0].startswith("found.json: images that match several photos, or share one, 1 of 2: ")
    lines = {x["image_id"]: x for x in map(json.loads, Path("c.jsonl").read_text().splitlines())}
    assert lines.keys() == {7, 8} and "caption" in lines[8]
    assert lines[7]["error"] == "a.jpg: fits 'a.jpg', 'sub/a.jpg'; expected one photo for each name"

def test_scores_get_the_photos_that_the_references_name(typed):
    for n, name in enumerate(("1.jpg", "2.jpg")): paint(f"photos/{name}", n)
    names = {1: "val/2.jpg", 2: "val/1.jpg", 3: "val/3.jpg"}
    captions = [dict(id=i, image_id=i, caption="a dog") for i in names]
    write_json(Path("refs.json"), entries(names, captions))
    write_json(Path("ours.json"), captions)
    assert {i: shown(photos_by_id("photos", "refs.json")[i]) for i in (1, 2)} == {1: 1, 2: 0}
    status, told = typed("noc_eval", "--captions", "ours.json", "--data", "refs.json", "--images", "photos",
                         "--metrics", "C", "--samples", 0, "--out", "r")
    assert status == 0 and "refs.json: images without a photo in photos, 1 of 3: 'val/3.jpg'" in told
    write_json(Path("ours.json"), [dict(image_id=i, file=f"{i}.jpg", caption=f"a dog on {i}") for i in names])
    assert typed("noc_eval", "--captions", "ours.json", "--data", "refs.json", "--samples", 0, "--out", "s")[0] == 0
    assert read_report("s").images.caption.to_dict() == {1: "a dog on 2", 2: "a dog on 1", 3: "a dog on 3"}
    assert read_report("r").judged.named == names                      # later commands use these names to find photos
    compared = "noc_eval", "--compare", "r", "s", "--samples", 9, "--images", "photos", "--out", "both"
    assert "the captions: images without a photo in photos, 1 of 3: 'val/3.jpg'" in typed(*compared)[1]

BAD_CAPTIONS = {
    "ours.json": ('[{"file_name": "a.jpg", "caption": "a dog"}, {"file_name": "b.jpg", "caption": 7}]',
                  "entry 1: image b.jpg: caption: expected a string, found 7"),
    "ours.jsonl": ('{"file": "x.jpg", "error": "x.jpg: truncated"}\n{"file": "b.jpg", "capt\n\n'
                   '{"file": "a.jpg", "caption": "a dog"}\n', "line 2: not JSON: expected an object")}

@pytest.mark.parametrize("name", BAD_CAPTIONS)
def test_bad_captions_are_left_out_on_request(typed, name):
    refs = [dict(file_name=name, caption="a dog on grass") for name in ("a.jpg", "b.jpg")]
    write_json(Path("refs.json"), refs)
    content, line = BAD_CAPTIONS[name]
    Path(name).write_text(content)
    words = "noc_eval", "--captions", name, "--data", "refs.json", "--metrics", "C", "--samples", 0, "--out", "r"
    status, told = typed(*words)
    assert status and told == [f"error: {name}: {line} (--skip-bad leaves it out)"]
    status, told = typed(*words, "--skip-bad")
    assert status and "no caption for it; 1 of 2" in told[-1]           # a missing caption is a separate error
    status, told = typed(*words, "--skip-bad", "--missing", "empty")
    assert status == 0 and any(f"{line}; left out (such captions: 1)" in text for text in told)
    assert read_report("r")["counts"]["bad"] == 1 and "1 bad" in Path("r/report.md").read_text()

def test_the_page_shows_the_photo_of_its_detections(tmp_path, capsys):
    "The page shows each example with its own photo, and uses only the boxes of an uploaded photo."
    for n, name in enumerate(("IMG_0007.jpg", "IMG_0012.jpg", "x.jpg")): paint(tmp_path/"in"/name, n)
    names = {12: "frames/IMG_0007.jpg", 7: "frames/IMG_0012.jpg", 13: "bad.jpg"}
    (tmp_path/"in/bad.jpg").write_bytes(b"")
    write_json(tmp_path/"found.json", entries(names, map(box, names)))
    toy = NovelCaptioner.from_pretrained("toy", device="cpu")
    with command_lines(): studio = _Studio(toy, source=detected(tmp_path/"found.json", images=tmp_path/"in"))
    assert "left out of the examples: bad.jpg: expected a whole image" in capsys.readouterr().err
    views = [studio.example(n) for n in range(len(studio.examples))]
    assert [(v.name, shown(v.image), round(v.regions.boxes[0, 0].item()*SIZE[0])) for v in views] == [
        ("IMG_0007.jpg", 0, 12), ("IMG_0012.jpg", 1, 7)]
    sent = studio.upload(tmp_path/"in/IMG_0012.jpg", tmp_path/"found.json")
    assert round(sent.regions.boxes[0, 0].item()*SIZE[0]) == 7
    with pytest.raises(NocError, match="none of its"): studio.upload(tmp_path/"in/x.jpg", tmp_path/"found.json")
    size, corners = "<width>40</width><height>30</height>", "<xmin>9</xmin><ymin>1</ymin><xmax>19</xmax><ymax>20</ymax>"
    dog = f"<object><name>dog</name><bndbox>{corners}</bndbox></object>"
    (tmp_path/"x.xml").write_text(f"<annotation><size>{size}</size>{dog}</annotation>")
    sent = studio.upload(*_paths([tmp_path/"x.xml", tmp_path/"in/x.jpg"])[0])
    assert round(sent.regions.boxes[0, 0].item()*SIZE[0]) == 8

def test_a_store_with_ids_of_other_images_is_refused_in_training(tmp_path):
    write_json(tmp_path/"captions.json", entries({1: "zebra.jpg", 2: "apple.jpg"}))
    kept = [Regions([[0, 0, .5, .5]], [2], [.9], image_id=i) for i in (1, 2)]
    def check(name, *photos):
        rows = "".join(json.dumps(dict(id=i, name=photo)) + "\n" for i, photo in enumerate(photos, 1))
        store = RegionStore.write(tmp_path/name, kept, {"images.jsonl": rows})
        _check_names(store, None, tmp_path/"captions.json", None)
    check("good", "in/zebra.jpg", "in/apple.jpg")
    with pytest.raises(NocError, match="other: image 1: its photo 'apple.jpg' belongs to image 2 in .*captions.json"):
        check("other", "apple.jpg", "zebra.jpg")

# ---- files that name photos

def photos_of(source):
    "Return image -> number of its photo, or the error."
    found = {i: source.photo(i) for i in source.ids}
    return {i: str(photo) if isinstance(photo, NocError) else shown(photo) for i, photo in found.items()}

def test_every_kind_of_file_names_photos(tmp_path):
    "Photos can be named in a list of boxes (compressed or not, also only some), in Parquet, and in a store."
    for n, name in enumerate(("8.jpg", "7.jpg")): paint(tmp_path/"in"/name, n)
    names, good = {7: "up/8.jpg", 8: "up/7.jpg"}, {7: 0, 8: 1}
    boxes = [box(9), *(box(i, file_name=name) for i, name in names.items()), box(7)]
    write_json(tmp_path/"list.json", boxes)
    (tmp_path/"packed.json.gz").write_bytes(gzip.compress(json.dumps(boxes).encode()))
    numbers = dict(category_id=[2, 2], cx=[.5, .5], cy=[.5, .5], w=[.1, .1], h=[.1, .1], score=[.9, .9])
    columns = dict(image_id=[7, 8], file_name=[*names.values()]) | numbers
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path/"found.parquet")
    rows = "".join(json.dumps(dict(id=i, name=name)) + "\n" for i, name in {**names, -1: "torn.tar"}.items())
    RegionStore.write(tmp_path/"store", [Regions([[0, 0, .5, .5]], [2], [.9], image_id=i) for i in names],
                      {"images.jsonl": rows})
    for file in "list.json", "packed.json.gz", "found.parquet", "store":
        assert photos_of(detected(tmp_path/file, images=tmp_path/"in")) == good

def test_own_names_are_joined_to_those_of_the_data(tmp_path):
    "Names in the detections and in --data are combined; one name for two images, or two photos of one, is an error."
    for n, name in enumerate(("a.jpg", "b.jpg", "c.jpg")): paint(tmp_path/"in"/name, n)
    def source(own, data):
        write_json(tmp_path/"found.json", entries(own, map(box, {**own, **data})))
        write_json(tmp_path/"names.json", entries(data))
        return detected(tmp_path/"found.json", tmp_path/"names.json", tmp_path/"in")
    found = photos_of(source({7: "x/a.jpg", 8: ""}, {7: "COCO_7.jpg", 8: "b.jpg", 9: "c.jpg"}))
    assert found == {7: 0, 8: 1, 9: 2}
    with pytest.raises(NocError, match=r"found.json, .*names.json: 'a.jpg': names image 7 and image 8: expected one"):
        source({7: "a.jpg"}, {8: "a.jpg"})
    found = photos_of(source({7: "a.jpg", 8: "c.jpg"}, {7: "b.jpg"}))
    assert found[8] == 2 and found[7].endswith("fits 'a.jpg', 'b.jpg'; expected one photo for each name")

def test_a_coco_root_names_its_photos(tmp_path):
    "A COCO folder gives photos its ids, whatever their digits, also in a tar; names from the caller have priority."
    for n, name in enumerate(("1.jpg", "2.jpg", "3.jpg")): paint(tmp_path/"images"/name, n)
    with tarfile.open(tmp_path/"more.tar", "w") as tar: tar.add(tmp_path/"images/1.jpg", "val/4.jpg")
    write_json(tmp_path/"annotations/captions_val.json", entries({2: "1.jpg", 1: "2.jpg", 9: "val/4.jpg"}))
    found = {f.id: f.name for f in image_files(tmp_path)}
    assert found == {2: "images/1.jpg", 1: "images/2.jpg", 9: "more.tar/val/4.jpg"}
    assert [f.id for f in image_files(tmp_path, [("1.jpg", 5)])] == [5, -1, -2, -3]
    write_json(tmp_path/"annotations/captions_train.json", entries({7: "1.jpg", 8: "3.jpg"}))
    with pytest.raises(NocError, match="annotations: '1.jpg': names image"): image_files(tmp_path)

@pytest.mark.parametrize("boxes, message", [
    ([box(7, file_name=7)], "image 7: file_name 7: expected a string"),
    ([box(7, file_name="a.jpg"), box(7, file_name="b.jpg")],
     "file_name 'b.jpg': expected 'a.jpg', as for its other boxes"),
    ([box(7, file_name="a.jpg"), box(8, file_name=".\\a.jpg")],
     "names image 7 and image 8: expected one image for each name")])
def test_boxes_that_name_photos_badly_are_refused(tmp_path, boxes, message):
    paint(tmp_path/"in/a.jpg", 0)
    write_json(tmp_path/"found.json", boxes)
    with pytest.raises(NocError) as e: detected(tmp_path/"found.json", images=tmp_path/"in")
    assert message in str(e.value) and "\n" not in str(e.value)

def test_one_name_in_a_thousand_folders_is_matched_at_once():
    "Matching compares only pairs that fit, so its work grows with the number of names, not with its square."
    names = [name_parts(f"scene{n}/rgb.png") for n in range(1000)]
    assert len(list(_fits(names, names))) == 1000
    assert len(list(_fits([("rgb.png",), *names], names))) == 2000
    ids, clashes = match_photos([("rgb.png", 1)], ["/".join(parts) for parts in names], "found.json", "photos")
    assert set(ids) == {None} and len(clashes[0].photos) == 1000 and clashes[0].why.count("scene") == 10
    ids, clashes = match_photos([(f"scene{n}/rgb.png", n) for n in range(1000)], ["rgb.png"], "found.json", "photos")
    assert ids == [None] and len(clashes) == 1000 and all(c.why.count("scene") == 10 for c in clashes)
