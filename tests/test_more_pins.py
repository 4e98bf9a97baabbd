"""Pins that a sample of mutants asked for (`tests/mutants.py`): each fails for a mutant that no other test noticed."""
import numpy as np
import pytest
import torch
from noc_nb.beam import beam_search, next_words
from noc_nb.captioner import Captioner
from noc_nb.cider import CiderD, CiderReward
from noc_nb.constraints import constraint_classes
from noc_nb.core import NocError
from noc_nb.encoder import CaptionerConfig
from noc_nb.grid_beam import pack_groups, read_groups
from noc_nb.heldout import COCO_HELDOUT
from noc_nb.novelty import judge, selection_f1
from noc_nb.regions import Regions
from noc_nb.search import grid_beam_search
from noc_nb.selector import SelectorConfig
from noc_nb.vocab import Vocab
from test_pins import CAT, DOG

pytestmark = pytest.mark.usefixtures("one_thread")
END, START = 0, 3

def test_hypotheses_that_multiply_and_die():
    "D4: whatever places the pool gives their words, stepping has the log-probabilities of reading them at once."
    torch.manual_seed(0)
    cfg = CaptionerConfig(d_feature=6, d_word=8, d_model=8, heads=2, d_ff=16, layers=2, memory=1, dropout=0.)
    model, rng = Captioner(cfg, [f"w{i}" for i in range(5)]).eval(), torch.Generator().manual_seed(0)
    features, mask = torch.randn(2, 3, 6, generator=rng), torch.tensor([[True]*3, [True, False, False]])
    state, tokens, said = model.start(features, mask, 14), torch.tensor([1, 1]), [[[1]], [[1]]]
    with torch.no_grad():
        for t in range(14):
            found, state = model.step(tokens, state)
            true = model(features, mask, torch.tensor(said[0] + said[1])).log_softmax(-1)[:,-1]
            torch.testing.assert_close(found, true, atol=1e-4, rtol=0)
            g, wide = len(said[0]), (1, 3, 7, 5, 2, 6)[t % 6]
            index = torch.stack([torch.randint(g, (wide,), generator=rng) + i*g for i in range(2)])
            tokens = torch.randint(4, 9, (2, wide), generator=rng)
            said = [[said[i][j - i*g] + [w] for j, w in zip(index[i].tolist(), tokens[i].tolist())] for i in range(2)]
            state, tokens = model.reorder(state, index), tokens.flatten()

def test_a_vocabulary_of_another_size_is_named(tmp_path):
    "A captioner's folder whose words are not those of its weights: the message says which file, and how many."
    cfg = CaptionerConfig(d_feature=2, d_word=4, d_model=4, heads=1, d_ff=4, layers=1, memory=1)
    model = Captioner(cfg, ["a", "dog", "runs"])
    model.save_pretrained(tmp_path)
    for wrong in model.tokens[:-1], [*model.tokens, "fast"]:
        Vocab(wrong).save(tmp_path/"vocab.json")
        with pytest.raises(NocError, match=f"vocab.json: {len(wrong)} words: expected {len(model.tokens)} as in"):
            Captioner.from_pretrained(tmp_path)

def test_the_score_row_never_sees_the_selector():
    "D7b: its scores are the detector's, also where there are probabilities."
    regions = Regions(np.tile([.1, .1, .5, .5], (2, 1)), [DOG, CAT], [.9, .2], image_id=1)
    assert constraint_classes(regions, "score", probs=[.1, .9]) == [DOG]
    assert constraint_classes(regions, "selector", probs=[.1, .9]) == [CAT]

@pytest.mark.parametrize("n, v", [(2, 40_009), (900, 40), (20, 1980), (70, 500)])
def test_next_words_are_those_of_a_sorted_row(n, v):
    "Block by block or at once, and with ties, which the lower id wins; also for more hypotheses than there are words."
    scores = torch.randn(n, v, generator=torch.Generator().manual_seed(v)).double()
    scores[1:] = scores[1:].mul(2).round()
    end, best, words = next_words(scores, torch.full((n, 1), END), 7, torch.tensor([2, 3]), torch.arange(n), 0)
    for row, of in enumerate(scores.tolist()):
        order = sorted((w for w in range(v) if w not in (END, 2, 3)), key=lambda w: (-of[w], w))[:7]
        assert words[row].tolist() == order and best[row].tolist() == [of[w] for w in order]
    assert torch.equal(end[:,0], scores[:,END])

def test_an_image_that_cannot_end_among_others():
    "D3: at the last step the end is taken where it may come; of an image without any, the best is returned."
    chances = torch.tensor([[[1/3]*3, [.1, .5, .4], [.1, .4, .5], [0, .6, .4]],
                            [[1/3]*3, [0, .6, .4], [0, .5, .5], [0, .6, .4]]]).log()
    def step(tokens, image): return chances[image, tokens], image
    out = beam_search(step, torch.tensor([0, 1, 0]), bos=START, eos=END, k=2, max_len=2)
    assert out.tokens.tolist() == [[[1, END], [2, END]], [[1, 1], [1, 2]], [[1, END], [2, END]]]
    assert out.reason == [None, "no end within 2 tokens", None]
    assert out.ended.tolist() == [[True]*2, [False]*2, [True]*2]

def test_logits_are_normalised():
    "With `normalize`, a model's logits are as good as its log-probabilities; a word of -inf stays forbidden."
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).double()
    logits[:,4] = -torch.inf
    def find(table, **kw):
        return grid_beam_search(lambda tokens, state: (table[tokens], state), torch.zeros(1, 1), [[[(2,)]]], bos=START,
                                eos=END, k=3, max_len=4, **kw)
    plain, own = find(logits.log_softmax(1)), find(logits, normalize=True)
    assert torch.equal(plain.tokens, own.tokens) and not (own.tokens == 4).any()
    torch.testing.assert_close(plain.scores, own.scores)

def test_what_sets_of_groups_still_take():
    "Rows, the end and the tokens to come, for every set of finished groups; any two of three, and the only one."
    read = read_groups([[[(2, 3)], [(4,)], [(5, 6, 7), (8, 9)]], [[(2,)]]], END)
    groups, done = pack_groups(read, at_least=[2, None]), torch.tensor([[*range(8)], [0, 1]*4])
    for i, (sizes, need) in enumerate((([2, 1, 2], 2), ([1], 1))):
        for j, bits in enumerate(done[i].tolist()):
            said = [g for g in range(len(sizes)) if bits >> g & 1]
            assert groups.row(done)[i,j] == min(len(said), need)
            assert groups.at_top(done)[i,j] == groups.may_end(done)[i,j] == (len(said) >= need)
            left = sum(size for g, size in enumerate(sizes) if g not in said)
            assert groups.takes(done)[i,j] == (0 if len(said) >= need else left)
    assert torch.equal(groups.takes(done.view(2, 2, 4)), groups.takes(done).view(2, 2, 4))

def test_a_new_word_is_no_known_one():
    "CIDEr-D: a word that no reference has is one of its own, also beside the references' last word."
    known, new, two = CiderD({0: [["a", "b"]], 1: [["c", "d"]]}).score([["c", "d"], ["c", "x"], ["x", "y"]], [1, 1, 1])
    assert known == pytest.approx(5) and new == pytest.approx(10/4/2) and two == 0

def test_ids_of_the_reward():
    "From 0 to 65,534."
    reward = CiderReward({0: [[0, 65_534, 9]], 1: [[7]]}, 2)
    assert reward(torch.tensor([[65_534, 9, 2]]), [0]) > 0
    for wrong in -1, 65_535:
        with pytest.raises(NocError, match="an id from 0 to 65,534"): CiderReward({0: [[wrong]]}, 2)
        with pytest.raises(NocError, match="ids from 0 to 65,534"): reward(torch.tensor([[wrong]]), [0])

def test_nothing_right_is_zero():
    "D7: F1 and its means are 0 where nothing is right, or there is nothing to find; of captions and of chosen classes."
    refs = {1: ["a zebra"], 2: ["a bus"]}
    for novel in ({o: {i for i in refs if o in refs[i][0]} for o in COCO_HELDOUT.novel},
                  {o: set() for o in COCO_HELDOUT.novel}):
        row = judge({1: "a dog", 2: "a dog"}, refs, [1, 2], novel, metrics=()).row()
        assert {*row["f1"].values()} == {row["out_macro"]["F1"], row["out_pooled"]["F1"]} == {0.}
        chosen = selection_f1({1: [], 2: []}, refs, [1, 2], novel)
        assert {*chosen.values()} == {0.} and "mean" in chosen

def test_a_selector_sees_at_least_one_region():
    with pytest.raises(NocError, match="max_regions"): SelectorConfig(max_regions=0)
    assert SelectorConfig(max_regions=1).max_regions == 1
