"""Test the properties of the searches on random models: hypothesis draws model, constraints and settings.

The models are trees whose next-word probabilities depend on all earlier words, in 64 bits and without ties. An
example is a batch of ten images, each with its own tree and constraints. With fifty examples there are 500 cases per
property."""
import math, subprocess, sys
from functools import partial
from unittest.mock import patch
import pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st
from noc_nb.beam import plain_beam
from noc_nb.fast.search import beam_search, grid_beam_search
from noc_nb.fast.trees import captions_of, every_caption, prefix_scores, same_captions, tree
from noc_nb.grid import algorithm_1, plain_grid

BOS, EOS = 1, 0
B = 10
fifty = settings(max_examples=50, deadline=None, database=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

pytestmark = pytest.mark.usefixtures("one_thread")

constrained_beam_search = partial(grid_beam_search, mode="cbs")

def captions(out, i=0): return captions_of(out.tokens[i], out.scores[i], out.ended[i])

def word(v): return st.integers(1, v - 1)
def alternative(v): return st.lists(word(v), min_size=1, max_size=3).map(tuple)
def groups(v, most=3): return st.lists(st.lists(alternative(v), min_size=1, max_size=2), max_size=most)

def batch(v, most=3): return st.lists(groups(v, most), min_size=B, max_size=B)

@st.composite
def case(draw, most=3):
    "Draw a model, the constraints of a batch, and the settings of a search."
    v = draw(st.sampled_from([6, 8, 40]))
    images = draw(batch(min(v, 7), most))
    how = dict(k=draw(st.integers(1, 4)), max_len=draw(st.integers(1, 7)), absorb=draw(st.booleans()),
               no_repeat=draw(st.booleans()), length_penalty=draw(st.sampled_from([0., 0., .7])),
               at_least=draw(st.sampled_from([None, None, 1, 2])),
               mode=draw(st.sampled_from(["grid", "bank", "credit"])))
    return tree(v, draw(st.integers(0, 999))), images, how

def search(model, images, of=None, **how):
    "Search captions for images; `of`: numbers of the images' trees."
    step, fresh = model
    state = fresh(*(range(len(images)) if of is None else of))
    return grid_beam_search(step, state, images, bos=BOS, eos=EOS, pad=-1, **how)

@pytest.mark.slow
@fifty
@given(case())
def test_spans_give_the_places_of_words(given_case):
    "Spans give the places of words, constraints are satisfied, captions are unique, and a failure has a reason."
    model, images, how = given_case
    out = search(model, images, **how)
    for i, wanted in enumerate(images):
        need = len(wanted) if how["at_least"] is None else min(how["at_least"], len(wanted))
        found = captions(out, i)
        assert (out.reason[i] is None) == bool(found) and (out.spans[i, :, len(wanted):] == -1).all()
        assert len({c for c, _ in found}) == len(found) and all(len(c) <= how["max_len"] for c, _ in found)
        ranks = [s / len(c)**how["length_penalty"] for c, s in found]
        assert all(a >= b - 1e-9 for a, b in zip(ranks, ranks[1:]))
        for j, tokens in enumerate(out.tokens[i].tolist()):
            spans = [tuple(s) for s in out.spans[i, j, :len(wanted)].tolist()]
            there = [g for g, (a, _) in enumerate(spans) if a >= 0]
            assert len(there) == out.satisfied[i, j]
            assert all(tuple(tokens[slice(*spans[g])]) in wanted[g] for g in there)
            if out.ended[i, j]: assert len(there) >= need and tokens.count(EOS) == 1

def all_of(out, i, n=None):
    "Return all results of an image with `n` constraints."
    rows = zip(out.tokens[i].tolist(), out.scores[i].tolist(), out.objective[i].tolist(), out.spans[i,:,:n].tolist(),
               out.satisfied[i].tolist())
    return [([t for t in tokens if t >= 0], *rest) for tokens, *rest in rows], out.reason[i]

def coarse(model, dtype, ties=True):
    "Return the model with scores of a type, rounded if there should be many ties."
    def step(tokens, state):
        scores, state = model[0](tokens, state)
        return (scores.round() if ties else scores).to(dtype), state
    return step, model[1]

def wishes(rng, images):
    "Draw prices of both signs and avoided words for a batch; some images only have musts."
    kinds = (math.inf,), (0., 1., 2.5, -1.), (math.inf, math.inf, 3., -2.)
    def phrase(): return tuple(rng.choices((3, 4, 5), k=rng.choice((1, 2))))
    prices = [rng.choices(rng.choice(kinds), k=len(wanted)) for wanted in images]
    return prices, [[phrase() for _ in range(rng.choice((0, 0, 1, 2)))] for _ in images]

@settings(fifty, max_examples=100)
@given(case(), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
       st.sampled_from(["grid", "bank", "credit", "cbs"]), st.booleans(), st.booleans(),
       st.randoms(use_true_random=False))
def test_the_result_of_an_image_does_not_depend_on_its_batch(given_case, dtype, mode, ties, ordered, rng):
    """In every mode an image has the same result to the last bit alone, in a batch and in another order, with musts,
    prices, avoided and ordered words mixed over the batch, also with many ties."""
    model, images, how = given_case
    step, fresh = coarse(model, dtype, ties)
    how = how | dict(mode=mode, ordered=ordered, forbidden=[2], bos=BOS, eos=EOS, pad=-1)
    if ordered: del how["at_least"]
    lists = images, *wishes(rng, images)
    def find(part):
        wanted, prices, avoid = ([x[i] for i in part] for x in lists)
        return grid_beam_search(step, fresh(*part), wanted, prices=prices, avoid=avoid, **how)
    out = find(range(B))
    for part in (rng.sample(range(B), B), rng.sample(range(B), 3), *([i] for i in range(B))):
        other = find(part)
        for j, i in enumerate(part): assert all_of(other, j, len(images[i])) == all_of(out, i, len(images[i]))

# True on these examples, but not always: an ended caption may lose its place to open hypotheses after it has pruned
# others. The next test pins a case of CBS in which the second caption changes.
@pytest.mark.slow
@fifty
@given(case(), st.integers(6, 12))
def test_pruned_hypotheses_are_not_missed(given_case, max_len):
    "Pruning hypotheses that finished captions outscore changes no result of the grid, and needs no more model calls."
    (step, fresh), images, how = given_case
    how, asked = {k: x for k, x in how.items() if k not in ("mode", "absorb")} | dict(max_len=max_len, pad=-1), []
    def counting(tokens, state):
        asked[-1] += len(tokens)
        return step(tokens, state)
    def both(find, **kw):
        asked.append(0)
        return find(counting, fresh(*range(B)), images, bos=BOS, eos=EOS, **how, **kw)
    for find, kw in (constrained_beam_search, {}), (grid_beam_search, dict(absorb=given_case[2]["absorb"])):
        out = both(find, **kw)
        with patch("noc_nb.fast.search._outscored", lambda _, cells: cells.score.isnan()): true = both(find, **kw)
        assert asked[-2] <= asked[-1]
        for i in range(B): assert all_of(out, i) == all_of(true, i)

@pytest.mark.xfail(reason="an ended caption that prunes others may be lost later: 1 of 1,000 such trees", strict=True)
def test_a_caption_that_prunes_others_is_not_lost():
    step, fresh = tree(8, 132)
    how = dict(k=2, max_len=9, at_least=2, pad=-1, bos=BOS, eos=EOS, mode="cbs")
    def find(): return grid_beam_search(step, fresh(7), [[[(1,)], [(4, 6)], [(1, 6, 5)]]], **how).scores[0].tolist()
    found = find()
    with patch("noc_nb.fast.search._outscored", lambda _, cells: cells.score.isnan()): assert found == find()

@fifty
@given(case(most=5), st.integers(0, 2), st.booleans())
def test_musts_that_fit_are_mentioned(given_case, spare, ordered):
    "Musts are mentioned with any number of beams, even if they just fit into the maximum length."
    model, images, how = given_case
    how |= dict(at_least=None, no_repeat=False, ordered=ordered)
    for i, wanted in enumerate(images):
        how["max_len"] = sum(min(map(len, group)) for group in wanted) + 1 + spare
        assert search(model, [wanted], of=[i], **how).reason == [None]

@fifty
@given(case(), st.randoms(use_true_random=False))
def test_order_of_constraints_is_irrelevant(given_case, rng):
    model, images, how = given_case
    order = [rng.sample(range(len(wanted)), len(wanted)) for wanted in images]
    mixed = [[rng.sample(wanted[g], len(wanted[g])) for g in o] for wanted, o in zip(images, order)]
    out, other = search(model, images, **how), search(model, mixed, **how)
    for i, o in enumerate(order):
        same_captions(captions(other, i), captions(out, i))
        def places(found, groups):                 # equal groups may be exchanged
            return sorted((sorted(group), found.spans[i, 0, g].tolist()) for g, group in enumerate(groups))
        assert places(other, mixed[i]) == places(out, images[i])

def scores_of(model, image):
    step, fresh = model
    return prefix_scores(step, fresh(image), BOS)

@settings(fifty, max_examples=100)
@given(st.integers(0, 999), st.sampled_from([5, 8, 30, 90]), st.integers(1, 4), st.integers(2, 6), st.booleans(),
       st.lists(st.lists(st.integers(1, 4), unique=True, max_size=3), min_size=B, max_size=B), st.booleans())
def test_the_grid_search_equals_algorithm_1(seed, v, k, T, absorb, wanted, ties):
    "With many ties, too, the search equals Algorithm 1: the lower last token comes first, then the better parent."
    model = coarse(tree(v, seed), torch.float64, ties)
    out = search(model, [[[(w,)] for w in ws] for ws in wanted], k=k, max_len=T, absorb=absorb)
    beam = beam_search(model[0], model[1](*range(B)), bos=BOS, eos=EOS, k=k, max_len=T)
    for i, ws in enumerate(wanted):
        true = algorithm_1(scores_of(model, i), ws, k, T, EOS, absorb)[0]
        same_captions(captions(out, i), true)
        if not ws: same_captions(captions(beam, i), true)

def twins(fast, plain):
    "Check all that both searches return. Only the fast one returns hypotheses that have not ended; they have a reason."
    assert torch.equal(fast.ended, plain.ended)
    assert torch.equal(fast.satisfied*fast.ended, plain.satisfied)
    for i, reason in enumerate(fast.reason):
        same_captions(captions(fast, i), captions(plain, i))
        assert (reason is None) == bool(plain.ended[i].any())
    assert (plain.scores[~plain.ended] == -math.inf).all() and (plain.tokens[~plain.ended] == -1).all()

@settings(fifty, max_examples=100)
@given(st.integers(0, 999), st.booleans(), st.sampled_from([5, 8, 90]), st.integers(1, 4), st.integers(1, 6),
       st.lists(st.lists(st.integers(2, 4), unique=True, max_size=3), min_size=B, max_size=B))
def test_the_fast_search_equals_the_plain_one(seed, ties, v, k, max_len, wanted):
    "On 1,000 images, `plain_beam` and `plain_grid` return the same as the fast search, also where nothing can end."
    step, fresh = tree(v, seed, ties=ties)
    start, masks = torch.full((B,), BOS), torch.zeros(B, v, dtype=torch.bool)
    for mask, ws in zip(masks, wanted): mask[ws] = True
    how = dict(k=k, max_len=max_len)
    grid = search((step, fresh), [[[(w,)] for w in ws] for ws in wanted], absorb=False, **how)
    beam = beam_search(step, fresh(*range(B)), bos=BOS, eos=EOS, **how)
    twins(grid, plain_grid(step, fresh(*range(B)), start, masks, EOS, **how))
    twins(beam, plain_beam(step, fresh(*range(B)), start, EOS, **how))

def literal(logp, groups, v, k, T):
    """Search the grid with alternatives and phrases, hypothesis by hypothesis, exactly as chapter 26 describes it. A
    hypothesis is (score, tokens, finished groups, current phrase as group, alternative and number of tokens)."""
    groups = sorted(sorted({*group}) for group in groups)   # the order for equal scores
    def least(left): return sum(min(map(len, groups[g])) for g in left)
    def late(h, t):                                # True if too few tokens are left for the musts and the end
        score, tokens, done, phrase = h
        takes = least({*range(len(groups))} - done - ({phrase[0]} if phrase else set()))
        if phrase: takes += len(groups[phrase[0]][phrase[1]]) - phrase[2]
        return tokens[-1] != EOS and takes + 1 > T - t
    def follow(h):
        score, tokens, done, phrase = h
        if tokens and tokens[-1] == EOS: return [h]
        after = logp(list(tokens))
        def write(w, done=done, phrase=None): return score + after[w], (*tokens, w), done, phrase
        def force(g, a, n):
            alternative = groups[g][a]
            whole = n + 1 == len(alternative)
            return write(alternative[n], done | {g} if whole else done, None if whole else (g, a, n + 1))
        if phrase: return [force(*phrase)]
        free = [write(w) for w in range(v) if w != EOS or len(done) == len(groups)]
        return free + [force(g, a, 0) for g in range(len(groups)) if g not in done for a in range(len(groups[g]))]
    hypotheses = [(0., (), frozenset(), None)]     # ordered by cell
    for t in range(1, T + 1):
        pool = dict.fromkeys(x for h in hypotheses for x in follow(h) if x[0] > -math.inf)
        pool = sorted(pool, key=lambda h: (late(h, t), -h[0], h[1][-1]))
        if t == T and any(h[1][-1] == EOS for h in pool): pool = [h for h in pool if h[1][-1] == EOS]
        cells = {}
        for h in pool: cells.setdefault((len(h[2]), h[3][2] if h[3] else 0), []).append(h)
        best = [h for _, cell in sorted(cells.items()) for h in cell[:k]]
        row = min(len(groups) - (T - t), max((len(h[2]) for h in best), default=0))
        hypotheses = [h for h in best if len(h[2]) >= row]
    ended = sorted({h[:2] for h in hypotheses if h[1][-1] == EOS}, reverse=True)
    return [(tokens, score) for score, tokens in ended[:k]]

@settings(fifty, max_examples=100)
@given(st.integers(0, 999), st.sampled_from([6, 9]), st.integers(1, 4), st.integers(1, 7), batch(5))
def test_phrases_and_alternatives_equal_a_literal_grid(seed, v, k, T, images):
    "On 1,000 images, with phrases and alternatives, the search equals the literal grid; some musts do not fit."
    model = tree(v, seed)
    out = search(model, images, k=k, max_len=T, absorb=False)
    for i, groups in enumerate(images):
        same_captions(captions(out, i), literal(scores_of(model, i), groups, v, k, T))

def has(body, wanted, need):
    "Return True if a caption contains an alternative of at least `need` groups."
    def holds(group): return any(body[i:i+len(a)] == a for a in group for i in range(len(body)))
    return sum(map(holds, wanted)) >= need

@settings(fifty, max_examples=60)
@given(st.integers(0, 99), batch(4), st.sampled_from([None, 0, 1, 2]), st.booleans(),
       st.sampled_from(["grid", "bank", "credit", "cbs"]))
def test_a_search_with_a_large_beam_is_exhaustive(seed, images, at_least, once, mode):
    """With a beam large enough for all hypotheses, every mode finds all captions, with phrases and alternatives,
    and with `at_least` and, for words, `no_repeat`, alone and together."""
    if once: images = [[[alternative[:1] for alternative in group] for group in wanted] for wanted in images]
    model = tree(4, seed)
    out = search(model, images, k=130, max_len=4, at_least=at_least, no_repeat=once, mode=mode)
    for i, wanted in enumerate(images):
        need = len(wanted) if at_least is None else min(at_least, len(wanted))
        def fits(body):
            twice = any(sum(body.count(w) for (w,) in {*group}) > 1 for group in wanted if once)
            return has(body, wanted, need) and not twice
        same_captions(captions(out, i), every_caption(scores_of(model, i), 4, 4, fits))

@fifty
@given(case(most=8), st.integers(1, 6))
def test_an_impossible_search_ends_with_a_report(given_case, max_len):
    "With too many or forbidden musts the search ends within the maximum length and gives a reason."
    (step, fresh), images, how = given_case
    steps, images = [], [wanted + [[(2, 3, 2, 3)], [(3, 3, 3)]] for wanted in images]
    def counting(tokens, state): steps.append(1); return step(tokens, state)
    out = search((counting, fresh), images, **how | dict(max_len=max_len, at_least=None, forbidden=[2]))
    assert len(steps) <= max_len
    assert all(out.reason) and not out.ended.any()

@fifty
@given(case(), st.integers(0, 5), st.integers(0, 5))
def test_minus_infinity_forbids_a_word(given_case, banned, dies_after):
    "A score of -inf forbids a word, a row of -inf ends a hypothesis, and an image without captions gets a reason."
    (step, fresh), images, how = given_case
    def holes(tokens, state):
        log_probs, state = step(tokens, state)
        log_probs[:, banned] = -torch.inf
        log_probs[tokens == dies_after] = -torch.inf
        return log_probs, state
    out = search((holes, fresh), images, **how)
    for i in range(len(images)):
        assert (out.reason[i] is None) == bool(out.ended[i].any())
        for tokens in (t for t, s in zip(out.tokens[i].tolist(), out.scores[i].tolist()) if s > -math.inf):
            real = [t for t in tokens if t >= 0]
            assert banned not in real and dies_after not in [t for t in real[:-1]]

@settings(fifty, max_examples=100)
@given(st.integers(0, 999), st.integers(1, 6), st.integers(3, 6), batch(6, 4),
       st.sampled_from([None, None, -1., 0., 3., 20.]))
def test_a_bank_asks_the_model_no_more_than_a_beam(seed, k, max_len, images, price):
    "In a bank, at most k hypotheses per image are open without candidates, and at most k/2, or one, more with them."
    (step, fresh), widest = tree(30, seed), []
    def counting(tokens, state): widest.append(len(tokens)); return step(tokens, state)
    prices = None if price is None else [[price]*len(wanted) for wanted in images]
    search((counting, fresh), images, k=k, max_len=max_len, mode="bank", prices=prices)
    assert max(widest) <= (k if price is None else k + max(1, k//2))*B

def test_models_in_32_bit_agree_with_those_in_64():
    "In 32 bits, a batch, an image alone, and the 64-bit model give scores that agree to 1e-4."
    for seed in range(8):
        wanted = [[[(2,)], [(3, 4)]], [], [[(5,), (6,)]]]
        both = (search(tree(50, seed, dtype), wanted, k=4, max_len=8) for dtype in (torch.float64, torch.float32))
        double, single = both
        for i in range(3): same_captions(captions(single, i)[:1], captions(double, i)[:1], 1e-4)
        one = search(tree(50, seed, torch.float32), wanted[2:], of=(2,), k=4, max_len=8)
        same_captions(captions(one), captions(single, 2), 1e-5)

def first_words(out, i=0): return captions(out, i)[0][0]

def test_the_search_does_not_stop_too_early():
    "The search does not stop at the first caption (word 1) if a longer one (2, 3, 1) is better."
    def language(one, two, three):
        rows = [[1, 0, 0, 0], [.9, 0, 0, .1], [0, .01, .99 - three, three], [0, .9, 0, .1],
                [0, one, two, 1 - one - two]]
        chances = torch.tensor(rows, dtype=torch.float64).log()
        return lambda tokens, state: (chances[tokens], state)
    how = dict(bos=4, eos=0, k=1, max_len=6, pad=-1)
    assert first_words(grid_beam_search(language(.05, .9, .9), None, [[[(1,)]]], **how)) == (2, 3, 1, 0)
    second = language(.4, .5, .6)
    assert first_words(grid_beam_search(second, None, [[[(1,)]]], **how)) == (1, 0)
    assert first_words(grid_beam_search(second, None, [[[(1,)]]], length_penalty=1, **how)) == (2, 3, 1, 0)

def test_no_repeat_lets_a_form_grow():
    "With `no_repeat` a finished word is not repeated, but `fire` may become `fire hydrant`."
    chances = torch.full((6, 6), 1e-3, dtype=torch.float64)
    chances[:, 3], chances[3, 4], chances[4, 0] = .9, .9, .9
    step = lambda tokens, state: ((chances / chances.sum(1, keepdim=True)).log()[tokens], state)
    how = dict(bos=1, eos=0, k=3, max_len=6, pad=-1)
    once = grid_beam_search(step, None, [[[(3,), (3, 4)]]], no_repeat=True, **how)
    assert first_words(once) == (3, 4, 0)
    assert first_words(grid_beam_search(step, None, [[[(3,)], [(5,)]]], no_repeat=True, **how)).count(3) == 1

def test_the_search_imports_torch_alone():
    "The search and its modules import only torch and the standard library."
    watch = """
import builtins, sys
taken, real = set(), builtins.__import__
def note(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and str((globals or {}).get("__name__")).startswith("noc_nb"): taken.add(name.partition(".")[0])
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = note
import noc_nb.beam, noc_nb.constraints, noc_nb.grid, noc_nb.fast.search
print(*sorted(taken - sys.stdlib_module_names))"""
    found = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) == {"torch"}
