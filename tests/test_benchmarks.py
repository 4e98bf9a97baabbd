"""Test the scripts of `benchmarks/` at their smallest sizes: their counts, comparisons and rows.

Seconds are never asserted. What needs transformers 4.55.4's own Python or a GPU is not run here."""
import json, os, random, subprocess, sys, time
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pytest, torch
from book import ROOT
from noc_nb.core import NocError
from noc_nb.data import SelectorExamples
from noc_nb.encoder import CaptionerConfig
from noc_nb.fast.cider import CiderD
from noc_nb.fast.search import SearchConfig
from noc_nb.files.boxes import ground_truth, read_detections
from noc_nb.files.dataset import load_captions, load_data
from noc_nb.files.drawing import make_toy
from noc_nb.files.store import RegionStore
from noc_nb.heldout import mentioned, novel_images, removed_images
from noc_nb.lab.config import override
from noc_nb.lab.disk import read_json, write_json
from noc_nb.lab.models import PRESETS, Run
from noc_nb.lab.results import captions_file, read_rows, table_line, write_rows
from noc_nb.scores.compare import compare
from noc_nb.scores.report import evaluate_file
from noc_nb.scores.task import make_task
from noc_nb.toy import TOY_CLASSES, TOY_HELDOUT

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(ROOT/"benchmarks"))
import advice, claims, faults, gpu, pixels, scale, search, selecting, training, words, world

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*images are no half.*")]

@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

def refused(match, call, *args, **options):
    with pytest.raises(NocError, match=match): call(*args, **options)

# What the search costs

SMALL = search._BenchCase(v=200, d=32, regions=5, images=4, layers=1, max_len=8, n=2, threads=1)

def test_the_script_of_searches_appends_a_row_for_each_case(tmp_path):
    "Run as a script from another folder, search.py appends a complete row for each case."
    options = "--cases plain,shared --images 2 --repeats 1 --width 16 --words 60 --layers 1 --threads 1".split()
    run = subprocess.run([sys.executable, ROOT/"benchmarks/search.py", "--out", "rows.jsonl", *options], cwd=tmp_path,
                         capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("no --peer: transformers 4.55.4 is not measured\nplain beam n=0 k=5 images=2 ids: ")
    rows = read_rows(tmp_path/"rows.jsonl")
    assert [(r["table"], r["case"], r["config"]["mode"]) for r in rows[:3]] == [
        ("bench", "plain", "beam"), ("bench", "shared", "bank"), ("bench", "shared", "grid")]
    for row in rows:
        assert row["command"].startswith("benchmarks/search.py --cases plain,shared --images 2 ")
        m = row["metrics"]
        assert m["images_per_s"] > 0 and 0 < m["floor"] < 1 and m["parameters"] > 0 and len(m["seconds"]) == 1
    expected = "expected differ, shared, plain, generate, step or scale"
    refused(f"cases 'all': {expected}", search.bench_search, "unwritten.jsonl", cases="all")

def test_hypotheses_are_counted():
    "A grid with two words has three rows, a bank scores no more than a beam, and the machine has four states."
    captioner, asked = SMALL.captioner(), {}
    for mode in "beam", "bank", "grid", "cbs":
        found = search._Bench(SMALL, repeats=2)._measure(replace(SMALL, mode=mode), captioner)
        asked[mode] = found["asked_per_image"]
        assert len(found["seconds"]) == 2
    steps, k = SMALL.max_len, SMALL.k
    assert asked["beam"] == asked["bank"] == 1 + (steps - 1)*k
    assert asked["beam"] < asked["grid"] < asked["cbs"] < 4*steps*k
    one = search._Bench(SMALL, repeats=9)._measure(SMALL, captioner, limit=0)
    assert len(one["seconds"]) == 1
    drawn = search._words(replace(SMALL, constraints="shared"))
    assert drawn[0] == drawn[3] and search._words(SMALL)[0] != search._words(SMALL)[3]

def test_the_cases_cover_every_axis():
    cases = search._cases("scale", search._BenchCase())
    axes = dict(n=range(9), k=(1, 2, 3, 5, 7, 10), images=(1, 10, 50, 100, 200, 500))
    for axis, wanted in axes.items(): assert sorted({getattr(case, axis) for case in cases}) == list(wanted)
    assert (len(cases), len({case.mode for case in cases})) == (44, 4)

def test_generate_takes_as_many_passes_as_its_own_beam_search():
    for case in search._cases("step", replace(SMALL, v=60)):
        one = search._Bench(case, repeats=2)._measure_generate(case)
        # with prices, plain beams and the musts are inputs of the same batch
        assert [one["passes"], one["own_passes"]] == [case.max_len, case.max_len]
        assert set(one["all_seconds"]) == {"ours", "own"}

def test_a_missing_peer_is_refused():
    refused("no-such-python: cannot be run", search._Baseline, "no-such-python")
    refused("false: no answer; expected a Python with transformers==4.55.4", search._Baseline("false").run, SMALL)

@pytest.mark.parametrize("name, value, least", [("repeats", 0, 1), ("images", 0, 1), ("peer_images", -1, 1),
                                                ("width", 0, 1), ("words", 3, 9)])
def test_sizes_that_measure_nothing_are_refused(name, value, least):
    refused(f"--{name.replace('_', '-')} {value}: expected {least} or more",
            search.bench_search, "unwritten.jsonl", cases="shared", **{name: value})

# How fast a training step is

CAPTIONER = CaptionerConfig(d_feature=12, d_word=10, d_model=16, heads=2, d_ff=32, layers=1, memory=4, max_regions=6,
                            max_len=10)
STEPS = training.BenchConfig(images=4, captions=8, words=200, known=20, repeats=2, captioner=CAPTIONER,
                             search=SearchConfig(k=3, max_len=10))

def test_the_stopwatch_leaves_out_the_first_lap():
    watch = training._Watch()
    watch.laps = {"search": [9., 1., 5., 2.]}                       # the first lap is a warm-up
    assert watch.medians() == {"search": 2.}
    assert [tuple(x.shape) for x in training._batch(STEPS, 5)[:3]] == [(5, 6, 12), (5, 6), (5, 13)]

def test_training_rows_record_shares_and_commands(tmp_path):
    "Shares sum to 100 %, a caption has its words and the end token, and rows record their command."
    result = training._bench_xe(STEPS)
    assert sum(result["share"].values()) == pytest.approx(100)
    assert result["words_per_second"]/result["captions_per_second"] == pytest.approx(12)
    file, threads = tmp_path/"rows.jsonl", torch.get_num_threads()
    sizes = ["words=50", "known=5", "repeats=1", "captions=3", "images=2", "search.max_len=8",
             "captioner.max_len=8 captioner.layers=1", "captioner.d_model=16", "captioner.heads=2",
             "captioner.d_feature=6"]
    training.bench_train(str(file), "0,1", "grid,bank", set=sizes)
    rows = read_rows(file)
    assert [(r["row"], r["variant"]) for r in rows] == [
        ("train_xe", None), ("train_scst", "0 constraints, grid"), ("train_scst", "1 constraints, grid"),
        ("train_scst", "1 constraints, bank")]
    assert rows[0]["config"]["captioner"]["d_model"] == 16
    assert rows[0]["command"] == ("benchmarks/training.py --constraints 0,1 --modes grid,bank "
                                  f"--threads {threads} --set {' '.join(sizes)}")
    assert list(rows[1]["metrics"]["share"]) == ["search", "reward", "forward", "backward", "update"]

def test_the_reward_equals_pycocoevalcaps():
    def some(i, j): return [f"w{(i*j*k) % 37}" for k in range(4, 12)]
    result = training._bench_reward({i: [some(i, j) for j in range(3, 8)] for i in range(200)}, 2)
    assert result["difference"] < 1e-9 and result["times"] > 1

def test_the_training_benchmark_refuses_bad_options(tmp_path):
    file = tmp_path/"rows.jsonl"
    def no(match, **options): refused(match, training.bench_train, str(file), **options)
    no("--set repeats=0: expected 1 or more", set=["repeats=0"])
    no("--set known=1: expected 10 or more", set=["known=1"])
    no("--set words=4: expected 5 or more", set=["words=4"])
    for bad in "-1", "0,x", "": no(f"--constraints {bad}: expected numbers from 0 to 9996, as in", constraints=bad)
    no("--constraints 0,7: expected numbers from 0 to 2, as in 0,3,5", constraints="0,7", set=["words=6"])
    no("no finished phase", run=str(tmp_path))
    refused("mode 'row': expected one of", list, training._bench_rows(STEPS, [1], ["row"]))
    assert not file.exists()

# A world of the true size

TINY = world.WorldSize(train=80, kept=60, half=30, novel_val=4, novel_test=5, vectors=30_400, width=8, stored=60,
                       regions=3, feature=16)

@pytest.fixture(scope="module")
def tiny(tmp_path_factory): return world.make_world(tmp_path_factory.mktemp("worlds")/"tiny", TINY)

def test_the_world_has_cocos_counts():
    assert world.WorldSize().images == 82_783 + 40_504
    lists = world._split_lists(world.WorldSize())
    assert {name: len(ids) for name, ids in lists.items()} == dict(
        train=70_194, val_train=20_252, test_train=20_252, val=3018, test=3024)
    assert not set(lists["val"]) & set(lists["test_train"])
    for mentioning in True, False:
        _, captions = world._scene(0, 7, mentioning)
        assert bool(mentioned(captions, TOY_CLASSES) & set(TOY_HELDOUT.objects.values())) == mentioning
    assert len({world._coined(rank) for rank in range(world._COINED)}) == world._COINED

def test_the_world_loads_with_the_split_of_the_coco_preset(tiny):
    data = load_data(tiny, "coco")
    assert [len(data.splits[p]) for p in ("train", "val", "test", "novel_val")] == [60, 30, 30, 4]
    texts, halves = load_captions(tiny)[0], data.splits["val"] + data.splits["test"]
    train = {i: texts[i] for i in texts.keys() - set(halves)}
    assert train.keys() - removed_images(train, data.heldout) == set(data.splits["train"])
    novel = set().union(*novel_images(texts, data.heldout, halves).values())
    assert novel == {*data.splits["novel_val"], *data.splits["novel_test"]}
    assert data.vectors[world._coined(7)].shape == (8,)
    sizes = dict(zip(data.regions.ids.tolist(), map(tuple, data.regions.sizes.tolist())))
    for file in "simulated.json", "simulated.json.gz":
        table = read_detections(tiny/f"detections/{file}", sizes, only=sizes).take(data.regions.ids)
        assert (table.labels == data.regions.labels).all() and abs(table.boxes - data.regions.boxes).max() < 1e-4
    truth = ground_truth(tiny/"annotations/instances_val2014.json")
    assert max(len(truth[i]) for i in truth) in (9, 10)
    store = RegionStore(tiny/"features")
    assert (len(store), store.features.shape, store.features.dtype) == (60, (180, 16), np.float16)

def test_a_world_is_made_once_and_is_always_the_same(tiny):
    stamps = {p: p.stat().st_mtime_ns for p in tiny.glob("*/*.json*") if p.parent.name != "splits"}
    world.make_world(tiny, TINY)
    assert stamps == {p: p.stat().st_mtime_ns for p in stamps}
    again = world.make_world(tiny.with_name("again"), TINY)
    for path in stamps: assert (again/path.relative_to(tiny)).read_bytes() == path.read_bytes()

# What the true size costs

def test_operations_are_counted_and_medians_computed():
    a, b = torch.randn(10, 20), torch.randn(20, 30)
    assert scale._operations(lambda: a@b)*1e12 == pytest.approx(2*10*20*30)
    part = scale._Part(None, 3)
    part.clock = [(0, 0), (9, 9), (10, 9.5), (13, 10.5)]
    assert part.medians() == dict(step_seconds=2., step_cpu_seconds=.75)       # medians of 1 and 3, and of .5 and 1
    bench = scale._Bench("nowhere")
    with bench.lap("sleep"): time.sleep(.1)
    assert bench.laps["sleep"]["seconds"] >= .1 > bench.laps["sleep"]["cpu_seconds"]

def test_every_step_runs_on_a_tiny_world(tiny):
    small = dict(d_model=16, heads=2, d_ff=32, layers=1, memory=4)
    preset = replace(PRESETS["coco"], captioner=replace(PRESETS["coco"].captioner, **small))
    read = {name: scale._STEPS[name].work(scale._Bench(tiny)) for name in ("load", "load_json", "builder")}
    assert read["load"] == read["load_json"] and read["load"]["images"] == 140 - 20
    assert read["builder"] == dict(kept=60, novel=9)
    plain, zipped = (scale._detections(scale._Bench(tiny), f"simulated.json{end}") for end in ("", ".gz"))
    assert plain == zipped
    bench = scale._Bench(tiny, preset=preset)
    found = scale._held(scale._Bench(tiny, preset=preset)) | scale._whole(bench)
    stored = scale._xe_store(scale._Bench(tiny, steps=3, preset=preset))
    assert (stored["stored"], stored["epochs"], stored["batch"]) == (60, 30, 50)
    assert stored["examples"] == 5*sum(i <= 60 for i in bench.data.splits["train"])
    assert found["words"] == found["xe words"]
    assert [found[f"{name} batch"] for name in ("selector", "xe")] == [50, 50]
    peaks = [lap["peak_mb"] for lap in bench.laps.values()]
    assert peaks == sorted(peaks)
    count = scale._counted(scale._Bench("nowhere", preset=preset))
    assert 0 < count["search, 0 constraints"] < count["search, 3 constraints"]

def test_a_step_runs_in_its_own_process(tiny, monkeypatch):
    found = scale._measure("load", tiny)
    assert found["metrics"]["images"] == 120
    assert found["peak_mb"][0] >= found["metrics"]["laps"]["load"]["peak_mb"] > 50
    monkeypatch.setattr(sys, "executable", "false")
    refused("load: failed", scale._measure, "load", tiny)

def test_the_scale_benchmark_continues_where_it_broke(tmp_path, monkeypatch):
    calls = []
    def fake(name, root, processes):
        calls.append((name, root.name, processes))
        if len(calls) == 3: raise ValueError("broken")
        return dict(seconds=1., cpu_seconds=1., peak_mb=[9], load=0., metrics={})
    monkeypatch.setattr(scale, "_measure", fake)
    monkeypatch.setattr(scale, "make_world", lambda root, size: root)
    options = dict(out=str(tmp_path/"rows.jsonl"), worlds=str(tmp_path), steps="xe,load", parts="1,16")
    with pytest.raises(ValueError, match="broken"): scale.bench_scale(**options)
    scale.bench_scale(**options)
    jobs = [("xe", "world-1", 1), ("load", "world-1", 1), ("xe", "world-1", 2), ("load", "world-16", 1)]
    assert calls == jobs[:3] + jobs[2:]
    assert [(r["row"], r["images"], r["processes"]) for r in read_rows(options["out"])] == [
        ("xe", 123_287, 1), ("load", 123_287, 1), ("xe", 123_287, 2), ("load", 7703, 1)]
    refused("--steps rest: expected some of load", scale.bench_scale, steps="xe,rest")

# A captioner from pixels

def test_a_model_of_pixels_mentions_the_required_words(tmp_path):
    "Captions have all required words, and no held-out word without constraints; another picture changes the score."
    toy = PRESETS["toy"]
    small = pixels._PixelConfig(pictures=60, side=32, width=16, heads=2, encoder=1, decoder=1, steps=12, batch=16,
                                warmup=4)
    preset = pixels._PixelPreset(captioner=small, train_selector=replace(toy.train_selector, epochs=10, patience=10))
    data = load_data(make_toy(tmp_path/"world", train=150, val=30, test=40), split="toy")
    experiment = pixels._PixelExperiment(Run(preset, variant="pixels, tiny"), data, tmp_path/"plain", metrics=("C",))
    rows = experiment.complete([(row, "xe", .2) for row in ("none", "selector", "oracle")])
    f1 = {r["row"]: r["metrics"]["out_macro"]["F1"] for r in rows}
    assert f1["none"] == 0 and f1["oracle"] > f1["selector"] > 30
    assert {(r["features"], r["table"], r["data"]) for r in rows} == {("pixels", "ablation", "toy")}
    counts = {r["row"]: r["counts"] for r in rows}
    assert counts["oracle"]["satisfied"] == counts["oracle"]["wanted"]
    folder = tmp_path/"plain/captioner-pixels-0"
    done = read_json(folder/"done.json")
    pixels._train_pixels(small, folder)                                # a trained model is only loaded
    assert read_json(folder/"done.json") == done
    captioner, two = experiment.models.captioner("xe"), experiment.ids[:2]
    records = pixels._describe(experiment, captioner, two, [[["lamp", "lamps"]]]*2)
    assert [len({"lamp", "lamps"} & set(d.caption.split())) for d in records.values()] == [1, 1]
    assert records[two[0]].score != records[two[1]].score
    model, tokenizer, _ = captioner                                    # borrowed embeddings are means of two
    before = model.decoder.get_input_embeddings().weight.detach().clone()
    held = {form for i in data.heldout.objects.values() for form in data.classes[i].forms}
    neighbours = pixels._average_said(model, tokenizer, set(tokenizer.get_vocab()) - held, data.vectors, 2)
    after, ids = model.decoder.get_input_embeddings().weight, tokenizer.get_vocab()
    torch.testing.assert_close(after[ids["lamps"]], before[[ids[w] for w in neighbours["lamps"]]].mean(0))
    assert {word for word, t in ids.items() if not torch.equal(after[t], before[t])} == set(neighbours)

# Words that others ask for

def made_up(folder, seed=0):
    "Write a folder with CommonGen's layout; `test` has a word that `train` lacks."
    rng, people = random.Random(seed), ["man", "girl", "player", "team"]
    does = dict(run=["run", "runs"], jump=["jump", "jumps"], sing=["sing", "sings"])
    places = ["field", "street", "park", "lake"]
    def line(place=None):
        who, what, where = rng.choice(people), rng.choice([*does]), place or rng.choice(places)
        end = rng.choice(["today", "again", "in the sun"])
        return dict(concepts=rng.sample([who, what, where], 3), sentence=f"The {who} {what}s near the {where} {end} .")
    for part, n in dict(train=400, dev=8, test=8).items():
        lines = [line("zoo" if part == "test" and n == k else None) for k in range(1, n + 1)]
        groups = [sorted(does.get(c, [c]) for c in each["concepts"]) for each in lines]
        for name, rows in {part: lines, f"{part}.forms": groups}.items():
            (folder/f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

SIZES = ["held=6", "pieces=300", "width=32", "layers=1", "epochs=20", "batch=32", "warmup=20", "peak=5e-3"]

@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    "Return a folder with made-up sentences, its sets, and a model trained on the sentences."
    transformers.utils.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp("words")
    (folder/"data/systems").mkdir(parents=True)
    made_up(folder/"data")
    rest, parts = words._prepare(folder/"data", held=6)
    cfg = override(words._WordsConfig(), SIZES)
    words._train_words(cfg, rest, words._lines(folder/"data", "dev"), folder/"lm-0", 0)
    return folder, parts, words._Speaker(folder/"lm-0/best", cfg)

def test_held_out_sets_are_in_no_other_part(tmp_path):
    made_up(tmp_path)
    rest, parts = words._prepare(tmp_path, held=6)
    held = {frozenset(one.concepts) for one in parts["held"]}
    assert not held & {frozenset(line["concepts"]) for line in rest}
    assert len(rest) + sum(len(one.references) for one in parts["held"]) == 400
    for one in parts["held"] + parts["test"]:
        assert all(words._says(s, forms) for s in one.references for forms in one.forms)
    regular = words._regular("drop") | words._regular("carry") | words._regular("take")
    assert {"dropped", "carries", "taking"} <= regular
    assert [words._says("He sings.", ["sing", "sings"]), words._says("singsong", ["sing"])] == [True, False]
    refused("none/train.jsonl: no such file: expected", words._prepare, tmp_path/"none", 6)
    refused("sets to hold out: expected 600", words._prepare, tmp_path, 600)
    for bad in "bank", "bank:x", "prices:5", "queen:3":
        refused(f"--systems {bad}: expected beam:5", words._system, bad)

def test_searches_mention_every_word(speaker):
    "Searches mention every word, more beams give likelier sentences, and log-probabilities equal the library's."
    folder, parts, model = speaker
    sets, found = parts["held"] + parts["test"], {}
    for name in "beam:3", "bank:1", "bank:3", "credit:3", "grid:3", "sample:3":
        found[name] = words._speak(model, name, sets, budget=100)
        said = sum(map(words._count, found[name]["texts"], sets))
        if name[:4] in ("bank", "cred", "grid"): assert said == sum(len(s.forms) for s in sets)
    assert np.mean(found["bank:3"]["log_prob"]) >= np.mean(found["bank:1"]["log_prob"])
    assert found["sample:3"]["meter"]["asked"] <= len(sets)*(100 + model.cfg.room)*2
    inputs = words._read(model.tokenizer, [s.concepts for s in sets[:4]])
    out = model.model.generate(**inputs, num_beams=3, max_new_tokens=40, length_penalty=0.,
                               return_dict_in_generate=True, output_scores=True)
    rows = [words._until_end(row) for row in out.sequences[:,1:].tolist()]
    assert model._log_prob(sets[:4], rows) == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)
    with words._scorer(sets, ("C", "B4")) as scorer: drawn = words._measures(found["bank:3"], sets, scorer)
    assert words._with_interval(drawn["concepts"]) == [100., 100., 100.]
    assert drawn["tokens"][0] == pytest.approx(np.mean(found["bank:3"]["tokens"]))

def test_the_peer_is_asked_for_the_shorter_form(speaker):
    "Of two forms of which one begins with the other, only the shorter is forced."
    folder, parts, model = speaker
    one = words._Set(["run"], [["run", "runs", "ran"]], [])
    run, *others = (model.tokenizer(word)["input_ids"] for word in one.forms[0])
    any_form, = words._forced(model.tokenizer, "any", one)
    assert all((ids in any_form) != (run == ids[:len(run)]) for ids in others) and run in any_form
    assert words._forced(model.tokenizer, "one", one) == [run]
    for python, why in {"no-such-python": "No such file or directory;", "false": "no answer:"}.items():
        other = words._Speaker(folder/"lm-0/best", model.cfg, python)
        refused(f"{python}: {why} expected --peer, a", words._speak, other, "any:5", parts["test"])

def test_repeated_commands_add_no_rows_of_words(speaker, monkeypatch):
    "A repeated command adds nothing, a new system adds a row, and a published file is scored like other sentences."
    folder, parts, model = speaker
    texts = words._speak(model, "beam:3", parts["test"])["texts"]
    (folder/"data/systems/ours.txt").write_text("\n".join(texts))
    options = dict(out=str(folder/"rows.jsonl"), runs=str(folder), part="test", metrics="C,B4",
                   systems="beam:3,bank:3,sample:3,published:ours", set=SIZES)
    monkeypatch.delenv("NOC_COMMONGEN", raising=False)
    refused("NOC_COMMONGEN: is not set", words.bench_words, **options)
    monkeypatch.setenv("NOC_COMMONGEN", str(folder/"data"))
    for _ in range(2): words.bench_words(**options)
    rows = {row["system"]: row for row in read_rows(folder/"rows.jsonl")}
    words.bench_words(**options | dict(systems="beam:3,bank:1"))
    assert [row["system"] for row in read_rows(folder/"rows.jsonl")] == [*rows, "bank:1"]
    assert rows["published:ours"]["metrics"]["C"] == rows["beam:3"]["metrics"]["C"]
    assert rows["published:ours"]["beside"]["beam:3"]["concepts"] == [0., 0., 0.]
    assert rows["bank:3"]["beside"]["beam:3"]["concepts"][0] > 0
    assert rows["bank:3"]["new"]["said"] == rows["bank:3"]["new"]["asked"]
    new, = rows["bank:3"]["new"]["examples"]
    assert "zoo" in new[0] and words._says(new[1], ["zoo"])
    assert [len(rows[name]["examples"]) for name in ("bank:3", "published:ours")] == [8, 0]

# Advice that may be wrong

class Told:
    "A task whose results can be computed by hand: each word has a fixed cost, and is mentioned if its price is higher."
    cost = dict(dog=1., cat=3., bus=2., kite=8.)
    right, wrong = [["dog", "cat"], ["dog"]], [["bus", "kite"], ["kite"]]
    sets = [words._Set([], [["dog"], ["cat"]], ["dog cat", "a cat"]), words._Set([], [["dog"]], ["a dog"])]
    config = {}
    def forms(self, word): return [word]
    def say(self, places, wanted, price=None):
        said = [[w for w in row if price is None or self.cost[w] < price] for row in wanted]
        return [(" ".join(["a", *row]), -sum(map(self.cost.get, row))) for row in said]

class Strange(Told):
    "A task whose references mention neither a bird nor a car."
    cost = dict(Told.cost, bird=4., car=5.)
    right, wrong = [["dog"], ["cat"], ["dog"]], [["bird"], ["car"], ["bird"]]
    sets = [words._Set([], [], [text]) for text in ("a dog", "a cat", "a dog")]

def test_each_way_follows_advice_by_its_cost():
    costs = [advice._costs(Told(), some) for some in (Told.right, Told.wrong)]
    assert costs == [[[1., 3.], [1.]], [[2., 8.], [8.]]]
    kite, wrong = ("kite", 8., False), advice._advice(Told(), costs, "wrong")
    assert wrong == [[("bus", 2., False), kite], [kite]]
    half = advice._advice(Told(), costs, "half")
    assert [len(row) for row in half] == [2, 1] and {good for row in half for *_, good in row} == {True, False}
    assert [text for text, _ in advice._follow(Told(), wrong, "must")] == ["a bus kite", "a kite"]
    for way in "price:2.5", "under:2.5":
        assert [text for text, _ in advice._follow(Told(), wrong, way)] == ["a bus", "a"]
    for way in "price", "under:much", "hope:3": refused(f"way '{way}'", advice._follow, Told(), wrong, way)

def test_advice_rows_count_right_words(tmp_path):
    advice._advice_rows(Told(), ["must", "price:2.5", "under:2.5"], tmp_path/"rows.jsonl", dict(task="told", sets=2))
    written = read_rows(tmp_path/"rows.jsonl")
    rows = {(r["kind"], r["way"]): r["metrics"] for r in written}
    assert {r["command"] for r in written} == {"benchmarks/advice.py advice --task told --sets 2"}
    assert (rows["none", "must"]["right"], rows["none", "must"]["change"]) == (0., [0., 0., 0.])
    assert [rows["right", way]["right"] for way in ("must", "price:2.5")] == pytest.approx([100., 200/3])
    assert [rows["wrong", way]["wrong"] for way in ("must", "price:2.5")] == pytest.approx([100., 100/3])
    assert rows["right", "must"]["C"][0] > rows["wrong", "must"]["C"][0] and rows["wrong", "must"]["right"] is None
    refused("task 'photos': expected lite or lm", advice.bench_advice, "photos")

def test_surprises_are_measured_and_limited():
    assert advice._surprises(Strange(), 2) == dict(dog=1., cat=3., bird=4., car=5.)
    metrics = advice._surprise_row(Strange(), dict(task="told", n=2))["metrics"]
    assert metrics["cost"][90] == pytest.approx(dict(limit=4., kept=100.))
    assert metrics["share"][95] == dict(limit=1., kept=0.)

def test_a_second_gpu_run_continues_where_the_first_stopped(tmp_path, monkeypatch, capsys):
    "A second call runs only what has no row; a step that fails is named, and the others are measured."
    calls, broken = [], [True]
    def step(name):
        def measure(out, o, small):
            calls.append(name)
            if name == "search" and broken: raise RuntimeError("out of memory")
            yield dict(case=name, config={}, metrics=dict(seconds=1.))
        return measure
    monkeypatch.setattr(gpu, "steps", lambda small: {name: step(name) for name in ("limits", "search", "page")})
    gpu.bench_gpu(tmp_path, small=True)
    assert calls == ["limits", "search", "page"] and "search: out of memory" in capsys.readouterr().out
    broken.clear()
    gpu.bench_gpu(tmp_path, small=True)
    assert calls[3:] == ["search"]
    assert [row["step"] for row in read_rows(tmp_path/"gpu.jsonl")] == ["limits", "page", "search"]

def test_a_profile_counts_each_product_of_a_step_once(tmp_path):
    "The profile of a step counts each matrix product of the decoder once, as the limit does."
    row, = gpu.profiled(tmp_path, None, gpu.SMALL)
    case = replace(gpu.base(gpu.SMALL), n=3)
    kernels = row["metrics"]["kernels"]
    products = sum(kernels[name]["count"] for name in ("aten::addmm", "aten::mm") if name in kernels)
    assert products >= len(gpu.products(case, 10)) - 2 and row["metrics"]["limit_seconds"] > 0
    rows = [*gpu.limits(tmp_path, None, gpu.SMALL)]
    assert [r["config"]["dtype"] for r in rows] == ["float32", "bfloat16"]

def test_wrong_words_match_right_ones_in_kind_and_frequency():
    "A wrong word is in no reference, and has the same kind and about the same frequency as the right word."
    texts = {"dog run": "a dog is running", "cat jump": "a cat is jumping", "bus stop": "the bus stops"}
    lines = [dict(concepts=c.split(), sentence=s) for c, s in texts.items()]*3
    kinds, ranked = advice._by_kind(lines)
    assert sorted(w for w in kinds if kinds[w]) == ["jump", "run"]
    one, rng = words._Set(["dog", "run"], [], ["a dog is running"]), random.Random(0)
    assert advice._stranger("run", one, kinds, ranked, rng) == "jump"
    assert {advice._stranger("dog", one, kinds, ranked, rng) for _ in range(30)} == {"cat", "bus", "stop"}

def test_wrong_classes_are_as_frequent_as_right_ones(coco):
    task = advice._Captions(SimpleNamespace(model="lite", sets=300))
    for one, right, wrong in zip(task.sets, task.right, task.wrong):
        assert len(right) == len(set(wrong) - set(right))
        assert not any(words._says(s, task.forms(c)) for s in one.references for c in wrong)
    texts = [text for text, _ in task.say(range(2), task.right[:2])]
    for text, right in zip(texts, task.right): assert all(words._says(text, task.forms(c)) for c in right)
    common = Counter(c for row in task.right for c in row)
    def frequency(rows): return np.mean([common[c] for row in rows for c in row])
    assert .6 < frequency(task.wrong)/frequency(task.right) < 1.1

def test_several_searches_satisfy_all_musts(tmp_path):
    toy = make_toy(tmp_path/"toy", train=20, val=12, test=4, pictures=0)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        advice.bench_musts("toy", toy, tmp_path/"runs", tmp_path/"rows.jsonl")
    rows = {(r["variant"], r["line"]): r for r in read_rows(tmp_path/"rows.jsonl")}
    assert len(rows) == 8
    for (name, _), r in rows.items():
        assert r["counts"]["satisfied"] == r["counts"]["wanted"]
        assert (r["beside"] is None) == (name == "turns")

# Words with a floor of prices, and a selector that learns what words gain

def test_the_score_decides_the_sign_of_a_words_gain(tmp_path, monkeypatch):
    "If the free caption names a class, another search avoids it; if not, one must say it. The score decides the sign."
    data = load_data(make_toy(tmp_path/"toy", train=20, val=4, test=4, pictures=0), "toy")
    examples = SelectorExamples(data, "train")
    dog = next(c for c, o in data.classes.items() if o.word == "dog")
    captioner = selecting.NovelCaptioner.from_pretrained("toy").captioner
    def decode(captioner, batches, groups, search, avoid=()):
        ids = [i for batch in batches for i in batch.image_ids]
        def text(i):
            forced = [captioner.tokens[token] for (token,), in (groups or {}).get(i, [])]
            return "a man" if avoid else " ".join(["a dog", *forced])
        return {i: SimpleNamespace(caption=text(i)) for i in ids}
    monkeypatch.setattr(selecting, "decode", decode)
    gains = selecting._gains(captioner, data, None, examples)
    cider = CiderD({i: data.tokens[i] for i in examples.whole.image_ids})
    def score(text, i): return cider.score([text.split()], [i])[0]
    for i, own in gains.items():
        for c, gain in own.items():
            more, less = ("a dog", "a man") if c == dog else (f"a dog {data.classes[c].word}", "a dog")
            assert gain == pytest.approx(score(more, i) - score(less, i), abs=1e-6)
    assert any(dog in own for own in gains.values()) and len({len(own) for own in gains.values()}) > 1

def test_gain_loss_equals_a_hand_computed_value():
    "By hand: a gain of 2 at probability .9, a loss of 1 at .4, nothing to gain, and a padded region."
    gains, labels = torch.tensor([[2., -1., 0., 9.]]), torch.tensor([[18, 17, 3, -1]])
    loss = selecting.gain_loss(torch.tensor([[.9, .4, .7, .5]]).logit(), gains, labels)
    assert loss.item() == pytest.approx(-(2*np.log(.9) + np.log(.6))/3, abs=1e-6)

def test_faults_rows_count_the_faults_of_each_way(tmp_path):
    "A row counts the faults of the captions of one way, with other settings, too."
    toy, file = make_toy(tmp_path/"toy", train=40, val=12, test=4, pictures=0), tmp_path/"rows.jsonl"
    options = dict(model="toy", data=str(toy), split="toy", out=str(file))
    faults.bench_faults(**options)
    faults.bench_faults(ways="prices", set=["prices.weight=0", "prices.unseen=0"], variant="no prices", **options)
    rows = read_rows(file)
    assert [(r["variant"], r["way"]) for r in rows] == [*(("toy", way) for way in faults.WAYS), ("no prices", "prices")]
    assert rows[3]["metrics"] == rows[2]["metrics"]           # without prices, captions are free
    for row in rows:
        for fault in faults.FAULTS:
            rate, low, high = row["metrics"][fault]
            assert rate == round(100*row["counts"][fault]/12, 2) and low <= rate <= high
            people, apart = (row["metrics"][f"{fault}, {side}"][0] for side in ("people", "difference"))
            assert apart == pytest.approx(rate - people, abs=.02)
    refused("--ways hope: expected some of prices, musts, free", faults.bench_faults, **options | dict(ways="hope"))

def test_a_floor_of_musts_keeps_what_musts_mention(tmp_path):
    "A floor of musts keeps what musts say; a floor of prices is between them and prices. Both selectors have rows."
    toy = make_toy(tmp_path/"toy", train=40, val=12, test=4, pictures=0)
    def rows(name, **options):
        file = tmp_path/f"{name}.jsonl"
        selecting.bench_selecting("toy", str(toy), runs=str(tmp_path/name), out=str(file), **options)
        return {(r["selector"], r["setting"]): r for r in read_rows(file)}
    made = rows("floors", settings="musts:.6,prices:1,floor:1:.6,floor:1:.6:8")
    def said(setting): return made["lite", setting]["counts"]["satisfied"]
    for setting in "musts:.6", "floor:1:.6":
        for kind in "novel", "known":
            found = made["lite", setting]["words"]["first"][kind]
            assert (found["right"]["hit"], found["wrong"]["hit"]) == (found["right"]["of"], 0)
    for r in made.values():
        right = r["words"]["first"]["novel"]["right"]
        for count in "of", "hit": assert sum(own[count] for own in r["words"]["objects"].values()) == right[count]
    assert said("prices:1") < said("floor:1:.6:8") <= said("floor:1:.6")
    own = rows("gains", selectors="usual,gains", settings="musts:.6")
    assert [r["config"].get("loss", "").split()[:1] for r in own.values()] == [[], ["gain_loss"]]
    assert len({json.dumps(r["metrics"]) for r in own.values()}) == len({str(r["ranking"]) for r in own.values()}) == 2
    for text in "hope:3", "floor:2", "musts":
        refused(f"setting '{text}': expected musts:THRESHOLD", selecting._preset, "toy", text, 0)
    refused("--selectors none: expected some of lite, usual, gains", selecting.bench_selecting, selectors="none")

# Claims, systems and variants on committed captions

F1 = "the selector names more new objects than Top-1"
CIDER = "its captions of new objects are better than those of Top-1, {}"

@pytest.fixture
def toy_captions(tmp_path):
    """Return a function that writes captions of the toy world's 60 test images: a share repeats a reference, the others
    are one sentence."""
    toy = make_toy(tmp_path/"toy", train=20, val=20, test=60, pictures=0)
    draws, refs = np.random.default_rng(0).random(60), make_task(toy, "toy").refs
    def write(path, share, end=""):
        said = [dict(image_id=i, caption=(texts[0] if x < share else "a picture of a thing in the grass") + end)
                for (i, texts), x in zip(refs.items(), draws)]
        write_json(tmp_path/path, said)
        return tmp_path/path
    return write

def line_row(row, training="cider_dgbs", seed=0, **values):
    "Return a result row with few entries."
    lambda0, selector = (.2, seed) if row == "selector" else (None, None)
    return dict(table="main", variant=None, row=row, training=training, lambda0=lambda0, data="toy", split="test",
                seed=dict(selector=selector, captioner=seed), metrics={}) | values

def test_claims_of_two_lines_are_the_differences_of_compare(tmp_path, toy_captions):
    toy = tmp_path/"toy"
    shares = {"cider_dgbs-selector-0.2": .8, "cider_dgbs-top1": .4, "xe-selector-0.2": .4, "xe-top1": .4}
    files = {name: toy_captions(f"captions/toy-{name}.json.gz", share) for name, share in shares.items()}
    made = {r["claim"]: r["metrics"] for r in claims.write_claims(tmp_path, toy, "toy", samples=200)}
    assert {r["claim"]: r["metrics"] for r in read_rows(tmp_path/"claims.jsonl")} == made
    reports = [tmp_path/name for name in ("cider_dgbs-top1", "cider_dgbs-selector-0.2")]
    for out in reports: evaluate_file(files[out.name], toy, "toy", out=out, metrics=("C",), samples=0)
    found = compare(*reports, samples=200)
    for text, part, key in ((F1, "macro", "out_macro F1"), (CIDER.format("DGBS"), "macro", "out_macro C"),
                            (CIDER.format("DGBS"), "pooled", "out_pooled C")):
        assert made[text][part] == {k: found[key][k] for k in ("difference", "interval")}
    assert made[CIDER.format("cross-entropy")]["macro"] == dict(difference=0., interval=[0., 0.])   # the same captions
    assert not any("oracle" in text for text in made)
    refused("no captions of any claim", claims.write_claims, tmp_path, toy, "lite")

@pytest.mark.parametrize("score", [0., 80.])
def test_a_claim_names_the_run_whose_score_its_captions_have(score):
    "Of several runs of a line, the one with the captions' CIDEr-D is named, also if it is 0."
    rows = [line_row("selector", seed=seed, detections="real", features="store", metrics={"in": {"C": x}})
            for seed, x in ((1, score - 3), (2, score), (3, None))]
    drawn = {("in", "C"): [score]}
    found = claims._row_of(rows, table_line("selector"), drawn)
    assert found == dict(detections="real", features="store", seed=dict(selector=2, captioner=2))
    assert {*claims._row_of([], table_line("top1"), drawn).values()} == {None}

def test_a_weight_of_false_positives_changes_f1_alone(tmp_path, toy_captions):
    task = make_task(tmp_path/"toy", "toy")
    wrong = toy_captions("wrong.json", .8, " with a penguin")
    plain, heavy = (claims._drawing(task, 5, fp_weight=w)(wrong) for w in (1., 4.))
    assert plain["out_macro", "C"].tolist() == heavy["out_macro", "C"].tolist()
    assert heavy["out_macro", "F1"][0] < plain["out_macro", "F1"][0]

def test_systems_of_three_runs_are_compared_with_their_rivals(tmp_path, toy_captions):
    for seed, share in (("", .7), ("seed1-", .72), ("seed2-", .68)):
        for name in claims._SYSTEMS.values():
            lower = name in ("cider-none", "borrow-cider_dgbs-selector-0.2")
            toy_captions(f"captions/toy-{seed}{name}.json.gz", share - .3*lower)
    made = {r["system"]: r["metrics"]["in_C"] for r in claims.write_systems(tmp_path, tmp_path/"toy", "toy", 200)}
    assert made["mixed, free"] == made["DGBS, free"]                                                # the same captions
    assert made["DGBS, free"]["interval"][0] > 0 and made["mixed, prices"]["difference"] == 0
    drawn = claims._drawing(make_task(tmp_path/"toy", "toy"), 0)
    files = [tmp_path/f"captions/toy-{seed}cider-none.json.gz" for seed in ("", "seed1-", "seed2-")]
    plain = [drawn(file)["in", "C"][0] for file in files]
    assert made["DGBS, free"]["a"] == pytest.approx(np.mean(plain))

def test_variants_are_compared_with_a_plain_run_of_the_same_images(tmp_path, toy_captions):
    def run(name, variant, share, part="test"):
        row = line_row("top1", variant=variant, split=part, detections="simulated", features="symbolic", command="")
        write_rows(tmp_path/name/"rows.jsonl", [row])
        write_json(tmp_path/name/"run.json", dict(preset=dict(split="toy"), part=part, detections="simulated"))
        toy_captions(captions_file(f"{name}/captions", table_line("top1")), share)
        return tmp_path/name
    toy, out = tmp_path/"toy", tmp_path/"variants.jsonl"
    base, better = run("base", None, .4), run("better", "says more", .8)
    [row] = claims.write_variants(out, base, [better], toy, samples=200)
    assert read_rows(out) == [row] and row["metrics"]["pooled_C"]["interval"][0] > 0
    assert (row["variant"], row["line"], row["training"]) == ("says more", "top1", "cider_dgbs")
    [row] = claims.write_variants(out, better, [base], toy, 200, table_line("top1"))
    assert (row["variant"], row["rival"]) == (None, dict(line="top1", variant="says more"))
    assert claims.write_variants(out, better, [base], toy, 200, table_line("none")) == []           # no such line there
    refused("expected .'toy', 'test'", claims.write_variants, out, base, [run("other", "on val", .8, "val")], toy)
