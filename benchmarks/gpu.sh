#!/usr/bin/env bash
# The first half hour on a GPU, in calls of at most LIMIT seconds (540) each, what matters most first.
#     OUT=FOLDER benchmarks/gpu.sh machine|exact|facts|compare|test        (make gpu-machine, gpu-exact, gpu-facts, gpu-compare, gpu-test)
# Results, traces and logs go into one archive, OUT/NAME.tgz, whatever fails; one above 15 MiB is cut into
# pieces, OUT/NAME.tgz.00 and so on (cat them). PY is the Python that has torch.
# ONLY=REGEX runs only the commands with such a name. DRY=1 prints the commands.
set -uo pipefail
cd "$(dirname "$0")/.."
what=${1:-}
out=${OUT:-gpu-results}
py=${PY:-python3}
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-$PWD}/.cache}/llm-train-bench/inductor}
[[ $what =~ ^(machine|exact|facts|compare|test)$ ]] || {
  echo "benchmarks/gpu.sh: say machine, exact, facts, compare or test" >&2
  exit 2
}
mkdir -p "$out"
began=$SECONDS
work=$out
[ -n "${DRY:-}" ] || work=$(mktemp -d) # beside OUT: only the archive comes back from a lent machine
runs=$work/runs summary=$work/$what.txt
pack() {
  [ -z "${DRY:-}" ] || return 0
  local archive=$out/$what.tgz path kept=()
  for path in benchmarks/results configs/roofs.json; do [ ! -e "$path" ] || kept+=("$path"); done
  if rm -f "$archive"* && tar czf "$archive" -C "$work" . -C "$PWD" "${kept[@]}"; then
    [ "$(stat -c %s "$archive")" -le 15728640 ] ||
      { split -d -b 15M "$archive" "$archive." && rm "$archive"; }
    echo "packed: $archive"
  fi
  rm -rf "$work"
}
trap pack EXIT

# An 8B Llama's shape of 16 layers, or 8 where a GPU has less than 120 GiB.
memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -1)
gpt_small=configs/gpt2-125m.json gpt=configs/gpt2-1.5b.json llama=$work/llama-8b-16.json layers=16
bsz_small="--bsz 128" bsz="--bsz 32" bsz_llama="--bsz 5 --seq-len 4096"
if [ "${memory:-999999}" -lt 120000 ]; then
  llama=$work/llama-8b-8.json layers=8 bsz_small="--bsz 64" bsz="--bsz 12" bsz_llama="--bsz 3 --seq-len 4096"
fi
sed "s/\"num_hidden_layers\": 32/\"num_hidden_layers\": $layers/" configs/llama-3.1-8b.json >"$llama"
steps="--n-steps 25 --warmup-steps 20" T="--seq-len 1024"

# Run a command for at most so many of the call's seconds; what it prints goes into a log of its own.
run() {
  local name=$1 limit=$2
  shift 2
  [[ $name =~ ${ONLY:-.} ]] || return 0
  if [ -n "${DRY:-}" ]; then
    echo "$*"
    return
  fi
  local left=$((${LIMIT:-540} - SECONDS + began))
  [ "$left" -gt 5 ] || { echo "$name: left out, no time" | tee -a "$summary"; return; }
  [ "$limit" -lt "$left" ] || limit=$left
  timeout --signal INT --kill-after 15 "$limit" "$@" >"$work/$name.log" 2>&1
  echo "$name: exit code $?, $((SECONDS - began)) s so far" | tee -a "$summary"
}
train() {
  local name=$1
  shift
  run "$name" 130 "$py" train.py "$@" --output-dir "$runs" --run-name "$name"
}
eager() { train "$@" --n-steps 10; }
compiled() { train "$@" --pt-compile $steps; }

case $what in
  machine)
    run check 520 "$py" check.py --output-dir "$runs"
    ;;
  exact) # the workloads' losses in fp32, and initial values
    run initial-values 60 "$py" benchmarks/initial_values.py $gpt_small $gpt
    exact="--amp off --bsz auto --warmup-steps 1 --warmup-seconds 0"
    train gpt2-125m $gpt_small --global-bsz 128 $T $exact --n-steps 4
    train moe-0.7b configs/moe-0.7b.json --global-bsz 64 $T $exact --n-steps 4
    train gpt2-1.5b $gpt --global-bsz 32 $T $exact --n-steps 4
    train llama-8b-proxy configs/llama-3.1-8b-proxy.json --global-bsz 8 --seq-len 4096 $exact --n-steps 3
    ;;
  facts)
    run nvidia-smi 20 nvidia-smi
    run doctor 60 "$py" doctor.py
    pad="--pad-vocab 128"
    eager first $gpt_small --bsz 2 $T
    compiled gpt2-125m $gpt_small $bsz_small $T $pad --profile
    compiled gpt2-1.5b $gpt $bsz $T $pad --profile
    compiled gpt2-125m-fused $gpt_small $bsz_small $T $pad --fused-backward --profile
    compiled gpt2-1.5b-fused $gpt $bsz $T $pad --fused-backward --profile
    compiled llama-8b-16 "$llama" $bsz_llama --profile
    compiled llama-8b-16-fused "$llama" $bsz_llama --fused-backward
    compiled llama-8b-16-fp8 "$llama" $bsz_llama --use-fp8
    compiled gpt2-1.5b-fp8 $gpt $bsz $T $pad --use-fp8
    eager moe-0.7b configs/moe-0.7b.json --bsz 16 $T
    eager moe-0.7b-fp8 configs/moe-0.7b.json --bsz 16 $T --use-fp8 --fp8-backend torchao --fp8-recipe rowwise
    for optimizer in muon adamw8bit; do
      eager gpt2-125m-$optimizer $gpt_small $bsz_small $T $pad --optimizer $optimizer
    done
    run gemm 90 "$py" benchmarks/gemm.py $gpt "$llama" --seconds 0.15 --heat 10
    ;;
  compare)
    # The peer that users of each shape compile; a whole GPT-2 1.5B takes the compiler a minute.
    shapes=(gpt2-125m gpt2-1.5b llama-8b-16) peers=(nanogpt nanogpt torchtitan)
    for i in "${!shapes[@]}"; do
      run "peers-${shapes[i]}" 130 "$py" benchmarks/peers.py --shapes "${shapes[i]}" --peers "${peers[i]}" \
        --modes compiled --rounds 1
    done
    run loss 60 "$py" benchmarks/loss.py
    for kind in "--linear te" "--use-fp8 --fp8-backend te"; do
      eager "llama-8b-16-te-${kind:2:3}" "$llama" $bsz_llama $kind
    done
    compiled flash $gpt_small $bsz_small $T --pad-vocab 128 --attention flash
    compiled unpadded $gpt_small $bsz_small $T
    train graphs $gpt_small $bsz_small $T --pad-vocab 128 --pt-compile --compile-mode reduce-overhead $steps
    train accumulated "$llama" $bsz_llama --pt-compile --grad-acc-steps 8 \
      --n-steps 5 --warmup-steps 4 --warmup-seconds 0
    ;;
  test)
    pytest="$py -m pytest tests/test_gpu.py -vv --tb=short -o faulthandler_timeout=240"
    part=${PART:-gpu and not transformer_engine}
    run gpu-test 440 $pytest ${JOBS:+-n $JOBS} -m "($part) and not alone"
    run gpu-test-alone 90 $pytest -m "($part) and alone"
    run gpu-test-kernels 60 $py -m pytest tests/test_kernels.py -q
    ;;
esac
[ -n "${DRY:-}" ] || ! grep -q "exit code [^0]\|left out" "$summary"
