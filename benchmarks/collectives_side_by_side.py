#!/usr/bin/env python3
"""Collectives on one host: Sherd (shm, gloo, mpi), PyTorch over gloo, and Open MPI's own, in one table.

    ./bazelw build //benchmarks:collectives
    benchmarks/collectives_side_by_side.py --torch-python=/path/to/venv/bin/python [--ranks=2] [--repeat=3]

Runs are interleaved, and the best of all repetitions counts, for the machine may do other things in between. The
last column says what part of the memory's bandwidth Sherd reaches: the least bytes that a rank has to read and write
for the collective, by Sherd's time, over what all ranks together get when each copies 64 MiB of its own memory, in the
faster of two ways, until the last is done.
Without --torch-python, or without mpirun and mpicxx, those sides are left out.
"""
import argparse
import os
import shutil
import subprocess
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def least_bytes(op, size, ranks):
    """What a rank has to read and write at least, where all do their share."""
    return {
        "all_reduce": 2 * size,
        "all_gather": 2 * size * (ranks - 1) / ranks,
        "reduce_scatter": size + size / ranks,
        "broadcast": 2 * size * (ranks - 1) / ranks,
    }[op]


def sides(arguments, folder):
    yield "shm", [arguments.binary, f"--ranks={arguments.ranks}", "--backend=shm", "--csv"]
    yield "gloo", [arguments.binary, f"--ranks={arguments.ranks}", "--backend=gloo", "--csv"]
    if shutil.which("mpirun"):
        yield "mpi", [arguments.binary, f"--ranks={arguments.ranks}", "--backend=mpi", "--csv"]
    if arguments.torch_python:
        yield "PyTorch", [arguments.torch_python, "-m", "torch.distributed.run", "--standalone",
                          f"--nproc_per_node={arguments.ranks}", f"{ROOT}/benchmarks/torch_collectives.py"]
    if shutil.which("mpicxx"):
        program = os.path.join(folder, "mpi_collectives")
        subprocess.run(["mpicxx", "-std=c++17", "-O2", "-DOMPI_SKIP_MPICXX", "-o", program,
                        f"{ROOT}/benchmarks/mpi_collectives.cc"], check=True)
        yield "Open MPI", ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(arguments.ranks), program]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=f"{ROOT}/bazel-bin/benchmarks/collectives")
    parser.add_argument("--torch-python")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    best = {}  # (side, op, bytes): microseconds
    with tempfile.TemporaryDirectory() as folder:
        commands = list(sides(arguments, folder))
        for _ in range(arguments.repeat):
            for side, command in commands:
                environment = dict(os.environ, OMP_NUM_THREADS="1")
                out = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout
                for line in out.splitlines():
                    op, size, us = line.split(",")
                    key = (side, op, int(size))
                    best[key] = min(best.get(key, 1e30), float(us))
    bandwidth = 2 * (64 << 20) / best["shm", "copy", 64 << 20]  # bytes a microsecond
    names = [side for side, _ in commands]
    print(f"{arguments.ranks} ranks; microseconds a call; each rank copies at {bandwidth / 1e3:.1f} GB/s (read and written)\n")
    print("| collective | bytes | " + " | ".join(names) + " | shm's share of bandwidth |")
    print("|---|---|" + "---|" * len(names) + "---|")
    for op in OPS:
        for size in sorted({k[2] for k in best if k[1] == op}):
            cells = []
            for side in names:
                us = best.get((side, op, size))
                ratio = f" ({us / best['shm', op, size]:.1f} ×)" if us and side != "shm" else ""
                cells.append(f"{us:,.0f}{ratio}" if us else "–")
            share = least_bytes(op, size, arguments.ranks) / best["shm", op, size] / bandwidth
            print(f"| {op} | {size:,} | " + " | ".join(cells) + f" | {share:.2f} |")


if __name__ == "__main__":
    main()
