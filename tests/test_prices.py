"Test constraints with a price by brute force over all sentences and all subsets of the words that they mention."
import itertools, math, random
from fractions import Fraction
import pytest, torch
from noc_nb.fast.search import beam_search, grid_beam_search
from noc_nb.words.generate import grid_beam
from tiny_models import build, tokenizer

EOS = 0

def chain(rng):
    "Return a random table of log-probabilities of the next of v words after each word; the last row is the start."
    v = rng.choice((3, 4, 5))
    table = torch.randn(v + 1, v, generator=torch.Generator().manual_seed(rng.randrange(10**6)))
    if rng.random() < .4: table[:, rng.randrange(1, v)] -= 6.    # an improbable word
    return table.double().log_softmax(-1)

def groups_of(rng, v, n):
    "Return n groups of one or two alternatives, each of one or two words."
    def alternative(): return tuple(rng.randrange(1, v) for _ in range(rng.choice((1, 1, 2))))
    return [[alternative() for _ in range(rng.choice((1, 1, 2)))] for _ in range(n)]

def some_prices(rng, n):
    return [rng.choice((math.inf, 0., rng.uniform(-4, 8), rng.uniform(0, 6))) for _ in range(n)]

def contains(sentence, alternative):
    size = len(alternative)
    return any(sentence[i:i+size] == alternative for i in range(len(sentence) - size + 1))

def log_prob(table, sentence):
    words = (len(table) - 1, *sentence, EOS)
    return sum(table[a, b].item() for a, b in zip(words, words[1:]))

def value(table, sentence, groups, prices, penalty=0., absorb=True):
    "Return a sentence's score plus the prices of what it mentions; None if it lacks a must."
    mentioned = [any(contains(sentence, alternative) for alternative in group) for group in groups]
    if any(u == math.inf and not m for u, m in zip(prices, mentioned)): return None
    worth = [u for u, m in zip(prices, mentioned) if m and u < math.inf]
    if not absorb: worth = [u for u in worth if u > 0]           # groups with negative prices are never forced
    return log_prob(table, sentence)/(len(sentence) + 1)**penalty + sum(worth)

def best_value(table, groups, prices, max_len, **kw):
    "Return the best value of all sentences; None if no sentence is allowed."
    words = range(1, len(table) - 1)
    sentences = itertools.chain.from_iterable(itertools.product(words, repeat=n) for n in range(max_len))
    values = [value(table, s, groups, prices, **kw) for s in sentences]
    return max((x for x in values if x is not None), default=None)

def search(table, groups, prices, max_len, k=700, **kw):
    step = lambda tokens, state: (table[tokens], state)
    return grid_beam_search(step, torch.zeros(1, 1), [groups], prices=[prices], bos=len(table) - 1, eos=EOS, k=k,
                            max_len=max_len, **kw)

def agree(found, best, table, groups, prices, **kw):
    "Check that a search found a sentence of the best value, and reports its score and objective."
    if best is None:
        assert found.reason[0] and not found.ended[0,0]
        return
    sentence = tuple(found.tokens[0,0].tolist())
    sentence = sentence[:sentence.index(EOS)]
    assert value(table, sentence, groups, prices, **kw) == pytest.approx(best, abs=1e-4)
    assert found.objective[0,0].item() == pytest.approx(best, abs=1e-4)
    assert found.scores[0,0].item() == pytest.approx(log_prob(table, sentence), abs=1e-4)

@pytest.mark.parametrize("mode", ["grid", "bank", "cbs", "penalty", "forced"])
def test_the_search_equals_the_best_of_all_sentences_and_subsets(mode):
    "Forced: without `absorb` only forced groups count, and a group with a negative price is never forced."
    own = dict(penalty=dict(length_penalty=.7), forced=dict(absorb=False))
    asked = own.get(mode, dict(mode=mode))
    how = dict(penalty=dict(penalty=.7), forced=dict(absorb=False)).get(mode, {})
    for seed in range(150):
        rng = random.Random(f"{mode}{seed}")
        table, n, max_len = chain(rng), rng.choice((1, 2, 3)), rng.choice((3, 4, 5))
        groups = groups_of(rng, table.shape[1], n)
        if mode == "forced": groups = [[(w,)] for w in rng.sample(range(1, table.shape[1]), rng.choice((1, 2)))]
        prices = some_prices(rng, len(groups))
        best = best_value(table, groups, prices, max_len, **how)
        agree(search(table, groups, prices, max_len, **asked), best, table, groups, prices, **how)

@pytest.mark.parametrize("mode", ["grid", "bank"])
def test_infinite_prices_are_musts(mode):
    "With infinite prices the search equals the search with musts to the last bit, also with small beams."
    for seed in range(40):
        rng = random.Random(seed)
        table = chain(rng)
        step = lambda tokens, state: (table[tokens], state)
        constraints = [groups_of(rng, table.shape[1], n) for n in (0, 1, 2, 3)]
        prices = [[math.inf]*len(groups) for groups in constraints]
        kw = dict(bos=len(table) - 1, eos=EOS, k=rng.choice((1, 2, 3)), max_len=6, mode=mode,
                  absorb=rng.random() < .5)
        hard = grid_beam_search(step, torch.zeros(4, 1), constraints, **kw)
        priced = grid_beam_search(step, torch.zeros(4, 1), constraints, prices=prices, **kw)
        for name in "tokens", "scores", "ended", "satisfied", "spans", "objective":
            assert torch.equal(getattr(hard, name), getattr(priced, name)), name
        assert hard.reason == priced.reason

def test_at_least_counts_musts_only():
    "`at_least` counts musts only: one of two is enough, and a group of price 0 does not count."
    table = torch.full((5, 4), -3.).double()
    table[:, EOS] = -.1
    found = search(table, [[(1,)], [(2,)], [(3,)]], [math.inf, math.inf, 0.], 5, at_least=1)
    assert found.satisfied[0,0] == 1 and found.ended[0,0]
    assert set(found.tokens[0,0].tolist()) - {EOS} <= {1, 2}

@pytest.mark.parametrize("mode", ["grid", "bank", "cbs"])
def test_the_objective_is_never_worse_than_without_prices(mode):
    "Even with small beams, the objective is at least that of the best caption that the search finds without prices."
    better = 0
    for seed in range(300):
        rng = random.Random(f"{mode}{seed}")
        table = chain(rng)
        penalty, k = rng.choice((0., 0., 1.)), rng.choice((1, 1, 2, 3, 6))
        groups = groups_of(rng, table.shape[1], rng.choice((1, 2, 3)))
        prices = [rng.choice((0., -5., rng.uniform(-4, 4), rng.uniform(0, 3))) for _ in groups]
        if seed % 3 == 0: prices[0] = math.inf                              # and a must
        step = lambda tokens, state: (table[tokens], state)
        kw = dict(bos=len(table) - 1, eos=EOS, k=k, max_len=6, length_penalty=penalty)
        musts = [group for group, price in zip(groups, prices) if price == math.inf]
        if musts: plain = grid_beam_search(step, torch.zeros(1, 1), [musts], mode=mode, **kw)
        else: plain = beam_search(step, torch.zeros(1, 1), **kw)
        found = grid_beam_search(step, torch.zeros(1, 1), [groups], prices=[prices], mode=mode, **kw)
        if plain.reason[0]: continue
        sentences = [tuple(x[:x.index(EOS)]) for x, e in zip(plain.tokens[0].tolist(), plain.ended[0]) if e]
        best = max(value(table, s, groups, prices, penalty) for s in sentences)
        own = tuple(found.tokens[0,0].tolist())
        assert value(table, own[:own.index(EOS)], groups, prices, penalty) == pytest.approx(found.objective[0,0].item())
        assert found.objective[0,0] >= best - 1e-9
        better += bool(found.objective[0,0] > best + 1e-6)
    assert better > 30                                                      # prices often improve the result

def test_large_prices_keep_their_order():
    "With prices of ten thousand nats the search finds the best of all sentences, computed in exact fractions."
    for seed in range(1000):
        rng = random.Random(seed)
        table = chain(rng).float()
        groups = groups_of(rng, table.shape[1], rng.choice((1, 2, 3)))
        prices = [rng.choice((1e4, -1e4, 1., -1., 0.)) for _ in groups]
        exact = {}
        for n in range(3):
            for s in itertools.product(range(1, table.shape[1]), repeat=n):
                words = (len(table) - 1, *s, EOS)
                nats = sum(Fraction(table[a, b].item()) for a, b in zip(words, words[1:]))
                said = [any(contains(s, alternative) for alternative in group) for group in groups]
                exact[s] = nats + sum(Fraction(u) for u, m in zip(prices, said) if m)
        found = search(table, groups, prices, 3, k=60, mode=rng.choice(("grid", "bank", "cbs")))
        s = tuple(found.tokens[0,0].tolist())
        assert exact[s[:s.index(EOS)]] == max(exact.values())
        assert abs(Fraction(found.objective[0,0].item()) - max(exact.values())) < Fraction(1, 10**5) # 32-bit scores

# Prices of words, in `generate`

def test_a_text_ends_after_the_word_that_has_a_price(one_thread):
    "Texts of a nearly uniform model, which rarely ends by itself, end after the word that has a price."
    model, inputs = build("BART")
    for seed in range(4):
        torch.manual_seed(seed)
        for weights in model.parameters(): weights.data.normal_(0, .02)
        call = dict(do_sample=False, max_new_tokens=8, custom_generate=grid_beam, num_beams=4, length_penalty=0.,
                    processor=tokenizer(), return_dict_in_generate=True)
        out = model.generate(**inputs, words=["zebra"], prices=[20.], **call)
        assert (out.objective > 5).all() and all(0 in spans for spans in out.spans)

@pytest.mark.parametrize("name", ["GPT-2", "BART"])
def test_reads_count_the_texts_that_the_model_read(name, one_thread):
    "`reads` adds up to the texts that the model read, and its plain part to those of plain beams alone."
    model, inputs = build(name)
    def reads(**asked):
        rows = []
        hook = model.register_forward_hook(lambda *answer: rows.append(len(answer[2].logits)))
        out = model.generate(**inputs, do_sample=False, max_new_tokens=8, custom_generate=grid_beam, num_beams=4,
                             processor=tokenizer(), return_dict_in_generate=True, **asked)
        hook.remove()
        assert sum(sum(counts.values()) for counts in out.reads) == len(out.reads) + sum(rows[1:]) # a prompt: one row
        return out.reads
    plain = reads()
    priced = reads(each=["zebra=4, cat=-3", ""])
    assert [*priced[0]] == ["plain", "prices", "musts"] and priced[0]["plain"] == plain[0]["plain"]
    assert priced[1] == plain[1] and [*reads(words=["zebra"])[0]] == ["musts"]
