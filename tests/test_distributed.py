"The same captions from no Ray, one worker and two; a run that goes on."
import importlib.util
import pytest
import torch
from noc_nb.core import NocError
from noc_nb.distributed import Job, _ray, caption_shards, read_shards, shard_file
from noc_nb.gallery import caption_files, read_lines
from noc_nb.toy import make_toy

with_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: noc_nb[ray]")

@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "A job of seven shards, and the lines that noc_caption makes of it."
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("job")
    root = make_toy(folder/"toy", train=1, val=60, test=1)
    found = root/"detections/simulated.json"
    caption_files(found, folder/"lines.jsonl", data=root, model="toy", batch=5)
    job = Job(str(found), "toy", data=str(root), batch=5, shard=10)
    return job, sorted(read_lines(folder/"lines.jsonl"), key=lambda x: x["image_id"])

def lines(out): return sorted(read_shards(out), key=lambda x: x["image_id"])

@pytest.fixture(scope="module")
def ray():
    "Ray, started once. Its parts give each other some seconds, which a very busy machine does not have."
    try: ray = _ray(2)
    except Exception as e: pytest.skip(f"ray does not start here: {e}")
    yield ray
    ray.shutdown()

def test_without_ray_and_resumed(world, tmp_path):
    job, expected = world
    assert [row["images"] for row in caption_shards(job, tmp_path)] == [10]*6 + [len(expected) - 60]
    shard_file(tmp_path, 2).unlink()
    assert [row["shard"] for row in caption_shards(job, tmp_path)] == [2] and lines(tmp_path) == expected
    shard_file(tmp_path, 2).write_bytes(b"PAR1")
    with pytest.raises(NocError, match="part-000002.parquet: expected a whole parquet file"): lines(tmp_path)

@pytest.mark.slow
@with_ray
def test_one_worker_and_two(world, ray, tmp_path):
    job, expected = world
    for workers in 1, 2:
        costs = caption_shards(job, tmp_path/f"{workers}", workers)
        assert [row["shard"] for row in costs] == list(range(7)) and lines(tmp_path/f"{workers}") == expected
    shard_file(tmp_path/"2", 3).unlink()                       # what one way began, another ends
    assert [row["shard"] for row in caption_shards(job, tmp_path/"2")] == [3] and lines(tmp_path/"2") == expected
