"Every form on docs/forms.md, by its small file, through every command and option that the page names."
import re
import pyarrow.parquet
import pytest
from forms import (BAD, FORMS, IMAGES, PAGE, REFUSED, SINGLE, TEXTS, TRAINING, app, captioned, loaded, ours, page,
                   photos_in, served, stopped, trained_boxes, trained_on, truth, written)
from noc_nb.lab.disk import read_json
from test_photos import typed          # noqa: F401

ROWS = [(title, way, n) for title, (ways, forms) in FORMS.items() for way in ways for n in range(len(forms))]

@pytest.mark.parametrize("title, way, n", ROWS, ids=[f"{way}: {FORMS[title][1][n][2]}" for title, way, n in ROWS])
def test_each_form_gives_the_answer_of_its_section(typed, tmp_path, title, way, n):
    "The command gives the answer that every form of the section gives."
    ways, forms = FORMS[title]
    *_, name, content = (SINGLE if way == "noc_eval --captions" else forms)[n]
    answer, expected = ways[way]
    assert answer(typed, written(tmp_path/"given"/name, content)) == expected

@pytest.mark.parametrize("form, name, content, line", REFUSED, ids=[name for _, name, *_ in REFUSED])
def test_the_error_for_a_refused_form_says_how_to_go_on(typed, tmp_path, form, name, content, line):
    "In one line, by each command that reads boxes."
    path = written(tmp_path/"given"/name, content)
    for words in (("noc_caption", path, "--images", photos_in(), "--data", truth(), "--model", "lite"),
                  (*app(), "--detections", path, "--images", photos_in(), "--data", truth()),
                  *(trained_on(part, "--detections", path) for part in TRAINING)):
        status, told = typed(*words)
        found = re.search(re.escape(line).replace("…", ".*"), told[-1])
        assert status == 2 and found and len(told[-1]) < 600, (words, told)

@pytest.mark.parametrize("name", BAD)
def test_a_bad_reference_is_left_out_on_request(typed, tmp_path, name):
    "`--skip-bad` leaves out this entry alone, in scoring and in training; without it, a line names the entry."
    content, line = BAD[name]
    path = written(tmp_path/"given"/name, content)
    evaluation = "noc_eval", "--captions", ours(), "--data", path, "--metrics", "R", "--samples", "0", "--out", "report"
    for words in evaluation, *(trained_on(part, "--captions", path) for part in TRAINING):
        status, told = typed(*words)
        assert status == 2 and f"{path}: {line}" in told[-1] and told[-1].endswith("(--skip-bad leaves it out)"), told
    status, told = typed(*evaluation, "--skip-bad")
    assert status == 0 and any(f"{line}" in text and "left out (such captions: 1)" in text for text in told), told
    assert read_json("report/report.json")["counts"]["bad_references"] == 1
    table = pyarrow.parquet.read_table("report/images.parquet").to_pylist()
    assert [row["references"] for row in table] == [*TEXTS.values()]
    for part in TRAINING:
        data = stopped(typed, "noc_nb.commands.reproduce._say_left_out", *trained_on(part, "--captions", path),
                       "--skip-bad")[0]
        assert [*data.captions.values()] == [*TEXTS.values()] and data.counts["bad_captions"] == 1

EMPTY = {"list": [], "annotations": dict(annotations=[]), "images": dict(images=IMAGES, annotations=[])}

@pytest.mark.parametrize("content", EMPTY.values(), ids=EMPTY)
def test_a_file_without_entries_means_images_without_objects(typed, tmp_path, content):
    path = written(tmp_path/"results.json", content)
    assert captioned(typed, path) == served(typed, path) == dict(a=[], b=[])
    for part in TRAINING:
        assert trained_boxes(loaded(typed, part, "--detections", path)) == dict(a=[], b=[])
        status, told = typed(*trained_on(part, "--captions", path))
        assert status == 2 and "results.json: no captions: expected at least one" in told[-1], told
    status, told = typed("noc_eval", "--captions", ours(), "--data", path, "--metrics", "R")
    assert status == 2 and re.search("results.json:.* no captions: expected at least one", told[-1]), told

def test_the_page_lists_every_form():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python tests/forms.py`"
