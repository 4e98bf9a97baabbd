"What a run owns: one name for an output, nothing of others, and no finished work that is lost at any moment."
import errno, os, re
from pathlib import Path
import pytest
from noc_nb.core import NocError
from noc_nb.lab.disk import beside, in_use, whole_file, write_json
from noc_nb.lab.runs import begin, locked, state_of, whole_folder
from test_hostile import evaluated

def texts(folder):
    "Name -> text of all files in a folder."
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}

def test_an_output_has_one_name(tmp_path, monkeypatch):
    "However it is written: a link, a link to the folder above, a way around. One lock, and one place for what is made."
    monkeypatch.chdir(tmp_path)
    for name in "deep/run", "other": Path(name).mkdir(parents=True)
    for link, to in {"link": "deep/run", "above": "deep", "other/again": "../link"}.items(): os.symlink(to, link)
    names = "deep/run", "link", "above/run", "other/again", "link/../run", "other/../deep//run/", tmp_path/"link"
    for one in names:
        with locked(one):
            for other in names:
                with pytest.raises(NocError, match="another run is writing it"): locked(other).__enter__()
        with whole_folder(one) as new: (new/"a.txt").write_text(str(one))
        assert texts(Path("deep/run")) == {"a.txt": str(one)}
    assert Path("link").is_symlink() and sorted(os.listdir()) == ["above", "deep", "link", "other"]

def test_a_run_removes_only_what_killed_runs_left(tmp_path):
    "Names of other tools stay, and what another run writes below; a run that is refused removes nothing at all."
    run = tmp_path/"run"
    (run/"part").mkdir(parents=True)
    others = [run/".a.7.tmp", run/"part/.b.host.7.tmp", tmp_path/".run.old", tmp_path/".run.lock", run/"noc_nb.tmp"]
    left = [beside(run), beside(run, "old"), beside(run/"part/a"), beside(run/"x.safetensors"), beside(run/"part")]
    for path in others + left[1:]: path.write_text("mine")
    left[0].mkdir()
    def there(): return {path for path in others + left if path.exists()}
    with pytest.raises(NocError), locked(run): begin(run/"part/.a.7.tmp", run, dict(k=5), made=True)
    assert there() == {*others, *left}
    with whole_file(run/"part/a") as f, in_use(left[3]):
        f.write("this run goes on ")
        with locked(run): begin(run/"run.json", run, dict(k=5))
        assert there() == {*others, left[3]}
        f.write("and ends")
    with locked(run): pass
    assert there() == {*others} and (run/"part/a").read_text() == "this run goes on and ends"

def killed_in(path, n):
    "A process replaces a folder, and ends without a word at its n-th rename; whether it came so far."
    if not (child := os.fork()):
        rename, calls = Path.rename, []
        def renamed(*args):
            calls.append(args)
            if len(calls) == n: os._exit(9)
            return rename(*args)
        Path.rename = renamed
        try:
            with locked(path), whole_folder(path, {}) as new: (new/"a.txt").write_text("new")
        finally: os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_run_killed_between_renames_loses_nothing(tmp_path, n):
    "The folder was changed by somebody (the state of before is empty), so both versions must be found."
    run = tmp_path/"run"
    run.mkdir()
    (run/"a.txt").write_text("old")
    assert killed_in(run, n) == (n < 4)                          # it has three
    with locked(run): pass
    versions = [texts(path)["a.txt"] for path in tmp_path.iterdir()]
    assert sorted(versions) in (["old"], ["new", "old"])
    if versions == ["old"] and n != 3: assert (run/"a.txt").exists()

@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.ESTALE])
def test_a_rename_that_fails_leaves_the_old_folder(tmp_path, monkeypatch, n, error):
    run, rename, calls = tmp_path/"run", Path.rename, []
    def failing(*args):
        calls.append(args)
        if len(calls) == n: raise OSError(error, os.strerror(error))
        return rename(*args)
    with whole_folder(run) as new: (new/"a.txt").write_text("old")
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(NocError, match=re.escape(f"{run}: cannot be written ({os.strerror(error)})")):
        with whole_folder(run) as new: (new/"a.txt").write_text("new")
    assert texts(tmp_path) == {"run/a.txt": "old"}

def test_notes_in_a_report_that_is_replaced_are_kept(tmp_path):
    "Saved while the captions are scored: a new file, and an edited page. Both versions are named."
    write_json(tmp_path/"s.json", [dict(image_id=i, caption="a dog") for i in (0, 1)])
    out = tmp_path/"out"
    def score(**kw): evaluated(tmp_path, tmp_path/"s.json", out=out, **kw)
    score()
    (out/"report.json").unlink()                                 # which is no loss
    score(show=lambda report: (out/"report.png").unlink())
    for name in "notes.txt", "report.md":
        def annotate(report): (out/name).write_text("mine")
        with pytest.raises(NocError, match=f"out: {name} was put there while .* both are kept") as told:
            score(show=annotate)
        kept = tmp_path/re.search(r"as (\S+)$", str(told.value))[1]
        assert (kept/name).read_text() == "mine" and "report.html" in state_of(kept)
        assert sorted(os.listdir(out)) == ["images.parquet", *(f"report.{x}" for x in ("html", "json", "md", "png"))]
        score()
