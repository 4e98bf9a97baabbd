"""Build tiny models with random weights, one for each architecture, without loading any file.

Every builder returns a model and two inputs. All models use the sixty tokens of `tokenizer()`. `save_blip` and
`save_chat` write folders with the layout of the Hugging Face hub, with a processor. `DETECTORS` and `TOLD` build
detectors and their processors."""
import string
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BartConfig, BartForConditionalGeneration, BertConfig, Blip2Config, Blip2ForConditionalGeneration, BlipConfig,
    BlipForConditionalGeneration, BlipImageProcessor, BlipProcessor, CLIPImageProcessor, CLIPVisionConfig, DetrConfig,
    DetrForObjectDetection, DetrImageProcessor, DFineConfig, DFineForObjectDetection, Gemma2Config, Gemma2ForCausalLM,
    GitConfig, GitForCausalLM, GPT2Config, GPT2LMHeadModel, GroundingDinoConfig, GroundingDinoForObjectDetection,
    GroundingDinoImageProcessor, GroundingDinoProcessor, HGNetV2Config, LlamaConfig, LlamaForCausalLM, LlavaConfig,
    LlavaForConditionalGeneration, LlavaProcessor, MambaConfig, MambaForCausalLM, Owlv2Config, Owlv2ForObjectDetection,
    Owlv2ImageProcessor, Owlv2Processor, PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration,
    ResNetConfig, RTDetrConfig, RTDetrForObjectDetection, RTDetrImageProcessor, RTDetrResNetConfig, SwinConfig,
    VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig)

V, PICTURE = 60, 59                                        # tokens; the one that stands for a picture
IDS = dict(vocab_size=V, bos_token_id=0, pad_token_id=1, eos_token_id=2)
SIZE = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
TEXT = IDS | SIZE | dict(max_position_embeddings=64, initializer_range=.5)
HEADS = dict(num_key_value_heads=1, head_dim=8)
WINDOW = dict(sliding_window=4, query_pre_attn_scalar=8)
LOOK = SIZE | dict(num_hidden_layers=1, image_size=16, patch_size=8)
WIDE = LOOK | dict(initializer_range=.5)
SEQ2SEQ = dict(d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
               decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, init_std=.5)
OPT = IDS | dict(model_type="opt", hidden_size=16, ffn_dim=32, num_hidden_layers=2, init_std=.5,
                 num_attention_heads=2, max_position_embeddings=64, word_embed_proj_dim=16)
SIGLIP = dict(model_type="siglip_vision_model", vision_use_head=False) | LOOK

def tokenizer():
    "Build a WordPiece tokenizer with sixty tokens."
    pieces = """[BOS] [PAD] [EOS] [UNK] cat Cat ##tle bus ##es fire hydrant zebra the old red dog near
                a What is this ?""".split()
    pieces += [f"w{n}" for n in range(V - len(pieces))]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="[BOS]", pad_token="[PAD]",
                                   eos_token="[EOS]", unk_token="[UNK]")

def ids(*rows): return torch.tensor(rows)
def image(): return torch.randn(2, 3, 16, 16)
def prompt(): return ids([12, 13, 14, 15], [18, 19, 20, 21])
def only_text(model): return model, dict(input_ids=prompt())

def shown(pieces, start=(), end=()):
    "Return two prompts that begin with the tokens of a picture, between its start and end tokens."
    picture = [*start, *[PICTURE]*pieces, *end]
    return ids([*picture, 12, 13], [*picture, 18, 19])

def gpt2():
    config = GPT2Config(**IDS, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=.5)
    return only_text(GPT2LMHeadModel(config))

def llama(): return only_text(LlamaForCausalLM(LlamaConfig(**TEXT)))
def gemma2(): return only_text(Gemma2ForCausalLM(Gemma2Config(**TEXT, **HEADS, **WINDOW)))

def mamba():
    config = MambaConfig(**IDS, hidden_size=16, state_size=4, num_hidden_layers=2, initializer_range=.5)
    return only_text(MambaForCausalLM(config))

def bart():
    config = BartConfig(**IDS, **SEQ2SEQ, max_position_embeddings=64, decoder_start_token_id=2,
                        forced_eos_token_id=None)
    return only_text(BartForConditionalGeneration(config))

def vision_encoder_decoder():
    text = GPT2Config(**IDS, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=.5,
                      add_cross_attention=True)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**WIDE), text)
    config.decoder_start_token_id, config.pad_token_id = 0, 1
    model = VisionEncoderDecoderModel(config)
    for name, value in dict(decoder_start_token_id=0, pad_token_id=1, eos_token_id=2).items():
        setattr(model.generation_config, name, value)
    return model, dict(pixel_values=image())

def blip():
    text = dict(**TEXT, encoder_hidden_size=16, sep_token_id=2, projection_dim=8, is_decoder=True)
    config = BlipConfig(text_config=text, vision_config=WIDE | dict(projection_dim=8), projection_dim=8)
    return BlipForConditionalGeneration(config), dict(pixel_values=image())

def blip2():
    bridge = SIZE | dict(vocab_size=V, encoder_hidden_size=16, cross_attention_frequency=1,
                         initializer_range=.5)
    config = Blip2Config(vision_config=WIDE, qformer_config=bridge, text_config=OPT,
                         num_query_tokens=3, image_token_index=PICTURE)
    return Blip2ForConditionalGeneration(config), dict(pixel_values=image())

def git():
    model = GitForCausalLM(GitConfig(vision_config=LOOK, **TEXT))
    return model, dict(pixel_values=image(), input_ids=prompt()[:,:2])

def llava():
    config = LlavaConfig(vision_config=CLIPVisionConfig(**WIDE), text_config=LlamaConfig(**TEXT),
                         image_token_id=PICTURE, vision_feature_layer=-1, image_seq_length=4)
    model = LlavaForConditionalGeneration(config)
    return model, dict(pixel_values=image(), input_ids=shown(4))

def qwen2_vl():
    rope = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4)
    look = dict(depth=1, embed_dim=16, hidden_size=16, num_heads=2, mlp_ratio=2, patch_size=4,
                spatial_merge_size=2, temporal_patch_size=2, initializer_range=.5)
    config = Qwen2VLConfig(text_config=TEXT | dict(num_key_value_heads=2, rope_parameters=rope),
                           vision_config=look, image_token_id=PICTURE, video_token_id=58,
                           vision_start_token_id=57, vision_end_token_id=56)
    rows = shown(4, [57], [56])
    inputs = dict(input_ids=rows, mm_token_type_ids=(rows == PICTURE).int(),
                  pixel_values=torch.randn(32, 96), image_grid_thw=ids([1, 4, 4], [1, 4, 4]))
    return Qwen2VLForConditionalGeneration(config), inputs

BUILDERS = {
    "GPT-2": gpt2, "Llama": llama, "Gemma 2": gemma2, "Mamba": mamba, "BART": bart,
    "VisionEncoderDecoder": vision_encoder_decoder, "BLIP": blip, "BLIP-2": blip2, "GIT": git, "LLaVA": llava,
    "Qwen2-VL": qwen2_vl}

def build(name, seed=0):
    "Build a model of `BUILDERS` and its inputs."
    torch.manual_seed(seed)
    model, inputs = BUILDERS[name]()
    return model.eval(), inputs

# Folders

SQUARE = dict(height=16, width=16)
CHAT = ("{% for turn in messages %}{% for part in turn.content %}{% if part.type == 'image' %}<image> "
        "{% else %}{{ part.text }} {% endif %}{% endfor %}{% endfor %}")

def save_blip(folder):
    "Save a captioner of BLIP's architecture."
    build("BLIP")[0].save_pretrained(folder)
    BlipProcessor(BlipImageProcessor(size=SQUARE), tokenizer()).save_pretrained(folder)

def save_chat(folder):
    "Save a chat model of LLaVA's architecture, with its template."
    torch.manual_seed(0)
    words = tokenizer()
    words.add_special_tokens(dict(additional_special_tokens=["<image>"]))
    text = LlamaConfig(**TEXT | dict(vocab_size=len(words)))
    config = LlavaConfig(vision_config=CLIPVisionConfig(**WIDE), text_config=text, vision_feature_layer=-1,
                         image_token_id=words.convert_tokens_to_ids("<image>"))
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    pictures = CLIPImageProcessor(size=SQUARE, crop_size=SQUARE)
    LlavaProcessor(pictures, words, patch_size=8, num_additional_image_tokens=1, chat_template=CHAT,
                   vision_feature_select_strategy="default").save_pretrained(folder)

# Detectors

CONV = dict(hidden_sizes=[8]*4, depths=[1]*4, embedding_size=8, layer_type="basic")
LAYERS = dict(d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
              encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=9)
HYBRID = LAYERS | dict(encoder_hidden_dim=16, encoder_in_channels=[8]*3, decoder_in_channels=[16]*3,
                       num_denoising=0, anchor_image_size=None)
DEEP = dict(out_features=["stage2", "stage3", "stage4"])
SIDES, LARGE = dict(shortest_edge=64, longest_edge=96), dict(height=64, width=64)

def labelled(names): return dict(id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})

def detr(names, unlikely=(-1,), **backbone):
    backbone = backbone or dict(backbone_config=ResNetConfig(**CONV, out_features=["stage4"]))
    model = DetrForObjectDetection(DetrConfig(**LAYERS, **labelled(names), **backbone, init_std=.3))
    model.class_labels_classifier.bias.data[list(unlikely)] -= 9      # it finds things
    return model, DetrImageProcessor(size=SIDES)

def detr_timm(names):
    "Build a DETR with a backbone from timm, like the first DETR on the hub."
    return detr(names, (0, -1), backbone="resnet10t", use_timm_backbone=True, use_pretrained_backbone=False,
                backbone_config=None)

def rt_detr(names):
    config = RTDetrConfig(**HYBRID, **labelled(names), backbone_config=RTDetrResNetConfig(**CONV, **DEEP))
    return RTDetrForObjectDetection(config), RTDetrImageProcessor(size=LARGE)

def d_fine(names):
    stages = dict(stage_in_channels=[8]*4, stage_mid_channels=[8]*4, stage_out_channels=[8]*4, stage_num_blocks=[1]*4,
                  stage_numb_of_layers=[1]*4, stem_channels=[3, 8, 8])
    backbone = HGNetV2Config(**stages, **DEEP, embedding_size=8, hidden_sizes=[8]*4, depths=[1]*4)
    config = DFineConfig(**HYBRID, **labelled(names), backbone_config=backbone)
    return DFineForObjectDetection(config), RTDetrImageProcessor(size=LARGE)

def speller(end, number, **settings):
    "Build a tokenizer with BERT's ids, by which Grounding DINO finds the ends of names."
    known = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, ".": 1012, "?": 1029, end: number}
    letters = string.ascii_lowercase
    pieces = ["person", "couch", "alarm", "clock", "zebra", *letters, *(f"##{c}" for c in letters)]
    made = Tokenizer(models.WordPiece(known | {p: 200 + n for n, p in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    marks = [("[CLS]", 101), (end, number)]
    made.post_processor = processors.TemplateProcessing(single=f"[CLS] $A {end}", special_tokens=marks)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
                                   sep_token=end, **settings)

def owlv2():
    text = SIZE | dict(vocab_size=1100, max_position_embeddings=16, pad_token_id=0, bos_token_id=101,
                       eos_token_id=1099, initializer_range=.5)
    config = Owlv2Config(text_config=text, vision_config=SIZE | dict(image_size=32, patch_size=8), projection_dim=16)
    pictures = Owlv2ImageProcessor(size=dict(height=32, width=32))
    return Owlv2ForObjectDetection(config), Owlv2Processor(pictures, speller("[END]", 1099, model_max_length=16))

def grounding_dino():
    backbone = SwinConfig(embed_dim=8, depths=[1]*3, num_heads=[1]*3, window_size=4, image_size=64,
                          out_features=["stage2", "stage3"])
    text = BertConfig(**SIZE, vocab_size=1100, max_position_embeddings=64)
    config = GroundingDinoConfig(**LAYERS | dict(d_model=32), backbone_config=backbone, text_config=text,
                                 num_feature_levels=3, max_text_len=64)
    pictures = GroundingDinoImageProcessor(size=SIDES)
    return GroundingDinoForObjectDetection(config), GroundingDinoProcessor(pictures, speller("[SEP]", 102))

DETECTORS = {"DETR": detr, "DETR, timm": detr_timm, "RT-DETR": rt_detr, "D-FINE": d_fine}
TOLD = {"OWLv2": owlv2, "Grounding DINO": grounding_dino}

def save_detector(name, folder, names=(), seed=1):
    "Build a detector with its own class names, or one that gets the names as input."
    torch.manual_seed(seed)
    for part in TOLD[name]() if name in TOLD else DETECTORS[name](names): part.save_pretrained(folder)
    return folder
