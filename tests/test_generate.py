"""Test `grid_beam` with every option of `generate`. tests/architectures.py tests it with every architecture."""
import copy, inspect, itertools, json, math, re, warnings
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, LogitsProcessorList, pipeline
from noc_nb.core import NocError
from noc_nb.words.generate import generate, grid_beam
from noc_nb.words.spellings import _read_table, spellings
from architectures import WORDS, is_whole, texts
from test_spellings import tiny_gpt2, trained
from test_words import has
from tiny_models import BUILDERS, build, tokenizer

ROOT = Path(__file__).parent.parent
NEVER = dict(early_stopping="never", max_new_tokens=7)     # without the library's heuristic for early stopping

pytestmark = pytest.mark.usefixtures("one_thread")

@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

def ours(model, inputs, num_beams=4, **settings):
    call = dict(do_sample=False, max_new_tokens=8, custom_generate=grid_beam) | settings
    return model.generate(**inputs, num_beams=num_beams, **call)

def own_or_skip(model, inputs, **settings):
    "Return the result of the library's own search; skip the test if an old release does not support it."
    try: return ours(model, inputs, custom_generate=None, **settings)
    except ValueError as e:
        if Version(transformers.__version__) >= Version("5.23"): raise
        pytest.skip(f"transformers {transformers.__version__} itself: {e}")

@pytest.mark.parametrize("name", BUILDERS)
def test_unknown_input_is_an_error(name):
    model, inputs = build(name)
    with pytest.raises(ValueError, match="pixel_valuse"):
        ours(model, inputs | dict(pixel_valuse=torch.zeros(2, 3, 16, 16)))

@pytest.mark.parametrize("name", ["GIT", "LLaVA", "Qwen2-VL"])
def test_a_missing_image_is_an_error(name):
    "A model that needs an image gives an error without one, unless `text_only` is set."
    model, inputs = build(name)
    text = dict(input_ids=torch.tensor([[12, 13]]))
    with pytest.raises(NocError, match="no image among the inputs; expected pixel_values, or text_only"):
        ours(model, text)
    assert ours(model, text, text_only=True).shape[0] == 1

# Cases that the table of architectures does not contain

@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Gemma 2", "LLaVA"])
def test_a_static_cache_gives_the_same_texts(name):
    model, inputs = build(name)
    words = dict(words=WORDS, processor=tokenizer())
    for mode in ("bank", "grid"):
        plain = ours(model, inputs, **words, mode=mode)
        static = ours(model, inputs, **words, mode=mode, cache_implementation="static")
        assert static.tolist() == plain.tolist()

def test_a_search_without_a_cache_gives_the_same_texts():
    model, inputs = build("Llama")
    words = dict(words=WORDS, processor=tokenizer())
    assert ours(model, inputs, **words, use_cache=False).tolist() == ours(model, inputs, **words).tolist()

def test_a_quantised_cache_equals_the_librarys():
    "A quantised cache (8-bit floats, which need no other library) gives the same results as the library's search."
    model, inputs = build("Llama")
    quantised = NEVER | dict(cache_implementation="quantized", cache_config=dict(backend="fp8"))
    own = own_or_skip(model, inputs, **quantised)
    assert ours(model, inputs, **quantised).tolist() == own.tolist()
    found = ours(model, inputs, words=WORDS, processor=tokenizer(), **quantised)
    assert all(is_whole(text, word) for text in texts(found) for word in WORDS)

def test_settings_work_as_in_the_library():
    model, inputs = build("GPT-2")
    settings = dict(early_stopping="never", num_return_sequences=3, return_dict_in_generate=True,
                    output_scores=True, repetition_penalty=1.5, no_repeat_ngram_size=2)
    own = ours(model, inputs, custom_generate=None, **settings)
    out = ours(model, inputs, **settings)
    assert out.sequences.tolist() == own.sequences.tolist()
    torch.testing.assert_close(out.sequences_scores, own.sequences_scores)
    assert out.spans == [{}]*6

def test_one_beam_and_no_end_token_equal_the_library():
    model, inputs = build("GPT-2")
    for settings in (dict(num_beams=1, early_stopping=None), dict(eos_token_id=None, early_stopping="never")):
        if settings.get("num_beams"): model.generation_config.eos_token_id = 2
        else: model.generation_config.eos_token_id = None
        own = ours(model, inputs, custom_generate=None, **settings)
        assert ours(model, inputs, **settings).tolist() == own.tolist()
        found = ours(model, inputs, words=WORDS, processor=tokenizer(), **settings)
        assert all(is_whole(text, word) for text in texts(found) for word in WORDS)

def test_tokens_that_are_added_later_are_found():
    tok = tokenizer()
    assert _read_table(tok).size == len(tok)
    tok.add_tokens(["okapi"])
    assert _read_table(tok).size == len(tok) and spellings(tok, "okapi")

def test_a_stopping_criterion_ends_a_text():
    "A stopping criterion ends a text as in the library's search, and the text has all its words."
    model, inputs = build("GPT-2")
    dog = tokenizer().get_vocab()["dog"]
    def stop(ids, scores): return ids[:,-1] == dog
    settings = dict(early_stopping="never", stopping_criteria=[stop], eos_token_id=[dog + 1])
    own = ours(model, inputs, custom_generate=None, **settings)
    assert ours(model, inputs, **settings).tolist() == own.tolist()
    found = ours(model, inputs, words=["zebra", "dog"], processor=tokenizer(), num_return_sequences=4,
                 **settings)
    for text in found[:,4:].tolist():
        assert tokenizer().get_vocab()["zebra"] in text
        assert dog not in text[:-1] or set(text[text.index(dog)+1:]) == {1}

def test_a_mention_counts_for_every_word_in_it():
    "\"fire hydrant\" also counts as \"hydrant\" and \"fire\", and a word that is given twice is mentioned once."
    model, inputs = build("GPT-2")
    settings = dict(processor=tokenizer(), max_new_tokens=2, num_beams=6)
    found = ours(model, inputs, words=["fire hydrant", "hydrant", "fire", "fire"], **settings)
    assert texts(found[:,4:]) == ["fire hydrant"]*2

def test_the_lines_that_the_chapter_shows_are_those_that_it_runs():
    "The lines that chapter 116 shows for a real model are those that it runs with a tiny one."
    chapter = json.loads((ROOT/"nbs/words/116_generate.ipynb").read_text())
    sources = ["".join(cell["source"]) for cell in chapter["cells"]]
    shown = next(s for s in sources if "```python" in s).split("```python\n")[1].split("```")[0]
    at = next(n for n, s in enumerate(sources) if s.startswith("name = folder.name"))
    name = next(line for line in shown.splitlines() if line.startswith("name = "))
    run = sources[at-1] + "\n\n" + sources[at].replace("name = folder.name", name) + "\n"
    assert run == shown

def fence(text, language): return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)

def test_the_lines_that_the_experiment_shows_are_those_that_it_runs():
    "The lines that 58_pixels shows for models of the hub are those that it runs with tiny models."
    page = json.loads((ROOT/"nbs/experiments/58_pixels.ipynb").read_text())
    def anonymous(lines): return re.sub(r"^name = .*$", "name = NAME", lines.strip(), flags=re.M)
    shown = [part for cell in page["cells"] for part in fence("".join(cell["source"]), "python")]
    run = "\n\n".join("".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "code")
    assert len(shown) == 2
    assert all(anonymous(lines) in anonymous(run) for lines in shown)


def test_prices_are_given_for_each_input():
    "Prices are for the shared words, then for the input's own; a batch gives the same texts as each input alone."
    model, inputs = build("LLaVA")
    each, prices = [["cat"], []], [[2., math.inf], [-1.]]
    settings = dict(words=["zebra"], processor=tokenizer(), length_penalty=0., num_beams=3)
    for mode in ("bank", "grid"):
        both = ours(model, inputs, each=each, prices=prices, mode=mode, **settings)
        assert is_whole(texts(both)[0], "cat")
        for i in range(2):
            half = {key: value.chunk(2)[i] for key, value in inputs.items()}
            own = dict(each=each[i:i+1], prices=prices[i:i+1])
            alone = ours(model, half, mode=mode, **own, **settings)
            assert alone[0].tolist() == both[i,:alone.shape[1]].tolist()

def test_a_price_below_zero_is_not_avoided_by_ending_inside_the_word():
    "A word with a negative price is not mentioned by a text that ends, at its maximum length, inside the word."
    model, inputs = build("GPT-2")
    vocabulary = tokenizer().get_vocab()
    def wants(ids, scores):
        scores[:,vocabulary["cat"]] += 20.
        scores[:,:4] = -torch.inf                              # no special tokens
        return scores
    settings = dict(words=["cat"], processor=tokenizer(), max_new_tokens=2, length_penalty=0.,
                    logits_processor=LogitsProcessorList([wants]), return_dict_in_generate=True)
    for mode in ("bank", "grid"):
        for price in (-50., 0.):
            out = ours(model, inputs, prices=[price], mode=mode, **settings)
            said = [is_whole(text, "cat") for text in texts(out.sequences[:,4:])]
            assert said == [bool(spans) for spans in out.spans] == [price == 0.]*2

@pytest.mark.parametrize("more", [dict(), dict(mode="grid"), dict(prices=[3., math.inf, -1.])])
def test_processors_get_all_rows_of_an_input(more):
    "Logits processors get `num_beams` rows for each input, as from the library, also with different words and prices."
    model, inputs = build("GPT-2")
    def even(ids, scores):
        assert ids[:,:4].tolist() == inputs["input_ids"].repeat_interleave(4, 0).tolist()
        return scores
    def allowed(i, ids): return [n for n in range(60) if n % 2 == i or n in (2, *spelled)]
    spelled = sorted({t for word in ("cat", "bus", "buses", "fire hydrant") for ids in spellings(tokenizer(), word)
                      for t in ids})
    settings = dict(words=WORDS, processor=tokenizer(), repetition_penalty=1.2, logits_processor=[even],
                    prefix_allowed_tokens_fn=allowed, max_new_tokens=10) | more
    for i, row in enumerate(ours(model, inputs, **settings)[:,4:].tolist()):
        assert all(t in (1, *allowed(i, None)) for t in row)

# Every option of the library

SAME = dict(                                               # options that work as in the library, with a value
    bad_words_ids=[[15], [13, 15]], begin_suppress_tokens=[15, 58], encoder_repetition_penalty=9.,
    encoder_no_repeat_ngram_size=1, eos_token_id=[2, 44, 46], forced_bos_token_id=7, forced_eos_token_id=9,
    length_penalty=9., max_length=9, max_new_tokens=5, min_length=10, min_new_tokens=6, no_repeat_ngram_size=2,
    num_beams=2, num_return_sequences=2, pad_token_id=5, decoder_start_token_id=3, renormalize_logits=True,
    repetition_penalty=1.7, sequence_bias=[[[14], 9.], [[15, 15], -9.]], suppress_tokens=[15, 58],
    watermarking_config=dict(bias=2.5), max_time=1e-9, return_dict_in_generate=False, output_scores=True)
STILL = dict(                                              # options without an effect, both in the library and here
    bos_token_id=4, remove_invalid_values=True, use_cache=False, cache_implementation="static",
    cache_config=dict(backend="fp8"), max_cache_len=30, compile_config=None, disable_compile=True, temperature=.5,
    top_k=3, top_p=.5, min_p=.5, top_h=.5, typical_p=.5, epsilon_cutoff=.1, eta_cutoff=.1, num_assistant_tokens=3,
    num_assistant_tokens_schedule="constant", assistant_confidence_threshold=.1, assistant_lookbehind=3,
    target_lookbehind=3, max_matching_ngram_size=2, continuous_batching_config=None)
REFUSED = dict(
    do_sample=True, num_beam_groups=2, diversity_penalty=.5, penalty_alpha=.6, dola_layers="low", low_memory=True,
    prompt_lookup_num_tokens=3, use_mtp=True, is_assistant=True, speculation_type="mtp", assistant_early_exit=1,
    assistant_ensemble_weight=.5, output_attentions=True, output_hidden_states=True, output_logits=True,
    guidance_scale=2., token_healing=True, prefill_chunk_size=4)
BETTER = dict(early_stopping=True, exponential_decay_length_penalty=(2, 1.3))   # the library stops too early
ELSEWHERE = {"force_words_ids", "constraints", "stop_strings"}                  # options with separate tests
NO_OPTION = {"transformers_version", "_from_model_config"}

def test_every_option_is_classified():
    "Every option is in one of these lists; a new option in a release fails here until somebody classifies it."
    classes = [*SAME, *STILL, *REFUSED, *BETTER, *ELSEWHERE]
    assert len(classes) == len(set(classes))
    assert set(GenerationConfig().to_dict()) - NO_OPTION <= set(classes)

def both(name, **option):
    "Return the ids of our search and of the library's with an option, and both results."
    model, inputs = build(name)
    how = dict(NEVER, return_dict_in_generate=True, output_scores=True, num_return_sequences=2, repetition_penalty=1.2,
               eos_token_id=dict(BART=46).get(name, 41)) | option
    if "eos_token_id" in option: how["num_return_sequences"] = 1         # the library repeats texts with other ends
    if "max_length" in how: del how["max_new_tokens"]
    found = [ours(model, inputs, **how), ours(model, inputs, custom_generate=None, **how)]
    return [x if isinstance(x, torch.Tensor) else x.sequences for x in found], found

@pytest.mark.parametrize("option", SAME)
def test_an_option_works_as_in_the_library(option):
    changed = False
    for name in "GPT-2", "BART":
        if name == "GPT-2" and "coder_" in option: continue
        (ids, own), _ = both(name, **{option: SAME[option]})
        assert ids.tolist() == own.tolist(), name
        changed |= ids.tolist() != both(name)[0][0].tolist()
    assert changed or option in ("output_scores", "num_return_sequences", "return_dict_in_generate", "num_beams")

@pytest.mark.parametrize("option", STILL)
def test_an_option_without_effect_changes_nothing(option):
    for name in "GPT-2", "BART":
        (ids, own), _ = both(name, **{option: STILL[option]})
        assert ids.tolist() == own.tolist() == both(name)[0][0].tolist()

@pytest.mark.parametrize("option", REFUSED)
def test_a_refused_option_raises_an_error(option):
    model, inputs = build("GPT-2")
    with pytest.raises(ValueError, match=f"{option}|tokenizer"): ours(model, inputs, **{option: REFUSED[option]})

@pytest.mark.parametrize("option", BETTER)
def test_an_option_that_stops_the_library_early_does_not_stop_our_search(option):
    "The library stops by a heuristic; our search continues until no better caption is possible."
    for name in "GPT-2", "BART":
        _, (found, own) = both(name, **{option: BETTER[option]})
        assert (found.sequences_scores >= own.sequences_scores - 1e-5).all()

def test_arguments_that_the_library_does_not_pass_on_are_refused():
    model, inputs = build("GPT-2")
    one = {name: value[:1] for name, value in inputs.items()}
    streamer = SimpleNamespace(put=print, end=print)
    for name, value in dict(streamer=streamer, assistant_model=model, synced_gpus=True).items():
        with pytest.raises(NocError, match=f"{name}="): ours(model, one, **{name: value})
    streamer = transformers.TextStreamer(tokenizer())        # the library's streamers do not work with beams
    with pytest.raises(NocError, match="streamer: expected None"):
        generate(model, **one, streamer=streamer, num_beams=4)

def test_a_tokenizer_or_processor_is_accepted():
    "Words can be given with `tokenizer=` or `processor=`; special tokens are not words."
    model, inputs = build("GPT-2")
    found = [ours(model, inputs, words=["zebra"], **{name: tokenizer()}) for name in ("tokenizer", "processor")]
    assert found[0].tolist() == found[1].tolist()
    with pytest.raises(NocError, match=r"cannot spell '\[EOS\]' \(only special tokens\)"):
        ours(model, inputs, words=["[EOS]"], tokenizer=tokenizer())

def test_stop_strings_end_a_text():
    "`stop_strings` works with `processor=`, because the library does not pass its tokenizer to functions."
    tok = trained("byte BPE")
    model = tiny_gpt2(tok)
    inputs = dict(tok(["a photo of the"], return_tensors="pt"))
    for stop in "e", "an", " o":
        settings = dict(NEVER, stop_strings=[stop], max_new_tokens=12, return_dict_in_generate=True, output_scores=True)
        own = ours(model, inputs, custom_generate=None, tokenizer=tok, **settings)
        out = ours(model, inputs, processor=tok, **settings)
        assert out.sequences_scores.item() >= own.sequences_scores.item() - 1e-5
        for words in dict(), dict(words=["cat"]):
            for ids in ours(model, inputs, processor=tok, num_return_sequences=4, **settings, **words).texts:
                before, whole = tok.decode(ids[:-1]), tok.decode(ids)
                assert stop not in before or words and "cat" not in before
                assert stop in whole or len(ids) == 12 or ids[-1] == tok.eos_token_id
    with pytest.raises(NocError, match="stop_strings: expected processor="): ours(model, inputs, stop_strings=["e"])

class Phrasal:
    "A constraint as in old versions of transformers."
    def __init__(self, token_ids): self.token_ids = token_ids

def test_the_old_arguments_still_work():
    "Code for the old arguments runs unchanged, and ids may be tensors, arrays or numbers of NumPy."
    model, inputs = build("GPT-2")
    words = [[10, 11], [[7], [7, 8]]]
    expected = ours(model, inputs, words=words).tolist()
    ways = [dict(force_words_ids=words), dict(constraints=[Phrasal(w) for w in words]),
            dict(words=[torch.tensor(words[0]), words[1]]), dict(words=words[:1], force_words_ids=words[1:]),
            dict(words=[np.array(words[0]), [[np.int64(7)], [7, np.int32(8)]]])]
    for way in ways: assert ours(model, inputs, **way).tolist() == expected
    config = GenerationConfig(num_beams=4, max_new_tokens=8, force_words_ids=words, pad_token_id=1, eos_token_id=2)
    assert model.generate(**inputs, generation_config=config, custom_generate=grid_beam).tolist() == expected

@pytest.mark.parametrize("name", ["GPT-2", "BART"])
def test_transition_scores_are_log_probabilities_of_our_texts(name):
    "The library's `compute_transition_scores` gives the log-probability of every token of our texts, end tokens too."
    model, inputs = build(name)
    for mode in "bank", "grid":
        out = ours(model, inputs, words=WORDS, processor=tokenizer(), mode=mode, num_return_sequences=4,
                   return_dict_in_generate=True, output_scores=True, eos_token_id=[2, 30, 31, 32, 33])
        each = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
        lengths = torch.tensor([len(ids) for ids in out.texts])
        torch.testing.assert_close(each.sum(1)/lengths, out.sequences_scores)
        for row, spans, costs in zip(each, out.spans, out.costs):
            for word, (start, end) in spans.items():
                assert row[start:end].sum().item() == pytest.approx(costs[word], abs=1e-4)

def test_a_missing_word_is_explained():
    model, inputs = build("GPT-2")
    zebra = tokenizer().get_vocab()["zebra"]
    settings = dict(words=["zebra", "cat"], processor=tokenizer())
    causes = [(dict(bad_words_ids=[[zebra]]), "'zebra' is forbidden"),
              (dict(suppress_tokens=[zebra]), "'zebra' is forbidden"), (dict(max_time=1e-9), "max_time=1e-09 was up")]
    for option, cause in causes:
        with pytest.warns(UserWarning, match=cause): ours(model, inputs, **settings, **option)

def test_a_word_that_cannot_be_spelled_is_left_out():
    "If one word cannot be encoded, a warning names it, and the other words keep their numbers, prices and order."
    model, inputs = build("GPT-2")
    tok = tokenizer()
    call = dict(processor=tok, return_dict_in_generate=True, length_penalty=0.)
    with pytest.warns(UserWarning, match="cannot spell 'kiwi' .only special tokens.; such words are ignored") as told:
        out = ours(model, inputs, words=["kiwi", "zebra", "cat"], ordered=True, **call)
    assert len(told) == 1
    assert all([*spans] == [1, 2] and spans[1] < spans[2] for spans in out.spans)
    same = ours(model, inputs, words=["zebra", "cat"], ordered=True, **call)
    assert torch.equal(out.sequences, same.sequences)
    priced = ours(model, inputs, words={"kiwi": -9., "zebra": 20.}, avoid=["kiwi"], **call)
    assert torch.allclose(priced.objective, priced.sequences_scores + 20.) and [*priced.spans[0]] == [1]
    half = ours(model, inputs, each=[["kiwi"], ["zebra"]], at_least=[1, 1], **call)
    assert [[*spans] for spans in half.spans] == [[], [0]]

def test_capital_letters_are_kept():
    "A word is spelled as given and with a capital letter, but a given capital is never changed to a small letter."
    tok = trained("WordPiece, cased")
    assert {tok.decode(ids).strip() for ids in spellings(tok, "man")} == {"man", "Man"}
    assert {tok.decode(ids).strip() for ids in spellings(tok, "Man")} == {"Man"}

def test_a_text_that_misses_words_keeps_its_score():
    "A text without its words has the score of its tokens, and no end token is added to it."
    model, inputs = build("GPT-2")
    zebra = tokenizer().get_vocab()["zebra"]
    def dead_end(ids, scores):
        if ids.shape[1] > 6: scores[:] = -torch.inf
        return scores
    for length, processors in ((5, [dead_end]), (5, [])):
        settings = dict(words=["zebra"], processor=tokenizer(), suppress_tokens=[zebra], max_new_tokens=length,
                        return_dict_in_generate=True, output_scores=True, length_penalty=1.)
        out = ours(model, inputs, logits_processor=LogitsProcessorList(processors), **settings)
        each = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
        assert out.spans == [{}, {}] and 2 not in sum(out.texts, [])
        for ids, row, score in zip(out.texts, each, out.sequences_scores):
            assert score.item() == pytest.approx(row[:len(ids)].sum().item()/len(ids), abs=1e-5)

def test_avoided_words_do_not_occur():
    "Avoided words do not occur, with or without required words, but may be parts of other words."
    model, inputs = build("GPT-2")
    vocabulary = tokenizer().get_vocab()
    def wants(ids, scores):
        scores[:,vocabulary["cat"]] += 9.
        return scores
    settings = dict(processor=tokenizer(), logits_processor=LogitsProcessorList([wants]), num_return_sequences=4)
    assert all(is_whole(text, "cat") for text in texts(ours(model, inputs, **settings)))
    for more in dict(), dict(words=["zebra"]), dict(words=["zebra"], mode="grid"):
        found = texts(ours(model, inputs, avoid=["cat"], **more, **settings))
        assert not any(is_whole(text, "cat") for text in found)
        assert all(is_whole(text, word) for text in found for word in more.get("words", ()))
    assert any("cates" in text for text in found)
    line = ours(model, inputs, words="zebra, -cat", **settings)
    assert line.tolist() == ours(model, inputs, words=["zebra"], avoid=["cat"], **settings).tolist()
    assert line.tolist() == ours(model, inputs, words=["zebra"], avoid="cat", **settings).tolist()
    for minus in "-cat", "dog, -cat":
        with pytest.raises(NocError, match=f"avoid: '{minus}': expected words without a minus"):
            ours(model, inputs, avoid=minus, **settings)

@pytest.mark.parametrize("mode", ["bank", "grid"])
def test_words_occur_in_the_given_order(mode):
    "Texts mention three words in each given order, even if the model prefers the last word first."
    model, inputs = build("GPT-2")
    last = tokenizer().get_vocab()["bus"]
    def wants(ids, scores):
        scores[:,last] += 9.
        return scores
    settings = dict(processor=tokenizer(), mode=mode, ordered=True, num_return_sequences=2,
                    return_dict_in_generate=True, logits_processor=LogitsProcessorList([wants]))
    for order in itertools.permutations(["zebra", "cat", "bus"]):
        found = ours(model, inputs, words=[*order], **settings)
        for text, spans in zip(texts(found.sequences), found.spans):
            ends = [spans[n][1] for n in range(3)]
            assert ends == sorted(set(ends))
            rest = text.lower()
            for word in order: rest = re.split(rf"\b{word}\b", rest, maxsplit=1)[1]
    found = ours(model, inputs, words=["cat", "zebra", "bus"], prices=[math.inf, math.inf, 50.], **settings)
    assert all(spans[0] < spans[1] and 2 in spans for spans in found.spans)       # only musts have an order
    with pytest.raises(NocError, match="ordered, at_least: expected only one"):
        ours(model, inputs, words=["zebra", "bus"], at_least=1, **settings)

class Keeps(transformers.GPT2LMHeadModel):
    "A model that stores tensors of its last pass: a new one, and a view of its input."
    def forward(self, input_ids, **kwargs):
        self.scale, self.seen = torch.full((1,), .5)*len(input_ids), input_ids[-1:]
        out = super().forward(input_ids, **kwargs)
        out.logits = out.logits*self.scale
        return out

@pytest.mark.parametrize("more", [{}, dict(prices=[1., math.inf, 2.]), dict(mode="grid")])
def test_a_model_may_be_trained_after_a_search(more):
    "Nothing that the model, a processor or the user gets is a tensor of torch's inference mode."
    model, inputs = build("GPT-2")
    model = Keeps(model.config)
    cache, kept = transformers.DynamicCache(config=model.config), []
    def processor(ids, scores):
        kept.append(ids)
        return scores.mul_(.5)                              # in place, as some processors do
    def criterion(ids, scores):
        kept.append(ids)
        return torch.zeros(len(ids), dtype=torch.bool)
    with torch.enable_grad():
        out = ours(model, inputs, words=WORDS, processor=tokenizer(), past_key_values=cache,
                   logits_processor=[processor], stopping_criteria=[criterion], return_dict_in_generate=True,
                   output_scores=True, **more)
        assert torch.is_grad_enabled()
        layers = [x for layer in cache.layers for x in (layer.keys, layer.values)]
        found = [out.sequences, out.sequences_scores, out.objective, out.beam_indices, *out.scores]
        for x in [*kept, *layers, *found, model.scale, model.seen]:
            assert not x.is_inference() and not x.requires_grad
        (model.transformer.wte(model.seen).sum()*model.scale).backward()
        assert model.transformer.wte.weight.grad.abs().sum() > 0

def test_a_model_that_samples_by_its_own_configuration_is_searched():
    "If the configuration asks for sampling, one warning is given and beam search is used; do_sample=True is an error."
    model, inputs = build("GPT-2")
    call = dict(custom_generate=grid_beam, num_beams=4, max_new_tokens=8, words=[[5, 6]])
    expected = model.generate(**inputs, **call)
    model.generation_config.update(do_sample=True, temperature=.2, top_k=3, top_p=.5)
    with pytest.warns(UserWarning, match="ask for sampling") as warned: found = model.generate(**inputs, **call)
    assert found.tolist() == expected.tolist() and len([w for w in warned if "ask for sampling" in str(w.message)]) == 1
    with pytest.raises(NocError, match="do_sample=True: expected do_sample=False"):
        model.generate(**inputs, **call, do_sample=True)

def test_a_pipeline_that_samples_by_default_is_searched():
    "A text-generation pipeline adds do_sample=True itself: beam search is used, and one warning says so."
    tokenizer = trained("byte BPE")
    model = tiny_gpt2(tokenizer)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, custom_generate=grid_beam)
    with pytest.warns(UserWarning, match="ask for sampling"):
        [out] = write("a dog", words=["zebra"], num_beams=4, max_new_tokens=12,
                      processor=tokenizer, return_full_text=False)
    assert has(out["generated_text"], "zebra")

def test_at_least_refuses_a_truth_value_and_dropout_gives_a_warning():
    model, inputs = build("GPT-2")
    call = dict(inputs, custom_generate=grid_beam, num_beams=2, max_new_tokens=8, words=[[5], [6]], do_sample=False)
    with pytest.raises(NocError, match="at_least=True; expected a whole number"): model.generate(**call, at_least=True)
    with pytest.warns(UserWarning, match="train mode, with dropout"): model.train().generate(**call)

# Arguments of ours

def test_a_generation_config_may_hold_our_arguments():
    "A generation config may have every argument of ours; an argument of a call comes first."
    model, inputs = build("GPT-2")
    tok = tokenizer()
    two, tokens = dict(words=["zebra", "cat"], processor=tok), dict(processor=tok)
    cases = dict(                                          # name -> its value, and the other arguments of the call
        words=(["zebra"], tokens), each=([["bus"], ["dog"]], two), avoid=(["pan"], tokens),
        forms=(True, dict(tokens, words=["buses"])), processor=(tok, dict(words=["zebra"])), after=("dog", two),
        boundary=("text", dict(tokens, words=["cat"])),
        mode=("grid", two), prices=([math.inf, 3.], two), at_least=(1, two), no_repeat=(True, two),
        ordered=(True, dict(tokens, words=["cat", "zebra"])), text_only=(True, two), force_words_ids=([[5, 6]], {}),
        constraints=([Phrasal([5, 6])], {}))
    own = {name for name, x in inspect.signature(grid_beam).parameters.items() if x.kind is x.KEYWORD_ONLY}
    assert own == {*cases, "stop_strings"}
    for name, (value, others) in cases.items():
        config = GenerationConfig(**{name: value}, eos_token_id=2, pad_token_id=1)
        found = ours(model, inputs, **others, generation_config=config)
        assert found.tolist() == ours(model, inputs, **others, **{name: value}).tolist(), name
    config = GenerationConfig(words=["bus"], mode="grid", eos_token_id=2, pad_token_id=1)
    found = ours(model, inputs, **two, mode="bank", generation_config=config)
    assert found.tolist() == ours(model, inputs, **two).tolist()

def test_help_explains_every_argument():
    "`help(grid_beam)` has the type, the default and an example of every argument of ours."
    parts = re.findall(r"^(\w.*?): ((?:.*\n)(?: +.*\n)*)", inspect.getdoc(grid_beam), re.M)
    entries = {name: text for names, text in parts for name in names.split(", ")}
    for name, x in inspect.signature(grid_beam).parameters.items():
        if x.kind is not x.KEYWORD_ONLY: continue
        assert x.annotation is not x.empty, name
        default = f'"{x.default}"' if isinstance(x.default, str) else repr(x.default)
        kinds, _, example = entries[name].partition(f"default {default}")
        assert name == "processor" or kinds
        assert re.search(r"[\"=\[]", example), name

def test_one_beam_gives_a_warning_and_a_long_list_an_error():
    "One beam with words gives a warning; the error for an `each` longer than the batch shows the loop to write."
    model, inputs = build("GPT-2")
    with pytest.warns(UserWarning, match="num_beams=1: words"): ours(model, inputs, words=[[5]], num_beams=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(model, inputs, num_beams=1)
        ours(model, inputs, words=[[5]], num_beams=2)
    tok = trained("byte BPE")
    tok.padding_side = "left"
    write = pipeline("text-generation", model=tiny_gpt2(tok), tokenizer=tok, custom_generate=grid_beam)
    def pipe(texts, **more): return write(texts, processor=tok, max_new_tokens=9, num_beams=3, **more)
    texts, each = ["a dog", "a", "the cat", "on"], [["cat"], ["man"], ["car"], ["bus"]]
    with pytest.raises(NocError, match="each: a list of 4: expected 2, one for each") as told:
        pipe(texts, each=each, batch_size=2)
    loop = str(told.value).partition("for more, ")[2]
    found = [one[0]["generated_text"] for one in sum(eval(loop, dict(pipe=pipe, texts=texts, each=each)), [])]
    assert len(found) == 4 and all(has(text, *word) for text, word in zip(found, each))

@pytest.mark.parametrize("mode", ["bank", "grid"])
def test_only_words_after_the_text_count(mode):
    "With `after`, only words behind the text are asked for, avoided or paid for; with musts, the text is written."
    model, inputs = build("GPT-2")
    settings = dict(processor=tokenizer(), mode=mode, return_dict_in_generate=True, max_new_tokens=9, num_beams=6)
    plain = ours(model, inputs, words=["zebra", "dog"], **settings)
    out = ours(model, inputs, words=["zebra", "dog"], after="dog", avoid=["cat"], **settings)
    assert plain.texts != out.texts
    for text in texts(out.sequences[:,2:]):
        rest = text.partition("dog")[2].lower()
        assert is_whole(rest, "zebra") and is_whole(rest, "dog") and not is_whole(rest, "cat")
    priced = ours(model, inputs, words={"zebra": 50.}, after="dog", length_penalty=0., **settings)
    for text, spans, objective, score in zip(texts(priced.sequences[:,2:]), priced.spans, priced.objective,
                                             priced.sequences_scores):
        assert is_whole(text.lower().partition("dog")[2], "zebra") == (0 in spans)
        assert objective.item() == pytest.approx(score.item() + 50.*(0 in spans), abs=1e-4)
    with pytest.raises(NocError, match="after: expected words as text"): ours(model, inputs, words=[[5]], after="dog")
    with pytest.raises(NocError, match="after='kiwi': expected a text that the tokenizer can write"):
        ours(model, inputs, words=["cat"], after="kiwi", processor=tokenizer())

def thinker():
    "Return a tokenizer with marks for thoughts, and a model with a fixed text: <think> zebra </think> cat."
    tok = copy.deepcopy(tokenizer())
    tok.add_tokens(["<think>", "</think>"])
    model, _ = build("GPT-2")
    model.resize_token_embeddings(len(tok))
    order = tok.convert_tokens_to_ids(["<think>", "zebra", "</think>", "cat", "[EOS]"])
    def wants(ids, scores):
        for row, line in zip(scores, ids.tolist()):
            new = len([n for n in line if n in order])
            row[order[min(new, 4)]] += 40.
        return scores
    return tok, model, dict(processor=tok, logits_processor=LogitsProcessorList([wants]), max_new_tokens=8)

def test_a_word_that_is_only_in_thoughts_gives_a_warning():
    "A warning says that a word is only in a block of thoughts, even one that the prompt opens, but not with `after`."
    tok, model, settings = thinker()
    inputs = dict(input_ids=torch.tensor([tok.convert_tokens_to_ids(["a"])]))
    def told(inputs=inputs, **more):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = ours(model, inputs, **settings, **more)
        lines = [str(w.message) for w in caught]
        return tok.decode(out[0,inputs["input_ids"].shape[1]:]), [line for line in lines if "thoughts" in line]
    text, lines = told(words=["zebra"])
    assert text.split()[:4] == ["<think>", "zebra", "</think>", "cat"]
    assert lines == ["input 0: 'zebra' is only in the block of thoughts; with after=\"</think>\" words count behind it"]
    assert told(words=["cat"])[1] == told(words=["zebra"], after="</think>")[1] == []
    assert is_whole(told(words=["zebra"], after="</think>")[0].partition("</think>")[2], "zebra")
    opened = dict(input_ids=torch.tensor([tok.convert_tokens_to_ids(["a", "<think>"])]))
    closed = dict(input_ids=torch.tensor([tok.convert_tokens_to_ids(["a", "<think>", "</think>"])]))
    settings.pop("logits_processor")
    settings["suppress_tokens"] = tok.convert_tokens_to_ids(["<think>", "</think>"])
    assert told(opened, words=["zebra"])[1] and not told(closed, words=["zebra"])[1]
    assert is_whole(told(closed, words=["zebra"], after="</think>")[0], "zebra")
