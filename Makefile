# make test        set-up, every chapter, every repository check and test, without any data
# make test-data   the chapters, pages and tests that read real COCO: NOC_DATA=DIR make test-data
# make test-fast   repository checks and five chapters, in under three minutes
# make reproduce   set-up, then the whole method on the toy world: rows and tables in _runs/toy
# make notebooks   execute all notebooks in order and keep their outputs (NB=02_attention: one), then README.md
# make readme      README.md and its pictures from nbs/index.ipynb
# make lab         JupyterLab on the chapters
# make book        the site of the book in _site: all chapters, a search, the reference; a broken link stops it
# make export      noc_nb/*.py from the notebooks
# make ship        a finished run as a pipeline of the package: make ship RUN=_runs/lite NAME=lite
# make scale       every step of the coco preset on files of COCO's size: _runs/scale, results/scale.jsonl (a quarter of an hour; goes on)
# make hub        words for any model, in _hub: generate(custom_generate=_hub, trust_remote_code=True) loads it, pip install ./_hub installs it
# make release    sdist and wheel of the last commit and the wheel of _hub in dist, checked and tried in fresh environments; publishes nothing
# make gpu        what waits for a GPU, as rows in _runs/gpu/gpu.jsonl: search and generate (PEER=PYTHON: beside transformers 4.55.4), training steps, the page, a profile, and with NOC_DATA the captioner at the paper's size
# make words      10,000 drawn cases of words in decoded texts (CASES=…)
# make drawn      300 drawn folders with broken photos, 500 drawn folders of labels, 200 drawn tables of captions, 200 drawn cases of each promise (CASES=…)
# make times       seconds of each notebook; fails above LIMIT=30 (22_method, the whole method: twice that)
# make venv        set-up alone: everything lives in .venv (PYTHON=python3.12: with this Python)
# make clean       remove what builds and tests leave behind (.venv and _runs stay)

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
LIMIT ?= 30
BIN := $(VENV)/bin
DONE := $(VENV)/.done
TOOLS := $(VENV)/.tools
SETUP := .ci/setup settings.ini setup.py pyproject.toml
FAST := ^(00_core|11_heldout|02_attention|09_grid|44_novelty)\.ipynb$$
# the chapters that read real COCO if it is there; tests/test_results.py executes the pages of results
READING := grep -lE '"coco.* = find_data' nbs/*.ipynb nbs/[!e]*/*.ipynb | sed 's|.*/||' | paste -sd'|'
NOTEBOOKS = $(if $(NB),nbs/$(NB).ipynb,$(shell python3 tests/book.py))

# two notebooks at a time on two cores: one thread each
export OMP_NUM_THREADS ?= 1
# a bar library warns about a missing widget, with a path of this machine; no notebook needs that
export PYTHONWARNINGS ?= ignore:IProgress not found

.DEFAULT_GOAL := help
.PHONY: help venv test test-data test-fast reproduce notebooks readme lab book export ship scale hub release gpu words drawn times clean

help:
	@sed -n 's/^# make/make/p' Makefile

venv: $(DONE)
$(DONE): $(SETUP)
	bash .ci/setup $(VENV) $(PYTHON)
	@touch $@

$(TOOLS): $(DONE)
	bash .ci/setup $(VENV) $(PYTHON) tools
	@touch $@

# pytest with two files at a time
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations 10

test: export NOC_DATA :=
test: $(TOOLS)
	$(BIN)/nbdev_test --n_workers 2 --timing
	$(PYTEST)

test-data: $(TOOLS)
	@[ -d "$${NOC_DATA:-}" ] || { echo "NOC_DATA: expected a folder with COCO's layout; type NOC_DATA=DIR make test-data"; exit 1; }
	$(BIN)/nbdev_test --n_workers 2 --timing --file_re "^($$($(READING)))$$"
	$(PYTEST) -m data

test-fast: venv
	$(BIN)/nbdev_test --n_workers 2 --file_re '$(FAST)'
	$(BIN)/python -m pytest -q -m "not slow"

reproduce: venv
	$(BIN)/noc_reproduce --preset toy --out _runs/toy --resume

notebooks: export
	@[ -n "$${NOC_DATA:-}" ] || echo "note: NOC_DATA is not set, so the cells that read real COCO will say that they were skipped"
	trap $(BIN)/nbdev_clean EXIT; PYTHONHASHSEED=0 $(BIN)/python -m nbconvert --to notebook --execute --inplace $(NOTEBOOKS); \
	$(BIN)/python -m nbconvert --to notebook --inplace --CoalesceStreamsPreprocessor.enabled=True $(NOTEBOOKS)  # one output for all that a cell prints
	$(BIN)/python tests/readme.py

readme: venv
	$(BIN)/python tests/readme.py

lab: venv
	$(BIN)/jupyter lab nbs

book: venv
	$(BIN)/python tests/website.py

export: venv
	$(BIN)/nbdev_export

ship: venv
	$(BIN)/python -c "from noc_nb.models.pipeline import NovelCaptioner as N; N.from_pretrained('$(RUN)/pipeline').save_pretrained('noc_nb/assets/models/$(NAME)', half=True)"

scale: venv
	$(BIN)/python benchmarks/scale.py

hub: export
	$(BIN)/python tests/hub.py

release: venv
	@[ -z "$$(git status --porcelain)" ] || { echo "commit first: a release is what git holds"; exit 1; }
	rm -rf dist
	work=$$(mktemp -d); trap 'rm -rf $$work' EXIT; git archive HEAD | tar x -C $$work; $(BIN)/python tests/stubs.py $$work/noc_nb; \
	$(BIN)/python -m build --no-isolation --outdir dist $$work; \
	$(BIN)/python $$work/tests/hub.py $$work/_hub; $(BIN)/python -m build --no-isolation --wheel --outdir dist $$work/_hub
	NOC_DIST=dist $(BIN)/python -m pytest -q tests/test_installed.py tests/test_repo.py
	@v=$$(sed -n 's/^version = //p' settings.ini); printf '%s\n' "" "dist holds $$v, and nothing is published. To publish it, type:" \
	"  git tag -a v$$v -m v$$v && git push origin v$$v" "  pipx run twine upload dist/noc_nb-$$v* dist/noc_words-$$v*"

# it goes on where it stopped; GPU=--small tries it without a GPU
GPU ?= --minutes 13
gpu: venv
	$(BIN)/python benchmarks/gpu.py --out _runs/gpu $(if $(PEER),--peer $(PEER)) $(if $(NOC_DATA),--data $(NOC_DATA)) $(GPU)

words: venv
	WORDS_CASES=$(or $(CASES),10000) $(BIN)/python -m pytest -q -n 2 tests/test_words.py

drawn: venv
	DRAWN_CASES=$(or $(CASES),300) DRAWN=$(or $(CASES),500) DRAWN_TABLES=$(or $(CASES),200) PROMISE_CASES=$(or $(CASES),200) $(BIN)/python -m pytest -q -n 2 \
	tests/test_broken.py tests/test_exports.py tests/test_promises.py -k "broken or drawn or cell"

times: venv
	$(BIN)/nbdev_test --n_workers 0 --timing | \
	awk '{print} / secs$$/ && $$(NF-1) > (/^22_method/ ? 2 : 1)*$(LIMIT) {late = 1} END {if (late) {print "over $(LIMIT) s: make the notebook lighter"; exit 1}}'

clean:
	rm -rf _proc _docs _site _site_build _hub build dist *.egg-info .pytest_cache .hypothesis
	find nbs noc_nb tests -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf
