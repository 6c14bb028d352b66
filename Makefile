# One command per task. Start with `make setup`; `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

# What `make test` runs: the tiers unit and pr, or tiers, folders and files by name, as in `make test SUITE=tests/core`.
SUITE ?= unit pr
BENCH ?= journal
CAMPAIGN ?= register
SEEDS ?= 1000
KILLS ?=
# More arguments for pytest, `bench`, `soak` and the scripts.
ARGS ?=
# The root of the Python files that `make proto` writes; a rule test writes them elsewhere and compares.
OUT ?= src
# What the contract may not break: the last one that was accepted.
ACCEPTED := proto/strata/v1/coordinator.binpb

# Which build of it (CPU, CUDA, ROCm) is the index's choice, so it is pinned by version alone: docs/decisions/0007.
TORCH := 2.13.0
# Of tests only: adapters written by one are read by the other. Both name torch, so they come with it and without their own.
PEFT := 0.21.2
ACCELERATE := 1.15.0
# The extra `quantised`. It names torch too.
BITSANDBYTES := 0.50.2
APART := torch==$(TORCH) peft==$(PEFT) accelerate==$(ACCELERATE) bitsandbytes==$(BITSANDBYTES)

# The campaigns of `make weekly`: kills of real processes, and seeds of the simulations.
WEEKLY_KILLS := train-kill.40 train-kill-mesh.40 train-noise.40 coordinator-kill.40 fleet-hub-kill.40 fleet-agent-kill.20 mixed-kill.12
WEEKLY_SEEDS := lineage.2000 fleet-schedule.10000 train-sim.1000

PYTEST := $(BIN)/python -m pytest
TIERS := $(BIN)/python -m tests.tiers

.DEFAULT_GOAL := help
.PHONY: help setup check lint rules test ledger tsan weekly weekly-tests weekly-regressions $(WEEKLY_KILLS) $(WEEKLY_SEEDS) weekly-arm64 newest lowest gpu cuda-lane release bench soak docs services constraints proto contract diagrams pictures families reference format clean installed

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the pinned packages; does nothing when nothing changed

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps $(APART)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

check: lint rules ## all static checks: lint and the contract, then rules

lint: installed contract ## ruff, mypy, the import contracts and the contract of the coordinator
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

contract: installed ## refuse a change of the .proto that breaks workers, or a field without a comment
	$(BIN)/buf lint proto
	$(BIN)/buf breaking proto --against $(ACCEPTED)

rules: installed ## the tests of the rules that the tree itself has to keep
	$(TIERS) run check

test: installed ## the tests; SUITE=tests/core, a file or a tier for a part of them, ARGS= for pytest
	$(TIERS) run $(SUITE) --pytest="$(ARGS)"

ledger: installed ## take the last runs of tests into the durations, the ledger of merge and docs/proof.md
	$(TIERS) record

tsan: installed ## the conformance suite with the worker in C++ under ThreadSanitizer
	STRATA_TEST_CPP_PRESET=tsan $(PYTEST) tests/conformance/coordinator -k cpp $(ARGS)

# What is too long for every change, in a random order. The campaigns add what they showed to docs/campaign-record.md. One after
# the other, the next also if one is red: then it ends with a status that is not 0.
weekly: installed ## inference engines (vLLM), longest tests, newest packages, benchmarks beside the last release, kill campaigns, an agent on arm64 under qemu; as root, hours on two cores
	$(MAKE) --keep-going -j1 --no-print-directory weekly-tests weekly-regressions tsan newest $(WEEKLY_KILLS) $(WEEKLY_SEEDS) weekly-arm64

weekly-tests: installed
	$(TIERS) run weekly --shuffle $$(date +%G%V)

# Status 77, so not green, until a release is recorded.
weekly-regressions: installed
	$(BIN)/python -m bench.regressions

$(WEEKLY_KILLS): installed
	$(BIN)/python -m soak $(basename $@) --kills $(subst .,,$(suffix $@))

$(WEEKLY_SEEDS): installed
	$(BIN)/python -m soak $(basename $@) --seeds $(subst .,,$(suffix $@))

weekly-arm64:
	scripts/e2e-arm64.sh

newest: installed ## tests with the newest tinker, cookbook, transformers, openai, and docs/support.md; ARGS=tinker for one, ARGS=engines for vLLM
	$(BIN)/python scripts/versions.py newest --apart "$(APART)" $(ARGS)

lowest: installed ## tests with the lowest versions that pyproject.toml allows
	$(BIN)/python scripts/versions.py lowest --apart "$(APART)" $(ARGS)

gpu: installed ## tests, kill campaign and benches on 1, 2 and 8 CUDA devices; status 77 of the script without one
	$(BIN)/python scripts/gpu.py $(ARGS)

cuda-lane: installed ## count what passes make a CUDA device do, without one, beside tests/cuda_lane/counts.json; ARGS=--record writes it again
	$(BIN)/python -m tests.cuda_lane.record $(ARGS)

release: installed ## the release checklist: builds, clean installs on each Python, bill of materials; ARGS="--only build" for a part
	$(BIN)/python scripts/release.py $(ARGS)

bench: installed ## a benchmark; BENCH=journal ARGS=--quick
	$(BIN)/python -m bench $(BENCH) $(ARGS)

soak: installed ## a long campaign: CAMPAIGN=lineage SEEDS=1000, or with real processes CAMPAIGN=coordinator-kill KILLS=60
	$(BIN)/python -m soak $(CAMPAIGN) --seeds $(SEEDS) $(if $(KILLS),--kills $(KILLS)) $(ARGS)

docs: installed ## build the documents into site/
	$(BIN)/mkdocs build --strict

services: installed ## run the servers the tests need, in the foreground, and print their URL
	@$(BIN)/python -m tests.support.services

constraints: installed ## pin all packages of pyproject.toml again, with hashes
	$(BIN)/uv pip compile pyproject.toml --universal --generate-hashes --python-version 3.11 \
		--extra sdk --extra agent --extra worker --extra worker-data --extra coordinator --extra hub --extra postgres --extra notify --extra mcp \
		--extra recipes --extra images --extra guided --extra sweep --extra otel --extra trackers --extra dev \
		--no-emit-index-url --custom-compile-command "make constraints" -q -o constraints.txt
	echo hatchling | $(BIN)/uv pip compile pyproject.toml - --universal --generate-hashes --python-version 3.11 \
		--extra agent -c constraints.txt \
		--no-emit-index-url --custom-compile-command "make constraints" -q -o constraints-agent.txt
	echo hatchling | $(BIN)/uv pip compile pyproject.toml - --universal --generate-hashes --python-version 3.11 \
		--extra hub --extra postgres --extra notify -c constraints.txt \
		--no-emit-index-url --custom-compile-command "make constraints" -q -o constraints-hub.txt

# The files are compiled as strata/…/pb/*.proto, so that the generated imports are right as they are. A compatible contract
# becomes the accepted one. To break it on purpose, delete $(ACCEPTED) first: that shows in the commit.
proto: installed ## write the pb folders and the accepted contract from the .proto files
	@test ! -e $(ACCEPTED) || $(MAKE) --no-print-directory contract
	$(BIN)/python -m grpc_tools.protoc -Istrata/coord/pb=proto/strata/v1 \
		--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		--python_out=$(OUT) --grpc_python_out=$(OUT) --mypy_out=quiet:$(OUT) --mypy_grpc_out=quiet:$(OUT) \
		strata/coord/pb/coordinator.proto
	$(BIN)/python -m grpc_tools.protoc -Istrata/train/wire/pb=proto/strata/train/v1 \
		--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --python_out=$(OUT) --mypy_out=quiet:$(OUT) strata/train/wire/pb/tinker.proto
	$(BIN)/buf build proto --as-file-descriptor-set --exclude-source-info -o $(ACCEPTED)

diagrams: installed ## write the state tables of docs/coordinator-states.md from the core
	$(BIN)/python -m tests.rules.diagrams

pictures: installed ## write the screenshots and the recording of docs/images from real runs, in Chromium; ARGS=recording for one part
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m scripts.pictures $(ARGS)

reference: installed ## write docs/reference: settings, routes, commands, metrics, log events and modules, from the code
	$(BIN)/python -m tests.rules.reference

families: installed ## write the table of docs/families.md from what comes of every model family
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.shell.train_runner.family_table

format: installed ## let ruff format the code and repair what it can
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

clean: ## remove what was built and cached; .venv stays
	rm -rf site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

installed:
	@test -x $(BIN)/python || { echo 'There is no $(VENV) yet: run `make setup` first.' >&2; exit 1; }
