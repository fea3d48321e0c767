#!/usr/bin/env python3
"""What PyTorch's optimizers, schedulers and clipping do, as JSON: see README.md.

    pip install torch numpy;  python3 make_goldens.py > optim.json
"""
import json
import sys

import torch

GEN = torch.Generator().manual_seed(0)
SHAPES = [(3, 4), (4, 2), (5,), ()]


def short(shape, scale=1.0):  # values that print in few digits
    return (torch.randn(shape, generator=GEN, dtype=torch.float64) * 64).round() / 64 * scale


def optimizers():
    grid = [
        ("SGD", [dict(lr=0.1), dict(lr=0.1, momentum=0.9), dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
                 dict(lr=0.1, momentum=0.9, dampening=0.3), dict(lr=0.05, maximize=True, weight_decay=0.1)]),
        ("Adam", [dict(lr=0.01), dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1), dict(lr=0.01, amsgrad=True),
                  dict(lr=0.01, amsgrad=True, maximize=True, weight_decay=0.1)]),
        ("AdamW", [dict(lr=0.01), dict(lr=0.01, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1), dict(lr=0.01, amsgrad=True),
                   dict(lr=0.01, maximize=True, weight_decay=0.0)]),
    ]
    for name, hypers in grid:
        for hyper in hypers:
            for grouped in (False, True):
                params = [short(s).requires_grad_() for s in SHAPES]
                make = getattr(torch.optim, name)
                if grouped:
                    groups, own = [[0], [1, 2, 3]], [{}, {"lr": hyper["lr"] / 10, "weight_decay": 0.0}]
                    optimizer = make([{"params": [params[i] for i in g], **o} for g, o in zip(groups, own)], **hyper)
                else:
                    groups, own = [[0, 1, 2, 3]], [{}]
                    optimizer = make(params, **hyper)
                start, grads, after = [p.tolist() for p in params], [], []
                for step in range(5):
                    for i, p in enumerate(params):  # one has no gradient in a step, one a gradient of 0
                        p.grad = None if (step, i) == (2, 1) else short(p.shape, 0.0 if (step, i) == (3, 0) else 1.0)
                    grads.append([None if p.grad is None else p.grad.tolist() for p in params])
                    optimizer.step()
                    after.append([p.tolist() for p in params])
                yield dict(name=name, hyper=hyper, groups=groups, group_hyper=own, params=start, grads=grads, after=after)


def muon():
    generator = torch.Generator().manual_seed(1)

    def matrix(shape):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * 64).round() / 64

    for hyper in (dict(lr=0.02), dict(lr=0.02, nesterov=False, momentum=0.8, weight_decay=0.0),
                  dict(lr=0.01, adjust_lr_fn="match_rms_adamw", ns_steps=3), dict(lr=0.01, adjust_lr_fn="spectral_unclamped")):
        params = [matrix(s).requires_grad_() for s in ((3, 4), (7, 2), (5, 5), (1, 6))]
        groups, own = [[0, 1], [2, 3]], [{}, {"lr": hyper["lr"] / 10}]
        optimizer = torch.optim.Muon([{"params": [params[i] for i in g], **o} for g, o in zip(groups, own)], **hyper)
        start, grads, after = [p.tolist() for p in params], [], []
        for step in range(4):
            for i, p in enumerate(params):  # one has no gradient in a step
                p.grad = None if (step, i) == (2, 1) else matrix(p.shape)
            grads.append([None if p.grad is None else p.grad.tolist() for p in params])
            optimizer.step()
            after.append([p.tolist() for p in params])
        yield dict(hyper=hyper, groups=groups, group_hyper=own, params=start, grads=grads, after=after)


def schedulers():
    S = torch.optim.lr_scheduler
    cases = [("StepLR", dict(step_size=3, gamma=0.5)), ("MultiStepLR", dict(milestones=[2, 5, 5], gamma=0.1)),
             ("ExponentialLR", dict(gamma=0.9)), ("ConstantLR", dict(factor=0.3, total_iters=4)),
             ("LinearLR", dict(start_factor=0.1, end_factor=0.8, total_iters=5)), ("CosineAnnealingLR", dict(T_max=6, eta_min=0.01)),
             ("CosineAnnealingWarmRestarts", dict(T_0=3, T_mult=2, eta_min=0.001)),
             ("CosineAnnealingWarmRestarts", dict(T_0=4)), ("PolynomialLR", dict(total_iters=6, power=2.0)),
             ("OneCycleLR", dict(max_lr=1.0, total_steps=12, pct_start=0.25)),
             ("OneCycleLR", dict(max_lr=1.0, total_steps=12, pct_start=0.25, three_phase=True)),
             ("OneCycleLR", dict(max_lr=1.0, total_steps=12, anneal_strategy="linear", three_phase=True, cycle_momentum=False))]
    for name, args in cases:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5, momentum=0.9)
        yield run(name, args, optimizer, getattr(S, name)(optimizer, **args))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5, momentum=0.9)
    parts = [S.LinearLR(optimizer, 0.1, 1.0, 4), S.CosineAnnealingLR(optimizer, 8, 0.05)]
    yield run("SequentialLR", {}, optimizer, S.SequentialLR(optimizer, parts, milestones=[4]))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5, momentum=0.9)
    yield run("LambdaLR", {}, optimizer, S.LambdaLR(optimizer, lambda t: 1 / (1 + t)))


def run(name, args, optimizer, scheduler):
    lrs, momenta = [], []
    for t in range(12):
        lrs.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        if t < 11:
            scheduler.step()
    return dict(name=name, args=args, base_lr=0.5, lrs=lrs, momenta=momenta)


def clips():
    inf = float("inf")
    for scale in (1 / 64, 1.0, 128.0):
        for kind, limit, norm_type in (("norm", 1.0, 2.0), ("norm", 1.0, 1.0), ("norm", 0.5, inf), ("norm", 2.0, 3.0), ("value", 0.3, 0.0)):
            params = [torch.zeros(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2), (4,), ())]
            for p in params:
                p.grad = short(p.shape, scale)
            grads = [p.grad.tolist() for p in params]
            if kind == "norm":
                total = torch.nn.utils.clip_grad_norm_(params, limit, norm_type).item()
            else:
                total = torch.nn.utils.clip_grad_value_(params, limit)
            yield dict(kind=kind, max=limit, norm_type=str(norm_type), grads=grads, total_norm=total, after=[p.grad.tolist() for p in params])


if __name__ == "__main__":
    data = dict(made_with="torch " + torch.__version__, optimizers=list(optimizers()), schedulers=list(schedulers()), clip=list(clips()), muon=list(muon()))
    json.dump(data, sys.stdout, separators=(",", ":"))
