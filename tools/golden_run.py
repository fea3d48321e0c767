#!/usr/bin/env python3
"""Runs big_model on one of tests/goldens and compares it with PyTorch's trace.

    tools/golden_run.py bazel-bin/examples/big_model bigmodel_tiny RANKS STRATEGY [more flags of big_model]

Prints the largest differences; exit code 1 if one is outside of its tolerance: losses 2e-5 and gradient norms 2e-4 relative,
final weights 2e-4 absolute, the key part of in_proj_bias 5e-3 (see tests/goldens/README.md); with --precision=bf16 the loss
alone counts, within 3%. Needs no packages.
"""
import array
import json
import os
import subprocess
import sys
import tempfile


def load(path):
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        data = f.read()
    tensors = {}
    for name, t in header.items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            tensors[name] = array.array("f", data[begin:end])
    return tensors


def main(binary, case, ranks, strategy, *extra):
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "goldens", case)
    with open(os.path.join(folder, "trace.json")) as f:
        trace = json.load(f)
    c = trace["config"]
    with tempfile.TemporaryDirectory() as scratch:
        weights, log = os.path.join(scratch, "w.safetensors"), os.path.join(scratch, "log.jsonl")
        flags = dict(nproc_per_node=ranks, layers=c["layers"], dim=c["dim"], ff_dim=c["ff_dim"], heads=c["heads"],
                     vocab_size=c["vocab"], seq_len=c["seq"], causal=str(c["causal"]).lower(),
                     batch_size=c["batch"] // int(ranks), accumulate=c["accumulate"], steps=c["steps"], lr=c["lr"],
                     weight_decay=c["weight_decay"], max_norm=c["max_norm"], schedule="constant", warmup_steps=0,
                     strategy=strategy, data=os.path.join(folder, "tokens.bin"),
                     init_from=os.path.join(folder, "init.safetensors"), save_weights=weights, log_jsonl=log,
                     shuffle="false", eval_interval=0, save_interval=0)
        subprocess.run([binary] + ["--{}={}".format(k, v) for k, v in flags.items()] + list(extra), check=True,
                       stdout=subprocess.DEVNULL)
        with open(log) as f:
            steps = [s for s in map(json.loads, f) if "loss" in s]
        got, want = load(weights), load(os.path.join(folder, "final.safetensors"))
    if len(steps) != c["steps"] or set(got) != set(want):
        sys.exit("{} steps of {}; names differ: {}".format(len(steps), c["steps"], set(got) ^ set(want)))
    worst = dict(loss=0.0, grad_norm=0.0, weights=0.0, key_bias=0.0)
    for a, b in zip(steps, trace["steps"]):
        for k in ("loss", "grad_norm"):
            worst[k] = max(worst[k], abs(a[k] - b[k]) / abs(b[k]))
    for name, w in want.items():
        third = len(w) // 3
        for i, (x, y) in enumerate(zip(got[name], w)):
            key = name.endswith("in_proj_bias") and third <= i < 2 * third
            k = "key_bias" if key else "weights"
            worst[k] = max(worst[k], abs(x - y))
    limits = dict(loss=2e-5, grad_norm=2e-4, weights=2e-4, key_bias=5e-3)
    if "--precision=bf16" in extra:
        limits = dict(loss=0.03)
    print(case, ranks, strategy, *extra, " ".join("{} {:.1e}".format(k, v) for k, v in worst.items()))
    sys.exit(any(worst[k] > limits[k] for k in limits))


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
