"""`grid_beam` with every architecture of `tiny_models.py`, and whole words by brute force.

`python tests/test_generate.py` writes the table of architectures to tests/architectures.csv. The chapter prints it."""
import csv, gzip, itertools, json, math, random, re, warnings
from pathlib import Path
import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessorList, PreTrainedTokenizerFast
from noc_nb.core import NocError, find_data
from noc_nb.tools.generate import grid_beam, read_pieces, spellings
from noc_nb.toy import toy_image
from tiny_models import BUILDERS, build, tokenizer

ROOT = Path(__file__).parent.parent
TABLE = ROOT/"tests/architectures.csv"
COLUMNS = "architecture", "own beams", "image matters", "whole words"
WORDS = "cat", ["bus", "buses"], "fire hydrant"

pytestmark = pytest.mark.usefixtures("one_thread")

@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

def ours(model, inputs, num_beams=4, **settings):
    call = dict(do_sample=False, max_new_tokens=8, custom_generate=grid_beam) | settings
    return model.generate(**inputs, num_beams=num_beams, **call)

def texts(ids): return tokenizer().batch_decode(ids, skip_special_tokens=True)

def is_whole(text, word):
    either = [word] if isinstance(word, str) else word
    return any(re.search(rf"(?<!\w){w}(?!\w)", text, re.I) for w in either)

def cattle(ids, scores):
    "A logits processor that lengthens every cat."
    vocabulary = tokenizer().get_vocab()
    scores[ids[:,-1] == vocabulary["cat"], vocabulary["##tle"]] += 9.
    return scores

# One row of the table

ENDS = [2, 30, 31, 32, 33, 34, 35, 36, 37, 38]             # several end tokens: texts of all lengths
NEVER = dict(early_stopping="never", max_new_tokens=7)     # the library's beam search without guesses

def equals_own(name, seed=0):
    """All beams where there is one end token, the best where there are ten: then the library counts a text once for
    each of its ends. The length penalty may be any."""
    model, inputs = build(name, seed)
    for penalty, ends in itertools.product((0., 1., -.5), ([2], [30], ENDS)):
        settings = NEVER | dict(length_penalty=penalty, num_return_sequences=4 if len(ends) == 1 else 1)
        if name == "BLIP": model.config.text_config.sep_token_id = ends[0]     # its generate knows one
        else: settings["eos_token_id"] = ends
        own = ours(model, inputs, custom_generate=None, **settings)
        if ours(model, inputs, **settings).tolist() != own.tolist(): return False
    return True

def image_matters(name):
    model, inputs = build(name)
    if "pixel_values" not in inputs: return None
    other = inputs | dict(pixel_values=inputs["pixel_values"].flip(0)*3)
    words = dict(words=WORDS, processor=tokenizer())
    return not torch.equal(ours(model, inputs, **words), ours(model, other, **words))

def whole_words(name):
    "All words as whole words in every text, in both modes, also where the model wants \"cattle\"."
    model, inputs = build(name)
    for settings in (dict(), dict(mode="grid"), dict(logits_processor=LogitsProcessorList([cattle]))):
        found = ours(model, inputs, words=WORDS, processor=tokenizer(), num_beams=3, **settings)
        if not all(is_whole(text, word) for text in texts(found) for word in WORDS): return False
    return True

def row(name):
    image = image_matters(name)
    values = equals_own(name), image, whole_words(name)
    said = [{True: "yes", False: "no", None: ""}[value] for value in values]
    return dict(zip(COLUMNS, (name, *said)))

def own_or_skip(model, inputs, **settings):
    "What the library's own search finds. Releases older than the table, as Python 3.10 has them, may lack something."
    try: return ours(model, inputs, custom_generate=None, **settings)
    except ValueError as e:
        if Version(transformers.__version__) >= Version("5.23"): raise
        pytest.skip(f"transformers {transformers.__version__} itself: {e}")

@pytest.mark.parametrize("name", BUILDERS)
def test_table_of_architectures(name):
    own_or_skip(*build(name))
    table = {line["architecture"]: line for line in csv.DictReader(TABLE.open())}
    assert list(table) == list(BUILDERS)
    assert row(name) == table[name]
    assert "no" not in table[name].values()

@pytest.mark.parametrize("name", BUILDERS)
def test_unknown_input_is_an_error(name):
    model, inputs = build(name)
    with pytest.raises(ValueError, match="pixel_valuse"):
        ours(model, inputs | dict(pixel_valuse=torch.zeros(2, 3, 16, 16)))

@pytest.mark.parametrize("name", ["GIT", "LLaVA", "Qwen2-VL", "PaliGemma", "Gemma 3 with pictures", "SmolVLM"])
def test_no_image_is_an_error(name):
    "BLIP, BLIP-2 and VisionEncoderDecoder refuse by themselves. Of Florence-2 its encoder's answer is all one sees."
    model, inputs = build(name)
    text = dict(input_ids=torch.tensor([[12, 13]]))
    with pytest.raises(NocError, match="no image among the inputs; expected pixel_values, or text_only"):
        ours(model, text)
    assert ours(model, text, text_only=True).shape[0] == 1

# Beside the table

@pytest.mark.parametrize("name", ["GPT-2", "Gemma 2", "Mamba", "Qwen2-VL", "BART"])
def test_batch_gives_what_each_input_gives_alone(name):
    model, inputs = build(name)
    words = [["cat", "zebra"], [["bus", "buses"]]]
    both = ours(model, inputs, each=words, processor=tokenizer(), mode="grid", num_beams=3)
    for i in range(2):
        half = {key: value.chunk(2)[i] for key, value in inputs.items()}
        alone = ours(model, half, each=words[i:i+1], processor=tokenizer(), mode="grid", num_beams=3)
        assert alone[0].tolist() == both[i,:alone.shape[1]].tolist()

@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Gemma 2", "LLaVA"])
def test_static_cache(name):
    model, inputs = build(name)
    words = dict(words=WORDS, processor=tokenizer())
    for mode in ("bank", "grid"):
        plain = ours(model, inputs, **words, mode=mode)
        static = ours(model, inputs, **words, mode=mode, cache_implementation="static")
        assert static.tolist() == plain.tolist()

def test_no_cache():
    model, inputs = build("Llama")
    words = dict(words=WORDS, processor=tokenizer())
    assert ours(model, inputs, **words, use_cache=False).tolist() == ours(model, inputs, **words).tolist()

def test_quantised_cache():
    "In eight bits of floating point, which needs no other library."
    model, inputs = build("Llama")
    quantised = NEVER | dict(cache_implementation="quantized", cache_config=dict(backend="fp8"))
    own = own_or_skip(model, inputs, **quantised)
    assert ours(model, inputs, **quantised).tolist() == own.tolist()
    found = ours(model, inputs, words=WORDS, processor=tokenizer(), **quantised)
    assert all(is_whole(text, word) for text in texts(found) for word in WORDS)

def test_settings_mean_what_they_mean_there():
    model, inputs = build("GPT-2")
    settings = dict(early_stopping="never", num_return_sequences=3, return_dict_in_generate=True,
                    output_scores=True, repetition_penalty=1.5, no_repeat_ngram_size=2)
    own = ours(model, inputs, custom_generate=None, **settings)
    out = ours(model, inputs, **settings)
    assert out.sequences.tolist() == own.sequences.tolist()
    torch.testing.assert_close(out.sequences_scores, own.sequences_scores)
    assert out.spans == [{}]*6

def test_one_beam_and_no_end_token():
    model, inputs = build("GPT-2")
    for settings in (dict(num_beams=1, early_stopping=None), dict(eos_token_id=None, early_stopping="never")):
        if settings.get("num_beams"): model.generation_config.eos_token_id = 2
        else: model.generation_config.eos_token_id = None
        own = ours(model, inputs, custom_generate=None, **settings)
        assert ours(model, inputs, **settings).tolist() == own.tolist()
        found = ours(model, inputs, words=WORDS, processor=tokenizer(), **settings)
        assert all(is_whole(text, word) for text in texts(found) for word in WORDS)

def test_tokens_that_are_added_later():
    tok = tokenizer()
    assert len(read_pieces(tok).open) == len(tok)
    tok.add_tokens(["okapi"])
    assert len(read_pieces(tok).open) == len(tok) and spellings(tok, "okapi")

def test_stopping_criterion_ends_a_text():
    "The text ends after the first dog, as the library's own does, and has all its words."
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

def test_folder_by_name():
    model, inputs = build("GPT-2")
    from_folder = ours(model, inputs, custom_generate=str(ROOT), trust_remote_code=True, words=WORDS,
                       tokenizer=tokenizer())
    assert from_folder.tolist() == ours(model, inputs, words=WORDS, processor=tokenizer()).tolist()

def test_words_of_its_own_accord_count_once():
    "Two words in one: \"fire hydrant\" names a hydrant. A word that was asked for twice need not come twice."
    model, inputs = build("GPT-2")
    settings = dict(processor=tokenizer(), max_new_tokens=2, num_beams=6)
    found = ours(model, inputs, words=["fire hydrant", "hydrant", "fire", "fire"], **settings)
    assert texts(found[:,4:]) == ["fire hydrant"]*2

def test_lines_of_the_chapter_are_those_that_run():
    "The chapter begins with lines for a real model, and ends with the same lines for a tiny one."
    chapter = json.loads((ROOT/"nbs/models/116_generate.ipynb").read_text())
    sources = ["".join(cell["source"]) for cell in chapter["cells"]]
    shown = next(s for s in sources if "```python" in s).split("```python\n")[1].split("```")[0]
    at = next(n for n, s in enumerate(sources) if s.startswith("name = folder.name"))
    name = next(line for line in shown.splitlines() if line.startswith("name = "))
    run = sources[at-1] + "\n\n" + sources[at].replace("name = folder.name", name) + "\n"
    assert run == shown

def fence(text, language): return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)

def test_lines_of_the_experiment_are_those_that_run():
    "58 shows lines for models of the hub, and runs them with tiny folders."
    page = json.loads((ROOT/"nbs/experiments/58_pixels.ipynb").read_text())
    def anonymous(lines): return re.sub(r"^name = .*$", "name = NAME", lines.strip(), flags=re.M)
    shown = [part for cell in page["cells"] for part in fence("".join(cell["source"]), "python")]
    run = "\n\n".join("".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "code")
    assert len(shown) == 2
    assert all(anonymous(lines) in anonymous(run) for lines in shown)

# Whole words, by brute force

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
KINDS = "byte BPE", "WordPiece", "Unigram", "byte fallback"
VOCABULARY = ["cat", "bus", "dog", "cattle", "car", "cart", "man", "pan", "pancake", "table", "at", "a cat"]

def captions():
    "COCO's, or the toy world's."
    coco = find_data()
    if coco:
        with gzip.open(coco/"annotations/captions_val2014.json.gz") as file: lines = json.load(file)
        return [line["caption"] for line in lines["annotations"][:2000]]
    return [text for n in range(400) for text in toy_image(0, n)[1]]

def trained(kind, lines):
    "A tokenizer of 900 pieces."
    settings = dict(vocab_size=900, special_tokens=SPECIAL, show_progress=False)
    if kind == "byte BPE":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **settings)
    elif kind == "WordPiece":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**settings)
    elif kind == "Unigram":
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **settings)
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                          decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        settings["special_tokens"] = SPECIAL + [f"<0x{n:02X}>" for n in range(256)]
        trainer = trainers.BpeTrainer(**settings)
    made.train_from_iterator(lines, trainer)
    made = ordinary_bytes(made)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>",
                                   eos_token="</s>", pad_token="<pad>")

def ordinary_bytes(made):
    "The trainer takes single bytes as special tokens only; in a tokenizer with byte fallback they are none."
    content = json.loads(made.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(content))

def written(tok, word):
    "The ways to write a word: as it is and with a capital, at the start, after a space, on a new line."
    def encode(text): return tok.encode(text, add_special_tokens=False)
    forms = word, word[0].upper() + word[1:]
    line = len(encode("\n"))
    return {tuple(ids) for form in forms
            for ids in (encode(form), encode(" " + form), encode("\n" + form)[line:])}

def names(tok, prompt, ids, word):
    """Whether the decoded text holds the word as a whole word, written in one of these ways. A character that is spread
    over several pieces counts as a letter."""
    def decode(ids): return tok.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    whole = decode(prompt + ids)
    for way in written(tok, word):
        for start in range(len(ids) - len(way) + 1):
            if tuple(ids[start:start+len(way)]) != way: continue
            head = decode(prompt + ids[:start+len(way)])
            glued = not re.search(rf"\s{word}$", head, re.I)
            beside = ids[start-1:start]*glued + ids[start+len(way):start+len(way)+1]
            if any("\ufffd" in decode([piece]) for piece in beside): continue
            ends = re.search(rf"(?<![\w\ufffd]){word}$", head, re.I)
            if ends and whole.startswith(head) and not re.match(r"\w|\ufffd", whole[len(head):]):
                return True
    return False

class Chain:
    "A random model that knows five pieces and the end, and texts of at most three."
    length = 3
    def __init__(self, tok, model, rng):
        pieces, self.tok, self.model = read_pieces(tok), tok, model
        self.groups = [rng.sample(VOCABULARY, rng.choice([1, 1, 2])) for _ in range(rng.choice([1, 1, 2]))]
        self.known = set()
        for group in self.groups: self.known |= set(rng.choice(sorted(written(tok, rng.choice(group)))))
        seen = [n for n in range(len(tok)) if not pieces.hidden[n]]
        longer = [n for n in seen if pieces.lengthens[n]]
        while len(self.known) < 5: self.known.add(rng.choice(longer if rng.random() < .6 else seen))
        self.known = sorted(self.known)
        start = rng.choice(["a photo of", "What is it?", "the", "look:"])
        self.prompt = tok.encode(start, add_special_tokens=False)

    def holds(self, ids): return all(self.mentioned(ids))

    @torch.no_grad()
    def scores(self):
        "Of all texts."
        texts = torch.tensor(list(itertools.product(self.known, repeat=self.length)))
        start, eos = len(self.prompt), self.tok.eos_token_id
        ids = torch.cat([torch.tensor([self.prompt]).expand(len(texts), -1), texts], 1)
        log_prob, scores = self.model(ids).logits.log_softmax(-1)[:,start-1:], {}
        for row, text in zip(log_prob, texts.tolist()):
            total = 0.
            for t, token in enumerate(text):
                scores[(*text[:t], eos)] = total + row[t,eos].item()
                total += row[t,token].item()
            scores[tuple(text)] = total
        return scores

    def __call__(self, ids, scores):
        "As a logits processor."
        out = torch.full_like(scores, -torch.inf)
        known = [*self.known, self.tok.eos_token_id]
        out[:,known] = scores[:,known]
        return out

    def mentioned(self, ids):
        "Which groups a text names."
        return [any(names(self.tok, self.prompt, list(ids), word) for word in group) for group in self.groups]

    def search(self, **settings):
        "The best text; with `return_dict_in_generate` also the whole answer."
        ids, start = torch.tensor([self.prompt]), len(self.prompt)
        settings = dict(num_beams=60, length_penalty=0.) | settings
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.length, custom_generate=grid_beam,
            words=self.groups, processor=self.tok, logits_processor=LogitsProcessorList([self]), **settings)
        found = getattr(out, "sequences", out)[0,start:].tolist()
        eos = self.tok.eos_token_id
        best = tuple(found[:found.index(eos)+1] if eos in found else found)
        return (best, out) if "return_dict_in_generate" in settings else best

@pytest.mark.parametrize("kind", KINDS)
def test_whole_words_by_brute_force(kind):
    "Of all texts of a chain whose decoded form names what was asked for, the best. Fifty chains have such texts."
    tok, rng, hits = trained(kind, captions()), random.Random(0), 0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tok), n_embd=16, n_layer=1, n_head=2, n_positions=32,
                                       initializer_range=.6, eos_token_id=2, pad_token_id=3)).eval()
    while hits < 50:
        chain = Chain(tok, model, rng)
        scores = chain.scores()
        true = next((ids for ids in sorted(scores, key=scores.get, reverse=True) if chain.holds(ids)), None)
        try: found = chain.search()
        except NocError as error:
            assert true is None and "for its words" in str(error)
            continue
        if true is None: continue
        hits += 1
        assert chain.holds(found), (chain.groups, tok.convert_ids_to_tokens(found))
        assert abs(scores[found] - scores[true]) < 1e-4, (chain.groups, tok.convert_ids_to_tokens(true))

def worth(chain, ids, score, prices, penalty):
    "What a text comes to; minus infinity where it lacks a must."
    total = score/len(ids)**penalty
    for price, said in zip(prices, chain.mentioned(ids)):
        if said and price < math.inf: total += price
        if not said and price == math.inf: return -math.inf
    return total

@pytest.mark.parametrize("mode, penalty", [("bank", 0.), ("grid", 0.), ("bank", 1.)])
def test_prices_by_brute_force(mode, penalty):
    "Of all texts of a chain, the one that is worth most, whatever it mentions: musts, prices below and above zero."
    tok, rng, turned = trained("WordPiece", captions()), random.Random(f"{mode}{penalty}"), 0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tok), n_embd=16, n_layer=1, n_head=2, n_positions=32,
                                       initializer_range=.6, eos_token_id=2, pad_token_id=3)).eval()
    while turned < 5:                                                   # chains whose best text prices change
        chain = Chain(tok, model, rng)
        prices = [rng.choice((math.inf, 0., rng.uniform(-20, 0), rng.uniform(0, 9))) for _ in chain.groups]
        if math.inf in prices and all(u == math.inf for u in prices): continue
        scores = chain.scores()
        values = {ids: worth(chain, ids, score, prices, penalty) for ids, score in scores.items()}
        best = max(values.values())
        if best == -math.inf: continue
        settings = dict(prices=prices, mode=mode, length_penalty=penalty, num_beams=100)
        found, out = chain.search(return_dict_in_generate=True, **settings)
        assert values[found] == pytest.approx(best, abs=1e-4), (chain.groups, prices, tok.convert_ids_to_tokens(found))
        assert out.objective[0].item() == pytest.approx(best, abs=1e-4)
        turned += found != max(scores, key=lambda ids: scores[ids]/len(ids)**penalty)

def test_prices_of_each_input():
    "Shared words come first; a batch gives what each input gives alone, with musts, with prices, with no word."
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

def test_a_price_below_zero_is_not_dodged():
    "A text that is full must not break off in a word that costs; it would decode to the word."
    model, inputs = build("GPT-2")
    vocabulary = tokenizer().get_vocab()
    def wants(ids, scores):
        scores[:,vocabulary["cat"]] += 20.
        scores[:,:4] = -torch.inf                              # special tokens
        return scores
    settings = dict(words=["cat"], processor=tokenizer(), max_new_tokens=2, length_penalty=0.,
                    logits_processor=LogitsProcessorList([wants]), return_dict_in_generate=True)
    for mode in ("bank", "grid"):
        for price in (-50., 0.):
            out = ours(model, inputs, prices=[price], mode=mode, **settings)
            said = [is_whole(text, "cat") for text in texts(out.sequences[:,4:])]
            assert said == [bool(spans) for spans in out.spans] == [price == 0.]*2

def test_infinite_prices_are_musts():
    for name in ("GPT-2", "BLIP"):
        model, inputs = build(name)
        words = dict(words=WORDS, processor=tokenizer())
        for mode in ("bank", "grid"):
            hard = ours(model, inputs, mode=mode, **words)
            assert ours(model, inputs, mode=mode, prices=[math.inf]*3, **words).tolist() == hard.tolist()

def main():
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for name in BUILDERS: table.writerow(row(name))

if __name__ == "__main__": main()
