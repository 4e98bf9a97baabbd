import pytest, torch

@pytest.fixture(scope="module")
def one_thread():
    "Small models on many threads wait for each other."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
