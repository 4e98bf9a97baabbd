"""Test the six ways to use the package exactly as README.md describes them, and the page of `noc_app`.

Each test runs the README's lines for one way, in an empty folder with files of the names that they use, and checks
the result. Tests add only options that make the runs small."""
import json, os, random, re, shlex, signal, socket, subprocess, sys
from pathlib import Path
import numpy as np
import pytest
from PIL import Image
from book import ROOT, none_of
from readme import README
from noc_nb.commands.cli import main
from noc_nb.files.drawing import make_toy
from noc_nb.models.photos import random_weights

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = "train_selector.epochs=1", "xe.epochs=1", "captioner.d_model=32", "captioner.d_ff=64"

def ways():
    "Return the title of each way -> the text of README.md about it."
    section = re.search(r"^## Six ways to use it$(.*?)^## ", README.read_text(encoding="utf-8"), re.M | re.S)[1]
    return dict(part.split(".**", 1) for part in re.split(r"^\*\*", section, flags=re.M)[1:])

WAYS = ways()

def steps(who):
    "Return the lines of a way's code block."
    return re.search(r"^```\w+\n(.*?)^```$", WAYS[who], re.M | re.S)[1].splitlines()

@pytest.fixture
def typed(tmp_path, monkeypatch):
    "Return a function that runs a line of the README in an empty folder, with additional options."
    monkeypatch.chdir(tmp_path)
    def run(line, *more):
        command, *words = shlex.split(line, comments=True)
        monkeypatch.setattr(sys, "argv", [command, *words, *map(str, more)])
        main()
    return run

def lines(path): return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]

def test_the_readme_describes_each_way_in_six_lines():
    assert len(WAYS) == 6
    def told(text): return [line for line in text.splitlines() if line.strip() and not line.startswith("```")]
    none_of((f"{who}: {len(told(text))} lines" for who, text in WAYS.items() if len(told(text)) > 6),
            "the README tells each way in at most six lines")

@pytest.mark.slow
def test_a_researcher_gets_two_tables(typed):
    "A researcher gets two tables: one of the method, and one of a variant."
    make_toy("small", train=60, val=20, test=20)
    small = "--tables 1 --rows none,selector --training xe --metrics C --data small".split()
    again, changed = steps("To check the paper or improve on it")
    typed(again, *small, "--set", *SMALL)
    typed(changed.replace("search.k=3", " ".join(["search.k=3", *SMALL])), *small)
    for folder in "run", "beam3":
        table = Path(folder, "table1.md").read_text(encoding="utf-8")
        assert "Region selector · cross-entropy" in table and "| Ours |" in table
    rows = lines("beam3/rows.jsonl")
    assert {row["variant"] for row in rows} == {"beam of 3"} and rows[0]["config"]["search"]["k"] == 3

def photo(path, seed):
    "Save a picture of noise."
    pixels = np.random.default_rng(seed).integers(0, 255, (90, 120, 3), np.uint8)
    Path(path).parent.mkdir(exist_ok=True)
    Image.fromarray(pixels).save(path)

def test_a_users_own_photos_are_captioned(typed, tmp_path):
    "A user gets a page with two photos and their captions, captions with given words, and captions with musts."
    for n in 1, 2: photo(f"photos/{n}.png", n)
    small = "fasterrcnn_mobilenet_v3_large_320_fpn"
    weights = random_weights(tmp_path/"detector.pth", small)    # the test does not download torchvision's weights
    look = "--detector", small, "--weights", weights
    chosen, asked, must, _ = steps("To caption photos")        # `test_distributed` spreads them over workers
    typed(chosen, *look)
    page = Path("report.html").read_text(encoding="utf-8")
    assert page.count("data:image/webp") == 2 and len(lines("captions.jsonl")) == 2
    typed(asked, *look)
    assert all({"zebra", "bus"} <= set(line["caption"].split()) for line in lines("forced.jsonl"))
    typed(must, *look)
    musts = [c for line in lines("musts.jsonl") for c in line["candidates"]]
    assert all(c["word"] and c["price"] is None for c in musts)

NAMES = """fern lantern kettle compass anchor violin ladder bucket candle mirror pumpkin cactus helmet barrel
    wagon anvil feather pebble teapot hammock""".split()

def own_data():
    "Write the files of a user whose detector has twenty other classes: names, photos, captions, boxes, vectors."
    rng, images, captions, found = random.Random(0), [], [], []
    for i in range(1, 61):
        seen = rng.sample(range(20), 2)
        images.append(dict(id=i, file_name=f"{i}.png", width=120, height=90))
        text = f"a photo of a {NAMES[seen[0]]} and a {NAMES[seen[1]]}"
        captions += [dict(id=5*i + n, image_id=i, caption=text) for n in range(5)]
        for n, c in enumerate(seen):
            box = [10 + 50*n, 10, 40, 50 + rng.random()]
            found.append(dict(image_id=i, category_id=c + 1, bbox=box, score=.9 - .1*n))
    for i in 1, 2: photo(f"photos/{i}.png", i)
    Path("names.txt").write_text("\n".join(NAMES))
    Path("captions.json").write_text(json.dumps(dict(images=images, annotations=captions)))
    Path("found.json").write_text(json.dumps(found))
    numbers = np.random.default_rng(0).normal(size=(24, 16)).round(3)
    words = [*NAMES, "a", "photo", "of", "and"]
    Path("glove.txt").write_text("".join(f"{w} {' '.join(map(str, v))}\n" for w, v in zip(words, numbers)))

def test_a_users_own_detections_are_mentioned(typed):
    "A user with another detector gets captions of their own model that mention the detector's objects."
    own_data()
    selector, captioner, join, caption = steps("To train on your own detector's classes")
    for line in selector, captioner: typed(line, "--set", *SMALL, "selector.d_model=32", "selector.d_ff=64")
    typed(join)
    typed(caption)
    made = lines("captions.jsonl")
    assert [line["file"] for line in made] == ["1.png", "2.png"]
    forced = [c for line in made for c in line["candidates"]]
    assert {c["object"] for c in forced} <= set(NAMES) and all(c["word"] for c in forced)

def test_an_evaluator_gets_reports_verdicts_and_a_table(typed):
    "An evaluator gets two reports, a comparison with verdicts, and a table."
    root = make_toy("COCO", train=40, val=30, test=5)
    (root/"splits/toy.json").rename(root/"splits/lite.json")
    split = json.loads((root/"splits/lite.json").read_text())
    captions = json.loads(next(root.glob("annotations/captions_val2014.json*")).read_text())
    texts = {a["image_id"]: a["caption"] for a in captions["annotations"]}
    entries = [dict(image_id=i, caption=texts[i]) for i in split["val"]]
    Path("ours.json").write_text(json.dumps(entries))
    rows = [f'{i},"a street, seen from above"\r\n' for i in split["val"]]             # as a spreadsheet writes CSV
    Path("theirs.csv").write_text("\ufeffimage_id,caption\r\n" + "".join(rows), encoding="utf-8")
    *scored, compared, several = steps("To score any captions")
    for line in scored: typed(line, "--metrics", "C,R", "--samples", 50)
    typed(compared, "--samples", 50, "--out", "both")
    typed(several, "--samples", 50)
    assert "table.md" in os.listdir("table")
    rows = json.loads(Path("both/compare.json").read_text())
    assert rows["all C"]["verdict"] == "does not hold" and rows["all C"]["difference"] < 0
    assert "a street, seen from above" in Path("both/compare.html").read_text(encoding="utf-8")
    assert sorted(os.listdir("both")) == ["compare.html", "compare.json", "compare.md", "compare.png", "pairs.csv",
                                          "table.csv", "table.tex"]

def test_a_transformers_user_gets_the_words(tmp_path, monkeypatch, capsys):
    "A user of transformers gets a chat model's answer with the words; a tiny model replaces that of the hub."
    pytest.importorskip("transformers")
    from tiny_models import save_chat
    save_chat(tmp_path/"model")
    monkeypatch.chdir(tmp_path)
    photo("photo.jpg", 0)
    lines, found = re.subn(r'"[\w-]+/[\w.-]+"\)$', '"model")', "\n".join(steps("To steer a model of transformers")),
                           flags=re.M)
    assert found == 1
    capsys.readouterr()
    exec(lines, {})
    said = capsys.readouterr().out.split()
    assert "zebra" in said and {"bus", "buses"} & set(said)

def test_a_reader_builds_the_site():
    "A reader opens the chapters, and builds the site; nbdev_test executes the chapters."
    lab, site = (typed.split() for typed in re.findall("`(make [^`]*)`", WAYS["To read"]))
    dry = subprocess.run(["make", "--dry-run", *lab[1:]], cwd=ROOT, capture_output=True, text=True)
    assert (lab[0], site) == ("make", ["make", "book"]) and "/jupyter lab nbs\n" in dry.stdout

@pytest.fixture
def page(browser):
    "Test the page of `noc_app` in a phone's browser, and stop the server at the end."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    code = "import sys; from noc_nb.commands.cli import main; sys.argv[0] = 'noc_app'; main()"
    served = subprocess.Popen([sys.executable, "-c", code, "--port", port], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, env=os.environ | dict(PYTHONPATH=str(ROOT)))
    try:
        tab = browser.new_page(viewport=dict(width=390, height=844))
        tab.goto(served.stdout.readline().strip())
        yield tab
        tab.close()
    finally:
        served.send_signal(signal.SIGTERM)
        out, err = served.communicate(timeout=30)
    assert served.returncode == 143 and "Traceback" not in err and "share" not in out + err

@pytest.mark.slow
def test_a_visitors_caption_is_repeated_by_the_copied_command(page, typed, tmp_path, monkeypatch, capsys):
    "A visitor of the page adds a word to a caption, and the copied command and Python code give the same caption."
    page.wait_for_selector("#stage .word", timeout=60_000)
    picture, controls = (page.locator(css).bounding_box() for css in ("#stage svg", "#weight"))
    assert picture["y"] + picture["height"] < 844 and picture["y"] < controls["y"]
    page.locator("#line").press_sequentially("umbrella")
    page.locator("#line").press("Enter")
    page.wait_for_function("document.querySelector('#stage .caption').innerText.includes('umbrella')")
    said = " ".join(page.locator("#stage .caption").first.inner_text().split())
    page.get_by_text("Make this caption elsewhere").click()
    command, python = page.locator("#again pre").all_inner_texts()
    boxes = re.fullmatch(r"cat > found.json <<'END'\n(.*)\nEND\n(.*)", command, re.S)
    Path("found.json").write_text(boxes[1])
    typed(boxes[2], "--out", "captions.jsonl")
    capsys.readouterr()
    exec(python, {})
    assert [line["caption"] for line in lines("captions.jsonl")] == [said] == [capsys.readouterr().out.strip()]
