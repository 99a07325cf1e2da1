#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""residentd-import as its unit starts it: one request on a socket as standard input; and residentctl as its client.

The listener below does what residentd-import.socket does. --private stands in for the right that root has.
"""
import array
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from rd import BUILD, MODEL, ROOT, WAIT, Daemon, Skip, case, main
from splitgguf import split

IMPORT = os.path.join(BUILD, "residentd-import")
CTL = os.path.join(BUILD, "residentctl")
UNIT = os.path.join(ROOT, "units/residentd-import@.service.in")
DENIED = "org.residentd.Inference.NotAuthorized"
TITLE = "Tiny-Qwen35MoE-stories-Q8_0"


def sha256(*paths):
    h = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            h.update(f.read())
    return h.hexdigest()


def patched(source, target, old, new):
    """A copy with a few bytes of the directory changed for as many others."""
    assert len(old) == len(new)
    with open(source, "rb") as f:
        data = f.read()
    assert old in data, old
    with open(target, "wb") as f:
        f.write(data.replace(old, new, 1))
    return target


class Import:
    """One residentd-import and the other end of its standard input."""

    def __init__(self, models, *args, user=None):
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(WAIT)
        self.process = subprocess.Popen([IMPORT, *args], stdin=theirs, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, user=user,
                                        env={**os.environ, "RESIDENTD_MODELS": models})
        theirs.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(WAIT)
        self.process.kill()
        self.log = self.process.stderr.read().decode()
        self.process.stderr.close()
        self.process.wait()
        assert self.process.returncode in (0, -signal.SIGKILL), (self.process.returncode, self.log)

    def send(self, request, *fds):
        data = request if isinstance(request, bytes) else json.dumps(request).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([data], rights)

    def reply(self):
        """All events and the reply behind them."""
        events = []
        while True:
            data = self.sock.recv(1 << 16)
            assert data, "it ended without an answer"
            message = json.loads(data)
            if "event" not in message:
                return events, message
            events.append(message)


def ask(models, request, *paths, args=("--private",), **kw):
    fds = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        with Import(models, *args, **kw) as i:
            i.send(request, *fds)
            return i.reply()
    finally:
        for fd in fds:
            os.close(fd)


def add(models, *paths, **more):
    return ask(models, {"command": "add", "files": [os.path.basename(p) for p in paths], **more}, *paths)


def refused(models, words, *paths, **more):
    before = listing(models)
    events, reply = add(models, *paths, **more)
    assert "error" in reply, reply
    for word in words:
        assert word in reply["message"], (word, reply)
    assert models not in reply["message"].replace(models + " has", ""), reply
    assert listing(models) == before, f"a refused model left {listing(models)}"
    return events, reply


def listing(models):
    return sorted(os.listdir(models)) if os.path.isdir(models) else []


@contextlib.contextmanager
def place():
    with tempfile.TemporaryDirectory() as d:
        os.chmod(d, 0o755)
        yield d, os.path.join(d, "models")


# ---- what an import does ----


@case
def added_checked_recorded():
    with place() as (_, models):
        events, reply = add(models, MODEL)
        digest, size = sha256(MODEL), os.path.getsize(MODEL)
        stem = f"{TITLE}-{digest[:12]}"
        assert reply == {"file": stem + ".gguf", "sha256": digest, "bytes": size, "default": True, "existed": False}, reply
        assert listing(models) == [stem + ".gguf", stem + ".json", "default.gguf"], listing(models)
        assert os.readlink(os.path.join(models, "default.gguf")) == stem + ".gguf"
        for name in listing(models)[:2]:
            assert os.stat(os.path.join(models, name)).st_mode & 0o7777 == 0o644, name
        assert sha256(os.path.join(models, stem + ".gguf")) == digest
        with open(os.path.join(models, stem + ".json"), encoding="utf-8") as f:
            record = json.load(f)
        assert record["sha256"] == digest and record["bytes"] == size and record["license"] == "other", record
        assert record["title"] == "Tiny Qwen35MoE stories" and record["imported_from"] == os.path.basename(MODEL), record
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["imported"]), record

        kinds = [e["event"] for e in events]
        assert kinds[:2] == ["check", "space"] and kinds[-1] == "sync", kinds
        space, last = events[1], events[-2]
        assert space["needed"] in (0, size) and space["available"] > 0, space
        assert last["event"] == ("copy" if space["needed"] else "hash") and last["done"] == last["total"] == size, last


@case
def same_content_is_kept():
    with place() as (d, models):
        first = add(models, MODEL)[1]
        before = os.stat(os.path.join(models, first["file"]))
        other = shutil.copy(MODEL, os.path.join(d, "other.gguf"))
        second = add(models, other, name="quite another")[1]
        assert second == {**first, "existed": True}, second
        assert os.stat(os.path.join(models, first["file"])).st_ino == before.st_ino
        assert len(listing(models)) == 3, listing(models)


@case
def names_and_defaults():
    with place() as (d, models):
        first = add(models, MODEL)[1]
        changed = patched(MODEL, os.path.join(d, "x.gguf"), b"Toy model", b"My  model")
        second = add(models, changed, name="../.My: model/")[1]
        assert re.fullmatch(r"My-model-[0-9a-f]{12}\.gguf", second["file"]) and not second["default"], second
        reply = ask(models, {"command": "default", "name": "My-model"})[1]
        assert reply["file"] == second["file"], reply
        assert os.readlink(os.path.join(models, "default.gguf")) == second["file"]
        reply = ask(models, {"command": "remove", "name": "My-model"})[1]
        assert reply["errno"] == 16 and "--force" in reply["message"], reply
        reply = ask(models, {"command": "remove", "name": first["sha256"][:12]})[1]
        assert reply["file"] == first["file"], reply
        reply = ask(models, {"command": "remove", "name": second["file"], "force": True})[1]
        assert "error" not in reply and listing(models) == [], (reply, listing(models))
        for name in ("../x", "", ".", "default", "My-model"):
            for command in ("remove", "default"):
                reply = ask(models, {"command": command, "name": name, "force": True})[1]
                assert reply["error"].endswith("NoSuchModel"), (name, reply)
        assert os.path.exists(changed)


@case
def split_model():
    with place() as (d, models):
        parts = split(MODEL, os.path.join(d, "big"), 3)
        events, reply = add(models, *parts)
        stem = f"{TITLE}-{sha256(*parts)[:12]}"
        names = [f"{stem}-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
        assert reply["file"] == names[0] and reply["sha256"] == sha256(*parts), reply
        assert listing(models) == sorted([*names, stem + ".json", "default.gguf"]), listing(models)
        for part, name in zip(parts, names):
            assert sha256(part) == sha256(os.path.join(models, name))
        assert add(models, *parts)[1]["existed"]
        assert ask(models, {"command": "remove", "name": TITLE, "force": True})[1]["file"] == names[0]
        assert listing(models) == [], listing(models)

        refused(models, ["big-00002-of-00003.gguf"], parts[0])
        refused(models, ["big-00003-of-00003.gguf"], *parts[:2])
        refused(models, ["first part"], *parts[1:])
        shutil.copy(parts[0], parts[2])
        refused(models, ["big-00003-of-00003.gguf", "split.no"], *parts)
        refused(models, ["2 files"], MODEL, parts[1])


@case
def useless_files():
    with place() as (d, models):
        os.mkdir(models)
        with open(MODEL, "rb") as f:
            data = f.read()
        broken = os.path.join(d, "broken.gguf")
        for content, word in ((data[:100_000], "broken.gguf"), (b"", "broken.gguf"), (b"GGUF" + bytes(64), "broken.gguf")):
            with open(broken, "wb") as f:
                f.write(content)
            refused(models, [word], broken)
        unknown = patched(MODEL, os.path.join(d, "u.gguf"), b"qwen35moe", b"qwen99moe")
        refused(models, ["u.gguf", "qwen99moe", "not supported"], unknown)
        vocabulary = patched(MODEL, os.path.join(d, "v.gguf"), b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz")
        refused(models, ["v.gguf"], vocabulary)
        refused(models, ["regular"], d)
        os.mkfifo(os.path.join(d, "fifo"))
        fd = os.open(os.path.join(d, "fifo"), os.O_RDWR)
        with Import(models, "--private") as i:
            i.send({"command": "add", "files": ["fifo"]}, fd)
            assert "regular" in i.reply()[1]["message"]
        os.close(fd)
        for name in (".hidden", "a/b", "", "a\nb", "x" * 201):
            with open(MODEL, "rb") as f, Import(models, "--private") as i:
                i.send({"command": "add", "files": [name]}, f.fileno())
                assert i.reply()[1]["errno"] == 22, name
        assert listing(models) == [], listing(models)


@case
def warnings():
    with place() as (d, models):
        silent = patched(MODEL, os.path.join(d, "s.gguf"), b"tokenizer.chat_template", b"tokenizer.chat_templatf")
        events, reply = add(models, silent)
        texts = [e["text"] for e in events if e["event"] == "warning"]
        assert "error" not in reply and len(texts) == 1 and "chat template" in texts[0], (texts, reply)
        assert not [e for e in add(models, MODEL)[0] if e["event"] == "warning"]


@case
def no_room():
    if os.geteuid() != 0:
        raise Skip("mounting a small file system needs root")
    with place() as (d, models):
        os.mkdir(models)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "none", models], check=False, capture_output=True).returncode:
            raise Skip("cannot mount a tmpfs here")
        try:
            events, reply = refused(models, ["needs 8 MB", "kept free"], MODEL)
            assert reply["errno"] == 28 and [e["event"] for e in events] == ["check", "space"], (events, reply)
            assert events[1]["needed"] > events[1]["available"], events
            subprocess.run(["mount", "-o", "remount,size=10M", models], check=True)
            assert "error" not in add(models, MODEL)[1]
        finally:
            subprocess.run(["umount", models], check=True)


# ---- who may ----


@case
def others_are_refused():
    if os.geteuid() != 0:
        raise Skip("becoming another user needs root")
    with place() as (_, models):
        os.mkdir(models)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:  # the socket remembers who made it
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                os.environ["RESIDENTD_MODELS"] = models
                for args in ((), ("--private",)):
                    status += 10
                    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    ours.settimeout(WAIT)
                    # As root's one-shot would see this client; here they are one user, whom only --private lets in.
                    with subprocess.Popen([IMPORT, *args], stdin=theirs, stderr=subprocess.DEVNULL) as p:
                        ours.send(b'{"command":"remove","name":"x"}')
                        reply = json.loads(ours.recv(4096))
                        p.wait(WAIT)
                    if (reply["error"] == DENIED) != (not args) or not args and "sudo" not in reply["message"]:
                        os._exit(status)
                os._exit(0)
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert "error" not in ask(models, {"command": "add", "files": ["m"]}, MODEL, args=())[1], "root is refused"


@case
def own_user_needs_private():
    if os.geteuid() == 0:
        raise Skip("root may do everything")
    with place() as (_, models):
        reply = ask(models, {"command": "remove", "name": "x"}, args=())[1]
        assert reply["error"] == DENIED and "sudo" in reply["message"], reply


@case
def hostile_requests():
    with place() as (_, models):
        os.mkdir(models)
        for request in (b"x", b"{", b"[]", b"{}", b'{"command":1}', b'{"command":"format"}', b'{"command":"remove"}',
                        b'{"command":"add","files":[1]}', b'{"command":"add","files":[]}', b'{"command":"add"}',
                        b'{"command":"add","files":["a"]}', b'{"command":"remove","name":"x","path":"/"}',
                        b'{"command":"remove","name":"' + b"x" * 300 + b'"}', b"\0", b"[" * 60000, b" " * 70000):
            with Import(models, "--private") as i:
                i.send(request)
                assert "error" in i.reply()[1], request
        with open(MODEL, "rb") as f, Import(models, "--private") as i:
            i.send({"command": "add", "files": ["a", "b"]}, f.fileno())
            assert "2 files" in i.reply()[1]["message"]
        with open(MODEL, "rb") as f, Import(models, "--private") as i:
            i.send({"command": "add", "files": ["m"] * 254}, *[f.fileno()] * 253)
            assert "error" in i.reply()[1]
        with Import(models, "--private"):
            pass  # says nothing and goes
        for stdin in (subprocess.DEVNULL, subprocess.PIPE):
            done = subprocess.run([IMPORT], stdin=stdin, capture_output=True, timeout=WAIT, check=False)
            assert done.returncode == 1 and b"no socket" in done.stderr, done
        assert listing(models) == [], listing(models)


# ---- what ends it ----


@contextlib.contextmanager
def large(d):
    """A model whose copy takes a while, as a sparse file."""
    path = shutil.copy(MODEL, os.path.join(d, "large.gguf"))
    os.truncate(path, 3 << 30)
    yield path
    os.unlink(path)


def begin_large(i, path):
    fd = os.open(path, os.O_RDONLY)
    i.send({"command": "add", "files": ["large.gguf"]}, fd)
    os.close(fd)
    while True:
        e = json.loads(i.sock.recv(1 << 16))
        assert "event" in e, e
        if e["event"] in ("copy", "hash"):
            return


@case
def hang_up_cancels():
    with place() as (d, models), large(d) as path:
        with Import(models, "--private") as i:
            begin_large(i, path)
            begin = time.monotonic()
            i.sock.close()
            i.process.wait(WAIT)
            assert time.monotonic() - begin < 20, "it went on without a client"
        assert "cancelled" in i.log and listing(models) == [], (i.log, listing(models))


@case
def terminate_cancels():
    with place() as (d, models), large(d) as path:
        with Import(models, "--private") as i:
            begin_large(i, path)
            i.process.terminate()
            assert "cancelled" in i.reply()[1]["message"]
        assert listing(models) == [], listing(models)


@case
def killed_import_is_swept():
    with place() as (d, models), large(d) as path:
        def leave_one():
            with Import(models, "--private") as i:
                begin_large(i, path)
                i.process.kill()
        leave_one()
        (left,) = listing(models)
        assert left.startswith(".import-"), left
        with Import(models, "--private") as living:
            begin_large(living, path)
            living.process.send_signal(signal.SIGSTOP)
            (own,) = set(listing(models)) - {left}
            env = {**os.environ, "RESIDENTD_MODELS": models}
            subprocess.run([IMPORT, "--sweep"], env=env, timeout=WAIT, check=True)
            assert listing(models) == [own], "a living import was swept, or the dead one was not"
            living.process.send_signal(signal.SIGCONT)
        leave_one()
        reply = add(models, MODEL)[1]
        assert len(listing(models)) == 3 and reply["file"] in listing(models), listing(models)


# ---- residentctl as the client ----


@contextlib.contextmanager
def listener(d, models, *args):
    """What residentd-import.socket does: a process for each connection."""
    path = os.path.join(d, "import.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.bind(path)
        s.listen()

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    conn, _ = s.accept()
                    with conn:
                        subprocess.run([IMPORT, *args], stdin=conn, stderr=subprocess.DEVNULL, check=False,
                                       env={**os.environ, "RESIDENTD_MODELS": models})
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield path
        finally:
            s.shutdown(socket.SHUT_RDWR)
            thread.join(WAIT)


@case
def through_the_socket():
    with place() as (d, models), listener(d, models, "--private") as path, Daemon() as daemon:
        env = {**os.environ, "RESIDENTD_IMPORT": path, "RESIDENTD_MODELS": models, "RESIDENTD_SOCKET": daemon.socket}

        def ctl(*args, status=0):
            done = subprocess.run([CTL, "--json", "model", *args], env=env, capture_output=True, timeout=WAIT, check=False)
            assert done.returncode == status, (args, done)
            return json.loads(done.stdout) if status == 0 else done.stderr.decode()

        secret = shutil.copy(MODEL, os.path.join(d, "secret.gguf"))
        os.chmod(secret, 0o600)
        first = ctl("add", secret)
        assert first["sha256"] == sha256(MODEL) and first["default"], first
        parts = split(MODEL, os.path.join(d, "big"), 2)
        second = ctl("add", "--name", "Big", parts[0])
        assert second["file"].startswith("Big-") and not second["default"], second
        models_now = {m["file"]: m for m in ctl("list")["models"]}
        assert set(models_now) == {first["file"], second["file"]}, models_now
        assert models_now[first["file"]]["loaded"] and models_now[first["file"]]["default"], models_now
        assert ctl("show", "Big")["parts"] == 2
        assert "is loaded" in ctl("remove", "Big", status=1)
        assert ctl("default", "Big")["default"]
        assert "--force" in ctl("remove", "Big", status=1)
        assert ctl("remove", "--force", "Big")["file"] == second["file"]
        assert "no model" in ctl("show", "Big", status=1)
        assert "Big" in ctl("remove", "Big", status=1)
        env["RESIDENTD_IMPORT"] = os.path.join(d, "absent")
        assert "absent" in ctl("remove", "--force", TITLE, status=1), "it went another way than told"


@case
def denied_through_the_socket():
    if os.geteuid() != 0:
        raise Skip("becoming another user needs root")
    with place() as (d, models), listener(d, models) as path:
        os.chmod(path, 0o666)
        env = {**os.environ, "RESIDENTD_IMPORT": path}
        readable = shutil.copy(MODEL, os.path.join(d, "m.gguf"))
        os.chmod(readable, 0o644)
        done = subprocess.run([CTL, "model", "add", readable], env=env, capture_output=True, timeout=WAIT, check=False,
                              user=65534, group=65534, extra_groups=[])
        assert done.returncode == 1 and b"sudo" in done.stderr and done.stderr.count(b"\n") == 1, done
        assert listing(models) == [], listing(models)


# ---- the unit ----


@case
def unit_is_confined():
    if not shutil.which("systemd-analyze"):
        raise Skip("no systemd-analyze")
    with tempfile.TemporaryDirectory() as d:
        unit = os.path.join(d, "residentd-import@.service")
        with open(UNIT, encoding="utf-8") as f, open(unit, "w", encoding="utf-8") as g:
            g.write(f.read().replace("@LIBEXECDIR@/residentd", BUILD))
        done = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=15", unit],
                              capture_output=True, timeout=WAIT, check=False)
        found = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout.decode())
        if not found:
            raise Skip("this systemd-analyze cannot look at a file")
        assert float(found[1]) <= 1.5 and done.returncode == 0, done.stdout.decode()


if __name__ == "__main__":
    main()
