"""Run `grid_beam` with every architecture of transformers that generates text, tiny and with random weights.

`python tests/architectures.py` adds missing lines to tests/architectures.csv, so an interrupted run can be
continued. With names of classes it prints their lines, and writes nothing. In a cell, *library* means that the
library's own beam search has the same fault, and the reason says how large it is."""
import csv, inspect, itertools, json, multiprocessing, re, signal, sys, warnings
from pathlib import Path
import torch
import transformers
from transformers import LogitsProcessorList
from transformers.models.auto import modeling_auto
from noc_nb.words.generate import grid_beam
from tiny_models import tokenizer

TABLE = Path(__file__).parent/"architectures.csv"
COLUMNS = "architecture", "own beams", "words", "batch", "score", "picture", "reason"
TASKS = "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"
V, PICTURE = 60, 59                                        # number of tokens; token of a picture
MARKS = [*range(53, V)]                                    # tokens that no text contains
WORDS = "cat", ["bus", "buses"], "fire hydrant"
SECONDS = 240                                              # CPU seconds per architecture
CLOSE = 1e-3                                               # tolerance in nats

def names():
    "Return all classes that generate text."
    found = set()
    for task in TASKS:
        for value in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            found |= {value} if isinstance(value, str) else set(value)
    return sorted(found, key=str.lower)

# Small configurations: the first rule that matches the name of a number is used; None keeps the number

RULES = [(re.compile(f"({name})$"), value) for name, value in {
    "type_vocab_size|forced_.*_token_id|max_window_layers|pretrained_dim": None,
    "vocab_size|vocab_offset|vocab_size_per_layer_input": V,
    "(image|img)_token_(id|index)|im_patch_id": PICTURE, "video_token_(id|index)": 58, "audio_token_(id|index)": 57,
    "(boi|image_start|vision_start)_token_(id|index)": 55, "(eoi|image_end|vision_end)_token_(id|index)": 54,
    "^pad_token_id": 1, "^bos_token_id": 0, "^(eos|sep|decoder_start)_token_id": 2, "token_(id|index)": 53,
    "mamba_d_head|mamba_head_?dim": 16, "n_mamba_heads": 2, "heads?": 4, "rotary_dim|qk_rope_head_dim": 4,
    "nope_head_dim|d_head|kv_channels|head_?dim|d_kv|dim_head|lora_rank|laurel_rank|per_layer_input|num_mel_bins": 8,
    "first_k_dense_replace|num_dense_layers|shared_experts|n_?groups?|topk_group|num_expert_group|groups": 1,
    "experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|experts_top_k|moe_top_k|layers?|depth|num_blocks|stacks?": 2,
    "experts|index_topk|state_size|d_state|dt_rank|time_step_rank": 4,
    "intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|dim_ff|dim_feedforward": 64,
    "hidden_size|d_model|n_embd|embed_dim|hidden_dim|emb_dim|proj_dim|embedding_(size|dim)|projection_dim|width|"
    "output_dim|^dim|model_dim|qformer_hidden": 32, "sliding_window|attention_window_size|^patch_size": 8,
    "position_embeddings|n_positions|max_seq_len|max_(source|target)_positions": 128, "^image_size": 16}.items()]
LAYERS = "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "depth"
DROPPED = ("architectures", "transformers_version", "_name_or_path", "dtype", "id2label", "label2id",
           "per_layer_config")

def small(key, x, heads):
    "Return a small value for a number of a configuration."
    if key.endswith(("key_value_heads", "kv_heads", "kv_n_heads")) and x != heads: return 2
    return next((x if value is None else value for rule, value in RULES if rule.search(key)), x)

def kept(config):
    "Choose the layers to keep: one of each kind, and at least two."
    kinds = next((config[k] for k in ("layer_types", "layers_block_type") if config.get(k)), ())
    first = sorted(kinds.index(kind) for kind in set(kinds))
    return first if len(first) > 1 else [0, min(1, len(kinds) - 1) if kinds else 1]

def shrunk(config):
    "Return a configuration, as a dict, with few narrow layers."
    layers = next((config[k] for k in LAYERS if isinstance(config.get(k), int)), 0)
    heads = next((config[k] for k in ("num_attention_heads", "n_heads", "num_heads") if k in config), None)
    out = {}
    for key, x in config.items():
        if key in DROPPED: continue
        if isinstance(x, dict) and (key.endswith("config") or key in ("encoder", "decoder")): x = shrunk(x)
        elif isinstance(x, dict) and "mrope_section" in x: x = x | dict(mrope_section=[2, 1, 1])
        elif isinstance(x, (list, tuple)) and len(x) == layers > 2: x = [x[n] for n in kept(config)]
        elif key in LAYERS and x == layers: x = len(kept(config))
        elif isinstance(x, (int, float)) and not isinstance(x, bool): x = small(key, x, heads)
        out[key] = x
    if "qk_rope_head_dim" in out and "head_dim" in out: out["head_dim"] = out["qk_rope_head_dim"]
    return out

def numbered(x): return {int(key) if key.isdigit() else key: value for key, value in x.items()}
CHANGES = json.loads(TABLE.with_suffix(".json").read_text(), object_hook=numbered)   # where the rules do not do

def changed(config, more):
    "Return a configuration with other values, also in its nested parts."
    for key, x in more.items():
        config[key] = changed(dict(config.get(key) or {}), x) if isinstance(x, dict) and key != "vocabulary_map" else x
    return config

def build(name, seed=0, **more):
    "Build a model with a few thousand random weights; `more`: values of its configuration."
    kind = getattr(transformers, name)
    config = changed(shrunk(kind.config_class().to_dict()), CHANGES.get(name, {}) | more)
    torch.manual_seed(seed)
    model = kind(kind.config_class.from_dict(config)).eval()
    for key, weight in model.named_parameters():
        if weight.dim() > 1 and key.endswith("weight"): weight.data.normal_(0, .3)
    return model

# Inputs for two texts: the first candidates that the library's own beam search accepts and that change its text

PROMPTS = torch.tensor([[12, 13, 14, 15], [18, 19, 20, 21]])
SEEN = "pixel_values", "pixel_values_images", "flattened_patches"
ROWS = "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"

def pictures(model):
    "Yield the forms in which a model may expect two pictures."
    look = getattr(model.config, "vision_config", None) or model.config
    side = getattr(look, "patch_size", 8)
    side = side if isinstance(side, int) else 8
    image, grid, sizes = torch.randn(2, 3, 16, 16), torch.tensor([[1, 4, 4]]*2), torch.tensor([[16, 16]]*2)
    yield dict(pixel_values=image)
    yield dict(pixel_values=image, image_sizes=sizes)
    yield dict(pixel_values=image[:,None])
    yield dict(pixel_values=image[:,None], pixel_attention_mask=torch.ones(2, 1, 16, 16))
    yield dict(pixel_values=torch.stack([image]*2, 1), image_sizes=sizes)
    for frames in (getattr(look, "temporal_patch_size", 1), 1, 2):
        yield dict(pixel_values=torch.randn(32, 3*frames*side*side), image_grid_thw=grid)
    yield dict(pixel_values=torch.randn(32, 3, side, side), image_grid_thw=grid)
    yield dict(pixel_values=torch.randn(32, 3*side*side), image_grid_thw=grid, image_merge_sizes=torch.tensor([2, 2]))
    yield dict(pixel_values=torch.randn(2, 4, 3*side*side), pixel_attention_mask=torch.ones(2, 4).long(),
               spatial_shapes=torch.tensor([[2, 2]]*2))
    yield dict(pixel_values_images=image)

def places(model, picture):
    "Return the number of tokens of a picture, or None if the model does not report it."
    try: found = model.get_image_features(**picture)
    except Exception: return None
    found = getattr(found, "pooler_output", found)
    if found is None: return None
    parts = [found] if isinstance(found, torch.Tensor) else found
    return sum(part.numel() // part.shape[-1] for part in parts) // 2

def beside(takes, picture, rows):
    "Return the inputs for pictures with their prompts."
    marks = {name: (rows == PICTURE).long() for name in ROWS[2:] if name in takes}
    if "qformer_input_ids" in takes: marks["qformer_input_ids"] = PROMPTS
    return picture | dict(input_ids=rows, attention_mask=torch.ones_like(rows)) | marks

def candidates(model):
    "Yield inputs that the model may accept."
    takes = inspect.signature(model.forward).parameters
    if model.main_input_name in ("input_features", "input_values"):
        for shape in (2, 8, 40), (2, 40, 8), (2, 40, 160): yield dict(input_features=torch.randn(shape))
        yield dict(input_values=torch.randn(2, 2000))
        return
    text, start = PROMPTS[:,:2], torch.full((2, 1), 55)
    for picture in pictures(model) if set(SEEN) & set(takes) else ():
        if not set(picture) <= {*takes, "spatial_shapes"}: continue
        n = places(model, picture)
        filled = [torch.cat([start, torch.full((2, m), PICTURE), text], 1) for m in ([n] if n else (1, 4, 2, 3, 5, 16))]
        if n: yield beside(takes, picture, filled[0])
        yield picture
        yield beside(takes, picture, text)
        if not n: yield from (beside(takes, picture, rows) for rows in filled)
    yield dict(input_ids=PROMPTS, attention_mask=torch.ones_like(PROMPTS))

def other(inputs):
    "Return the same inputs with other pictures."
    return inputs | {name: inputs[name].flip(0)*3 for name in SEEN if name in inputs}

def inputs_of(model):
    "Return two inputs. If the library's own search accepts none, raise its first error."
    text, error = None, None
    for inputs in candidates(model):
        how = dict(num_beams=2, max_new_tokens=4)
        try: scores = [beams(model, x, **how).sequences_scores for x in (inputs, other(inputs))]
        except Exception as e:
            error = error or e
            continue
        if not set(SEEN) & set(inputs) or (scores[0] - scores[1]).abs().max() > CLOSE: return inputs
        text = text or inputs
    if text is None: raise error
    return text

# Each check returns True, False, None if there is nothing to check, or the error of the library's own search in nats

NEVER = dict(early_stopping="never", return_dict_in_generate=True, output_scores=True)
ENDS = [2, *range(30, 39)]                                 # several end tokens, so that texts have all lengths

def call(model, inputs, **settings):
    how = dict(do_sample=False, num_beams=4, max_new_tokens=8, pad_token_id=1, eos_token_id=2, suppress_tokens=MARKS,
               forced_bos_token_id=None, forced_eos_token_id=None) | settings
    if type(model).__name__ == "BlipForConditionalGeneration":           # its `generate` has one end token
        model.config.text_config.sep_token_id = how.pop("eos_token_id")
        del how["pad_token_id"]
    if model.config.is_encoder_decoder: how.setdefault("decoder_start_token_id", 0)
    return model.generate(**{name: x.clone() for name, x in inputs.items()}, **how)

def beams(model, inputs, **settings): return call(model, inputs, **NEVER | settings)

def ours(model, inputs, **settings):
    how = dict(custom_generate=grid_beam, text_only=True, return_dict_in_generate=True, processor=tokenizer())
    return call(model, inputs, **how | settings)

def own_beams(model, inputs):
    "Compare all beams with the library's; with ten end tokens only the best, because the library repeats texts then."
    blip = type(model).__name__ == "BlipForConditionalGeneration"
    for penalty, ends in itertools.product((0., 1., -.5), (2, 30) if blip else (2, ENDS)):
        how = dict(length_penalty=penalty, max_new_tokens=7, eos_token_id=ends,
                   num_return_sequences=1 if ends == ENDS else 4)
        own, found = beams(model, inputs, **how), ours(model, inputs, early_stopping="never", **how)
        if own.sequences.tolist() == found.sequences.tolist(): continue
        start = found.sequences.shape[1] - max(map(len, found.texts))
        text = own.sequences[0,start:].tolist()
        if ends in text: text = text[:text.index(ends)+1]
        return abs(own.sequences_scores[0].item()*len(text)**penalty - told(model, half(inputs, 0), text))
    return True

def texts(ids): return tokenizer().batch_decode(ids, skip_special_tokens=True)

def is_whole(text, word):
    either = [word] if isinstance(word, str) else word
    return any(re.search(rf"(?<!\w){w}(?!\w)", text, re.I) for w in either)

def cattle(ids, scores):
    "Make every \"cat\" continue as \"cattle\": a logits processor."
    vocabulary = tokenizer().get_vocab()
    scores[ids[:,-1] == vocabulary["cat"], vocabulary["##tle"]] += 9.
    return scores

def words(model, inputs):
    "Check that every text has all words as whole words, in two modes, and if the model prefers \"cattle\"."
    for how in dict(), dict(mode="grid"), dict(logits_processor=LogitsProcessorList([cattle])):
        found = texts(ours(model, inputs, words=WORDS, num_beams=3, **how).sequences)
        if not all(is_whole(text, word) for text in found for word in WORDS): return False
    return True

def half(inputs, i): return {name: x.chunk(2)[i] for name, x in inputs.items()}

def batch(model, inputs):
    "Check that an input has the same text alone and in a batch, with its own words and padding on the left."
    own, both = [["cat", "zebra"], [["bus", "buses"]]], dict(inputs)
    alone = [half(inputs, i) for i in range(2)]
    for name in ROWS if "input_ids" in inputs and not model.config.is_encoder_decoder else ():
        if name not in inputs: continue
        more, pad = dict(input_ids=([13, 12], 1), attention_mask=([1, 1], 0)).get(name, ([0, 0], 0))
        alone[0][name] = torch.cat([alone[0][name], torch.tensor([more])], 1)
        padded = torch.cat([torch.full((1, 2), pad), alone[1][name]], 1)
        both[name] = torch.cat([alone[0][name], padded])
    found, value = ours(model, both, each=own, num_beams=3), True
    for i in range(2):
        text = ours(model, alone[i], each=own[i:i+1], num_beams=3).texts[0]
        if text != found.texts[i]: value = abs(told(model, both, text, i) - told(model, alone[i], text))
        if value is not True and value > CLOSE: break
    return value

class Told:
    "Allow only one text: a logits processor."
    def __init__(self, text): self.text = iter(text)
    def __call__(self, ids, scores):
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor(next(self.text)), 0)

def told(model, inputs, text, i=0):
    "Return the log-probability of a text of input `i`, from a run of the library that allows only this text."
    how = dict(num_beams=1, suppress_tokens=None, max_new_tokens=len(text), return_dict_in_generate=True,
               output_logits=True, logits_processor=LogitsProcessorList([Told(text)]))
    logits = call(model, inputs, **how).logits
    return sum(x.float().log_softmax(-1)[i,t].item() for x, t in zip(logits, text))

def score(model, inputs):
    "Check that the score of a text with words is the model's log-probability of the text."
    one = half(inputs, 0)
    found = ours(model, one, words=WORDS, length_penalty=0.)
    if abs(found.sequences_scores[0].item() - told(model, one, found.texts[0])) < CLOSE: return True
    own = ours(model, one, length_penalty=0.)
    return abs(own.sequences_scores[0].item() - told(model, one, own.texts[0]))

def picture(model, inputs):
    "Check that another picture changes the score of a text with words."
    if not set(SEEN) & set(inputs): return None
    scores = [ours(model, x, words=WORDS).sequences_scores for x in (inputs, other(inputs))]
    return bool((scores[0] - scores[1]).abs().max() > CLOSE)

CHECKS = {"own beams": own_beams, "words": words, "batch": batch, "score": score, "picture": picture}

def first_line(error): return f"{type(error).__name__}: {str(error).strip().splitlines()[-1].strip()[:150]}"

def row(name):
    "Return a line of the table."
    cells, reasons = dict.fromkeys(COLUMNS, "") | dict(architecture=name), []
    try:
        model = build(name)
        inputs = inputs_of(model)
    except Exception as e: return cells | dict(reason=f"does not run by itself here: {first_line(e)}")
    for check, run in CHECKS.items():
        try: value = run(model, inputs)
        except Exception as e: value = first_line(e)
        if isinstance(value, str): reasons.append(f"{check}: {value}")
        elif isinstance(value, float) and value > CLOSE:
            reasons.append(f"{check}: the library's own search is off by {value:.2g} nats")
        cells[check] = {True: "yes", False: "no", None: ""}.get(value, "library" if isinstance(value, float) else "no")
        if isinstance(value, float) and value <= CLOSE: cells[check] = "no"
    return cells | dict(reason="; ".join(reasons))

def apart(name):
    "Return a line of the table, computed in a separate process with a time limit."
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(False)
    def work():
        signal.setitimer(signal.ITIMER_PROF, SECONDS)      # processor time, which other programs do not affect
        torch.set_num_threads(1)
        send.send(row(name))
    process = context.Process(target=work)
    process.start()
    send.close()
    try: return receive.recv()
    except EOFError:
        return dict.fromkeys(COLUMNS, "") | dict(architecture=name, reason=f"no end in {SECONDS} s of the CPU")
    finally: process.join()

def read_table():
    if not TABLE.exists(): return {}
    with TABLE.open() as file: return {line["architecture"]: line for line in csv.DictReader(file)}

def write_table(table):
    "Write the lines in the order of their names."
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table[name] for name in sorted(table, key=str.lower))

def main():
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    if sys.argv[1:]:
        for name in sys.argv[1:]: print(apart(name))
        return
    table = read_table()
    for name in names():
        if name in table: continue
        table[name] = apart(name)
        write_table(table)

if __name__ == "__main__": main()
