#!/usr/bin/env python3
"""The PyTorch side of collectives_side_by_side.py: torch.distributed over gloo, as "op,bytes,microseconds".

Started by torchrun. The same collectives and sizes as collectives_benchmark.cc, the best of 5 series. Gloo has no
reduce_scatter in some releases of PyTorch: then that line is missing.
"""
import time

import torch
import torch.distributed as dist


def cost_of(calls, f):
    best = 1e30
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            f()
        best = min(best, (time.perf_counter() - start) * 1e6 / calls)
    return best


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = 1 << 10
    while size <= 256 << 20:
        piece = size // 4 // ranks
        whole = torch.ones(piece * ranks)
        mine = whole[rank * piece:(rank + 1) * piece]
        own = torch.ones(piece)
        calls = 200 if size <= 1 << 16 else 20 if size <= 4 << 20 else 4
        for op, f in (
            ("all_reduce", lambda: dist.all_reduce(whole)),
            ("all_gather", lambda: dist.all_gather_into_tensor(whole, mine)),
            ("reduce_scatter", lambda: dist.reduce_scatter_tensor(own, whole)),
            ("broadcast", lambda: dist.broadcast(whole, 0)),
        ):
            try:
                us = cost_of(calls, f)
            except RuntimeError:
                continue
            if rank == 0:
                print(f"{op},{size},{us:.1f}", flush=True)
        size *= 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
