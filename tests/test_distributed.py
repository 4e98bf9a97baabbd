"Test that runs without Ray, with one worker, with two, and with killed processes have the same lines, one per image."
import importlib.util, multiprocessing, os, random, signal, subprocess, sys, threading, time
from pathlib import Path
import pytest
import torch
from noc_nb.commands.cli import noc_caption
from noc_nb.commands.distributed import _ray, caption_shards
from noc_nb.core import NocError
from noc_nb.files.drawing import make_toy
from noc_nb.lab.disk import _temporary_path
from noc_nb.lab.runs import locked
from noc_nb.models.pipeline import CaptionOptions
from noc_nb.models.source import Job
from noc_nb.pages.gallery import _caption_files, _read_lines

with_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: noc_nb[ray]")

@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "Return a job of seven shards, and the lines that noc_caption writes for it."
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("job")
    root = make_toy(folder/"toy", train=1, val=60, test=1)
    found = root/"detections/simulated.json"
    job = Job(str(found), "toy", data=str(root), options=CaptionOptions(batch=5))
    _caption_files(job, folder/"lines.jsonl")
    return job, sorted(_read_lines(folder/"lines.jsonl"), key=lambda x: x["image_id"])

def _shard_file(out, n): return Path(out)/f"part-{n:06d}.jsonl"

def run(job, out, workers=0): return caption_shards(job, out, workers, shard=10)

def lines(out): return sorted(_read_lines(Path(out)/"captions.jsonl"), key=lambda x: x["image_id"])

@pytest.fixture(scope="module")
def ray():
    "Start Ray once. Skip the test if it does not start, for example on a very busy machine."
    try: ray = _ray(2)
    except Exception as e: pytest.skip(f"ray does not start here: {e}")
    yield ray
    ray.shutdown()

def test_a_run_without_ray_is_resumed(world, tmp_path):
    job, expected = world
    assert [row["images"] for row in run(job, tmp_path)] == [10]*6 + [len(expected) - 60]
    _shard_file(tmp_path, 2).unlink()
    assert [row["shard"] for row in run(job, tmp_path)] == [2] and lines(tmp_path) == expected
    _shard_file(tmp_path, 2).write_text('{"image_id": 1}\n')
    assert [row["shard"] for row in run(job, tmp_path)] == [2] and lines(tmp_path) == expected    # damaged, so again
    with locked(tmp_path), pytest.raises(NocError, match="another run is writing it"): run(job, tmp_path)

@pytest.mark.slow
def test_a_killed_driver_leaves_each_shard_once(world, tmp_path):
    "After SIGKILL at random moments, each shard exists once with the right bytes, and no other file is left."
    job, expected = world
    run(job, tmp_path/"whole")
    rng, out, kills = random.Random(0), tmp_path/"killed", 0
    shards = lambda: len(list(out.glob("part-*.jsonl")))
    while shards() < 7:
        child = multiprocessing.get_context("fork").Process(target=run, args=(job, out))
        at = shards() + rng.randint(0, 2); child.start()
        while child.is_alive() and (shards() < at or not (out/"job.json").exists()): time.sleep(.002)
        child.join(rng.uniform(0, .3)); kills += child.is_alive(); child.kill(); child.join()
    _temporary_path(out/"part-000001.jsonl").write_bytes(b"{")                      # what a kill during a write leaves
    _shard_file(out, 1).unlink()
    assert [row["shard"] for row in run(job, out)] == [1]
    content = lambda folder: {p.name: p.read_bytes() for p in folder.iterdir()}
    assert kills >= 2 and content(out) == content(tmp_path/"whole") and lines(out) == expected

def actors():
    "Return the process ids of Ray's actors of this package, which their titles show."
    def title(p):
        try: return (p/"cmdline").read_bytes()
        except OSError: return b""
    pids = [p for p in Path("/proc").iterdir() if p.name.isdecimal()]
    return [int(p.name) for p in pids if title(p).startswith(b"ray::") and b"_Worker" in title(p)]

DRIVER = """
import sys
from noc_nb.models.pipeline import CaptionOptions
from noc_nb.commands.distributed import caption_shards
from noc_nb.models.source import Job
src, data, out = sys.argv[1:]
caption_shards(Job(src, "toy", data=data, options=CaptionOptions(batch=5)), out, 2, shard=10)
"""

@pytest.mark.slow
@with_ray
def test_a_job_resumes_after_its_ray_driver_is_killed(world, tmp_path):
    "After SIGKILL of the process that runs Ray, its workers end, and the resumed job has the same lines."
    job, expected = world
    before, out = set(actors()), tmp_path/"out"
    child = subprocess.Popen([sys.executable, "-c", DRIVER, job.src, job.data, str(out)], stderr=subprocess.PIPE)
    until = time.time() + 300
    while child.poll() is None and not any(out.glob("part-*.jsonl")) and time.time() < until: time.sleep(.005)
    if child.poll() not in (None, 0): pytest.skip(f"ray does not start here: {child.stderr.read().decode()[-200:]}")
    assert child.poll() is None and len(list(out.glob("part-*.jsonl"))) < 7          # in the middle of the job
    child.kill(); child.wait()
    while set(actors()) - before and time.time() < until: time.sleep(.1)
    assert not set(actors()) - before
    made = {p.name: p.stat().st_mtime_ns for p in out.glob("part-*.jsonl")}
    left = [n for n in range(7) if _shard_file(out, n).name not in made]
    assert [row["shard"] for row in run(job, out)] == left
    assert lines(out) == expected and not list(out.glob(".*"))
    assert all((out/name).stat().st_mtime_ns == time_ for name, time_ in made.items())  # no shard is written twice

@pytest.mark.slow
@with_ray
def test_workers_write_the_same_lines_though_one_is_killed(world, ray, tmp_path):
    "One worker writes the same lines as a run without Ray, and so do two of which one is killed."
    job, expected = world
    costs = run(job, tmp_path/"1", 1)
    assert [row["shard"] for row in costs] == list(range(7)) and lines(tmp_path/"1") == expected
    killed, done = [], threading.Event()
    def kill():
        while not done.is_set() and not killed:
            found = actors() if _shard_file(tmp_path/"2", 0).exists() or _shard_file(tmp_path/"2", 1).exists() else []
            if found: killed.append(random.Random(0).choice(found)); os.kill(killed[0], signal.SIGKILL)
            time.sleep(.01)
    killer = threading.Thread(target=kill); killer.start()
    try: costs = run(job, tmp_path/"2", 2)
    finally: done.set(); killer.join()
    assert killed and [row["shard"] for row in costs] == list(range(7)) and lines(tmp_path/"2") == expected
    _shard_file(tmp_path/"2", 3).unlink()                       # a run without Ray completes a run with Ray
    assert [row["shard"] for row in run(job, tmp_path/"2")] == [3] and lines(tmp_path/"2") == expected

def typed(monkeypatch, job, out, *, spread=None, **options):
    "Run `noc_caption` on the job's detections; `spread` is called in place of Ray."
    if spread: monkeypatch.setattr("noc_nb.commands.distributed._spread", spread)
    noc_caption(job.src, out=str(out), model="toy", data=job.data, batch=2, **options)

def in_turn(stop=99):
    "Return a function that captions shards in this process, in reverse order, and fails after `stop` shards."
    def spread(worker, todo, workers, gpus):
        for done, n in enumerate(reversed(todo)):
            if done == stop: raise KeyboardInterrupt
            yield worker.caption(n)
    return spread

def test_the_command_with_workers_writes_what_one_process_writes(world, tmp_path, monkeypatch, capsys):
    "`--workers` gives the same lines, page and texts, refuses what exists, and resumes after an interruption."
    job, _ = world
    def page(name): return (tmp_path/name).read_text()
    one = dict(html=str(tmp_path/"one.html"), txt=str(tmp_path/"one"))
    several = dict(html=str(tmp_path/"several.html"), txt=str(tmp_path/"several"), workers=2)
    typed(monkeypatch, job, tmp_path/"one.jsonl", **one)
    with pytest.raises(KeyboardInterrupt): typed(monkeypatch, job, tmp_path/"out", spread=in_turn(2), **several)
    assert len([*(tmp_path/"out").glob("part-*.jsonl")]) == 2
    with pytest.raises(NocError, match="expected .*--resume"): typed(monkeypatch, job, tmp_path/"out", **several)
    typed(monkeypatch, job, tmp_path/"out", spread=in_turn(), resume=True, **several)
    assert (tmp_path/"out/captions.jsonl").read_bytes() == (tmp_path/"one.jsonl").read_bytes()
    assert page("several.html") == page("one.html")
    def texts(folder): return {p.name: p.read_text() for p in (tmp_path/folder).iterdir()}
    assert texts("several") == texts("one") and len(texts("one")) > 60
    for odd, out, line in ((0, tmp_path/"x", "--workers 0: expected 1 or more"), (1, "", "--out : expected a folder"),
                           (1, tmp_path/"one.jsonl", "one.jsonl: expected a folder, which --workers needs")):
        with pytest.raises(NocError, match=line): typed(monkeypatch, job, out, workers=odd)
