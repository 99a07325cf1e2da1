#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The engine with less memory than the model has, beside llama.cpp in the same memory control group.

Makes the slice model when it is missing, sets up the peer when it is missing (npm), runs both in turns inside control
groups that hold 50 % and 70 % of the model file, and prints a table: key, measured, at least, goal. residentd is not told
the limit. The file's page cache is dropped before every run. Writes BUILD_DIR/bench/residency.json with every single
number. Root; some 9 minutes on two cores; on a machine that does something else meanwhile the speeds mean nothing.

A figure that could not be measured is null, with the reason. Exit status 1: a figure misses what it must have, or somebody
was killed for want of memory; 77: no control group or no model can be made here.
"""
import argparse
import json
import mmap
import os
import platform
import random
import re
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests/sys"))
import memgroup  # noqa: E402
import rd  # noqa: E402

PARITY = os.path.join(ROOT, "tests/parity")
MODEL = ["qwen35moe", "slice", "--layers", "8", "--skew", "0.4", "--seed", "1"]
RUN_TIMEOUT = 300
PEER_TOKENS, PEER_ROUNDS = 8, 2  # 0.7 to 0.9 tok/s
TRACER_PAIRS, TRACER_TOKENS = 24, 32
HOG_SHARE, HOG_RATE, HOG_HOLD_S = 0.25, 256_000_000, 6
OTHERS_PERCENT = 10
PARTS = ["limited", "full", "tracer", "hog"]

# key: (least or most, bound, goal, what)
FIGURES = {
    "decode_ratio_50": ("least", 20, 35, "memory for 50 % of the model: decode, residentd / llama.cpp"),
    "decode_ratio_70": ("least", 10, 16, "same at 70 %"),
    "decode_ratio_50_mapped": ("least", 8, 20, "same at 50 % with HostTier=mapped"),
    "decode_share_50": ("least", 0.45, 0.7, "our decode at 50 % / with memory for everything"),
    "managed_share_full": ("least", 0.98, 1.0, "memory for everything: arena / unmanaged"),
    "read_amplification": ("most", 1.05, None, "bytes read / bytes of missed blocks, the worse of both tiers"),
    "compute_faults_per_token": ("most", 0, None, "major faults by compute threads at 50 %, the most of all runs"),
    "belady_gap_points": ("most", 8, 6, "hit ratio at 50 % below Belady's on the routing of the run"),
    "prefill512_block_reads": ("most", 1, None, "cold prompt of 512 at 50 %: reads of a block a chunk, the most"),
    "left_pages": ("most", 0, None, "pages of evicted blocks left in the page cache, the most of all runs"),
    "tracer_overhead": ("most", 1.02, None, "at 50 %: decode without / with the tracer attached"),
    "tracer_overhead_mapped": ("most", 1.02, None, "same with HostTier=mapped, where each token is thousands of events"),
    "hog_follow_s_arena": ("most", 5, None, "s from a hog having 25 % of the limit until the budget has given way"),
    "hog_follow_s_mapped": ("most", 5, None, "same with HostTier=mapped"),
    "hog_recover_s_arena": ("most", 30, None, "s from its end until 80 % of the speed before"),
    "hog_recover_s_mapped": ("most", 30, None, "same with HostTier=mapped"),
    "hog_killed": ("most", 0, None, "processes killed for want of memory in any run"),
}


class Missing(Exception):
    """Why something cannot be measured."""


class Missed(Exception):
    """It was measured, and there is no number: it did not happen in time."""


FAILURES = (Missing, memgroup.Unavailable, subprocess.TimeoutExpired, AssertionError, OSError, rd.Error, rd.Closed)


def say(text):
    print(text, file=sys.stderr, flush=True)


def listed(values):
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())


def last_line(text):
    return (text.strip().splitlines() or ["it says nothing"])[-1]


def drop_cache(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # dirty pages stay
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def disk_speed(path, n=200, size=2 << 20):
    """GB/s of reads around the page cache, one at a time, at random places of the file."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    places, buffer, blocks = random.Random(1), mmap.mmap(-1, size), os.path.getsize(path) // size
    try:
        begun = time.monotonic()
        done = sum(os.preadv(fd, [buffer], places.randrange(blocks) * size) for _ in range(n))
        return done / 1e9 / (time.monotonic() - begun)
    finally:
        os.close(fd)


def memory_speed(peer, threads):
    """GB/s of streaming reads, the best of three."""
    speeds = []
    for _ in range(3):
        p = subprocess.run([os.path.join(peer, "membw"), "1024", str(threads)], capture_output=True, text=True,
                           check=False)
        speeds += [float(s) for s in re.findall(r"best ([0-9.]+) GB/s", p.stdout)]
    return max(speeds, default=None)


def busy_s():
    """Processor seconds that have been used: by everybody, and by this process and those that it has waited for."""
    with open("/proc/stat", encoding="ascii") as f:
        user, nice, system, _, _, irq, softirq, steal = map(int, f.readline().split()[1:9])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ours = sum(u.ru_utime + u.ru_stime for u in used)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), ours


def cpu_name():
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
        return next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), platform.machine())


class HogRun:
    """A daemon that generates without a pause, and in its group somebody who needs a quarter of the memory."""

    def __init__(self, daemon, group, hog):
        self.daemon, self.group, self.program = daemon, group, hog
        self.samples, self.stop, self.error = [], threading.Event(), None
        self.client = daemon.client()

    def generate(self):
        prompt = {"prompt": "word", "options": {"max_tokens": 4000, "temperature": 1.0, "seed": 1}}
        try:
            with self.daemon.client() as c:
                while not self.stop.is_set():
                    for _ in c.stream("Complete", prompt):
                        if self.stop.is_set():
                            return
                    prompt["options"]["seed"] += 1
        except FAILURES as e:
            self.error = e

    def look(self):
        answer = self.client.call("GetResidency")
        self.samples.append((time.monotonic(), answer["budget"]["max"], answer["counters"]["decode_tokens"]))
        if self.error:
            raise Missing(f"generation ended: {self.error}")
        return self.samples[-1]

    def watch(self, condition, seconds):
        """Looks ten times a second until condition(now, budget); returns when that was, or None."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            now, budget, _ = self.look()
            if condition(now, budget):
                return now
            time.sleep(0.1)
        return None

    def speed(self, seconds):
        """Tokens a second in the last so many."""
        t1, _, n1 = self.samples[-1]
        t0, _, n0 = next(s for s in self.samples if s[0] >= t1 - seconds)
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0

    def longest_pause(self, since):
        last, longest = None, 0
        for t, _, n in self.samples:
            if t >= since and (last is None or n > last[1]):
                longest = max(longest, t - last[0] if last else 0)
                last = t, n
        return longest

    def measure(self):
        self.watch(lambda *_: self.samples[-1][2] >= 400, 40)
        self.watch(lambda *_: False, 5)
        before, former = self.speed(5), self.samples[-1][1]
        size = int(self.group.limit * HOG_SHARE)
        begun = time.monotonic()
        with self.group.joined():
            hog = subprocess.Popen([self.program, str(size), str(HOG_RATE), str(HOG_HOLD_S)], stdout=subprocess.PIPE)
        try:
            taken = self.watch(lambda *_: select.select([hog.stdout], [], [], 0)[0], 60)
            has_it = taken and hog.stdout.readline() == b"taken\n"
            # What is taken from the group is what the budget must lose, but for what was not in use.
            follow = self.watch(lambda _, budget: budget <= former - 0.9 * size, 20) if has_it else None
            least = self.watch(lambda *_: hog.poll() is not None, HOG_HOLD_S + 30)
        finally:
            hog.kill()
            hog.wait()
        during = self.speed(HOG_HOLD_S)
        back = self.watch(lambda now, _: now - least > 1 and self.speed(1.5) >= 0.8 * before, 60) if least else None
        whole = self.watch(lambda _, budget: budget >= 0.99 * former, 60)
        return {"hog_bytes": size, "hog_got_it": bool(has_it), "tok_s_before": before, "tok_s_during": during,
                "budget_before": former, "budget_least": min(b for _, b, _ in self.samples),
                "longest_pause_s": self.longest_pause(begun), "follow_s": follow and max(0.0, follow - taken),
                "recover_s": back and back - least, "budget_back_s": whole and least and whole - least}

    def go(self):
        thread = threading.Thread(target=self.generate)
        thread.start()
        try:
            return self.measure()
        finally:
            self.stop.set()
            thread.join()
            self.client.close()


class Bench:
    def __init__(self, args):
        self.args = args
        self.build = os.path.abspath(args.build)
        self.directory = os.path.join(self.build, "bench")
        self.runs, self.why, self.machine = {}, {}, {}
        self.model = args.model or os.path.join(self.directory, "models/slice-8-0.4-1.gguf")
        self.size, self.peer_directory = 0, None
        rd.BUILD, rd.RESIDENTD = self.build, os.path.join(self.build, "residentd")

    def program(self, name):
        return os.path.join(self.build, "tests/bench", name)

    # ---- what is needed ----

    def prepare(self):
        os.makedirs(os.path.join(self.directory, "models"), exist_ok=True)
        if not os.path.exists(self.model):
            say(f"making {self.model}: 4.8 GB, a minute or two")
            p = subprocess.run(["/usr/bin/python3", os.path.join(PARITY, "mkgguf.py"), *MODEL, "-o", self.model],
                               capture_output=True, text=True, check=False)
            if p.returncode != 0:
                raise Missing(f"no model can be made: {last_line(p.stderr)}")
        self.size = os.path.getsize(self.model)
        directory = self.args.peer or os.path.join(self.directory, "peer")
        if not os.access(os.path.join(directory, "peer"), os.X_OK):
            p = subprocess.run([os.path.join(PARITY, "setup"), directory], capture_output=True, text=True, check=False)
            if p.returncode != 0:
                self.why["peer"] = f"the peer cannot be set up: {last_line(p.stderr)}"
                return
        self.peer_directory = directory

    def look_at_machine(self):
        drop_cache(self.model)
        self.machine = {
            "cpu": cpu_name(), "threads": self.args.threads, "kernel": platform.release(),
            "control_groups": 1 if memgroup.parent_directory()[1] else 2, "disk_gb_s": disk_speed(self.model),
            "memory_gb_s": self.peer_directory and memory_speed(self.peer_directory, self.args.threads)}
        say(listed(self.machine))

    # ---- single runs ----

    def note(self, name, value):
        self.runs.setdefault(name, []).append(value)

    def note_group(self, name, group):
        self.note("groups", {"of": name, "limit": group.limit, "peak": group.peak(), "times_full": group.times_full(),
                             "killed": group.n_killed()})

    def run(self, name, share, command):
        """In a group that holds that share of the model file (None: in none). Returns what it printed."""
        drop_cache(self.model)
        if share is None:
            p = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT, check=False)
            out, err, status = p.stdout, p.stderr, p.returncode
        else:
            with memgroup.MemoryGroup(int(self.size * share), "bench-residency") as group:
                with group.joined():
                    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                try:
                    out, err = process.communicate(timeout=RUN_TIMEOUT)
                finally:
                    process.kill()
                    status = process.wait()
                self.note_group(name, group)
        if status != 0:
            raise Missing(f"{os.path.basename(command[0])} ended with {status}: {last_line(err)}")
        return out

    def ours(self, name, share, *options):
        result = json.loads(self.run(name, share, [self.program("bench-decode"), "-m", self.model, "--threads",
                                                   str(self.args.threads), *options]))
        self.note(name, result)
        say(f"  {name}: " + (f"{result['decode_tok_s']:.2f} tok/s, " if not result["tracer_ratios"] else "") +
            f"{result['tier']}, hits {result['hit_percent']:.1f} %")
        return result

    def peer(self, name, share):
        out = self.run(name, share, [os.path.join(self.peer_directory, "peer"), "-m", self.model, "-r", "1",
                                     "-n", str(PEER_TOKENS), "--forced", "--load", "mmap", "--no-repack",
                                     "--quiet-text", "--threads", str(self.args.threads)])
        m = re.search(r"^decode: .*?([0-9.]+) tok/s", out, re.M)
        if not m:
            raise Missing("the peer says no speed")
        self.note(name, {"decode_tok_s": float(m.group(1))})
        say(f"  {name}: {float(m.group(1)):.2f} tok/s")

    # ---- parts ----

    def limited(self):
        work = ["--prefill", "512", "--warm", "320", "--decode", "256"]
        for i in range(1 if self.args.quick else 3):
            with_peer = self.peer_directory and i < PEER_ROUNDS
            self.ours("ours 50", 0.5, *work)
            if with_peer:
                self.peer("peer 50", 0.5)
            self.ours("ours 50 mapped", 0.5, "--tier", "mapped", *work)
            self.ours("ours 70", 0.7, *work)
            if with_peer:
                self.peer("peer 70", 0.7)

    def full(self):
        work = ["--fill", "--warm", "32", "--decode", "192"]
        for _ in range(1 if self.args.quick else 5):
            for name, tier in ("unmanaged full", "auto"), ("arena full", "arena"):
                result = self.ours(name, None, "--tier", tier, *work)
                if result["n_host"] < result["n_blocks"] or (tier == "auto" and result["tier"] != "unmanaged"):
                    del self.runs[name]
                    raise Missing("this machine has not the memory for all of the model")

    def tracer(self):
        helper, pairs = os.path.join(self.build, "residentd-bpf"), 4 if self.args.quick else TRACER_PAIRS
        if not os.access(helper, os.X_OK):
            raise Missing("residentd-bpf is not built")
        with tempfile.TemporaryDirectory(prefix="rd-bench-") as directory, \
                open(os.path.join(directory, "log"), "w+", encoding="utf-8", errors="replace") as log:
            socket = os.path.join(directory, "bpf")
            process = subprocess.Popen([helper, f"--socket={socket}", "--allow-uid=0"], stderr=log)
            try:
                end = time.monotonic() + 10
                while not os.path.exists(socket) and process.poll() is None and time.monotonic() < end:
                    time.sleep(0.05)
                if not os.path.exists(socket):
                    log.seek(0)
                    raise Missing(f"residentd-bpf does not start: {last_line(log.read())}")
                # Reading ahead is switched on and off as it is measured to help: not the tracer's doing.
                for name, tier in ("tracer", "auto"), ("tracer mapped", "mapped"):
                    result = self.ours(name, 0.5, "--tier", tier, "--prefetch", "off", "--prefill", "512", "--warm", "64",
                                       "--decode", str(2 * pairs * TRACER_TOKENS), "--pairs", str(pairs), "--feed", socket)
                    if result["feed"] != "bpf":
                        del self.runs[name]
                        raise Missing(f"the tracer could not attach: pages were watched by {result['feed']}")
            finally:
                process.terminate()
                process.wait()

    def hog(self):
        for tier in "arena", "mapped":
            drop_cache(self.model)
            with memgroup.MemoryGroup(self.size // 2, "bench-residency") as group:
                with group.joined():
                    daemon = rd.Daemon(self.model, {"Model": {"Context": 8192}, "Memory": {"HostTier": tier},
                                                    "Engine": {"Threads": self.args.threads}},
                                       env={"MEMORY_PRESSURE_WATCH": "/proc/pressure/memory"}, wait=False)
                with daemon:
                    daemon.wait_until_up()
                    result = HogRun(daemon, group, self.program("hog")).go()
                self.note_group("hog " + tier, group)
            self.note("hog " + tier, result)
            say(f"  hog {tier}: " + listed(result))

    # ---- figures ----

    def values(self, name, key="decode_tok_s"):
        values = [r[key] for r in self.runs.get(name, [])]
        if not values:
            raise Missing(self.why.get(name.split()[0]) or self.why.get(name) or "was not run")
        if None in values:
            raise Missed("did not happen in time")
        return values

    def median(self, name, key="decode_tok_s"):
        return statistics.median(self.values(name, key))

    def most(self, key, *names):
        return max(v for name in names for v in self.values(name, key))

    def rounds(self, one, other):
        """The median over the rounds of one run / the other: what changes slowly on the machine is in both."""
        return statistics.median(a / b for a, b in zip(self.values(one), self.values(other)))

    def amplification(self, name):
        self.values(name)
        each = []
        for r in self.runs[name]:
            # With blocks read ahead and then used there are fewer misses: what was not read for nothing counts then.
            ahead = r["prefetch_used"] + r["prefetch_wasted"] > 0
            needed = r["bytes_read"] * (1 - r["prefetch_wasted"] / r["blocks_read"]) if ahead else r["missed_bytes"]
            each.append(max(r["bytes_read"], r["disk_bytes"]) / needed if needed > 0 else 1.0)
        return statistics.median(each)

    def figure(self, key):
        limited = "ours 50", "ours 50 mapped"
        if key.startswith("hog_") and key != "hog_killed":
            _, what, _, tier = key.split("_")
            return self.most(what + "_s", "hog " + tier)
        return {
            "decode_ratio_50": lambda: self.median("ours 50") / self.median("peer 50"),
            "decode_ratio_70": lambda: self.median("ours 70") / self.median("peer 70"),
            "decode_ratio_50_mapped": lambda: self.median("ours 50 mapped") / self.median("peer 50"),
            "decode_share_50": lambda: self.median("ours 50") / self.median("unmanaged full"),
            "managed_share_full": lambda: self.rounds("arena full", "unmanaged full"),
            "read_amplification": lambda: max(map(self.amplification, limited)),
            "compute_faults_per_token": lambda: self.most("compute_faults_per_token", *limited),
            "belady_gap_points": lambda: (self.median("ours 50", "belady_percent") -
                                          self.median("ours 50", "hit_percent")),
            "prefill512_block_reads": lambda: self.most("prefill_reads_max", *limited),
            "left_pages": lambda: self.most("left_pages", *limited, "ours 70"),
            "tracer_overhead": lambda: statistics.median(self.values("tracer", "tracer_ratios")[0]),
            "tracer_overhead_mapped": lambda: statistics.median(self.values("tracer mapped", "tracer_ratios")[0]),
            "hog_killed": lambda: sum(self.values("groups", "killed")),
        }[key]()

    def figures(self):
        table = []
        for key, (kind, bound, goal, what) in FIGURES.items():
            row = {"key": key, "what": what, "measured": None, "at_" + kind: bound, "goal": goal}
            try:
                row["measured"] = self.figure(key)
                row["met"] = row["measured"] >= bound if kind == "least" else row["measured"] <= bound
                if goal is not None:
                    row["goal_met"] = row["measured"] >= goal if kind == "least" else row["measured"] <= goal
            except Missing as e:
                row["why"], row["met"] = str(e), None
            except Missed as e:
                row["why"], row["met"] = str(e), False
            table.append(row)
        return table

    def speeds(self):
        """Least, median and most of what is compared."""
        each = {name: [r["decode_tok_s"] for r in runs if "decode_tok_s" in r] for name, runs in self.runs.items()}
        return {name: {"n": len(v), "min": min(v), "median": statistics.median(v), "max": max(v)}
                for name, v in each.items() if v and name != "tracer"}

    def measure(self):
        # Runs are called after their part, or their tier; a reason belongs to all runs of the part.
        names = {"limited": ["ours 50", "ours 50 mapped", "ours 70", "peer"], "full": ["unmanaged full", "arena full"],
                 "tracer": ["tracer"], "hog": ["hog arena", "hog mapped"]}
        begun, (all_before, ours_before) = time.monotonic(), busy_s()
        for part in PARTS:
            if part not in self.args.only:
                self.why.update(dict.fromkeys(names[part], "was not asked for"))
                continue
            say(part + ":")
            try:
                getattr(self, part)()
            except FAILURES as e:
                self.why = {**dict.fromkeys(names[part], str(e)), **self.why}
                say(f"  {e}")
        all_after, ours_after = busy_s()
        others = (all_after - all_before - (ours_after - ours_before)) / (time.monotonic() - begun)
        self.machine["others_percent"] = 100 * max(0.0, others)


def shown(value):
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def print_table(rows, speeds):
    print(f"{'run':26} {'runs':>4} {'min':>8} {'median':>8} {'max':>8}   tok/s")
    for name, s in speeds.items():
        print(f"{name:26} {s['n']:4} {s['min']:8.2f} {s['median']:8.2f} {s['max']:8.2f}")
    print(f"\n{'key':26} {'measured':>9} {'at least':>11} {'goal':>5}  met?")
    for row in rows:
        bound = shown(row["at_least"]) if "at_least" in row else f"at most {shown(row['at_most'])}"
        met = f"not measured: {row['why']}" if row["met"] is None else f"NO {row.get('why', '')}" if not row["met"] else \
            "yes" if row.get("goal_met", True) else "yes, not the goal"
        print(f"{row['key']:26} {shown(row['measured']):>9} {bound:>11} {shown(row['goal']):>5}  {met}")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--build", default=os.path.join(ROOT, "build"), metavar="DIR")
    ap.add_argument("--model", metavar="FILE", help="a GGUF file; default: the slice model, made when it is missing")
    ap.add_argument("--peer", metavar="DIR", help="what tests/parity/setup made; default: made in the build folder")
    ap.add_argument("--threads", type=int, default=os.cpu_count(), help="of both engines; default: all processors")
    ap.add_argument("--quick", action="store_true", help="one run of each instead of three and more")
    ap.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help="of " + ",".join(PARTS))
    args = ap.parse_args()
    args.only = args.only.split(",")
    if not set(args.only) <= set(PARTS):
        ap.error(f"--only: {','.join(PARTS)}")
    bench = Bench(args)
    try:
        memgroup.parent_directory()
        bench.prepare()
    except (memgroup.Unavailable, Missing) as e:
        say(f"bench-residency: {e}")
        sys.exit(77)
    bench.look_at_machine()
    bench.measure()
    rows, speeds = bench.figures(), bench.speeds()
    result = {"machine": bench.machine, "model": {"file": os.path.basename(bench.model), "bytes": bench.size},
              "quick": args.quick, "figures": rows, "speeds": speeds, "runs": bench.runs}
    with open(os.path.join(bench.directory, "residency.json"), "w", encoding="utf-8") as f:
        json.dump(result, f, indent=1)
        f.write("\n")
    print_table(rows, speeds)
    if bench.machine["others_percent"] > OTHERS_PERCENT:
        print(f"\nOthers used {bench.machine['others_percent']:.0f} % of a processor: the speeds mean little.")
    sys.exit(1 if any(row["met"] is False for row in rows) else 0)


if __name__ == "__main__":
    main()
