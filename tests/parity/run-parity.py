#!/usr/bin/env python3
"""Compares the engine's logits with those of llama.cpp on random models. Needs npm (to fetch the peer), gcc, numpy.

run-parity.py [BUILD_DIR] [--peer DIR] [--no-slice] [--models [FAMILY/]SIZE:QUANT,...] [--seeds N]

For each model the same random ids are evaluated by both: 96 at once and 32 one by one; all positions count.

F32 weights: the root mean square of all differences stays under 2e-4.  F16: under 4e-3.
Everything else (and F16 when a near tie in the router made the two pick another expert, which no tolerance on logits
covers): KL divergence and top-1 agreement are no worse than the peer has against itself.  "The peer against itself" is the worst of: batches of 1 and 4
against 512, and the RMS norms' epsilon changed by one part in ten thousand, up and down.  That last is a change in the last bit or two of
a float (on F32 weights it moves the logits as much as another batch size does), which is the least by which two engines can
differ; on quantised weights a batch size alone often changes nothing, because the peer runs the very same code, and then there
is no noise to compare with.  Both sides are means over a few hundred positions with a heavy tail (one flipped expert changes a
whole sequence), so two standard errors of the difference are allowed, taken over positions.

Families without delta nets: their norms are of values whose mean square is about 1, where a ten thousandth of the epsilon is less than
the last bit; there it moves by 5e-7, four of that bit, which again does to F32 weights what a batch size does (by that much less where the
embeddings are the head too, and small).  And families other than qwen35moe have an F32 KV cache for every type of weight: the peer rounds
queries and probabilities to half precision where its cache is, we do not, and the first family's rows say that this costs nothing; without
it the two agree bit by bit at many positions.

Q4_1 and Q5_1: the peer rounds the sums of activations that their minimums are multiplied by to half precision, we do not.  There both are
compared with the peer on the same weights written as F32, and ours must be no farther from that than the peer's.

Prints a table, writes BUILD_DIR/parity.json; exit 1 when a row fails, 77 when the peer cannot be set up.
"""
import argparse
import json
import math
import os
import shutil
import statistics
import struct
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PREFILL, DECODE = 96, 32
RMS_MAX = {"F32": 2e-4, "F16": 4e-3}
TINY = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "MXFP4", "MIX"]
SMALL = ["F32", "F16", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "MIX"]
FIRST = "qwen35moe"
# The other families (mkgguf.py), and how most people have them.
FAMILIES = {"qwen3moe": "Q4_K_M", "qwen3": "Q4_K_M", "qwen35": "Q4_K_M", "llama": "Q4_K_M", "llama3": "Q4_K_M",
            "mistral": "Q4_K_M", "smollm": "Q4_K_M", "mixtral": "Q4_K_M", "yarn": "Q4_K_M", "gpt-oss": "MXFP4"}
# What llama-quantize's mixes leave out.
TYPES = ["Q5_0", "Q2_K", "Q3_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ4_NL", "IQ4_XS"]
EXPANDED = ["Q4_1", "Q5_1"]
EPS_KEY = b"attention.layer_norm_rms_epsilon"
SLICE_BYTES = 8 << 30
DELTA = ["qwen35moe", "qwen35"]
EPS_FACTOR = 1e-4
EPS_STEP = 5e-7
EPS_STEPS = {"llama3": 2e-8, "smollm": 8e-9}  # the mean square of their embeddings times EPS_STEP
# name -> (ubatch, sign of the change of the epsilon)
VARIANTS = {"batch 1": (1, 0), "batch 4": (4, 0), "eps up": (512, 1), "eps down": (512, -1)}


class Failed(Exception):
    pass


def call(args, **kw):
    p = subprocess.run(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw)
    if p.returncode != 0:
        last = (p.stderr.strip() or p.stdout.strip()).splitlines()[-1:] or [f"exit status {p.returncode}"]
        raise Failed(f"{os.path.basename(args[0])}: {last[0]}")
    return p.stdout


def skip(reason):
    print(f"# skip: parity: {reason}")
    sys.exit(77)


def build_tools(build):
    libs = ["-lsystemd", "-lpcre2-8", "-ljansson", "-luring", "-lm", "-pthread"]
    tools = {"residentd-logits": [os.path.join(build, "libresidentd.a")] + libs, "compare-logits": ["-lm"]}
    out = os.path.join(build, "tests", "parity")
    os.makedirs(out, exist_ok=True)
    for name, link in tools.items():
        call([os.environ.get("CC", "gcc"), "-std=gnu17", "-D_GNU_SOURCE", "-O2", "-I" + ROOT,
              os.path.join(HERE, name + ".c"), "-o", os.path.join(out, name)] + link)
    return [os.path.join(out, name) for name in tools]


def swap_eps(path, new):
    """Sets the epsilon in place; -> what it was."""
    with open(path, "r+b") as f:
        head = f.read(1 << 24)
        at = head.index(EPS_KEY) + len(EPS_KEY)
        kind, old = struct.unpack_from("<If", head, at)
        if kind != 6 or not 1e-7 < old < 1e-4:
            raise Failed("the epsilon is not where it should be")
        if new is not None:
            f.seek(at + 4)
            f.write(struct.pack("<f", new))
        return old


class Run:
    def __init__(self, options, work, logits, compare):
        self.o, self.work, self.logits, self.compare = options, work, logits, compare

    def file(self, name):
        return os.path.join(self.work, name)

    def peer(self, model, kv, seed, ubatch, out):
        text = call([os.path.join(self.o.peer, "peer"), "-m", model, "-r", str(PREFILL), "-n", str(DECODE), "--forced",
                     "--seed", str(seed), "--quiet-text", "--kv", kv, "--fa", "0", "--ubatch", str(ubatch),
                     "--threads", "1",  # its threads spin at barriers: two on a busy machine take ten times as long
                     "--logits", out, "--logits-all", "--ids", self.file("ids")])
        return int(text.split(" vocab ")[1].split(",")[0])

    def positions(self, n_vocab, a, b):
        rows = [line.split() for line in call([self.compare, str(n_vocab), a, b]).splitlines()]
        if len(rows) != PREFILL + DECODE:
            raise Failed(f"{len(rows)} positions instead of {PREFILL + DECODE}")
        return [(float(s), float(m), float(k), int(t)) for s, m, k, t in rows]

    def ours(self, model, kv, out):
        call([self.logits, "-m", model, "-i", self.file("ids"), "-o", out, "--kv", kv, "--prefill", str(PREFILL)])

    def model(self, model, family, quant, seeds):
        """-> {name of comparison: positions}, everything against the peer at a batch of 512."""
        kv = "f16" if family == FIRST and quant not in RMS_MAX else "f32"
        found = {name: [] for name in ["ours", *VARIANTS]}
        eps = swap_eps(model, None)
        step = eps * EPS_FACTOR if family in DELTA else EPS_STEPS.get(family, EPS_STEP)
        for seed in range(1, seeds + 1):
            n_vocab = self.peer(model, kv, seed, 512, self.file("peer"))
            self.ours(model, kv, self.file("other"))
            found["ours"] += self.positions(n_vocab, self.file("peer"), self.file("other"))
            for name, (ubatch, sign) in VARIANTS.items():
                swap_eps(model, eps + sign * step)
                try:
                    self.peer(model, kv, seed, ubatch, self.file("other"))
                finally:
                    swap_eps(model, eps)
                found[name] += self.positions(n_vocab, self.file("peer"), self.file("other"))
        return found

    def expanded(self, model, expanded, seeds):
        """The same, against the peer on the weights as F32."""
        found = {"ours": [], "quantised": []}
        for seed in range(1, seeds + 1):
            n_vocab = self.peer(expanded, "f32", seed, 512, self.file("peer"))
            self.ours(model, "f32", self.file("other"))
            found["ours"] += self.positions(n_vocab, self.file("peer"), self.file("other"))
            self.peer(model, "f32", seed, 512, self.file("other"))
            found["quantised"] += self.positions(n_vocab, self.file("peer"), self.file("other"))
        return found


def summary(positions):
    n = len(positions)
    kl = [p[2] for p in positions]
    top1 = sum(p[3] for p in positions) / n
    return {"positions": n, "rms": math.sqrt(sum(p[0] for p in positions) / n),
            "rms_median": math.sqrt(statistics.median(p[0] for p in positions)), "max": max(p[1] for p in positions),
            "kl": sum(kl) / n, "kl_error": statistics.stdev(kl) / math.sqrt(n), "top1": top1,
            "top1_error": math.sqrt(max(top1 * (1 - top1), 1 / n) / n)}


def judge(quant, found):
    ours = summary(found["ours"])
    self_ = {name: summary(positions) for name, positions in found.items() if name != "ours"}
    worst_kl = max(self_.values(), key=lambda s: s["kl"])
    worst_top1 = min(self_.values(), key=lambda s: s["top1"])
    kl_limit = worst_kl["kl"] + 2 * math.hypot(worst_kl["kl_error"], ours["kl_error"])
    top1_limit = worst_top1["top1"] - 2 * math.hypot(worst_top1["top1_error"], ours["top1_error"])
    like_peer = ours["kl"] <= kl_limit and ours["top1"] >= top1_limit
    rms_max = RMS_MAX.get(quant)
    if rms_max is None:
        ok = like_peer
    else:
        ok = ours["rms"] <= rms_max
        if quant == "F16" and not ok:
            ok = like_peer and ours["rms_median"] <= rms_max
    return {"ok": ok, "ours": ours, "peer": self_, "kl_limit": kl_limit, "top1_limit": top1_limit, "rms_limit": rms_max,
            "kl_peer": worst_kl["kl"], "top1_peer": worst_top1["top1"]}


def print_row(name, r):
    o = r["ours"]
    print(f"{name:18s} {o['rms']:9.2g} {o['rms_median']:9.2g} {o['max']:8.2g} | {o['kl']:9.2g} {r['kl_peer']:9.2g} "
          f"{r['kl_limit']:9.2g} | {o['top1']:7.4f} {r['top1_peer']:7.4f} {r['top1_limit']:7.4f} | "
          f"{'ok' if r['ok'] else 'FAILED'}", flush=True)


def one_model(run, family, size, quant, seeds):
    path, expanded = run.file("model.gguf"), run.file("expanded.gguf")
    make = ["/usr/bin/python3", os.path.join(HERE, "mkgguf.py"), family, size, "--quant", quant]
    make += ["--layers", "4"] if size == "slice" else []
    try:
        call([*make, "-o", path])
        if quant not in EXPANDED:
            return judge(quant, run.model(path, family, quant, seeds))
        call([*make, "--expand", "-o", expanded])
        return judge(quant, run.expanded(path, expanded, seeds))
    finally:
        for name in (path, expanded, path + ".part", expanded + ".part"):
            if os.path.exists(name):
                os.unlink(name)


def parse_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("build", nargs="?", default=os.environ.get("O", "build"))
    ap.add_argument("--peer", help="where setup has put the peer, or shall put it (BUILD_DIR/peer)")
    ap.add_argument("--no-slice", action="store_true", help="leave out the model of real layer shape (3 GB on disk)")
    ap.add_argument("--models", help="only these, e.g. tiny:F32,small:Q4_K_M,llama3/tiny:F16")
    ap.add_argument("--seeds", type=int, help="sequences a model (16, 2, 1 for tiny, small, slice)")
    o = ap.parse_args()
    o.peer = os.path.abspath(o.peer or os.path.join(o.build, "peer"))
    o.list = [(FIRST, "tiny", q) for q in TINY + TYPES] + [(FIRST, "small", q) for q in SMALL]
    for family, usual in FAMILIES.items():
        o.list += [(family, "tiny", q) for q in ("F32", "F16", usual)] + [(family, "small", "F32")]
    o.list += [("llama", "tiny", q) for q in EXPANDED]
    if not o.no_slice:
        o.list.append((FIRST, "slice", "Q4_K_M"))
    if o.models:
        o.list = [parse_model(m) for m in o.models.split(",")]
    return o


def parse_model(text):
    family, _, rest = text.rpartition("/")
    size, _, quant = rest.partition(":")
    return family or FIRST, size, quant


def main():
    o = parse_args()
    os.makedirs(o.build, exist_ok=True)
    try:
        call(["/usr/bin/python3", "-c", "import numpy"])
        call([os.path.join(HERE, "setup"), o.peer])
    except (Failed, OSError) as e:
        skip(f"the peer cannot be set up: {e}")
    work = os.path.join(o.build, "parity-work")
    os.makedirs(work, exist_ok=True)
    run = Run(o, work, *build_tools(o.build))
    print("                      difference of logits      |   KL to the peer, nats         |   same best token       |\n"
          "model                   rms    median      max |      ours peer/self     limit |    ours    self   limit |")
    rows, bad = {}, 0
    for family, size, quant in o.list:
        name = f"{size} {quant}" if family == FIRST else f"{family} {size} {quant}"
        if size == "slice" and shutil.disk_usage(work).free < SLICE_BYTES:
            print(f"# skip: {name}: less than {SLICE_BYTES >> 30} GiB free")
            continue
        try:
            rows[name] = one_model(run, family, size, quant, o.seeds or {"tiny": 16, "small": 2}.get(size, 1))
        except Failed as e:
            rows[name] = {"ok": False, "error": str(e)}
            print(f"{name:18s} FAILED: {e}", flush=True)
        else:
            print_row(name, rows[name])
        bad += not rows[name]["ok"]
    shutil.rmtree(work)
    with open(os.path.join(o.build, "parity.json"), "w", encoding="utf-8") as f:
        json.dump(rows, f, indent=1)
        f.write("\n")
    print(f"{len(rows)} models, {bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
