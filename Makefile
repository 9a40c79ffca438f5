# make demo      train a small Llama on Python's own standard library, on the CPU or a GPU
# make test      lint and all tests that need no GPU
# make gpu-check the tests that need a GPU, then the benchmarks worth having on one
# make bench     the benchmarks of the project itself; results go to benchmarks/results/
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test layouts test-cells test-oldest test-track docs pictures lint bytes faults fuzz mutants bench gpu-facts \
  gpu-compare gpu-check gpu-test gpu-bench cpu-baselines image-test clean

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-warn-script-location \
	    --root-user-action=ignore -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/python prepare_data.py --stdlib --output-dir data/stdlib
	name=demo-$$(date +%Y%m%d-%H%M%S) && $(BIN)/python train.py configs/llama-tiny.json \
	    --data data/stdlib/train.bin --val-data data/stdlib/val.bin --amp off --n-steps 250 --warmup-steps 5 \
	    --bsz 8 --seq-len 256 --lr 2e-3 --lr-warmup-steps 20 --sample 300 --run-name $$name && \
	  $(BIN)/python compare.py runs/$$name --output-dir runs/$$name/report >/dev/null && \
	  echo "report: runs/$$name/report/report.html"

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml

# Two workers; the models are so small that more threads only slow them.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder

# The same with the oldest torch that is supported, in an environment kept apart.
test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

docs: $(READY)
	$(BIN)/python docs/tables.py

# The README's pictures, from real runs on the CPU; needs Chromium. Three minutes.
pictures: $(READY)
	$(BIN)/python docs/pictures.py

# The campaign against checkpoints, at most 90 minutes; in parts: PART="kills calls" COUNT=100.
faults: $(READY)
	OMP_NUM_THREADS=1 PART="$(PART)" COUNT="$(COUNT)" $(BIN)/python -m tests.faults

# What --track writes, read back by each library itself; these are not installed for `make test`.
test-track:
	test -d .venv-track || $(PY) -m venv .venv-track
	.venv-track/bin/pip install -q pytest pydantic rich numpy pyyaml pandas wandb mlflow-skinny prometheus_client
	.venv-track/bin/python -m pytest -q --noconftest -o addopts="" -p no:cacheprovider tests/trackers.py

# Every layout of ranks against one device: losses, norms, every gradient; three minutes.
layouts: $(READY)
	$(BIN)/python -m tests.layouts

# Every supported combination of toggles through Inductor's code generation too: ten minutes.
test-cells: $(READY)
	LLM_TRAIN_BENCH_ALL_CELLS=1 $(BIN)/python -m pytest tests/test_combinations.py

# Bytes and kernels of a step on an H200, ours and peers', counted without a GPU: ten minutes.
bytes:
	$(MAKE) .venv-oldest/.ready VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -W ignore benchmarks/bytes.py

# Any bytes as any file that the tools read: a million cases, or CASES of each kind in KINDS.
fuzz: $(READY)
	CASES="$(CASES)" KINDS="$(KINDS)" $(BIN)/python -m tests.fuzz

# COUNT random changes of the program, one at a time, that a test must notice; SEED chooses them.
mutants: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants --count $(or $(COUNT),60) --seed $(or $(SEED),1)

# A benchmark that fails (a limit, an absent library) does not stop the others. With colons it is a sweep, its
# model, micro batch and length; the batches of number-formats take 42 to 123 GiB in bf16, eager.
each = @failed=; for name in $(2); do echo "== $$name"; case $$name in \
	*:*) set -- $$(echo $$name | tr : ' '); out=sweeps/$$1-$$2; \
	  BSZ=$$3 SEQ_LEN=$$4 $(1) sweep.py configs/sweeps/$$1.yaml --models $$2 --output-dir $$out && \
	  $(1) compare.py $$out/runs --output-dir $$out/comparison;; \
	*) $(1) benchmarks/$$name.py;; esac || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }
FORMATS = gpt2-125m:128:1024 gpt2-1.5b:32:1024 llama-3.1-8b-proxy:8:4096 llama-8b-16:5:4096 llama-70b-proxy:4:4096
GPU_BENCHES = gemm numerics overhead loss recompute:gpt2-1.5b:16:1024 recompute:llama-70b-proxy:2:4096 \
  $(FORMATS:%=number-formats:%) peers
BENCHES = loss overhead peers numerics gemm recompute:llama-tiny:4:256 gate

# If the machine's own Python has torch with CUDA or ROCm: make gpu-facts PY=python3 OUT=folder. Each takes
# nine minutes at most and packs all that it found into one archive in OUT. In gpu-test PART chooses tests
# (transformer_engine, torchao, "gpu and not torchao"); with many cores JOBS=4 runs four at a time.
PY ?= $(BIN)/python
gpu-facts gpu-compare gpu-test: gpu-%: $(if $(filter $(BIN)/python,$(PY)),$(READY))
	PY="$(PY)" OUT="$(OUT)" PART="$(PART)" JOBS="$(JOBS)" benchmarks/gpu.sh $*

# The tests, then the benchmarks worth having on a GPU: two to three hours.
gpu-check: gpu-test gpu-bench

gpu-bench: $(if $(filter $(BIN)/python,$(PY)),$(READY))
	$(call each,$(PY),$(GPU_BENCHES))

bench: $(READY)
	$(call each,$(BIN)/python,$(BENCHES))

# The images, built and run for real by buildah: as root; ten minutes. docker/image_test.sh explains.
image-test:
	docker/image_test.sh

# The CPU entries of configs/baselines.json: five interleaved runs of each tiny config, judged together.
TINY = configs/gpt2-tiny.json configs/llama-tiny.json configs/moe-tiny.json
cpu-baselines: $(READY)
	$(BIN)/python sweep.py --models $(TINY) --repeats 5 --output-dir sweeps/cpu-baselines \
	    --set bsz=4 seq-len=256 n-steps=100 warmup-steps=10 amp=off device=cpu
	$(BIN)/python compare.py sweeps/cpu-baselines/runs --baseline configs/baselines.json --update-baselines

clean:
	rm -rf $(VENV) .venv-oldest .venv-track .mutants build data runs *.egg-info
