"""Test the spellings of words by tokenizers of eight kinds; whole words and prices are tested by brute force."""
import functools, itertools, json, random, re, unicodedata
from types import SimpleNamespace
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel, LogitsProcessorList, PreTrainedTokenizerFast
from noc_nb.core import NocError
from noc_nb.words.generate import grid_beam
from noc_nb.words.spellings import _read_table, _Reader, spellings
from noc_nb.toy import toy_image
from test_words import (BYTES, LETTER, NAMES, SPECIAL, behind, byte_bpe, byte_fallback, ends_of_words, folded, has,
                        unigram, wordpiece)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:(input \\d|num_beams)")]

# Tokenizers of eight kinds, each with 900 tokens

KINDS = ["byte BPE", "byte BPE, prefix", "WordPiece", "WordPiece, cased", "Unigram", "byte fallback", "ends of words",
         "bytes"]
VOCABULARY = ["cat", "bus", "dog", "cattle", "car", "cart", "man", "pan", "pancake", "table", "at", "a cat"]

def captions():
    "Return captions of the toy world."
    return [text for n in range(400) for text in toy_image(0, n)[1]]

def maker(skeleton, model, trainer=trainers.BpeTrainer, chance=1., **more):
    "Return a skeleton of test_words with another model, its trainer and settings; `chance` decides its random choices."
    made, *_ = skeleton(SimpleNamespace(random=lambda: chance))
    made.model = model
    return made, trainer, more

UNK = dict(unk_token="<unk>")
ALPHABET = dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
MAKERS = {
    "byte BPE": lambda: maker(byte_bpe, models.BPE(), **ALPHABET),
    "byte BPE, prefix": lambda: maker(byte_bpe, models.BPE(), chance=0., **ALPHABET),
    "WordPiece": lambda: maker(wordpiece, models.WordPiece(**UNK), trainers.WordPieceTrainer, 0.),
    "WordPiece, cased": lambda: maker(wordpiece, models.WordPiece(**UNK), trainers.WordPieceTrainer),
    "Unigram": lambda: maker(unigram, models.Unigram(), trainers.UnigramTrainer, **UNK),
    "byte fallback": lambda: maker(byte_fallback, models.BPE(byte_fallback=True, fuse_unk=True, **UNK),
                                   special_tokens=SPECIAL + BYTES),
    "ends of words": lambda: maker(ends_of_words, models.BPE(end_of_word_suffix="</w>", **UNK),
                                   end_of_word_suffix="</w>")}

@functools.cache
def trained(kind):
    if kind == "bytes": return ByT5Tokenizer(bos_token="<s>")
    made, trainer, more = MAKERS[kind]()
    settings = dict(vocab_size=900, special_tokens=SPECIAL, show_progress=False) | more
    made.train_from_iterator(captions(), trainer(**settings))
    return PreTrainedTokenizerFast(tokenizer_object=ordinary_bytes(made), **NAMES)

def ordinary_bytes(made):
    "Make single bytes ordinary tokens again, which the trainer accepts only as special tokens."
    content = json.loads(made.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(content))

def tiny_gpt2(tok, seed=0):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=len(tok), n_embd=16, n_layer=1, n_head=2, n_positions=96, initializer_range=.6,
        eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)).eval()

# Whole words, by brute force

def written(tok, word):
    "Return the encodings of a word: as given, capitalised or in capitals; at the start, after a space, on a new line."
    def encode(text): return tok.encode(text, add_special_tokens=False)
    forms = word, word[0].upper() + word[1:], word.upper(), word.title()
    line = len(encode("\n"))
    ways = {tuple(ids) for form in forms
            for ids in (encode(form), encode(" " + form), encode("\n" + form)[line:])}
    return {way for way in ways if tok.unk_token_id not in way}

class Chain:
    "A random model restricted to five tokens and the end, whose texts have at most three tokens."
    length = 3
    def __init__(self, tok, model, rng):
        table, self.tok, self.model = _read_table(tok), tok, model
        self.groups = [rng.sample(VOCABULARY, rng.choice([1, 1, 2])) for _ in range(rng.choice([1, 1, 2]))]
        self.known = set()
        for group in self.groups: self.known |= set(rng.choice(sorted(written(tok, rng.choice(group)))))
        seen = [n for n in range(len(tok)) if n not in table.hidden]
        longer = [n for n in seen if re.match(LETTER, folded(table.bytes[n].decode(errors="ignore")))]
        while len(self.known) < 5: self.known.add(rng.choice(longer if rng.random() < .6 else seen))
        self.known = sorted(self.known)
        start = rng.choice(["a photo of", "What is it?", "the", "look:"])
        self.prompt = [n for n in tok.encode(start, add_special_tokens=False) if n not in table.runs]

    @torch.no_grad()
    def scores(self):
        "Return the log-probability of every text."
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
        "Allow only the known tokens and the end: a logits processor."
        out = torch.full_like(scores, -torch.inf)
        known = [*self.known, self.tok.eos_token_id]
        out[:,known] = scores[:,known]
        return out

    def holds(self, ids):
        "Return whether a text mentions all groups."
        prompt, text = behind(self.tok, self.prompt, ids)
        return all(any(has(text, word, prompt=prompt) for word in group) for group in self.groups)

    def search(self):
        "Return the best text that the search finds."
        ids, start = torch.tensor([self.prompt]), len(self.prompt)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.length, custom_generate=grid_beam,
            words=self.groups, processor=self.tok, logits_processor=LogitsProcessorList([self]), num_beams=60,
            length_penalty=0.)
        found, eos = out[0,start:].tolist(), self.tok.eos_token_id
        return tuple(found[:found.index(eos)+1] if eos in found else found)

@pytest.mark.parametrize("kind", KINDS)
def test_whole_words_equal_brute_force(kind):
    "The search finds the best of all texts that mention all words, for twenty-five chains that have such texts."
    tok, rng, hits = trained(kind), random.Random(0), 0
    model = tiny_gpt2(tok)
    while hits < 25:
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

def missing(model, tok, rng, count, mode):
    """Return the words that a text lacks, although there is room for each, for one more token before it, and for the
    end. Words of several tokens must not begin directly after a letter, or too late."""
    known = [word for word in ("zebra", "quokka", "cat", "bus", "fire hydrant", "T-shirt") if spellings(tok, word)]
    words = rng.sample(known, min(count, len(known)))
    room = sum(min(map(len, spellings(tok, word))) + 1 for word in words) + 1 + rng.choice([0, 1, 8])
    ids = torch.tensor([tok.encode(rng.choice(["a photo of the", "Zeb"]), add_special_tokens=False)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), custom_generate=grid_beam, words=words, processor=tok, mode=mode,
        num_beams=rng.choice([1, 1, 2, 4]), max_new_tokens=room, do_sample=False, return_dict_in_generate=True,
        eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    return [word for n, word in enumerate(words) if n not in out.spans[0]]

@pytest.mark.parametrize("kind", KINDS)
def test_words_that_fit_are_mentioned(kind):
    "Texts mention all words that fit; tests/architectures.py tests this for every architecture."
    tok, rng = trained(kind), random.Random(1)
    for n in range(16): assert not missing(tiny_gpt2(tok, n), tok, rng, rng.randint(1, 5), ("bank", "grid")[n % 2])

# Reading, without a model

LETTERS = ["a", "e", "t", "s", " ", ".", "c", "か", "き", "ハ", "ト", "\u3099", "나", "무", "뭇", "\u1102", "\u1161", "\u11ba",
           "e\u0302", "\u0323", "\u0302", "\u0301", "\u0327", "ê", "ệ", "é", "ß", "ᾳ", "α", "\u0345", "👩", "\u200d",
           "🇦", "क", "\u094d", "ष", "แ", "\u0e48", "\u0e38", "猫", "\r", "\n", "\u0600", "ŉ", "İ"]

def drawn_text(rng, size): return "".join(rng.choices(rng.sample(LETTERS, 8), k=rng.randrange(size)))

@pytest.mark.parametrize("kind", ["bytes", "byte BPE", "byte fallback"])
def test_a_reader_finds_what_is_in_the_text(kind):
    "Token by token and at once, a reader finds a word behind a prompt if and only if it is there."
    tok, rng, found = trained(kind), random.Random(kind), 0
    table = _read_table(tok)
    for _ in range(1200):
        prompt, text = drawn_text(rng, 4), drawn_text(rng, 12)
        at = rng.randrange(len(prompt + text) + 1)
        word = ((prompt + text)[at:at+rng.choice((1, 2, 3))]).strip() or "cat"
        if unicodedata.category(word[0])[0] == "M": continue
        boundary = rng.choice(["word", "text"])
        reader = _Reader(table, [[word]], boundary)
        before, ids = (tok.encode(part, add_special_tokens=False) for part in (prompt, text))
        if kind == "byte fallback": before = [n for n in before if n not in table.runs]
        there = has(behind(tok, before, ids)[1], word, boundary, behind(tok, before, [])[0])
        state, said, open = reader.begin(before), False, False
        assert there == bool(reader.mentions(ids, state)), (prompt, text, word, boundary)
        found += there
        for token in ids if not table.runs else ():
            if open and not table.silent(state.pending, token):
                said, open = said or not reader.lengthens(state, len(tok))[0][token], False
            state, sure, still = reader.read(state, token)
            said, open = said or sure > 0, open or still > 0
        assert table.runs or there == (said or open), (prompt, text, word, boundary)
    assert found > 150
