"Test detectors of transformers: small random models of each kind, loaded with their processors from folders."
import pytest, torch
pytest.importorskip("transformers")
from PIL import Image
from noc_nb.core import NocError
from noc_nb.files.store import from_results
from noc_nb.models.detectors import PretrainedDetector, classes_for
from noc_nb.models.classes import classes_of
from noc_nb.models.pretrained import quiet
from tiny_models import DETECTORS, TOLD, save_detector

pytestmark = pytest.mark.usefixtures("one_thread")
PHOTOS = [Image.new("RGB", (40, 30), "green"), Image.linear_gradient("L").resize((20, 50)).convert("RGB"),
          Image.linear_gradient("L").resize((40, 30)).convert("RGB")]      # two photos have the same size
LABELS = ["N/A", "person", "sofa", "couch", "alarm clock", "zebra"]

def named(*names): return classes_of(dict(enumerate(names, 1)), "names.txt")

def loaded(name, folder, classes=None, **settings):
    "Load a detector from a folder; make the folder if it does not exist."
    with quiet():
        if not folder.is_dir(): save_detector(name, folder, LABELS)
        return PretrainedDetector.from_pretrained(folder, classes, "cpu", **dict(min_score=.01) | settings)

def check_alone(detector, found):
    "Check that a photo has the same regions alone as in a batch with a photo of the same size."
    assert [r.size for r in found] == [photo.size for photo in PHOTOS] and all(len(r) for r in found)
    assert found[0].scores.tolist() != found[2].scores.tolist()
    for photo, r in zip(PHOTOS, found):
        [alone] = detector([photo])
        assert alone.labels.tolist() == r.labels.tolist()
        torch.testing.assert_close(alone.boxes, r.boxes, atol=1e-4, rtol=1e-4)

def check_same(r, result, classes, names=None):
    "Check that a photo's regions equal those that the library makes of the model's output."
    result["boxes"] = result["boxes"].clamp(min=0).minimum(torch.tensor([*r.size]*2))
    theirs = from_results(result, classes, r.size, names)
    torch.testing.assert_close(theirs.boxes, r.boxes, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(theirs.scores, r.scores)
    assert theirs.labels.tolist() == r.labels.tolist()

def answer(detector, photo, **text):
    inputs = detector.processor(images=photo, return_tensors="pt", **text)
    with torch.no_grad(): return inputs, detector.model(**inputs)

@pytest.mark.parametrize("name", DETECTORS)
def test_detectors_with_labels_equal_the_library(name, tmp_path):
    "Boxes equal the library's, labels are matched by name, and \"sofa\" and \"couch\" are one class."
    detector = loaded(name, tmp_path/"model")
    assert [c.word for c in detector.classes.values()] == ["person", "couch", "clock", "zebra"]
    found = detector(PHOTOS)
    check_alone(detector, found)
    for photo, r in zip(PHOTOS, found):
        _, out = answer(detector, photo)
        [result] = detector.processor.post_process_object_detection(out, threshold=.01, target_sizes=[photo.size[::-1]])
        keep = result["labels"] != 0
        check_same(r, {key: column[keep] for key, column in result.items()}, detector.classes, LABELS)

NAMES = "couch", "person", "alarm clock", "zebra"

def check_told(detector, photo, r):
    "Check that the regions equal the library's when it gets the names of all classes at once."
    names = [[c.name for c in detector.classes.values()]]
    _, out = answer(detector, photo, text=names)
    [result] = detector.processor.post_process_grounded_object_detection(
        out, threshold=.01, target_sizes=[photo.size[::-1]], text_labels=names)
    check_same(r, result, detector.classes)

def test_owlv2_equals_the_library(tmp_path):
    "Boxes and labels equal the library's."
    detector = loaded("OWLv2", tmp_path/"model", named(*NAMES))
    found = detector(PHOTOS)
    check_alone(detector, found)
    for photo, r in zip(PHOTOS, found): check_told(detector, photo, r)

def test_grounding_dino_names_a_box_by_its_most_probable_token(tmp_path):
    "A box has the class of its most probable token; the full stops before the token give the class's number."
    detector = loaded("Grounding DINO", tmp_path/"model", named(*NAMES))
    found = detector(PHOTOS)
    check_alone(detector, found)
    for photo, r in zip(PHOTOS, found):
        inputs, out = answer(detector, photo, text="couch. person. alarm clock. zebra.")
        pieces = detector.processor.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
        result = dict(boxes=[], labels=[], scores=[])
        for (x, y, w, h), probs in zip(out.pred_boxes[0].tolist(), out.logits[0].sigmoid().tolist()):
            named_by = [n for n, piece in enumerate(pieces) if piece not in (".", "[CLS]", "[SEP]")]
            best = max(named_by, key=lambda n: probs[n])
            if probs[best] <= .01: continue
            width, height = photo.size
            box = [(x - w/2)*width, (y - h/2)*height, (x + w/2)*width, (y + h/2)*height]
            result["boxes"].append(box)
            result["labels"].append(NAMES[pieces[:best].count(".")])
            result["scores"].append(probs[best])
        check_same(r, result | dict(boxes=torch.tensor(result["boxes"])), detector.classes)

SYLLABLES = "ba ce di fo gu ka le mi no pu ra se".split()
MANY = [a + b + c for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES][:1200]

def test_twelve_hundred_names_are_all_asked_for(tmp_path):
    "OWLv2 gets all names at once. Grounding DINO gets them in lines: none is too long, and each name is in one line."
    classes = named(*MANY)
    detector = loaded("OWLv2", tmp_path/"owl", classes)
    check_told(detector, PHOTOS[0], detector(PHOTOS[:1])[0])

    detector = loaded("Grounding DINO", tmp_path/"dino", classes)
    read = [i for part in detector.parts for i in part]
    assert read == [*classes] and len(detector.parts) > 100
    for part in detector.parts[::50]:
        line = " ".join(f"{classes[i].name}." for i in part)
        assert len(detector.processor.tokenizer(line)["input_ids"]) <= 64
    [some] = loaded("Grounding DINO", tmp_path/"dino", named(*MANY[:20]))(PHOTOS[:1])
    assert len(some) and set(some.labels.tolist()) <= set(range(1, 21))

@pytest.mark.parametrize("name", ["DETR", *TOLD])
def test_two_names_of_one_thing_are_one_class(name, tmp_path):
    "\"sofa\" and \"couch\" in a file of names are one class, for the detector and for captions."
    classes = named("sofa", "zebra", "couch")
    detector = loaded(name, tmp_path/"model", classes)
    assert [c.name for c in detector.classes.values()] == ["couch", "zebra"]
    assert detector.classes == classes_for(tmp_path/"model", classes)
    assert set(detector(PHOTOS)[0].labels.tolist()) <= {1, 2}

def test_a_detector_saved_in_16_bits_computes_in_32(tmp_path):
    "A detector whose weights were saved in 16 bits computes in 32."
    from transformers import AutoModelForZeroShotObjectDetection
    loaded("OWLv2", tmp_path/"model", named(*NAMES)).model.half().save_pretrained(tmp_path/"model")
    assert AutoModelForZeroShotObjectDetection.from_pretrained(tmp_path/"model").dtype == torch.float16
    detector = loaded("OWLv2", tmp_path/"model", named(*NAMES))
    assert detector.model.dtype == torch.float32 and len(detector(PHOTOS)[0])

def test_unusable_detectors_give_one_line(tmp_path):
    "A detector without class names, with a class that it lacks, or with nameless labels gives one line."
    with quiet():
        for name in TOLD: save_detector(name, tmp_path/name)
        save_detector("DETR", tmp_path/"nameless", [f"LABEL_{n}" for n in range(4)])
    loaded("DETR", tmp_path/"DETR")
    tells = {name: (None, "needs the names of classes: expected --classes with names") for name in TOLD}
    for name, (classes, expected) in (tells | {
            "DETR": (named("zebra", "okapi"), "has no label 'okapi'; expected some of person, sofa, couch"),
            "nameless": (None, "its 4 labels have no names; expected --classes with 4 names, in their order"),
            "none": (None, "no such folder; expected a detector, such as")}).items():
        with pytest.raises(NocError) as error:
            PretrainedDetector.from_pretrained(tmp_path/name, classes, "cpu")
        assert str(error.value).startswith(f"{tmp_path/name}: {expected}") and "\n" not in str(error.value)
