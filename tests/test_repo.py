"What is committed: the README, the rows, and no file that must not be."
import json, re, subprocess
import pytest
from book import NOTEBOOKS, ROOT, name, none_of
from readme import README, to_markdown

def test_readme_is_the_index():
    assert README.read_text(encoding="utf-8") == to_markdown(), \
        "README.md is not what nbs/index.ipynb says: change the notebook, then `make readme`"

def test_readme_lists_every_notebook():
    text = README.read_text(encoding="utf-8")
    none_of((name(p) for p in NOTEBOOKS if p.stem != "index" and f"]({name(p)})" not in text),
            "the chapter map lacks a notebook; run `make notebooks NB=index`")

@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_resolve(page):
    targets = re.findall(r"\]\(([^)\s#]+)", (ROOT/page).read_text(encoding="utf-8"))
    none_of((t for t in targets if not re.match(r"[a-z]+:", t) and not (ROOT/t).exists()),
            f"links of {page} that lead nowhere")

def lines():
    "Every line of results/*.jsonl: where it stands, the file's name, the text."
    for path in sorted((ROOT/"results").glob("*.jsonl")):
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{name(path)}: line {i}", path.name, line

ROW = "schema table row commit command config metrics device time".split()
MAIN = "data seed seconds training split detections features protocol counts".split()
LOG = "time commit command why".split()

def test_rows_say_how_they_were_made():
    "A row that nobody can make again is no result."
    def wrong():
        for where, file, line in lines():
            try: row = json.loads(line)
            except json.JSONDecodeError:
                yield f"{where}: not JSON"
                continue
            keys = LOG if file == "test_log.jsonl" else ROW if row.get("table") == "bench" else ROW + MAIN
            missing = [k for k in keys if k not in row]
            if missing: yield f"{where}: no {', '.join(missing)}"
            elif row["commit"] in ("", None, "unknown"): yield f"{where}: no commit"
    none_of(wrong(), "rows are written by the commands and not by hand; make this one again, from a commit")

def test_scores_on_test_are_logged():
    "Each scoring of the test split leaves its line; results on test without a log are not to be trusted."
    rows = {where: json.loads(line) for where, file, line in lines() if file != "test_log.jsonl"}
    scored = [where for where, row in rows.items() if row.get("split") == "test" and row.get("data") != "toy"]
    assert not scored or (ROOT/"results/test_log.jsonl").exists(), \
        f"{scored[0]} is on test, and results/test_log.jsonl is not there: commit it with the rows"

def test_no_file_that_must_not_be():
    "No photos, pickles or jars; nothing big."
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if done.returncode: pytest.skip("no git checkout")
    tracked = [ROOT/f for f in done.stdout.split("\0") if f and (ROOT/f).exists()]
    banned = {".jpg", ".jpeg", ".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".jar"}
    none_of((name(p) for p in tracked if p.suffix in banned),
            "weights are safetensors, tables are JSON or CSV, and other people's photos stay outside; remove it")
    def most(p): return 15e6 if ROOT/"noc_nb/models" in p.parents else 5e6   # the pipelines that the package brings
    none_of((f"{name(p)}: {p.stat().st_size/1e6:.1f} MB" for p in tracked if p.stat().st_size > most(p)),
            "a file over 5 MB does not belong in git; make it when it is needed")

def test_scripts_name_no_host():
    "The machine's own configuration says where packages come from."
    scripts = [ROOT/"Makefile", *(ROOT/".ci").iterdir(), *(ROOT/".github/workflows").iterdir()]
    none_of((name(p) for p in scripts if re.search(r"://|index-url", p.read_text())), "take the address out")

def test_width_of_plain_files():
    long = ((p, i) for p in [ROOT/"setup.py", *(ROOT/"tests").glob("*.py")]
            for i, line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1) if len(line) > 120)
    none_of((f"{name(p)}: line {i}" for p, i in long), "at most 120 columns; break the line")
