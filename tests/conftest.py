import pytest

@pytest.fixture(scope="module")
def one_thread():
    "Small models on many threads wait for each other."
    import torch                       # test_installed.py runs where it is not installed
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
