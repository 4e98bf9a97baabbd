"Test the rows in results/: scorings are logged, committed captions give the same scores, and commands still parse."
import json, re, shlex, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import nbformat, pytest
from book import EXPERIMENTS, ROOT, name, none_of, read
from nbclient import NotebookClient
from noc_nb.commands.cli import commands
from noc_nb.commands.command import _dashed, _parser
from noc_nb.commands.reproduce import _preset_of, choice
from noc_nb.files.dataset import load_data
from noc_nb.lab.config import override
from noc_nb.lab.disk import read_json
from noc_nb.lab.metrics import METRICS, CaptionScorer
from noc_nb.lab.novelty import judge
from noc_nb.lab.results import LABELS, TRAINING_LABELS, read_rows

sys.path.insert(0, str(ROOT/"benchmarks"))
import advice, claims, faults, pixels, scale, search, selecting, training, words

RESULTS = ROOT/"results"
LOGGED = "data", "row", "training", "variant", "lambda0", "seed", "time", "commit"
VARIANTS = {"borrow": "borrow from two, threshold .6", "borrow_vote": "borrow from two, five vote, threshold .6",
            "learn": "word vectors learned", "prices": "borrow from two, prices, w=2, beta=5",
            "mix": "mix .5, prices 2 in training; borrow from two, prices, w=1, beta=5",
            "gt": "captioner trained on simulated detections"}

def logged(row): return json.dumps([row.get(key) for key in LOGGED], sort_keys=True)

def test_scorings_of_test_are_logged():
    "Each row on the test part has a line in the log with the same settings, time and commit."
    lines = {logged(line) for line in read_rows(RESULTS/"test_log.jsonl")}
    rows = [(file.name, row) for file in sorted(RESULTS.glob("*.jsonl")) if file.name != "test_log.jsonl"
            for row in read_rows(file) if row.get("split") == "test" and row["table"] != "bench" and "claim" not in row]
    assert len(rows) > 100
    lonely = [(file, row) for file, row in rows if logged(row) not in lines]
    none_of((f"{file}: {row['row']} {row['training']} of {row['time']}" for file, row in lonely),
            "a row on test without its line in results/test_log.jsonl is not to be trusted; commit both")

def test_the_mixed_trainings_repeat_every_digit():
    "Trained again on a second and a third H100, from clean commits, the captioners have the scores of the first."
    mixed = "scst.mix=0.5 scst.price_weight=2"
    priced = "borrow=2 prices.weight=1 prices.unseen=5"
    before = {(None, "none"): None, (f"{mixed}; {priced}", "none"): mixed,
              (f"{mixed}; {priced}", "selector"): f"{mixed} {priced}"}
    first = {(r["variant"], r["row"], r["seed"]["captioner"]): r["metrics"] for r in read_rows(RESULTS/"mix/val.jsonl")}
    again = read_rows(RESULTS/"mix/again.jsonl")
    third = [r for r in read_rows(RESULTS/"mix/shares.jsonl") if r["training"] == "xe"]
    assert len(again) == 9 and len(third) == 6 and not any("+" in r["commit"] for r in again + third)
    for r in third: assert first[None, r["row"], r["seed"]["captioner"]] == r["metrics"]
    for r in again:
        assert first[before[r["variant"], r["row"]], r["row"], r["seed"]["captioner"]] == r["metrics"]

def text(cell):
    "Return the output of a cell in its richest text form, without pictures and stderr."
    def best(output):
        data = output.get("data", {"text/plain": output.get("text", "")})
        kinds = [m for m in ("text/markdown", "text/html", "text/plain") if m in data]
        return "".join(data[kinds[0]]) if kinds and not any(m.startswith("image/") for m in data) else ""
    return [best(o) for o in cell.get("outputs", []) if o.get("name") != "stderr"]

def stale(path):
    "Return the cells whose committed text differs from what they print now."
    old, new = read(path), nbformat.read(path, 4)
    settings = dict(timeout=300, kernel_name="python3", coalesce_streams=True)
    NotebookClient(new, resources={"metadata": {"path": path.parent}}, **settings).execute()
    return [f"{name(path)}, cell {a['id']}" for a, b in zip(old["cells"], new["cells"]) if text(a) != text(b)]

def test_experiments_show_what_the_rows_say(coco):
    "The experiments print their committed outputs when they are executed again."
    pages = [nb for nb in EXPERIMENTS if nb.stem not in ("59_run", "72_change")]    # these two train models
    with ThreadPoolExecutor(2) as pool: found = pool.map(stale, pages)
    none_of((cell for cells in found for cell in cells), "run `make notebooks` and commit what it changes")

def line_of(file):
    "Return split part, captioner's seed, variant, training, row and weight from the name of a file of captions."
    parts = (r"lite-(?:seed(\d)-)?(?:(val|gt|learn|prices|mix|borrow|borrow_vote)-)?"
             r"(xe|cider_dgbs|cider)-(\w+?)(?:-(0\.\d))?\.json\.gz")
    seed, tag, training, row, lambda0 = re.fullmatch(parts, file.name).groups()
    part = "val" if tag == "val" else "test"
    return part, int(seed or 0), VARIANTS.get(tag), training, row, float(lambda0) if lambda0 else None

def test_committed_captions_have_the_scores_of_their_rows(coco):
    "Committed captions have the CIDEr-D, ROUGE-L, BLEU-4 and F1 of their rows, to more than the printed digits."
    data = load_data(coco, split="lite", detections=None)
    rows = [*read_rows(RESULTS/"lite.jsonl"), *read_rows(RESULTS/"lite_val.jsonl")]
    rows = {(r["split"], r["seed"]["captioner"], r["variant"], r["training"], r["row"], r["lambda0"]): r
            for r in rows if "in" in r["metrics"]}
    scorers = {part: CaptionScorer({i: data.captions[i] for i in data.splits[part]}, ("C", "B4", "R"))
               for part in ("val", "test")}
    files = sorted((RESULTS/"captions").glob("lite-*.json.gz"))
    assert len(files) > 40
    def differ():
        for file in files:
            line = line_of(file)
            if line not in rows:
                yield f"{file.name}: no row of {line}"
                continue
            row, part = rows[line], line[0]
            captions = {x["image_id"]: x["caption"] for x in read_json(file)}
            scores = judge(captions, data.captions, data.splits[part], data.novel[part],
                           fp_weight=row["protocol"]["fp_weight"], scorer=scorers[part]).row()
            cells = [(p, m) for p in ("in", "out_macro", "out_pooled") for m in ("C", "B4", "R")]
            pairs = [(row["metrics"][p][m], scores[p][m]) for p, m in cells]
            pairs += [(row["metrics"]["f1"][o], f1) for o, f1 in scores["f1"].items()]
            worst = max(abs(a - b) for a, b in pairs if a is not None)
            if worst > 1e-6: yield f"{file.name}: a score differs by {worst:.2g} from its row's"
    none_of(differ(), "the captions in results/captions are not those of the rows")

def today(command):
    "Return a row's command as it is typed today, according to the table in results/README.md."
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \|$", (RESULTS/"README.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) > 10
    for old, new in rows: command = command.replace(old, "" if new == "leave it out" else new.strip("`"))
    return command

def options_of(function, words):
    "Return the options of a function in a command line; fail if one is unknown or has an invalid value."
    try: return vars(_parser(function).parse_args([_dashed(word) for word in words]))
    except SystemExit: pytest.fail(f"{function.__name__} {' '.join(words)}")

def check_values(name, o):
    "Check settings, rows, metrics and names in options with the code that reads them."
    if name == "noc_reproduce":
        _preset_of(o["preset"], o.get("set", ()))
        for key, allowed in dict(rows=LABELS, training=TRAINING_LABELS, metrics=METRICS).items():
            if o.get(key, "none") != "none": choice(o[key], allowed, key)
    if name == "benchmarks/pixels.py": override(pixels._PixelPreset(), o.get("set"))
    if name == "benchmarks/training.py": override(training.BenchConfig(), o.get("set"))
    if name == "benchmarks/search.py":
        for group in o["cases"].split(","): search._cases(group, search._BenchCase())
    if name == "benchmarks/words.py":
        for system in o["systems"].split(","): words._system(system)
    if name == "benchmarks/faults.py": override(faults.NovelCaptioner.from_pretrained("toy").cfg, o.get("set"))
    if name == "benchmarks/selecting.py":
        for setting in o["settings"].split(","): selecting._preset(o["preset"], setting, 0)

def parse(command):
    "Check that a command, its options and their values are valid today, without running it."
    scripts = dict(search=search.bench_search, training=training.bench_train, scale=scale.bench_scale,
                   pixels=pixels.bench_pixels, words=words.bench_words,
                   selecting=selecting.bench_selecting, faults=faults.bench_faults)
    name, *given = shlex.split(command)
    if name == "python" and given[0] != "-c": name, *given = given
    if name in commands(): check_values(name, options_of(commands()[name], given))
    elif name == "benchmarks/advice.py": options_of(getattr(advice, f"bench_{given[0]}"), given[1:])
    elif name == "benchmarks/claims.py": options_of(getattr(claims, f"write_{given[0]}"), given[1:])
    elif name.startswith("benchmarks/"): check_values(name, options_of(scripts[Path(name).stem], given))
    elif name == "python": exec(compile(given[1].partition(";")[0], command, "exec"))       # runs only the import
    elif name == "jupyter": assert (ROOT/given[-1]).exists()
    else: pytest.fail(f"{command}: no command of today; add it to the table of results/README.md")

def test_every_command_can_be_typed_today():
    files = sorted(RESULTS.rglob("*.jsonl"))
    told = {row["command"] for file in files for row in read_rows(file) if row.get("command")}
    kept = {command for command in told if not command.startswith("none:") and command != "nbs/22_constraints.ipynb"}
    assert len(kept) > 100
    for command in sorted(kept):
        for step in today(command).split(" && "):
            if not step.startswith("cp -r "): parse(step)

def test_commits_of_rows_are_in_the_history_or_explained():
    "Every row's commit is in the history, or results/README.md lists the results that rest on it."
    text = (RESULTS/"README.md").read_text(encoding="utf-8")
    def git(*words): return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    shallow = git("rev-parse", "--is-shallow-repository").stdout.strip() != "false"
    named = {row["commit"]: file.name for file in RESULTS.rglob("*.jsonl") for row in read_rows(file)}
    def known(commit): return not commit.endswith("+") and (shallow or not git("cat-file", "-e", commit).returncode)
    none_of((f"{file}: {commit}" for commit, file in named.items() if not known(commit) and f"`{commit}`" not in text),
            "results/README.md says of such a commit what stands on its rows")
