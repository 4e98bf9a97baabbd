"""Measure how well several systems get required words, CommonGen's concepts, into sentences of a small language model.

    NOC_COMMONGEN=FOLDER python benchmarks/words.py --systems beam:5,bank:5,prices:5:1.0

CommonGen (Lin et al., 2020, arXiv 1911.03705) asks for one sentence with three to five concepts, in any form. A small
encoder-decoder is trained on it, and all systems decode with the same model. Rows are appended to results/words.jsonl;
chapter 73 shows them. The systems, with their number of beams:

    beam:5                       plain beam search; the model reads the concepts
    bank:5, credit:5, grid:5     the searches of chapter 26, inside generate, with any form of each concept
    prices:5:1.5                 the bank, with a price of 1.5 nats for each concept instead of a must
    sample:5                     sampling until a sentence has all words, with at most as many tokens as bank:5 scored
    one:5, any:5                 transformers 4.55.4 with force_words_ids: one form of a concept, or any (--peer)
    published:bart               sentences of another system, from a file

The encoder reads the concepts. In a decoder's prompt, transformers 4.55.4 would count them as generated."""

import json, os, random, re, subprocess, time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from noc_nb.commands.command import one_thread, script
from noc_nb.core import NocError, require, set_seed
from noc_nb.lab.config import Config, override
from noc_nb.lab.disk import read_json, write_json
from noc_nb.lab.metrics import CaptionScorer, points
from noc_nb.lab.novelty import interval
from noc_nb.lab.progress import progress, say
from noc_nb.lab.results import append_row, new_row, read_rows
from noc_nb.words.generate import grid_beam
from noc_nb.scores.java import java_programs

# ---- The task
# The folder of data has `train.jsonl`, `dev.jsonl` and `test.jsonl`, whose lines have concepts and a sentence, and
# files with the forms in which each concept of `dev` and `test` counts as mentioned. `dev` and `test` have one
# reference per set. `held` are sets of `train` with several references; lines with the same concepts in any order are
# not used for training. Their forms are those in the files, and those of regular inflection that some sentence has;
# every reference of a held set mentions all its concepts. Choices are made on `held` and `dev`.
class _Set(NamedTuple):
    "Concepts, the forms of each concept, and reference sentences."
    concepts:list
    forms:list
    references:list

def _lines(folder, name):
    path = Path(folder)/f"{name}.jsonl"
    require(path.exists(), f"{path}: no such file", "CommonGen's; NOC_COMMONGEN names its folder")
    return list(map(json.loads, path.read_text().splitlines()))

def _regular(word):
    "Return the regular English inflections of a word."
    stem, out = word.removesuffix("e"), {word, f"{word}s"}
    if re.search(r"(s|x|z|ch|sh|o)$", word): out |= {f"{word}es"}
    if re.search(r"[^aeiou]y$", word): out |= {f"{word[:-1]}ies", f"{word[:-1]}ied"}
    out |= {f"{stem}ing", f"{stem}ed"}
    if re.search(r"[^aeiou][aeiou][^aeiouwxy]$", word):
        out |= {f"{word}{word[-1]}ing", f"{word}{word[-1]}ed"}
    if word.endswith("ie"): out |= {f"{word[:-2]}ying"}
    return out

def _says(sentence, forms):
    "Return True if a sentence has one of the forms as a whole word."
    either = "|".join(map(re.escape, forms))
    return re.search(rf"(?<!\w)({either})(?!\w)", sentence.lower()) is not None

def _count(sentence, one): return sum(_says(sentence, forms) for forms in one.forms)

def _words_of(lines): return {w for s in lines for w in re.findall("[a-z]+", s["sentence"].lower())}

def _known_forms(train, tests):
    "Return a function concept -> forms: listed forms, and regular ones that `train` has."
    seen, listed = _words_of(train), defaultdict(set)
    for one in tests:
        for concept, forms in product(one.concepts, one.forms):
            if concept in forms: listed[concept].update(forms)
    def forms(concept):
        known = listed[concept] | _regular(concept)
        return sorted(form for form in known if form in seen or form == concept)
    return forms

def _prepare(folder, held):
    "Return training lines, and `_Set`s by part; `held` sets are not used for training."
    train, parts, sentences = _lines(folder, "train"), {}, defaultdict(list)
    for part in "dev", "test":
        pairs = zip(_lines(folder, part), _lines(folder, f"{part}.forms"))
        parts[part] = [_Set(one["concepts"], forms, [one["sentence"]]) for one, forms in pairs]
    forms = _known_forms(train, parts["dev"] + parts["test"])
    for line in train: sentences[frozenset(line["concepts"])].append(line["sentence"])
    several = [_Set(sorted(c), list(map(forms, sorted(c))), found)
               for c, found in sentences.items() if len(found) > 1]
    def complete(one): return all(_says(*pair) for pair in product(one.references, one.forms))
    whole = sorted(filter(complete, several))
    require(len(whole) >= held, f"{folder}: {len(whole)} sets to hold out", f"{held}")
    parts["held"] = random.Random(0).sample(whole, held)
    left = {frozenset(one.concepts) for one in parts["held"]}
    return [line for line in train if frozenset(line["concepts"]) not in left], parts

# ---- The model
# The model is a BART with nine million weights and a byte-pair tokenizer, which can spell every word. The concepts of a
# set have no order, so they are shuffled each time. To save time, sentences of similar lengths are in one batch, and
# matrix products have 16 bits. With a checkpoint in its folder training resumes, and with a trained model it is
# skipped.
@dataclass(frozen=True)
class _WordsConfig(Config):
    "The settings of the language model, its training and its decoding."
    held:int = 1000    # number of sets that are not used for training
    pieces:int = 8000  # tokens of the tokenizer
    width:int = 256    # width; feed-forward networks are four times as wide, heads have 64 numbers
    layers:int = 4     # layers in the encoder, and in the decoder
    epochs:int = 6
    batch:int = 64     # sentences per step
    warmup:int = 300   # steps until the peak learning rate; after them it falls to zero
    peak:float = 1e-3  # peak learning rate
    half:bool = True   # train with matrix products of 16 bits
    room:int = 40      # maximum number of tokens of a generated sentence
    penalty:float = 0. # length_penalty of all searches

def _word_tokenizer(sentences, pieces):
    "Train a byte-pair tokenizer of lower-case text."
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    made, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    made.normalizer, made.decoder = normalizers.Lowercase(), decoders.ByteLevel()
    made.pre_tokenizer, special = level(add_prefix_space=True), ["<pad>", "<s>", "</s>"]
    made.train_from_iterator(sentences, trainers.BpeTrainer(
        vocab_size=pieces, special_tokens=special, initial_alphabet=level.alphabet(),
        show_progress=False))
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special))
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)

def _small_bart(cfg, pieces):
    "Build a BART with random weights."
    from transformers import BartConfig, BartForConditionalGeneration
    half = dict(layers=cfg.layers, attention_heads=max(1, cfg.width // 64), ffn_dim=4*cfg.width)
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in half.items()}
    return BartForConditionalGeneration(BartConfig(
        **sizes, vocab_size=pieces, d_model=cfg.width, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
        forced_bos_token_id=None))

def _padded(rows, fill):
    return pad_sequence([torch.tensor(row) for row in rows], True, fill)

def _read(tokenizer, concepts):
    "Encode concepts as input of a model."
    ids = _padded([tokenizer(" ".join(row))["input_ids"] for row in concepts], 0)
    return dict(input_ids=ids, attention_mask=(ids > 0).long())

def _pairs(tokenizer, lines):
    "Return pairs of concepts and the tokens of a sentence."
    ids = tokenizer([line["sentence"] for line in lines])["input_ids"]
    return [dict(concepts=line["concepts"], input_ids=[*row[:62], 2])
            for line, row in zip(lines, ids)]

def _train_words(cfg, rest, dev, folder, seed):
    "Train a model, or resume an interrupted run."
    from transformers import PrinterCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
    if (folder/"best/model.safetensors").exists(): return
    tokenizer, start = _word_tokenizer((line["sentence"] for line in rest), cfg.pieces), time.time()
    def mixed(row): return [row["concepts"][j] for j in torch.randperm(len(row["concepts"]))]
    def batch(rows):
        labels = _padded([row["input_ids"] for row in rows], -100)
        return _read(tokenizer, list(map(mixed, rows))) | dict(labels=labels)
    set_seed(seed)
    model = _small_bart(cfg, len(tokenizer))
    how = Seq2SeqTrainingArguments(
        str(folder), num_train_epochs=cfg.epochs, per_device_train_batch_size=cfg.batch,
        per_device_eval_batch_size=cfg.batch, learning_rate=cfg.peak, warmup_steps=cfg.warmup,
        lr_scheduler_type="linear", max_grad_norm=1., seed=seed, eval_strategy="epoch",
        train_sampling_strategy="group_by_length", bf16=cfg.half,
        save_strategy="epoch", save_total_limit=1, use_cpu=True, report_to=[], logging_steps=200,
        disable_tqdm=True, remove_unused_columns=False)
    trainer = Seq2SeqTrainer(model, how, batch, _pairs(tokenizer, rest), _pairs(tokenizer, dev))
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.exists() else None)
    for part in model, tokenizer: part.save_pretrained(folder/"best")
    say(f"seed {seed}: trained in {time.time() - start:.0f} s")

# ---- The systems
# The tokens that the decoder scores are counted by a hook: a pass over ten hypotheses counts ten.
_BATCH = 50 # number of sets that are decoded together

def _system(name):
    "Parse kind, beams and nats of a system. Raise `NocError` if the name is invalid."
    known = r"(beam|bank|credit|grid|sample|one|any):(\d+)|(prices):(\d+):([\d.]+)|(published):\w+"
    found = re.fullmatch(known, name)
    require(found, f"--systems {name}", "beam:5, bank:5, grid:5, prices:5:1.0, sample:5, one:5, "
            "any:5 or published:bart")
    kind, *numbers = filter(None, found.groups())
    return kind, int(numbers[0]) if numbers else None, *map(float, numbers[1:])

@contextmanager
def _meter(model):
    "Yield a dict that at the end has the tokens scored, decoder calls, and seconds."
    asked, out = [], {}
    def count(module, args, answer): asked.append(answer[0].shape[:2].numel())
    hook = model.get_decoder().register_forward_hook(count)
    start, cpu = time.perf_counter(), time.process_time()
    yield out
    out |= dict(asked=sum(asked), calls=len(asked), seconds=time.perf_counter() - start,
                cpu_seconds=time.process_time() - cpu)
    hook.remove()

def _until_end(ids): return ids[:ids.index(2) + 1] if 2 in ids else ids

class _Speaker:
    "A trained model and its tokenizer, which generate and score sentences."
    def __init__(self, folder, cfg, peer=None):
        from transformers import AutoTokenizer, BartForConditionalGeneration
        self.folder, self.cfg, self.peer = folder, cfg, peer # a Python with the other library
        self.model = BartForConditionalGeneration.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def _text(self, ids): return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def _generate(self, sets, **how):
        "Generate a sentence for each set, as ids up to its end."
        ids = self.model.generate(**_read(self.tokenizer, [s.concepts for s in sets]),
                                  max_new_tokens=self.cfg.room, **how)
        return list(map(_until_end, ids[:,1:].tolist()))

    def _search(self, sets, kind, k, *price):
        "Search for the best sentence of each set, as ids."
        how = dict(num_beams=k, length_penalty=self.cfg.penalty, do_sample=False)
        if kind != "beam":
            how |= dict(custom_generate=grid_beam, each=[s.forms for s in sets],
                        processor=self.tokenizer, mode="bank" if price else kind)
        if price: how |= dict(prices=[[*price]*len(s.forms) for s in sets])
        return self._generate(sets, **how)

    def _sample(self, sets, budget):
        "Sample a sentence for each set, as ids: the first with all words, or that with the most."
        n, how = len(sets), dict(do_sample=True, num_beams=1, top_k=0, top_p=.9)
        best, most, spent, todo = [[]]*n, [-1]*n, [0]*n, range(n)
        def goes_on(i): return most[i] < len(sets[i].forms) and spent[i] < budget
        while todo:
            drawn = self._generate([sets[i] for i in todo], **how)
            for i, ids in zip(todo, drawn):
                said = _count(self._text(ids), sets[i])
                if said > most[i]: best[i], most[i] = ids, said
                spent[i] += len(ids)
            todo = list(filter(goes_on, todo))
        return best

    @torch.no_grad()
    def _log_prob(self, sets, rows):
        "Return the log-probabilities of sentences that are given as ids."
        labels = _padded(rows, -100)                                        # (b,t)
        start = torch.ones(len(rows), 1).long()
        before = torch.cat([start, labels[:,:-1].clamp(min=0)], 1)
        read = _read(self.tokenizer, [s.concepts for s in sets])
        scores = self.model(**read, decoder_input_ids=before).logits.log_softmax(-1) # (b,t,v)
        each = scores.gather(2, labels.clamp(min=0)[:,:,None])[:,:,0]
        return each.masked_fill(labels < 0, 0).sum(1).tolist()

# All of our systems use the same model: `_search` searches with the words as musts, with prices, or without them.
# `_sample` draws sentences for the sets that still lack a word, until a set's budget of tokens is spent. `_log_prob`
# scores sentences of any system in one pass.
# The other library runs in another Python, as in search.py. It decodes one set at a time, because all inputs of a batch
# must have the same words there. If one form is the beginning of another, `force_words_ids` does not accept both, so
# the longer one is left out.
_PEER = '''
import json, sys, time, torch, warnings
warnings.filterwarnings("ignore")
from transformers import BartForConditionalGeneration, logging
logging.set_verbosity_error()
how, *cases = map(json.loads, sys.stdin)
torch.set_num_threads(how.pop("threads"))
model, asked = BartForConditionalGeneration.from_pretrained(how.pop("model")).eval(), []
def count(module, args, out): asked.append(out[0].shape[:2].numel())
model.get_decoder().register_forward_hook(count)
start, cpu, rows = time.perf_counter(), time.process_time(), []
for case in cases:
    with torch.no_grad():
        ids = model.generate(torch.tensor([case["ids"]]), force_words_ids=case["words"], **how)
    rows.append(ids[0,1:].tolist())
print(json.dumps([rows, dict(asked=sum(asked), calls=len(asked),
    seconds=time.perf_counter() - start, cpu_seconds=time.process_time() - cpu)]))
'''

def _forced(tokenizer, kind, one):
    "Return `force_words_ids` for a set: one form of each concept, or all compatible forms."
    def spelled(form): return tokenizer(form)["input_ids"]
    def alone(forms): return spelled(next((f for f in forms if f in one.concepts), forms[0]))
    def together(forms):
        known = list(map(spelled, forms))
        def longer(ids): return any(ids != other == ids[:len(other)] for other in known)
        return [ids for ids in known if not longer(ids)]
    return list(map(alone if kind == "one" else together, one.forms))

def _ask_peer(speaker, sets, kind, k):
    "Generate with transformers 4.55.4; return ids and costs. Raise `NocError` if it fails."
    cfg, python, expected = speaker.cfg, speaker.peer, "--peer, a Python with transformers==4.55.4"
    how = dict(threads=torch.get_num_threads(), model=str(Path(speaker.folder).resolve()),
               num_beams=k, max_new_tokens=cfg.room, length_penalty=cfg.penalty)
    cases = [dict(ids=speaker.tokenizer(" ".join(one.concepts))["input_ids"],
                  words=_forced(speaker.tokenizer, kind, one)) for one in sets]
    call = dict(input="\n".join(map(json.dumps, [how, *cases])), text=True, capture_output=True)
    try: run = subprocess.run([f"{python}", "-c", _PEER], **call)
    except OSError as e: raise NocError(f"{python}: {e.strerror}; expected {expected}") from None
    last = (run.stderr.strip().splitlines() or ["no answer"])[-1]
    require(run.returncode == 0, f"{python}: {last}", expected)
    rows, meter = json.loads(run.stdout)
    return list(map(_until_end, rows)), meter

def _speak(speaker, name, sets, texts=None, budget=None):
    "Generate a system's sentences; return texts, lengths, log-probabilities and costs."
    (kind, *how), meter = _system(name), {}
    set_seed(0)
    if kind == "published": rows = [[*ids[:62], 2] for ids in speaker.tokenizer(texts)["input_ids"]]
    elif kind in ("one", "any"): rows, meter = _ask_peer(speaker, sets, kind, *how)
    else:
        with _meter(speaker.model) as meter:
            if kind == "sample": rows = speaker._sample(sets, budget)
            else: rows = speaker._search(sets, kind, *how)
    return dict(texts=texts or list(map(speaker._text, rows)), tokens=list(map(len, rows)),
                log_prob=speaker._log_prob(sets, rows), meter=meter)

def _joined(parts):
    "Join several results of `_speak` to one."
    def all_of(key): return [x for part in parts for x in part[key]]
    def total(key): return sum(part["meter"][key] for part in parts)
    lists = {key: all_of(key) for key in ("texts", "tokens", "log_prob")}
    return lists | dict(meter={key: total(key) for key in parts[0]["meter"]})

# ---- Scores
# CIDEr-D, BLEU-4 and SPICE are those of chapter 43, with document frequencies from the scored sets. Intervals come from
# 1,000 bootstrap samples of the sets. All systems use the same samples, so that differences have intervals, too.
def _scorer(sets, metrics, texts=()):
    "Build a scorer of the sets; SPICE, if it can run, parses all `texts` at once."
    refs = {i: s.references for i, s in enumerate(sets)}
    programs = java_programs(refs, metrics)
    for program in programs:
        if hasattr(program, "prepare"): program.prepare([dict(enumerate(own)) for own in texts])
    return CaptionScorer(refs, metrics, programs)

def _measures(found, sets, scorer):
    "Score a system: name -> (1001,) scores of all sets, then of every bootstrap sample."
    n, texts = len(sets), found["texts"]
    captions = scorer.numbers(dict(enumerate(texts)))
    said = np.array([*map(_count, texts, sets)])
    asked = np.array([len(s.forms) for s in sets])
    own = dict(words=[len(text.split()) for text in texts])
    own |= {name: np.array(found[name]) for name in ("log_prob", "tokens")}
    own |= dict(nats=own["log_prob"]/own["tokens"], sentences=100*(said == asked))
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1/n), 1000)
    weights = np.concatenate([np.ones((1, n)), drawn])
    out = {m: x for m, x in points(captions, weights).items() if m in scorer.metrics}
    out |= dict(concepts=100*(weights @ said)/(weights @ asked))
    return out | {name: weights @ x/n for name, x in own.items()}

def _with_interval(drawn): return [round(x, 4) for x in (float(drawn[0]), *interval(drawn))]

# ---- A run
# The systems run in turn, fifty sets each, so that other programs slow all of them. Sentences are saved in the run's
# folder, so that an interrupted run can resume, and a system that is added later can be compared with the others named
# in the command. A row has the scores of a system, its differences from the other systems, twenty sentences chosen at
# random, and the sentences for concepts none of whose forms is in the training text.
class _WordsRun:
    "A trained model, the sets to decode, and the folder of generated sentences."
    def __init__(self, o):
        cfg, data = override(_WordsConfig(), o.set), os.environ.get("NOC_COMMONGEN")
        require(data, "NOC_COMMONGEN: is not set", "CommonGen's folder")
        self.o, self.cfg, self.data = o, cfg, Path(data)
        rest, parts = _prepare(self.data, cfg.held)
        self.sets, folder = parts[o.part][:o.sets or None], Path(o.runs)/f"lm-{o.seed}"
        self.all = len(parts[o.part])
        _train_words(cfg, rest, _lines(self.data, "dev"), folder, o.seed)
        self.speaker, self.read = _Speaker(folder/"best", cfg, o.peer), _words_of(rest)
        self.keys = dict(part=o.part, sets=len(self.sets), penalty=cfg.penalty, seed=o.seed)
        self.folder = folder/f"{o.part}-{len(self.sets)}-{cfg.penalty:g}"

    def _part(self, name, n):
        "Return a system's sentences for the n-th fifty sets; generate them unless they are saved."
        file = self.folder/f"{name.replace(':', '-')}-{n}.json"
        if file.exists(): return read_json(file)
        part, (kind, k, *_), given = slice(n*_BATCH, (n + 1)*_BATCH), _system(name), {}
        sets = self.sets[part]
        if kind == "published": given = dict(texts=self._published(name)[part])
        if kind == "sample":
            given = dict(budget=self._part(f"bank:{k}", n)["meter"]["asked"]/len(sets))
        write_json(file, _speak(self.speaker, name, sets, **given))
        return read_json(file)

    def _published(self, name):
        file = self.data/f"systems/{name.partition(':')[2]}.txt"
        require(file.exists(), f"{file}: no such file", "a sentence a line")
        texts = file.read_text().splitlines()
        require(len(texts) == self.all, f"{file}: {len(texts)} lines", f"{self.all}")
        return texts

    def _said(self, names):
        "Return the sentences of several systems, which run in turn."
        parts = range(-(-len(self.sets)//_BATCH))
        def turn(n): return [self._part(name, n) for name in names]
        found = zip(*map(turn, progress(parts, "systems")))
        return dict(zip(names, map(_joined, found)))

    def _row(self, name, texts, meter, drawn):
        "Build a system's result row; `drawn` has the scores of all systems."
        def told(measures): return {m: _with_interval(x) for m, x in measures.items()}
        def less(other): return {m: x - other[m] for m, x in drawn[name].items()}
        beside = {other: told(less(x)) for other, x in drawn.items() if other != name}
        chosen, ours = random.Random(0).sample(range(len(texts)), min(20, len(texts))), "asked" in meter
        new = [(s.concepts, text, forms) for s, text in zip(self.sets, texts) for forms in s.forms
               if self.read.isdisjoint(forms)]
        said = sum(_says(text, forms) for _, text, forms in new)
        return new_row(
            "bench", "words", data="commongen", **self.keys, system=name, **meter,
            metrics=told(drawn[name]), beside=beside, config=asdict(self.cfg),
            examples=[(self.sets[i].concepts, texts[i]) for i in chosen if ours],
            new=dict(asked=len(new), said=said, examples=new[:10*ours]),
            threads=torch.get_num_threads(), command=self.o.command)

def bench_words(
    out:str="results/words.jsonl", # rows are appended here
    runs:str="_runs/words", # folder for models and sentences
    peer:str=None,          # Python of an environment with transformers==4.55.4
    part:Literal["held", "dev", "test"]="held", # sets to decode and score; never make choices on test
    sets:int=200,           # number of sets, from the first; 0: all
    seed:int=0,             # seed of the model
    systems:str="beam:5,bank:5,prices:5:1.0,sample:5", # systems, separated by commas
    metrics:str="C,B4",     # scores of the sentences; S is SPICE
    set:list=None,          # changes to model, training and decoding, as key=value
):
    "Generate sentences with required words by several systems, and append rows."
    o = SimpleNamespace(**locals())
    one_thread()
    names, metrics = o.systems.split(","), o.metrics.split(",")
    for name in names: _system(name)
    o.command = (f"benchmarks/words.py --part {o.part} --sets {o.sets} --seed {o.seed} "
                 f"--systems {o.systems} --metrics {o.metrics}")
    if o.peer: o.command += " --peer PYTHON"
    if o.set: o.command = " ".join([o.command, "--set", *o.set])
    run = _WordsRun(o)
    before = read_rows(o.out, **run.keys) if Path(o.out).exists() else []
    found = run._said(names)
    with _scorer(run.sets, metrics, [x["texts"] for x in found.values()]) as scorer:
        drawn = {name: _measures(x, run.sets, scorer) for name, x in found.items()}
    for name in names:
        if name in {row["system"] for row in before}: continue
        row = run._row(name, found[name]["texts"], found[name]["meter"], drawn)
        append_row(o.out, row)
        say(f"{name}: " + ", ".join(f"{m} {x[0]:.2f}" for m, x in row["metrics"].items()))

if __name__ == "__main__": script(bench_words)