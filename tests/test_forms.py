"Every form on docs/forms.md, by its small file."
import pytest
from forms import FORMS, PAGE, page, written

ROWS = [(title, *row) for title, (*_, forms) in FORMS.items() for row in forms]

@pytest.mark.parametrize("title, form, tool, name, content", ROWS, ids=[f"{row[0]}: {row[3]}" for row in ROWS])
def test_a_form_is_read(tmp_path, title, form, tool, name, content):
    _, read, expected, _ = FORMS[title]
    assert read(written(tmp_path/name, content)) == expected

def test_the_page_lists_them():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python tests/forms.py`"
