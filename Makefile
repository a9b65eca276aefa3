# make demo    from a fresh checkout to a conversation that resumes from the cache, and a link ~/.local/bin/pyctl;
#              PYCTL_RELEASE=DIR or a URL installs the wheels there, and nothing is compiled
# make serve   what make demo installs, and a server: its page at http://127.0.0.1:8080; ARGS="-m FILE" for your model
# make check   lint, types, unit tests, and two smoke tests on real models: 90 seconds on 2 cores
# make test    everything that is tested
# make clients the programs of pyctl launch, for their tests: npm, 3 minutes, 3 GB
# make contract LLAMA_SERVER=/path/to/llama-server    the same 1,400 requests to both (bench/results/contract.md)
# make rows LLAMA_SERVER=/path/to/llama-server    start, memory and speed of both on a CPU; fails below 0.98, or the
#              bound of a row with a reason; ROWS=--busy judges only what a busy machine does not decide
# make peer    llama-server of the pinned release in build/peer/bin, 6 minutes on 2 cores, for the two above
# make real    real models, 850 MB: tests of all three, 15 minutes; LLAMA_SERVER=... compares them with that server
# make matrix  every Python from 3.10 to 3.13 that is installed, each in an environment under build/matrix: tests and a
#              soak; PYTHONS="3.12 3.13" and STAGES="model smoke" choose
# make unit | model | smoke | soak    one stage of the matrix; MINUTES=3 SEED=5 are the soak's
# make simulate    recorded sessions on a simulated machine with faults; HOURS=120 SEED=5 choose
# make lint | bench | build | clean
# EXTRAS=test,page    with what tests of the page in a browser need; the browser is the system's chromium
PYTHON ?= python3
EXTRAS ?= test
VENV ?= .venv
BIN := $(VENV)/bin
COMMA := ,
BUILT := $(VENV)/built
SET_UP := $(VENV)/set-up
INSTALLED := $(VENV)/installed-$(subst $(COMMA),-,$(EXTRAS))
OF_EXTRAS := import importlib.metadata as m; \
  print(*(r.partition(';')[0] for r in m.requires('pyctl-llama') if r.partition('extra == ')[2][1:-1] in '$(EXTRAS)'.split(',')))

SMOKE := tests/process/test_sdk_openai.py tests/model/llama/test_families.py

# A refusal that takes longer, or memory that grows more, is wrong on any machine; lives of a short soak have no rests.
SOAK := --patience 60 --growth-limit 400
MINUTES ?= 2
HOURS ?= 120
SEED ?= 7

# Tests start hundreds of processes: each would compile all modules again where an environment forbids to keep them.
export PYTHONDONTWRITEBYTECODE :=

# Programs that pyctl launch starts, and SDKs for Node.js, for tests/process. aider brings the versions of all it needs.
CLIENTS := .venv/clients
NPM_CLIENTS := @anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.15.10
NPM_CLIENTS += @github/copilot@1.0.102 @kilocode/cli@7.7.7 @anthropic-ai/sdk@1.14.0 openai@7.59.0
PIP_CLIENTS := aider gptme vibe
aider := aider-chat==0.86.2; python_version < '3.13'
gptme := gptme==0.35.1
vibe := mistral-vibe==3.0.2; python_version >= '3.12'

# What both servers are compared with: without what neither the rows nor the contract use.
PEER := build/peer/bin/llama-server
PEER_FLAGS := -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
PEER_FLAGS += -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
ROWS ?=

PYTEST = $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: demo serve install check quick test tests real clients lint bench contract rows peer build clean matrix unit model smoke soak \
  simulate

# Not what the tests need, which is twice as much again. A script finds the installed pyctl, not that of the checkout.
demo:
	@$(MAKE) --no-print-directory install EXTRAS=demo
	$(BIN)/python tools/demo.py
	@$(BIN)/python tools/link.py $(BIN)/pyctl

# The server needs none of the extras. Ctrl-C stops it, and make reports that as an interrupt.
serve: $(BUILT) $(SET_UP)
	@$(BIN)/python tools/link.py --only $(BIN)/pyctl
	@exec $(BIN)/pyctl serve $(ARGS)

install: $(BUILT) $(INSTALLED) $(SET_UP)

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# The editable install follows changes in pyctl/ by itself; csrc/ and the pin need a new build.
$(BUILT): $(BIN)/pip pyproject.toml CMakeLists.txt vendor/llama.cpp/pin.txt $(wildcard csrc/* csrc/*/*)
ifdef PYCTL_RELEASE
	$(BIN)/pip install --disable-pip-version-check --find-links "$(PYCTL_RELEASE)" \
	  --only-binary pyctl-llama,llama-cpp-python pyctl-llama
else
	@{ c++ --version || g++ --version || clang++ --version; } >/dev/null 2>&1 && \
	  test -e "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || { \
	  echo "a C++ compiler or Python's headers are missing; the packages are in docs/install.md, From the source"; exit 2; }
	@echo "installing; llama.cpp is compiled for the CPU unless pip's cache has it (about 7 minutes on 2 cores)"
	$(BIN)/python tools/install.py $(BIN)/pip install --disable-pip-version-check --editable .
endif
	@touch $@

# One line on a machine without an NVIDIA card. A failure leaves pyctl on the CPU, and the next make tries again.
$(SET_UP): $(BUILT)
	@$(BIN)/pyctl setup --yes && touch $@ || echo "pyctl runs on the CPU until pyctl setup succeeds"

# Other extras need no new build.
$(INSTALLED): pyproject.toml | $(BUILT)
	$(BIN)/python -c "$(OF_EXTRAS)" | xargs $(BIN)/pip install --disable-pip-version-check
	@touch $@

clients: $(CLIENTS)/installed

$(CLIENTS)/installed: Makefile
	npm install --no-save --no-audit --no-fund --prefix $(CLIENTS) $(NPM_CLIENTS)
	$(foreach name,$(PIP_CLIENTS),$(PYTHON) -m venv $(CLIENTS)/$(name) && \
		$(CLIENTS)/$(name)/bin/pip install --quiet --disable-pip-version-check "$($(name))" &&) true
	@touch $@

test: install
	$(MAKE) --no-print-directory --jobs 2 lint tests

# Of the real models, all runs have the smallest: 98 MB, fetched once. Where it cannot be fetched its tests are skipped.
tests: install
	@$(BIN)/python -m tools.real_models smollm2 || :
	$(PYTEST)

check: install
	$(MAKE) --no-print-directory --jobs 2 lint quick

quick: install
	PYCTL_QUICK=1 $(BIN)/python -m pytest -q -n auto -m "unit or smoke" --max-worker-restart 0 tests/unit $(SMOKE)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

real: install
	$(BIN)/python -m tools.real_models
	PYCTL_REAL=1 $(BIN)/python -m pytest -s --timeout 900 tests/real

# One wheel of llama.cpp serves every Python; pip's cache would give it to its own Python only.
matrix: install
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/matrix "$$(grep -o '^llama-cpp-python==[^ ]*' vendor/llama.cpp/pin.txt)"
	PIP_FIND_LINKS="$$PIP_FIND_LINKS build/matrix" $(BIN)/python -m tools.matrix $(PYTHONS) \
	  $(if $(STAGES),--stages $(STAGES)) $(if $(OPTIONAL),--optional)

unit model: install
	$(PYTEST) -m $@ tests/$@

smoke: install
	$(PYTEST) -m smoke $(SMOKE)

soak: install
	$(BIN)/python -m bench.soak --minutes $(MINUTES) --seed $(SEED) $(SOAK)

simulate: install
	$(BIN)/python -m bench.simulate --hours $(HOURS) --seed $(SEED)

# Tables go to bench/results. LLAMA_SERVER=/path/to/llama-server puts that server beside ours.
bench: install
	$(BIN)/python -m bench --keep $(if $(LLAMA_SERVER),--llama-server $(LLAMA_SERVER))

contract: install
	@test -x "$(LLAMA_SERVER)" || { echo "give the binary: make contract LLAMA_SERVER=/path/to/llama-server"; exit 2; }
	LLAMA_SERVER=$(LLAMA_SERVER) $(BIN)/python -m pytest -q -s tests/contract tests/unit/tools/test_peer_flags.py

# One thread: CPU seconds of several contain the time in which they spin for each other.
rows: install
	@test -x "$(LLAMA_SERVER)" || { echo "give the binary: make rows LLAMA_SERVER=/path/to/llama-server"; exit 2; }
	$(BIN)/python -m bench.rows --llama-server "$(LLAMA_SERVER) -nr" --flags "-t 1" $(ROWS)

peer: $(PEER)

# The machine's own instructions, as the wheel of llama.cpp has them. Where there is no cmake, pip has one.
$(PEER): vendor/llama.cpp/pin.txt | $(BUILT)
	$(BIN)/python vendor/llama.cpp/unpack.py --all build/llama.cpp
	command -v cmake >/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check cmake
	PATH="$$PATH:$(abspath $(BIN))" && cmake -S build/llama.cpp -B build/peer -DCMAKE_BUILD_TYPE=Release $(PEER_FLAGS) && \
	  cmake --build build/peer --target llama-server --parallel 2
	@touch $@

build: $(BIN)/pip
	$(BIN)/pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

# The link of make demo would lead nowhere; one of another installation stays.
clean:
	@[ "$$(readlink "$$HOME/.local/bin/pyctl")" != "$(abspath $(BIN))/pyctl" ] || rm "$$HOME/.local/bin/pyctl"
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
