#!/usr/bin/env python3
"""What FULL_SHARD costs where there is nothing to shard: one rank, beside the same model without any wrapper.

    ./bazelw build //examples:big_model
    benchmarks/one_rank.py [--repetitions=9]

Both run in turn; the figure is the median of the ratios within the repetitions. Exit code 1 above 2%.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = dict(layers=4, dim=384, ff_dim=1536, heads=6, vocab_size=4096, seq_len=128, batch_size=4)
WARMUP = 4  # steps left out at the start


def step_ms(strategy, steps, folder):
    log = os.path.join(folder, "log.jsonl")
    command = [os.path.join(ROOT, "bazel-bin/examples/big_model"), "--nproc_per_node=1", "--threads=1",
               "--strategy=" + strategy, "--steps={}".format(steps + WARMUP), "--eval_interval=0", "--save_interval=0",
               "--max_new_tokens=0", "--data=" + os.path.join(folder, "tokens.bin"), "--log_jsonl=" + log]
    command += ["--{}={}".format(*flag) for flag in MODEL.items()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ, OMP_NUM_THREADS="1"))
    with open(log) as file:
        times = [entry["step_ms"] for entry in map(json.loads, file) if entry.get("step", 0) > WARMUP]
    os.remove(log)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="measured, after {} others".format(WARMUP))
    arguments = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "tokens.bin"), "wb") as file:
            for i in range(MODEL["seq_len"] * MODEL["batch_size"] * (arguments.steps + WARMUP + 1) + 1):
                file.write((i * 2654435761 % MODEL["vocab_size"]).to_bytes(2, "little"))
        for repetition in range(arguments.repetitions):
            # Whoever comes second may find the machine in another state, so they take turns.
            order = ("none", "full_shard") if repetition % 2 else ("full_shard", "none")
            ms = {strategy: step_ms(strategy, arguments.steps, folder) for strategy in order}
            ratios.append(ms["full_shard"] / ms["none"])
            print("none {none:.1f} ms, full_shard {full_shard:.1f} ms a step, ".format(**ms)
                  + "ratio {:.3f}".format(ratios[-1]), flush=True)
    ratio = statistics.median(ratios)
    print("median ratio {:.3f} (at most 1.020)".format(ratio))
    return 0 if ratio <= 1.02 else 1


if __name__ == "__main__":
    sys.exit(main())
