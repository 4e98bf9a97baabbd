"""Compare the paper's numbers in our tables with the paper's LaTeX, cell by cell.

NOC_PAPER names the LaTeX file; the default is `shared/paper/learning_to_select.tex` beside the repository.
"""
import os, re
from pathlib import Path
import pytest
from book import ROOT, none_of
from noc_nb.lab.results import paper_numbers

def latex():
    "Return the paper's source; skip the test if it is missing."
    beside = (base/"shared/paper/learning_to_select.tex" for base in ROOT.parents)
    named = [Path(os.environ["NOC_PAPER"])] if "NOC_PAPER" in os.environ else [p for p in beside if p.exists()][:1]
    if not named: pytest.skip("NOC_PAPER: not set, and the paper's LaTeX is not beside the repository")
    return named[0].read_text(encoding="utf-8")

def plain(cell):
    "Return a cell without LaTeX commands."
    cell = re.sub(r"~?\\cite\{[^}]*\}|\\midrule", "", cell)
    return re.sub(r"\\(textbf|textit)\{([^}]*)\}", r"\2", cell).strip()

def lines(label):
    "Yield (name, cells) for the lines of a table that contain numbers, without empty cells."
    table = re.search(rf"label\{{{label}\}}.*?\\end\{{tabular\}}", latex(), re.S)[0]
    for line in table.split(r"\\"):
        title, *cells = map(plain, line.split("&"))
        title = re.sub(r".*rule\s*", "", plain(title), flags=re.S)
        cells = [c for c in cells if c]
        if any(re.fullmatch(r"\d+\.\d", c) for c in cells): yield title, cells

ROWS = {"No Constraints": "none", "Top-1": "top1", "Top-2": "top2", "Top-3": "top3", "Region Selector": "selector",
        "Region Selector (w/o Inner)": "selector_no_inner", "Oracle Constraints": "oracle", "NBT + CBS": "NBT+CBS"}
DOMAINS = "in_M", "in_C", "in_S", "out_M", "out_C", "out_S", "out_F1"
OBJECTS = "bottle", "bus", "couch", "microwave", "pizza", "racket", "suitcase", "zebra"

def weight(row): return .2 if row.startswith("selector") else None

def printed():
    "Return (table, row, training, λ0, column) -> number of the three tables; None for a dash."
    found = {}
    def add(table, row, training, lambda0, columns, values):
        assert len(columns) == len(values), f"table {table}, {row}: {len(columns)} columns, {len(values)} cells"
        for column, value in zip(columns, values):
            found[table, row, training, lambda0, column] = None if value == "-" else float(value)
    for title, cells in lines("tab:results"):
        row = ROWS[title]
        for k, training in enumerate(("xe", "cider", "cider_dgbs")):
            add(1, row, training, weight(row), DOMAINS, cells[7*k:7*k + 7])
    for title, cells in lines("tab:sota_comparison"):
        row, columns = ROWS.get(title, title), [*(f"F1_{o}" for o in OBJECTS), "F1"]
        columns += ["out_B4", "out_M", "out_R", "out_C", "out_S"]
        add(2, row, "cider_dgbs" if title in ROWS and title != "NBT + CBS" else None, weight(row), columns, cells)
    for title, (lambda0, lambda1, *cells) in lines("tab:ablation"):
        assert float(lambda0) + float(lambda1) == 1
        add(3, ROWS[title], "cider_dgbs", float(lambda0), DOMAINS, cells)
    return found

def test_every_number_of_the_paper_is_copied_correctly():
    paper, ours = printed(), paper_numbers()
    assert len(paper) == 7*3*7 + 11*14 + 8*7
    different = (f"{key}: {paper.get(key)} in the paper, {ours.get(key)} in paper.csv"
                 for key in {**paper, **ours} if paper.get(key) != ours.get(key))
    none_of(different, "mend noc_nb/assets/paper.csv")

def test_the_folder_of_results_links_to_the_same_file():
    assert (ROOT/"results/paper.csv").resolve() == ROOT/"noc_nb/assets/paper.csv", "one file serves both: link it"
