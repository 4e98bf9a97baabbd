"Scores people can trust: brute force, real captions, killed runs, many runs at once."
import json, multiprocessing, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
import pytest
from noc_nb.core import NocError, find_data, read_json
from noc_nb.java import Meteor, Spice, find_java, missing_jars, cache_folder

try: find_java(); JAVA = True
except OSError: JAVA = False
COCO = find_data()
needs_java = pytest.mark.skipif(not JAVA, reason="needs Java")
SPICE = JAVA and not missing_jars(cache_folder()/"spice")
needs_spice = pytest.mark.skipif(not SPICE, reason="run noc_setup_spice first")
needs_coco = pytest.mark.skipif(COCO is None, reason="set NOC_DATA to a COCO folder")

@pytest.fixture(scope="session")
def captions():
    "Image id -> captions, of val2014 images with at least five."
    out = {}
    for a in read_json(COCO/"annotations/captions_val2014.json")["annotations"]:
        out.setdefault(a["image_id"], []).append(a["caption"])
    return {i: own for i, own in sorted(out.items()) if len(own) >= 5}

@pytest.fixture(scope="session")
def lite(captions):
    "Test images, the published list of novel ones, a system's captions (a person's), and the references left."
    split = read_json(COCO/"splits/lite.json")
    ids = split["test"][:2000]
    said, refs = {i: captions[i][0] for i in ids}, {i: captions[i][1:] for i in ids}
    return ids, set(split["novel_test"]) & set(ids), said, refs

# ---- F1, by somebody who has never seen noc_nb: word lists typed again, one loop an image and an object

LISTS = dict(bottle=("bottle", "bottles"), bus=("bus", "busses"), couch=("couch", "couches", "sofa", "sofas"),
             microwave=("microwave", "microwaves"), pizza=("pizza", "pizzas"),
             racket=("racket", "rackets", "racquet", "racquets"),
             suitcase=("suitcase", "suitcases", "luggage", "luggages"), zebra=("zebra", "zebras"))

def words_in(text):
    kept = "".join(ch for ch in text.lower() if ch in "abcdefghijklmnopqrstuvwxyz0123456789" or ch.isspace())
    return set(kept.split())

def brute_force_f1(ids, novel, said, refs, weight="image", fp="other", lists=LISTS):
    out = {}
    for name, forms in lists.items():
        tp = wrong = missed = 0
        for i in ids:
            times = len(refs[i]) if weight == "caption" else 1
            says = bool(words_in(said[i]) & set(forms))
            own = i in novel and any(words_in(c) & set(forms) for c in refs[i])
            if own and says: tp += times
            elif own: missed += times
            elif says and (fp == "other" or i not in novel): wrong += times
        out[name] = 2*tp/(2*tp+wrong+missed)*100 if tp else 0.
    return out | {"mean": sum(out.values())/len(out)}

@needs_coco
@pytest.mark.parametrize("weight", ["image", "caption"])
@pytest.mark.parametrize("fp", ["other", "nonnovel"])
def test_f1_equals_brute_force(lite, weight, fp):
    from noc_nb.heldout import COCO_HELDOUT, novel_images
    from noc_nb.novelty import f1_scores
    ids, listed, said, refs = lite
    novel = {o: own & listed for o, own in novel_images(refs, COCO_HELDOUT, ids).items()}
    ours = f1_scores(said, novel, ids, weight=weight, fp=fp, refs=refs)
    # the list says which images are novel, also where the reference that said the word was taken as the caption
    theirs = brute_force_f1(ids, set().union(*novel.values()), said, refs, weight, fp)
    assert ours == pytest.approx(theirs, abs=1e-9)
    assert 20 < ours["mean"] < 95

@needs_coco
def test_protocols_differ_as_documented(lite):
    "`buses` counts in the extended list alone; leaving out other objects' novel images can only raise F1."
    from noc_nb.heldout import COCO_HELDOUT, novel_images
    from noc_nb.novelty import f1_counts, f1_scores
    ids, listed, said, refs = lite
    novel = {o: own & listed for o, own in novel_images(refs, COCO_HELDOUT, ids).items()}
    f1 = {p: f1_counts(said, novel, ids, protocol=p) for p in ("dcc", "extended")}
    assert f1["extended"]["bus"].tp > f1["dcc"]["bus"].tp and f1["extended"]["zebra"] == f1["dcc"]["zebra"]
    assert f1_scores(said, novel, ids, fp="nonnovel")["mean"] >= f1_scores(said, novel, ids)["mean"]

# ---- equal to pycocoevalcap

@needs_coco
def test_python_scores_equal_pycocoevalcap(lite):
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from noc_nb.metrics import CaptionScorer, bleu
    from noc_nb.vocab import tokenize
    ids, _, said, refs = (x[:300] if isinstance(x, list) else x for x in lite)
    with CaptionScorer({i: refs[i] for i in ids}, ("C", "B4", "R")) as scorer:
        ours, row = scorer.numbers(said), scorer(said, {"all": ids})["all"]
    text = lambda c: " ".join(tokenize(c))
    gts, res = {i: [text(c) for c in refs[i]] for i in ids}, {i: [text(said[i])] for i in ids}
    mean, each = Cider().compute_score(gts, res)
    assert np.abs(ours["C"][:, 0] - each).max() < 1e-9 and abs(row["C"] - 100*mean) < 1e-9
    mean, each = Rouge().compute_score(gts, res)
    assert np.abs(ours["R"][:, 0] - each).max() < 1e-9 and abs(row["R"] - 100*mean) < 1e-9
    mean, each = Bleu(4).compute_score(gts, res, verbose=0)
    assert np.abs(bleu(ours["B4"].sum(0)) - mean).max() < 1e-9
    assert np.abs(bleu(ours["B4"]) - np.array(each).T).max() < 1e-9

@needs_coco
@needs_spice
@pytest.mark.slow
def test_spice_in_two_runs_equals_one_plain_run(captions, tmp_path):
    "Parses from the database, sentences parsed one by one and many systems at once change no score."
    from noc_nb.vocab import tokenize
    few = dict(list(captions.items())[300:312])
    spice = Spice({i: own[1:] for i, own in few.items()})
    one, two = spice.score_many([{i: own[0] for i, own in few.items()}, {i: own[1] for i, own in few.items()}])
    text = lambda c: " ".join(tokenize(c))
    spice.keeps = False
    plain = spice._run([dict(test=text(own[0]), refs=[text(c) for c in own[1:]]) for own in few.values()])
    assert one.tolist() == plain and two.mean() > one.mean() > 0

@needs_coco
@needs_java
@pytest.mark.slow
def test_every_real_caption_is_tokenised_as_java_does(captions):
    "A part of them here: every twentieth; the chapter on the vocabulary compares more."
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer
    from noc_nb.vocab import tokenize
    some = [c for own in captions.values() for c in own][::20]
    theirs = PTBTokenizer().tokenize({k: [{"caption": c}] for k, c in enumerate(some)})
    different = [c for k, c in enumerate(some) if " ".join(tokenize(c)) != theirs[k][0]]
    assert len(different) <= len(some)//1000, different[:10]

# ---- nothing stays behind

def java_processes(word):
    "Ids of Java programs whose command line has this word."
    found = []
    for p in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = p.read_bytes().decode(errors="replace").split("\0")
            state = (p.parent/"stat").read_text().rpartition(")")[2].split()[0]
        except OSError: continue
        java = Path(line[0]).name == "java" and any(word in part for part in line)
        if java and state != "Z": found.append(int(p.parent.name))
    return found

KILLED = {
    "METEOR": ("meteor-1.5.jar",
               "from noc_nb.java import Meteor; m = Meteor(); print('up', flush=True); m.statistics('a', ['a'])"),
    "SPICE": ("SpiceScorer", "from noc_nb.java import Spice; s = Spice({1: ['a strange purple bird sings']}); "
                             "print('up', flush=True); s.keeps = False; s.score_many([{1: 'a bird that sings'}])"),
}

@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
@pytest.mark.parametrize("name", [pytest.param("METEOR", marks=needs_java), pytest.param("SPICE", marks=needs_spice)])
def test_kill_leaves_no_java(name, how):
    word, code = KILLED[name]
    before = set(java_processes(word))
    python = subprocess.Popen([sys.executable, "-c", code], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    def mine(): return set(java_processes(word)) - before
    until = time.time() + 60
    while not mine() and time.time() < until and python.poll() is None: time.sleep(.05)
    assert mine(), "Java was never started"
    python.send_signal(how)
    python.wait(30); python.stdout.close()
    until = time.time() + 10
    while mine() and time.time() < until: time.sleep(.05)
    assert not mine()

# ---- many at once

def world(folder, images=30):
    "A folder in COCO's layout with a few images, and a file of captions for them."
    said = ["a dog runs on the grass", "a red bus on a street", "two zebras in a field", "a man holds a racket"]
    refs = {i: [said[i % 4], "a photo of " + said[i % 4], said[(i+1) % 4]] for i in range(images)}
    (folder/"coco/annotations").mkdir(parents=True)
    (folder/"coco/annotations/captions_val2014.json").write_text(json.dumps(dict(
        images=[dict(id=i, width=640, height=480) for i in refs],
        annotations=[dict(id=9*i+k, image_id=i, caption=c) for i, own in refs.items() for k, c in enumerate(own)])))
    (folder/"ours.json").write_text(json.dumps([dict(image_id=i, caption=said[(i*i) % 4]) for i in refs]))
    return folder

def evaluate_into(arguments):
    "One evaluation, in a process of its own."
    from noc_nb.report import evaluate_file
    folder, k, metrics = arguments
    evaluate_file(folder/"ours.json", folder/"coco", out=folder/f"out{k}", metrics=metrics, samples=50)

def at_once(folder, count, metrics):
    "So many evaluations of the same captions, at the same time; the set of contents of every file that they wrote."
    with multiprocessing.get_context("fork").Pool(count) as pool:
        pool.map(evaluate_into, [(folder, k, metrics) for k in range(count)], chunksize=1)
    return {f: {(folder/f"out{k}"/f).read_bytes() for k in range(count)}
            for f in ("report.json", "report.md", "report.png", "images.parquet")}

@pytest.mark.slow
def test_ten_at_once_give_ten_equal_reports(tmp_path):
    "SPICE shares one database. METEOR, which takes a gigabyte a program, is left to the next test."
    spice = ("S",) if JAVA and not missing_jars(cache_folder()/"spice") else ()
    folder = world(tmp_path/"a folder with spaces")
    written = at_once(folder, 10, ("C", "B4", "R", *spice))
    assert {f: len(contents) for f, contents in written.items()} == dict.fromkeys(written, 1)
    report = read_json(folder/"out0/report.json")
    assert report["left_out"] == {} and report["scores"]["all"].keys() == {"C", "B1", "B2", "B3", "B4", "R", *spice}

@needs_java
@pytest.mark.slow
def test_two_meteors_at_once_agree(tmp_path):
    written = at_once(world(tmp_path), 2, ("M",))
    assert {f: len(contents) for f, contents in written.items()} == dict.fromkeys(written, 1)
    assert read_json(tmp_path/"out0/report.json")["scores"]["all"]["M"] > 0

@pytest.mark.parametrize("content, message", [
    ([dict(image_id=0, caption="a"), dict(image_id=0, caption="b")], "entry 1: image 0: expected one caption an image"),
    ([dict(image_id="0", caption="a")], "entry 0: image_id '0': expected a whole number"),
    ([dict(image_id=0, caption=7)], "entry 0: image 0: caption: expected a string, got int"),
    ([dict(image_id=0, caption="dog "*10_000)], "entry 0: image 0: caption: expected at most 500 words, got 10,000"),
    ([dict(image_id=0, caption="a")], "image 1: no caption for it; 29 of 30 images"),
    ('{"image_id": 0, "caption": "a"}\n{"image_id": 1, "caption": "b"}', "line 2: looks like JSON lines"),
    (b'[{"image_id": 0, "caption": "\xff"}]', "cannot be read as JSON"),
])
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, content, message):
    from noc_nb.report import run_eval
    folder, bad = world(tmp_path), tmp_path/"bad.json"
    if not isinstance(content, (bytes, str)): content = json.dumps(content)
    data = content if isinstance(content, bytes) else content.encode()
    bad.write_bytes(data)
    with pytest.raises(NocError) as e:
        run_eval(bad, folder/"coco", None, "test", None, "dcc", "image", "other", None, None, "refuse", "C", 0, None)
    assert str(e.value).startswith(str(bad)) and message in str(e.value) and "\n" not in str(e.value)

@pytest.mark.slow
def test_the_command_says_it_in_one_line(tmp_path):
    program = Path(sys.executable).parent/"noc_eval"
    command = [program, "--captions", tmp_path/"none.json", "--data", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.count("\n") == 1 and "none.json: no such file" in run.stderr
