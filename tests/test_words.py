"""Test the words of a decoded text, with random tokenizers, models and words, and `re` as the reference.

The text is what the tokenizer decodes with its defaults. It contains no avoided word; a word is reported if and only if
it occurs, at its `spans`; and a price is added if and only if the text has the word. The check uses no function of the
package, and test_hub.py applies it to the hub's folder. WORDS_CASES sets the number of cases (`make words`: 10,000)."""
import collections, functools, itertools, math, os, random, re, sys, unicodedata, warnings
import pytest
import regex
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel, LogitsProcessorList, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions
from noc_nb.core import NocError
from noc_nb.words.generate import grid_beam

CASES, PARTS = int(os.environ.get("WORDS_CASES", 300)), 10
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

# Words in a text, for a reader. Scripts without spaces: Thai and Lao, Myanmar, Khmer, kana and Han.
UNSPACED = ("\u0e00-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff\u19e0-\u19ff\u3005-\u3007\u3021-\u3029"
            "\u3031-\u3035\u3038-\u30ff\u31f0-\u31ff\uff66-\uff9f\u2e80-\u2fdf\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
            "\U0001b000-\U0001b16f\U00020000-\U0003ffff")
MARKS = "".join(c for c in map(chr, range(0x20000)) if unicodedata.category(c)[0] == "M")
LETTER = rf"(?:[\w{MARKS}](?<![{UNSPACED}]))"

def folded(text):
    "Fold a whole text: without case, and in canonical order."
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", text).casefold())

@functools.cache
def pattern(word, boundary):
    "Return a pattern that matches before a folded word with boundaries where its edges are letters of spaced scripts."
    left = rf"(?<!{LETTER})" if boundary == "word" and re.match(LETTER, word[0]) else ""
    right = rf"(?!{LETTER})" if boundary == "word" and re.match(LETTER, word[-1]) else ""
    return re.compile(rf"{left}(?={re.escape(word)}{right})")

def has(text, word, boundary="word", prompt=""):
    "Return whether a reader finds a word in the text behind a prompt; the word's last character ends a grapheme."
    whole, word = prompt + text, folded(word)
    ends = {len(folded(whole[:part.end()])) for part in regex.finditer(r"\X", whole)}
    found = (part.start() for part in pattern(word, boundary).finditer(folded(whole)))
    return any(start >= len(folded(prompt)) and start + len(word) in ends for start in found)

# Tokenizers: trained on a few random words, with additional tokens that no spelling uses

WORDS = ["cat", "cats", "cattle", "Red", "red", "apple", "apple pie", "fire hydrant", "hydrant", "New York", "don't",
         "T-shirt", "a", "at", "café", "naïve", "Straße", "кот", "котик", "猫", "黒い猫", "ねこ", "แมว", "고양이", "C++",
         "it's", "10", "hot dog", "dog", "cafe", "Việt", "かき", "かぎ", "ハト", "나무", "나뭇잎", "👩", "क", "क्ष", "ᾳ"]
REST = ["s", "tle", "ed", " pie", ".", ",", " ", "'", "-", "t", "é", "e\u0301", "x", "ca", "猫", "い", "์", "и", "1", "_",
        " a", "a ", "at cat", "cat,", ", cat", " (", "—", "\n", "!", "ter", "n't", "'s", "APP", "LE", "ß", "SS",
        "\u3099", "\u0301", "\u0323", "\u0302", "\u0327", "\u11ba", "ᄂ", "\u200d", "👩", "\u0e48", "\u0345", "ষ",
        "\u094d", "ê"]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
NAMES = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
BYTES = [f"<0x{n:02X}>" for n in range(256)]

def chunks(made, rng, words):
    "Return random words, split as the tokenizer splits a text before it looks up tokens."
    text = " ".join(rng.choice(words) + rng.choice(["", "", rng.choice(REST)]) for _ in range(60))
    if made.normalizer: text = made.normalizer.normalize_str(text)
    return [part for part, _ in made.pre_tokenizer.pre_tokenize_str(text)] if made.pre_tokenizer else [text]

def learned(parts, count):
    "Learn the symbols and merges of a byte-pair encoding; the library's trainer breaks ties at random."
    parts, merges = [[*part] for part in parts], []
    symbols = sorted({c for part in parts for c in part})
    for _ in range(count):
        pairs = collections.Counter(pair for part in parts for pair in zip(part, part[1:]))
        if not pairs: break
        a, b = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append((a, b))
        for part in parts:
            n = 0
            while n + 1 < len(part):
                if (part[n], part[n+1]) == (a, b): part[n:n+2] = [a + b]
                n += 1
    return symbols, merges

def pieces(rng, words):
    "Return parts of texts, cut at random places."
    text, found = rng.choice([" ", ""]).join(rng.sample(words*3, len(words)*3)), set()
    for _ in range(30):
        start = rng.randrange(len(text))
        found.add(text[start:start+rng.choice((1, 1, 2, 3, 4, 6, 9))])
    return sorted(found | {*rng.sample(REST, 12)} | {rng.choice(words) + rng.choice(REST) for _ in range(6)})

def byte_bpe(rng):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < .5)
    made.decoder = decoders.ByteLevel()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    def cut(piece):
        "Cut a piece between bytes."
        whole = "".join(part for part, _ in level.pre_tokenize_str(piece))
        return whole[rng.choice((0, 0, 0, 1)):len(whole) - rng.choice((0, 0, 0, 1))] or whole
    return made, dict(symbols=sorted(pre_tokenizers.ByteLevel.alphabet())), cut

def unigram(rng):
    made = Tokenizer(models.Unigram())
    if rng.random() < .5: made.normalizer = normalizers.NFKC()
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made, {}, lambda piece: piece.replace(" ", "▁")

def byte_fallback(rng):
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    return made, dict(symbols=BYTES, byte_fallback=True), lambda piece: piece.replace(" ", "▁")

def wordpiece(rng):
    made = Tokenizer(models.WordPiece())
    made.normalizer = normalizers.BertNormalizer(lowercase=rng.random() < .5)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=rng.random() < .5)
    def cut(piece):
        part = rng.choice(re.findall(r"\w+|[^\w\s]", piece) or ["a"])
        return rng.choice(("", "##"))*part.isalnum() + part
    return made, {}, cut

def characters(rng):
    made = Tokenizer(models.BPE())
    made.decoder = decoders.Fuse()
    if rng.random() < .5: made.normalizer = rng.choice([normalizers.NFD, normalizers.NFC, normalizers.Lowercase])()
    return made, dict(merges=0), lambda piece: piece

def ends_of_words(rng):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder()
    def cut(piece): return re.sub(r"\s", "", piece) + rng.choice(("", "</w>"))
    return made, dict(end_of_word_suffix="</w>"), cut

KINDS = dict(byte_bpe=byte_bpe, unigram=unigram, byte_fallback=byte_fallback, wordpiece=wordpiece,
             characters=characters, ends_of_words=ends_of_words, bytes=None)

def drawn(kind, rng, words):
    "Build a random tokenizer of a kind, for some words."
    if kind == "bytes": return ByT5Tokenizer(bos_token="<s>")
    made, settings, cut = KINDS[kind](rng)
    parts, suffix = chunks(made, rng, words), settings.get("end_of_word_suffix", "")
    symbols, merges = learned([[*part[:-1], part[-1] + suffix] for part in parts],
                              settings.pop("merges", rng.choice((10, 30, 60))))
    more = sorted({*map(cut, pieces(rng, words))} - {"", suffix})
    if kind == "wordpiece": symbols += ["##" + c for c in symbols]
    if kind == "byte_fallback": symbols = rng.sample(symbols, min(25, len(symbols)))
    symbols = [*settings.pop("symbols", ()), *symbols, *(c + suffix for c in symbols if not c.endswith(suffix))]
    known = {*symbols}
    merges = [(a, b) for a, b in merges if {a, b} <= known and not known.add(a + b)]
    vocabulary = {p: n for n, p in enumerate(dict.fromkeys([*SPECIAL, *symbols, *(a + b for a, b in merges), *more]))}
    if kind == "unigram":
        made.model = models.Unigram([(p, -20. if p in more else -2.) for p in vocabulary], 0)
    elif kind == "wordpiece": made.model = models.WordPiece(vocabulary, unk_token="<unk>")
    else: made.model = models.BPE(vocabulary, merges, unk_token="<unk>", **settings)
    tok = PreTrainedTokenizerFast(
        tokenizer_object=made, **NAMES, clean_up_tokenization_spaces=kind == "wordpiece" and rng.random() < .5)
    if rng.random() < .2: tok.add_tokens(["<|image|>"], special_tokens=True)
    return tok

# Models: a table of scores for the next token after each token

class Table(GPT2LMHeadModel):
    "A model whose next token depends on the last one, by a table of scores."
    def forward(self, input_ids, past_key_values=None, **kwargs):
        return CausalLMOutputWithCrossAttentions(logits=self.table[input_ids], past_key_values=past_key_values)

def model_of(rng, tok, words):
    "Build a random model, from nearly uniform to peaked, that prefers the tokens of words and may have unused tokens."
    v = len(tok) + (rng.choice((0, 0, 3)) if tok.is_fast else 0)
    model = Table(GPT2Config(vocab_size=v, n_embd=2, n_layer=1, n_head=1, n_positions=8, eos_token_id=tok.eos_token_id,
                             pad_token_id=tok.pad_token_id, bos_token_id=tok.bos_token_id)).eval()
    make = torch.Generator().manual_seed(rng.randrange(2**31))
    table = torch.randn(v, v, generator=make)*rng.choice((.1, 1., 3., 6.))
    table[:,[n for n in tok.all_special_ids if n != tok.eos_token_id]] -= rng.choice((3., 30.))
    table[:,tok.eos_token_id] += rng.choice((0., 3.))
    letters = folded("".join(words)) + " "
    near = [n for n in range(len(tok)) if (text := folded(tok.decode([n]))) and set(text) <= {*letters, "#", "\ufffd"}]
    table[:,near] += rng.choice((0., 2., 5.))
    for word in words:
        for text in word, " " + word:
            ids = tok.encode(text, add_special_tokens=False)
            for a, b in zip(ids, ids[1:]): table[a,b] += rng.choice((0., 4., 8.))
    model.table = table
    return model

class Few:
    "Allow only a few tokens: a logits processor."
    def __init__(self, known): self.known = known
    def __call__(self, ids, scores):
        out = torch.full_like(scores, -torch.inf)
        out[:,self.known] = scores[:,self.known]
        return out

# The property

def decoded(tok, ids): return tok.decode(ids, skip_special_tokens=True)

def behind(tok, start, ids):
    "Return the text of a prompt after its last special token, and the text that more tokens add to it."
    start = start[max((n + 1 for n, token in enumerate(start) if token in tok.all_special_ids), default=0):]
    prompt, whole = decoded(tok, start), decoded(tok, [*start, *ids])
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt):]

def counted(tok, start, ids, after):
    "Return the parts of `behind`, split at the end of the text `after`; an empty text if it is not there."
    prompt, text = behind(tok, start, ids)
    token = tok.get_added_vocab().get(after)
    if after is None or folded(after) in folded(prompt): return prompt, text
    if token is not None: return "", decoded(tok, ids[ids.index(token)+1:] if token in ids else [])
    ends = (part.end() for part in regex.finditer(r"\X", prompt + text))
    wholes = ((prompt + text)[:end] for end in ends)
    first = next((part for part in wholes if folded(part)[len(folded(prompt)):].endswith(folded(after))), prompt + text)
    return first, (prompt + text)[len(first):]

def could_say(tok, start, known, length, groups, avoid, boundary, after):
    "Return True if some text of a few tokens has all words and no avoided one, by brute force."
    ids = [part for n in range(1, length + 1) for part in itertools.product(known, repeat=n)]
    def there(prompt, text, words): return any(has(text, w, boundary, prompt) for w in words)
    texts = (counted(tok, start, part, after) for part in ids)
    return any(all(there(*text, group) for group in groups) and not there(*text, avoid) for text in texts)

def solid(text): return folded(text).replace(" ", "")

def between(tok, ids, start, end):
    "Return what some tokens add to a text before it is cleaned up; a first token may decode differently."
    def raw(ids): return tok.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return raw(ids[:end])[len(raw(ids[:start])):]

def faults_of(kind, seed, counts, search):
    "Yield the faults of one case as (kind of fault, text, words and prices)."
    rng = random.Random(f"{kind} {seed}")
    words = rng.sample(WORDS, 8)
    tok = drawn(kind, rng, words)
    model = model_of(rng, tok, words)
    groups = [rng.sample(words, rng.choice((1, 1, 2))) for _ in range(rng.choice((0, 1, 1, 2)))]
    avoid = rng.sample(words, rng.choice((0, 1, 2) if groups else (1, 2)))
    prices = [rng.choice((math.inf, math.inf, -8., 0., 5.)) for _ in groups] if groups and rng.random() < .5 else None
    few, length = None, rng.choice((3, 6, 9)) * (3 if kind == "bytes" else 1)
    if rng.random() < .3:
        spelled = {n for word in sum(groups, avoid) for n in tok.encode(rng.choice(("", " ")) + word,
                                                                        add_special_tokens=False)}
        few = sorted(rng.sample(sorted(spelled), min(4, len(spelled))))
        few, length = sorted({*few, *rng.sample(range(4, len(tok)), 2)} - {tok.unk_token_id}), 3
    settings = dict(num_beams=rng.choice((1, 2, 4)), mode=rng.choice(("bank", "grid")), prices=prices,
                    no_repeat=rng.random() < .1, length_penalty=rng.choice((0., 1.)), max_new_tokens=length,
                    boundary=rng.choice(("word", "word", "word", "text")))
    settings["num_return_sequences"] = rng.choice((1, settings["num_beams"]))
    after = rng.choice([None, None, None, rng.choice((",", "E", "a", "猫", "か", "ê", "cat", "<|image|>"))])
    if few: settings["logits_processor"] = LogitsProcessorList([Few([*few, tok.eos_token_id])])
    start = tok.encode(rng.choice(["a", "x", "the cat", "ca", "か", "나", "e\u0302", "."]), add_special_tokens=False)
    start = [n for n in start if tok.convert_ids_to_tokens(n) not in BYTES]    # which the next byte could change
    start = torch.tensor([start or [tok.bos_token_id]])
    try:
        out = model.generate(
            start, attention_mask=torch.ones_like(start), custom_generate=search, words=groups or None,
            avoid=avoid or None, after=after, processor=tok, do_sample=False, return_dict_in_generate=True, **settings)
    except ValueError as error:                             # the hub's folder has its own class `NocError`
        if type(error).__name__ != NocError.__name__: raise
        counts[re.sub(r"'.*?'|\d+|\[.*?\]", "…", str(error))[-60:]] += 1
        return
    for row, (ids, spans, objective) in enumerate(zip(out.texts, out.spans, out.objective.tolist())):
        prompt, text = counted(tok, start[0].tolist(), ids, after)
        asked, boundary = (groups, avoid, prices, after), settings["boundary"]
        for word in avoid:
            if has(text, word, boundary, prompt): yield "avoided word is there", text, word, asked
        there = [any(has(text, word, boundary, prompt) for word in group) for group in groups]
        for n, group in enumerate(groups):
            if there[n] != (n in spans): yield ("not reported", "not there")[n in spans], text, group, asked
            elif n in spans:
                part = between(tok, ids, *spans[n])
                if not any(solid(word) in solid(part) for word in group): yield "wrong span", text, group, part
        worth = sum(u for u, said in zip(prices or (), there) if said and u < math.inf)
        mean = out.sequences_scores[row].item()
        if abs(objective - mean - worth) > 1e-3: yield "wrong price", text, asked, (objective, mean, worth)
        musts = [n for n, u in enumerate(prices or [math.inf]*len(groups)) if u == math.inf]
        if row or all(there[n] for n in musts): continue
        wanted = [groups[n] for n in musts]
        could = few and could_say(tok, start[0].tolist(), few, length, wanted, avoid, boundary, after)
        counts["must is missing: " + ("the beam lost it" if could else "impossible" if few else "unknown")] += 1

def run(cases, part=0, parts=1, search=grid_beam):
    "Return the faults and counts of some cases; the kinds of tokenizers alternate."
    found, counts = [], collections.Counter()
    for seed in range(part, cases, parts):
        kind = [*KINDS][seed % len(KINDS)]
        for fault in faults_of(kind, seed, counts, search):
            counts[f"{kind}: {fault[0]}"] += 1
            found.append((kind, seed, *fault))
    return found, counts

@pytest.mark.parametrize("part", range(PARTS))
def test_the_promises_about_words_hold_on_the_decoded_text(part):
    found, counts = run(CASES, part, PARTS)
    assert not found, f"{len(found)} faults: {found[:3]}"

def test_the_judge_finds_the_words():
    "The reference finds the words of hand-made examples."
    yes = [("a Cat.", "cat"), ("黒い猫だ", "猫"), ("cat猫", "cat"), ("STRASSE", "Straße"), ("cafe\u0301", "café"),
           ("C++", "C++"), ("(New York)", "new york"), ("cat\ufffd", "cat"), ("don't", "don't"), ("แมวดำ", "แมว"),
           ("Vi\u00ea\u0323t", "Việt"), ("Viê\u0323t", "việt"), ("かきと", "かき"), ("ハトだ", "ハト"), ("\u1fb3", "αι")]
    assert has("cats 고양이가", "고양이", "text") and has("cats", "cat", "text") and not has("cats", "ct", "text")
    assert has("나무가", "나무", "text") and not has("나뭇잎", "나무", "text") and not has("café", "cafe", "text")
    no = [("cats", "cat"), ("café", "cafe"), ("cat_", "cat"), ("cat\u0301", "cat"), ("кота", "кот"), ("고양이가", "고양이"),
          ("かぎ", "かき"), ("ハドソン", "ハト"), ("👩\u200d🚀", "👩"), ("क्षमा", "क"), ("\u1fb3", "α")]
    assert [pair for pair in yes if not has(*pair)] == [pair for pair in no if has(*pair)] == []
    assert has(" cat", "cat", prompt="a") and has("cat", "cat", prompt="a ") and not has("cat", "cat", prompt="a")
    assert not has("tle cat", "cattle", prompt="cat") and not has("\u3099", "が", prompt="か")

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found, counts = run(int(sys.argv[1]))
    for line in found[:int(sys.argv[2])]: print(*line)
    for name, n in sorted(counts.items()): print(f"{n:>5} {name}")
