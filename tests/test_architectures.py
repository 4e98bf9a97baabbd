"""Compute the lines of twenty different classes in the table of architectures again, and compare."""
import pytest
import transformers
from packaging.version import Version
from architectures import CHECKS, names, read_table, row

TWENTY = [
    "BambaForCausalLM", "BartForConditionalGeneration", "BigBirdForCausalLM", "Blip2ForConditionalGeneration",
    "BlipForConditionalGeneration", "DeepseekV3ForCausalLM", "Florence2ForConditionalGeneration",
    "Gemma3ForConditionalGeneration", "GitForCausalLM", "GPT2LMHeadModel", "LlavaForConditionalGeneration",
    "Mamba2ForCausalLM", "MiniMaxForCausalLM", "OPTForCausalLM", "PaliGemmaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration", "Qwen3ForCausalLM", "SmolVLMForConditionalGeneration",
    "T5ForConditionalGeneration", "WhisperForConditionalGeneration"]

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

def test_the_table_lists_every_class_of_the_library():
    "Every class of the library version behind the table has a line, and every answer but yes has a reason."
    table = read_table()
    lines = [line for line in table.values() if line["own beams"]]
    assert len(lines) >= 230 and len([line for line in lines if line["picture"]]) >= 46
    for line in table.values():
        cells = {line[column] for column in CHECKS} - {"", "yes"}
        assert cells <= {"library"} and bool(line["reason"]) == bool(cells or not line["own beams"]), line
    if Version(transformers.__version__).release[:2] == (5, 24): assert set(table) == set(names())

@pytest.mark.parametrize("name", TWENTY)
def test_each_architecture_behaves_as_the_table_says(name):
    found, line = row(name), read_table()[name]
    if found["reason"].startswith("does not run") and Version(transformers.__version__) < Version("5.24"):
        pytest.skip(f"transformers {transformers.__version__} itself: {found['reason']}")
    assert found == line
