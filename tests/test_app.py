"Test noc_app in a headless Chromium: controls, uploads, requests by programs, and that it loads nothing else."
import csv, gzip, importlib.util, json, re, socket, urllib.request
from dataclasses import replace
from urllib.parse import unquote, urlsplit
import pytest
import torch
from PIL import Image
from noc_nb.core import NocError
from noc_nb.lab.disk import read_json
from noc_nb.models.pipeline import NovelCaptioner
from noc_nb.pages import app
from noc_nb.pages.app import _page, _paths, _Studio, _stage, _with_box
from noc_nb.regions import Regions

missing = importlib.util.find_spec("gradio") is None
pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(missing, reason="gradio is not installed: pip install noc_nb[app]")]

def dog_and_kite(images):
    return [Regions([[.1, .3, .6, .9], [.55, .1, .9, .4]], [2, 30], [.9, .8], size=i.size) for i in images]

@pytest.fixture(scope="module")
def served():
    "Serve the page with drawn scenes and a stand-in for a detector; return its address."
    torch.set_num_threads(1)
    studio = _Studio(NovelCaptioner.from_pretrained("toy", device="cpu"), dog_and_kite, most=4)
    page, options = _page(studio, max_mb=1)
    _, url, _ = page.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **options)
    yield url
    page.close()

@pytest.fixture
def page(served, browser):
    "Open the page in a new tab. At the end, fail if it requested another address or reported an error."
    tab, outside, wrong = browser.new_page(viewport=dict(width=1280, height=960)), [], []
    tab.set_default_timeout(60_000)
    local = ("data:", "blob:", served)
    tab.on("request", lambda r: None if r.url.startswith(local) else outside.append(r.url))
    tab.on("pageerror", lambda e: wrong.append(str(e)))
    tab.goto(served)
    tab.wait_for_selector("#examples img")
    yield tab
    tab.close()
    assert outside == [] and wrong == []

def captions(page): return [" ".join(c.split()) for c in page.locator("#stage .caption").all_inner_texts()]

def example(page, n):
    page.wait_for_selector("#stage .word")                         # the caption of the first example is there
    page.wait_for_timeout(500)
    changes(page, page.locator("#examples button").nth(n).click)

def changes(page, act):
    "Run `act`, wait until the first caption changes, and return both captions."
    before = captions(page)
    act()
    now = "document.querySelector('#stage .caption').innerText.trim().split(/\\s+/).join(' ')"
    page.wait_for_function(f"old => {now} != old", arg=before[0])
    page.wait_for_timeout(500)                                     # Gradio ignores input until it has drawn everything
    return captions(page)

def say(page, words):
    "Type words into the line one by one, as a person does, and press Enter."
    page.locator("#line").fill("")
    page.locator("#line").press_sequentially(words)
    page.locator("#line").press("Enter")

def ticked(page): return page.locator("#objects input:checked")

def test_objects_are_unticked_and_added(page, tmp_path):
    example(page, 2)
    forced, free = captions(page)
    names = [box.get_attribute("data-name") for box in ticked(page).all()]
    assert names and all(name in forced.split() for name in names) and forced != free
    less, same = changes(page, ticked(page).first.uncheck)
    assert same == free and all(name in less.split() for name in names[1:])
    more, same = changes(page, lambda: say(page, "umbrella"))
    assert "umbrella" in more.split() and same == free
    page.get_by_label("strongly").click()                          # the added object stays
    page.wait_for_function("document.querySelectorAll('#objects input:checked').length > 2")
    assert "umbrella" in captions(page)[0].split()
    page.screenshot(path=tmp_path/"page.png")
    assert len(Image.open(tmp_path/"page.png").convert("RGB").resize((160, 120)).getcolors(20_000)) > 100

def test_an_unknown_object_is_refused(page):
    "Typing a name that the pipeline does not have adds no object, and a message says so."
    example(page, 2)
    forced, count = captions(page), ticked(page).count()
    say(page, "umbrelo")
    page.get_by_text("'umbrelo': expected another word").wait_for()
    assert captions(page) == forced and ticked(page).count() == count

STOPS = """() => { const e = document.activeElement, s = getComputedStyle(e);
  return {what: e.id || e.className, tag: e.tagName, file: !!e.closest('#upload'), outline: s.outlineStyle,
          wide: parseFloat(s.outlineWidth), lists: document.querySelectorAll('[role=listbox]').length}; }"""

@pytest.mark.parametrize("width", [1280, 390])
def test_a_keyboard_reaches_the_upload_first(page, width):
    "The order is upload, photo, captions, controls. Focus is seen, no list opens, and a caption is one stop of Tab."
    page.set_viewport_size(dict(width=width, height=844))
    example(page, 2)
    tops = [page.locator(css).first.bounding_box()["y"] for css in
            ("h1", "#upload", "#stage svg", "#stage .caption", "#stage .next")]
    assert tops == sorted(tops) and page.locator("h1").count() == 1
    assert width > 400 or page.locator("#objects").bounding_box()["y"] > tops[-1]
    page.evaluate("document.activeElement.blur()")
    page.locator("h1").click()
    stops = []
    while not stops or "weight" not in stops[-1]["what"]:
        page.keyboard.press("Tab")
        stops.append(page.evaluate(STOPS))
    assert stops[0]["file"] and sum("word" in stop["what"] for stop in stops) == 2 and len(stops) < 20
    for stop in stops: assert stop["outline"] == "solid" and stop["wide"] >= 2 and stop["lists"] == 0, stop
    page.locator("#line").focus()
    assert page.evaluate(STOPS)["lists"] == 0
    first = page.locator("#stage .word").first
    first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.previousElementSibling === document.querySelector('#stage .word')")

def test_pictures_and_controls_are_named(page):
    "All pictures and inputs have names, there is one heading of the first level, and no word of a statistician's."
    example(page, 2)
    names = [img.get_attribute("alt") for img in page.locator("#examples img").all()]
    assert names == ["drawing 1", "drawing 2", "drawing 3", "drawing 4"]
    assert page.locator("#stage svg").get_attribute("aria-label").startswith("drawing 3, with boxes for: ")
    named = "e => e.labels?.length || e.getAttribute('aria-label')"
    assert all(e.evaluate(named) for e in page.locator(".noc input").all())
    for word in "nats", "log-probability", "price", "constraint": assert word not in page.inner_text("body"), word
    page.locator("#numbers").check()
    assert "log-probability" in page.inner_text("#stage")
    changes(page, ticked(page).first.uncheck)
    assert "log-probability" in page.inner_text("#stage") and page.evaluate("document.activeElement.id") == "tick1"

@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_has_enough_contrast(page, mode):
    "Text has a contrast of at least 4.5 to 1 with what is behind it, in the light and in the dark."
    page.emulate_media(color_scheme=mode)
    page.reload()
    page.wait_for_selector("#stage .word")
    page.wait_for_timeout(500)
    assert page.evaluate("document.body.classList.contains('dark')") == (mode == "dark")
    texts = "h1", ".small", ".word", ".told", ".next", ".save", "legend", "#objects label", "#upload .or"
    for css in texts:
        ink, paper = page.locator(css).first.evaluate("""e => {
          const ink = getComputedStyle(e).color;
          const paper = e => getComputedStyle(e).backgroundColor;
          while (e && /^rgba\\(.*, 0\\)$|transparent/.test(paper(e))) e = e.parentElement;
          return [ink, e ? paper(e) : 'rgb(255, 255, 255)']; }""")
        light, dark = sorted(map(luminance, (ink, paper)), reverse=True)
        assert (light + .05)/(dark + .05) >= 4.5, (css, ink, paper)

def luminance(color):
    "Return the relative luminance of a CSS colour, as WCAG 2 defines it."
    parts = [int(x)/255 for x in re.findall(r"\d+", color)[:3]]
    red, green, blue = (x/12.92 if x <= .04045 else ((x + .055)/1.055)**2.4 for x in parts)
    return .2126*red + .7152*green + .0722*blue

def test_photos_sent_at_once_are_shown_in_turn_and_share_one_file(page, tmp_path):
    "Several photos are sent at once, `Next photo` goes through them, and one file has all captions."
    page.wait_for_selector("#stage .word")
    sent = [tmp_path/"a photo.png", tmp_path/"d.png"]
    for n, path in enumerate(sent): Image.effect_noise((90 + n, 60), 90).save(path)
    changes(page, lambda: page.set_input_files("#upload input[type=file]", sent))
    first = captions(page)
    page.locator("#stage svg[aria-label^='a photo.png']").wait_for()
    page.locator(".next").click()
    page.locator("#stage svg[aria-label^='d.png']").wait_for()
    with page.expect_download() as saved: page.locator(".save").click()
    rows = list(csv.reader(saved.value.path().read_text().splitlines()))
    assert rows[0] == ["photo", "caption", "without choosing"] and rows[1][0] == "drawing 1"
    assert rows[2:] == [["a photo.png", *first], ["d.png", *captions(page)]]
    page.locator(".next").click()
    page.locator("#stage svg[aria-label^='a photo.png']").wait_for()

def test_a_name_with_quotes_is_one_cell_of_the_file():
    studio = _Studio(most=1)
    view = replace(studio.example(0), name='a "b", c.png')
    html = _stage(view)
    table = unquote(re.search('charset=utf-8,([^"]*)"', html)[1])
    assert [*csv.reader(table.splitlines())][1:] == [['a "b", c.png', *view.made['a "b", c.png']]]

def test_the_page_offers_whole_names(page):
    "The page offers whole names only if a class has a name of several words."
    example(page, 2)
    assert not page.locator("#phrases").is_visible()
    more, _ = changes(page, lambda: say(page, "hot air balloon"))
    whole, _ = changes(page, page.locator("#phrases").check)
    assert "hot air balloon" not in more and "balloon" in more and "hot air balloon" in whole

def test_an_object_priced_below_its_cost_is_left_out(page):
    "An object whose price is below its cost is left out, and the page says so."
    example(page, 2)
    slider = page.locator(".price input[type=range]").first
    name = slider.get_attribute("data-name")
    assert name in captions(page)[0].split()
    slider.focus()
    cheap, _ = changes(page, lambda: slider.press("Home"))
    assert name not in cheap.split()
    assert f"{name}: left out, because the sentence would become too odd" in page.inner_text("#stage")
    assert page.evaluate("document.activeElement.type") == "range"

def test_a_line_may_hold_alternatives_prices_and_words_to_avoid(page, tmp_path):
    "A line of words may have alternatives, prices and words to avoid. A bad line gives a message and stays."
    example(page, 2)
    name, line = ticked(page).first.get_attribute("data-name"), page.locator("#line")
    more, _ = changes(page, lambda: say(page, f"umbrella|boat, dog=.5, -{name}"))
    assert re.search("umbrellas?|boats?", more) and name not in more.split()
    assert page.locator("#objects label:has(input:checked)").filter(has_text=f"not {name}").count() == 1
    assert line.input_value() == "" and f"{name}: kept out" in page.inner_text("#stage")
    page.screenshot(path=tmp_path/"words.png")
    say(page, "dog=much")
    page.get_by_text("'dog=much': expected words").first.wait_for()
    assert line.input_value() == "dog=much" and captions(page)[0] == more
    count = ticked(page).count()
    say(page, "xqzt")
    page.get_by_text("'xqzt': expected another word").first.wait_for()
    assert line.input_value() == "xqzt" and ticked(page).count() == count
    named, _ = changes(page, lambda: say(page, "dog:Rex Müller"))
    assert "Rex Müller" in named and page.locator("#stage .said", has_text="Müller").count() == 1

def test_a_typed_box_is_added_and_undone(page):
    "A box that the user types is added to the picture, and can be undone."
    example(page, 2)
    before, count = captions(page), page.locator("#stage .region").count()
    def has(n): page.wait_for_function(f"document.querySelectorAll('#stage .region').length == {n}")
    page.get_by_text("Boxes of your own").click()
    page.wait_for_timeout(500)
    page.locator("#name").fill("umbrella")
    page.locator("#typed").fill("5, 5, 40, 60")
    page.locator("#typed").press("Enter")
    has(count + 1)
    page.wait_for_timeout(500)
    page.locator("#undo").click()
    has(count)
    assert captions(page) == before

def test_a_word_highlights_its_boxes_and_a_box_its_words(page):
    example(page, 1)
    word, opacity = page.locator("#stage .word").first, "b => getComputedStyle(b).fillOpacity"
    boxes = page.locator("#stage .box")
    assert {b.evaluate(opacity) for b in boxes.all()} == {"0"}
    word.hover(); page.wait_for_timeout(300)
    shares = [float(b.evaluate(opacity)) for b in boxes.all()]
    assert max(shares) == pytest.approx(.28, abs=.01) and min(shares) < max(shares)
    word.click()
    page.mouse.move(5, 5); page.wait_for_timeout(300)
    assert max(float(b.evaluate(opacity)) for b in boxes.all()) > .2              # a click keeps the highlight
    word.click(); page.mouse.move(5, 5)
    page.locator("#stage .region").last.dispatch_event("mouseover", dict(bubbles=True)); page.wait_for_timeout(300)
    shades = {w.evaluate("w => w.style.background") for w in page.locator("#stage .word").all()}
    assert len(shades) > 1 and "" not in shades

def test_an_upload_is_captioned(page, tmp_path):
    "A photo whose file name is a script is captioned, and the script does not run."
    name = tmp_path/"<img src=x onerror=document.title='bad'>.png"
    Image.effect_noise((90, 60), 90).save(name)
    page.wait_for_selector("#stage .word")
    changes(page, lambda: page.set_input_files("input[type=file]", name))
    assert page.locator("#stage .region").count() == 2 and len(captions(page)) == 2
    assert page.title() == "What is worth saying? · noc_nb" and page.locator("img[src=x]").count() == 0

@pytest.mark.parametrize("size, said", [(500, "expected a whole image"), (2_000_000, "maximum allowed size")])
def test_a_bad_upload_is_refused(page, tmp_path, size, said):
    from playwright.sync_api import TimeoutError
    (tmp_path/"bad.png").write_bytes(b"\x89PNG" + bytes(size))
    page.wait_for_selector("#stage .word")
    for _ in range(6):                                             # Gradio drops a file that arrives while it draws
        page.set_input_files("input[type=file]", tmp_path/"bad.png")
        try: return page.get_by_text(said).first.wait_for(timeout=20_000)
        except TimeoutError: pass
    pytest.fail(f"the page never said: {said}")

def test_the_page_is_served_to_this_machine_only(served):
    "The server refuses connections to another address of the same machine."
    own = [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    other = [a for a in own if not a.startswith("127.0.0.1")] or ["127.0.0.2"]
    with socket.socket() as s:
        s.settimeout(5)
        assert s.connect_ex((other[0], urlsplit(served).port)) != 0

def test_each_visitor_has_words_of_their_own(page, browser, served):
    example(page, 2)
    before = captions(page)
    other = browser.new_page()
    other.set_default_timeout(60_000)
    other.goto(served)
    other.wait_for_selector("#examples img")
    example(other, 2)
    more, _ = changes(other, lambda: say(other, "umbrella"))
    assert "umbrella" in more.split() and captions(page) == before
    less, _ = changes(page, ticked(page).first.uncheck)
    assert "umbrella" not in less.split() + page.locator("#objects").inner_text().split()
    assert captions(other)[0] == more
    other.close()

# ---- programs

@pytest.fixture
def noise(tmp_path):
    Image.effect_noise((90, 60), 90).save(tmp_path/"a photo.png")
    return tmp_path/"a photo.png"

def test_the_endpoint_answers_a_client(served, noise):
    "The only endpoint returns the line that `noc_caption` writes, and one line for bad input."
    from gradio_client import Client, handle_file
    from gradio_client.exceptions import AppError
    client = Client(served, verbose=False)
    known = client.view_api(return_format="dict")
    assert [*known["named_endpoints"]] == ["/caption"] and not known["unnamed_endpoints"]
    def ask(*about, **more): return client.predict(*about, api_name="/caption", **more)
    line = ask(handle_file(noise), None, "kite=2, cup, -text", "")
    regions, = dog_and_kite([Image.open(noise)])
    caption = NovelCaptioner.from_pretrained("toy", device="cpu")(regions, "kite=2, cup, -text", costs=True)
    assert (line["file"], line["caption"], line["size"]) == ("a photo.png", caption.caption, [90, 60])
    asked = [(c["object"], c["price"], c["word"], c["cost"] is None) for c in line["candidates"]]
    assert asked == [(c.object, c.price, c.word, c.cost is None) for c in caption.candidates]
    assert [b["object"] for b in line["boxes"]] == ["dog", "kite"]
    boxes = noise.with_suffix(".json")
    image = dict(id=1, file_name=noise.name, width=90, height=60)
    found = dict(image_id=1, category_id=2, bbox=[9, 18, 45, 36], score=.9)
    boxes.write_text(json.dumps(dict(images=[image], annotations=[found])))
    alone = ask(None, handle_file(boxes))
    both = ask(handle_file(noise), handle_file(boxes))
    assert [b["object"] for b in alone["boxes"]] == ["dog"] and alone["caption"] == both["caption"]
    refused = {"kite=much": (handle_file(noise), None, "kite=much"), "whole image": (handle_file(boxes),),
               "a photo, a file of detections": (None,)}
    for text, about in refused.items():
        with pytest.raises(AppError, match=text): ask(*about)

def test_the_endpoint_answers_plain_http(served, noise):
    "The three requests in docs/commands.md return a caption."
    def post(path, data, kind):
        request = urllib.request.Request(f"{served}gradio_api/{path}", data, {"Content-Type": kind})
        with urllib.request.urlopen(request) as r: return json.load(r)
    head = b"--x\r\nContent-Disposition: form-data; name=files; filename=a.png\r\n\r\n"
    form = head + noise.read_bytes() + b"\r\n--x--\r\n"
    path, = post("upload", form, "multipart/form-data; boundary=x")
    photo = dict(path=path, meta=dict(_type="gradio.FileData"))
    ask = json.dumps(dict(data=[photo, None, "cup", ""])).encode()
    event = post("call/caption", ask, "application/json")["event_id"]
    with urllib.request.urlopen(f"{served}gradio_api/call/caption/{event}") as r:
        kind, data = r.read().decode().split("\n")[:2]
    line, = json.loads(data.removeprefix("data: "))
    assert kind == "event: complete" and "cup" in line["caption"].split()

@pytest.mark.parametrize("data, told", [
    ([dict(path="/etc/hostname", meta=dict(_type="gradio.FileData")), None, "", ""], "hostname"),
    ([None], "input values")])
def test_a_bad_request_is_answered_with_a_reason(served, data, told):
    request = urllib.request.Request(f"{served}gradio_api/call/caption", json.dumps(dict(data=data)).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as r: event = json.load(r)["event_id"]
    with urllib.request.urlopen(f"{served}gradio_api/call/caption/{event}") as r: answer = r.read().decode()
    assert answer.startswith("event: error") and told in answer

def test_invalid_events_give_an_error(served, capfd):
    "Events with invalid values, such as numbers of 400 digits, give the sender an error and print no traceback."
    with urllib.request.urlopen(f"{served}config") as r: config = json.load(r)
    def send(fn, data, event=None):
        about = dict(data=data, fn_index=fn["id"], session_hash="s", trigger_id=fn["targets"][0][0], event_data=event)
        headers = {"Content-Type": "application/json"}
        join = urllib.request.Request(f"{served}gradio_api/queue/join", json.dumps(about).encode(), headers)
        urllib.request.urlopen(join).read()
        with urllib.request.urlopen(f"{served}gradio_api/queue/data?session_hash=s") as r:
            for text in r:
                message = json.loads(text.removeprefix(b"data: ")) if text.startswith(b"data: ") else {}
                if message.get("msg") == "process_completed": return message
    def events(kind, count): return [fn for fn in config["dependencies"] for _, what in fn["targets"] or ()
                                     if what == kind and len(fn["inputs"]) == count]
    act, = events("select", 1)
    def ask(do, *values): return send(act, [None], dict(do=do, values=values))["success"]
    for event in dict(do="example"), dict(do=["example"], values=[1]), dict(values=[1]), dict(), [7], 7:
        assert not send(act, [None], event)["success"]
    for values in ["a"], [], [[1, 2]], [1, 2], [1e999]: assert not ask("example", *values)
    for do in "_studio", "__init__", "__call__", "send": assert not ask(do, "/etc/hostname")
    assert ask("example", 1)                                                    # from now on there is a view
    for corners in [1e999]*4, "a", [], None, 7: ask("box", "dog", corners)
    for values in [["dog"], True], ["dog", "a"], [None, None]: ask("tick", *values), ask("price", *values)
    assert "Traceback" not in capfd.readouterr().err

def test_the_page_asks_for_boxes_if_there_is_no_detector(noise, monkeypatch, capsys):
    "Without a detector, the page first says how to go on, and no path; it shows a caption when there is a box."
    def none(*_): raise NocError("/root/.cache/weights.pth: no detector here")
    monkeypatch.setattr(app, "detector_for", none)
    view = _Studio(NovelCaptioner.from_pretrained("toy", device="cpu")).upload(noise)
    html = _stage(view)
    assert view.waits.startswith("Draw a box") and "send the photo together with a file of detections" in html
    assert ".cache" not in html and 'class="caption"' not in html
    drawn = _stage(_with_box(view, "dog", [.1, .1, .5, .5]))
    assert "Draw a box" not in drawn and drawn.count('class="caption"') == 2

def test_photos_share_one_file_of_detections(tmp_path):
    "Photos may come with one file of detections, which is read for each of them."
    photos, boxes = [tmp_path/"a.jpg", tmp_path/"b.png"], tmp_path/"found.json"
    assert _paths(photos) == ((photos[0],), (photos[1],))
    assert _paths([photos[0], boxes, photos[1]]) == ((photos[0], boxes), (photos[1], boxes))
    for files in [boxes], [*photos, boxes, tmp_path/"more.csv"]:
        with pytest.raises(NocError, match="expected photos, and at most one file"): _paths(files)

def test_the_page_limits_the_size_of_unpacked_detections(noise):
    "The page limits the size of unpacked detections to 20 uploads; the commands have a higher limit."
    studio, file = _Studio(NovelCaptioner.from_pretrained("toy", device="cpu")), noise.parent/"found.json.gz"
    _page(studio, max_mb=1)
    assert studio.most_unpacked == 20 << 20
    studio.most_unpacked = 1 << 20
    found = dict(images=[dict(id=1, file_name=noise.name, width=90, height=60)], annotations=[])
    file.write_bytes(gzip.compress(b" "*(2 << 20) + json.dumps(found).encode()))
    with pytest.raises(NocError, match="found.json.gz: .*holds more than 1,048,576 bytes"): studio.upload(noise, file)
    assert read_json(file) == found

def test_equal_photos_keep_the_detections_of_their_names(noise):
    "Gradio stores equal files in one folder; each photo still gets the detections with its own name."
    other = noise.with_name("b.png")
    other.write_bytes(noise.read_bytes())
    studio, file = _Studio(NovelCaptioner.from_pretrained("toy", device="cpu")), noise.with_name("found.json")
    for photo in noise, other, noise:
        image = dict(id=1, file_name=photo.name, width=90, height=60)
        found = dict(image_id=1, category_id=2, bbox=[9, 18, 45, 36], score=.9)
        file.write_text(json.dumps(dict(images=[image], annotations=[found])))
        view = studio.upload(photo, file)
        assert (view.name, view.regions.labels.tolist()) == (photo.name, [2])
