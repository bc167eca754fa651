# `make verify` and `make test` are all that is needed on a fresh machine: both create .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Many processes load the same modules: what they compile is kept for the next.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: verify verify-reference verify-processes verify-wgpu verify-finetune verify-stages test coverage integrations mutants twins right field soak soak-schedules soak-others soak-real fuzz graphs triton unconstrained bench bench-service lint docs site clean setup vulkan browser

# The main job: our trainers against both contracts, in one process and with real ones over TCP
# (without the clauses that probe no trainer: the first run has those); and the wgpu backend against
# its own contract, on whatever adapter there is. And fine-tuning, without random scenarios and the
# clause that starts ranks of torchrun; then layer pipelines and distillation, in a process of their
# own, since one core would be idle while they wait for it. The five run side by side, each report is
# printed when it is whole, and all are, whatever they say. An older make runs one after the other.
SIDE_BY_SIDE := $(if $(filter output-sync,$(.FEATURES)),--jobs --output-sync)
verify: setup
	@echo "five runs of entrenar-check: one to five minutes on two cores, and a report as each one ends"
	@$(MAKE) --no-print-directory --keep-going $(SIDE_BY_SIDE) verify-reference verify-processes verify-wgpu verify-finetune verify-stages

verify-reference:
	$(BIN)/entrenar-check --contract distributed-training-v1.yaml --contract training-integrity-v1.yaml

PROBES := F-DP-004,F-WGPU-001,F-HET-001,F-HET-002
verify-processes:
	$(BIN)/entrenar-check --contract distributed-training-v1.yaml --system parameter_server --exclude $(PROBES)

verify-wgpu:
	$(BIN)/entrenar-check --contract wgpu-backend-v1.yaml

verify-finetune:
	$(BIN)/entrenar-check --contract finetune-v1.yaml --examples 0 --exclude F-FT-016

verify-stages:
	$(BIN)/entrenar-check --contract layer-pipeline-v1.yaml --contract distillation-v1.yaml --examples 0

# All tests but those of `make integrations`; how long each took is in durations.txt afterwards.
SPREAD := -m pytest -p tests.spread -n auto --maxprocesses=3 --dist=loadscope --benchmark-disable
TESTS := $(SPREAD) -m 'not integrations and not by_hand'
# Ranks and workers outnumber the cores: each computes on one thread, and no thread spins.
test coverage soak-others: export OMP_NUM_THREADS := 1
test: setup
	$(BIN)/python $(TESTS) --durations=15

# The same with branch coverage of what needs no hardware, which takes half as long again.
coverage: setup
	$(BIN)/python $(TESTS) --cov --cov-report=term:skip-covered --cov-fail-under=95

# Trainers of others that own the loop (accelerate, Hugging Face's and Lightning's), which are large:
# their examples are left alone, and the broken twins of these are found. And TRL, with which pairs
# are compared. Not part of `make test`.
integrations: setup
	@$(BIN)/python -m pip -qq --disable-pip-version-check install --constraint constraints.txt --editable '.[integrations]' 'trl>=1.16'
	$(BIN)/python -m pytest tests/check/command/test_integrations.py tests/compute/wgpu/test_qwen3.py tests/train/model/test_preference.py tests/train/finetune/test_readme.py

# Every planted bug, and what kills it.
mutants: setup
	$(BIN)/entrenar-check --mutants

# Every planted bug in a script as users write them, and what finds it: real processes, more than an
# hour on two cores, some minutes on sixteen (JOBS is how many scripts are tried at a time).
JOBS ?= 1
twins: setup
	$(BIN)/python -m tests.check.command.twins --jobs $(JOBS)
	$(BIN)/python -m tests.check.command.auto_twins --jobs $(JOBS)

# Hundreds of runs of right scripts, with several seeds and 1 to 4 workers: no alarm. Real processes.
RUNS ?= 500
right: setup
	$(BIN)/python -m tests.check.command.right $(RUNS) --jobs $(JOBS)

# Training scripts of others as they are published, by --auto and by the line: each verdict is one that
# docs/field.md explains, and each defect is seen without the harness. WORDS are parts of recipes'
# names; CLONES is a folder with clones `owner+name`, without which they are cloned. Many minutes.
WORDS ?=
CLONES ?=
field: setup
	@$(BIN)/python -m pip -qq --disable-pip-version-check install --constraint constraints.txt --editable '.[field]'
	$(BIN)/python -m tests.field.run $(WORDS) $(if $(CLONES),--clones $(CLONES))

# Ten thousand random schedules of faults under the simulator: every run ends right, and every mutant
# is found. Beside them a thousand random scenarios on the unbroken trainers: no alarm allowed; an
# hour of virtual training with a fault every few steps: nothing is kept that should have gone; every
# reduction of the contract, up to 2^26 elements, which takes 7 GiB; and the properties of contracts,
# protocol and traces on a thousand random examples each; and the cases that `make test` leaves out.
# Many minutes.
soak: setup
	$(MAKE) --no-print-directory --jobs=2 soak-schedules soak-others

soak-schedules: setup
	$(BIN)/python -m tests.falsification.test_schedules 10000 --mutants

soak-others: setup
	$(BIN)/entrenar-check --contract reduction-v1.yaml
	$(BIN)/python -m tests.systems.soak_hour
	$(BIN)/python -m tests.train.elastic.runs 200
	$(BIN)/python -m tests.check.harness.test_no_false_alarm 1000
	$(BIN)/python -m pytest -q --hypothesis-profile=soak tests/check/contract tests/train/wire tests/shared/trace \
		tests/check/observing/test_changes_nothing.py
	$(BIN)/python $(SPREAD) -m by_hand

# Real processes over TCP, killed, frozen, cut off and damaged at random, run after run. Then ten
# thousand strangers at a coordinator's door in the middle of a run, and as many over TLS.
SOAK_S ?= 300
STRANGERS ?= 10000
soak-real: setup
	$(BIN)/python -m tests.systems.soak_real $(SOAK_S)
	$(BIN)/python -m tests.systems.soak_strangers $(STRANGERS)
	$(BIN)/python -m tests.train.service.soak_end

# Every kind of bad file at every door; then bytes made up by a fuzzer that watches which lines they
# reach: at every way in, FUZZ_S each.
FUZZ_S ?= 60
fuzz: setup
	@$(BIN)/python -m pip -qq --disable-pip-version-check install --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz.bad_files
	$(BIN)/python -m tests.fuzz.fuzz --seconds $(FUZZ_S)

# Random small functions and their gradients on a wgpu adapter: each element within its bound.
# And whole steps of the workloads, beside torch's.
GRAPHS ?= 500
graphs: setup
	$(BIN)/python -m tests.compute.wgpu.whole_steps
	$(BIN)/python -m tests.compute.wgpu.random_graphs $(GRAPHS) wgpu

# Torch's usual Linux build brings Triton, whose LLVM is another one than Mesa's; .venv may have a
# build without. So its wheel alone is put beside .venv: a process with both must not crash.
BESIDE := build/triton
triton: setup
	@rm -rf $(BESIDE)
	@$(BIN)/python -m pip -qq --disable-pip-version-check install --no-deps --target $(BESIDE) triton
	PYTHONPATH=$(BESIDE) $(BIN)/entrenar doctor
	PYTHONPATH=$(BESIDE) $(BIN)/entrenar-check --contract distributed-training-v1.yaml --only F-WGPU-001,F-HET-001
	@rm -rf $(BESIDE)

# As a new user's: a fresh venv with the newest of everything, torch's CUDA build among it, which
# takes 6 GB and minutes. The machine's parts, a script, fine-tuning on wgpu, and the main job.
NEWEST := build/newest
unconstrained: vulkan
	@rm -rf $(NEWEST) && $(PYTHON) -m venv $(NEWEST)/venv
	@$(NEWEST)/venv/bin/python -m pip -q --disable-pip-version-check install --progress-bar off '.[wgpu,finetune]'
	@touch $(NEWEST)/venv/.ready
	$(NEWEST)/venv/bin/entrenar doctor
	$(NEWEST)/venv/bin/entrenar-check --contract distributed-training-v1.yaml --exclude F-DP-006 -- \
		$(NEWEST)/venv/bin/torchrun --standalone --nproc_per_node={world_size} \
		examples/user_trainers/ddp.py --steps {steps} --dir {workdir}
	$(NEWEST)/venv/bin/python examples/finetune/make_small.py $(NEWEST)/small
	@mkdir -p $(NEWEST)/examples/finetune && cp examples/finetune/small.yaml $(NEWEST)/examples/finetune
	$(NEWEST)/venv/bin/entrenar finetune $(NEWEST)/examples/finetune/small.yaml --backend wgpu
	$(MAKE) --no-print-directory verify VENV=$(NEWEST)/venv
	@rm -rf $(NEWEST)

# Ours beside the peer's, as ratios.
bench: setup
	$(BIN)/python -m pytest tests/benchmarks --benchmark-only -q

# The service with gradients of 64 MB beside gloo's all-reduce: star and mesh, plain and over TLS, with
# a worker and the coordinator killed. Some minutes.
bench-service: setup
	$(BIN)/python -m tests.benchmarks.service

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/vulture
	$(BIN)/python -m tests.english

# Regenerates what is generated: CLI reference, kill matrix, tables, faults for real.
docs: setup
	$(BIN)/python -m docs.generate
	$(BIN)/python -m docs.fault_table
	$(BIN)/python -m docs.bound_family
	$(BIN)/python -m docs.field_page

# The docs as a site, in build/site; a broken link, or a page that the navigation lacks, fails.
site: setup
	@$(BIN)/python -m pip -qq --disable-pip-version-check install --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --config-file docs/website/mkdocs.yml
	@echo "open build/site/index.html"

clean:
	rm -rf .venv build dist .coverage htmlcov .hypothesis .mypy_cache .pytest_cache .ruff_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up -----------------------------------------------------------------------------------

setup: $(READY) vulkan

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 11) else f"$(PYTHON) is Python {v}: 3.11 or newer is needed; say make PYTHON=/path/to/python3.11")'
	@echo "setting up $(VENV) (a few minutes on the first run)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# The pip that an older Python brings takes twice as long to choose versions.
	@$(BIN)/python -m pip --quiet --disable-pip-version-check install --constraint constraints.txt --upgrade pip
	@{ $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off --no-compile \
	  --constraint constraints.txt --editable '.[dev,finetune,wgpu]' || echo "set-up failed"; } | awk '$(TOLD_BY_PIP)'
	@touch $@

# How far pip is, a line for each package when its download begins: name, version, size. Warnings and
# errors are pip's own.
TOLD_BY_PIP = \
  /^ *(Downloading|Using cached) .*[.](whl|tar[.]gz) [(]/ \
    { count = split($$(NF - 2), path, "/"); split(path[count], part, "-"); \
      printf "  package %d: %s %s %s %s\n", ++number, part[1], part[2], $$(NF - 1), $$NF; fflush() } \
  /^Installing collected packages:/ { printf "  installing %d packages\n", NF - 3; fflush() } \
  /^Successfully installed/ { print "  .venv is ready" } \
  /^set-up failed/ { failed = 1 } END { exit failed }

# wgpu needs a Vulkan driver. Mesa's software driver will do; only root may install it.
vulkan:
	@if ls /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json 2>/dev/null | grep -q .; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing Mesa's software Vulkan driver (mesa-vulkan-drivers)"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -y install mesa-vulkan-drivers libvulkan1 \
	  || echo "E: mesa-vulkan-drivers could not be installed: what needs a wgpu adapter will be inconclusive"; } 2>&1 \
	  | awk '/^(Need to get|Get:|Setting up|E:)/ { print "  " $$0; fflush() }'; \
	else \
	  echo "no Vulkan driver found: what needs a wgpu adapter will be inconclusive."; \
	  echo "Install one (Debian, Ubuntu: sudo apt-get install mesa-vulkan-drivers) and run again."; \
	fi

# A browser, for the test that opens a page in one. Without it that test is skipped.
browser:
	@if command -v chromium-headless-shell chromium google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing a browser (chromium-headless-shell)"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install chromium-headless-shell; } >/dev/null 2>&1 \
	  || echo "chromium-headless-shell could not be installed: one test will be skipped"; \
	else \
	  echo "no browser found: one test will be skipped"; \
	fi
