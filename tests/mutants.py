"""Find mutants of the paper's modules that no test detects.

`python tests/mutants.py OUT.jsonl` draws 200 of cosmic-ray's mutants, at most one at each place in the code, and
appends a line for each to OUT: the place, the operator, the line before and after, and the test that fails, "survived",
or "timeout" after 90 seconds of processor time (without a mutant, the tests take less than half of that). It continues
where it stopped; a line that is deleted from OUT is tried again. It needs the tests' environment, cosmic-ray (`pip
install --target DIR cosmic-ray` and PYTHONPATH=DIR), NOC_DATA, and one to two hours of a core. Repository checks are
not run, because they compare modules with notebooks, nor are the longest tests, which could still detect a survivor."""
import ast, contextlib, itertools, json, multiprocessing, os, random, re, resource, shutil, signal, sys, tempfile
from pathlib import Path
import hypothesis, pandas, pytest, torch  # here, so that a fork does not have to
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

HERE, N, LIMIT = Path(__file__).resolve().parent, 200, 90
TESTS = {  # modules: test files; parts of the names of sharp tests in them, in the order in which they run
    "selector": ("pins", "eq_1 half loss inner targets selector papers_weights"),
    "encoder decoder captioner": (
        "pins shipped", "stepping transformer memory_starts papers_sizes known_words averaged widened folder "
        "another_size so_many_words multiply without_regions fresh special gradient toy_is"),
    "beam grid cbs": (
        "pins search prices hostile", "plain_beam top_row unfinished phrase absorb repeat ties_ at_least_counts "
        "by_hand many_words next_words cannot_end still_take may_not checked nest many_groups logits algorithm_1 "
        "cbs_is machine is_beam_search 32_bit odd_scores minus_inf so_many infinite_prices prices_never defaults_of"),
    "constraints": ("pins shipped", "words rules rows images_and special toy_is"),
    "cider metrics": ("pins scores", "cider reward common new_word unequal meteor caption_scores f1_equals"),
    "novelty": ("pins scores results", "weight f1 nothing non_novel intervals protocols difference_is committed"),
    "train_selector train_xe scst": (
        "pins", "scst xe vocabulary vector known adam first special badly gradient calm reward images dgbs content "
        "living val selector best")}
TESTS = {module: how for modules, how in TESTS.items() for module in modules.split()}

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

def sample(originals):
    "Draw N mutants; yield the entry of each in OUT, and the code of the module."
    every, taken = [mutant for module, code in originals.items() for mutant in mutants(module, code)], set()
    random.Random(0).shuffle(every)
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

def run_tests(files, names, folder, log):
    "Run tests in a fork, with the package in `folder`, until the first failure."
    os.setsid()
    os.chdir(folder)
    for stream in 1, 2: os.dup2(log.fileno(), stream)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    os.environ["PYTHONPATH"] = folder
    how = "-x -q -p no:cacheprovider -n 0 -rfE --tb=line -k".split()
    files = [f"{HERE}/test_{name}.py" for name in files]
    sys.exit(pytest.main([*files, *how, " or ".join(names)], plugins=[InOrder(names)]))

def verdict(module, folder):
    "Return the test that fails, or survived, or timeout; and CPU seconds."
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with tempfile.TemporaryFile("w+") as log:
        about = (*map(str.split, TESTS[module]), folder, log)
        fork = multiprocessing.get_context("fork").Process(target=run_tests, args=about)
        fork.start()
        fork.join(4*LIMIT)                                     # a test that waits takes no processor time
        late = fork.is_alive() or fork.exitcode < 0
        with contextlib.suppress(ProcessLookupError): os.killpg(fork.pid, signal.SIGKILL)
        fork.join()
        log.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py\S*)", log.read(), re.M)
    name = "timeout" if late else "survived" if fork.exitcode == 0 else failed[1] if failed else "no test could run"
    return dict(verdict=name, seconds=round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began))

def main(out):
    rows = [*map(json.loads, open(out))] if os.path.exists(out) else []
    done = [(row["module"], row["operator"], row["number"]) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(shutil.copytree(HERE.parent/"noc_nb", Path(folder, "noc_nb")))
        originals = {module: (package/f"{module}.py").read_text() for module in TESTS}
        sys.path.insert(0, folder)
        sys.dont_write_bytecode = True
        for row, code in sample(originals):
            if (row["module"], row["operator"], row["number"]) in done: continue
            file = package/f"{row['module']}.py"
            file.write_text(code)
            row |= verdict(row["module"], folder)
            shutil.copy2(HERE.parent/"noc_nb"/file.name, file)
            with open(out, "a") as lines: lines.write(json.dumps(row) + "\n")

if __name__ == "__main__": main(sys.argv[1])
