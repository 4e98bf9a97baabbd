"Test that training ends with the same weights if it is killed, fills the disk, or runs in two processes."
import json, multiprocessing, os, random, resource, shutil, signal, subprocess, sys, time, warnings
from dataclasses import asdict, field, make_dataclass, replace
from functools import partial
from pathlib import Path
import pytest
import torch
import noc_nb
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from fastcore.basics import noop, patch
from safetensors.torch import load_file, save, save_file
from noc_nb.core import NocError, set_seed
from noc_nb.data import CaptionExamples, ImageExamples, Loader
from noc_nb.decode import plain_search
from noc_nb.encoder import CaptionerConfig
from noc_nb.fast.cider import cider_reward
from noc_nb.fast.decode import fast_search
from noc_nb.fast.search import SearchConfig
from noc_nb.files.dataset import load_data
from noc_nb.files.drawing import make_toy
from noc_nb.fit import plain_fit
from noc_nb.heldout import HeldOut
from noc_nb.lab.config import _RANGES, load_config, save_config, without
from noc_nb.lab.disk import read_json
from noc_nb.lab.experiment import Experiment
from noc_nb.lab.models import (PRESETS, Models, Preset, Run, _place_for, _training_search, train_scst_in,
                               train_selector_in, train_xe_in)
from noc_nb.lab.novelty import weighted_f1
from noc_nb.lab.progress import command_lines
from noc_nb.lab.runs import begin, compare_training
from noc_nb.lab.results import table_text
from noc_nb.lab.saving import load_model, save_model
from noc_nb.lab.train import (Batches, ScstTrainConfig, TrainConfig, Trainer, _checkpoints, _checksum,
                              _read_checkpoint, _train_step)
from noc_nb.models.pipeline import CaptionOptions, NovelCaptioner, PipelineConfig
from noc_nb.scores.compare import _of_row, _title
from noc_nb.scores.report import _Report
from noc_nb.scst import SelfCritical, oracle_words, rewarded_images, train_scst
from noc_nb.selector import SelectorConfig
from noc_nb.train_selector import train_selector
from noc_nb.train_xe import build_captioner, train_xe, xe_loss
from noc_nb.vocab import Vocab
from test_hostile import altered

tiny = CaptionerConfig(d_model=32, heads=4, d_ff=64, layers=1, memory=4)
xe = TrainConfig(epochs=3, batch=20, warmup=20, peak=5e-3, save_seconds=0.)
scst = ScstTrainConfig(epochs=2, batch=10, peak=1e-3, save_seconds=0.)
how = SearchConfig(k=3, max_len=12)

@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "Write a small toy world, and a captioner from which self-critical training starts."
    root = make_toy(tmp_path_factory.mktemp("world")/"toy", train=60, val=12, test=5)
    save_model(build_captioner(load_data(root, "toy"), tiny, 1), root/"start")
    return root

# ---- the plain loop

def trained(phase, root, folder, fit, how=how):
    "Train in a folder, and with the plain loop and plain search. Return both models."
    data, start, constrained = load_data(root, "toy"), load_model(root/"start"), phase == "dgbs"
    if phase == "selector":
        cfg = SelectorConfig(d_model=32, heads=4, d_ff=64)
        return train_selector_in(folder, data, cfg, xe), train_selector(data, cfg, xe, fit, f1=weighted_f1)
    if phase == "xe": return train_xe_in(folder, data, tiny, xe, 1), train_xe(data, tiny, xe, 1, fit)
    kept = train_scst_in(folder, data, load_model(root/"start"), scst, constrained, how)
    ids = data.splits["train"] + data.splits["val"]
    words = oracle_words(data, ids, Vocab(start.tokens)) if constrained else None
    search = partial(plain_search, k=how.k, max_len=how.max_len)
    return kept, train_scst(data, start, scst, words, fit, search)

def assert_equal_weights(a, b):
    for name, x in a.state_dict().items(): assert torch.equal(b.state_dict()[name], x), name

@pytest.mark.parametrize("phase, max_len", [("selector", 12), ("xe", 12), ("scst", 12), ("dgbs", 12), ("dgbs", 2)])
def test_the_plain_loop_ends_at_the_same_weights(world, tmp_path, phase, max_len):
    """On the CPU, the trainer and the plain loop give the same weights to the last bit, and the same history, also if
    two tokens leave no room for two words and the end."""
    entries, short = [], replace(how, max_len=max_len)
    def fit(model, loss, batches, *how):                 # with the batches of the trainer
        return plain_fit(model, loss, Batches(**vars(batches)), *how, show=entries.append)
    kept, plain = trained(phase, world, tmp_path, fit, short)
    assert_equal_weights(plain, kept)
    history = [{k: v for k, v in e.items() if k in entries[0]} for e in read_json(tmp_path/"done.json")["history"]]
    assert len(history) == len(entries) > 1                 # the plain CIDEr-D may differ in the last digit
    for ours, theirs in zip(history, entries): assert ours == pytest.approx(theirs, rel=1e-12)

def test_an_unfinished_caption_has_no_gradient(world, tmp_path):
    """One token leaves room for the end alone: no caption has a word, and the only caption of an image without words is
    its own mean. No weight changes in either loop, while the search returns unfinished captions with finite scores."""
    data, start, one = load_data(world, "toy"), load_model(world/"start"), replace(how, max_len=1)
    both = trained("dgbs", world, tmp_path, partial(plain_fit, show=noop), one)
    for model in both: assert_equal_weights(start, model)
    batch = next(iter(Loader(ImageExamples(data, data.splits["train"]), 10)))
    words = [*oracle_words(data, batch.image_ids, Vocab(start.tokens)).values()]
    found = fast_search(start.eval(), batch, words, one)
    assert (found.scores[~found.ended] > -torch.inf).any()

# ---- kill -9

def train(phase, root, folder):
    "Train one phase, resuming an earlier run; called in a separate process."
    torch.set_num_threads(1)
    data = load_data(root, "toy")
    if phase == "xe": train_xe_in(folder, data, tiny, xe, 1, resume=True)
    else: train_scst_in(folder, data, load_model(root/"start"), scst, True, how, resume=True)

def outcome(folder):
    "Return the results of training without times: history, best weights and last checkpoint."
    history = read_json(folder/"done.json")["history"]
    history = [{k: v for k, v in h.items() if k != "seconds" and "/s" not in k} for h in history]
    return history, load_file(folder/"best/model.safetensors"), _read_checkpoint(_checkpoints(folder)[-1])[0]

def assert_same(a, b):
    assert a[0] == b[0]
    for one, two in zip(a[1:], b[1:]):
        assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)

@pytest.mark.slow
@pytest.mark.parametrize("phase, kills", [("xe", 6), ("scst", 4)])
def test_a_killed_and_resumed_training_gives_the_same_weights(world, tmp_path, phase, kills):
    spawn = multiprocessing.get_context("forkserver")
    spawn.set_forkserver_preload(["noc_nb.scst"])
    def start(name):
        process = spawn.Process(target=train, args=(phase, world, tmp_path/name))
        process.start()
        return process
    def steps(name): return max((int(c.stem.removeprefix("step-")) for c in _checkpoints(tmp_path/name)), default=0)
    process = start("whole"); process.join()
    assert process.exitcode == 0
    whole, rng, seen = outcome(tmp_path/"whole"), random.Random(0), []
    while len(seen) < kills:
        process, last = start("cut"), steps("cut") + rng.randint(1, steps("whole")//kills)
        while process.is_alive() and steps("cut") < last: time.sleep(.002)
        process.join(rng.uniform(0, .02))                          # at any moment of a step or after it
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL); process.join()
            seen.append(steps("cut"))
        else:                                                      # it ended before the kill: check, begin again
            assert_same(outcome(tmp_path/"cut"), whole); shutil.rmtree(tmp_path/"cut")
    start("cut").join()
    assert_same(outcome(tmp_path/"cut"), whole)
    assert len(set(seen)) > kills/2, f"killed after steps {seen}"

# ---- a full disk

class Wide(torch.nn.Linear):
    def __init__(self): super().__init__(100, 100)
    def save(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), Path(folder)/"model.safetensors")

def wide(folder):
    set_seed(0)
    return Trainer(Wide(), lambda model, x: (model(x).square().mean(), {}), replace(xe, epochs=4), folder, 100,
                   save=Wide.save)

def wide_batches(at=None, act=None):
    def batches(epoch, start=0, parts=1, mine=(0,)):
        if epoch == at: act()
        return list(torch.randn(6, 10, 100, generator=torch.Generator().manual_seed(epoch)))[start:]
    return batches

@pytest.mark.parametrize("how", ["tmpfs", "limit"])
def test_a_full_disk_loses_no_checkpoint(tmp_path, how):
    disk = tmp_path/"disk"; disk.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how == "tmpfs":
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True)
        if mounted.returncode: pytest.skip("no right to mount a tmpfs; the other case limits the size of files instead")
    def fill():
        if how == "limit": return resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with open(disk/"filler", "wb", buffering=0) as f:
            try:
                while True: f.write(bytes(1000))
            except OSError: pass
    def empty():
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        (disk/"filler").unlink(missing_ok=True)
    try:
        whole = wide(tmp_path/"whole").fit(wide_batches())
        with pytest.raises(NocError, match="cannot be written .*saved files are intact: correct this and resume"):
            wide(disk/"run").fit(wide_batches(2, fill))
        empty()
        last = _checkpoints(disk/"run")[-1]
        assert _read_checkpoint(last)[1]["step"] == 12 and not list((disk/"run/checkpoints").glob(".*"))
        assert torch.equal(wide(disk/"run").fit(wide_batches(), resume=True).weight, whole.weight)
    finally:
        empty()
        if how == "tmpfs": subprocess.run(["umount", disk], check=True)

# ---- finished runs and unreadable files

def test_altered_weights_are_not_used(tmp_path):
    "A finished run needs no checkpoints, but the weights that it wrote."
    weight = wide(tmp_path).fit(wide_batches()).weight
    for file in _checkpoints(tmp_path): file.unlink()
    for file in sorted((tmp_path/"best").iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole[:-2] + b"  ")
        with pytest.raises(NocError, match=f"{file.name}: was altered: expected the weights of this run"):
            wide(tmp_path).fit(None, resume=True)
        file.write_bytes(whole)
    (tmp_path/"best/README.md").write_text("a card, which people complete")
    assert torch.equal(wide(tmp_path).fit(None, resume=True).weight, weight)

@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error"),
                                   MemoryError(), RuntimeError("can't allocate memory")], ids=repr)
def test_unreadable_checkpoints_are_kept(tmp_path, monkeypatch, error):
    "A checkpoint that cannot be opened is kept, because it may be complete, and training stops with an error."
    whole = wide(tmp_path).fit(wide_batches())
    (tmp_path/"done.json").unlink()
    before = {path: path.read_bytes() for path in _checkpoints(tmp_path)}
    assert len(before) == 2
    def opened(*args): raise error
    with monkeypatch.context() as broken:
        broken.setattr("noc_nb.lab.train.safe_open", opened)
        with pytest.raises(NocError, match=r"step-\d+.safetensors: cannot be read"):
            wide(tmp_path).fit(wide_batches(), resume=True)
    (folder := tmp_path/"checkpoints/step-99999999.safetensors").mkdir()
    with pytest.raises(NocError, match="step-99999999.safetensors: cannot be read"):
        wide(tmp_path).fit(wide_batches(), resume=True)
    folder.rmdir()
    assert {path: path.read_bytes() for path in _checkpoints(tmp_path)} == before
    assert torch.equal(wide(tmp_path).fit(wide_batches(), resume=True).weight, whole.weight)

@pytest.mark.parametrize("name, resume, told", [
    ("best/mine.txt", False, "no training run: expected a new folder"), ("best/mine.txt", True, "no training run"),
    ("captions.json", True, "no training run"), ("run.json", False, "run.json does not record how the output was made"),
    ("run.json", True, "run.json does not record how the output was made")])
def test_a_folder_of_somebody_else_is_left_unchanged(tmp_path, resume, name, told):
    file = tmp_path/"run"/name
    file.parent.mkdir(parents=True)
    file.write_text('{"mine": 1}')
    with pytest.raises(NocError, match=told): wide(tmp_path/"run").fit(wide_batches(), resume=resume)
    assert [path.name for path in tmp_path.rglob("*.*")] == [file.name] and file.read_text() == '{"mine": 1}'

KINDS = [*_RANGES, Preset, TrainConfig, ScstTrainConfig, PipelineConfig, CaptionOptions]

@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_setting_that_a_file_lacks_has_its_default(tmp_path, kind):
    "If a configuration gets a new field, older files are read and older runs resume, with the field's default."
    wider = make_dataclass(f"Wider{kind.__name__}", [("extra", int, field(default=7))], bases=(kind,), frozen=True)
    usual, about = kind(), tmp_path/"run.json"
    save_config(tmp_path/"config.json", usual)
    assert asdict(load_config(wider, tmp_path/"config.json")) == asdict(usual) | dict(extra=7)
    begin(about, "out", dict(config=usual))
    assert begin(about, "out", dict(config=wider()), resume=True)
    begin(tmp_path/"old.json", "out", dict(config=usual))
    with pytest.raises(NocError, match="out: config.extra: 7 in the record, 8 now: expected no change"):
        begin(tmp_path/"old.json", "out", dict(config=wider(extra=8)), resume=True)

@pytest.mark.parametrize("kind, free", [(SelectorConfig, ["threshold"]), (CaptionerConfig, ["d_feature", "d_word"])])
def test_a_new_setting_invalidates_no_trained_model(tmp_path, kind, free):
    "A new setting with its default does not change the folder of a trained model; another value does."
    wider = make_dataclass("Wider", [("extra", int, field(default=7))], bases=(kind,), frozen=True)
    small, other = ({"heads": n, **dict.fromkeys(free, n)} for n in (2, 4))
    folder = tmp_path/"model"
    begin(folder/"run.json", folder, dict(model=without(kind(**small), *free)))
    def place(**settings): return _place_for(folder, dict(model=without(wider(**settings), *free))).name
    assert place(**small) == place(**small | dict.fromkeys(free, 9)) == "model"
    assert len({place(**small, extra=8), place(**small, extra=9), place(**other), "model"}) == 4
    assert _place_for(folder, dict(model=without(kind(**other), *free))).name == place(**other)  # the older form, too

def test_a_changed_setting_names_another_folder(world, tmp_path):
    "A changed setting trains the changed model in another folder; unchanged models are not trained again."
    data, slow = load_data(world, "toy"), dict(warmup=20, peak=5e-3, epochs=1)
    preset = replace(PRESETS["toy"], captioner=tiny, selector=SelectorConfig(d_model=16, heads=2, d_ff=16),
                     train_selector=TrainConfig(**slow), xe=TrainConfig(**slow))
    first = Models(Run(preset), data, tmp_path/"first")
    weights = first.selector().state_dict(), first.captioner("xe").state_dict()
    def trained(name, **changes):
        models = Models(Run(replace(preset, **changes)), data, tmp_path/name, tmp_path/"first")
        before = {*os.listdir(tmp_path/"first")}
        again = models.selector().state_dict(), models.captioner("xe").state_dict()
        same = [all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(weights, again)]
        return same, sorted({*os.listdir(tmp_path/"first")} - before)
    assert trained("search", search=how) == ([True, True], [])
    same, new = trained("selector", train_selector=TrainConfig(**slow | dict(peak=1e-2)))
    assert (same, len(new)) == ([False, True], 1) and new[0].startswith("selector-0.2-0-")
    assert trained("selector again", train_selector=TrainConfig(**slow | dict(peak=1e-2))) == ([False, True], [])
    same, (name,) = trained("captioner", min_count=2)
    assert same[0] and name.startswith("captioner-xe-0-")

def test_a_finished_model_of_changed_code_gives_a_warning(world, tmp_path, monkeypatch):
    "If a module of the paper changes, a finished model is still used, with one line that names the module."
    package = tmp_path/"noc_nb"
    package.mkdir()
    for file in Path(noc_nb.__file__).parent.glob("*.py"): shutil.copy(file, package)
    monkeypatch.setattr(noc_nb, "__file__", str(package/"__init__.py"))
    run = Run(replace(PRESETS["toy"], xe=replace(xe, epochs=1), captioner=tiny))
    def warned(folder=None):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            Models(run, load_data(world, "toy"), tmp_path/("new" if folder else "run"), folder).captioner("xe")
        return [str(w.message) for w in seen if "was trained before" in str(w.message)]
    assert warned() == warned() == warned(tmp_path/"run") == []
    for name in "attention.py", "_modidx.py", "cider.py": (package/name).write_text("# changed\n")
    for again in warned(), warned(tmp_path/"run"):
        assert len(again) == 1 and "captioner-xe-0: was trained before attention.py, cider.py changed; " in again[0]
    done = tmp_path/"run/captioner-xe-0/done.json"
    about = read_json(done)
    done.write_text(json.dumps({key: x for key, x in about.items() if key != "modules"}))
    assert warned() == []                                                # an older version recorded no modules

# ---- a model that is reused

brief = dict(warmup=20, peak=5e-3, epochs=1)
small = replace(PRESETS["toy"], captioner=tiny, selector=SelectorConfig(d_model=16, heads=2, d_ff=16),
                train_selector=TrainConfig(**brief), xe=TrainConfig(**brief), search=how)

@pytest.mark.parametrize("place", ["run", "pipeline"])
def test_a_model_is_not_scored_on_what_it_was_trained_on(world, tmp_path, capsys, place):
    "Scored training images and read held-out words are refused, in a run and in a pipeline; the rest is reported."
    data, run, folder = load_data(world, "toy"), Run(small), tmp_path/place
    first = Models(run, data, tmp_path/"run")
    parts = first.selector(), first.captioner("xe")
    if place == "pipeline": NovelCaptioner(*parts, data.classes).save_pretrained(folder, half=True)
    def reused(**parts):
        models, found = Models(run, replace(data, **parts), tmp_path/"new", folder), []
        for model in models.selector, partial(models.captioner, "xe"):
            try: found.append(model().reused)
            except NocError as e: found.append(str(e).partition(": ")[2].partition(": expected")[0])
        assert len({*found}) == 1, found                         # both models are compared
        return found[0]
    train, test, texts = data.splits["train"], data.splits["test"], data.captions
    def scored(ids): return dict(splits=data.splits | dict(test=ids))
    assert reused() == "" and reused(**scored(test[:1])) == "trained on other splits"
    more = {i: ["A new caption.", *reversed([t.upper() for t in texts[i]])] for i in texts}
    for some in train[:1], train[-3:], train:
        said = f"was trained on {len(some)} of the {len(test) + len(some)} images to score, such as {some[0]}"
        for captions in texts, more: assert reused(**scored([*test, *some]), captions=captions) == said
    turned = dict(zip(texts, [*texts.values()][1:] + [texts[train[0]]])) # other photos with the same numbers
    assert reused(**scored(train), captions=turned) == "trained on other captions, splits"
    def heldout(text): return dict(heldout=HeldOut.of({"it": 2}, {"it": ["qqq", text]}))
    assert reused(**heldout("zzz a")) == "trained on other heldout"
    for text in "a", "on the": assert reused(**heldout(text)) == f"was trained on captions with {text}"
    assert reused(regions=data.regions.without({2})) == "trained on other regions"
    for file in folder.rglob("trained.json"): file.unlink()
    for file in folder.rglob("done.json"):                       # as earlier versions wrote it
        done = read_json(file)
        del done["weights"]["trained.json"]
        file.write_text(json.dumps(done))
    capsys.readouterr()
    with command_lines(): assert reused() == "trained on unrecorded data"
    assert capsys.readouterr().err.count(": trained on unrecorded data, so nothing could be compared\n") == 2

def test_a_captioner_keeps_the_record_of_its_start(world, tmp_path):
    "Self-critical training on other images records both trainings; `val` must not be among the first's images."
    data, once = load_data(world, "toy"), replace(scst, epochs=1)
    def on(train, **more): return replace(data, splits=data.splits | dict(train=train, **more))
    first, second = data.splits["train"][:30], data.splits["train"][30:]
    start = train_xe_in(tmp_path/"xe", on(first), tiny, replace(xe, epochs=1), 1)
    with pytest.raises(NocError, match="captioner to start from: was trained on 2 of the 2 images to score"):
        train_scst_in(tmp_path/"wrong", on(second, val=first[:2]), start, once, search_cfg=how)
    train_scst_in(tmp_path/"scst", on(second), start, once, search_cfg=how)
    record = load_model(tmp_path/"scst/best").trained
    for ids in first, second:
        with pytest.raises(NocError, match=f"was trained on {len(ids)} of"): compare_training(record, data, ids, "it")
    assert compare_training(record, on(second), data.splits["test"], "it") == "trained on other splits"
    start.trained = None
    train_scst_in(tmp_path/"unknown", on(second), start, once, search_cfg=how)
    assert load_model(tmp_path/"unknown/best").trained is None

def test_rows_tables_and_pages_say_what_models_were_trained_on(world, tmp_path):
    "Models trained on simulated detections are used with true boxes: each row says so, also one that is scored later."
    first = Models(Run(small), load_data(world, "toy"), tmp_path/"run")
    assert all("reused" not in vars(model) for model in (first.selector(), first.captioner("xe")))
    data, run = load_data(world, "toy", "gt"), Run(small, "gt")
    def rows(**more):
        experiment = Experiment(run, data, tmp_path/"gt", metrics=("C",), models=tmp_path/"run", **more)
        return experiment.complete([("none", "xe", None)], [("selector", .2), ("selector_no_inner", .2)])
    for more in {}, dict(resume=True):
        selector, new, none = rows(**more)
        assert "models" not in new["config"]                     # this selector was trained now, on true boxes
        assert {r["config"]["models"] for r in (none, selector)} == {"trained on other regions"}
        (tmp_path/"gt/rows.jsonl").unlink()                      # the captions are not generated again
    assert "simulated detections; models trained on other regions**" in table_text([new, none], 1, "toy")
    line = _of_row(none, _Report(dict(scores=none["metrics"]), None), tmp_path, "").name
    assert _title(line) == "No constraints · cross-entropy · trained on other regions"

def test_altered_states_give_one_line(tmp_path):
    "An invalid state in a checkpoint with a valid checksum, or an invalid `done.json`, gives at most one line."
    wide(tmp_path).fit(wide_batches())
    done, rng = tmp_path/"done.json", random.Random(0)
    about, last = read_json(done), _checkpoints(tmp_path)[-1]
    tensors, state = _read_checkpoint(last)
    tensors = {name: x.clone() for name, x in tensors.items()}     # copies, because the file is overwritten
    def resume():
        try: wide(tmp_path).fit(wide_batches(), resume=True)
        except NocError as e: assert "\n" not in str(e)
    for _ in range(30):
        done.write_text(json.dumps(altered(about, rng)))
        resume()
    for _ in range(30):
        text = json.dumps(altered(state, rng))
        last.write_bytes(save(tensors, dict(state=text, checksum=_checksum(tensors, text))))
        done.unlink(missing_ok=True)
        resume()
    for lacking in ("ranks", "order", "epoch"):
        text = json.dumps({key: value for key, value in state.items() if key != lacking})
        last.write_bytes(save(tensors, dict(state=text, checksum=_checksum(tensors, text))))
        done.unlink(missing_ok=True)
        with pytest.raises(NocError, match="expected a checkpoint of this run"):
            wide(tmp_path).fit(wide_batches(), resume=True)
        assert last.exists()

def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    "A second run in the same folder is refused, because it would delete the first run's checkpoints."
    def second(): wide(tmp_path/"run").fit(wide_batches(), resume=True)
    def act():
        with pytest.raises(NocError, match="run: another run is writing it"): second()
    wide(tmp_path/"run").fit(wide_batches(1, act))
    second()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

# ---- mixed precision

def in_16_bits(cfg, folder):
    "An accelerator as on a GPU, where training computes in 16 bits."
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, mixed_precision="bf16", project_dir=folder)

def test_a_trained_model_computes_as_the_one_read_back(tmp_path, monkeypatch):
    "After training in 16 bits, the returned model computes in 32 bits, like the model that a finished run reads."
    monkeypatch.setattr("noc_nb.lab.train._accelerator", in_16_bits)
    trained, stored = wide(tmp_path/"run").fit(wide_batches()), Wide()
    stored.load_state_dict(load_file(tmp_path/"run/best/model.safetensors"))
    x = torch.randn(9, 100, generator=torch.Generator().manual_seed(0))
    y = trained(x)
    assert torch.equal(stored(x), y)
    with torch.autocast("cpu", torch.bfloat16): assert not torch.equal(stored(x).float(), y)

# ---- two processes

def phase_of(phase, root, folder):
    "Return a trainer without dropout, and its batches."
    data, calm = load_data(root, "toy"), replace(tiny, dropout=0.)
    captioner = build_captioner(data, calm, 1)
    vocab, features = Vocab(captioner.tokens), data.region_features()
    if phase == "xe":
        return Trainer(captioner, xe_loss, xe, folder, 32), Batches(CaptionExamples(data, vocab), 20)
    ids = rewarded_images(data)
    loss = SelfCritical(cider_reward(data, ids, vocab), {}, _training_search(cfg=how))
    return Trainer(captioner, loss, scst, folder, 32), Batches(ImageExamples(data, ids, features), 7)

def twenty_losses(phase, root, folder):
    trainer, loader = phase_of(phase, root, folder)
    acc, losses = trainer.accelerator, []
    trainer.model.train()
    while len(losses) < 20:
        for part in loader(trainer.epoch, 0, acc.num_processes, [acc.process_index]):
            _train_step(trainer, [part])
            losses.append(sum(gather_object([float(trainer.pending[-1][1]["loss"])])))
        trainer.epoch += 1
    return losses[:20]

@patch
def fit_until(self:Trainer, loader, step):
    "Train, and raise an error before a given step."
    def dying(*args):
        for n, batch in enumerate(loader(*args)):
            if self.step == step: raise InterruptedError
            yield batch
    class Dying(list):
        def __init__(self, *args): super().__init__(loader(*args)); self.args = args
        def __iter__(self): return dying(*self.args)
    return self.fit(Dying, resume=True)

def worker(root, out):
    "Run twenty steps of both phases, and an interrupted and resumed run, in each of two processes."
    found = {phase: twenty_losses(phase, root, out/phase) for phase in ("xe", "scst")}
    ends = []
    for name, step in ("whole", None), ("cut", 8):
        if step:
            try: (t := phase_of("xe", root, out/name))[0].fit_until(t[1], step)
            except InterruptedError: pass
        trainer, loader = phase_of("xe", root, out/name)
        ends.append([p.detach().clone() for p in trainer.fit(loader, resume=True).parameters()])
    found["resumed"] = all(torch.equal(a, b) for a, b in zip(*ends)) and len(ends[0]) > 0
    if trainer.accelerator.is_main_process: (out/"found.json").write_text(json.dumps(found))

@pytest.mark.slow
def test_two_processes_train_one_model(world, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    command += [world, tmp_path]
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = read_json(tmp_path/"found.json")
    for phase in "xe", "scst":
        alone = twenty_losses(phase, world, tmp_path/f"{phase} alone")
        assert max(abs(a - b) for a, b in zip(alone, found[phase])) < 1e-4, (phase, alone, found[phase])
    assert found["resumed"]

if __name__ == "__main__":
    torch.set_num_threads(1)
    worker(*map(Path, sys.argv[1:]))
