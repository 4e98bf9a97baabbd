import pytest

@pytest.fixture(scope="module")
def one_thread():
    "Small models on many threads wait for each other."
    import torch                       # test_installed.py runs where it is not installed
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

# the files of tests that take longest, by CI's clock
LONGEST = ("installed", "distributed", "results", "scores", "training", "hub", "journeys", "app", "search", "prices")

def pytest_collection_modifyitems(items):
    "The longest come first, so that no worker is left with one of them when the other has finished."
    places = {f"test_{name}.py": n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
