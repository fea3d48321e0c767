#!/usr/bin/env python3
"""Sherd beside PyTorch: tokens a second and memory of one training step, interleaved on this machine.

    ./bazelw build //examples:big_model //benchmarks:machine //benchmarks:kernels
    benchmarks/side_by_side.py --torch-python=/path/to/venv/bin/python [--markdown=docs/performance.md]

Needs a Python with PyTorch (`pip install torch numpy`), and a machine that does nothing else. Each repetition runs
every row once, those that are laid beside each other one after another, so that a slow moment hits both; every other
one in the reverse order, so that neither gains by being first. A row's figure is the median of its repetitions, and a
repetition's that of its steps; a ratio of speeds is the median of the ratios within the repetitions, for machines
drift between them. Memory is the largest resident set of any rank, as the kernel counts it (wait4). Exit code 1 if a
required ratio was not reached or a run failed, the peer's twice (then there is no report).
"""
import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = dict(layers=6, dim=512, ff_dim=2048, heads=8, vocab=16384, seq=256, batch=2)
RANKS = 2
WARMUP = 3  # steps left out at the start


class Row:
    """One program in one configuration, and what its repetitions gave."""

    def __init__(self, side, strategy, precision, products=None):
        self.side, self.strategy, self.precision, self.products = side, strategy, precision, products
        self.tokens_per_s, self.step_ms, self.rss_mib, self.notes = [], [], [], ""

    @property
    def name(self):
        name = "{} {} {}".format(self.side, self.strategy, self.precision)
        return name + (", {} products".format(self.products) if self.products else "")

    def add(self, step_ms, rss_mib):
        self.step_ms.append(step_ms)
        self.tokens_per_s.append(RANKS * MODEL["batch"] * MODEL["seq"] / step_ms * 1e3)
        self.rss_mib.append(rss_mib)

    @property
    def speed(self):
        return statistics.median(self.tokens_per_s)

    @property
    def memory(self):
        return statistics.median(self.rss_mib)


def rows():
    """Neighbours are compared: Sherd with its peer, bf16 with fp32, the ways of bf16 products with each other."""
    found = []
    for own, peer in (("ddp", "ddp"), ("full_shard", "fully_shard")):
        found += [Row("PyTorch", peer, "fp32"), Row("Sherd", own, "fp32"), Row("Sherd", own, "bf16"),
                  Row("PyTorch", peer, "bf16"), Row("Sherd", own, "bf16", "native"),
                  Row("Sherd", own, "bf16", "converted")]
    return found


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(command, environment, folder, timeout):
    """Starts the ranks as children of this process; returns (rank 0's stdout, largest resident set in MiB)."""
    port, processes, outputs = free_port(), [], []
    for rank in range(RANKS):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS),
                   LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                   OMP_NUM_THREADS="1", **environment)
        out = open(os.path.join(folder, "out{}".format(rank)), "w+")
        outputs.append(out)
        processes.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out,
                                          stderr=subprocess.STDOUT, cwd=folder))
    late = threading.Timer(timeout, lambda: [p.kill() for p in processes])
    late.start()
    largest, failed = 0, False
    for process in processes:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        failed |= process.returncode != 0
        largest = max(largest, usage.ru_maxrss / 1024)
    late.cancel()
    texts = []
    for out in outputs:
        out.seek(0)
        texts.append(out.read())
        out.close()
    if failed:
        raise RuntimeError("{}\nfailed: {}".format(" ".join(command), "\n".join(t[-2000:] for t in texts)))
    return texts[0], largest


def measure_torch(row, arguments, folder):
    m = MODEL
    command = [arguments.torch_python, os.path.join(ROOT, "benchmarks/torch_peer.py"), "--causal",
               "--parallel=" + ("ddp" if row.strategy == "ddp" else "fsdp"), "--dtype=" + row.precision,
               "--threads=1", "--layers={}".format(m["layers"]), "--dim={}".format(m["dim"]),
               "--ff-dim={}".format(m["ff_dim"]), "--heads={}".format(m["heads"]),
               "--vocab={}".format(m["vocab"]), "--seq={}".format(m["seq"]),
               "--batch={}".format(m["batch"]), "--steps={}".format(arguments.steps),
               "--warmup={}".format(WARMUP)]
    text, rss = run_ranks(command, {}, folder, arguments.timeout)
    result = json.loads([line for line in text.splitlines() if line.startswith("{")][-1])
    row.notes = result["peer"]
    row.add(result["step_ms"], rss)


def measure_sherd(row, arguments, folder):
    m = MODEL
    log = os.path.join(folder, "log.jsonl")
    if os.path.exists(log):
        os.remove(log)
    command = [os.path.join(ROOT, "bazel-bin/examples/big_model"), "--causal", "--threads=1",
               "--strategy=" + row.strategy, "--precision=" + row.precision,
               "--layers={}".format(m["layers"]), "--dim={}".format(m["dim"]),
               "--ff_dim={}".format(m["ff_dim"]), "--heads={}".format(m["heads"]),
               "--vocab_size={}".format(m["vocab"]), "--seq_len={}".format(m["seq"]),
               "--batch_size={}".format(m["batch"]), "--steps={}".format(arguments.steps + WARMUP),
               "--schedule=constant", "--warmup_steps=0", "--lr=1e-4", "--max_norm=0",
               "--data=" + os.path.join(folder, "tokens.bin"), "--eval_interval=0", "--save_interval=0",
               "--max_new_tokens=0", "--log_jsonl=" + log]
    environment = {"SHERD_BF16": row.products or "auto", "XDG_CACHE_HOME": folder}
    _, rss = run_ranks(command, environment, folder, arguments.timeout)
    steps = []
    with open(log) as file:
        for line in file:
            entry = json.loads(line)
            if "config" in entry:
                row.notes = entry["config"].get("bf16_products", "")
            elif "step_ms" in entry and entry["step"] > WARMUP:
                steps.append(entry["step_ms"])
    row.add(statistics.median(steps), rss)


def write_tokens(path, count):
    """Random tokens, uint16 and little-endian, from a fixed seed."""
    state, data = 1, bytearray()
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        data += ((state >> 33) % MODEL["vocab"]).to_bytes(2, "little")
    with open(path, "wb") as file:
        file.write(data)


def multiply_adds_per_token():
    """Forward and backward of one token: 3 passes over each weight, and causal scores and their use."""
    m = MODEL
    block = 4 * m["dim"] ** 2 + 2 * m["dim"] * m["ff_dim"] + m["seq"] * m["dim"]
    return 3 * (m["layers"] * block + m["dim"] * m["vocab"])


def paired(row, other):
    """The median over the repetitions of row's speed as a multiple of other's."""
    return statistics.median(a / b for a, b in zip(row.tokens_per_s, other.tokens_per_s))


def checks(by_name):
    """(what, reached, required, at least?) of each requirement."""
    for precision in ("fp32", "bf16"):
        for own, peer, required in (("ddp", "ddp", 1.0), ("full_shard", "fully_shard", 1.3)):
            a, b = by_name["Sherd {} {}".format(own, precision)], by_name["PyTorch {} {}".format(peer, precision)]
            yield "{}: speed beside {}".format(a.name, b.name), paired(a, b), required, True
            yield "{}: resident memory beside {}".format(a.name, b.name), a.memory / b.memory, 0.5, False
    for own in ("ddp", "full_shard"):
        bf16 = by_name["Sherd {} bf16".format(own)]
        yield "{}: speed beside own fp32".format(bf16.name), paired(bf16, by_name["Sherd {} fp32".format(own)]), 0.9, True
        forced = [by_name["{}, {} products".format(bf16.name, way)] for way in ("native", "converted")]
        faster = max(forced, key=lambda row: row.speed)
        yield "{}: speed beside the faster way forced".format(bf16.name), paired(bf16, faster), 0.95, True


def processor():
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return "{} x {}".format(len(names), names[0]) if names else platform.processor()


def share_of_bandwidth(machine):
    """AdamW's bytes a second on one thread, measured by //benchmarks:kernels."""
    program = os.path.join(ROOT, "bazel-bin/benchmarks/kernels")
    out = subprocess.run([program, "--benchmark_filter=adamw/bits:32", "--benchmark_format=json"], check=True,
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(os.environ, OMP_NUM_THREADS="1"))
    rate = json.loads(out.stdout)["benchmarks"][0]["bytes_per_second"] / 1e9
    return rate, rate / machine["read_gb_per_s"]


def report(all_rows, arguments, machine, seconds):
    by_name = {row.name: row for row in all_rows}
    lines = ["# Performance", "",
             "BigModel (causal, {layers} layers, dim {dim}, ff_dim {ff_dim}, {heads} heads, vocabulary {vocab}), "
             "sequences of {seq} tokens, {batch} a rank; ".format(**MODEL) +
             "{} ranks on one machine, one thread each; AdamW. Both sides in turn, the median of {} "
             "repetitions, each the median of {} steps; {} in {:.0f} minutes. Made by "
             "`benchmarks/side_by_side.py`.".format(
                 RANKS, arguments.repetitions, arguments.steps, time.strftime("%Y-%m-%d"), seconds / 60), "",
             "Machine: {}. Measured on one thread: {:.0f} GFLOP/s of float32 multiply-adds, {:.1f} GB/s read from "
             "memory. bfloat16 products: {}.".format(processor(), machine["fma_gflops"], machine["read_gb_per_s"],
                                                   machine["bf16"]), "",
             "| program | tokens/s | step, ms | spread | resident MiB, a rank | share of the FMA peak |",
             "|---|---|---|---|---|---|"]
    peak = RANKS * machine["fma_gflops"] * 1e9
    for row in all_rows:
        share = row.speed * 2 * multiply_adds_per_token() / peak
        spread = (max(row.tokens_per_s) - min(row.tokens_per_s)) / row.speed
        lines.append("| {} | {:.0f} | {:.0f} | {:.0%} | {:.0f} | {:.0%} |".format(
            row.name, row.speed, statistics.median(row.step_ms), spread, row.memory, share))
    lines += ["", "The share counts a model's multiply-adds alone (three passes over each weight, causal attention), "
              "against the float32 peak of {} threads.".format(RANKS)]
    try:
        rate, share = share_of_bandwidth(machine)
        lines.append("AdamW, which is bound by memory, moves {:.1f} GB/s on one thread: {:.0%} of what reading alone "
                     "reaches.".format(rate, share))
    except (OSError, subprocess.CalledProcessError, KeyError, IndexError, ValueError):
        pass
    lines += ["", "| requirement | reached | required | |", "|---|---|---|---|"]
    good = True
    for what, reached, required, at_least in checks(by_name):
        ok = reached >= required if at_least else reached <= required
        good &= ok
        lines.append("| {} | {:.2f} | {} {:.2f} | {} |".format(what, reached, ">=" if at_least else "<=", required,
                                                               "yes" if ok else "**no**"))
    notes = sorted({row.notes for row in all_rows if row.side == "PyTorch" and row.notes})
    if notes:
        lines += ["", "The peer: {}, with its fused AdamW; bf16 by autocast and, for fully_shard, its mixed precision "
                  "policy (float32 reductions). Its memory includes its libraries.".format(", ".join(notes))]
    return "\n".join(lines) + "\n", good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", required=True, help="a Python that can import torch")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="measured, after {} others".format(WARMUP))
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run")
    parser.add_argument("--markdown", help="write the report here too")
    parser.add_argument("--json", help="write all figures here")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: tries this script, measures nothing")
    parser.add_argument("--only", help="rows whose name contains this, without a verdict")
    arguments = parser.parse_args()
    if arguments.smoke:
        MODEL.update(layers=1, dim=64, ff_dim=64, vocab=512, seq=32)
    start, failed = time.time(), False
    all_rows = [row for row in rows() if not arguments.only or arguments.only in row.name]
    machine = json.loads(subprocess.run([os.path.join(ROOT, "bazel-bin/benchmarks/machine")], check=True,
                                        stdout=subprocess.PIPE).stdout)
    with tempfile.TemporaryDirectory() as folder:
        samples = RANKS * MODEL["batch"] * (arguments.steps + WARMUP + 1)
        write_tokens(os.path.join(folder, "tokens.bin"), samples * MODEL["seq"] + 1)
        for repetition in range(arguments.repetitions):
            for row in all_rows[::-1] if repetition % 2 else all_rows:
                # PyTorch's ranks sometimes abort while they end.
                for attempt in (1, 2) if row.side == "PyTorch" else (2,):
                    try:
                        (measure_torch if row.side == "PyTorch" else measure_sherd)(row, arguments, folder)
                        print("{}/{}  {:45} {:7.0f} tokens/s  {:6.0f} MiB  {}".format(
                            repetition + 1, arguments.repetitions, row.name, row.tokens_per_s[-1], row.rss_mib[-1],
                            row.notes), flush=True)
                        break
                    except (RuntimeError, OSError, IndexError, ValueError, statistics.StatisticsError) as error:
                        failed |= attempt == 2
                        print("FAILED  {}: {}".format(row.name, error), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine, "rows": {r.name: {
                "step_ms": r.step_ms, "rss_mib": r.rss_mib, "notes": r.notes} for r in all_rows}}, file, indent=1)
    if arguments.only or failed:
        return failed
    text, good = report(all_rows, arguments, machine, time.time() - start)
    print("\n" + text)
    if arguments.markdown:
        with open(arguments.markdown, "w") as file:
            file.write(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
