#!/usr/bin/env python3
"""The PyTorch side of side_by_side.py: the same model, data shapes and optimizer, timed per step.

One process:   python3 torch_peer.py --threads 2
Data parallel: torchrun --standalone --nproc_per_node 2 torch_peer.py --parallel fsdp --threads 1

Prints one JSON line from rank 0: tokens/s (all ranks together, of the median step), and the first and last loss.
Data are random tokens from a fixed seed: this measures speed and memory, not learning. Module names and shapes are
those of examples/big_model.h.
"""
import argparse
import json
import os
import resource
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class LargeTransformerBlock(nn.Module):
    """The block of the design: x = LN(x + MHA(x)); x = x + FFN(x), ReLU feed-forward."""

    def __init__(self, dim, ff_dim, heads, causal):
        super().__init__()
        self.causal = causal
        self.layer_norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(dim, ff_dim), nn.ReLU(), nn.Linear(ff_dim, dim))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device) if self.causal else None
        x = self.layer_norm(x + self.attention(x, x, x, need_weights=False, attn_mask=mask, is_causal=self.causal)[0])
        return x + self.ffn(x)


class BigModel(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.embedding = nn.Embedding(a.vocab, a.dim)
        self.layers = nn.ModuleList([LargeTransformerBlock(a.dim, a.ff_dim, a.heads, a.causal) for _ in range(a.layers)])
        self.output_head = nn.Linear(a.dim, a.vocab)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.output_head(x)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--parallel", choices=["none", "ddp", "fsdp"], default="none")
    p.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    p.add_argument("--device", default="cpu")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--no-fused", action="store_true", help="AdamW as a loop of ops (before PyTorch 2.4 the only one on CPUs)")
    for k, v in dict(layers=6, dim=512, heads=8, vocab=16384, seq=256, batch=2, steps=12, warmup=3, threads=1).items():
        p.add_argument("--" + k, type=int, default=v)
    p.add_argument("--ff-dim", type=int, default=0, help="0 means 4 * dim")
    p.add_argument("--causal", action="store_true", help="mask the future")
    a = p.parse_args()
    a.ff_dim = a.ff_dim or 4 * a.dim
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if a.parallel != "none":
        torch.distributed.init_process_group("nccl" if a.device == "cuda" else "gloo")
    model = BigModel(a).to(a.device)
    params = sum(x.numel() for x in model.parameters())
    amp = torch.autocast(a.device, torch.bfloat16, enabled=a.dtype == "bf16")
    if a.parallel == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif a.parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(a.device, (world,))
        mp = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if a.dtype == "bf16" else MixedPrecisionPolicy()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=mp)
        fully_shard(model, mesh=mesh, mp_policy=mp)
    # The strongest peer that users can switch on.
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not a.no_fused)
    run = torch.compile(model) if a.compile else model
    g = torch.Generator().manual_seed(rank)
    data = torch.randint(0, a.vocab, (a.batch, a.seq + 1), generator=g).to(a.device)
    x, y = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    times, losses = [], []
    for _ in range(a.warmup + a.steps):
        if a.device == "cuda":
            torch.cuda.synchronize()
        t = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        with amp:
            loss = F.cross_entropy(run(x).float().view(-1, a.vocab), y.view(-1))
        loss.backward()
        opt.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - t)
    rss = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0])
    if a.parallel != "none":
        torch.distributed.all_reduce(rss if a.device == "cpu" else rss.cuda(), op=torch.distributed.ReduceOp.MAX)
    if rank == 0:
        step = statistics.median(times[a.warmup :])
        print(json.dumps(dict(peer="torch " + torch.__version__, **{k: getattr(a, k) for k in ("parallel", "dtype", "layers", "dim", "heads", "vocab", "seq", "batch", "threads")},
            world=world, params=params, step_ms=round(step * 1e3, 2), tokens_per_s=round(world * a.batch * a.seq / step, 1),
            peak_rss_mib=round(rss.item(), 1), loss_first=round(losses[0], 4), loss_last=round(losses[-1], 4))))
    if a.parallel != "none":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
