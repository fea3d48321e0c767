#!/usr/bin/env python3
"""A checkpoint made with PyTorch: weights and AdamW's state after three steps, and the losses of the next three.

    pip install torch numpy safetensors;  python3 make_checkpoint.py          # writes checkpoint/ beside this file
    python3 make_checkpoint.py --check MODEL.safetensors OPTIMIZER.safetensors    # loads what Sherd wrote; prints losses

The model is Sequential(Linear(5, 7), ReLU, Linear(7, 3)). Element (i, j) of the input of step s is sin(0.3 (5 i + j + 1 + 17 s)),
row i of 12 has class (i + s) modulo 3.
"""
import json, os, sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

LR, DECAY, BETAS, EPS = 1e-2, 0.02, (0.9, 0.98), 1e-8


def build():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def loss_of(model, step):
    dtype = next(model.parameters()).dtype
    n = torch.arange(1, 61, dtype=torch.float64).view(12, 5) + 17 * step
    return F.cross_entropy(model(torch.sin(0.3 * n).to(dtype)), (torch.arange(12) + step) % 3)


def train(model, opt, first, last):
    losses = []
    for step in range(first, last):
        opt.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def load(model, opt, weights, state):
    """Weights and optimizer state under Sherd's names into a torch model and its optimizer."""
    model.load_state_dict({k: v.to(next(model.parameters()).dtype) for k, v in weights.items()})
    for name, p in model.named_parameters():
        s = lambda what: state[f"state.{name}.{what}"]
        opt.state[p] = dict(step=s("step").to(torch.float32), exp_avg=s("exp_avg").to(p.dtype), exp_avg_sq=s("exp_avg_sq").to(p.dtype))
    group = opt.param_groups[0]
    group["lr"] = float(state["param_groups.0.lr"])
    group["betas"] = tuple(float(b) for b in state["param_groups.0.betas"])
    group["eps"] = float(state["param_groups.0.eps"])
    group["weight_decay"] = float(state["param_groups.0.weight_decay"])


def main():
    if sys.argv[1:2] == ["--check"]:
        model = build()
        opt = adamw(model)
        load(model, opt, load_file(sys.argv[2]), load_file(sys.argv[3]))
        print(json.dumps(train(model, opt, 3, 6)))
        return
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoint")
    os.makedirs(folder, exist_ok=True)
    model = build()
    opt = adamw(model)
    train(model, opt, 0, 3)
    weights = {k: v.clone().contiguous() for k, v in model.state_dict().items()}
    f64 = lambda v: torch.tensor(v, dtype=torch.float64)
    state = {
        "param_groups.0.lr": f64(LR),
        "param_groups.0.betas": f64(BETAS),
        "param_groups.0.eps": f64(EPS),
        "param_groups.0.weight_decay": f64(DECAY),
        "param_groups.0.amsgrad": torch.tensor(False),
        "param_groups.0.maximize": torch.tensor(False),
    }
    for name, p in model.named_parameters():
        s = opt.state[p]
        state[f"state.{name}.step"] = torch.tensor(int(s["step"]))
        state[f"state.{name}.group"] = torch.tensor(0)
        state[f"state.{name}.exp_avg"] = s["exp_avg"].clone()
        state[f"state.{name}.exp_avg_sq"] = s["exp_avg_sq"].clone()
    save_file(weights, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    save_file(state, os.path.join(folder, "optimizer.safetensors"), metadata={"format": "pt"})
    exact = build().double()
    again = adamw(exact)
    load(exact, again, weights, state)
    losses = train(exact, again, 3, 6)
    with open(os.path.join(folder, "trace.json"), "w") as f:
        json.dump(dict(made_with="torch " + torch.__version__, losses=losses), f, indent=1)
    print(losses)


if __name__ == "__main__":
    main()
