"""docs/forms.md lists the forms of files that the readers take, and the tools that write them. `python tests/forms.py`
generates that page from the rows below, and test_forms.py reads the small example file of each row."""
import base64, gzip, io, json, tarfile
import numpy as np
import pyarrow, pyarrow.parquet
from PIL import Image
from book import ROOT
from noc_nb.files.exports import read_export
from noc_nb.files.formats import read_hdf5, read_npz, read_tsv
from noc_nb.files.readers import open_detections, read_captions, read_split, read_vectors
from noc_nb.files.store import RegionStore
from noc_nb.heldout import COCO_CLASSES
from noc_nb.models.names import read_classes
from noc_nb.models.photos import image_files, open_image
from noc_nb.regions import Regions
from noc_nb.scores.quality import word_list

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

def table(sign, head="file_name{}caption"): return "\n".join([head.format(sign), *(sign.join(p) for p in PAIRS)]) + "\n"

def rows(**columns): return [dict(zip(columns, row)) for row in zip(*columns.values())]

NAMES, SAID = zip(*PAIRS)
COCO = rows(id=[1, 2, 3], image_id=[IDS[name] for name in NAMES], caption=SAID)
KARPATHY = dict(images=[dict(filename=name, filepath="val2014", cocoid=IDS[name], split=part,
                             sentences=[dict(raw=text) for text in TEXTS[name]])
                        for name, part in (("a.jpg", "restval"), ("b.jpg", "test"))], dataset="coco")

def texts(path):
    "Return the captions by the names of photos, or by their order if a file has only ids."
    found = read_captions(path)
    names = {i: name.rpartition("/")[2].removesuffix(".jpg") + ".jpg" for name, i in found.names}
    return {names.get(i, name): own for (i, own), name in zip(found.texts.items(), TEXTS)}

def parts(path): return {part: read_split(path, [7, 9])[part] for part in SPLIT}

def boxes(path):
    found = read_export(path)
    found = open_detections(path) if found is path else found
    table, errors, _ = found.table({7: (100, 100)}, COCO_CLASSES)
    assert not errors
    return [(table[i].labels.tolist(), table[i].boxes.tolist(), str(found.texts.get(i, i))[:1]) for i in table]

FOUND, DRAWN = ([([18], [[0, 0, .5, .5]], image)] for image in "7a")
VALUE = dict(x=0, y=0, width=50, height=50, rotation=0, rectanglelabels=["Dog"])
SHAPE = dict(type="rectanglelabels", original_width=100, original_height=100, image_rotation=0, value=VALUE)
FEATURES = np.eye(2, 4, dtype=np.float32)
CORNERS = np.array([[0, 0, 50, 50], [10, 10, 60, 60]], np.float32)

def features(path):
    "Return the image id and the features of the first regions in a file or folder."
    read = {".hdf5": read_hdf5, ".tsv": read_tsv}.get(path.suffix, read_npz)
    regions = RegionStore(path)[7] if (path/"meta.json").is_file() else next(iter(read(path)))
    return regions.image_id, sorted(map(tuple, regions.features.float().tolist()), reverse=True)

def hdf5(path, **more):
    import h5py
    with h5py.File(path, "w") as f:
        for name, array in dict(features=FEATURES, boxes=CORNERS, **more).items(): f[f"7_{name}"] = array

def npz(path):
    path.mkdir()
    np.savez(path/"7.npz", x=FEATURES, bbox=CORNERS, image_w=100, image_h=100)

def text(array): return base64.b64encode(array.tobytes()).decode()

def store(path): RegionStore.write(path, [Regions(CORNERS/100, [18, 17], [.9, .8], FEATURES, 7, (100, 100))])

def photo(path): Image.new("RGB", (9, 9)).save(path)

def encoded(name):
    out = io.BytesIO()
    Image.new("RGB", (9, 9)).save(out, "JPEG")
    return out.getvalue()

def photos(path):
    "Open the photos of a source, and return their file names."
    files = image_files(path)
    assert all(open_image(f).size == (9, 9) for f in files)
    return sorted(f.name.rpartition("/")[2] for f in files)

def archive(path):
    with tarfile.open(path, "w") as tar:
        for name in TEXTS:
            about = tarfile.TarInfo(name)
            about.size = len(encoded(name))
            tar.addfile(about, io.BytesIO(encoded(name)))

def root(path):
    written(path/"annotations/captions_val2014.json", dict(images=IMAGES, annotations=COCO))
    written(path/"val2014", dict.fromkeys(TEXTS, photo))

def names(path): return {i: c.name for i, c in read_classes(path).items()}

SPLIT, CLASSES = dict(train=[7], test=[9]), {1: "dog", 2: "cat"}

# section: the commands and options, the reader, its expected result; then form, tool, file name, content
FORMS = {
    "Captions": ("`noc_eval --captions` and `--data`; `--captions` of `noc_train` and `noc_reproduce`", texts, TEXTS, [
        ("COCO's `annotations`, with `images`", "COCO, nocaps, most annotation tools", "captions.json",
         dict(images=IMAGES, annotations=COCO)),
        ("the same, compressed by gzip", "the same tools", "captions.json.gz", dict(images=IMAGES, annotations=COCO)),
        ("`annotations` alone", "scripts", "alone.json", dict(annotations=COCO)),
        ("a list of objects with `image_id`", "COCO's results format, VLM evaluation kits", "results.json", COCO),
        ("a list of objects with `file_name`", "scripts", "named.json", rows(file_name=NAMES, caption=SAID)),
        ("an object that maps names or ids to captions", "scripts", "dictionary.json", TEXTS),
        ("Karpathy's `images` with `sentences`", "dataset_coco.json and similar files", "dataset_coco.json", KARPATHY),
        ("one JSON object per line", "`noc_caption`; datasets' `metadata.jsonl`", "lines.jsonl",
         "".join(json.dumps(row) + "\n" for row in rows(file_name=NAMES, text=SAID))),
        ("CSV", "pandas; datasets' `metadata.csv`", "t.csv", table(",")),
        ("CSV with a byte order mark and semicolons", "Excel, in much of Europe", "s.csv", "\ufeff" + table(";")),
        ("a table in UTF-16, with tabs", "Excel's Unicode text", "UTF-16.txt", table("\t")),
        ("the same without a byte order mark", "scripts on Windows", "UTF-16LE.txt", table("\t")),
        ("`image_name| comment`", "Flickr30k's results.csv", "bars.csv", table("|", "image_name{} comment")),
        ("`image,caption`", "Flickr8k's captions.txt", "captions.txt", table(",", "image,caption")),
        ("Parquet, by `file_name` or `image_id`", "datasets, pandas", "t.parquet",
         dict(file_name=list(TEXTS), captions=list(TEXTS.values()))),
        ("a folder of `.txt` or `.caption` files, one caption per line", "kohya's sd-scripts, TagGUI", "texts",
         {name.replace("jpg", "txt"): "\n".join(own) + "\n" for name, own in TEXTS.items()})]),
    "Splits": ("`--split`", parts, SPLIT, [
        ("lists of image ids, by part", "scripts", "split.json", dict(SPLIT, val=[])),
        ("the published split of held-out COCO", "Neural Baby Talk's split_noc_coco.json", "split_noc_coco.json",
         dict(train={"7": 1}, val_train={}, test_train={"9": 1}, val={}, test={"9": 1})),
        ("Karpathy's captions with `split`", "dataset_coco.json", "k.json", KARPATHY)]),
    "Detections": ("`noc_caption`, and `--detections` of `noc_app`, `noc_train` and `noc_reproduce`", boxes, FOUND, [
        ("a list of boxes", "COCO's results format: detectron2, mmdetection", "results.json", [BOX]),
        ("an object with `annotations`", "COCO", "found.json", dict(images=IMAGES, annotations=[BOX])),
        ("the same without scores: boxes that people drew", "COCO; CVAT, Roboflow, supervision", "drawn.json",
         dict(images=IMAGES, annotations=[{k: BOX[k] for k in BOX if k != "score"}])),
        ("Parquet with `cx`, `cy`, `w`, `h`", "`write_detections`", "found.parquet",
         dict(image_id=[7], category_id=[18], cx=[.25], cy=[.25], w=[.5], h=[.5], score=[.5]))]),
    "Boxes of annotation tools": ("the same commands and options; photos are matched by name", boxes, DRAWN, [
        ("a folder of labels, with `data.yaml`, `classes.txt` or `obj.names`", "ultralytics, Roboflow", "yolo",
         {"labels/a.txt": "16 0.25 0.25 0.5 0.5\n", "data.yaml": "names: {0: person, 16: dog}\n"}),
        ("the same with confidences, in the folder or in `labels/`", "`yolo predict save_txt save_conf`", "predict",
         {"a.txt": "1 0.25 0.25 0.5 0.5 0.9\n", "classes.txt": "cat\ndog\n"}),
        ("the same with outlines, whose bounding boxes are used", "segmentation, oriented boxes", "outlines",
         {"labels/a.txt": "0 0 0 0.5 0.1 0.4 0.5\n", "classes.txt": "dog\n"}),
        ("a folder of XML files, named like the photos", "Pascal VOC; LabelImg, Roboflow", "voc",
         {"a.xml": "<annotation><filename>a.jpg</filename><size><width>100</width><height>100</height></size>"
                   "<object><name>dog</name><difficult>0</difficult><bndbox><xmin>0</xmin><ymin>0</ymin>"
                   "<xmax>50</xmax><ymax>50</ymax></bndbox></object></annotation>"}),
        ("one XML file, \"CVAT for images\"", "CVAT", "cvat.xml",
         '<?xml version="1.0" encoding="utf-8"?>\n<annotations><version>1.1</version><image id="0" name="a.jpg" '
         'width="100" height="100"><box label="dog" source="manual" occluded="0" xtl="0.0" ytl="0.0" xbr="50.0" '
         'ybr="50.0" z_order="0"></box></image></annotations>'),
        ("CSV, with `*class-descriptions*.csv` beside it", "Open Images", "train-annotations-bbox.csv",
         {"train-annotations-bbox.csv": "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsGroupOf\n"
                                        "a,xclick,/m/0bt9lr,1,0.0,0.5,0.0,0.5,0,0\n",
          "class-descriptions-boxable.csv": "/m/0bt9lr,Dog\n"}),
        ("JSON with a list of tasks", "Label Studio", "tasks.json",
         [dict(id=1, data=dict(image="/data/upload/1/0a1b2c3d-a.jpg"), annotations=[dict(result=[SHAPE])])])]),
    "Regions with features": ("`--features` and `noc_caption`; `RegionStore.write` makes a store from the other forms",
                              features, (7, [(1, 0, 0, 0), (0, 1, 0, 0)]), [
        ("a region store", "`noc_features`", "store", store),
        ("HDF5 with `<id>_features`, perhaps `_boxes`; for `read_hdf5`", "several projects", "found.hdf5", hdf5),
        ("the same with `_cls_prob`", "M²'s coco_detections.hdf5", "coco_detections.hdf5",
         lambda path: hdf5(path, cls_prob=FEATURES)),
        ("a table with base64; for `read_tsv`", "bottom-up attention", "trainval.tsv",
         f"7\t100\t100\t2\t{text(CORNERS)}\t{text(FEATURES)}\n"),
        ("a folder of `<id>.npz`; for `read_npz`", "bottom-up attention in PyTorch", "npz", npz)]),
    "Photos": ("`noc_caption` and `noc_features`, and `--images` of other commands", photos, [*TEXTS], [
        ("a folder, with subfolders; photos are recognised by suffix or first bytes", "cameras, scripts", "photos",
         {"x/a.jpg": photo, "b.jpg": photo}),
        ("a folder in COCO's layout", "COCO", "COCO", root),
        ("tar archives", "webdataset, img2dataset", "00000.tar", archive),
        ("Parquet with a column of images", "datasets", "photos.parquet",
         dict(image=[dict(bytes=encoded(name), path=name) for name in TEXTS])),
        ("a list of file names, one per line", "scripts", "names.txt",
         {"names.txt": "a.jpg\nb.jpg\n", **dict.fromkeys(TEXTS, photo)})]),
    "Classes": ("`--classes`", names, CLASSES, [
        ("one name per line", "darknet's .names", "coco.names", "dog\ncat\n"),
        ("the same in UTF-16", "Notepad", "UTF-16.txt", "dog\ncat\n"),
        ("a table with names in its last column", "Open Images's descriptions", "classes.csv", "/m/1,dog\n/m/2,cat\n"),
        ("an object that maps ids to names", "transformers' id2label", "names.json", {"1": "dog", "2": "cat"}),
        ("COCO's `categories`", "COCO", "instances.json", dict(categories=rows(id=[1, 2], name=["dog", "cat"])))]),
    "Words": ("`--vectors` and `--add-words`", lambda path: [*read_vectors(path)], ["dog"], [
        ("one word and its numbers per line", "GloVe", "glove.txt", "dog 1 2\n"),
        ("the same after a line with two sizes", "word2vec's text format, fastText", "vec.txt", "1 2\ndog 1 2\n")]),
    "CHAIR's words": ("`noc_eval --synonyms`", lambda path: word_list({18: COCO_CLASSES[18]}, path)[0]["puppy"], {18}, [
        ("one line per object, its name first", "Hallucination's synonyms.txt", "synonyms.txt", "dog, puppy\n")])}

def page():
    "Return the page in Markdown."
    head = ("# Forms of files\n\n> The forms of files that the commands read, and the tools that write them\n\n"
            "`tests/test_forms.py` reads each example. Text is UTF-8, with or without a byte order mark, or UTF-16.\n"
            "Photos are matched by name ([data.md](data.md)); suffixes are ignored if one of the names has none.\n")
    def section(title, option, forms):
        lines = [f"| {form} | {tool} | `{file}` |" for form, tool, file, _ in forms]
        top = f"\n## {title}\n\nRead by {option}.\n\n| form | written by | example |\n|---|---|---|"
        return "\n".join([top, *lines]) + "\n"
    return head + "".join(section(title, option, forms) for title, (option, _, _, forms) in FORMS.items())

if __name__ == "__main__": PAGE.write_text(page(), encoding="utf-8")
