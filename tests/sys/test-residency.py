#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Where the model's memory is: what the service tells about it, and to whom; routing traces; heat that outlives the
service; model files that are cut, rewritten and replaced while they are in use."""
import contextlib
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time

from rd import (BUILD, INTERFACE, MODEL, OURS, SERVICE, Client, Daemon, Error, Skip, case, check_error, eventually, main,
                slow, user)

ARENA = {"Memory": {"HostTier": "arena"}}
MAPPED = {"Memory": {"HostTier": "mapped"}}
QUESTION = {"messages": user("What is 17 x 23?"), "options": {"temperature": 0, "max_thinking_tokens": 0}}
NOBODY = 65534
LAYERS, EXPERTS, USED = 8, 32, 4


class Types:
    """Values against the types of policy/org.residentd.varlink: every field there, none besides."""

    def __init__(self):
        with open(INTERFACE, encoding="utf-8") as f:
            text = re.sub(r"#.*", "", f.read())
        self.types = {name: self.fields(body) for name, body in re.findall(r"^type (\w+) \(([^)]*)\)", text, re.M)}
        self.replies = {name: self.fields(body)
                        for name, body in re.findall(r"^method (\w+)\([^)]*\) -> \(([^)]*)\)", text, re.M)}

    @staticmethod
    def fields(body):
        return dict(re.findall(r"(\w+)\s*:\s*([?\[\]\w]+)", body))

    def check_fields(self, value, fields, where):
        assert isinstance(value, dict), f"{where}: {value!r} is no object"
        assert set(value) <= set(fields), f"{where}: {set(value) - set(fields)} are not in the interface"
        for name, kind in fields.items():
            if value.get(name) is None:
                assert kind.startswith("?"), f"{where}.{name} is missing"
            else:
                self.check(value[name], kind.lstrip("?"), f"{where}.{name}")

    def check(self, value, kind, where):
        if kind.startswith("[]"):
            assert isinstance(value, list), f"{where}: {value!r} is no list"
            for i, item in enumerate(value):
                self.check(item, kind[2:], f"{where}[{i}]")
        elif kind in self.types:
            self.check_fields(value, self.types[kind], where)
        else:
            python = {"int": int, "string": str, "bool": bool, "float": (int, float)}[kind]
            assert isinstance(value, python) and (kind == "bool" or not isinstance(value, bool)), f"{where}: {value!r}"
            assert kind != "int" or value >= 0, f"{where}: {value}"

    def check_reply(self, method, value):
        self.check_fields(value, self.replies[method], method)


TYPES = Types()


def residency(daemon, **parameters):
    got = daemon.call("GetResidency", parameters)
    TYPES.check_reply("GetResidency", got)
    return got


def n_here(daemon):
    return sum(layer["host"] for layer in residency(daemon)["layers"])


def state(daemon):
    return daemon.call("GetAvailability")["state"]


def residentctl(daemon, *arguments, status=0, **kw):
    p = subprocess.run([os.path.join(BUILD, "residentctl"), *arguments], capture_output=True, text=True, timeout=60,
                       check=False, stdin=subprocess.DEVNULL,
                       env=dict(os.environ, RESIDENTD_SOCKET=daemon.socket, TERM="xterm", LC_ALL="C.UTF-8"), **kw)
    assert p.returncode == status, (arguments, p)
    assert status or not p.stderr, (arguments, p)
    return p.stdout


@contextlib.contextmanager
def model_copy():
    with tempfile.TemporaryDirectory(prefix="rd-model-") as d:
        os.chmod(d, 0o755)
        path = os.path.join(d, "m.gguf")
        shutil.copyfile(MODEL, path)
        with open(path, "rb") as f:
            os.fsync(f.fileno())  # pages that are not written yet do not go
        yield path


@contextlib.contextmanager
def nobody():
    """Connections made meanwhile are another user's."""
    if os.geteuid() != 0:
        raise Skip("not root")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def check_numbers(got):
    """What must agree, whatever the tier."""
    budget, counters = got["budget"], got["counters"]
    assert [layer["layer"] for layer in got["layers"]] == list(range(LAYERS)), got["layers"]
    assert all(layer["experts"] == EXPERTS and layer["vram"] == 0 for layer in got["layers"]), got["layers"]
    assert sum(layer["block_bytes"] * EXPERTS for layer in got["layers"]) == budget["blocks_all"], budget
    assert budget["floor"] <= budget["max"] <= budget["configured"], budget
    assert 0 < budget["trunk"] < os.path.getsize(MODEL) and budget["fixed"] > 0 and budget["reserve"] > 0, budget
    assert budget["trunk"] + budget["blocks_all"] <= os.path.getsize(MODEL), budget
    assert counters["read_errors"] == 0 and counters["left_pages"] == 0, counters
    for key in ("hits", "misses"):
        assert sum(layer[key] for layer in got["layers"]) == counters[key], counters
    assert got["tier_reason"] and got["feed"] in ("bpf", "cachestat", "mincore", "none"), got


@case
def unmanaged(daemon):
    """All of the toy fits."""
    daemon.check_alive()
    got = residency(daemon)
    check_numbers(got)
    assert got["tier"] == "unmanaged" and got["policy"] == "none" and "method" not in got, got
    assert "fits" in got["tier_reason"] and got["model"], got
    assert all(layer["host"] == EXPERTS and "heat" not in layer for layer in got["layers"]), got["layers"]
    assert got["counters"]["steps"] > 0 and got["counters"]["decode_tokens"] > 0, got["counters"]
    with daemon.client() as c:
        c.expect(SERVICE + "InvalidParameter", "GetResidency", {"blocks": 1})
        c.expect(SERVICE + "InvalidParameter", "GetResidency", {"layers": True})


def check_managed(daemon, tier):
    got = residency(daemon)
    check_numbers(got)
    assert got["tier"] == tier and got["tier_reason"] == f"HostTier={tier}" and got["policy"] == "lfu", got
    daemon.check_alive()
    before = residency(daemon)["counters"]
    wanted = before["hits"] + before["misses"]
    assert wanted >= before["steps"] * LAYERS * USED and before["steps"] > 8, before
    daemon.check_alive()
    # The same text wants the same experts, and all of them are here.
    got = residency(daemon, blocks=True)
    after = got["counters"]
    check_numbers(got)
    assert after["misses"] == before["misses"] and after["hits"] - before["hits"] == wanted, (before, after)
    assert got["budget"]["blocks"] >= sum(layer["host"] * layer["block_bytes"] for layer in got["layers"]) * 0.99, got
    for layer in got["layers"]:
        assert len(layer["heat"]) == EXPERTS and all(0 <= h <= 65535 for h in layer["heat"]), layer
        assert re.fullmatch(f"[hc-]{{{EXPERTS}}}", layer["place"]), layer
        assert layer["place"].count("h") == layer["host"] >= USED, layer
        assert any(layer["heat"]) and all(h == 0 or p != "-" for h, p in zip(layer["heat"], layer["place"])), layer
    return after


@case
def arena():
    with Daemon(conf=ARENA) as daemon:
        counters = check_managed(daemon, "arena")
        assert counters["blocks_read"] >= counters["misses"] > 0 and counters["bytes_read"] > 0, counters


@case
def mapped():
    with model_copy() as path, Daemon(model=path, conf=MAPPED) as daemon:
        check_managed(daemon, "mapped")


@case
def little_memory():
    """As little as the refusal of even less says will do: answers are the same, and what does not fit goes."""
    for tier in ("arena", "mapped"):
        # A file that nobody else has mapped, or pages would not go.
        conf = {"Memory": {"HostTier": tier, "HostBudget": "1M"}}
        with model_copy() as path, Daemon(model=path, conf=conf) as daemon:
            got = daemon.call("GetAvailability")
            assert got["state"] == "unavailable" and "HostBudget=" in got["reason"], got
            least = int(re.search(r"at least (\d+) MB", got["reason"]).group(1)) * 1000000
            # What a process holds by itself differs a little from start to start.
            daemon.write_conf({"Memory": {"HostTier": tier, "HostBudget": str(least + (1 << 20))}})
            daemon.process.send_signal(signal.SIGHUP)
            eventually("it has loaded", lambda: state(daemon) == "available")
            daemon.check_alive()
            daemon.check_alive()
            got = residency(daemon)
            check_numbers(got)
            assert got["budget"]["configured"] == least + (1 << 20), got["budget"]
            assert got["counters"]["misses"] > 0, got["counters"]
            # One more than fits was read only where one more was wanted.
            assert got["counters"]["blocks_read"] - got["counters"]["evicted"] <= EXPERTS * LAYERS, got["counters"]


@case
def experts_one_by_one_are_not_for_everybody(daemon):
    with nobody(), Client(daemon.socket) as c:
        with contextlib.suppress(Error):
            c.call("GetResidency", {"blocks": True})
            raise AssertionError("another user may see every expert's heat")
        TYPES.check_reply("GetResidency", c.call("GetResidency"))
        TYPES.check_reply("GetResidency", c.call("GetResidency", {"blocks": False}))
        c.expect(OURS + "NotAuthorized", "GetResidency", {"blocks": True})
        c.send("TraceRouting", {"tokens": 1}, more=True)
        try:
            c.reply()
        except Error as e:
            assert e.name == OURS + "NotAuthorized", e
            check_error(e)
        else:
            raise AssertionError("another user may record routing")


@case
def no_model():
    with Daemon(model="/nonexistent.gguf") as daemon:
        got = residency(daemon)
        assert got["tier"] == "none" and got["policy"] == "none" and not got["layers"] and "model" not in got, got
        assert got["counters"]["hits"] == 0 and got["budget"]["max"] == 0, got
        assert "none" in residentctl(daemon, "residency")


# ---- routing ----


def check_line(line):
    step = json.loads(line)
    assert set(step) == {"tok", "layers"} and "\n" not in line, line
    assert len(step["layers"]) == LAYERS, line
    for experts in step["layers"]:
        assert len(experts) == USED and experts == sorted(set(experts)), line
        assert 0 <= experts[0] and experts[-1] < EXPERTS, line
    return step["tok"]


def simulate(daemon, path, n):
    got = json.loads(residentctl(daemon, "simulate", "--trace", path, "--experts", str(EXPERTS), "--json"))
    assert got["steps"] == n and got["layers"] == LAYERS and got["wanted"] == n * LAYERS * USED, got
    best = {r["fraction"]: r["hits"] for r in got["results"] if r["policy"] == "belady"}
    assert all(r["hits"] <= best[r["fraction"]] for r in got["results"]), got


@case
def traces(daemon):
    """Two at once, each gets as many lines as it wants; what is recorded can be replayed."""
    with daemon.client() as a, daemon.client() as b, daemon.client() as c:
        a.send("TraceRouting", {"tokens": 20}, more=True)
        b.send("TraceRouting", more=True)
        # The answers to these come behind nothing: both recordings have begun.
        time.sleep(0.2)
        c.call("Chat", {"messages": user("Tell me a story."), "options": slow(30)})
        first = [f["line"] for f in a.frames()]
        assert len(first) == 20, len(first)
        second = [b.reply() for _ in range(20)]
        assert all(continues for _, continues in second), "a recording without an end says that it ends"
        assert [p["line"] for p, _ in second] == first
        numbers = [check_line(line) for line in first]
        assert numbers == list(range(numbers[0], numbers[0] + 20)), numbers
        # The connection goes on with other calls.
        assert a.call("GetAvailability")["state"] == "available"
        b.close()
        path = os.path.join(daemon.dir, "trace")
        with open(path, "w", encoding="utf-8") as f:
            f.writelines(line + "\n" for line in first)
        simulate(daemon, path, 20)


@case
def traces_refused(daemon):
    with daemon.client() as c:
        message = c.expect(OURS + "InvalidRequest", "TraceRouting", {"tokens": 3})["message"]
        assert "more" in message, message
        for tokens in (0, -1, "3", 1.5):
            c.send("TraceRouting", {"tokens": tokens}, more=True)
            try:
                c.reply()
            except Error as e:
                assert e.name == SERVICE + "InvalidParameter", e
            else:
                raise AssertionError(f"records {tokens!r} tokens")


@case
def a_tracer_that_hangs_up(daemon):
    """... is forgotten, before the first line and in the middle of an answer, and so is one that never reads."""
    fds = daemon.n_fds()
    with daemon.client() as c:
        for lines in (0, 3):
            with daemon.client() as tracer:
                tracer.send("TraceRouting", more=True)
                time.sleep(0.1)
                if lines:
                    c.send("Chat", {"messages": user("Tell me a story."), "options": slow(40)})
                    for _ in range(lines):
                        tracer.reply()
            eventually("the tracer is gone", lambda: daemon.n_fds() <= fds + 1)
            if lines:
                c.reply()
    eventually("nothing is left", lambda: daemon.n_fds() <= fds)


# ---- heat ----


def heat_files(directory):
    return glob.glob(os.path.join(directory, "heat-*"))


@case
def heat_outlives_the_service():
    """Written when it stops, read when it starts: the experts are there before anybody asks."""
    for conf in (ARENA, MAPPED):
        with tempfile.TemporaryDirectory() as d, model_copy() as path:
            env = {"STATE_DIRECTORY": d}
            with Daemon(model=path, conf=conf, env=env) as daemon:
                assert n_here(daemon) == 0 or conf is MAPPED
                daemon.check_alive()
                here = [layer["place"] for layer in residency(daemon, blocks=True)["layers"]]
                assert not heat_files(d)
            assert len(heat_files(d)) == 1 and os.stat(heat_files(d)[0]).st_mode & 0o777 == 0o600, os.listdir(d)
            with Daemon(model=path, conf=conf, env=env) as daemon:
                eventually("the experts come in", lambda: n_here(daemon) >= sum(p.count("h") for p in here))
                got = residency(daemon, blocks=True)
                assert got["counters"]["steps"] == 0, got["counters"]
                if conf is ARENA:
                    assert [layer["place"] for layer in got["layers"]] == here
                daemon.check_alive()
                assert residency(daemon)["counters"]["misses"] == 0
            # A damaged file is a cold start, no more.
            with open(heat_files(d)[0], "r+b") as f:
                f.seek(100)
                f.write(b"\xff\xff\xff")
            with Daemon(model=path, conf=ARENA, env=env) as daemon:
                daemon.check_alive()
                assert residency(daemon)["counters"]["misses"] > 0


@case
def idle_and_no_room_for_heat():
    """Experts leave after HostIdleSec; that the heat cannot be written is told once, and nothing else changes."""
    conf = {"Memory": {"HostTier": "arena", "HostIdleSec": "1s"}}
    with Daemon(conf=conf, env={"STATE_DIRECTORY": "/nonexistent/state"}) as daemon:
        for _ in range(2):
            daemon.check_alive()
            assert n_here(daemon) > 0
            eventually("the experts leave", lambda: n_here(daemon) == 0)
            got = residency(daemon)
            assert got["budget"]["blocks"] == 0, got["budget"]
        daemon.check_alive()
        assert daemon.log().count("cannot save which experts") == 1, daemon.log()


@case
def a_reload_keeps_the_budget():
    """What the old model holds was counted against the new one: each reload had less."""
    with Daemon(conf=ARENA) as daemon:
        with daemon.client() as c:
            for _ in range(4):
                c.call("Send", {"session": c.call("OpenSession", {"keep": True})["session"], **QUESTION})
        before = residency(daemon)["budget"]
        for policy in ("lru", "lfu", "clock-lfu"):
            daemon.write_conf({"Memory": {"HostTier": "arena", "EvictionPolicy": policy}})
            daemon.process.send_signal(signal.SIGHUP)
            eventually("the new policy is used", lambda: residency(daemon)["policy"] == policy)
            daemon.check_alive()
        after = residency(daemon)["budget"]
        assert after["fixed"] <= before["fixed"] + (4 << 20), (before, after)
        assert after["floor"] <= before["floor"] + (4 << 20), (before, after)
        assert after["max"] >= before["max"] * 9 // 10, (before, after)


@case
def a_reload_keeps_the_heat():
    with tempfile.TemporaryDirectory() as d, Daemon(conf=ARENA, env={"STATE_DIRECTORY": d}) as daemon:
        daemon.check_alive()
        here = n_here(daemon)
        daemon.write_conf({"Memory": {"HostTier": "arena", "EvictionPolicy": "lru"}})
        daemon.process.send_signal(signal.SIGHUP)
        eventually("the new policy is used", lambda: residency(daemon)["policy"] == "lru")
        eventually("the experts come in again", lambda: n_here(daemon) >= here)
        assert residency(daemon)["counters"]["steps"] == 0
        daemon.check_alive()


# ---- model files that change ----


def running(daemon):
    """A long answer under way; returns its client."""
    c = daemon.client()
    c.send("Chat", {"messages": user("Tell me a story."), "options": slow(1500)}, more=True)
    while not c.reply()[0].get("text"):
        pass
    return c


def check_broken(c, daemon):
    """What runs ends, what comes is refused, and the state says why."""
    with c:
        try:
            for _ in c.frames():
                pass
        except Error as e:
            assert e.name == OURS + "ModelBroken", e
            check_error(e)
        else:
            raise AssertionError("an answer goes on without its model")
    got = daemon.call("GetAvailability")
    assert got["state"] == "unavailable" and "file was changed" in got["reason"], got
    with daemon.client() as other:
        for _ in range(2):
            other.expect(OURS + "ModelBroken", "Chat", QUESTION)
    assert daemon.process.poll() is None


def write_back(path):
    with open(path, "r+b") as f, open(MODEL, "rb") as whole:
        shutil.copyfileobj(whole, f)


@case
def model_is_cut():
    for conf in ({}, ARENA, MAPPED):
        with model_copy() as path, Daemon(model=path, conf=conf) as daemon:
            daemon.check_alive()
            c = running(daemon)
            os.truncate(path, 8192)
            check_broken(c, daemon)
            TYPES.check_reply("GetResidency", daemon.call("GetResidency", {"blocks": True}))
            # It tries the cut file, says what is wrong, and goes on waiting.
            if conf is ARENA:
                eventually("it has tried", lambda: re.search(r"m\.gguf.*(beyond|ends|bytes)", daemon.log()))
                assert state(daemon) != "available"
            write_back(path)
            eventually("it comes back by itself", lambda: state(daemon) == "available")
            daemon.check_alive()
            assert daemon.log().count("unreadable while it was in use") == 1, daemon.log()


@case
def model_is_rewritten():
    """The same size, another time: no guessing whether it is the same."""
    with model_copy() as path, Daemon(model=path, conf=ARENA) as daemon:
        daemon.check_alive()
        c = running(daemon)
        write_back(path)
        check_broken(c, daemon)
        eventually("it comes back by itself", lambda: state(daemon) == "available")
        daemon.check_alive()


@case
def model_is_cut_and_reloaded():
    """A reload does not wait for the file to be looked at again."""
    with model_copy() as path, Daemon(model=path, conf=MAPPED) as daemon:
        c = running(daemon)
        os.truncate(path, 8192)
        check_broken(c, daemon)
        write_back(path)
        daemon.process.send_signal(signal.SIGHUP)
        eventually("it is loaded anew", lambda: state(daemon) == "available")
        daemon.check_alive()


@case
def model_is_cut_while_idle():
    """The first request finds it, and gets the error."""
    with model_copy() as path, Daemon(model=path, conf=ARENA) as daemon:
        daemon.check_alive()
        os.truncate(path, 8192)
        with daemon.client() as c:
            c.expect(OURS + "ModelBroken", "Chat", QUESTION)
        eventually("the state says so", lambda: state(daemon) == "unavailable")
        # And it can be stopped in this state.


@case
def model_is_replaced_by_name():
    """An install program renames a new file over the old one: the old one goes on until a reload."""
    with model_copy() as path, Daemon(model=path, conf=ARENA) as daemon:
        daemon.check_alive()
        c = running(daemon)
        shutil.copyfile(MODEL, path + ".new")
        os.rename(path + ".new", path)
        with c:
            c.reply()
        daemon.check_alive()
        assert state(daemon) == "available" and "was changed" not in daemon.log(), daemon.log()
        daemon.process.send_signal(signal.SIGHUP)
        eventually("it is loaded anew", lambda: len(re.findall("experts: .*HostTier=arena", daemon.log())) == 2)
        daemon.check_alive()


# ---- residentctl ----


@case
def programs():
    with Daemon(conf=ARENA) as daemon:
        daemon.check_alive()
        out = residentctl(daemon, "residency")
        for words in ("arena: HostTier=arena", "hits", "misses", "lfu"):
            assert words in out, out
        assert len(re.findall(r"^ *\d+ .*", out, re.M)) >= LAYERS, out
        got = json.loads(residentctl(daemon, "residency", "--json"))
        assert got["tier"] == "arena" and len(got["layers"]) == LAYERS, got
        svg = os.path.join(daemon.dir, "picture.svg")
        residentctl(daemon, "residency", "--svg", svg)
        with open(svg, encoding="utf-8") as f:
            picture = f.read()
        assert picture.startswith("<") and picture.rstrip().endswith("</svg>"), picture[:200]
        assert picture.count("<rect") >= LAYERS * EXPERTS, picture.count("<rect")
        out = residentctl(daemon, "top", "--once")
        assert "arena" in out and "tokens" in out, out
        trace = os.path.join(daemon.dir, "trace")
        record = [os.path.join(BUILD, "residentctl"), "trace", "record", "--output", trace, "--tokens", "15"]
        with subprocess.Popen(record, env=dict(os.environ, RESIDENTD_SOCKET=daemon.socket), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
            while p.poll() is None:
                daemon.check_alive()
            assert p.returncode == 0, p.stdout.read()
        with open(trace, encoding="utf-8") as f:
            lines = f.read().splitlines()
        assert len(lines) == 15, len(lines)
        for line in lines:
            check_line(line)
        simulate(daemon, trace, 15)
        if os.geteuid() == 0:
            os.chmod(daemon.dir, 0o777)
            p = subprocess.run([os.path.join(BUILD, "residentctl"), "residency", "--svg", svg + "2"], user=NOBODY,
                               group=NOBODY, extra_groups=[], capture_output=True, text=True, timeout=60, check=False, cwd="/",
                               env=dict(os.environ, RESIDENTD_SOCKET=daemon.socket))
            if "Permission denied" not in p.stderr:  # a build folder that others may not enter
                assert p.returncode != 0 and "not everybody may" in p.stderr, p
                assert not os.path.exists(svg + "2")


if __name__ == "__main__":
    main(Daemon)
