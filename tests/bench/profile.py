#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Where the time of a prompt and of an answer goes: what `make profile` prints.

Runs bench-decode under `perf record` (the clock of the processor: no hardware counters are needed), once for both, and
takes apart by time what belongs to which. For each, symbols and groups of them with their share of the samples. An operation other than
matrix products that takes more than 5 % of an answer's time is flagged. Writes BUILD_DIR/bench/profile.json.

A thread that waits for the others in the pool is in the group `pool`. Functions that the compiler put into others are
counted as those. Exit status 0; 77 when there is no perf, no right to use it, or no model.
"""
import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FREQUENCY = 4000
FLAG_PERCENT = 5
LINES = 14
PRODUCTS = "matrix products"

# The first that matches. Converting activations is part of a product.
GROUPS = [
    ("kernel", None),  # by where it is, not by name
    ("attention", r"attention|attend|rope|store_(piece|row)|softmax|f16_to_f32|f32_to_f16|flash|score"),
    ("delta", r"delta|conv_silu|conv_piece|l2_norm|gates_piece|gemm_add|decayed"),
    ("routing", r"route|top_k|choose|gather_piece|sum_piece|moe_cpu|residency|evict|heat|second_form|run_experts"),
    ("norms", r"norm|silu|sigmoid|swiglu|add_scaled|add_piece|bias|copy_piece|scalar|embed"),
    ("pool", r"^pool_|^work$|^worker_main$|futex|^syscall$|nanosleep|sched_yield|clock_gettime"),
    (PRODUCTS, r"matmul|quantize|convert|dot|gemm|gemv|tile|narrow|wide|unpack|expert_piece|hidden_piece|dequant|q[2-8]_|iq[2-4]_|mxfp4"),
]
OTHER = "other"


class Missing(Exception):
    """Why there is no profile."""


def last_line(text):
    return (text.strip().splitlines() or ["it says nothing"])[-1]


def group_of(symbol, dso):
    if dso.startswith("[kernel") or dso == "[unknown]" and symbol == "[unknown]":
        return "kernel"
    return next((name for name, pattern in GROUPS if pattern and re.search(pattern, symbol)), OTHER)


def record(args, data):
    command = [args.perf, "record", "-q", "-e", "cpu-clock", "-F", str(FREQUENCY), "-k", "CLOCK_MONOTONIC", "-o", data, "--",
               os.path.join(args.build, "tests/bench/bench-decode"), "-m", args.model, "--threads", str(args.threads), "--fill",
               "--rehearse", "--tune", "--prefill", str(args.prefill), "--warm", "8", "--decode", str(args.decode)]
    p = subprocess.run(command, capture_output=True, text=True, check=False)
    if p.returncode != 0 or not p.stdout.strip():
        raise Missing(f"perf record: {last_line(p.stderr)}")
    return json.loads(p.stdout.strip().splitlines()[-1])


def samples(args, data):
    """(microseconds, symbol, object) of every sample."""
    p = subprocess.run([args.perf, "script", "-i", data, "-F", "time,ip,sym,dso"], capture_output=True, text=True, check=False)
    if p.returncode != 0:
        raise Missing(f"perf script: {last_line(p.stderr)}")
    for line in p.stdout.splitlines():
        m = re.match(r"\s*(\d+)\.(\d+):\s+[0-9a-f]+ (.*) \((.*)\)$", line)
        if m:
            yield int(m[1]) * 1_000_000 + int(m[2].ljust(6, "0")[:6]), m[3], m[4]


def shares(counts):
    total = sum(counts.values())
    return {key: 100 * n / total for key, n in counts.most_common()} if total else {}


def take_apart(all_samples, window):
    symbols, groups = collections.Counter(), collections.Counter()
    for at, symbol, dso in all_samples:
        if window[0] <= at < window[1]:
            group = group_of(symbol, dso)
            symbols[symbol, group] += 1
            groups[group] += 1
    return sum(groups.values()), shares(symbols), shares(groups)


def print_phase(name, speed, profile):
    n, symbols, groups = profile
    print(f"\n{name}: {speed:.1f} tok/s, {n} samples")
    for group, percent in groups.items():
        print(f"  {percent:5.1f} %  {group}")
    print()
    for (symbol, group), percent in list(symbols.items())[:LINES]:
        print(f"  {percent:5.1f} %  {symbol}  ({group})")


def find_model(args):
    if not args.model:
        args.model = os.path.join(args.build, "bench/models/slice-8-0.4-1.gguf")
    if not os.path.exists(args.model):
        raise Missing(f"{args.model} does not exist: `make bench` makes it, or --model FILE")


def profile(args):
    args.perf = shutil.which("perf")
    if not args.perf:
        raise Missing("no perf")
    find_model(args)
    os.makedirs(os.path.join(args.build, "bench"), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="profile-", dir=os.path.join(args.build, "bench")) as directory:
        data = os.path.join(directory, "perf.data")
        result = record(args, data)
        every = list(samples(args, data))
    phases = {"prefill": take_apart(every, result["prefill_window_us"]), "decode": take_apart(every, result["decode_window_us"])}
    if not all(n for n, _, _ in phases.values()):
        raise Missing("perf saw nothing of it: too short, or another clock")
    return result, phases


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--build", default=os.path.join(ROOT, "build"), metavar="DIR")
    ap.add_argument("--model", metavar="FILE", help="a GGUF file; default: the slice model of `make bench`")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--prefill", type=int, default=512, metavar="TOKENS")
    ap.add_argument("--decode", type=int, default=256, metavar="TOKENS")
    args = ap.parse_args()
    args.build = os.path.abspath(args.build)
    try:
        result, phases = profile(args)
    except Missing as e:
        print(f"skip: {e}")
        sys.exit(77)
    except KeyboardInterrupt:
        sys.exit(130)
    flagged = {group: percent for group, percent in phases["decode"][2].items()
               if group != PRODUCTS and percent > FLAG_PERCENT}
    print(f"{os.path.basename(args.model)}: {args.threads} threads, {result['isa']}; after the same once before")
    for name, measured in phases.items():
        print_phase(name, result[name + "_tok_s"], measured)
    print()
    for group, percent in flagged.items():
        print(f"ABOVE {FLAG_PERCENT} % of an answer's time: {group}, {percent:.1f} %")
    if not flagged:
        print(f"nothing but {PRODUCTS} takes more than {FLAG_PERCENT} % of an answer's time")
    with open(os.path.join(args.build, "bench/profile.json"), "w", encoding="utf-8") as f:
        json.dump({name: {"samples": n, "groups": groups, "symbols": {s: p for (s, _), p in symbols.items()}}
                   for name, (n, symbols, groups) in phases.items()} | {"flagged": flagged}, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
