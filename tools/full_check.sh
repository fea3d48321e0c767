#!/bin/bash
# What is too long for CI, once, by hand: all matrices, the sanitizers, long fuzzing, resumes after kills, benchmarks.
#
#     tools/full_check.sh [REPORT.md]              # goes on after failures; exit code 1 if there were any
#     tools/full_check.sh REPORT.md 'kills|asan'   # only parts whose names match, added to the report
#
# SHERD_TORCH_PYTHON=/path/to/python with torch installed adds the comparison with PyTorch.
set -u
cd "$(dirname "$0")/.." || exit 1
report=$(realpath "${1:-full_check.md}")
scratch=$(mktemp -d)
beside=() beside_pids=()
trap 'for pid in "${beside_pids[@]}"; do pkill -P "$pid"; done; rm -rf "$scratch"' EXIT
only=${2:-}
failed=0

[ -n "$only" ] && [ -e "$report" ] || {
  echo "# Full check"
  echo
  echo "$(git log -1 --format='%h %s' 2>/dev/null || echo 'no git here'), $(date -u +%Y-%m-%d), $(nproc) cores, $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1)"
  echo
  echo "| part | result | seconds |"
  echo "|---|---|---|"
} >"$report"

is_wanted() { [[ -z $only || ${1,,} =~ ${only,,} || $1 == build* ]]; }

part() { # part NAME COMMAND...
  local name=$1 start=$SECONDS result=passed
  is_wanted "$name" || return 0
  shift
  echo "== $name" >&2
  if ! "$@" >"$scratch/log" 2>&1; then
    result=FAILED
    failed=1
    tail -n 60 "$scratch/log" >&2
  fi
  echo "| $name | $result $(tail -n 1 "$scratch/log" | tr '|' ' ' | cut -c1-120) | $((SECONDS - start)) |" >>"$report"
}

cases() { # all test cases of a run
  ./bazelw test --keep_going --build_event_json_file="$scratch/events" "$@"
  local code=$?
  python3 .ci/summarize.py "$scratch/events"
  return $code
}

golden_matrix() {
  local bad=0 n=0
  for golden in bigmodel_tiny bigmodel_odd bigmodel_no_mask bigmodel_wide_batch; do
    for ranks in 1 2 4; do
      for strategy in full_shard shard_grad_op no_shard ddp; do
        for extra in "" --activation_checkpointing --wrap_min_params=2000 --precision=bf16 --backend=gloo --backend=mpi; do
          n=$((n + 1))
          python3 tools/golden_run.py bazel-bin/examples/big_model "$golden" "$ranks" "$strategy" $extra || bad=$((bad + 1))
        done
      done
    done
  done
  echo "$n runs, $bad outside of the tolerances"
  [ $bad = 0 ]
}

kill_and_resume() { # 50 runs killed at a random moment end in the bytes of the uninterrupted one
  local flags="--layers=2 --dim=32 --ff_dim=64 --vocab_size=97 --seq_len=16 --batch_size=4 --steps=90 --eval_interval=0
    --save_interval=3 --max_new_tokens=0 --data=tests/goldens/bigmodel_tiny/tokens.bin"
  local bad=0 resumed=0 shared
  shared=$(ls /dev/shm | wc -l)
  bazel-bin/examples/big_model $flags --checkpoint_dir="$scratch/whole" --save_weights="$scratch/whole.safetensors" || return 1
  for i in $(seq 50); do
    rm -rf "$scratch/cut"
    # A third of them each: written while training goes on, written between steps, written by rank 0.
    local how
    case $((i % 3)) in
      0) how=--async_save ;;
      1) how=--checkpoint_format=sharded ;;
      2) how=--checkpoint_format=full ;;
    esac
    bazel-bin/examples/big_model $flags $how --checkpoint_dir="$scratch/cut" &
    local job=$!
    # Nine of ten have something to resume from; the others die while they start.
    if [ $((i % 10)) != 0 ]; then
      for _ in $(seq 600); do
        compgen -G "$scratch/cut/step-*" >/dev/null && break
        sleep 0.02
      done
    fi
    sleep "0.$((RANDOM % 90 + 10))"
    # One of its ranks, or, now and then, the whole job.
    local victim
    victim=$(tr ' ' '\n' <"/proc/$job/task/$job/children" | grep . | shuf -n 1)
    [ $((i % 5)) = 0 ] && victim=$job
    [ -n "$victim" ] && kill -KILL "$victim"
    wait $job
    for _ in $(seq 50); do
      pgrep -f -- "--checkpoint_dir=$scratch/cut" >/dev/null || break
      sleep 0.1
    done
    pgrep -f -- "--checkpoint_dir=$scratch/cut" && bad=$((bad + 1)) # a rank outlived its job
    bazel-bin/examples/big_model $flags --checkpoint_dir="$scratch/cut" --resume --save_weights="$scratch/cut.safetensors" >"$scratch/resumed" || bad=$((bad + 1))
    grep -q "resumed from" "$scratch/resumed" && resumed=$((resumed + 1))
    cmp "$scratch/whole.safetensors" "$scratch/cut.safetensors" || bad=$((bad + 1))
  done
  [ "$(ls /dev/shm | wc -l)" -gt "$shared" ] && bad=$((bad + 1))
  echo "50 runs, $resumed resumed from a checkpoint, $bad differ or leave something behind"
  [ $bad = 0 ] && [ $resumed -ge 40 ]
}

# They need a core at most, so they go beside the tests: part_beside starts one, and its row comes with `wait_beside`.
part_beside() { # part_beside NAME COMMAND...
  local log
  is_wanted "$1" || return 0
  log=$(mktemp -p "$scratch" beside.XXXX)
  (
    shift
    start=$SECONDS
    "$@" >"$log" 2>&1
    echo $? $((SECONDS - start)) >"$log.end"
  ) &
  beside_pids+=($!)
  beside+=("$1|$log")
}
wait_beside() {
  local one name log code seconds result
  wait
  beside_pids=()
  for one in "${beside[@]}"; do
    name=${one%%|*} log=${one#*|} result=passed
    read -r code seconds <"$log.end"
    if [ "$code" != 0 ]; then
      result=FAILED
      failed=1
      tail -n 60 "$log" >&2
    fi
    echo "| $name | $result $(tail -n 1 "$log" | tr '|' ' ' | cut -c1-120) | $seconds |" >>"$report"
  done
}

# The other configs move the bazel-bin link.
asan_program() { echo "$(./bazelw info --config=asan bazel-bin 2>/dev/null)/$1"; }

part "build" ./bazelw build //... //tests/long:all
# First, while nothing else runs.
for benchmark in gemm kernels collectives exact_sum; do
  part "benchmark $benchmark" ./bazelw run "//benchmarks:$benchmark"
done
part "one rank, FULL_SHARD beside no wrapper" python3 benchmarks/one_rank.py
if [ -n "${SHERD_TORCH_PYTHON:-}" ]; then
  part "beside PyTorch" python3 benchmarks/side_by_side.py --torch-python "$SHERD_TORCH_PYTHON"
  part "collectives beside PyTorch and Open MPI" python3 benchmarks/collectives_side_by_side.py --torch-python "$SHERD_TORCH_PYTHON"
elif [ -z "$only" ]; then
  echo "| beside PyTorch | skipped: SHERD_TORCH_PYTHON is not set | 0 |" >>"$report"
fi
part "fuzzing: build, with AddressSanitizer" ./bazelw build --config=asan //tests/long:fuzz_files //tests/distributed:store_test
part_beside "fuzzing: 10 minutes of damaged files" "$(asan_program tests/long/fuzz_files)" 600
part_beside "fuzzing: an hour of garbage at the store's port" \
  env SHERD_FUZZ_SECONDS=3600 "$(asan_program tests/distributed/store_test)" --gtest_filter='*fuzzed*'
part "build again" ./bazelw build //... //tests/long:all
part "tests" cases //...
part "tests without AVX-512" cases --test_env=SHERD_NO_AVX512=1 //tests/core/... //tests/autograd/... //tests/nn/...
part "golden runs: ranks x strategies x precisions, wrapping, checkpointing" golden_matrix
part "golden runs: ranks x strategies x wrapping x prefetching x backends" \
  cases --test_env=SHERD_TEST_ALL=1 --test_timeout=7200 //tests/distributed:golden_matrix_test
part "collectives: all sizes, dtypes and operations" cases --test_env=SHERD_TEST_ALL=1 --test_timeout=3600 //tests/distributed:collectives_test
part "distributed tests over gloo" cases --test_env=SHERD_BACKEND=gloo //tests/distributed:all
part "same bits: all of FSDP's options" cases //tests/long:bits_matrix_test
part "50 kills, each resumed" kill_and_resume
part "1000 random command lines" python3 tests/long/fuzz_flags.py bazel-bin/examples/big_model 1000
part "AddressSanitizer and UBSan" cases --config=asan //...
# What has threads. Left out: kernels, layers, optimizers, for libgomp is not instrumented, so OpenMP is off under
# ThreadSanitizer and they have a single thread; memory_test, whose tag says why; the examples, for oneDNN's and Open MPI's
# libraries are not either.
part "ThreadSanitizer: engine, loader, process groups, sharding, launcher" \
  cases --config=tsan -- //tests/autograd:engine_test //tests/data/... //tests/distributed/... //tests/launcher/... \
  -//tests/distributed:memory_test
[ -n "$only" ] || echo "| ThreadSanitizer: core, nn, optim, examples | left out: a single thread there, or libraries that are not instrumented | 0 |" >>"$report"
wait_beside

echo "report: $report" >&2
exit $failed
