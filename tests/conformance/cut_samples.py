#!/usr/bin/env python3
"""Cuts a small sample from folders that PyTorch's export scripts wrote, for conformance_test.

    cut_samples.py OPS MODULES OUT SUPPORTED     # SUPPORTED: ids of cases that Sherd runs, one a line

Takes, of each op (or module) and dtype, the smallest cases of each shape of call, and refusals; up to a size in all.
"""
import json, os, struct, sys

WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}


def read(folder):
    data = open(os.path.join(folder, "tensors.safetensors"), "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    cases = [json.loads(line) for line in open(os.path.join(folder, "cases.jsonl"))]
    return cases, {k: (v, data[8 + n + v["data_offsets"][0] : 8 + n + v["data_offsets"][1]]) for k, v in header.items()}


def buffers(v):
    if isinstance(v, dict):
        for k, x in v.items():
            if k == "t":
                yield x
            elif k == "cotangents":
                yield from (b for b in x if b)
            else:
                yield from buffers(x)
    elif isinstance(v, list):
        for x in v:
            yield from buffers(x)


def kind(case):
    """What makes two cases alike: names and ranks of the arguments, whether it is refused."""
    shape = lambda v: len(v["sizes"]) if isinstance(v, dict) and "t" in v else type(v).__name__
    args = [case.get("input")] + case["args"]
    return (case.get("error", False), tuple(shape(a) for a in args), tuple(sorted(case["kwargs"])))


def cut(folder, out, supported, name_of, limit):
    cases, tensors = read(folder)
    chosen, total = [], 0
    groups = {}
    for c in cases:
        if c["id"] not in supported:
            continue
        size = sum(len(tensors[b][1]) for b in set(buffers(c)))
        groups.setdefault((c[name_of], c["id"].split("/")[1]), {}).setdefault(kind(c), []).append((size, c))
    by_name = {}
    for (name, dtype), kinds in groups.items():
        picks = sorted((min(g, key=lambda x: x[0]) for g in kinds.values()), key=lambda x: x[0])
        by_name.setdefault(name, {})[dtype] = picks
    for dtypes in by_name.values():
        picks = [p for dtype, all in dtypes.items() for p in [q for q in all if q[0] <= limit][: 2 if dtype == "float64" else 1]]
        chosen += [c for _, c in picks or [min((p for all in dtypes.values() for p in all), key=lambda x: x[0])]]
    os.makedirs(out, exist_ok=True)
    header, body, names = {}, b"", {}
    used = sorted({b for c in chosen for b in buffers(c)}, key=lambda b: (-WIDTH[tensors[b][0]["dtype"]], int(b[1:])))
    for b in used:
        info, data = tensors[b]
        names[b] = f"b{len(names)}"
        header[names[b]] = {"dtype": info["dtype"], "shape": info["shape"], "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    relabel = lambda v: {k: names[x] if k == "t" else [n and names[n] for n in x] if k == "cotangents" else relabel(x) for k, x in v.items()} if isinstance(v, dict) else [relabel(x) for x in v] if isinstance(v, list) else v
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(out, "tensors.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + body)
    with open(os.path.join(out, "cases.jsonl"), "w") as f:
        for c in chosen:
            f.write(json.dumps(relabel(c), separators=(",", ":")) + "\n")
    print(out, len(chosen), "cases of", len(groups), "groups,", len(text) + len(body), "bytes of tensors")


def main():
    ops, modules, out, supported = sys.argv[1:]
    supported = {line.strip() for line in open(supported)}
    cut(ops, os.path.join(out, "ops"), supported, "op", 600)
    cut(modules, os.path.join(out, "modules"), supported, "module", 1500)


if __name__ == "__main__":
    main()
