"""The repository for the hub: loaded from its folder where there is no noc_nb, it finds what the package finds."""
import ast, json, os, re, subprocess, sys
import pytest
import torch
import transformers
from noc_nb.tools.generate import grid_beam
import hub
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
def test_without_the_package(name, repository, tmp_path):
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

def test_what_its_files_import(repository):
    "Each other, the standard library, torch, transformers and fastcore; and it is all code of the package."
    files = [*(repository/"custom_generate").glob("*.py")]
    outside, beside = set(), set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import): outside |= {alias.name.partition(".")[0] for alias in node.names}
            if not isinstance(node, ast.ImportFrom): continue
            (beside if node.level else outside).add(node.module.partition(".")[0])
    assert outside - set(sys.stdlib_module_names) <= {"torch", "transformers", "fastcore", "filelock"}
    assert beside <= {file.stem for file in files}

def test_the_card_says_what_there_is(repository):
    "Its arguments are the function's, and its numbers the table's."
    from architectures import read_table
    from inspect import signature
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

METHODS = ("_prefill", "_update_model_kwargs_for_generation", "_expand_inputs_for_generation",
           "prepare_inputs_for_generation")
NAMES = "ALL_CACHE_NAMES", "GenerateBeamDecoderOnlyOutput", "GenerateBeamEncoderDecoderOutput"
TENSORS = "_eos_token_tensor", "_pad_token_tensor"

def test_names_that_the_library_keeps_to_itself():
    "A release that moves one of them fails here, and says which."
    from transformers.generation import utils
    missing = [name for name in METHODS if not hasattr(utils.GenerationMixin, name)]
    missing += [name for name in NAMES if not hasattr(utils, name)]
    assert not missing, f"transformers {transformers.__version__} has no {', '.join(missing)}"
    source = (hub.ROOT/"noc_nb/tools/generate.py").read_text()
    used = set(re.findall(r"(?:model|config)\.(_\w+)", source))
    assert used <= {*METHODS, *TENSORS, "_reorder_cache"}, "the list above lacks some"
    config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=1)
    build("GPT-2")[0]._prepare_special_tokens(config)
    assert config._eos_token_tensor.tolist() == [2] and config._pad_token_tensor.item() == 1
