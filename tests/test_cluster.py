"The commands of docs/cluster.md and docs/change.md are run as typed, on the CPU and a small toy world."
import csv, json, os, re, socket, subprocess, sys
from pathlib import Path
import pytest
from book import ROOT
from noc_nb.files.drawing import make_toy

BIN = Path(sys.executable).parent
SMALL = ("captioner.d_model=16 captioner.d_ff=32 captioner.heads=2 captioner.layers=1 xe.epochs=1 xe.batch=20 "
         "scst.epochs=1 scst.batch=20 train_selector.epochs=1 search.k=2 search.max_len=8")
ENVIRONMENT = os.environ | dict(PATH=f"{BIN}:{os.environ['PATH']}", OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
                                SLURM_ARRAY_TASK_ID="0")

def lines():
    "Return heading -> text of its block of commands in docs/cluster.md."
    text = (ROOT/"docs/cluster.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## (.*?)\n.*?^```sh\n(.*?)^```$", text, re.M | re.S))

def small(text):
    "Replace the data by a toy world, its preset by a small one, and four GPUs by two."
    names = {"--preset coco": f"--preset toy --set {SMALL}", "COCO/vectors/glove.6B.300d": "toy/vectors/toy",
             "noc_pipeline ": "noc_pipeline --classes toy/classes.json ", "--data COCO": "--data toy", "0 1 2 3": "0 1",
             "run0 run1 run2 run3": "run0 run1", ' --variant "trained by noc_train"': "", "srun ": ""}
    for name, less in names.items(): text = text.replace(name, less)
    more = r"\1 --metrics C --tables 1 --variant small\2"
    return re.sub(r"(noc_reproduce .*?)( --resume| --out|$)", more, text, flags=re.M)

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    make_toy(folder/"toy", train=40, val=10, test=10, pictures=0)
    return folder

def typed(folder, text, **more):
    "Run a block in a shell; return what it prints."
    done = subprocess.run(["bash", "-euc", text], cwd=folder, env=ENVIRONMENT | more, capture_output=True,
                          text=True, timeout=500)
    assert done.returncode == 0, f"{text}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return done.stdout

@pytest.mark.slow
def test_seeds_run_at_the_same_time_and_share_a_table(folder):
    text = small(lines()["One seed on each GPU"])
    text = text.replace("noc_reproduce", "noc_reproduce --rows none,top1 --training xe")
    assert "deviation over seeds (0, 1)" in typed(folder, text)

@pytest.mark.slow
def test_one_training_runs_in_several_processes_and_fills_tables(folder):
    "Each model is trained by two processes, of which one prints; their pipeline gives rows."
    for line in small(lines()["One training on several GPUs"]).splitlines():
        assert typed(folder, line).count("best weights: ") == 1, line
    printed = typed(folder, small(lines()["From trained models to tables"]))
    assert "5 result rows" in printed and "Top-1" in printed

@pytest.mark.slow
def test_two_machines_train_one_model(folder):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    text = small(lines()["Two machines"]).replace("--nproc_per_node 4", "--nproc_per_node 1")
    text = text.replace("first:29500", f"localhost:{port}").replace("--out xe", "--out both")
    assert typed(folder, f"{text.strip()} & {text.strip()}; wait").count("best weights: both/best") == 1

@pytest.mark.slow
def test_a_slurm_job_continues_when_it_is_submitted_again(folder):
    "The last line of the file for sbatch is a run, and the same line continues it."
    text = small(lines()["Slurm"]).replace("noc_reproduce", "noc_reproduce --rows none --training xe")
    text = text.replace("--out run", "--out job")
    assert "1 result rows in job0/rows.jsonl" in typed(folder, text) and "1 result rows" in typed(folder, text)

@pytest.mark.slow
def test_several_changes_get_their_verdicts(folder):
    """The loop of docs/change.md, with one seed: what it says is trained again is, each change is recorded in its rows
    and gets its verdict, and the selector's pipeline captions boxes by its class."""
    text = (ROOT/"docs/change.md").read_text(encoding="utf-8")
    folder = folder/"change"
    folder.mkdir()
    (folder/"mine.py").write_text(re.search(r"^```python\n(.*?)^```$", text, re.M | re.S)[1])
    world, loop = re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
    loop = loop.replace("in 0 1 2", "in 0").replace("paper0 paper1 paper2", "paper0")
    loop = loop.replace("${1}0 ${1}1 ${1}2", "${1}0").replace("scst.epochs=6", "")
    loop = loop.replace(" --set ", f" --set {SMALL} ")
    def run(text): return typed(folder, text, PYTHONPATH=f"{folder}:{ROOT}")
    run(world)
    run(f"({loop}) 2> said")
    said = (folder/"said").read_text()
    assert said.count("paper0/captioner-xe-0: read\n") == 4       # by each change; two train other models
    assert all(f"paper0/{name}" in said for name in ("selector-Counting", "captioner-cider-rare_words"))
    assert said.count(": missing, so it is trained now and saved there") == 2
    scores = [entry["score"] for entry in json.loads((folder/"paper0/selector-0.2-0/done.json").read_text())["history"]]
    assert max(scores) > scores[0] + 10, "the settings of the page train the selector"
    trained = [p.name for p in (folder/"paper0").iterdir() if (p/"done.json").exists()]
    models = sorted(re.sub("-[0-9a-f]{12}.*", "", name) for name in trained)
    assert models == ["captioner-cider-0", "captioner-cider-rare_words", "captioner-xe-0", "selector-0.2-0",
                      "selector-Counting"]
    for idea in "counting", "rare", "area", "all":
        assert "## Differences" in (folder/f"verdict_{idea}/table.md").read_text(), idea
    with open(folder/"verdict_area/pairs.csv") as f: pairs = [*csv.DictReader(f)]
    claims = [x for x in pairs if x["about"] != "the same captions"]
    assert all("area0: area_weighted" in x["system"] and "paper0: Region selector" in x["against"] for x in claims)
    said = (folder/"verdict_area/table.md").read_text()
    assert f"corrected for {len(claims)} tests" in said and claims
    ideas = dict(counting=("--selector mine:Counting", "network", "Counting ", "counts"),
                 rare=("--reward mine:rare_words", "reward", "rare_words ", "rare words"),
                 area=("--rule mine:area_weighted", "rule", "area_weighted ", "area"))
    for idea, (line, key, called, variant) in ideas.items():
        rows = [json.loads(row) for row in (folder/f"{idea}0/rows.jsonl").read_text().splitlines()]
        told = {r["row"] for r in rows if r["training"] and r["config"].get(key, "").startswith(called)}
        assert told if idea != "area" else told == {"area_weighted"}
        assert f'--variant "{variant}"' in rows[0]["command"] and line in rows[0]["command"]
        assert f"{variant} ({line.split()[1]})" in (folder/f"{idea}0/table1.md").read_text(encoding="utf-8")
    refused = f"--preset toy --set {SMALL} --rows none,selector --metrics C --tables 1 --rule mine:area_weighted"
    run(f"! noc_reproduce {refused} --data toy --models paper0 --out no 2> said; grep -q 'area_weighted ' said")
    assert not (folder/"no/rows.jsonl").exists()
    boxes = "noc_caption toy/detections/simulated.json --data toy --out found.jsonl --model counting0/pipeline"
    run(f"! {boxes} 2> said; grep -q 'holds a Counting' said; {boxes} --selector mine:Counting")
    assert (folder/"found.jsonl").read_text().count('"caption"') > 90
    train = f"noc_train selector --preset toy --data toy --out mine --selector mine:Counting --set {SMALL}"
    assert "--selector-class mine:Counting" in run(train)
    assert "network: Counting " in (folder/"mine/best/README.md").read_text(encoding="utf-8")

def test_other_commands_say_that_they_run_in_one_process(tmp_path):
    "The first of several processes says what to type, before PyTorch is imported; the others are silent."
    for rank, words in ("0", "runs in one process"), ("1", ""):
        command = [BIN/"noc_reproduce", "--preset", "toy", "--out", tmp_path/"run"]
        several = ENVIRONMENT | dict(WORLD_SIZE="2", RANK=rank)
        done = subprocess.run(command, env=several, capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr and bool(done.stderr) == bool(words) and not done.stdout
        assert not (tmp_path/"run").exists() and "docs/cluster.md" in done.stderr or rank == "1"
