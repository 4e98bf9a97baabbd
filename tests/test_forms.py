"Every form on docs/forms.md, by its small file, through every command and option that the page names."
import pytest
from forms import FORMS, PAGE, SINGLE, page, written
from test_photos import typed          # noqa: F401

ROWS = [(title, way, n) for title, (ways, forms) in FORMS.items() for way in ways for n in range(len(forms))]

@pytest.mark.parametrize("title, way, n", ROWS, ids=[f"{way}: {FORMS[title][1][n][2]}" for title, way, n in ROWS])
def test_a_form_is_read(typed, tmp_path, title, way, n):
    "The command gives the answer that every form of the section gives."
    ways, forms = FORMS[title]
    *_, name, content = (SINGLE if way == "noc_eval --captions" else forms)[n]
    answer, expected = ways[way]
    assert answer(typed, written(tmp_path/"given"/name, content)) == expected

def test_the_page_lists_them():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python tests/forms.py`"
