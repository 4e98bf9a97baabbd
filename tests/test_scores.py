"""Test scores by brute force and against pycocoevalcap, with real captions, killed runs and many runs at once.

Java is slow, so METEOR and SPICE are compared on few images here. The same on more of them, by one command:
NOC_IMAGES=2000 python -m pytest -s tests/test_scores.py -k pycocoevalcap
"""
import csv, importlib, json, multiprocessing, os, shutil, signal, subprocess, sys, time, warnings
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
from noc_nb.cider import CiderD
from noc_nb.commands.cli import noc_eval
from noc_nb.core import NocError
from noc_nb.evaluation import heldout_f1
from noc_nb.files.dataset import DataFolder, load_data
from noc_nb.constraints import COCO_CLASSES
from noc_nb.heldout import COCO_HELDOUT, novel_images
from noc_nb.lab.disk import read_json
from noc_nb.lab.results import table_line, write_rows
from noc_nb.lab.verdict import gap, holm
from noc_nb.lab.metrics import TOKENISER, _bleu, CaptionScorer, meteor, ptb_line
from noc_nb.lab.novelty import judge
from noc_nb.scores import java
from noc_nb.scores.compare import compare
from noc_nb.scores.java import (_cache_folder, find_java, _java_options, java_programs, _missing_jars, _Spice,
                                _version_text)
from noc_nb.scores.quality import _both_numbers, _objects_said, quality_numbers, quality_scores, word_list
from noc_nb.scores.report import evaluate_file

try: find_java(); JAVA = True
except OSError: JAVA = False
needs_java = pytest.mark.skipif(not JAVA, reason="needs Java")
SPICE = JAVA and not _missing_jars(_cache_folder()/"spice")
needs_spice = pytest.mark.skipif(not SPICE, reason="run `noc_data spice` first")

@pytest.fixture(scope="session")
def captions(coco):
    "Return image id -> captions of the val2014 images that have at least five."
    out = {}
    for a in read_json(coco/"annotations/captions_val2014.json")["annotations"]:
        out.setdefault(a["image_id"], []).append(a["caption"])
    return {i: own for i, own in sorted(out.items()) if len(own) >= 5}

@pytest.fixture(scope="session")
def lite(coco, captions):
    "Return test images, the novel ones, one caption of each image as a system's, and the other captions as references."
    split = read_json(coco/"splits/lite.json")
    ids = split["test"][:2000]
    said, refs = {i: captions[i][0] for i in ids}, {i: captions[i][1:] for i in ids}
    return ids, set(split["novel_test"]) & set(ids), said, refs

# ---- F1 by brute force: word lists typed again, one loop over objects and images

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

@pytest.mark.parametrize("weight", ["image", "caption"])
@pytest.mark.parametrize("fp", ["other", "nonnovel"])
def test_f1_equals_brute_force(lite, weight, fp):
    ids, listed, said, refs = lite
    novel = {o: own & listed for o, own in novel_images(refs, COCO_HELDOUT, ids).items()}
    row = judge(said, refs, ids, novel, metrics=(), weight=weight, fp=fp).row()
    ours = row["f1"] | {"mean": row["out_macro"]["F1"]}
    if (weight, fp) == ("image", "other"): assert heldout_f1(said, refs, novel, COCO_HELDOUT) == pytest.approx(ours)
    # images stay novel even if the reference with the word became the system's caption
    theirs = brute_force_f1(ids, set().union(*novel.values()), said, refs, weight, fp)
    assert ours == pytest.approx(theirs, abs=1e-9)
    assert 20 < ours["mean"] < 95

def test_protocols_differ_as_documented(lite):
    "`buses` counts only in the extended list; ignoring false positives on other objects' novel images raises F1."
    ids, listed, said, refs = lite
    novel = {o: own & listed for o, own in novel_images(refs, COCO_HELDOUT, ids).items()}
    def row(**protocol): return judge(said, refs, ids, novel, metrics=(), **protocol).row()
    found = {words: row(words=words)["counts"]["found"] for words in ("dcc", "extended")}
    assert found["extended"]["bus"]["tp"] > found["dcc"]["bus"]["tp"]
    assert found["extended"]["zebra"] == found["dcc"]["zebra"]
    assert row(fp="nonnovel")["out_macro"]["F1"] > row()["out_macro"]["F1"]

# ---- equal to pycocoevalcap

def real(captions, count):
    "Return one caption each of `count` images, the other captions as references, and both in pycocoevalcap's form."
    some = dict(list(captions.items())[:int(os.environ.get("NOC_IMAGES", count))])
    said, refs = {i: own[0] for i, own in some.items()}, {i: own[1:] for i, own in some.items()}
    return said, refs, {i: list(map(ptb_line, own)) for i, own in refs.items()}, {i: [ptb_line(said[i])] for i in said}

def tell(name, ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    print(f"\n{name}: {len(ours):,} images, mean {ours.mean():.6f}, theirs {theirs.mean():.6f}, "
          f"largest difference of an image {np.abs(ours - theirs).max():.2g}")

@pytest.mark.slow
def test_cider_bleu_rouge_equal_pycocoevalcap(captions):
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    said, refs, gts, res = real(captions, 2000)
    with CaptionScorer(refs, ("C", "B4", "R")) as scorer: ours = scorer.numbers(said)
    plain = CiderD({i: list(map(str.split, own)) for i, own in gts.items()})
    plain = plain.score([line.split() for line, in res.values()], res)
    assert np.abs(ours["C"][:, 0] - plain).max() < 1e-9
    for name, scorer in ("C", Cider()), ("R", Rouge()):
        mean, each = scorer.compute_score(gts, res)
        tell(name, ours[name][:, 0], each)
        assert np.abs(ours[name][:, 0] - each).max() < 1e-9 and abs(ours[name].mean() - mean) < 1e-9
    mean, each = Bleu(4).compute_score(gts, res, verbose=0)
    tell("B4", _bleu(ours["B4"])[:, 3], each[3])
    assert np.abs(_bleu(ours["B4"].sum(0)) - mean).max() < 1e-9
    assert np.abs(_bleu(ours["B4"]) - np.array(each).T).max() < 1e-9

@needs_java
@pytest.mark.slow
def test_meteor_equals_pycocoevalcap(captions):
    from pycocoevalcap.meteor.meteor import Meteor as Theirs
    said, refs, gts, res = real(captions, 100)
    theirs = Theirs()
    try: score, each = theirs.compute_score(gts, res)
    finally:
        with theirs.meteor_p as program: program.kill()
    with CaptionScorer(refs, ("M",), java_programs(refs, ("M",))) as scorer: ours = scorer.numbers(said)["M"]
    tell("M", meteor(ours), each)
    assert meteor(ours).tolist() == pytest.approx(each, abs=1e-15)
    assert meteor(ours.sum(0)) == pytest.approx(score, abs=1e-15)

@needs_spice
@pytest.mark.slow
def test_spice_equals_pycocoevalcap(captions, tmp_path, monkeypatch):
    "SPICE equals that of pycocoevalcap's unchanged class, run with the options that `noc_data spice` prints."
    from pycocoevalcap.spice import spice as package
    jars = _cache_folder()/"spice"
    shutil.copytree(Path(package.__file__).parent, tmp_path/"their_spice", symlinks=True)
    for jar in jars.glob("stanford-corenlp-*.jar"): (tmp_path/"their_spice/lib"/jar.name).symlink_to(jar)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JDK_JAVA_OPTIONS", _java_options(jars))
    said, refs, gts, res = real(captions, 12)
    score, each = importlib.import_module("their_spice.spice").Spice().compute_score(gts, res)
    each = np.nan_to_num([e["All"]["f"] for e in each])
    monkeypatch.delenv("JDK_JAVA_OPTIONS")
    start = time.time()
    ours, parrot = _Spice(refs)._score_many([said, {i: own[0] for i, own in refs.items()}])
    tell(f"S, two systems in {time.time()-start:.0f} s", ours, each)
    assert ours.tolist() == each.tolist() and ours.mean() == pytest.approx(score, abs=1e-12) and parrot.mean() > score

@needs_java
@pytest.mark.slow
def test_all_real_captions_are_tokenised_as_java_does(coco):
    "All captions of COCO are tokenised as by the Java program, which reads them as one text."
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer
    every = [a["caption"] for name in ("train", "val")
             for a in read_json(coco/f"annotations/captions_{name}2014.json")["annotations"]]
    theirs = PTBTokenizer().tokenize({0: [{"caption": c} for c in every]})[0]
    ours = [ptb_line(c, after) for c, after in zip(every, [*every[1:], ""])]
    different = [(c, one, two) for c, one, two in zip(every, ours, theirs) if one != two]
    allowed = TOKENISER["differ"] if len(every) == TOKENISER["captions"] else len(every)//10_000  # for other data
    assert len(theirs) == len(every) and len(different) <= allowed, different[:10]

SCRIPTS = dict(
    Hindi="अच्छा कुत्ता क्षेत्र ज़मीन में दौड़ता लड़का १२३ । सह-अस्तित्व", Bengali="একটি কুকুর ঘাসের উপর খণ্ড ৎ ২০২০",
    Thai="หมา วิ่ง บนสนามหญ้า ผู้หญิง น้ำ เด็กๆ ๕๕ ฯ", Tamil="நாய் புல்வெளியில் மனிதன் க்ஷ ஸ்ரீ ௧௨",
    Telugu="కుక్క గడ్డిపై పరుగెత్తుతోంది శ్రీ ౧౨", Hebrew="כֶּלֶב רָץ עַל הַדֶּשֶׁא צה״ל ג׳ירפה בֵּית־סֵפֶר",
    Arabic="كَلْبٌ يَجْرِي عَلَى العُشْبِ ٣٤ ، ؟ ٱلرَّحْمٰنِ می\u200cخواهم",
    Latin="cafe\u0301 nai\u0308ve Zu\u0308rich a\u030a Vie\u0323\u0302t o\u0308-o\u0308 piñata",
    Chinese="一只狗在草地上奔跑。 「骑」 １２３ 中国・日本 𠮷野家",
    Japanese="犬が芝生の上を走っている。 ラーメン ｶﾅ 々 ー", Korean="개가 잔디밭을 달린다 가나 ㄱㄴ", Russian="Собака Ёлка й человек-паук № «цитата»",
    English="dog man's Mr. U.S. don't x/y 1/2 Inc. p.m. -- ( O'Neil ’em ‘so’ “q” a@b.c #tag www.a.com &amp; ½",
    emoji="❤\ufe0f 👍🏽 👨\u200d👩\u200d👧 ☀\ufe0f 🇩🇪 1\ufe0f\u20e3 ©\ufe0f")
BETWEEN = [*" "*12, "", "", *"\u200b\u200c\u200d\ufeff\ufe0f\xa0\u3000\xad\u0301.,-'’!?/:_", " . ", ", "]
LINES = "\n\r\v\f\u2028\u2029"                          # the program begins a new line at each of these

def any_text(rng):
    "Return up to eight words of all scripts; a quarter of them contain another character, often any of Unicode."
    words, text = " ".join(SCRIPTS.values()).split(), ""
    for _ in range(rng.randint(1, 8)):
        word, other = rng.choice(words), rng.choice(rng.choice(words))
        if rng.random() < .6: other = chr(rng.randrange(0x10000 if rng.random() < .7 else 0x110000))
        if rng.random() < .75 or other in LINES or "\ud800" <= other < "\ue000": other = ""
        at = rng.randint(0, len(word))
        word = word[:at] + other + word[at:]
        text += word + rng.choice(BETWEEN)
    return text

@needs_java
@pytest.mark.slow
def test_all_scripts_are_tokenised_as_java_does():
    """Random texts, and every character of the BMP in a word and after a hyphen, are tokenised as by the Java program.
    Σ is left out, because Java's small letter depends on where Java assumes the end of the word."""
    from random import Random
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer
    rng = Random(43)
    texts = [any_text(rng) for _ in range(int(os.environ.get("NOC_TEXTS", 2000)))]
    bmp = [c for c in map(chr, range(0x10000)) if c not in LINES + "Σ" and not "\ud800" <= c < "\ue000"]
    texts += [" ".join(f"a{c}b x-{c}" for c in bmp[i:i + 16]) for i in range(0, len(bmp), 16)] + ["end"]
    theirs = PTBTokenizer().tokenize({0: [{"caption": c} for c in texts]})[0]
    ours = [ptb_line(c, after) for c, after in zip(texts, [*texts[1:], ""])]
    different = [(c, one, two) for c, one, two in zip(texts, ours, theirs) if one != two]
    assert len(theirs) == len(texts) and not different, (len(different), different[:5])

def test_a_report_names_scripts_without_spaces(tmp_path):
    "A report counts captions in scripts without spaces, such as Chinese and Thai, whose words are not tokens."
    folder = world(tmp_path)
    def report(caption):
        (folder/"x.json").write_text(json.dumps([dict(image_id=i, caption=caption) for i in range(30)]))
        made = evaluate_file(folder/"x.json", folder/"coco", metrics=("R",), samples=0, out=folder/"x")
        return made["counts"]["unspaced"], "a script without spaces" in (folder/"x/report.md").read_text()
    assert report("a dog, κύων, собака") == (0, False)
    assert report("一只狗在跑") == report("หมากำลังวิ่ง") == (30, True)

# ---- no process is left running

def java_processes(word):
    "Return the ids of Java programs whose command line contains this word."
    found = []
    for p in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = p.read_bytes().decode(errors="replace").split("\0")
            state = (p.parent/"stat").read_text().rpartition(")")[2].split()[0]
        except OSError: continue
        java = Path(line[0]).name == "java" and any(word in part for part in line)
        if java and state != "Z": found.append(int(p.parent.name))
    return found

@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    "Use a separate cache for the test, whose lock no other process holds, at a path with spaces."
    folder = tmp_path/"a cache of its own/spice"
    folder.mkdir(parents=True)
    for jar in (_cache_folder()/"spice").glob("*.jar"): (folder/jar.name).symlink_to(jar)
    monkeypatch.setenv("NOC_CACHE", str(folder.parent))

def meteor_of(captions):
    "Return CIDEr-D and METEOR of some captions, and the warnings."
    refs = {i: ["a bird", "one bird"] for i in captions}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with CaptionScorer(refs, ("C", "M"), java_programs(refs, ("M",))) as scorer:
            scores = scorer.numbers(captions)
    return {m: x.tolist() for m, x in scores.items() if x is not None}, [str(w.message) for w in told]

ANSWERS = dict(short="1 2 3", long="1 "*24, nan="NaN", dash="- "*23, huge="9e999 "*23)

@pytest.mark.parametrize("answer", ANSWERS)
def test_odd_answers_of_meteor_give_one_warning(tmp_path, monkeypatch, answer):
    java = tmp_path/"java"
    java.write_text(f"""#!/bin/sh
[ "$1" = -version ] && {{ echo 'openjdk version "17.0.1"' >&2; exit; }}
while read line; do echo "{ANSWERS[answer]}"; done
""")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    scores, told = meteor_of({1: "a bird that sings"})
    assert len(told) == 1 and told[0].startswith("METEOR is left out: its program ") and "\n" not in told[0]
    assert "M" not in scores and "C" in scores

@pytest.mark.parametrize("content", [b"\x7fELF no program", b"#!/no/such/interpreter\n", b""])
def test_a_java_that_cannot_be_run_gives_one_warning(tmp_path, monkeypatch, content):
    (tmp_path/"java").write_bytes(content)
    (tmp_path/"java").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    scores, told = meteor_of({1: "a bird"})
    assert len(told) == 1 and "`java -version` prints" in told[0] and "\n" not in told[0] and "M" not in scores

def test_the_error_on_windows_says_what_the_java_scores_need(monkeypatch):
    monkeypatch.setattr(java, "os", SimpleNamespace(name="nt"))
    with pytest.raises(OSError, match="it needs Linux or macOS"): java.find_java()

@needs_java
def test_a_java_that_talks_about_itself_changes_nothing(monkeypatch):
    quiet, _ = meteor_of({1: "a bird that sings"})
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-verbose:class")
    _version_text.cache_clear()
    loud, told = meteor_of({1: "a bird that sings"})
    _version_text.cache_clear()
    assert loud == quiet and "M" in loud and not told

SCORE = """from noc_nb.lab.metrics import CaptionScorer
from noc_nb.scores.java import java_programs
refs = {1: ['a bird']}
"""
KILLED = {
    "METEOR": ("meteor-1.5.jar", SCORE + "programs = java_programs(refs, ('M',))\n"
               "with CaptionScorer(refs, ('M',), programs) as scorer: scorer.numbers({1: 'a bird that sings'})"),
    "SPICE": ("SpiceScorer", SCORE + "programs = java_programs(refs, ('S',))\n"
              "programs[0].program.keeps = False\n"
              "with CaptionScorer(refs, ('S',), programs) as scorer: scorer.numbers({1: 'a bird that sings'})"),
}

@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
@pytest.mark.parametrize("name", [pytest.param("METEOR", marks=needs_java), pytest.param("SPICE", marks=needs_spice)])
def test_a_killed_process_leaves_no_java(name, how, own_cache):
    word, code = KILLED[name]
    before = set(java_processes(word))
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + code
    python = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    def mine(): return set(java_processes(word)) - before
    until = time.time() + 60
    while not mine() and time.time() < until and python.poll() is None: time.sleep(.05)
    assert mine(), "Java was never started"
    python.send_signal(how)
    python.wait(10)
    until = time.time() + 10
    while mine() and time.time() < until: time.sleep(.05)
    assert not mine()

# ---- many at once

def world(folder, images=30):
    "Write a folder in COCO's layout with a few images, and a file of captions for them; return the folder."
    said = ["a dog runs on the grass", "a red bus on a street", "two zebras in a field", "a man holds a racket"]
    refs = {i: [said[i % 4], "a photo of " + said[i % 4], said[(i+1) % 4]] for i in range(images)}
    (folder/"coco/annotations").mkdir(parents=True)
    (folder/"coco/annotations/captions_val2014.json").write_text(json.dumps(dict(
        images=[dict(id=i, width=640, height=480) for i in refs],
        annotations=[dict(id=9*i+k, image_id=i, caption=c) for i, own in refs.items() for k, c in enumerate(own)])))
    (folder/"ours.json").write_text(json.dumps([dict(image_id=i, caption=said[(i*i) % 4]) for i in refs]))
    return folder

def evaluate_into(arguments):
    "Evaluate captions into a separate folder."
    folder, k, metrics = arguments
    evaluate_file(folder/"ours.json", folder/"coco", out=folder/f"out{k}", metrics=metrics, samples=50)

def at_once(folder, count, metrics):
    "Run `count` evaluations of the same captions at the same time. Return file name -> set of contents."
    with multiprocessing.get_context("fork").Pool(count) as pool:
        pool.map(evaluate_into, [(folder, k, metrics) for k in range(count)], chunksize=1)
    return {f: {(folder/f"out{k}"/f).read_bytes() for k in range(count)}
            for f in ("report.json", "report.md", "report.html", "report.png", "images.parquet")}

@pytest.mark.slow
def test_ten_evaluations_at_once_give_equal_reports(tmp_path, own_cache):
    "Ten simultaneous evaluations write equal reports. METEOR, which needs a gigabyte per program, is in the next test."
    spice = ("S",) if JAVA and not _missing_jars(_cache_folder()/"spice") else ()
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
    ([dict(image_id=0, caption="a"), dict(image_id=0, caption="b")],
     "entry 1: image 0: has 2 captions, the first in entry 0: expected one caption for each image"),
    ([dict(image_id=.5, caption="a")], "entry 0: image 0.5: expected a whole number of at most 18 digits, or a name"),
    ([dict(image_id=0, caption=7)], "entry 0: image 0: caption: expected a string, found 7"),
    ([dict(image_id=0, caption="dog "*1_000)], "entry 0: image 0: caption: 1,000 words: expected at most 500"),
    ([dict(image_id=0, caption="("*1_000)], "entry 0: image 0: caption: 1,000 words: expected at most 500"),
    ([dict(image_id=0, caption="("*20_000)], "entry 0: image 0: caption: 20,000 characters: expected at most 5000"),
    ([dict(image_id=0, caption="a")], "image 1: no caption for it; 29 of 30 images"),
    ('{"image_id": 0, "caption": "a"}\n{"image_id": 1, "caption"\n',
     "line 2: not JSON: expected an object (--skip-bad "),
    ([dict(image_id=90, caption="a")], "image 90: unknown; none of its 1 images is among the 30 of"),
    (b'[{"image_id": 0, "caption": "\xff"}]', "expected a JSON file"),
])
def test_bad_input_gives_one_line_and_exit_code_2(tmp_path, content, message):
    folder, bad = world(tmp_path), tmp_path/"bad.json"
    if not isinstance(content, (bytes, str)): content = json.dumps(content)
    data = content if isinstance(content, bytes) else content.encode()
    bad.write_bytes(data)
    with pytest.raises(NocError) as e:
        evaluate_file(bad, folder/"coco", metrics=("C",), samples=0)
    assert str(e.value).startswith(str(bad)) and message in str(e.value) and "\n" not in str(e.value)

# ---- verdicts

def equal_systems(rng, runs, images=100, draws=300, by_training=1.):
    "Return bootstrap scores (runs, 1+draws) of two equal systems, which differ only by random images and trainings."
    weights = np.vstack([np.ones(images), rng.multinomial(images, [1/images]*images, draws)])/images
    hard = rng.normal(size=images)
    def run(): return weights @ (hard + rng.normal(size=images)) + by_training*rng.normal()
    return [np.array([run() for _ in range(runs)]) for _ in "ab"]

@pytest.mark.parametrize("runs, by_training", [(1, 0.), (3, .3), (5, 1.)])
def test_equal_systems_get_few_verdicts(runs, by_training):
    """At most 5 % of the comparisons of equal systems by ten scores find a difference. Without correction more do, and
    with one training per system, the variation between trainings is mistaken for a difference."""
    rng, found, alone, blind = np.random.default_rng(0), 0, 0, 0
    for _ in range(trials := 200):
        sides = [equal_systems(rng, runs, by_training=by_training) for _ in range(10)]
        p = [gap(*pair)["p"] for pair in sides]
        found, alone = found + (min(holm(p)) < .05), alone + (min(p) < .05)
        blind += min(holm([gap(a[:1], b[:1])["p"] for a, b in sides])) < .05
    limit = .05*trials + 2*(.05*.95*trials)**.5
    assert found <= limit < alone
    assert runs == 1 or blind > limit

def test_a_real_difference_is_found():
    rng = np.random.default_rng(1)
    a, b = equal_systems(rng, 3, by_training=.1)
    assert gap(a, b + 2)["p"] < 1e-3 and gap(a, b + 2)["interval"][0] > 0

# ---- a user's own score

def letters(images, captions, references):
    "Return the length of each caption: a stand-in for a learned score."
    return [len(c) for c in captions.values()]

def more_letters(images, captions, references): return [len(c) + 1 for c in captions.values()]

def test_a_function_is_a_score_like_the_others(tmp_path):
    folder = world(tmp_path)
    said = {e["image_id"]: e["caption"] for e in json.loads((folder/"ours.json").read_text())}
    longer = [dict(image_id=i, caption=c + " in the sun") for i, c in said.items()]
    (folder/"longer.json").write_text(json.dumps(longer))
    def report(name, function, out):
        return evaluate_file(folder/name, folder/"coco", out=folder/out, metrics={"R": None, "letters": function})
    ours, _ = report("ours.json", letters, "ours"), report("longer.json", letters, "longer")
    sizes = [len(c) for c in said.values()]
    assert ours["scores"]["all"]["letters"] == pytest.approx(np.mean(sizes)) and ours["intervals"]["all"]["letters"]
    assert ours.images.letters.tolist() == sizes and "- letters: by letters " in (folder/"ours/report.md").read_text()
    rows = compare(folder/"ours", folder/"longer")        # a comparison does not need the function
    assert rows["all letters"]["difference"] == pytest.approx(11) and rows["all letters"]["verdict"] == "holds"
    report("ours.json", more_letters, "other")
    with pytest.raises(NocError, match="protocol learned=.*more_letters .*: expected .*letters .*, as in"):
        compare(folder/"ours", folder/"other")

def test_the_command_takes_a_function(tmp_path, monkeypatch, capsys):
    folder = world(tmp_path)
    function = "def words(images, captions, references): return [len(c.split()) for c in captions.values()]"
    (folder/"mine.py").write_text(function)
    monkeypatch.chdir(folder)
    noc_eval("ours.json", "coco", metrics="R, mine:words", samples=0)
    assert "|  | R | words | F1 |" in capsys.readouterr().out
    for wrong in "mine:none", "none:words", ":", "R,X":
        with pytest.raises(NocError, match="metrics.*expected"): noc_eval("ours.json", "coco", metrics=wrong, samples=0)

# ---- CHAIR as Rohrbach et al. (2018) define it, and as their code computes it: word by word, in the singular

ONE = dict(men="man", women="woman", people="people", children="child", mice="mouse", geese="goose", calves="calf",
           knives="knife", oxen="ox", buses="bus", busses="bus", glasses="glass", wolves="wolf", skis="ski")

def singular(word):
    if word in ONE: return ONE[word]
    if word.endswith(("men", "women")) and len(word) > 5: return word[:-2] + "an"
    if word.endswith("ies") and len(word) > 4 and not word.endswith(("ties", "kies")): return word[:-3] + "y"
    if word in ("parties", "cities", "kitties", "teddies"): return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses", "zzes", "oes")): return word[:-2]
    if word.endswith("s") and not word.endswith(("ss", "us", "is", "scissors")): return word[:-1]
    return word

class SlowChair:
    "Find the objects of a caption as in the published code: pairs of words first, then single words."
    def __init__(self, lines):
        self.object = {word: words[0] for words in lines for word in words}
        self.pairs = {word: word for word in self.object if " " in word}
        for animal in "bird cat dog horse sheep cow elephant bear zebra giraffe animal cub".split():
            self.pairs |= {f"baby {animal}": animal, f"adult {animal}": animal}
        self.pairs |= {"passenger jet": "jet", "passenger train": "train", "bow tie": "tie", "toilet seat": "toilet"}

    def objects(self, caption):
        text = "".join(ch for ch in caption.lower() if ch.isalnum() or ch.isspace())
        words, found = list(map(singular, text.split())), []
        while words:
            pair = " ".join(words[:2])
            found.append(self.pairs.get(pair, words[0]))
            words = words[2 if pair in self.pairs else 1:]
        if "toilet" in found: found = [w for w in found if w != "seat"]
        return [self.object[w] for w in found if w in self.object]

    def __call__(self, caption, refs, boxed):
        "Return the numbers of mentions, invented mentions, captions with one (0 or 1), objects, and mentioned objects."
        there = set(boxed).union(*map(self.objects, refs))
        said = self.objects(caption)
        wrong = [o for o in said if o not in there]
        return [len(said), len(wrong), len(wrong) > 0, len(there), len(there & set(said))]

def chair_list(tmp_path):
    "Write a word list in the published form from our classes' words; return its lines and path."
    uses = [form for c in COCO_CLASSES.values() for form in c.forms]
    def ours(c): return [f for f in c.forms if uses.count(f) == 1 and " ".join(map(singular, f.split())) == f != c.name]
    lines = [[c.name, *ours(c)] for c in COCO_CLASSES.values()]
    lines = [line + ["seat"] if line[0] == "chair" else line for line in lines]
    (tmp_path/"synonyms.txt").write_text("".join(", ".join(line) + "\n" for line in lines))
    return lines, tmp_path/"synonyms.txt"

def check_chair(tmp_path, captions, refs, boxed):
    "Compare both implementations of CHAIR, caption by caption; return our scores."
    lines, file = chair_list(tmp_path)
    slow = SlowChair(lines)
    numbers = quality_numbers(captions, refs, word_list(COCO_CLASSES, file), boxed)
    ours = numbers[:, [3, 4, 5, 9, 10]]
    names = {i: [COCO_CLASSES[c].name for c in boxed.get(i, ())] for i in captions}
    theirs = np.array([slow(captions[i], refs[i], names[i]) for i in captions], float)
    wrong = [(captions[i], refs[i], a, b) for i, a, b in zip(captions, ours.tolist(), theirs.tolist()) if a != b]
    assert not wrong, (len(wrong), wrong[:3])
    scores, (said, invented, _, there, seen) = quality_scores(numbers.sum(0)), theirs.sum(0)
    assert scores["CHAIRi"] == pytest.approx(100*invented/said)
    assert scores["CHAIR recall"] == pytest.approx(100*seen/there)
    assert scores["CHAIRs"] == pytest.approx(100*theirs[:, 2].mean())
    return scores

def test_chair_of_any_words_equals_the_published_codes(tmp_path):
    "CHAIR of random sentences of the list's words, plurals and modifiers equals the published code's."
    lines, _ = chair_list(tmp_path)
    words = [word for line in lines for form in line for word in (form, _both_numbers(form)[-1])
             if singular(word) == singular(form)]
    words += "a the baby adult passenger toilet seat seats bow tie jet cub cubs animal train hot dogs".split()*9
    rng = np.random.default_rng(0)
    def sentences(n): return {i: " ".join(rng.choice(words, rng.integers(0, 12))) for i in range(n)}
    captions, refs = sentences(5000), {i: [c] for i, c in sentences(5000).items()}
    boxed = {i: set(rng.choice([1, 17, 18, 22, 47, 62, 70], 2).tolist()) for i in range(4000)}
    check_chair(tmp_path, captions, refs, boxed)

def test_the_published_words_are_read_as_their_authors_read_them(coco):
    "Each word of the published list is found as its class, as in the authors' code, and as no other."
    file = coco/"upstream/chair_synonyms.txt"
    theirs = {word: line.strip().split(", ")[0] for line in open(file) for word in line.strip().split(", ")}
    forms = word_list(COCO_CLASSES, file)
    for word, name in theirs.items():
        found = {COCO_CLASSES[i].name for _, ids in _objects_said(f"a {word} here", forms) for i in ids}
        lost = word != word.lower() or word.startswith(" ")     # captions are in lower case, and words have no spaces
        assert found == (set() if lost else {name}), word
    said = _objects_said("a stove top oven", forms)
    assert [form for form, _ in said] == ["stove", "oven"]       # their code joins two words, not three

def test_a_report_names_chairs_protocol(tmp_path):
    folder, (_, file) = world(tmp_path), chair_list(tmp_path)
    entries = json.loads((folder/"ours.json").read_text())
    for e in entries: e["caption"] += ". It is a sunny day. A cat"
    (folder/"long.json").write_text(json.dumps(entries))
    def report(out, **how):
        made = evaluate_file(folder/"long.json", folder/"coco", out=folder/out, metrics=("R",), synonyms=file, **how)
        return made["scores"]["quality"], made["intervals"]["quality"], (folder/out/"report.md").read_text()
    (all_, sure, text), (cut, _, cut_text) = report("all"), report("cut", cut=13, whole=True)
    first, _, _ = report("first", cut=13)
    assert all_["CHAIRs"] == first["CHAIRs"] > cut["CHAIRs"] and first["words a caption"] <= 13
    low, high = sure["CHAIRi"]
    assert low < all_["CHAIRi"] < high and "| CHAIR recall |" in text and "| words a caption |" in text
    assert "words from synonyms.txt (" in text and "those of the references; 30 images" in text
    assert "Scored part of a caption: first 13 words, whole sentences (30 captions are cut)" in cut_text
    with pytest.raises(NocError, match="about counted='all words': expected 'first 13 words, whole sentences', as in"):
        compare(folder/"cut", folder/"all")

def test_chair_of_real_captions_equals_the_published_codes(coco, tmp_path, captions):
    "CHAIR of real captions equals the published code's; the captions are of other images, so that much is invented."
    ids = list(captions)[:int(os.environ.get("NOC_IMAGES", 4000))]
    said = {i: captions[j][0] for i, j in zip(ids, ids[1:] + ids[:1])}
    boxed = DataFolder(coco).boxed_classes(COCO_CLASSES)
    scores = check_chair(tmp_path, said, {i: captions[i] for i in ids}, {i: boxed.get(i, set()) for i in ids})
    assert scores["CHAIRi"] > 40

def evaluated(folder, out, captions=None, **how):
    "Score captions (image id -> text) or ours.json; return what report.json contains."
    file = folder/"ours.json"
    if captions:
        file = folder/f"{out}.json"
        file.write_text(json.dumps([dict(image_id=i, caption=c) for i, c in captions.items()]))
    return evaluate_file(file, folder/"coco", out=folder/out, metrics=("R",), samples=50, **how)

def test_boxes_are_read_with_the_classes_of_the_report(tmp_path):
    "`--classes` decides what a box is: what boxes and captions name is not invented, whatever COCO's number is."
    folder = world(tmp_path)
    boxes = [dict(id=i + 1, image_id=i, category_id=2, bbox=[1, 1, 50, 50], area=2500) for i in range(30)]
    images = read_json(folder/"coco/annotations/captions_val2014.json")["images"]
    (folder/"coco/annotations/instances_val2014.json").write_text(json.dumps(dict(
        images=images, annotations=boxes, categories=[dict(id=1, name="lamp"), dict(id=2, name="kite")])))
    (folder/"names.txt").write_text("lamp\nkite\n")
    said = {i: "a kite and a lamp" for i in range(30)}
    quality = evaluated(folder, "own", said, classes=folder/"names.txt")["scores"]["quality"]
    assert (quality["CHAIRi"], quality["CHAIR recall"]) == (50, 100)      # each image has a kite and no lamp

def test_a_published_list_decides_which_images_are_novel(tmp_path):
    "An image whose references say a held-out word is novel only if the split's list contains it, in reports and runs."
    folder, zebras = world(tmp_path), [i for i in range(30) if i % 4 in (1, 2)]     # some reference says "zebras"
    (folder/"coco/splits").mkdir()
    def of(listed, out):
        split = dict(train=[], val=[], novel_val=[], test=[*range(30)], novel_test=listed)
        (folder/"coco/splits/mine.json").write_text(json.dumps(split))
        run = load_data(folder/"coco", "mine", detections=None)
        assert len(run.novel["test"]["zebra"]) == len(listed)
        return evaluated(folder, out, split="mine")["f1"]["zebra"]["novel"]
    assert of(zebras, "all") == len(zebras)
    assert of(zebras[:5], "listed") == 5

def test_fewer_invented_objects_are_better(tmp_path):
    "A comparison says of a system that invents fewer objects that it is better, and of the other that it is worse."
    folder = world(tmp_path)
    said = ["a dog runs on the grass", "a red bus on a street", "two zebras in a field", "a man holds a racket"]
    right = {i: said[i % 4] for i in range(30)}
    evaluated(folder, "right", right)
    evaluated(folder, "wrong", {i: f"{c} with a pizza" if i % 3 else c for i, c in right.items()})
    def verdicts(a, b): return {k: x["verdict"] for k, x in compare(folder/a, folder/b).items() if "CHAIR" in k}
    better, worse = verdicts("wrong", "right"), verdicts("right", "wrong")
    assert {better[f"quality {k}"] for k in ("CHAIRi", "CHAIRs")} == {"holds"}
    assert {worse[f"quality {k}"] for k in ("CHAIRi", "CHAIRs")} == {"does not hold"}

def test_faults_are_reported_beside_those_of_the_references(tmp_path):
    "A report counts each fault as by hand, in captions and in references; a comparison leaves the references out."
    folder = world(tmp_path)
    file = folder/"coco/annotations/captions_val2014.json"
    content = read_json(file)
    texts = {0: "zebras and a zebra", 1: "A dog, cat, bus", 20: "a dog cat in a room"}
    for a in content["annotations"]: a["caption"] = texts.get(a["image_id"], "a sink")
    file.write_text(json.dumps(content))
    (folder/"coco/splits").mkdir()
    split = dict(train=[*range(20, 30)], val=[], novel_val=[], test=[*range(20)], novel_test=[0])
    (folder/"coco/splits/mine.json").write_text(json.dumps(split))
    said = dict.fromkeys(range(20), "a dog cat") | {2: "two zebras, a zebra", 3: "a zebra bus", 4: "a zebra bus",
        5: "a plate of food on a plate", 6: "a view of a room", 7: "in a room", 8: "the small room"}
    made = evaluated(folder, "said", said, split="mine")
    evaluated(folder, "good", dict.fromkeys(range(20), "a sink"), split="mine")
    rates = {"thing and plural": (5, 5, 0), "glued nouns": (10, 0, 10), "repeated phrase": (5, 0, 5),
             "only the place": (15, 0, 15)}
    text = (folder/"said/report.md").read_text()
    for fault, numbers in rates.items():
        names = fault, f"{fault}, people", f"{fault}, difference"
        assert [made["scores"]["quality"][name] for name in names] == pytest.approx(numbers)
        low, high = made["intervals"]["quality"][names[2]]
        assert low <= numbers[2] <= high and f"| {fault} | {numbers[0]}.0 (" in text
    rows = compare(folder/"said", folder/"good")
    assert {name for name in rows if "people" in name or "difference" in name} == set()
    assert rows["quality only the place"]["difference"] == pytest.approx(-15)
    unknown = evaluated(folder, "unknown", {i: "a zebra bus" for i in range(30)})["scores"]["quality"]
    assert unknown["glued nouns"] is None and unknown["thing and plural"] == 0      # no training captions

NAME = "an idea | with <b>HTML</b>, 50 % & a_name"
SCORES = dict(M=20., C=0., S=10., B4=5., R=30.)

def lines_of(folder, side, seed, rows, **about):
    "Write a folder like that of `noc_reproduce`, without captions, and return it; METEOR is 20 plus the seed."
    scores = {"in": SCORES | dict(M=20. + seed)} | {g: SCORES | dict(F1=40.) for g in ("out_macro", "out_pooled")}
    about = dict(table="main", variant=None, data="own", split="test", config={}, metrics=scores | dict(f1={}),
                 counts=dict(images=30)) | about
    out, lines = folder/f"{side}{seed}", [table_line(row, "cider_dgbs") for row in rows]
    write_rows(out/"rows.jsonl", [about | dict(zip(("row", "training", "lambda0"), line))
                                  | dict(seed=dict(selector=seed, captioner=seed)) for line in lines])
    (out/"run.json").write_text("{}")
    return out

def test_a_table_of_runs_fits_a_page_of_two_columns(tmp_path):
    "LaTeX sets a table of runs with five scores and odd names, and it is not wider than the page."
    rows = "none", "top1", "top2", "top3", "score", "selector_no_inner", "selector", "oracle"
    given = [lines_of(tmp_path, "ours", seed, rows, variant=NAME if seed < 3 else None) for seed in range(6)]
    noc_eval(runs=given, out=tmp_path/"table", samples=20)
    name = "Region selector (w/o inner) · " + NAME
    shown = (tmp_path/"table/table.md").read_text()
    assert f"| {name.replace('|', chr(92) + '|').replace('<', chr(92) + '<')} | 3 | 21.0 ±1.0 |" in shown
    page = (tmp_path/"table/table.html").read_text()
    assert NAME.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in page
    assert "C pooled" in (text := (tmp_path/"table/table.tex").read_text())
    assert r"\caption{Scores on own (test; 30 images)." in text and "over seeds (0, 1, 2, 3, 4, 5)" in text
    folder, name = world(tmp_path), "a system with a long name & 50 % of the captions, number"
    for n in range(6): evaluated(folder, f"{name} {n}", {i: "a dog" if i < 20 - n else "a red bus" for i in range(30)})
    sides = [[tmp_path/f"{name} {n}" for n in own] for own in ((0, 1, 2), (3, 4, 5))]
    noc_eval(runs=[*sides[0], "vs", *sides[1]], out=tmp_path/"pairs", samples=20)
    with open(tmp_path/"pairs/pairs.csv") as f: tests = sum(bool(x["holm"]) for x in csv.DictReader(f))
    differences = (tmp_path/"pairs/table.tex").read_text().split(r"\caption")[-1]
    assert all(words in differences for words in (
        "with 95 \\% intervals over images and training runs", "3 against 3",
        f"corrected for {tests} tests (Holm)", "& p & p (Holm) & verdict"))
    if not shutil.which("pdflatex"): pytest.skip("no pdflatex")
    rules = r"\usepackage{booktabs}}{\let\toprule\hline\let\midrule\hline\let\bottomrule\hline"
    head = rf"\documentclass[twocolumn]{{article}}\IfFileExists{{booktabs.sty}}{{{rules}}}\begin{{document}}"
    (tmp_path/"page.tex").write_text(head + text + differences.join([r"\begin{table*}\caption", r"\end{document}"]))
    command = ["pdflatex", "-interaction=nonstopmode", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Overfull" not in done.stdout, done.stdout[-1500:]

# ---- pages

def test_the_page_of_a_comparison_shows_the_largest_differences(tmp_path, monkeypatch, capsys):
    "The page shows the images that differ most first, with both captions, references, and photos if there are any."
    import re
    from PIL import Image
    folder = world(tmp_path)
    entries = json.loads((folder/"ours.json").read_text())
    worse = [e | dict(caption="a <thing>" if e["image_id"] in (4, 8) else e["caption"]) for e in entries]
    (folder/"worse.json").write_text(json.dumps(worse))
    (folder/"photos").mkdir()
    Image.new("RGB", (900, 600), "red").save(folder/"photos/photo_8.png")
    monkeypatch.chdir(folder)
    for name in "ours", "worse": noc_eval(f"{name}.json", "coco", metrics="C,R", samples=20, out=name)
    noc_eval(compare=["ours", "worse"], out="both", images="photos", samples=50)
    page = Path("both/compare.html").read_text()
    cards = re.findall(r"<article>.*?</article>", page, re.S)
    assert [re.search(r"image (\d+): CIDEr-D -", card)[1] for card in cards] == ["4", "8"]    # only these two differ
    assert all("a &lt;thing&gt;" in card and "a dog runs on the grass" in card for card in cards)
    assert ["data:image/jpeg" in card for card in cards] == [False, True]
    assert not re.search(r"<script|https?://|@import|url\(", page) and len(page) < 100_000
    Path("both/compare.html").write_text("<p>of mine</p>")
    with pytest.raises(NocError, match="compare.html: exists and is not a report of noc_eval"):
        noc_eval(compare=["ours", "worse"], out="both", samples=50)
