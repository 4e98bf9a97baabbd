"""docs/forms.md lists every form of file that the readers take, and who writes it: `python tests/forms.py` writes it
from the rows below, and test_forms.py reads the small file of each."""
import gzip, json
import pyarrow, pyarrow.parquet
from book import ROOT
from noc_nb.files.readers import read_captions, read_detections, read_split, read_vectors
from noc_nb.heldout import COCO_CLASSES
from noc_nb.models.names import read_classes
from noc_nb.scores.quality import word_list

PAGE = ROOT/"docs/forms.md"
TEXTS = {"a.jpg": ["A dog."], "b.jpg": ["Two cats", "Cats"]}
PAIRS = [(name, text) for name, texts in TEXTS.items() for text in texts]
IDS = {"a.jpg": 7, "b.jpg": 9}
IMAGES = [dict(id=i, file_name=name, width=100, height=100) for name, i in IDS.items()]
BOX = dict(image_id=7, category_id=18, bbox=[0, 0, 50, 50], score=.5)

def written(path, content):
    "Write a text, JSON, columns of a Parquet file, or the texts of a folder."
    if isinstance(content, str): path.write_text(content, "utf-16" if "UTF-16" in path.stem else "utf-8")
    elif path.suffix == ".parquet": pyarrow.parquet.write_table(pyarrow.table(content), path)
    elif path.suffix == ".gz": path.write_bytes(gzip.compress(json.dumps(content).encode()))
    elif path.suffix: path.write_text(json.dumps(content))
    else:
        path.mkdir()
        for name, text in content.items(): (path/name).write_text(text)
    return path

def table(sign, head="file_name{}caption"): return "\n".join([head.format(sign), *(sign.join(p) for p in PAIRS)]) + "\n"

def rows(**columns): return [dict(zip(columns, row)) for row in zip(*columns.values())]

NAMES, SAID = zip(*PAIRS)
COCO = rows(id=[1, 2, 3], image_id=[IDS[name] for name in NAMES], caption=SAID)
KARPATHY = dict(images=[dict(filename=name, filepath="val2014", cocoid=IDS[name], split=part,
                             sentences=[dict(raw=text) for text in TEXTS[name]])
                        for name, part in (("a.jpg", "restval"), ("b.jpg", "test"))], dataset="coco")

def texts(path):
    "Captions by the names of photos, or by their order where a file has ids alone."
    found = read_captions(path)
    names = {i: name.rpartition("/")[2].removesuffix(".jpg") + ".jpg" for name, i in found.names}
    return {names.get(i, name): own for (i, own), name in zip(found.texts.items(), TEXTS)}

def parts(path): return {part: read_split(path, [7, 9])[part] for part in SPLIT}

def boxes(path): return [read_detections(path, {7: (100, 100)})[7].labels.tolist()]

def names(path): return {i: c.name for i, c in read_classes(path).items()}

SPLIT, CLASSES = dict(train=[7], test=[9]), {1: "dog", 2: "cat"}

# what is read: by which option, reader, what it gives; then form, who writes it, name of a file, its content
FORMS = {
    "Captions": ("`noc_eval --captions` and `--data`; `--captions` of `noc_train`, `noc_reproduce`", texts, TEXTS, [
        ("COCO's `annotations`, with `images`", "COCO, nocaps, most annotation tools", "captions.json",
         dict(images=IMAGES, annotations=COCO)),
        ("the same, packed", "the same", "captions.json.gz", dict(images=IMAGES, annotations=COCO)),
        ("`annotations` alone", "scripts", "alone.json", dict(annotations=COCO)),
        ("a list by `image_id`", "COCO's results format, VLM evaluation kits", "results.json", COCO),
        ("a list by `file_name`", "scripts", "named.json", rows(file_name=NAMES, caption=SAID)),
        ("a dictionary by name or id", "scripts", "dictionary.json", TEXTS),
        ("Karpathy's `images` with `sentences`", "dataset_coco.json and its like", "dataset_coco.json", KARPATHY),
        ("an object a line", "`noc_caption`; datasets' `metadata.jsonl`", "lines.jsonl",
         "".join(json.dumps(row) + "\n" for row in rows(file_name=NAMES, text=SAID))),
        ("CSV", "pandas; datasets' `metadata.csv`", "t.csv", table(",")),
        ("the same with a byte order mark and semicolons", "Excel, in much of Europe", "s.csv", "\ufeff" + table(";")),
        ("the same in UTF-16, with tabs", "Excel's Unicode text", "UTF-16.txt", table("\t")),
        ("`image_name| comment`", "Flickr30k's results.csv", "bars.csv", table("|", "image_name{} comment")),
        ("`image,caption`", "Flickr8k's captions.txt", "captions.txt", table(",", "image,caption")),
        ("Parquet, by `file_name` or `image_id`", "datasets, pandas", "t.parquet",
         dict(file_name=list(TEXTS), captions=list(TEXTS.values()))),
        ("a folder of `.txt` or `.caption`, a caption a line", "kohya's sd-scripts, TagGUI", "texts",
         {name.replace("jpg", "txt"): "\n".join(own) + "\n" for name, own in TEXTS.items()})]),
    "Splits": ("`--split`", parts, SPLIT, [
        ("lists of ids by part", "scripts", "split.json", dict(SPLIT, val=[])),
        ("the published held-out COCO", "Neural Baby Talk's split_noc_coco.json", "split_noc_coco.json",
         dict(train={"7": 1}, val_train={}, test_train={"9": 1}, val={}, test={"9": 1})),
        ("Karpathy's captions", "dataset_coco.json", "k.json", KARPATHY)]),
    "Detections": ("`noc_caption`, `noc_app --detections`, `--detections`", boxes, [[18]], [
        ("a list of boxes", "COCO's results format: detectron2, mmdetection", "results.json", [BOX]),
        ("an object with `annotations`", "COCO", "found.json", dict(images=IMAGES, annotations=[BOX])),
        ("Parquet with `cx`, `cy`, `w`, `h`", "`write_detections`", "found.parquet",
         dict(image_id=[7], category_id=[18], cx=[.25], cy=[.25], w=[.5], h=[.5], score=[.5]))]),
    "Classes": ("`--classes`", names, CLASSES, [
        ("a name a line", "darknet's .names", "coco.names", "dog\ncat\n"),
        ("a table whose rows end in names", "Open Images's descriptions", "classes.csv", "/m/1,dog\n/m/2,cat\n"),
        ("names by id", "transformers' id2label", "names.json", {"1": "dog", "2": "cat"}),
        ("COCO's `categories`", "COCO", "instances.json", dict(categories=rows(id=[1, 2], name=["dog", "cat"])))]),
    "Words": ("`--vectors`, `--add-words`", lambda path: [*read_vectors(path)], ["dog"], [
        ("a word and numbers a line", "GloVe", "glove.txt", "dog 1 2\n"),
        ("the same after a line of sizes", "word2vec's text format, fastText", "vec.txt", "1 2\ndog 1 2\n")]),
    "CHAIR's words": ("`noc_eval --synonyms`", lambda path: word_list({18: COCO_CLASSES[18]}, path)[0]["puppy"], {18}, [
        ("a line an object, its name first", "Hallucination's synonyms.txt", "synonyms.txt", "dog, puppy\n")])}

def page():
    "The page, in Markdown."
    head = ("# Forms of files\n\n> What is read, and who writes it\n\nWritten by `tests/forms.py`, from rows that "
            "`tests/test_forms.py` reads. Text is UTF-8, with or without a byte order mark, or UTF-16 with its mark.\n"
            "Photos are matched by name ([data.md](data.md)); a side without endings is compared without them.\n")
    def section(title, option, forms):
        lines = [f"| {form} | {tool} | `{file}` |" for form, tool, file, _ in forms]
        top = f"\n## {title}\n\nBy {option}.\n\n| form | who writes it | a file |\n|---|---|---|"
        return "\n".join([top, *lines]) + "\n"
    return head + "".join(section(title, option, forms) for title, (option, _, _, forms) in FORMS.items())

if __name__ == "__main__": PAGE.write_text(page(), encoding="utf-8")
