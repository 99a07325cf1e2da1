#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A model that gets less memory than it has: the same answers from every tier and budget, experts that leave and come back,
and the budget that gives way to others, in a memory control group where one can be made."""
import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import tempfile
import threading

from memgroup import MemoryGroup, Unavailable
from rd import BUILD, OURS, ROOT, Client, Closed, Daemon, Skip, case, eventually, main, sanitized

HOG = os.path.join(BUILD, "tests/bench/hog")
MIB = 1 << 20
# 182 MB of experts, some of which are wanted far more often than others.
MODEL = ["qwen35moe", "small", "--skew", "0.6", "--seed", "1"]
NOT_FOUND = "org.varlink.service.InterfaceNotFound"
NOTIFY = "io.systemd.oom.Prekill.Notify"
directory = None


def model():
    """Made when the first case needs it."""
    path = os.path.join(directory, "model.gguf")
    if not os.path.exists(path):
        p = subprocess.run(["/usr/bin/python3", os.path.join(ROOT, "tests/parity/mkgguf.py"), *MODEL, "-o", path],
                           capture_output=True, text=True, check=False)
        if p.returncode != 0:
            raise Skip(f"no model can be made: {(p.stderr.strip().splitlines() or ['no reason'])[-1]}")
    return path


def forget(path):
    """Nothing of it is in memory, and nobody has paid for it: pages are charged to the group that brings them in."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def daemon(tier=None, budget=None, **kw):
    forget(model())
    memory = {"HostTier": tier or "auto", **({"HostBudget": budget} if budget else {}), **kw.pop("memory", {})}
    return Daemon(model(), {"Model": {"Context": 2048}, "Engine": {"BatchTokens": 128}, "Memory": memory}, **kw)


def complete(d, prompt="The licence", n=48):
    answer = d.call("Complete", {"prompt": prompt, "options": {"temperature": 0, "max_tokens": n}})
    return answer["text"]


def residency(d, blocks=False):
    return d.call("GetResidency", {"blocks": blocks})


def n_host(answer):
    return sum(layer["host"] for layer in answer["layers"])


def here(d):
    """The experts in memory, as (layer, expert)."""
    return {(layer["layer"], i) for layer in residency(d, blocks=True)["layers"]
            for i, place in enumerate(layer["place"]) if place == "h"}


def hit_share(d, **kw):
    """Of one request."""
    before = residency(d)["counters"]
    complete(d, **kw)
    after = residency(d)["counters"]
    hits, misses = after["hits"] - before["hits"], after["misses"] - before["misses"]
    return hits / (hits + misses)


def floor_of(tier):
    with daemon(tier) as d:
        return residency(d)["budget"]["floor"]


def holds_for_others(check):
    """Runs check() as another user, in a process of his own."""
    if os.geteuid() != 0:
        return True
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setresgid(4711, 4711, 4711)
            os.setresuid(4711, 4711, 4711)
            check()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


@case
def every_tier_and_budget_gives_the_same_answer():
    with daemon() as d:
        assert residency(d)["tier"] == "unmanaged", residency(d)
        expected = complete(d)
    for tier in "mapped", "arena":
        with daemon(tier) as d:
            got, answer = complete(d), residency(d)
            assert answer["tier"] == tier and got == expected, (tier, got, expected)
            assert answer["counters"]["misses"] > 0 and n_host(answer) > 0, answer
            floor = answer["budget"]["floor"]
        # What the process holds at that moment is a part of the floor, and never twice the same.
        with daemon(tier, floor + 4 * MIB) as d:
            got, answer = complete(d), residency(d)
            assert got == expected, (tier, "tiny", got, expected)
            assert answer["counters"]["evicted"] > 0, answer
            assert answer["budget"]["blocks"] < answer["budget"]["blocks_all"] / 4, answer


@case
def a_budget_below_the_floor_is_refused_with_the_number():
    floor = floor_of("arena")
    with daemon("arena", floor - 8 * MIB) as d:
        answer = d.call("GetAvailability")
        assert answer["state"] == "unavailable", answer
        # Whole megabytes, of a floor that is a little different this time.
        numbers = [int(word) for word in answer["reason"].replace(",", " ").replace("(", " ").split() if word.isdigit()]
        assert any(abs(n * 1000000 - floor) < 3000000 for n in numbers), (floor, answer)
        assert "HostBudget=" in answer["reason"], answer


@case
def a_long_prompt_leaves_what_is_hot():
    floor = floor_of("arena")
    words = " ".join(f"word{i} and" for i in range(300))
    with daemon("arena", floor + 40 * MIB) as d:
        complete(d, n=256)
        share, before, counters = hit_share(d, n=16), here(d), residency(d)["counters"]
        usage = d.call("Complete", {"prompt": words, "options": {"temperature": 0, "max_tokens": 1}})["usage"]
        kept, now = len(before & here(d)), residency(d)["counters"]
        assert usage["prompt_tokens"] > 512, usage
        # It went through nearly all experts, several times as many as have room: a quarter would be left by chance.
        assert now["misses"] - counters["misses"] > 4 * len(before), (counters, now)
        assert kept > 0.4 * len(before), (kept, len(before))
        again = hit_share(d, n=16)
        assert share > 0.5 and again > share - 0.05, (share, again)


@case
def idle_experts_leave_and_come_back():
    for tier in "mapped", "arena":
        with daemon(tier, memory={"HostIdleSec": "1s"}) as d:
            expected = complete(d)
            eventually("the experts are gone", lambda: n_host(residency(d)) == 0)
            counters = residency(d)["counters"]
            assert counters["left_pages"] == 0, counters
            assert complete(d) == expected
            assert residency(d)["counters"]["misses"] > counters["misses"]


@case
def only_root_and_the_service_see_the_experts_one_by_one():
    with daemon("arena") as d:
        complete(d)
        answer = residency(d, blocks=True)
        for layer in answer["layers"]:
            assert len(layer["heat"]) == len(layer["place"]) == layer["experts"], layer
            assert layer["place"].count("h") == layer["host"] and sum(layer["heat"]) > 0, layer

        def others():
            assert residency(d)["budget"] and "heat" not in residency(d)["layers"][0]
            with d.client() as c:
                c.expect(OURS + "NotAuthorized", "GetResidency", {"blocks": True})
        assert holds_for_others(others)


class Generation:
    """Somebody who generates without a pause."""

    def __init__(self, d):
        self.daemon, self.error, self.stop = d, None, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        seed = 0
        try:
            with self.daemon.client() as c:
                while not self.stop.is_set():
                    seed += 1
                    for _ in c.stream("Complete", {"prompt": "word", "options": {"max_tokens": 1500, "seed": seed}}):
                        if self.stop.is_set():
                            return
        except Exception as e:
            self.error = e

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()

    def goes_on(self, n=8):
        begun = residency(self.daemon)["counters"]["decode_tokens"]

        def more():
            assert not self.error, self.error
            return residency(self.daemon)["counters"]["decode_tokens"] >= begun + n
        eventually("tokens keep coming", more)


def budget(d):
    """As an administrator sees it."""
    p = subprocess.run([os.path.join(BUILD, "residentctl"), "--json", "residency"], capture_output=True, text=True,
                       check=True, env={**os.environ, "RESIDENTD_SOCKET": d.socket})
    return json.loads(p.stdout)["budget"]["max"]


def hog_in_the_group(tier):
    limit = (1024 if sanitized() else 256) * MIB
    try:
        group = MemoryGroup(limit)
    except Unavailable as e:
        raise Skip(str(e)) from e
    size = limit // 4
    with group:
        model()
        with group.joined():
            d = daemon(tier, wait=False)
        with d:
            d.wait_until_up()
            with Generation(d) as generation:
                generation.goes_on(100)
                former = budget(d)
                assert limit / 2 < former < limit, (former, limit)
                with group.joined():
                    hog = subprocess.Popen([HOG, str(size), "256000000", "600"], stdout=subprocess.PIPE)
                with contextlib.ExitStack() as stack:
                    stack.callback(hog.wait)
                    stack.callback(hog.kill)
                    assert select.select([hog.stdout], [], [], 60)[0], "the hog waits for its memory"
                    assert hog.stdout.readline() == b"taken\n", f"the hog did not get it: {hog.wait()}"
                    eventually("the budget gives way", lambda: budget(d) <= former - 0.9 * size)
                    generation.goes_on()
                    assert hog.poll() is None
                eventually("the budget returns", lambda: budget(d) >= 0.98 * former)
                generation.goes_on()
        assert group.n_killed() == 0 and (group.peak() or 0) <= limit, (group.n_killed(), group.peak())


@case
def a_hog_gets_its_memory_from_the_arena():
    hog_in_the_group("arena")


@case
def a_hog_gets_its_memory_from_the_page_cache():
    hog_in_the_group("mapped")


def listener(path):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    s.bind(path)
    os.chmod(path, 0o666)
    s.listen(8)
    return s


@case
def everything_goes_before_somebody_is_killed():
    with tempfile.TemporaryDirectory(prefix="rd-", dir="/tmp") as place:
        os.chmod(place, 0o755)
        paths = [os.path.join(place, name) for name in ("s", "oomd")]
        with listener(paths[0]) as ours, listener(paths[1]) as theirs, \
                daemon("arena", sockets=[ours, theirs], path=paths[0],
                       env={"LISTEN_FDNAMES": "residentd.socket:oomd"}) as d:
            expected = complete(d)
            before = residency(d)["budget"]
            assert before["max"] > before["floor"] and before["blocks"] > 0, before

            def others():
                with Client(paths[1]) as c, contextlib.suppress(Closed, BrokenPipeError):
                    c.call(NOTIFY, {"cgroup": "/"})
                    raise AssertionError("was answered")
            assert holds_for_others(others)
            assert residency(d)["budget"]["max"] == before["max"]
            with Client(paths[1]) as c:
                c.expect(NOT_FOUND, "GetStatus")
                c.expect(NOT_FOUND, "GetResidency")
                c.expect("org.varlink.service.MethodNotFound", "io.systemd.oom.Prekill.Other")
                c.expect("org.varlink.service.InvalidParameter", NOTIFY, {})
                assert residency(d)["budget"]["max"] == before["max"]
                held = d.rss_anon()
                assert c.call(NOTIFY, {"cgroup": "/user.slice"}) == {}
                # Given back before it is answered: who asked kills at once.
                left = d.rss_anon()
                given = before["blocks"] - residency(d)["budget"]["blocks"]
                assert left <= held - given // 2, (held, left, given)
            # Without a descriptor left for it, it is answered when there is one, and the service does not spin meanwhile.
            # (No number is below 3 in it: one that a former connection gives back late is not taken either.)
            limits = resource.prlimit(d.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(d.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
            with Client(paths[1]) as c:
                c.send(NOTIFY, {"cgroup": "/"})
                eventually("it says why", lambda: "cannot accept a connection" in d.log())
                resource.prlimit(d.pid, resource.RLIMIT_NOFILE, limits)
                assert c.reply() == ({}, False)
            assert d.log().count("cannot accept a connection") < 10
            after = residency(d)["budget"]
            assert after["max"] == after["floor"] and after["blocks"] < before["blocks"], (before, after)
            with d.client() as c:
                c.expect(NOT_FOUND, NOTIFY, {"cgroup": "/"})
            assert complete(d) == expected


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="rd-model-") as directory:
        main()
