"Every form on docs/forms.md, by its small file, through every command and option that the page names."
import re
import pytest
from forms import FORMS, PAGE, REFUSED, SINGLE, TRAINING, app, page, photos_in, trained_on, truth, written
from test_photos import typed          # noqa: F401

ROWS = [(title, way, n) for title, (ways, forms) in FORMS.items() for way in ways for n in range(len(forms))]

@pytest.mark.parametrize("title, way, n", ROWS, ids=[f"{way}: {FORMS[title][1][n][2]}" for title, way, n in ROWS])
def test_a_form_is_read(typed, tmp_path, title, way, n):
    "The command gives the answer that every form of the section gives."
    ways, forms = FORMS[title]
    *_, name, content = (SINGLE if way == "noc_eval --captions" else forms)[n]
    answer, expected = ways[way]
    assert answer(typed, written(tmp_path/"given"/name, content)) == expected

@pytest.mark.parametrize("name, content, line", REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_refused_form_is_told_how_to_go_on(typed, tmp_path, name, content, line):
    "In one line, by each command that reads boxes."
    path = written(tmp_path/"given"/name, content)
    for words in (("noc_caption", path, "--images", photos_in(), "--data", truth(), "--model", "lite"),
                  (*app(), "--detections", path, "--images", photos_in(), "--data", truth()),
                  *(trained_on(part, "--detections", path) for part in TRAINING)):
        status, told = typed(*words)
        assert status == 2 and re.search(line, told[-1]) and len(told[-1]) < 600, (words, told)

def test_the_page_lists_them():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python tests/forms.py`"
