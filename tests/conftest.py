import pytest

@pytest.fixture(scope="module")
def one_thread():
    "Use one thread, because many threads slow small models down."
    import torch                       # test_installed.py runs where it is not installed
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

# the test files that take longest in CI
LONGEST = ("installed", "distributed", "results", "scores", "training", "hub", "journeys", "app", "search", "prices")

def pytest_collection_modifyitems(items):
    "Run the longest files first, so that both workers finish at about the same time."
    places = {f"test_{name}.py": n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
