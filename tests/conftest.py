import os
import pytest

@pytest.fixture(scope="session")
def coco():
    "Return the folder of real COCO, or skip the test. A test that uses this fixture has the marker `data`."
    from noc_nb.lab.disk import find_data   # test_installed.py runs where the package is not installed
    folder = find_data()
    if folder is None: pytest.skip("set NOC_DATA to a COCO folder")
    return folder

@pytest.fixture(autouse=True)
def same_everywhere(request, monkeypatch):
    "Hide real COCO from all other tests, so that their cases do not depend on the machine."
    if "coco" not in request.fixturenames: monkeypatch.delenv("NOC_DATA", raising=False)

@pytest.fixture(scope="module")
def one_thread():
    "Use one thread, because many threads slow small models down."
    import torch                       # test_installed.py runs where it is not installed
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

@pytest.fixture(scope="module")
def browser():
    "Start a headless Chromium, or skip the test."
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install noc_nb[app]")
    program = "/usr/bin/chromium"
    if not os.path.exists(program): pytest.skip(f"{program} is not there: apt-get install chromium")
    with sync.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()

# the test files that take longest in CI
LONGEST = ("installed", "site", "distributed", "results", "scores", "training", "hub", "journeys", "app",
           "search", "prices")

@pytest.hookimpl(tryfirst=True)              # before pytest selects by marker
def pytest_collection_modifyitems(items):
    "Mark the tests that read COCO. Run the longest files first, so that both workers finish at about the same time."
    for item in items:
        if "coco" in item.fixturenames: item.add_marker("data")
    places = {f"test_{name}.py": n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
