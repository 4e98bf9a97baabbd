"Test captioners of transformers: small random models of each kind, loaded with their processors from folders."
import ast, io, json, math, re, sys
import pytest, torch
pytest.importorskip("transformers")
from PIL import Image
from tokenizers import processors
from transformers import (
    Blip2Processor, BlipImageProcessor, BlipProcessor, CLIPImageProcessor, GitProcessor, LlavaProcessor,
    PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor, ViTImageProcessor)
from noc_nb.commands.cli import noc_caption
from noc_nb.commands.cli import main
from noc_nb.core import NocError
from noc_nb.lab.disk import write_json
from noc_nb.models.captioners import NovelPhotoCaptioner, PhotoCaptioner
from noc_nb.models.pipeline import NovelCaptioner
from noc_nb.models.pretrained import quiet
from tiny_models import PICTURE, build, save_blip, save_detector, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
SQUARE = dict(height=16, width=16)
TEMPLATE = ("{% for turn in messages %}{% for part in turn.content %}{% if part.type == 'image' %}PICTURE "
            "{% else %}{{ part.text }} {% endif %}{% endfor %}{% endfor %}")

def piece(n): return tokenizer().convert_ids_to_tokens(n)

def words(ends=False, **special):
    "Build a tokenizer with the sixty words of `tiny_models`; `ends`: texts get start and end tokens, as BERT's do."
    made = tokenizer().backend_tokenizer
    if ends:
        marks = [("[BOS]", 0), ("[EOS]", 2)]
        made.post_processor = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=marks)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="[BOS]", pad_token="[PAD]", eos_token="[EOS]",
                                   unk_token="[UNK]", **special)

def cropped(): return CLIPImageProcessor(size=SQUARE, crop_size=SQUARE)

def llava():
    picture = piece(PICTURE)
    return LlavaProcessor(cropped(), words(additional_special_tokens=[picture]), patch_size=8, image_token=picture,
                          num_additional_image_tokens=1, vision_feature_select_strategy="default",
                          chat_template=TEMPLATE.replace("PICTURE", picture))

def qwen2_vl():
    names = dict(image_token=PICTURE, video_token=58, vision_start=57, vision_end=56)
    names = {name: piece(n) for name, n in names.items()}
    patches = dict(patch_size=4, merge_size=2, temporal_patch_size=2)
    template = TEMPLATE.replace("PICTURE", piece(57) + piece(PICTURE) + piece(56))
    return Qwen2VLProcessor(Qwen2VLImageProcessor(**patches, min_pixels=64, max_pixels=512),
                            words(extra_special_tokens=names), Qwen2VLVideoProcessor(**patches),
                            chat_template=template)

PROCESSORS = {
    "VisionEncoderDecoder": lambda: [ViTImageProcessor(size=SQUARE), words()],
    "BLIP": lambda: [BlipProcessor(BlipImageProcessor(size=SQUARE), words(ends=True))],
    "BLIP-2": lambda: [Blip2Processor(BlipImageProcessor(size=SQUARE), words(), num_query_tokens=3)],
    "GIT": lambda: [GitProcessor(cropped(), words(ends=True))],
    "LLaVA": lambda: [llava()], "Qwen2-VL": lambda: [qwen2_vl()]}
CHATS = "LLaVA", "Qwen2-VL"
PHOTOS = Image.new("RGB", (40, 30), "green"), Image.linear_gradient("L").resize((20, 50)).convert("RGB")
WORDS = [["zebra"], ["bus", "buses"]], [["fire hydrant"]]

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "Write a folder for each captioner, as a user would have it."
    root = tmp_path_factory.mktemp("captioners")
    with quiet():
        for name, made in PROCESSORS.items():
            build(name)[0].save_pretrained(root/name)
            for part in made(): part.save_pretrained(root/name)
    return root

def captioner(folders, name, prompt=None, room=8):
    made = PhotoCaptioner.from_pretrained(folders/name, prompt, "cpu")
    made.room = room
    return made

@pytest.mark.parametrize("name", PROCESSORS)
def test_captioners_load_from_folders(folders, name):
    "Spans give the places of words, a batch does not change a caption, and two photos get different captions."
    made = captioner(folders, name)
    found = made(PHOTOS, WORDS)
    for photo, caption, wanted in zip(PHOTOS, found, WORDS):
        text = caption.caption.split()
        said = [" ".join(text[slice(*span)]) for span in caption.spans]
        assert all(word.lower() in group for word, group in zip(said, wanted))
        alone = made([photo], [wanted])[0]
        assert (alone.caption, alone.spans) == (caption.caption, caption.spans)
        assert abs(alone.score - caption.score) < 1e-3
    prices = [-20., math.inf], [30.]
    for photo, caption, row in zip(PHOTOS, made(PHOTOS, WORDS, prices, penalty=0.), prices):
        worth = sum(u for u, span in zip(row, caption.spans) if span and u < math.inf)
        assert abs(caption.objective - caption.score - worth) < 1e-3
        assert [bool(span) for span in caption.spans] == [u > 0 for u in row]
    if name != "BLIP-2": assert len({c.caption for c in made(PHOTOS, [[], []])}) == 2    # its weights are too even
    assert (made.prompt is not None) == (name in CHATS)

@pytest.mark.parametrize("name", PROCESSORS)
def test_a_prompt_is_not_part_of_the_caption(folders, name):
    "A prompt changes the caption but is no part of it; a model that accepts no prompt gives an error."
    if name == "VisionEncoderDecoder":
        with pytest.raises(NocError, match="prompt 'the old': VisionEncoderDecoderModel takes none"):
            captioner(folders, name, "the old")
        return
    if name == "BLIP-2": return     # its processor adds a token that the model lacks
    made = captioner(folders, name, "the old")
    texts = [c.caption for c in made(PHOTOS, WORDS)]
    assert not any(text.startswith("the old") for text in texts)
    scores = [c.score for c in made(PHOTOS, WORDS)]
    assert scores != [c.score for c in captioner(folders, name)(PHOTOS, WORDS)]

def test_a_bad_chat_template_gives_one_line(folders):
    "A chat template that breaks the rules of the sandbox, or is invalid, gives an error of one line."
    made = captioner(folders, "LLaVA")
    for template in ("{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}a{% endfor %}", "{{ 1 +",
                     "{{ nothing.at }}"):
        made.processor.chat_template = template
        with pytest.raises(NocError, match="the model does not accept it") as error: made(PHOTOS, WORDS)
        assert "\n" not in str(error.value)

def test_half_precision_keeps_all_required_words(folders):
    "In bfloat16, captions still mention all required words."
    made = captioner(folders, "BLIP")
    made.model.to(torch.bfloat16)
    assert all(caption.satisfied == caption.wanted for caption in made(PHOTOS, WORDS))

def test_the_settings_of_a_run_contain_a_fingerprint_of_the_weights(folders):
    "The settings of a run contain a fingerprint of the weights, also in bfloat16, which NumPy lacks."
    from noc_nb.models.pipeline import CaptionOptions
    from noc_nb.pages.gallery import _settings
    from noc_nb.models.source import Source
    toy, made = NovelCaptioner.from_pretrained("toy", device="cpu"), captioner(folders, "GIT")
    made.model.to(torch.bfloat16)
    def settings(): return _settings(NovelPhotoCaptioner(toy, made), Source([1], None, {}), CaptionOptions())
    before = settings()
    assert before == settings()
    next(made.model.parameters()).data.add_(1)
    changed = settings()
    assert {key for key in before if before[key] != changed[key]} == {"model"}
    made.prompt = "a"
    assert settings()["prompt"] == "a" and before["prompt"] is None

def test_the_error_for_an_adapter_shows_how_to_merge_it(tmp_path):
    "A folder that LoRA training leaves gives one line with the command to type, which is Python."
    (tmp_path/"lora").mkdir()
    write_json(tmp_path/"lora/adapter_config.json", dict(peft_type="LORA", base_model_name_or_path="some/model"))
    (tmp_path/"lora/adapter_model.safetensors").touch()
    with pytest.raises(NocError, match="a LoRA adapter of some/model; expected a whole model") as told:
        PhotoCaptioner.from_pretrained(f"{tmp_path}/lora/", device="cpu")
    line = str(told.value)
    code = re.search('python -c "(.*)" and ', line)[1]
    ast.parse(code)
    assert "\n" not in line and line.endswith(f"--captioner {tmp_path}/lora-merged")
    assert f"{tmp_path}/lora'" in code and "merge_and_unload" in code

def test_broken_folders_give_one_line(folders, tmp_path):
    "A folder that is no captioner, or lacks a processor, gives an error of one line."
    with quiet(): build("GPT-2")[0].save_pretrained(tmp_path/"text")
    with quiet(): build("BLIP")[0].save_pretrained(tmp_path/"bare")
    (tmp_path/"empty").mkdir()
    for name, expected in dict(text="a model of type gpt2: expected a captioner", bare="expected a captioner",
                               empty="expected a captioner", none="no such folder; expected a captioner").items():
        with pytest.raises(NocError, match=expected) as error:
            PhotoCaptioner.from_pretrained(tmp_path/name, device="cpu")
        assert "\n" not in str(error.value) and str(tmp_path/name) in str(error.value)

def test_the_command_takes_models_from_folders(tmp_path, monkeypatch, capsys):
    "`noc_caption` takes photos, captioner and open-vocabulary detector from folders; a missing one gives one line."
    def typed(out, *more):
        options = "--detector", "owl", "--captioner", "blip", "--classes", "names.txt", "--out", out
        monkeypatch.setattr(sys, "argv", ["noc_caption", "photos", *options, *more])
        main()
        return [json.loads(line) for line in (tmp_path/out).read_text().splitlines()]
    monkeypatch.chdir(tmp_path)
    (tmp_path/"photos").mkdir()
    for n, photo in enumerate(PHOTOS): photo.save(f"photos/{n}.png")
    (tmp_path/"names.txt").write_text("dog\nbus\nzebra\n")
    with quiet():
        save_blip("blip")
        save_detector("OWLv2", "owl")
    for line in typed("chosen.jsonl"):
        assert line["boxes"] and {box["object"] for box in line["boxes"]} <= {"dog", "bus", "zebra"}
        for c in line["candidates"]:                   # the pipeline's price without the addition for unseen words
            p = c["selector"]
            assert c["price"] == pytest.approx(2*math.log(p/(1 - p)), rel=.02, abs=.02)
    for line in typed("forced.jsonl", "--objects", "zebra, dog"):
        assert {"zebra", "dog"} <= set(line["caption"].lower().split())
    options = "--captioner", "blip", "--out", "words.jsonl", "--objects", "hydrant, old|near, -dog"
    monkeypatch.setattr(sys, "argv", ["noc_caption", "photos", *options])
    capsys.readouterr()
    main()                                             # none of the words is a class, so no detector is loaded
    assert "without boxes" not in capsys.readouterr().err
    for line in map(json.loads, (tmp_path/"words.jsonl").read_text().splitlines()):
        words = set(line["caption"].lower().split())
        assert "hydrant" in words and words & {"old", "near"} and "dog" not in words and not line["boxes"]
    (tmp_path/"words.json").write_text(json.dumps({f"{n}.png": ["hydrant:Ed Ruscha"] for n in range(len(PHOTOS))}))
    options = "--captioner", "blip", "--out", "named.jsonl", "--objects", "words.json"
    monkeypatch.setattr(sys, "argv", ["noc_caption", "photos", *options])
    main()                                             # each photo has words, so no detector is loaded, either
    for line in map(json.loads, (tmp_path/"named.jsonl").read_text().splitlines()):
        [c] = line["candidates"]
        assert c["word"] == "Ed Ruscha" and "Ed Ruscha" in " ".join(line["caption"].split()[slice(*c["span"])])
    for option in "--captioner", "--detector":
        capsys.readouterr()
        with pytest.raises(SystemExit): typed("none.jsonl", option, "./none")
        *told, said = capsys.readouterr().err.splitlines()
        assert told == ["names.txt: 3 classes, each mentioned by its name"]
        assert said.startswith("error: ./none: no such folder; expected a")
    assert not (tmp_path/"none.jsonl").exists()

@pytest.mark.parametrize("file, option", [("config.json", "--captioner"), ("config.json", "--detector"),
                                          ("processor_config.json", "--captioner")])
def test_the_code_of_a_model_is_not_run(tmp_path, monkeypatch, capsys, file, option):
    "Code in a model's folder is never run, and the user is not asked for permission."
    monkeypatch.chdir(tmp_path)
    (tmp_path/"photos").mkdir()
    PHOTOS[0].save("photos/1.png")
    with quiet(): save_blip("odd")
    (tmp_path/"odd/evil.py").write_text(f"open({str(tmp_path/'mark')!r}, 'w')")
    said = json.loads((tmp_path/"odd"/file).read_text())
    kind = "AutoConfig" if file == "config.json" else "AutoProcessor"
    said |= dict(model_type="odd", processor_class="Odd", auto_map={kind: "evil.C"})
    (tmp_path/"odd"/file).write_text(json.dumps(said))
    waiting = io.StringIO("y\n"*9)
    monkeypatch.setattr(sys, "stdin", waiting)
    with pytest.raises(NocError, match="odd: expected a .*contains code of its own, which is not run") as error:
        noc_caption("photos", "out.jsonl", **{option[2:]: "./odd"})
    assert waiting.tell() == 0 and "\n" not in str(error.value)
    assert not (tmp_path/"mark").exists() and not (tmp_path/"out.jsonl").exists()
