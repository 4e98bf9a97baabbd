"""Find mutants that no test detects.

`python tests/mutants.py OUT.jsonl` draws 200 of cosmic-ray's mutants of the paper's modules, at most one at each place
in the code, and appends a line for each to OUT: the place, the operator, the line before and after, and the test or
chapter that fails, "survived", or "timeout" after 90 seconds of processor time (without a mutant, the tests take less
than half of that). `python tests/mutants.py OUT.jsonl 1 fast lab scores models` draws with seed 1 from the modules of
TESTS in these folders. The chapter of a module is tried before its tests, the chapters that import it after them. It
continues where it stopped; a line that is deleted from OUT is tried again. It needs the tests' environment, cosmic-ray
(`pip install --target DIR cosmic-ray` and PYTHONPATH=DIR), NOC_DATA, and one to two hours of a core. Repository checks
are not run, because they compare modules with notebooks, nor are the longest tests, which could still detect a
survivor."""
import ast, contextlib, itertools, json, multiprocessing, os, random, re, resource, shutil, signal, sys, tempfile
from pathlib import Path
import hypothesis, matplotlib.pyplot, pandas, pytest, torch  # here, so that a fork does not have to
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from execnb.shell import CaptureShell
from book import CHAPTERS, cells, module_of, name

HERE, N, LIMIT = Path(__file__).resolve().parent, 200, 90
TESTS = {  # modules: test files; parts of the names of sharp tests in them, in the order in which they run
    "selector": ("pins", "half inner targets selector papers_weights"),
    "encoder decoder captioner": (
        "pins shipped", "stepping transformer papers_sizes known_words averaged widened folder "
        "another_size so_many_words without_regions fresh special toy_is"),
    "beam grid cbs": (
        "pins search prices hostile", "plain_beam top_row unfinished phrase ties_ at_least_counts "
        "by_hand next_words cannot_end still_take checked nest many_groups logits algorithm_1 "
        "machine exhaustive is_beam_search 32_bit odd_scores minus_inf infinite_prices never_worse defaults_of"),
    "constraints": ("pins shipped", "words rules rows images_and special toy_is"),
    "cider evaluation fast/cider lab/metrics": (
        "pins scores", "cider reward common new_word unequal meteor caption_scores f1_equals"),
    "lab/novelty": ("pins scores results", "weight f1 non_novel intervals protocols difference_is committed"),
    "train_selector train_xe scst": (
        "pins", "scst xe vocabulary vector known adam first special function_words dropout reward images dgbs content "
        "living val selector best"),
    "fast/search fast/modes fast/expansions fast/groups fast/pool fast/prices": (
        "prices search pins", "plain_beam top_row checked many_groups infinite_prices counts_musts named large_prices "
        "plain literal_grid exhaustive report infinity no_more_than too_early form_grow bank next_words logits "
        "cannot_end still_take stepping 32_bit no_constraints two_places"),
    "fast/decode": ("pins zeros", "pipeline region half of_another cbs_row omitted no_tokens selector_and lowest"),
    "lab/experiment lab/models": (
        "pins runs", "rows row score published papers_weights val_counts averaged best_epoch dgbs_is after_the_last "
        "no_run selector_is_a_part reward_is rule_is"),
    "lab/verdict": ("pins scores", "over_runs same_seeds minus equal_systems difference_is"),
    "lab/results": (
        "hostile paper pins scores", "torn rows last_whole odd number minus over_runs same_seeds"),
    "scores/compare scores/systems scores/page": (
        "scores pins", "equal_systems difference fewer page_of function_is over_runs same_seeds"),
    "scores/task scores/report scores/quality": (
        "scores photos", "f1_equals protocols chair boxes list scripts function_is get_the_photos left_out"),
    "scores/java": (
        "scores download pins", "spice_of spice_comes meteor_equals scripts odd_answers java_that windows"),
    "models/pipeline models/classes": (
        "pins zeros hostile detections", "pipeline omitted averaged phrase classes region categories numbers "
        "lowest selector_and no_tokens odd_settings takes_the_place longest_form")}
TESTS = {module: how for modules, how in TESTS.items() for module in modules.split()}
CHAPTER = {module_of(chapter).replace(".", "/"): chapter for chapter in CHAPTERS}

def importers(module):
    "Return the chapters that import a module, without its own."
    import_ = re.compile(rf"noc_nb\.{module.replace('/', '[.]')} import")
    return [chapter for name, chapter in CHAPTER.items()
            if name != module and any(import_.search(cell.source) for cell in cells(chapter, "code"))]

def what_runs(code):
    "Return a module's syntax tree without annotations and docstrings."
    tree = ast.parse(code)
    for node in ast.walk(tree):
        for name in {"annotation", "returns"}.intersection(node._fields): setattr(node, name, None)
        if isinstance(getattr(node, "body", None), list):
            node.body = [x for x in node.body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return ast.dump(tree)

def mutants(module, code):
    "Return the mutations of a module: (module, operator, number of the mutation, line and column)."
    nodes = [*ast_nodes(get_ast(code))]
    for name in plugins.operator_names():
        operator = plugins.get_operator(name)
        if operator.arguments(): continue
        found = itertools.chain.from_iterable(map(operator().mutation_positions, nodes))
        yield from ((module, name, k, begin) for k, (begin, _) in enumerate(found))

def sample(originals, seed):
    "Draw N mutants; yield the entry of each in OUT, and the code of the module."
    every, taken = [mutant for module, code in originals.items() for mutant in mutants(module, code)], set()
    random.Random(seed).shuffle(every)
    for module, name, k, begin in every:
        if len(taken) == N: return
        if (module, begin) in taken: continue
        old, new = originals[module], mutate_code(originals[module], plugins.get_operator(name)(), k)
        with contextlib.suppress(SyntaxError):
            if what_runs(old) == what_runs(new): continue
            taken.add((module, begin))
            diff = next(pair for pair in zip(old.splitlines(), new.splitlines()) if pair[0] != pair[1])
            yield dict(module=module, line=begin[0], operator=name, number=k, diff=diff), new

class InOrder(list):
    "A pytest plugin that orders tests by these parts of their names."
    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: next((k for k, part in enumerate(self) if part in item.name), len(self)))

def run_tests(module, folder):
    "Run the tests of a module until the first failure."
    files, names = map(str.split, TESTS[module])
    how = "-x -q -p no:cacheprovider -n 0 -rfE --tb=line -k".split()
    files = [f"{HERE}/test_{name}.py" for name in files]
    sys.exit(pytest.main([*files, *how, " or ".join(names)], plugins=[InOrder(names)]))

def run_chapter(chapter, folder):
    "Run a chapter without data until the first failure, with the package's module in place of its exported cells."
    for variable in "NOC_DATA", "NOC_COMMONGEN": os.environ.pop(variable, None)
    os.chdir(chapter.parent)
    shell, module = CaptureShell(path=chapter.parent), module_of(chapter)
    shell.user_ns["__package__"] = f"noc_nb.{module}".rpartition(".")[0]
    file = Path(folder, "noc_nb", f"{module.replace('.', '/')}.py")
    parts = [(file.read_text(), name(chapter))] if file.exists() else []
    parts += [(cell.source, cell.where) for cell in cells(chapter, "code")
              if not (cell.exported or {"slow", "gpu"} & cell.directives.keys())]
    for source, where in parts:
        shell.run(source)
        if shell.exc: sys.exit(f"FAILED {where}")

def in_fork(run, what, folder):
    "Run tests in a fork, with the package in `folder`. Return None, or the test that fails, or timeout."
    def fork(log):
        os.setsid()
        os.chdir(folder)
        for stream in 1, 2: os.dup2(log.fileno(), stream)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
        os.environ["PYTHONPATH"] = folder
        run(what, folder)
    with tempfile.TemporaryFile("w+") as log:
        child = multiprocessing.get_context("fork").Process(target=fork, args=(log,))
        child.start()
        child.join(4*LIMIT)                                    # a test that waits takes no processor time
        late = child.is_alive() or child.exitcode < 0
        with contextlib.suppress(ProcessLookupError): os.killpg(child.pid, signal.SIGKILL)
        child.join()
        if late or not child.exitcode: return "timeout" if late else None
        log.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) (?:\S*?(test_\w+\.py\S*)|(nbs/.*))", log.read(), re.M)
    return failed[1] or failed[2] if failed else f"{what}: no test could run"

def verdict(module, folder):
    "Return the test or chapter that fails, or survived, or timeout; and CPU seconds."
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    stages = [(run_chapter, CHAPTER[module]), (run_tests, module), *((run_chapter, c) for c in importers(module))]
    found = next(filter(None, (in_fork(*stage, folder) for stage in stages)), "survived")
    return dict(verdict=found, seconds=round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began))

def main(out, seed=0, *folders):
    rows = [*map(json.loads, open(out))] if os.path.exists(out) else []
    done = [(row["module"], row["operator"], row["number"]) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(shutil.copytree(HERE.parent/"noc_nb", Path(folder, "noc_nb")))
        originals = {module: (package/f"{module}.py").read_text() for module in TESTS
                     if module.rpartition("/")[0] in (folders or [""])}
        sys.path.insert(0, folder)
        sys.dont_write_bytecode = True
        for row, code in sample(originals, int(seed)):
            if (row["module"], row["operator"], row["number"]) in done: continue
            file = package/f"{row['module']}.py"
            file.write_text(code)
            row |= verdict(row["module"], folder)
            file.write_text(originals[row["module"]])
            with open(out, "a") as lines: lines.write(json.dumps(row) + "\n")

if __name__ == "__main__": main(*sys.argv[1:])
