"""Test the folder for the hub: loaded from there, without noc_nb, it gives the same results as the package."""
import ast, importlib, inspect, json, os, re, subprocess, sys
from collections import Counter
from inspect import signature, unwrap
from operator import attrgetter
import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast
from noc_nb.core import NocError
from noc_nb.lab.disk import read_json
from noc_nb.lab.results import read_rows
from noc_nb.words.generate import grid_beam
import hub
from readme import fences
from test_spellings import tiny_gpt2, trained
from test_words import has, run
from tiny_models import build, tokenizer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
WORDS = ["cat", ["bus", "buses"], "fire hydrant"]
CALLS = [dict(words=WORDS), dict(words=WORDS, mode="grid"), dict(each=["zebra, -cat", "dog|bus"]),
         dict(words=[[10, 11]])]
MODELS = {"GPT-2": "AutoModelForCausalLM", "BART": "AutoModelForSeq2SeqLM", "BLIP": "AutoModelForImageTextToText",
          "LLaVA": "AutoModelForImageTextToText", "T5": "AutoModelForSeq2SeqLM"}

@pytest.fixture(scope="module")
def repository(tmp_path_factory): return hub.write(tmp_path_factory.mktemp("hub")/"words")

def made(name):
    if name != "T5": return build(name)
    import architectures
    model = architectures.build("T5ForConditionalGeneration")
    model.generation_config.update(decoder_start_token_id=0, pad_token_id=1, eos_token_id=2)
    return model, dict(input_ids=torch.tensor([[12, 13], [18, 19]]))

ALONE = """
import json, sys
sys.modules["noc_nb"] = None                               # what imports it fails
import torch, transformers
folder, repository, kind, calls = sys.argv[1:]
model = getattr(transformers, kind).from_pretrained(folder).eval()
tok = transformers.AutoTokenizer.from_pretrained(folder)
inputs = torch.load(folder + "/inputs.pt", weights_only=True)
settings = dict(custom_generate=repository, trust_remote_code=True, num_beams=4, max_new_tokens=8, do_sample=False)
print(json.dumps([model.generate(**inputs, **settings, tokenizer=tok, **call).tolist() for call in json.loads(calls)]))
"""

@pytest.mark.parametrize("name", MODELS)
def test_the_folder_gives_the_same_texts_without_the_package(name, repository, tmp_path):
    model, inputs = made(name)
    settings = dict(custom_generate=grid_beam, num_beams=4, max_new_tokens=8, do_sample=False, processor=tokenizer())
    expected = [model.generate(**inputs, **settings, **call).tolist() for call in CALLS]
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    torch.save(inputs, tmp_path/"inputs.pt")
    command = [sys.executable, "-c", ALONE, tmp_path, repository, MODELS[name], json.dumps(CALLS)]
    place = dict(os.environ, HF_HOME=str(tmp_path/"home"), OMP_NUM_THREADS="1")
    done = subprocess.run([*map(str, command)], cwd=tmp_path, env=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected

def test_the_promises_about_words_hold_for_the_folder_too(repository, monkeypatch):
    "The property that test_words.py tests also holds for the folder's code."
    monkeypatch.syspath_prepend(str(repository))
    own = importlib.import_module("custom_generate.generate")
    assert own.__file__.startswith(str(repository)) and own.grid_beam is not grid_beam
    found, counts = run(70, search=own.grid_beam)
    assert not found and sum(counts.values()) < 40, (found[:3], counts)

def test_the_lines_of_the_card_run(repository, monkeypatch, capsys):
    "The card's example runs with a tokenizer without a padding token, like GPT-2's."
    def spells(name, **settings):
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer, eos_token="[EOS]",
                                       unk_token="[UNK]", **settings)
        made.model_input_names = ["input_ids", "attention_mask"]
        return made
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", spells)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: build("GPT-2")[0])
    typed, called = fences((repository/"README.md").read_text(encoding="utf-8"), "python")[:2]
    names = {}
    exec(typed.replace("REPOSITORY", str(repository)), names)
    texts = capsys.readouterr().out
    assert len(re.findall(r"\bzebra\b", texts)) == len(re.findall(r"\bbus(?:es)?\b", texts)) == 2, texts
    (repository.parent/"installed").mkdir()
    (repository.parent/"installed"/hub.PACKAGE).symlink_to(repository/"custom_generate")
    monkeypatch.syspath_prepend(str(repository.parent/"installed"))
    before = names["ids"].tolist()
    exec(called, names)
    assert names["with_words"].__module__ == "noc_words.arguments" and names["ids"].tolist() == before

def test_the_cards_numbers_are_those_of_the_rows(repository):
    "The first table compares the systems as results/words.jsonl does, on the test part."
    rows = {r["system"]: r for r in read_rows(hub.ROOT/"results/words.jsonl", row="words", part="test")}
    card = (repository/"README.md").read_text(encoding="utf-8")
    lines = {line.split("|")[1]: line.split("|")[2:5] for line in card.splitlines() if line.endswith("|")}
    names = {'mode="bank"': "bank:5", 'mode="credit"': "credit:5", "force_words_ids` (": "any:5",
             "beam search alone": "beam:5"}
    for name, system in names.items():
        (said,) = [cells for first, cells in lines.items() if name in first and "%" in cells[0]]
        r = rows[system]
        times = r["cpu_seconds"]/rows["beam:5"]["cpu_seconds"]
        expected = f"{r['metrics']['sentences'][0]:.1f} %", f"{r['metrics']['C'][0]:.1f}", f"{times:.1f}"
        assert tuple(map(str.strip, said)) == expected, name
    assert f"{rows['bank:5']['sets']:,} sets" in card
    marks = Counter()
    for name, *_, mark in read_json(hub.ROOT/"results/words_reading.json")["sentences"]: marks[name] += mark
    bank, credit, library, alone = (marks[name] for name in ("bank:5", "credit:5", "any:5", "beam:5"))
    assert f"{bank} (bank), {credit} (credit), {library} (library) and {alone} (beam search alone) of 25" in card

def test_a_streamer_is_refused_before_the_library_sees_it(repository):
    "A streamer of the library raises its own error with beams; the folder's error comes first, and nothing is printed."
    model, inputs = build("GPT-2")
    settings = dict(custom_generate=str(repository), trust_remote_code=True, num_beams=4, max_new_tokens=4)
    with pytest.raises(ValueError, match="streamer: expected None, because a beam may still be replaced"):
        model.generate(**inputs, **settings, streamer=transformers.TextStreamer(tokenizer()))

def test_words_with_signs_are_taken_literally_in_lists():
    "Texts with signs that a line gives a meaning are words in lists of their own, to mention and to avoid."
    tok, parts = trained("byte BPE"), ["A-12", "a|b", "-5", "x=1", "m,n"]
    model = tiny_gpt2(tok)
    inputs = dict(tok(["a photo of the"], return_tensors="pt"))
    settings = dict(processor=tok, num_beams=4, max_new_tokens=40, do_sample=False, custom_generate=grid_beam)
    ids = model.generate(**inputs, words=[[part] for part in parts], **settings)
    text = tok.decode(ids[0,inputs["input_ids"].shape[1]:], skip_special_tokens=True)
    assert all(part.lower() in text.lower() for part in parts), text
    bare = model.generate(**inputs, words=["x=2"], avoid=[[part] for part in parts], **settings)
    text = tok.decode(bare[0,inputs["input_ids"].shape[1]:], skip_special_tokens=True)
    assert "x=2" in text.lower() and not any(has(text, part) for part in parts), text
    for line in "a|b", "-5":
        with pytest.raises(NocError, match="for the text taken literally"):
            model.generate(**inputs, words=[line], **settings)

def test_the_folders_files_import_only_torch_and_transformers(repository):
    "The files import each other, the standard library, torch and transformers, and have only code of the package."
    files = [*(repository/"custom_generate").glob("*.py")]
    outside, beside = set(), set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import): outside |= {alias.name.partition(".")[0] for alias in node.names}
            if not isinstance(node, ast.ImportFrom): continue
            (beside if node.level else outside).add(node.module.partition(".")[0])
    assert outside - set(sys.stdlib_module_names) <= {"torch", "transformers", "regex", "filelock", "inflect"}
    assert beside <= {file.stem for file in files}

def test_the_card_lists_every_argument_and_the_tables_counts(repository):
    "The card lists the function's arguments, and its numbers are those of the table of architectures."
    from architectures import read_table
    card = (repository/"README.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", card, re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    own = {*signature(grid_beam).parameters} - {"model", "input_ids", "logits_processor", "stopping_criteria",
                                                "generation_config", "model_kwargs", "stop_strings"}
    assert named - {"tokenizer"} == own
    lines = [line for line in read_table().values() if line["own beams"]]
    seen = [line for line in lines if line["picture"]]
    assert f"Of {len(read_table())} classes" in card and f"{len(lines)} were built" in card
    assert f"{len(seen)} of {len(seen)} that were given pictures" in card

# Internals of the library that the search uses
GIVEN = {                                                  # methods -> the arguments that they get, in order
    "_prefill": ["input_ids", "generation_config", "model_kwargs"],
    "_update_model_kwargs_for_generation": ["outputs", "model_kwargs", "is_encoder_decoder"],
    "prepare_inputs_for_generation": ["input_ids", "next_sequence_length"]}
PARTS = ["generation.utils.ALL_CACHE_NAMES", "generation.utils.GenerateBeamDecoderOnlyOutput",
         "generation.utils.GenerateBeamEncoderDecoderOutput", "PreTrainedModel.input_modalities",
         "cache_utils.Cache.reorder_cache"]
TOLD_BY_NAME = ["MaxLengthCriteria", "EosTokenCriteria", "MaxTimeCriteria"]
TENSORS = ["_eos_token_tensor", "_pad_token_tensor"]       # attributes of a configuration that `generate` has prepared
LOCALS = ["streamer", "assistant_model", "synced_gpus"]    # local variables of `generate`
IF_THERE = ["_reorder_cache", "linear_cache"]              # attributes of some models, and of MiniMax's cache

def test_the_internals_of_the_library_are_those_we_rely_on():
    "If a release changes one of these internals, this test fails and names it."
    def lacks(name):
        try: return not attrgetter(name)(transformers)
        except AttributeError: return True
    missing = [name for name in PARTS + TOLD_BY_NAME if lacks(name)]
    for name, given in GIVEN.items():
        method = getattr(transformers.GenerationMixin, name, None)
        takes = [n for n in signature(method).parameters if n in given] if method else []
        if takes != given: missing.append(f"{name}({', '.join(given)})")
    prepared = transformers.GenerationConfig(eos_token_id=2, pad_token_id=1)
    build("GPT-2")[0]._prepare_special_tokens(prepared)
    missing += [name for name in TENSORS if not isinstance(getattr(prepared, name, None), torch.Tensor)]
    missing += {*LOCALS} - {*unwrap(transformers.GenerationMixin.generate).__code__.co_varnames}
    assert not missing, f"transformers {transformers.__version__} has no {', '.join(missing)}"

def test_the_weekly_run_begins_with_the_oldest():
    "The weekly run begins with the oldest version that the extra allows."
    oldest = re.search(r"^extra_transformers = transformers>=([\d.]+)", (hub.ROOT/"settings.ini").read_text(), re.M)[1]
    assert f'release: ["=={oldest}", ' in (hub.ROOT/".github/workflows/transformers.yml").read_text()

def test_every_internal_that_the_code_uses_is_listed(repository):
    "The lists above contain all internals of the library that the code uses."
    from transformers.generation import utils
    trees = [ast.parse(file.read_text()) for file in (repository/"custom_generate").glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    private = {name for name in attributes | texts if re.fullmatch("_[a-z]\\w+", name)} - own - {"_fields", "_replace"}
    def is_inside(name):
        part = getattr(utils, name, None)
        known = part is None or inspect.ismodule(part) or hasattr(transformers, name)
        return not known and getattr(part, "__module__", "transformers").startswith("transformers")
    inside = {*filter(is_inside, attributes | texts | imported)}
    by_name = {name for name in texts if name[:1].isupper() and hasattr(transformers, name)}
    named = {name.rpartition(".")[2] for name in PARTS} | {*GIVEN, *TOLD_BY_NAME, *TENSORS, *IF_THERE}
    assert private | inside | by_name <= named
    assert named - attributes - texts - imported == {part for part in named if part.startswith("GenerateBeam")}
