# make demo      train a small Llama on Python's own standard library, on the CPU or a GPU
# make test      lint and all tests that need no GPU (make gpu-check runs the others)
# make bench     what measures the project itself; results go to benchmarks/results/
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench gpu-check clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/python prepare_data.py --stdlib --output-dir data/stdlib
	$(BIN)/python train.py configs/llama-tiny.json --data data/stdlib/train.bin \
	    --val-data data/stdlib/val.bin --amp off --n-steps 250 --warmup-steps 5 --bsz 8 --seq-len 256 \
	    --lr 2e-3 --lr-warmup-steps 20

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

test: lint
	$(BIN)/python -m pytest -m "not gpu"

# On a machine whose own Python has torch with CUDA or ROCm: make gpu-check PY=python3
PY ?= $(BIN)/python
gpu-check:
	$(PY) -m pytest -m gpu

bench: $(READY)
	$(BIN)/python benchmarks/loss.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/peers_cpu.py

clean:
	rm -rf $(VENV) data runs *.egg-info
