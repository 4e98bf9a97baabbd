"""Test the method with a captioner that sees pixels: a VisionEncoderDecoder of transformers, trained on toy pictures.

    python benchmarks/pixels.py --seed 0

A ViT encodes the toy world's pictures and a GPT-2 writes captions; the library's Trainer trains both. The region
selector chooses words, and generate(custom_generate=grid_beam, each=words) writes captions with them. Rows are written
to the run's folder; chapter 58 shows those of three seeds."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from noc_nb.commands.command import one_thread, script
from noc_nb.core import require, set_seed
from noc_nb.fast.decode import Decoded
from noc_nb.fast.prices import PriceConfig
from noc_nb.fast.search import SearchConfig
from noc_nb.files.dataset import load_data
from noc_nb.files.drawing import make_toy, render
from noc_nb.heldout import normalize
from noc_nb.lab.config import Config, override
from noc_nb.lab.disk import read_json, write_json
from noc_nb.lab.experiment import Experiment
from noc_nb.lab.models import PRESETS, Models, Run
from noc_nb.lab.progress import progress, say
from noc_nb.lab.results import append_row, new_row
from noc_nb.lab.train import TrainConfig
from noc_nb.words.generate import grid_beam
from noc_nb.selector import SelectorConfig
from noc_nb.toy import TOY_CLASSES, toy_image

# ---- Settings
# transformers is imported only in the functions that use it.
@dataclass(frozen=True)
class _PixelConfig(Config):
    "The settings of a small VisionEncoderDecoder and its training."
    pictures:int = 4000 # number of training pictures
    side:int = 48       # side of a picture, in pixels
    patch:int = 8       # side of a patch of the ViT, in pixels
    width:int = 96      # width of encoder and decoder; feed-forward networks are twice as wide
    heads:int = 4       # attention heads
    encoder:int = 3     # layers in the ViT
    decoder:int = 2     # layers in the GPT-2
    steps:int = 600     # steps of the learning-rate schedule
    stop:int = 0        # number of steps after which training ends; 0: all
    batch:int = 64      # pictures per step, each with one of its captions
    warmup:int = 60     # steps until the peak learning rate; after them it falls as a cosine
    peak:float = 1.5e-3 # peak learning rate

_TOY = PRESETS["toy"]

@dataclass(frozen=True)
class _PixelPreset(Config):
    "The settings of a run from pixels; those that `Preset` has, too, have the same names."
    data:str = "toy"
    split:str = "toy"
    limit:int = 5            # maximum number of words per picture
    distinct:bool = False    # as in `Preset`
    ensemble:bool = False    # as in `Preset`
    selector_seeds:tuple = ()
    borrow:int = 0           # number of neighbours whose mean embedding an unseen word gets
    selector:SelectorConfig = _TOY.selector
    train_selector:TrainConfig = _TOY.train_selector
    captioner:_PixelConfig = _PixelConfig()
    search:SearchConfig = SearchConfig(mode="bank")
    prices:PriceConfig = PriceConfig()
    min_count:int = 1        # minimum count of a seen word; prices treat other words as unseen

# ---- Pictures and words
# The training pictures are those of the toy world: the 3,000 of `make reproduce`, and more with the same seed. A scene
# may contain a penguin, but its captions do not mention it.
# The tokenizer is trained on the captions and on the names of all classes, because a constraint word needs tokens. The
# toy world has some 250 words, and every word is a token. The embedding of a word that no caption has is never
# trained to be probable; every step only makes the word less probable. `borrow` is a remedy: the mean embedding of the
# nearest words that captions have, according to the data's word vectors.
def _caption_tokenizer(captions, words):
    "Train a tokenizer whose tokens are the words of captions, and other words."
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    special = dict(pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]", unk_token="[UNK]")
    made = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=list(special.values()), show_progress=False)
    made.train_from_iterator([*captions, *words], trainer)
    end = [("[EOS]", made.token_to_id("[EOS]"))]
    made.post_processor = processors.TemplateProcessing(single="$A [EOS]", special_tokens=end)
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)

def _look(processor, images):
    "Return (n,3,side,side) the pixels of toy images, in 16 bits to save memory."
    pixels = []
    for i in images:
        seen = processor(render(toy_image(0, i)[0]), return_tensors="pt")["pixel_values"][0]
        pixels.append(seen.half())
    return torch.stack(pixels)

def _captions(images):
    "Return the normalised captions of each image."
    return [list(map(normalize, toy_image(0, i)[1])) for i in images]

def _pairs(images, captions, tokenizer, processor):
    "Return pairs of a toy picture and one of its captions."
    pixels = _look(processor, progress(images, "pictures"))
    labels = [(n, tokenizer(c)["input_ids"]) for n, cs in enumerate(captions) for c in cs]
    return [dict(pixel_values=pixels[n], labels=torch.tensor(ids)) for n, ids in labels]

def _batch(pairs):
    "Collate pairs to a batch; -100 marks places without a token."
    labels = pad_sequence([pair["labels"] for pair in pairs], True, padding_value=-100)
    pixels = torch.stack([pair["pixel_values"] for pair in pairs])
    return dict(pixel_values=pixels.float(), labels=labels)

# ---- Training
# The model consists of parts of the library, whose `Trainer` trains it. Checkpoints and the trained model are saved in
# a folder: with a checkpoint in the folder training resumes, and with a trained model it is skipped.
def _build_model(cfg, tokenizer):
    "Build a ViT encoder and a GPT-2 decoder with random weights."
    from transformers import GPT2Config, ViTConfig, VisionEncoderDecoderConfig
    from transformers import VisionEncoderDecoderModel
    ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
               pad_token_id=tokenizer.pad_token_id)
    look = ViTConfig(
        hidden_size=cfg.width, num_hidden_layers=cfg.encoder, num_attention_heads=cfg.heads,
        intermediate_size=2*cfg.width, image_size=cfg.side, patch_size=cfg.patch,
        hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
    speak = GPT2Config(
        **ids, vocab_size=len(tokenizer), n_embd=cfg.width, n_layer=cfg.decoder,
        n_head=cfg.heads, n_positions=32, n_inner=2*cfg.width, add_cross_attention=True,
        resid_pdrop=0., attn_pdrop=0., embd_pdrop=0.)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(look, speak)
    config.decoder_start_token_id, config.pad_token_id = ids["bos_token_id"], ids["pad_token_id"]
    model = VisionEncoderDecoderModel(config)
    for name, value in dict(ids, decoder_start_token_id=ids["bos_token_id"]).items():
        setattr(model.generation_config, name, value)
    return model

def _trainer(model, cfg, seed, folder, pairs):
    "Build the library's `Trainer`, which reports the loss every 50 steps."
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    class Says(TrainerCallback):
        def on_step_end(self, args, state, control, **kw):
            if state.global_step == cfg.stop: control.should_training_stop = True
        def on_log(self, args, state, control, logs=None, **kw):
            if "loss" in logs: say(f"captioner: step {state.global_step}, loss {logs['loss']:.2f}")
    how = TrainingArguments(
        str(folder), per_device_train_batch_size=cfg.batch, max_steps=cfg.steps,
        learning_rate=cfg.peak, lr_scheduler_type="cosine", warmup_steps=cfg.warmup,
        weight_decay=.01, seed=seed, logging_steps=50, save_steps=200, save_total_limit=1,
        report_to=[], disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False)
    trainer = Trainer(model, how, data_collator=_batch, train_dataset=pairs, callbacks=[Says()])
    trainer.remove_callback(PrinterCallback)
    return trainer

def _train_pixels(cfg, folder, seed=0):
    "Train a captioner on the toy world's pictures, or resume an interrupted run."
    from transformers import ViTImageProcessor
    from transformers.trainer_utils import get_last_checkpoint
    folder, start = Path(folder), time.monotonic()
    if (folder/"done.json").exists(): return
    images = range(1, cfg.pictures + 1)
    captions = _captions(images)
    names = [form for c in TOY_CLASSES.values() for form in c.forms]
    tokenizer = _caption_tokenizer(sum(captions, []), names)
    processor = ViTImageProcessor(size=dict(height=cfg.side, width=cfg.side))
    set_seed(seed)
    model = _build_model(cfg, tokenizer)
    checkpoints, pairs = folder/"checkpoints", _pairs(images, captions, tokenizer, processor)
    trainer = _trainer(model, cfg, seed, checkpoints, pairs)
    before = get_last_checkpoint(str(checkpoints)) if checkpoints.exists() else None
    trainer.train(resume_from_checkpoint=before)
    for part in (model, tokenizer, processor): part.save_pretrained(folder)
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    write_json(folder/"done.json", dict(
        seconds=round(time.monotonic() - start, 1), process_seconds=round(time.process_time(), 1),
        parameters=model.num_parameters(), loss=[[e["step"], float(e["loss"])] for e in losses]))

def _average_said(model, tokenizer, said, vectors, n):
    """Give words that are not `said` in training the mean embedding of their `n` nearest words, in
    place, as `average_neighbours` of the lab does. Return word -> its neighbours."""
    tokens = {w: t for w, t in tokenizer.get_vocab().items() if w in vectors}
    unit = {w: vectors[w]/np.linalg.norm(vectors[w]) for w in tokens}
    table = model.decoder.get_input_embeddings().weight.data
    learned = sorted(set(tokens) & set(said))
    most = f"at most {len(learned)}, the words that have vectors"
    require(n <= len(learned), f"borrow={n}", most)
    neighbours = {}
    for word in sorted(set(tokens) - set(said)):
        nearest = sorted(learned, key=lambda other: -unit[word] @ unit[other])[:n]
        table[tokens[word]] = table[[tokens[other] for other in nearest]].mean(0)
        neighbours[word] = nearest
    return neighbours

# ---- The experiment
# Everything but the captioner comes from 56_experiment: the choice of classes, scores, rows, the log. Any form of a
# class satisfies its constraint, as in `["lamp", "lamps", "lantern"]`.
class _PixelModels(Models):
    "Models whose captioner sees pixels."
    def captioner(self, training:str)->tuple:
        "Return model, tokenizer and image processor; train them if the folder has none."
        from transformers import AutoTokenizer, VisionEncoderDecoderModel, ViTImageProcessor
        require(training == "xe", f"from pixels: training {training!r}", "xe")
        folder = self.folder/f"captioner-pixels-{self.run.seed}"
        _train_pixels(self.run.preset.captioner, folder, self.run.seed)
        model = VisionEncoderDecoderModel.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return model, tokenizer, ViTImageProcessor.from_pretrained(folder)

    def averaged(self, captioner):
        "Average embeddings of neighbours in place if `borrow` is set; return the captioner."
        preset, (model, tokenizer, processor) = self.run.preset, captioner
        if not preset.borrow: return captioner
        images = range(1, preset.captioner.pictures + 1)
        said = {word for captions in _captions(images) for c in captions for word in c.split()}
        _average_said(model, tokenizer, said, self.data.vectors, preset.borrow)
        return model, tokenizer, processor

class _PixelExperiment(Experiment):
    "A run whose captioner sees pixels."
    kind, features, seen = _PixelModels, "pixels", None
    def _searched(self, row): return self.run.preset

    def pixels(self, processor):
        "Return the pixels of the run's images."
        if self.seen is None: self.seen = _look(processor, self.ids)
        return self.seen

    def _caption_images(self, row, training, lambda0):
        "Caption the images of the run."
        captioner = self.models.captioner(training)
        if row != "none": captioner = self.models.averaged(captioner)
        candidates = self.choices.candidates(row, lambda0, self.run.votes[0])
        def words(i): return [list(self.data.classes[c].forms) for c in candidates[i]]
        # images with equal numbers of words are searched together
        ids, decoded = sorted(self.ids, key=lambda i: (len(candidates[i]), i)), {}
        for n in progress(range(0, len(ids), 50), f"pixels {row}"):
            part = ids[n:n+50]
            groups = list(map(words, part))
            prices = [list(candidates[i].values()) for i in part]
            decoded |= _describe(self, captioner, part, groups, prices)
        return decoded

def _records(out, tokenizer, wanted):
    "Convert the output of `generate` to `Decoded` records."
    texts = tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
    scores = out.sequences_scores.tolist()
    for text, score, spans, n in zip(texts, scores, out.spans, wanted):
        reason = None if len(spans) == n else f"{len(spans)} of {n} words"
        yield Decoded(text, score, n, len(spans), reason, tuple(map(spans.get, range(n))))

def _describe(experiment, captioner, images, groups, prices=None):
    "Caption some images with given words, at prices if any."
    model, tokenizer, processor = captioner
    search = experiment.run.preset.search
    places = [experiment.ids.index(i) for i in images]
    pixels = experiment.pixels(processor)[places].float()
    out = model.generate(
        pixel_values=pixels, custom_generate=grid_beam, each=groups, prices=prices,
        processor=tokenizer, num_beams=search.k, max_new_tokens=search.max_len, mode=search.mode,
        length_penalty=0., early_stopping="never", do_sample=False,
        return_dict_in_generate=True, output_scores=True)
    return dict(zip(images, _records(out, tokenizer, map(len, groups))))

# ---- The command
# The command generates the world, trains selector and captioner, captions and scores, with the trained embeddings and
# with averaged ones. An interrupted run continues with `--resume`.
_LINES = [(row, "xe", .2) for row in ("none", "top1", "top2", "top3", "selector", "oracle")]

def bench_pixels(
    out:str="_runs/pixels", # folder of the run
    seed:int=0,             # seed of selector and captioner
    part:Literal["test", "val"]="test", # images to caption and score; use val for choices
    set:list=None,          # changes to the preset, as key=value
    resume:bool=False,      # continue the run in OUT
):
    "Train a VisionEncoderDecoder on toy pictures; caption with the selector's words and score."
    one_thread()
    out, preset = Path(out), override(_PixelPreset(), set)
    typed = f"benchmarks/pixels.py --seed {seed} --part {part}"
    if set: typed = " ".join([typed, "--set", *set])
    if not (out/"world/splits/toy.json").exists(): make_toy(out/"world")
    data, variant = load_data(out/"world", split="toy"), "pixels: a VisionEncoderDecoder"
    plans = {"plain": (preset, variant, _LINES),
             "borrow": (replace(preset, borrow=2), f"{variant}, borrow from two", _LINES[-2:])}
    for name, (settings, words, lines) in plans.items():
        run = Run(settings, seed=seed, part=part, variant=words, command=typed)
        experiment = _PixelExperiment(run, data, out/f"{part}-{name}", resume,
                                      metrics=("C",), models=out)
        if name == "plain" and not (out/"training.jsonl").exists():
            experiment.models.captioner("xe")
            done = read_json(out/f"captioner-pixels-{seed}/done.json")
            costs = new_row("bench", "pixels", config=asdict(preset.captioner), metrics=done,
                            command=typed, seconds=done["seconds"])
            append_row(out/"training.jsonl", costs)
        for r in experiment.complete(lines):
            m = r["metrics"]
            print(f"{name} {r['row']}: F1 {m['out_macro']['F1']:.1f}, "
                  f"CIDEr {m['in']['C']:.1f} in, {m['out_macro']['C']:.1f} out")

if __name__ == "__main__": script(bench_pixels)