"""Check that texts contain their words, for twenty architectures, eight kinds of tokenizers and one to five words.

`python tests/said.py` prints a line for each tokenizer and architecture, and fails if a word is missing. It runs some
1,600 searches, which takes five minutes on one core. CI runs a sample, in test_spellings.py."""
import itertools, random, sys, warnings
import torch, transformers
from architectures import build
from test_spellings import KINDS, missing, trained

TWENTY = [
    "BambaForCausalLM", "BartForConditionalGeneration", "BigBirdForCausalLM", "BloomForCausalLM", "CohereForCausalLM",
    "FalconForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "GraniteForCausalLM",
    "LlamaForCausalLM", "Mamba2ForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "OPTForCausalLM",
    "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "StableLmForCausalLM", "T5ForConditionalGeneration"]

def main():
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    misses = 0
    for kind, name in itertools.product(KINDS, TWENTY):
        tok, rng = trained(kind), random.Random(f"{kind} {name}")
        model = build(name, vocab_size=len(tok))
        if model.config.is_encoder_decoder: model.generation_config.decoder_start_token_id = tok.pad_token_id
        model.generation_config.forced_eos_token_id = None         # BART's forced end is not the end of every tokenizer
        found = [missing(model, tok, rng, count, mode) for count in range(1, 6) for mode in ("bank", "grid")]
        lacking = sum(map(bool, found))
        misses += lacking
        print(f"{kind:<18}{name:<32}{lacking} of {len(found)} lack words", flush=True)
    sys.exit(f"{misses} texts lack words" if misses else 0)

if __name__ == "__main__": main()
