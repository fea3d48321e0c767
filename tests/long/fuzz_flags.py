#!/usr/bin/env python3
"""Random command lines for big_model: each trains, or is refused in one line with exit code 2. Nothing else happens.

    tests/long/fuzz_flags.py bazel-bin/examples/big_model [COUNT [SEED]]
"""
import os
import random
import subprocess
import sys
import tempfile

NUMBERS = ["0", "1", "2", "3", "7", "64", "-1", "1e9", "99999999999999999999", "0x10", "1.5", "nan", "inf", "", " 2", "2 ",
           "two"]
WORDS = ["sharded", "full", "full_shard", "shard_grad_op", "no_shard", "ddp", "hybrid_shard", "none", "post", "fp32", "bf16", "fp16", "bytes", "bpe", "cosine", "constant", "laptop",
         "true", "false", "auto", "cpu", "", "\u00e9", "--", "a b", "%s%n", "/", "/dev/null", "/nonexistent/x", "."]
# Left out: what would only take long (--preset=seed). --lr stays as it is, since a loss that is not finite is exit code 1.
NUMERIC = ["layers", "dim", "ff_dim", "heads", "vocab_size", "seq_len", "batch_size", "accumulate", "steps", "warmup_steps",
           "wrap_min_params", "shard_group_size", "eval_interval", "save_interval", "top_k", "seed", "threads", "nproc_per_node", "temperature",
           "min_lr", "beta1", "beta2", "weight_decay", "max_norm", "max_new_tokens"]
OTHERS = ["checkpoint_format", "async_save", "strategy", "backward_prefetch", "cpu_offload", "precision", "tokenizer", "schedule", "causal", "shuffle", "activation_checkpointing", "resume",
          "overwrite", "data", "val_data", "checkpoint_dir", "init_from", "save_weights", "log_jsonl", "prompt", "none"]
# Values that are right and only too large to be tried.
HUGE = {"layers", "dim", "ff_dim", "seq_len", "steps", "accumulate", "batch_size", "threads", "nproc_per_node",
        "max_new_tokens"}


def command_line(rng, folder):
    flags = dict(nproc_per_node="1", layers="1", dim="16", ff_dim="16", heads="2", vocab_size="97", seq_len="8",
                 batch_size="1", steps="1", eval_interval="0", save_interval="0", max_new_tokens="0",
                 data=os.path.join(folder, "tokens.bin"), checkpoint_dir=os.path.join(folder, "run"))
    extra = []
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.6:
            name, value = rng.choice(NUMERIC), rng.choice(NUMBERS if rng.random() < 0.9 else WORDS)
        else:
            name, value = rng.choice(OTHERS), rng.choice(WORDS if rng.random() < 0.9 else NUMBERS)
        if name in HUGE and value in ("1e9", "99999999999999999999"):
            continue
        if rng.random() < 0.1:
            extra.append("--" + name)  # no value
        elif rng.random() < 0.1:
            extra.append(rng.choice(WORDS))
        else:
            flags[name] = value
    line = ["--{}={}".format(k, v) for k, v in flags.items()] + extra
    rng.shuffle(line)
    return line


def main(program, count, seed):
    rng = random.Random(seed)
    trained = refused = bad = 0
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "tokens.bin"), "wb") as file:
            for i in range(2000):
                file.write((i * 31 % 97).to_bytes(2, "little"))
        environment = dict(os.environ, XDG_CACHE_HOME=folder, OMP_NUM_THREADS="1")
        environment.pop("BUILD_WORKING_DIRECTORY", None)
        program = os.path.abspath(program)
        for _ in range(count):
            line = command_line(rng, folder)
            try:
                r = subprocess.run([program] + line, env=environment, cwd=folder, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
                code, err = r.returncode, r.stderr.decode(errors="replace")
            except subprocess.TimeoutExpired:
                code, err = "no end in 120 s", ""
            if code == 0:
                trained += 1
            elif code == 2 and len(err.splitlines()) == 1 and err.startswith("big_model: "):
                refused += 1
            else:
                bad += 1
                print("exit code {}: {}\n{}".format(code, " ".join(repr(a) for a in line), err[:2000]), flush=True)
    print("seed {}: {} command lines trained, {} were refused, {} did neither".format(seed, trained, refused, bad))
    return 1 if bad or not trained or not refused else 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 300,
                  int(sys.argv[3]) if len(sys.argv) > 3 else 1))
