#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The engine on the CPU beside llama.cpp, in the same run: what `make bench` prints.

Sets up the peer (npm) and makes the slice model (4.8 GB: eight layers of the real shape of Qwen3.5-35B-A3B, Q4_K_M) where they
are missing, waits until nothing else runs, and runs both in turns, with the model in the page cache, where residentd has put it
(in folios of 2 MiB, where the file system has them). llama.cpp runs in two modes,
with its weights copied to an interleaved layout (repack) and without (mmap); each figure is compared with the better one.
Then the kernels, in GB/s beside what memory streams.

What is run does everything twice, and the second time counts, but for the first token. A figure is the median of the rounds.
What memory streams is measured right before and after every run of `decode`, because it changes: on a virtual machine by
more than half, within minutes. bandwidth_share compares a run with the better of its two; a run
during which memory changed is repeated, and so is a round whose runs found different ones.
Writes BUILD_DIR/bench/cpu.json with every number. Some ten minutes. Exit status 0 when it ran; with --check, 1 when a figure
misses what it must have, or could not be measured; 77: no model can be made here.
"""
import argparse
import contextlib
import functools
import json
import os
import platform
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests/sys"))
import rd  # noqa: E402

PARITY = os.path.join(ROOT, "tests/parity")
MODEL = ["qwen35moe", "slice", "--layers", "8", "--skew", "0.4", "--seed", "1"]
MODEL_BYTES, SPARE_BYTES = 4_900_000_000, 1 << 30
RUN_TIMEOUT = 300
ROUNDS = 5
CONTEXT = 4096
FIRST_PROMPT = "The first"
OTHERS_PERCENT = 8  # of all processors: more is no quiet machine
QUIET_WAIT_S, QUIET_LOOK_S = 180, 2  # in all; each
REPEATS = 10  # of runs and rounds that others disturbed, in all
STEADY = 0.85  # what memory streams after a run / before it, or the other way round: less is another machine
STREAM_MB = 512
MODES = {"mmap": ["--load", "mmap", "--no-repack"], "repack": ["--load", "mmap"]}

# key: (least or most, bound, goal, part, what)
FIGURES = {
    "bandwidth_share": ("least", 0.90, 0.95, "decode", "decode: weight bytes a token x tok/s / streaming read beside it"),
    "decode_ratio": ("least", 1.03, 1.08, "decode", "decode: tok/s, residentd / llama.cpp"),
    "prefill512_ratio": ("least", 1.4, 1.8, "decode", "same, prompt of 512 tokens"),
    "prefill128_ratio": ("least", 1.4, 1.8, "prefill128", "same, prompt of 128 tokens"),
    "busy_ratio": ("least", 1.6, 2.0, "busy", "decode while another program keeps one core busy"),
    "first_token_ratio": ("least", 1.5, 4, "first", "s from start to first token: llama.cpp with mmap / ours"),
    "rss_over_weights_mb": ("most", 300, 150, "rss", "peak RSS beyond one copy of the weights, context 4096: MB"),
}
# Which run and which of its numbers a figure is made of.
SOURCES = {
    "bandwidth_share": ("decode", "decode_tok_s"), "decode_ratio": ("decode", "decode_tok_s"),
    "prefill512_ratio": ("decode", "prefill_tok_s"), "prefill128_ratio": ("prefill128", "prefill_tok_s"),
    "busy_ratio": ("busy", "decode_tok_s"), "first_token_ratio": ("first", "first_s"),
    "rss_over_weights_mb": ("rss", "over_mb"),
}
# Prompt and answer of each part; quick: to see that it runs.
SIZES = {"decode": (512, 64), "prefill128": (128, 0), "busy": (8, 64), "rss": (CONTEXT - 128, 16)}
QUICK = {"decode": (64, 8), "prefill128": (32, 0), "busy": (4, 4), "rss": (256, 4)}


class Missing(Exception):
    """Why something cannot be measured."""


FAILURES = (Missing, subprocess.TimeoutExpired, AssertionError, OSError, rd.Error, rd.Closed)


def say(text):
    print(text, file=sys.stderr, flush=True)


def last_line(text):
    return (text.strip().splitlines() or ["it says nothing"])[-1]


# ---- the machine ----


def busy_s():
    """Processor seconds that have been used: by everybody, and by this process and those that it has waited for."""
    with open("/proc/stat", encoding="ascii") as f:
        user, nice, system, _, _, irq, softirq, steal = map(int, f.readline().split()[1:9])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ours = sum(u.ru_utime + u.ru_stime for u in used)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), ours


class Others:
    """What others use of the processors while something runs: percent of all of them."""

    def __enter__(self):
        self.begun, self.before = time.monotonic(), busy_s()
        self.percent = 0.0
        return self

    def __exit__(self, *_):
        everybody, ours = (a - b for a, b in zip(busy_s(), self.before))
        elapsed = max(time.monotonic() - self.begun, 1e-3)
        self.percent = 100 * max(0.0, everybody - ours) / elapsed / os.cpu_count()


def wait_for_quiet(seconds):
    """True when for a moment others left the processors alone. Returns that and how long it took."""
    begun = time.monotonic()
    while True:
        with Others() as others:
            time.sleep(QUIET_LOOK_S)
        waited = time.monotonic() - begun
        if others.percent < OTHERS_PERCENT or waited >= seconds:
            return others.percent < OTHERS_PERCENT, waited


def first_of(path, key):
    with open(path, encoding="utf-8", errors="replace") as f:
        return next((line.partition(":")[2].strip() for line in f if line.startswith(key)), None)


def memory_bytes(key):
    """None: the kernel does not say."""
    found = first_of("/proc/meminfo", key)
    return int(found.split()[0]) * 1024 if found else None


def machine():
    return {"cpu": first_of("/proc/cpuinfo", "model name") or platform.machine(),
            "processors": len(os.sched_getaffinity(0)), "memory_bytes": memory_bytes("MemTotal"),
            "kernel": platform.release(), "system": platform.system(), "architecture": platform.machine()}


def forget(path):
    """Out of the page cache: what is still to be written first."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def read_all(path):
    """Into the page cache: both engines find the file there. What is there stays as it is."""
    buffer = bytearray(8 << 20)
    with open(path, "rb", buffering=0) as f:
        while f.readinto(buffer):
            pass


@contextlib.contextmanager
def one_core_busy():
    """Another program that never waits, on a core of its own choosing that stays the same."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def steady(streaming):
    """Whether memory streamed about the same each time."""
    return not streaming or min(streaming) >= STEADY * max(streaming)


def one_copy(mapped, weights):
    """Of the weights, as far as they are in memory; a process that has read them elsewhere has no use for the mapping."""
    return min(mapped, weights) if mapped > weights / 2 else weights


# ---- the two engines ----


class Peer:
    def __init__(self, directory, model, threads):
        self.program, self.model, self.threads = os.path.join(directory, "peer"), model, threads

    def command(self, mode, prompt, answer, *more):
        return [self.program, "-m", self.model, "-r", str(prompt), "-n", str(answer), "--forced", "--quiet-text",
                "--threads", str(self.threads), *MODES[mode], *more]

    def run(self, mode, prompt, answer, *more):
        p = subprocess.run(self.command(mode, prompt, answer, *more), capture_output=True, text=True, timeout=RUN_TIMEOUT,
                           check=False)
        if p.returncode != 0:
            raise Missing(f"the peer ended with {p.returncode}: {last_line(p.stderr)}")
        return p.stdout

    def speeds(self, mode, prompt, answer):
        out = self.run(mode, prompt, answer, "--reps", "2")
        result = {}
        for what in "prefill", "decode":
            found = re.findall(rf"^{what}: \d+ tokens.*?, [\d.]+ s, ([\d.]+) tok/s", out, re.M)
            if len(found) == 2:
                result[what + "_tok_s"] = float(found[1])
        if "prefill_tok_s" not in result or (answer > 0 and "decode_tok_s" not in result):
            raise Missing("the peer says no speed")
        return result

    def memory(self, mode, prompt, answer):
        out = self.run(mode, prompt, answer, "--ctx", str(CONTEXT))
        weights = re.search(r"^model: .*?, ([\d.]+) GB", out, re.M)
        used = re.search(r"^after run: .*?file ([\d.]+)\), peak ([\d.]+) MiB", out, re.M)
        if not weights or not used:
            raise Missing("the peer says nothing of memory")
        mapped, peak = (float(x) * 1048576 for x in used.groups())
        return {"over_mb": (peak - one_copy(mapped, float(weights[1]) * 1e9)) / 1e6, "peak_mb": peak / 1e6}

    def first(self, mode, prompt):
        begun = time.monotonic()
        with subprocess.Popen(self.command(mode, prompt, 0), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True) as p:
            try:
                for line in p.stdout:
                    if line.startswith("prefill:"):
                        return {"first_s": time.monotonic() - begun}
            finally:
                p.kill()
        raise Missing("the peer says nothing of a prompt")


class Ours:
    def __init__(self, build, model, threads):
        self.build, self.model, self.threads = build, model, threads
        rd.BUILD, rd.RESIDENTD = build, os.path.join(build, "residentd")
        rd.sanitized = functools.cache(rd.sanitized)  # reading the program is not its start

    def bench(self, prompt, answer, *more):
        command = [os.path.join(self.build, "tests/bench/bench-decode"), "-m", self.model, "--threads", str(self.threads),
                   "--prefill", str(prompt), "--warm", "0", "--decode", str(answer), *more]
        p = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT, check=False)
        if p.returncode != 0:
            raise Missing(f"bench-decode ended with {p.returncode}: {last_line(p.stderr)}")
        return json.loads(p.stdout)

    def speeds(self, prompt, answer):
        result = self.bench(prompt, answer, "--fill", "--rehearse", "--tune")
        if result["tier"] != "unmanaged":
            raise Missing("this machine has not the memory for all of the model")
        return {k: result[k] for k in ("prefill_tok_s", "decode_tok_s", "isa") if k != "decode_tok_s" or answer > 0}

    def daemon(self):
        return rd.Daemon(self.model, {"Model": {"Context": CONTEXT}, "Engine": {"Threads": self.threads},
                                      "Memory": {"VramBudget": "off"}}, wait=False)

    @staticmethod
    def complete(daemon, prompt, answer):
        """The usage of a raw completion; connects as soon as that is possible."""
        end = time.monotonic() + RUN_TIMEOUT
        while True:
            if daemon.process.poll() is not None or time.monotonic() > end:
                raise Missing(f"residentd does not start: {last_line(daemon.log())}")
            with contextlib.suppress(OSError):
                client = daemon.client(timeout=RUN_TIMEOUT)
                break
            time.sleep(0.001)
        with client:
            return client.call("Complete", {"prompt": prompt, "options": {"max_tokens": answer, "temperature": 0}})["usage"]

    def first(self):
        begun = time.monotonic()
        with self.daemon() as daemon:
            usage = self.complete(daemon, FIRST_PROMPT, 1)
            took = time.monotonic() - begun
        if not 1 <= usage["prompt_tokens"] <= 8:
            raise Missing(f"{FIRST_PROMPT!r} is {usage['prompt_tokens']} tokens")
        return {"first_s": took, "prompt_tokens": usage["prompt_tokens"]}

    def warm_up(self):
        self.bench(1, 0, "--fill")

    def first_bench(self, prompt):
        begun = time.monotonic()
        self.bench(prompt, 0)
        return {"first_s": time.monotonic() - begun}

    def mapped(self, pid):
        """Bytes of the model file that are mapped and in memory."""
        total, counts = 0, False
        with open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as f:
            for line in f:
                if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                    counts = line.rstrip("\n").endswith(os.path.realpath(self.model))
                elif counts and line.startswith("Rss:"):
                    total += int(line.split()[1]) * 1024
        return total

    def memory(self, prompt, answer):
        with self.daemon() as daemon:
            self.complete(daemon, "a", 1)
            with daemon.client(timeout=RUN_TIMEOUT) as c:
                words = " time people world place number company"
                per_word = len(c.call("Tokenize", {"text": words * 16})["tokens"]) / 16
                text = words * max(1, int(prompt / per_word))
                usage = c.call("Complete", {"prompt": text, "options": {"max_tokens": answer, "temperature": 1, "seed": 1}})
                weights = c.call("GetStatus")["model"]["weight_bytes"]
            if usage["usage"]["prompt_tokens"] < 0.9 * prompt:
                raise Missing("the prompt came out too short")
            peak = int(first_of(f"/proc/{daemon.pid}/status", "VmHWM").split()[0]) * 1024
            mapped = self.mapped(daemon.pid)
        return {"over_mb": (peak - one_copy(mapped, weights)) / 1e6, "peak_mb": peak / 1e6}


# ---- the benchmark ----


class Bench:
    def __init__(self, args):
        self.args = args
        self.build = os.path.abspath(args.build)
        self.directory = os.path.join(self.build, "bench")
        self.model = os.path.abspath(args.model or os.path.join(self.directory, "models/slice-8-0.4-1.gguf"))
        self.sizes = QUICK if args.quick else SIZES
        self.parts = {FIGURES[key][3] for key in args.only if key in FIGURES}
        self.runs, self.why, self.disturbed = {}, {}, 0
        self.machine, self.kernels, self.token_bytes, self.weights = machine(), None, 0, 0
        self.quiet_left, self.waited, self.quiet = (0 if args.quick else QUIET_WAIT_S), 0.0, True
        self.repeats_left = 0 if args.quick else REPEATS
        self.peer, self.modes = None, list(MODES)
        self.ours = Ours(self.build, self.model, args.threads)
        self.membw = None

    # ---- what is needed ----

    def make_model(self):
        directory, part = os.path.dirname(self.model), self.model + ".part"
        os.makedirs(directory, exist_ok=True)
        free = shutil.disk_usage(directory).free
        if free < MODEL_BYTES + SPARE_BYTES:
            raise Missing(f"{directory} has {free / 1e9:.1f} GB free; the model takes {MODEL_BYTES / 1e9:.1f}")
        say(f"making {self.model}: 4.8 GB, half a minute or more")
        try:
            p = subprocess.run(["/usr/bin/python3", os.path.join(PARITY, "mkgguf.py"), *MODEL, "-o", part],
                               capture_output=True, text=True, check=False)
            if p.returncode != 0:
                raise Missing(f"no model can be made: {last_line(p.stderr)}")
            os.replace(part, self.model)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)

    def set_up_peer(self):
        directory = os.path.abspath(self.args.peer or os.path.join(self.directory, "peer"))
        if not os.access(os.path.join(directory, "peer"), os.X_OK):
            say("setting up llama.cpp (npm)")
            p = subprocess.run([os.path.join(PARITY, "setup"), directory], capture_output=True, text=True, check=False)
            if p.returncode != 0:
                say(f"llama.cpp cannot be had here, so that ours runs alone: {last_line(p.stderr)}")
                self.why["peer"] = "llama.cpp cannot be had here"
                self.modes = []
                return
        self.peer = Peer(directory, self.model, self.args.threads)
        self.membw = os.path.join(directory, "membw")
        size = os.path.getsize(self.model)
        if self.machine["memory_bytes"] < 2 * size + (3 << 30):
            say("llama.cpp runs without repacking: that takes the memory of two models")
            self.modes.remove("repack")

    def look_at_model(self):
        p = subprocess.run([os.path.join(self.build, "residentctl"), "--json", "model", "show", self.model],
                           capture_output=True, text=True, check=False)
        if p.returncode != 0:
            raise Missing(f"{self.model}: {last_line(p.stderr)}")
        shown = json.loads(p.stdout)
        self.token_bytes, self.weights = shown["needs"]["token_bytes"], shown["weight_bytes"]
        if memory_bytes("MemAvailable") < self.weights + SPARE_BYTES:
            raise Missing("this machine has not the memory for all of the model")

    def prepare(self):
        os.makedirs(self.directory, exist_ok=True)
        if self.parts:
            if not os.path.exists(self.model):
                if self.args.model:
                    raise Missing(f"{self.model} does not exist")
                self.make_model()
            self.look_at_model()
            self.set_up_peer()
        if not (self.membw and os.access(self.membw, os.X_OK)):
            self.membw = None

    # ---- single runs ----

    def settle(self):
        """Waits for the machine, as long as there is patience left."""
        if self.quiet_left <= 0:
            return
        quiet, waited = wait_for_quiet(min(self.quiet_left, 60))
        self.quiet_left -= waited
        self.waited += waited
        if not quiet and self.quiet:
            say("something else runs on this machine: the speeds mean little")
        self.quiet = self.quiet and quiet

    def stream_gb_s(self):
        if self.membw:
            p = subprocess.run([self.membw, str(STREAM_MB), str(self.args.threads)], capture_output=True, text=True,
                               timeout=RUN_TIMEOUT, check=False)
            found = re.search(r"best ([\d.]+) GB/s", p.stdout)
            if not found:
                raise Missing("what memory streams could not be measured")
            return float(found[1])
        return max(s["gb_s"] for s in self.bench_kernels("--memory")["streaming"])

    def beside_memory(self, function, *args):
        """What it returns, with what memory streams before and after, where that can be measured."""
        streaming = []
        with contextlib.suppress(*FAILURES):
            streaming.append(self.stream_gb_s())
        result = function(*args)
        with contextlib.suppress(*FAILURES):
            streaming.append(self.stream_gb_s())
        return {**result, "streaming_gb_s": streaming}

    def bench_kernels(self, *options):
        p = subprocess.run([os.path.join(self.build, "tests/bench/bench-kernels"), "--json", *options], capture_output=True,
                           text=True, timeout=RUN_TIMEOUT, check=False)
        if p.returncode != 0:
            raise Missing(f"bench-kernels ended with {p.returncode}: {last_line(p.stderr)}")
        return json.loads(p.stdout)

    def why_disturbed(self, result):
        if result["others_percent"] > OTHERS_PERCENT:
            return f"others used {result['others_percent']:.0f} % of the machine"
        if not steady(result.get("streaming_gb_s")):
            return "memory streamed {:.1f} GB/s before and {:.1f} after".format(*result["streaming_gb_s"])
        return None

    def one(self, part, who, function, *args):
        """Runs one, notes what it says, or why it says nothing: then it is not run again."""
        name = f"{part} {who}"
        if name in self.why:
            return None
        read_all(self.model)
        try:
            with Others() as others:
                result = self.beside_memory(function, *args) if part == "decode" else function(*args)
        except FAILURES as e:
            self.why[name] = (str(e).splitlines() or [type(e).__name__])[0]
            self.runs.pop(name, None)
            say(f"  {name}: {self.why[name]}")
            return None
        result["others_percent"] = round(others.percent, 1)
        why = self.why_disturbed(result)
        if why and self.repeats_left > 0:
            self.repeats_left -= 1
            say(f"  {name}: {why}; once more")
            self.settle()
            return self.one(part, who, function, *args)
        self.disturbed += why is not None
        self.runs.setdefault(name, []).append(result)
        say(f"  {name}: " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()))
        return result

    # ---- parts of a round ----

    def speeds(self, part):
        runs = [self.one(part, "ours", self.ours.speeds, *self.sizes[part])]
        for mode in self.modes:
            runs.append(self.one(part, mode, self.peer.speeds, mode, *self.sizes[part]))
        return [run for run in runs if run]

    prefill128 = speeds

    def decode(self, part):
        """Speeds are compared with each other: memory has to be the same for all."""
        runs = self.speeds(part)
        if steady([speed for run in runs for speed in run["streaming_gb_s"]]):
            return
        if self.repeats_left <= 0:
            self.disturbed += 1
            return
        self.repeats_left -= 1
        say("  memory changed between them; once more")
        for name in [name for name in self.runs if name.startswith(f"{part} ")]:
            self.runs[name] = [run for run in self.runs[name] if not any(run is other for other in runs)]
        self.decode(part)

    def busy(self, part):
        def beside(function, *args):
            with one_core_busy():
                return function(*args)
        self.one(part, "ours", beside, self.ours.speeds, *self.sizes[part])
        for mode in self.modes:
            self.one(part, mode, beside, self.peer.speeds, mode, *self.sizes[part])

    def first(self, part):
        ours = self.one(part, "ours", self.ours.first)
        prompt = ours["prompt_tokens"] if ours else 2
        self.one(part, "ours, without the service", self.ours.first_bench, prompt)
        if self.peer:
            self.one(part, "mmap", self.peer.first, "mmap", prompt)

    def rss(self, part):
        self.one(part, "ours", self.ours.memory, *self.sizes[part])
        for mode in self.modes:
            self.one(part, mode, self.peer.memory, mode, *self.sizes[part])

    def fill_page_cache(self):
        """
        As the service does when it starts with a cold cache, and not by reading: then the size of folios is a matter of chance, and
        decoding differs by some percent. Both engines find the same.
        """
        say("bringing the model into the page cache")
        forget(self.model)
        try:
            self.ours.warm_up()
        except FAILURES as e:
            say(f"residentd cannot: {e}")  # and will say so again where it counts
        read_all(self.model)
        self.machine["huge_file_bytes"] = memory_bytes("FileHugePages")  # of all files

    def measure(self):
        begun, rounds = time.monotonic(), self.args.rounds
        if self.parts:
            self.fill_page_cache()
            self.settle()
        for i in range(rounds):
            for part in "decode", "prefill128", "busy", "first":
                if part not in self.parts:
                    continue
                say(f"round {i + 1} of {rounds}, {part}:")
                self.settle()
                getattr(self, part)(part)
        if "rss" in self.parts:
            say("memory of a full context:")
            self.rss("rss")
        if "kernels" in self.args.only:
            say("kernels:")
            self.settle()
            self.kernels = self.bench_kernels()
        say(f"{time.monotonic() - begun:.0f} s, of which {self.waited:.0f} s waiting for a quiet machine")

    # ---- figures ----

    def values(self, name, field):
        if name in self.why:
            raise Missing(self.why[name])
        if name not in self.runs:
            raise Missing(self.why.get("peer", "was not run"))
        return [r[field] for r in self.runs[name]]

    @staticmethod
    def spread(values):
        return {"values": values, "min": min(values), "median": statistics.median(values), "max": max(values)}

    def best_mode(self, part, field):
        """The peer's mode with the better median: of seconds and megabytes the smaller one."""
        better = min if part in ("first", "rss") else max
        found, why = {}, None
        for mode in MODES:
            try:
                found[mode] = self.spread(self.values(f"{part} {mode}", field))
            except Missing as e:
                why = why or str(e)
        if not found:
            raise Missing(why)
        return better(found, key=lambda mode: found[mode]["median"]), found

    def streaming(self):
        return [speed for name, runs in self.runs.items() if name.startswith("decode ")
                for run in runs for speed in run["streaming_gb_s"]]

    def shares(self, name, field):
        if not all(run["streaming_gb_s"] for run in self.runs[name]):
            raise Missing("what memory streams could not be measured")
        return [run[field] * self.token_bytes / 1e9 / max(run["streaming_gb_s"]) for run in self.runs[name]]

    def figure(self, row, key, part, field):
        ours = self.values(f"{part} ours", field)
        row["ours"] = self.spread(ours)
        if part == "first":
            with contextlib.suppress(Missing):
                row["ours_without_service"] = self.spread(self.values("first ours, without the service", field))
        with contextlib.suppress(Missing):
            mode, found = self.best_mode(part, field)
            row["peer"] = {"mode": mode, **found[mode], "modes": found}
        if key == "bandwidth_share":
            row["token_bytes"] = self.token_bytes
            each = self.shares("decode ours", field)
            row["of_best"] = statistics.median(ours) * self.token_bytes / 1e9 / max(self.streaming())
            if row["peer"]:
                row["peer"]["share"] = statistics.median(self.shares(f"decode {row['peer']['mode']}", field))
            return each, statistics.median(each)
        if part == "rss":
            return ours, max(ours)
        if not row["peer"]:
            self.best_mode(part, field)  # says why
        other = row["peer"]["values"]
        if part == "first":
            return [b / a for a, b in zip(ours, other)], row["peer"]["median"] / row["ours"]["median"]
        return [a / b for a, b in zip(ours, other)], row["ours"]["median"] / row["peer"]["median"]

    def figures(self):
        table = {}
        for key, (kind, bound, goal, _, what) in FIGURES.items():
            if key not in self.args.only:
                continue
            row = {"what": what, "measured": None, "min": None, "median": None, "max": None, "at_" + kind: bound, "goal": goal,
                   "pass": None, "goal_met": None, "ours": None, "peer": None}
            try:
                each, row["measured"] = self.figure(row, key, *SOURCES[key])
                row.update({k: v for k, v in self.spread(each).items() if k != "values"})
                row["pass"] = row["measured"] >= bound if kind == "least" else row["measured"] <= bound
                row["goal_met"] = row["measured"] >= goal if kind == "least" else row["measured"] <= goal
            except Missing as e:
                row["why"] = str(e)
            table[key] = row
        return table

    def result(self):
        return {**self.figures(),
                "machine": {**self.machine, "threads": self.args.threads, "quiet": self.quiet,
                            "disturbed_runs": self.disturbed},
                "model": {"file": os.path.basename(self.model), "weight_bytes": self.weights, "token_bytes": self.token_bytes},
                "rounds": self.args.rounds, "quick": self.args.quick, "streaming_gb_s": self.streaming(),
                "kernels": self.kernels, "runs": self.runs}


# ---- what is printed ----


def shown(value):
    return "-" if value is None else f"{value:.4g}"


def met(row):
    if row["pass"] is None:
        return f"not measured: {row['why']}"
    return "MISSED" if not row["pass"] else "yes, and the goal" if row["goal_met"] else "yes"


def print_figures(table):
    print(f"{'key':21} {'measured':>9} {'min':>8} {'max':>8} {'ours':>8} {'peer':>8} {'mode':>7} {'at least':>9} {'goal':>5}  met?")
    for key, row in table.items():
        bound = shown(row["at_least"]) if "at_least" in row else "<= " + shown(row["at_most"])
        goal = shown(row["goal"])
        ours, peer = row["ours"] or {}, row["peer"] or {}
        print(f"{key:21} {shown(row['measured']):>9} {shown(row['min']):>8} {shown(row['max']):>8} "
              f"{shown(ours.get('median')):>8} {shown(peer.get('median')):>8} {peer.get('mode', '-'):>7} {bound:>9} {goal:>5}  "
              f"{met(row)}")


def print_memory(row, streaming):
    print(f"\nMemory streamed {min(streaming):.1f} to {max(streaming):.1f} GB/s beside the runs of decode; "
          f"against the best of all bandwidth_share is {row['of_best']:.3f}.")


def print_kernels(kernels):
    streaming = {s["threads"]: s["gb_s"] for s in kernels["streaming"]}
    threads = sorted(streaming)
    print("\nkernels, GB/s of weights with one column (share of streaming), and Gflop/s with 64 columns on one thread")
    print(f"{'type':8} {'table':7} " + " ".join(f"{f'{t} thread' + 's' * (t > 1):>15}" for t in threads) + f" {'64 columns':>11}")
    print(f"{'reading':8} {'':7} " + " ".join(f"{streaming[t]:>7.1f}{'':8}" for t in threads))
    for row in kernels["products"]:
        cells = {c["threads"]: f"{c['gb_s']:7.1f} ({100 * c['share']:3.0f} %)" for c in row["one_column"]}
        print(f"{row['type']:8} {row['table']:7} " + " ".join(f"{cells[t]:>15}" for t in threads) +
              f" {row['gflops_64_columns']:11.1f}")
    for row in kernels["layers"]:
        print(f"{row['table']:16} delta rule {row['delta_step_us']:.2f} us a token, {row['delta_chunk_us_per_token']:.2f} in "
              f"chunks; attention over 4096 {row['attention_4096_us']:.0f} us")


def write_json(path, value):
    with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(path), suffix=".part", delete=False, encoding="utf-8") as f:
        try:
            json.dump(value, f, indent=1)
            f.write("\n")
            f.flush()
            os.chmod(f.name, 0o644)
            os.replace(f.name, path)
        except BaseException:
            os.unlink(f.name)
            raise


def options():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--build", default=os.path.join(ROOT, "build"), metavar="DIR")
    ap.add_argument("--model", metavar="FILE", help="a GGUF file; default: the slice model, made when it is missing")
    ap.add_argument("--peer", metavar="DIR", help="what tests/parity/setup made; default: made in the build folder")
    ap.add_argument("--threads", type=int, default=2, help="of both engines (%(default)s)")
    ap.add_argument("--rounds", type=int, default=ROUNDS, help="%(default)s")
    ap.add_argument("--only", action="append", metavar="KEY", choices=[*FIGURES, "kernels"],
                    help="this figure, or `kernels`; may be given more than once")
    ap.add_argument("--quick", action="store_true", help="short prompts and answers, no waiting: to see that it runs")
    ap.add_argument("--check", action="store_true", help="exit status 1 when a figure misses its floor")
    args = ap.parse_args()
    args.only = args.only or [*FIGURES, "kernels"]
    if args.rounds < 1 or args.threads < 1:
        ap.error("--rounds and --threads are at least 1")
    return args


def stop(*_):
    raise KeyboardInterrupt


def main():
    args = options()
    signal.signal(signal.SIGTERM, stop)
    bench = Bench(args)
    try:
        bench.prepare()
        bench.measure()
    except Missing as e:
        say(f"bench: {e}")
        sys.exit(77)
    except KeyboardInterrupt:
        say("bench: interrupted, nothing is written")
        sys.exit(130)
    result = bench.result()
    table = {key: result[key] for key in FIGURES if key in result}
    path = os.path.join(bench.directory, "cpu.json")
    write_json(path, result)
    m = bench.machine
    print(f"{m['cpu']}, {m['processors']} processors, {m['memory_bytes'] / 2**30:.0f} GiB, {m['system']} {m['kernel']}; "
          f"{args.threads} threads, median of {args.rounds}" + ("; QUICK: no figure means anything" if args.quick else ""))
    if table:
        print_figures(table)
    if "of_best" in table.get("bandwidth_share", {}):
        print_memory(table["bandwidth_share"], result["streaming_gb_s"])
    if bench.kernels:
        print_kernels(bench.kernels)
    if bench.disturbed or not bench.quiet:
        print(f"\nNot a quiet machine: in {bench.disturbed} runs others used more than {OTHERS_PERCENT} % of it, or memory changed.")
    print(f"\nevery number: {path}")
    sys.exit(1 if args.check and not all(row["pass"] for row in table.values()) else 0)


if __name__ == "__main__":
    main()
