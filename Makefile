# What people and CI run. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
# The lake's extensions need another DuckDB than the newest, so it has an environment of its own.
LAKE_VENV := .venv-lake
LAKE_STAMP := $(LAKE_VENV)/.setup-stamp
# Debian keeps the server out of the search path.
POSTGRES := $(firstword $(wildcard /usr/lib/postgresql/*/bin/postgres) $(shell command -v postgres))

# On Linux the package index answers a bare `torch` with the CUDA build, several GB that a machine
# without a GPU cannot use. A pinned release is satisfied by a CPU wheel wherever pip is pointed at
# one (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL): `2.13.0+cpu` sorts above the plain `2.13.0`. On a GPU
# machine say which build you want, options included:
#   make setup TORCH='torch --index-url <the index of your CUDA version>'
TORCH ?= torch==2.13.0

# One thread per process: the numeric libraries' own threads fight over the same cores.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := passive
# Compiling the sources and the assertions anew takes each process of a test run ten seconds.
export PYTHONDONTWRITEBYTECODE :=

WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
ACCURACY_ARGS ?=
# buf in the version proto/package-lock.json pins.
BUF := proto/node_modules/.bin/buf
# What proto-breaking compares with; empty: the newest tag vX.Y.Z, or the protos released last.
BASE ?=
DOCKERFILE := deploy/Dockerfile
LAKE_TESTS := $(addprefix tests/,contract/test_contract_catalog_lake.py contract/test_contract_catalog_admin.py unit/catalog/test_catalog_lake.py)
BENCHMARKS := $(sort $(wildcard tests/benchmarks/bench_*.py))
SERVING_BENCHMARKS := $(sort $(wildcard tests/benchmarks/bench_serving_*.py))
TRAINING_BENCHMARKS := $(sort $(wildcard tests/benchmarks/bench_training_*.py))
SEARCH_BENCHMARKS := $(sort $(wildcard tests/benchmarks/bench_search*.py))

# `make profile-gpu` (profile-h200 is its H200 case). With FORETOKEN, a command such as
# 'python3 -m foretoken.app' where it is installed already, nothing is fetched; which packages that
# takes: docs/how-to/profile-a-gpu-without-network.md.
DEVICE ?= h200_sxm
PROFILE_HOME ?= build/profile-$(firstword $(subst _, ,$(DEVICE)))
PROFILE_DATASET ?= $(PROFILE_HOME)/dataset
# MODEL:LAYERS, 0 for all, whose whole steps are timed.
ifdef MODELS
CLOSURE_MODELS ?= $(MODELS:%=%:0)
endif
MODELS ?= llama-3.1-8b llama-3.1-70b qwen3-32b qwen3-30b-a3b
CLOSURE_MODELS ?= llama-3.1-8b:0 qwen3-30b-a3b:8 llama-3.1-70b:6
CLOSURE_STEPS ?= $(if $(filter cpu,$(DEVICE)),,prefill:1x512 prefill:1x2048 prefill:4x2048 \
	decode:1x1024 decode:1x1024:graph decode:32x1024:graph decode:64x4096:graph training:1x2048 \
	training:4x1024)
TP_SIZES ?= 1,2,4,8
# Seconds for operators, and for each model's whole steps: all together takes under 8 minutes.
PROFILE_CAP_S ?= 270
CLOSURE_CAP_S ?= 30
PROFILE_ARGS ?=
ifdef FORETOKEN
PROFILE_NEEDS :=
else
FORETOKEN := $(BIN)/foretoken
PROFILE_NEEDS := setup
endif

# $(call missing,tool,what was to be checked): a tool that is not here is an error in CI only.
missing = { echo "SKIPPED $(2): $(1) is not on this machine" >&2; test -z "$${CI:-}"; }

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

.PHONY: setup
setup: $(STAMP) ## make .venv with everything in it; quick when it is fresh

# The development group is read here because pip before 25.1 has no --group.
# -qq: a machine's own package folders may warn about each package they do not have.
$(STAMP): pyproject.toml starter/pyproject.toml
	@echo "setting up $(VENV); two minutes or three when it is new"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Foretoken needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")' > $(VENV)/dev-group.txt
	$(BIN)/python -m pip install -qq $(TORCH)
	$(BIN)/python -m pip install -qq --editable ./starter --editable '.[all]' --requirement $(VENV)/dev-group.txt
	@echo "compiling the default serving engine and the models' loops, which first questions would wait for"
	$(BIN)/python -c 'from foretoken.simulator.serving.compilation import compile_engines as c; c(())'
	$(BIN)/python -c 'from foretoken.predictor.compilation import compile_loops as c; c()'
	@touch $@

.PHONY: setup-lake
setup-lake: $(LAKE_STAMP) ## make .venv-lake: the catalog as a lake, with the oldest DuckDB we support

$(LAKE_STAMP): pyproject.toml
	@echo "setting up $(LAKE_VENV); a minute when it is new"
	test -x $(LAKE_VENV)/bin/python || $(PYTHON) -m venv $(LAKE_VENV)
	$(LAKE_VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["lake"], sep="\n")' > $(LAKE_VENV)/lake-group.txt
	$(LAKE_VENV)/bin/python -m pip install -qq --editable '.[lake]' --requirement $(LAKE_VENV)/lake-group.txt
	@touch $@

.PHONY: demo
demo: setup ## four services on loopback: profile this CPU, train, simulate, draw a report
	$(BIN)/foretoken demo $(DEMO_ARGS)

# The engine is compiled where that was not done, while tests are collected: else every process that
# comes to it meanwhile, and the workers of a search, compile it for themselves.
COMPILE := $(BIN)/python -c 'from foretoken.simulator.serving.compilation import compile_engines as c; c()'

.PHONY: test
test: setup ## run what a change breaks first, in minutes; test-slow has the rest
	@$(COMPILE) & \
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal -m 'not slow' $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: setup ## run what takes long: real processes, whole profiles, long searches, further cases, Ray, properties on more examples, the catalog as a lake where PostgreSQL is installed
	@$(COMPILE) & \
	status=0; $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal -m slow $(PYTEST_ARGS) || status=$$?; \
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal -m 'not slow' --hypothesis-profile=slow $(PYTEST_ARGS) \
	  --deselect tests/properties/test_hostile_requests.py tests/properties || status=$$?; \
	if test -n "$(POSTGRES)"; then $(MAKE) --no-print-directory test-lake || status=$$?; \
	else echo "SKIPPED the catalog as a lake: PostgreSQL is not on this machine" >&2; fi; exit $$status

.PHONY: test-lake
test-lake: setup-lake ## run the catalog's tests as a lake (needs PostgreSQL) and with its DuckDB
	$(LAKE_VENV)/bin/pytest --numprocesses $(WORKERS) --dist loadfile $(LAKE_TESTS)

KUBERNETES_TESTS := $(wildcard tests/architecture/test_deploy*.py tests/unit/profiler/test_profiler_cluster*.py) tests/e2e/test_profile_on_kubernetes.py tests/e2e/test_shared_profiles.py
.PHONY: test-kubernetes
test-kubernetes: setup ## everything about Kubernetes, slow ones too: manifests and moves, rights, profiles by real processes on the tests' API server; FORETOKEN_TEST_KUBECONFIG names a cluster that manifests are applied to
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS) $(KUBERNETES_TESTS)

MUTATE_ARGS ?=
.PHONY: mutate
mutate: setup ## change MODULE (or a package, or several) in random places: which do its own tests miss?
	@test -n "$(MODULE)" || { echo "name one: make mutate MODULE=foretoken.predictor.transfer.efficiency_prior" >&2; exit 2; }
	nice $(BIN)/python tests/mutation/mutate.py $(MODULE) $(MUTATE_ARGS)

.PHONY: check
check: check-style check-types check-imports check-sizes check-protos proto-breaking check-docker check-manifests ## everything that can be judged without running the services

.PHONY: check-style
check-style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: check-types
check-types: setup
	$(BIN)/mypy

.PHONY: check-imports
check-imports: setup
	$(BIN)/python tests/architecture/lint_imports.py --no-logo

.PHONY: check-sizes
check-sizes: setup
	$(BIN)/pytest --quiet tests/architecture/test_size_limits.py tests/architecture/test_names.py

$(BUF): proto/package-lock.json
	npm --prefix proto install --no-save --silent --no-fund --no-audit
	@touch $@

.PHONY: check-protos
check-protos:
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory $(BUF) && echo "buf lint" && $(BUF) lint proto; \
	else $(call missing,npm,buf lint of the protos); fi

.PHONY: proto-breaking
proto-breaking: ## compare the protos with those of the last release, or of BASE: may its clients still talk to us?
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory $(BUF) && echo "buf breaking" && \
	$(PYTHON) proto/breaking.py $(if $(BASE),--against $(BASE)); \
	else $(call missing,npm,that the protos break no client); fi

.PHONY: proto-release
proto-release: $(BUF) ## make the present protos those that clients without release tags are checked with
	$(PYTHON) proto/breaking.py --freeze

.PHONY: proto-frozen
proto-frozen: $(BUF) ## are the released protos those of this commit, as those of a release have to be?
	$(PYTHON) proto/breaking.py --frozen

# The version stands in clients/python/src/foretoken/__init__.py; the tag has to agree with it.
VERSION ?=
.PHONY: release-prepare
release-prepare: setup proto-breaking proto-release ## write VERSION where it stands, close the changelog's section, freeze the protos; then commit and tag
	$(BIN)/python deploy/release.py --prepare $(VERSION)

.PHONY: release
release: setup proto-breaking proto-frozen ## make dist/ of the tag at this commit: source archive, wheel, notes, commands of the images (VERSION: there is no tag yet)
	$(BIN)/python deploy/release.py $(VERSION)

.PHONY: check-docker
check-docker: setup
	$(BIN)/hadolint $(DOCKERFILE)

.PHONY: check-manifests
check-manifests: setup
	@if command -v kubectl >/dev/null; then echo "kubectl kustomize | kubernetes-validate"; \
	$(BIN)/pytest --quiet tests/architecture/test_deploy.py; \
	else $(call missing,kubectl,the validation of the Kubernetes manifests); fi

.PHONY: docs-check
docs-check: setup ## run the code blocks of README and docs, follow their links
	$(BIN)/pytest --quiet tests/architecture/test_docs.py

.PHONY: bench
bench: setup ## run the benchmarks; they print ratios and judge nothing
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

# How long, and --faults to kill a service every 20 seconds.
SOAK_ARGS ?= --seconds 1800
.PHONY: soak
soak: setup ## four services under all loads at once, half an hour: p99 of predictions, memory, threads, descriptors, what was lost
	@$(BIN)/python tests/benchmarks/soak.py $(SOAK_ARGS)

.PHONY: lake-drill
lake-drill: setup-lake ## writers and readers of a lake killed in turn, and PostgreSQL restored to a moment (needs PostgreSQL)
	@$(LAKE_VENV)/bin/python tests/benchmarks/lake_drill.py $(DRILL_ARGS)

.PHONY: bench-serving
bench-serving: setup ## serving simulations beside measured engines and other simulators (minutes)
	@for script in $(SERVING_BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

.PHONY: bench-training
bench-training: setup ## training simulations beside measured steps and other simulators (minutes)
	@for script in $(TRAINING_BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

.PHONY: bench-training-search
bench-training-search: setup ## training strategies per second, partition times, rankings beside measured steps (minutes)
	@$(BIN)/python tests/benchmarks/bench_training_search.py
	@$(BIN)/python tests/benchmarks/bench_error_correlation.py
	@$(BIN)/python tests/benchmarks/bench_memory_bound_errors.py

.PHONY: bench-search
bench-search: setup ## searches: best deployments, capacity, scaling, beside measured rows and other tools (minutes)
	@for script in $(SEARCH_BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

.PHONY: bench-first-minute
bench-first-minute: setup ## what the first questions take in a new home, and with NVIDIA's tables where WHEEL names them
	@OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_first_minute.py $(if $(WHEEL),--wheel $(WHEEL))

.PHONY: bench-models
bench-models: setup ## all current models: parameters, bytes, fit, a decoding step and what of it is measured (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_models.py $(if $(DEVICES),--devices $(DEVICES))

.PHONY: bench-accuracy
bench-accuracy: setup ## the predictor's errors by operator and split, beside its peers (minutes)
	@PYTHONPATH=tests/benchmarks $(BIN)/python -m accuracy $(ACCURACY_ARGS)

# What the catalog of PROFILE_HOME or PROFILE_DATASET has is not timed again: run it until nothing is
# left. A step that fails does not keep the others from running, nor what is there from being written.
.PHONY: profile-gpu
profile-gpu: $(PROFILE_NEEDS) ## profile DEVICE in under 8 minutes; again goes on where it stopped
	@FORETOKEN='$(FORETOKEN) --home $(PROFILE_HOME)/home' FOLDER='$(PROFILE_HOME)' DATASET='$(PROFILE_DATASET)' \
	DEVICE='$(DEVICE)' MODELS='$(MODELS)' TP_SIZES='$(TP_SIZES)' ARGS='$(PROFILE_ARGS)' CAP_S='$(PROFILE_CAP_S)' \
	CLOSURE_MODELS='$(CLOSURE_MODELS)' CLOSURE_STEPS='$(CLOSURE_STEPS)' CLOSURE_CAP_S='$(CLOSURE_CAP_S)' \
	sh deploy/profile_gpu.sh

.PHONY: profile-h200
profile-h200: profile-gpu ## the same on an H200 (DEVICE=h100_sxm and others work, too)

.PHONY: proto
proto: setup ## make the committed stubs anew from proto/
	$(BIN)/python proto/generate.py

# The wheel of NVIDIA's tables, and an older one, if they are at hand; else pip downloads them.
WHEEL ?=
OLDER ?=
.PHONY: starter
starter: setup ## make starter/'s measurements anew from NVIDIA's WHEEL (minutes); starter-prior makes what is learned from them
	$(BIN)/python starter/make_starter.py $(if $(WHEEL),--wheel $(WHEEL)) $(if $(OLDER),--older $(OLDER))

.PHONY: starter-prior
starter-prior: setup ## learn starter/'s typical efficiencies and tunings anew, as a new revision of features or of training asks for (ten CPU minutes)
	$(BIN)/python starter/make_starter.py --prior

.PHONY: page-assets
page-assets: setup ## make the scripts that draw charts anew, from the package that has them
	$(BIN)/python -m pip install -qq vl-convert-python==1.9.0.post1
	$(BIN)/python -c 'import gzip, vl_convert as v; open("clients/python/src/foretoken/page/static/vega.js.gz", "wb").write(gzip.compress(v.javascript_bundle().encode(), 9, mtime=0))'

.PHONY: metrics-reference
metrics-reference: setup ## make docs/reference/metrics.md anew from the registry of metrics
	$(BIN)/python -m foretoken.domain.metrics.reference > docs/reference/metrics.md

.PHONY: monitoring
monitoring: setup ## make the alerts, the dashboards and their reference anew from the table of Prometheus metrics
	$(BIN)/python deploy/monitoring/alerts.py deploy/k8s/components/alerts/alerts.yaml
	$(BIN)/python deploy/monitoring/dashboards.py deploy/k8s/components/dashboards
	$(BIN)/python deploy/monitoring/reference.py docs/reference/service-metrics.md

.PHONY: readme-picture
readme-picture: setup ## draw the README's picture of an answer anew; needs Chromium
	$(BIN)/python tests/benchmarks/answer_picture.py docs/pictures/answer.png

.PHONY: docs
docs: setup ## make the keys in docs/reference anew from the fields of scenarios, and the calls from the protos
	$(BIN)/python -m foretoken.app.scenario_file docs/reference/scenario-files.md
	$(BIN)/python -m foretoken.app.web.api_reference docs/reference/http-api.md docs/reference/http-api-messages.md
	$(BIN)/python -m foretoken.domain.results.accuracy docs/reference/accuracy.md

.PHONY: format
format: setup ## put every file into its canonical form
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

.PHONY: clean
clean: ## remove what builds and tests leave behind; .venv stays
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
