# make demo      train a small Llama on Python's own standard library, on the CPU or a GPU
# make test      lint and all tests that need no GPU
# make on-gpu    what matters most on a GPU, in MINUTES (9): benchmarks/on_gpu.py
# make bench     the benchmarks of the project itself; results go to benchmarks/results/
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUNS := $(VENV)/.runs

.PHONY: demo numerics test layouts test-cells test-oldest test-newest docs records pictures lint peers faults fuzz bench on-gpu \
  gpu-bench cpu-baselines image-test cluster-test clean

# What a run needs, and with it what development needs.
define environment
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-warn-script-location \
	    --root-user-action=ignore -c $(CONSTRAINTS) -e '$(1)'
	touch $@
endef

$(RUNS): pyproject.toml $(CONSTRAINTS)
	$(call environment,.)

$(READY): pyproject.toml $(CONSTRAINTS)
	$(call environment,.[dev])

demo: $(RUNS)
	$(BIN)/python prepare_data.py --stdlib --output-dir data/stdlib
	name=demo-$$(date +%Y%m%d-%H%M%S) && $(BIN)/python train.py configs/llama-tiny.json \
	    --data data/stdlib/train.bin --val-data data/stdlib/val.bin --n-steps 250 --warmup-steps 5 \
	    --bsz 8 --seq-len 256 --lr 2e-3 --lr-warmup-steps 20 --run-name $$name && \
	  $(BIN)/python compare.py runs/$$name --output-dir runs/$$name/report >/dev/null && \
	  echo "report: runs/$$name/report/report.html"

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml

# Three workers with one thread each: more threads slow down such small models, and many tests wait. The linters run
# beside them, and speak at the end.
test: $(READY)
	@mkdir -p build && $(MAKE) lint >build/lint.txt 2>&1 & linters=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n 3 --dist loadfile --no-loadscope-reorder; code=$$?; \
	wait $$linters; linted=$$?; cat build/lint.txt; exit $$((code ? code : linted))

# The tests with the oldest supported torch, in a separate environment.
test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

docs: $(READY)
	$(BIN)/python docs/tables.py

# What the tools compute and say, as tests expect it: read the difference before you commit it.
records: $(READY)
	$(BIN)/python -m tests.test_records
	$(BIN)/python -m tests.test_estimate

# The README's pictures, from real runs on the CPU; needs Chromium. Three minutes.
PICTURE = amp=off,bf16 pt-compile=false,true bsz=8 seq-len=256 n-steps=40 warmup-steps=5 device=cpu
CHROMIUM = chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --window-size=1400,640
pictures: $(READY)
	rm -rf build/pictures
	$(BIN)/python sweep.py --models configs/llama-tiny.json --repeats 5 --output-dir build/pictures --set $(PICTURE)
	$(BIN)/python compare.py build/pictures/runs --output-dir build/pictures/report
	$(CHROMIUM) --screenshot=docs/images/report.png file://$(CURDIR)/build/pictures/report/report.html

# Fault injection into checkpoints, up to 90 minutes; in parts: PART="kills chains" COUNT=100.
faults: $(READY)
	OMP_NUM_THREADS=1 PART="$(PART)" COUNT="$(COUNT)" $(BIN)/python -m tests.faults

# The tests with the newest torch, and the torchao for it, that pip finds.
test-newest:
	mkdir -p build && grep -v '^torch' constraints.txt >build/constraints-newest.txt
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=build/constraints-newest.txt

# Compare every layout of ranks with one device: losses, norms, every gradient; five minutes. With
# DEVICE=cuda on GPUs, which ranks share (docs/MODELS.md); LAYOUTS="tp2 cp2" or on-gpu runs some.
layouts: $(READY)
	$(BIN)/python -m tests.layouts $(LAYOUTS)

# Every supported combination of flags, including Inductor's code generation: ten minutes.
test-cells: $(READY)
	LLM_TRAIN_BENCH_ALL_CELLS=1 $(BIN)/python -m pytest tests/test_combinations.py

# Other trainers, without the libraries that only their downloads need. NANOGPT is a checkout of it.
PEERS = litgpt==0.5.13 torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring_parser==0.18.0

# Ours beside them on this machine, with small models on a CPU; 40 minutes.
peers:
	$(MAKE) .venv-peers/.ready VENV=.venv-peers
	.venv-peers/bin/python -m pip install -q --no-deps $(PEERS)
	.venv-peers/bin/python benchmarks/on_gpu.py peers --minutes 40 --output-dir build/peers $(if $(NANOGPT),--nanogpt $(NANOGPT))

# Changed files for every reader: 3,000 of each kind, 200 for tools; KINDS="log or trace" chooses some.
fuzz: $(READY)
	LLM_TRAIN_BENCH_FUZZ=1 $(BIN)/python -m pytest -n 2 tests/test_fuzz.py -k "$(or $(KINDS),spoilt)"

# A benchmark that fails (a limit, a missing library) does not stop the others. Names with colons are a sweep, its
# model, micro batch and sequence length; the batches of number-formats need 42 to 123 GiB in bf16, eager.
each = @failed=; for name in $(2); do echo "== $$name"; case $$name in \
	*:*) set -- $$(echo $$name | tr : ' '); out=sweeps/$$1-$$2; \
	  BSZ=$$3 SEQ_LEN=$$4 $(1) sweep.py configs/sweeps/$$1.yaml --models $$2 --output-dir $$out && \
	  $(1) compare.py $$out/runs --output-dir $$out/comparison;; \
	*) $(1) benchmarks/$$name.py;; esac || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }
FORMATS = gpt2-125m:128:1024 gpt2-1.5b:32:1024 llama-3.1-8b:8:4096 llama-8b-16:5:4096 llama-70b-proxy:4:4096
GPU_BENCHES = gemm recompute:gpt2-1.5b:16:1024 recompute:llama-70b-proxy:2:4096 \
  $(FORMATS:%=number-formats:%)
BENCHES = gemm recompute:llama-tiny:4:256

# With a Python that has torch for CUDA or ROCm: make on-gpu PY=python3 PARTS="mission peers" MINUTES=9 OUT=folder.
PY ?= $(BIN)/python
on-gpu: $(if $(filter $(BIN)/python,$(PY)),$(READY))
	$(PY) benchmarks/on_gpu.py $(PARTS) --minutes $(or $(MINUTES),9) --output-dir $(or $(OUT),gpu-results) \
	    $(if $(NANOGPT),--nanogpt $(NANOGPT))

# The benchmarks that take longer than on-gpu: two hours.
gpu-bench: $(if $(filter $(BIN)/python,$(PY)),$(READY))
	$(call each,$(PY),$(GPU_BENCHES))

bench: $(READY)
	$(call each,$(BIN)/python,$(BENCHES))

# Whether fast settings learn as fp32 does; what the device cannot run fails by itself. On a CPU, FP8 is emulated: eight minutes.
numerics: $(if $(filter $(BIN)/python,$(PY)),$(READY))
	rm -rf sweeps/numerics sweeps/numerics-layouts
	$(PY) prepare_data.py --stdlib --output-dir data/stdlib
	for name in numerics numerics-layouts; do EMULATE=$(if $(filter $(BIN)/python,$(PY)),true,false) \
	    $(PY) sweep.py configs/sweeps/$$name.yaml --output-dir sweeps/$$name; done; \
	$(PY) benchmarks/numerics.py sweeps/numerics/runs sweeps/numerics-layouts/runs

# The scripts on SLURM, for real on this machine, and SkyPilot's check; root, three minutes. PART="slurm" runs a part.
cluster-test: $(READY)
	VENV=$(VENV) tests/cluster/run.sh $(PART)

# Build and run the images with buildah, as root; ten minutes. tests/image_test.sh explains it.
image-test:
	tests/image_test.sh

# Add this CPU to configs/baselines.json: five interleaved runs of each tiny config.
TINY = configs/gpt2-tiny.json configs/llama-tiny.json configs/moe-tiny.json
cpu-baselines: $(READY)
	$(BIN)/python sweep.py --models $(TINY) --repeats 5 --output-dir sweeps/cpu-baselines \
	    --set bsz=4 seq-len=256 n-steps=50 warmup-steps=10 amp=off device=cpu
	$(BIN)/python compare.py sweeps/cpu-baselines/runs --save configs/baselines.json

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-peers .venv-track .venv-sky build data runs *.egg-info
