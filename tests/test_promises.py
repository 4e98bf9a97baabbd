"""Test every cell of the card's table of promises, on random tokenizers, models and words.

The models' rows do not depend on each other. PROMISE_CASES sets the number of cases for each mode."""
import math, os, random, re, warnings
from pathlib import Path
import pytest, torch
from noc_nb.core import NocError
from noc_nb.words.generate import grid_beam
from test_words import KINDS, WORDS, drawn, has, model_of

CARD = Path(__file__).parent.parent/"hub/README.md"
CASES = int(os.environ.get("PROMISE_CASES", 36))
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

class Case:
    "A random tokenizer, model and words with prices, and the answers of a mode to them."
    def __init__(self, seed, mode):
        self.rng = rng = random.Random(f"promises {seed}")
        kind, words = [*KINDS][seed % len(KINDS)], rng.sample(WORDS, 8)
        self.tok, self.known = drawn(kind, rng, words), words
        self.model = model_of(rng, self.tok, words)
        self.words = rng.sample(words, rng.choice((1, 1, 2, 3)))
        self.prices = [rng.choice((1., 5., 20., -3., -30., math.inf)) for _ in self.words]
        self.musts = [w for w, u in zip(self.words, self.prices) if u == math.inf]
        self.mode, self.k = mode, rng.choice((2, 3, 5))
        self.settings = dict(
            num_beams=self.k, num_return_sequences=self.k, length_penalty=rng.choice((0., 1.)), do_sample=False,
            max_new_tokens=rng.choice((3, 6))*(3 if kind == "bytes" else 1), return_dict_in_generate=True)
        self.start = torch.tensor([rng.choices(range(4, len(self.tok)), k=2) for _ in range(3)])

    def asked(self, start=None, **words):
        "Return the result of the search, for the first start or others."
        start = self.start[:1] if start is None else start
        return self.model.generate(start, attention_mask=torch.ones_like(start), custom_generate=grid_beam,
                                   processor=self.tok, mode=self.mode, **self.settings, **words)

    def beams(self):
        "Return the result of the library's beam search."
        return self.model.generate(self.start[:1], attention_mask=torch.ones(1, 2, dtype=torch.long),
                                   early_stopping="never", output_scores=True, **self.settings)

    def texts(self, out): return self.tok.batch_decode(out.sequences[:,2:], skip_special_tokens=True)

    def best_value(self, out, musts):
        "Return the highest score plus prices among texts with some words; minus infinity without such a text."
        def worth(text): return sum(u for w, u in zip(self.words, self.prices) if u < math.inf and has(text, w))
        pairs = zip(self.texts(out), out.sequences_scores.tolist())
        return max((score + worth(t) for t, score in pairs if all(has(t, w) for w in musts)), default=-math.inf)

    def objective(self): return self.asked(words=self.words, prices=self.prices).objective[0].item()

# Each function returns whether a promise is kept in a case.

def musts_or_warning(case):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        text = case.texts(case.asked(words=case.words))[0]
    lines, whole = " ".join(str(w.message) for w in seen), all(has(text, w) for w in case.words)
    missing = "words were written within" in lines
    return not missing if whole else missing or "cannot spell" in lines

def nothing_avoided(case):
    avoid, out = case.words[1:], case.asked(words=case.words[:1], avoid=case.words[1:] or None)
    return not any(has(text, w) for text in case.texts(out) for w in avoid)

def beams_without_words(case):
    "Compare scores, and the best text unless it is tied."
    out, own = case.asked(), case.beams()
    first, second = own.sequences_scores[:2]
    same = out.sequences[0].tolist() == own.sequences[0,:out.sequences.shape[1]].tolist()
    return torch.allclose(out.sequences_scores, own.sequences_scores, atol=1e-4) and (same or first - second < 1e-4)

def nothing_for_zero(case):
    "Compare musts alone with musts beside words of price 0, some of which are parts of a must."
    musts = case.musts or [next((w for w in case.known if " " in w), case.known[0])]
    zero = [w for w in [*case.words, *" ".join(musts).split()] if w not in musts]
    prices = [math.inf]*len(musts) + [0.]*len(zero)
    return case.asked(words=musts + zero, prices=prices).texts == case.asked(words=musts).texts

def musts_alone_at_most(case):
    best, out = case.objective(), case.asked(words=case.musts) if case.musts else case.beams()
    return best >= case.best_value(out, case.musts) - 1e-3

def wishes_as_musts_at_most(case):
    wished, unwished = ([w for w, u in zip(case.words, case.prices) if u*sign > 0] for sign in (1, -1))
    best = case.objective()
    return best >= case.best_value(case.asked(words=wished or None, avoid=unwished or None), wished) - 1e-3

def its_own(case):
    "Compare an input with words of every kind, one without words, and one with a must, together and alone."
    def line(word): return case.rng.choice((word, f"{word}={case.rng.choice((4, -4, 0))}", f"-{word}"))
    lines = [", ".join(map(line, case.words)), "", case.words[0]]
    how = dict(ordered=case.rng.random() < .3)
    def answers(out):
        whole = [*zip(out.texts, out.sequences_scores.tolist(), out.objective.tolist(), out.spans)]
        return [whole[i:i+case.k] for i in range(0, len(whole), case.k)]
    alone = sum([answers(case.asked(case.start[i:i+1], each=[lines[i]], **how)) for i in range(3)], [])
    return answers(case.asked(case.start, each=lines, **how)) == alone

def as_many_as_beams(case):
    rows = []
    hook = case.model.register_forward_hook(lambda *answer: rows.append(len(answer[2].logits)))
    case.asked(words=case.words)
    hook.remove()
    return max(rows) <= case.k

PROMISES = {
    "The best text mentions its musts, or a warning says what is missing.": musts_or_warning,
    "No text contains a word to avoid.": nothing_avoided,
    'Without words, the texts and scores are those of beam search with `early_stopping="never"`.': beams_without_words,
    "A price of 0 does not change a text.": nothing_for_zero,
    "The best `objective` is at least that of every text of the search with the musts alone; without musts, this is "
    "plain beam search.": musts_alone_at_most,
    "The best `objective` is at least that of every text of the search in which words with prices above 0 are musts "
    "and words with prices below 0 are avoided.": wishes_as_musts_at_most,
    "The answer to an input does not depend on the other inputs of its batch.": its_own,
    "With musts, the model reads at most `num_beams` texts for each new token.": as_many_as_beams}

def table():
    "Return mode -> {promise: True or False}, as the card has it."
    rows = re.findall(r"^\| (.*) \|$", CARD.read_text().partition("## Promises")[2].partition("\n## ")[0], re.M)
    head, *lines = [row.split(" | ") for row in rows]
    return {mode.strip("`"): {line[0]: line[n] == "yes" for line in lines} for n, mode in enumerate(head) if n}

def test_the_table_is_complete(): assert {*map(tuple, table().values())} == {tuple(PROMISES)}

@pytest.mark.parametrize("mode", table())
def test_every_cell_of_the_table_is_true(mode):
    "A promise that the table gives is kept in all cases, and one that it does not give is broken in some."
    kept = {promise: [] for promise in PROMISES}
    for seed in range(CASES):
        for promise, holds in PROMISES.items():
            try: kept[promise].append(holds(Case(seed, mode)) or f"case {seed}")
            except NocError: pass                          # words that do not fit, or that cannot be spelled
    for promise, given in table()[mode].items():
        broken = [case for case in kept[promise] if case is not True]
        assert len(kept[promise]) > CASES/3 and bool(broken) != given, (promise, broken)
