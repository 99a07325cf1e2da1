#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""residentd-bpf from the outside: who may connect, what it refuses, what it keeps when it gives privileges up, and that what
was attached ends with its connection. The messages are packed from bpf/residency.h, with no code of ours."""
import array
import contextlib
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import tempfile
import time

from rd import BUILD, Skip, case, eventually, main

HELPER = os.environ.get("RESIDENTD_BPF", os.path.join(BUILD, "residentd-bpf"))
MAGIC, VERSION = 0x52425046, 1
ATTACH, LATENCY, RESET = 1, 2, 3
EBADMSG, EINVAL = 74, 22
PAGE = resource.getpagesize()
MAPS = 5


def header(kind, magic=MAGIC, version=VERSION):
    return struct.pack("=IHH", magic, version, kind)


def extent(part=0, first_block=0, n=4, offset=8192, stride=5000):
    return struct.pack("=IIIIQQ", part, first_block, n, 0, offset, stride)


def attach(extents=(extent(),), page=PAGE, parts=1, blocks=4, n_extents=None, head=header(ATTACH)):
    n = len(extents) if n_extents is None else n_extents
    return head + struct.pack("=IIII", page, parts, blocks, n) + b"".join(extents)


class Helper:
    def __init__(self, *options, allowed=("--allow-uid=12345",)):
        if not os.access(HELPER, os.X_OK):
            raise Skip(f"{HELPER} is not built")
        if os.geteuid() != 0:
            raise Skip("not root")
        if not os.path.exists("/sys/kernel/btf/vmlinux"):
            raise Skip("this kernel has no BTF")
        self.dir = tempfile.mkdtemp(prefix="test-feed-")
        os.chmod(self.dir, 0o755)
        self.socket = os.path.join(self.dir, "bpf.sock")
        self.model = os.path.join(self.dir, "model")
        with open(self.model, "wb") as f:
            f.write(os.urandom(100 * PAGE + 1))
        self.log = open(os.path.join(self.dir, "log"), "w+b")
        self.process = subprocess.Popen([HELPER, f"--socket={self.socket}", *allowed, *options], stderr=self.log)
        eventually("it listens", self.listens)

    def listens(self):
        assert self.process.poll() is None, self.said()
        with contextlib.suppress(OSError), self.connect():
            return True
        return False

    def said(self):
        with open(self.log.name, "rb") as f:
            return f.read().decode(errors="replace")

    def connect(self):
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        s.settimeout(30)
        try:
            s.connect(self.socket)
        except OSError:
            s.close()
            raise
        return s

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.dir)


def send(s, message, fds=()):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    s.sendmsg([message], rights)


def answer(s):
    """Error, what is attached, text, descriptors."""
    data, rights, _, _ = s.recvmsg(1 << 16, socket.CMSG_SPACE(16 * 4))
    fds = array.array("i")
    for _, _, value in rights:
        fds.frombytes(value)
    assert len(data) == 8 + 8 + 256, data
    magic, version, _kind, error, attached = struct.unpack_from("=IHHiI", data)
    assert (magic, version) == (MAGIC, VERSION)
    return -error, attached, data[16:].split(b"\0")[0].decode(), list(fds)


def ask(s, message, fds=()):
    send(s, message, fds)
    return answer(s)


def closed(s):
    try:
        return s.recv(1) == b""
    except ConnectionError:
        return True


def refused(helper, message, fds, error, text):
    with helper.connect() as s:
        got, _, why, maps = ask(s, message, fds)
        assert got == error and re.search(text, why) and not maps, (got, why, maps)
        assert closed(s)


def close_all(fds):
    for fd in fds:
        os.close(fd)


@case
def garbage_is_refused():
    with Helper() as h, open(h.model, "rb") as model, open(h.model, "ab") as blind:
        fd = [model.fileno()]
        for message, fds, text in (
                (b"x", [], "not a message"),
                (b"\0" * 4096, [], "not a message"),
                (header(ATTACH, magic=MAGIC + 1), [], "not a message"),
                (attach(head=header(ATTACH, version=VERSION + 1)), fd, "another version"),
                (header(ATTACH), fd, "too short"),
                (header(LATENCY) + struct.pack("=II", 1, 0), [], "nothing is attached"),
                (header(RESET), [], "nothing is attached"),
                (header(77), [], "nothing is attached"),
                (attach(), [], "descriptor"),
                (attach(parts=2), fd, "descriptor"),
                (attach(parts=0), [], "descriptor"),
                (attach(parts=65), fd, "descriptor"),
                (attach(page=PAGE * 2), fd, "pages of another size"),
                (attach(blocks=1 << 21), fd, "wrong counts"),
                (attach(n_extents=2), fd, "wrong counts"),
                (attach(n_extents=0x80000001), fd, "wrong counts"),
                (attach() + b"\0", fd, "wrong counts"),
                (b"\0" * 200000, [], "too long|not a message")):
            refused(h, message, fds, EBADMSG, text)
        for extents, text in (
                ([extent(part=1)], "not in order"),
                ([extent(n=5)], "blocks that are none"),
                ([extent(first_block=1)], "blocks that are none"),
                ([extent(n=0)], "blocks that are none"),
                ([extent(first_block=0xffffffff, n=2)], "blocks that are none"),
                ([extent(stride=0)], "outside"),
                ([extent(stride=1 << 62)], "outside"),
                ([extent(offset=(1 << 64) - 1)], "outside"),
                ([extent(offset=100 * PAGE)], "outside"),
                ([extent(), extent(offset=8192 + 4 * 5000 - 1)], "outside"),
                ([extent(offset=40000), extent(offset=0)], "outside")):
            refused(h, attach(extents), fd, EINVAL, text)
        r, w = os.pipe()
        for fds in ([r], [blind.fileno()], [os.open(h.dir, os.O_RDONLY)], [os.open(h.model, os.O_PATH)]):
            refused(h, attach(), fds, EINVAL, "no readable file")
        close_all([r, w])
        assert h.process.poll() is None


@case
def a_connection_gets_its_maps_and_they_end_with_it():
    with Helper() as h, open(h.model, "rb") as model:
        with h.connect() as s:
            error, attached, text, maps = ask(s, attach(), [model.fileno()])
            if error and "CAP_BPF" in text:
                raise Skip("the kernel lets root load no BPF here")
            assert error == 0 and attached & 3 == 3 and len(maps) == MAPS, (error, attached, text)
            kinds = [os.readlink(f"/proc/self/fd/{fd}") for fd in maps]
            assert kinds == ["anon_inode:bpf-map"] * MAPS, kinds
            assert len(programs(h)) >= 2
            assert ask(s, header(RESET))[0] == 0
            if attached & 8 and attached & 0x30:
                before = len(programs(h))
                assert ask(s, header(LATENCY) + struct.pack("=II", 1, 0))[0] == 0
                assert len(programs(h)) > before
                assert ask(s, header(LATENCY) + struct.pack("=II", 1, 0))[0] == 0
                assert ask(s, header(LATENCY) + struct.pack("=II", 0, 0))[0] == 0
                assert len(programs(h)) == before
            assert ask(s, attach(), [model.fileno()])[0] == EBADMSG, "attached twice"
            assert closed(s)
        eventually("what was attached is gone", lambda: not programs(h))
        close_all(maps)


def programs(helper):
    """Links and events that the helper holds."""
    found = []
    for fd in os.listdir(f"/proc/{helper.process.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(f"/proc/{helper.process.pid}/fd/{fd}")
            # An old kernel's raw tracepoints are named otherwise than links.
            found += [name] if re.search(r"bpf[_-]link|bpf-raw-tp|bpf-raw-tracepoint|perf_event", name) else []
    return found


@case
def a_few_at_once_and_no_more():
    with Helper() as h, open(h.model, "rb") as model, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(h.connect()) for _ in range(4)]
        for s in connections:
            error, _, text, maps = ask(s, attach(), [model.fileno()])
            if error and "CAP_BPF" in text:
                raise Skip("the kernel lets root load no BPF here")
            assert error == 0, text
            close_all(maps)
        refused(h, attach(), [model.fileno()], EBADMSG, "too many")
        connections[0].close()
        time.sleep(0.2)
        with h.connect() as s:
            error, _, text, maps = ask(s, attach(), [model.fileno()])
            assert error == 0, text
            close_all(maps)


@case
def others_are_refused():
    with Helper() as h:
        os.chmod(h.socket, 0o666)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setresgid(4711, 4711, 4711)
                os.setresuid(4711, 4711, 4711)
                refused(h, header(RESET), [], EBADMSG, "this user may not")
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert "refused a connection of uid 4711" in h.said()


@case
def two_capabilities_are_left_of_root():
    with Helper() as h:
        with open(f"/proc/{h.process.pid}/status", encoding="utf-8") as f:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in f)
        both = 1 << 38 | 1 << 39
        for field in ("CapPrm", "CapEff", "CapBnd"):
            assert int(status[field], 16) & ~both == 0, (field, status[field])
        assert int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0
        assert "0" not in status["Uid"].split() and "0" not in status["Gid"].split()
        assert status["Groups"].strip() == "" and status["NoNewPrivs"] == "1"


@case
def wrong_options_are_2():
    if not os.access(HELPER, os.X_OK):
        raise Skip(f"{HELPER} is not built")
    for options in (["--nonsense"], ["argument"], ["--allow-uid=-1"], ["--allow-uid=x"], ["--allow-uid=4294967295"],
                    ["--allow-user=no such user"], ["--allow-uid=1"] * 9):
        p = subprocess.run([HELPER, *options], capture_output=True, timeout=30, check=False)
        assert p.returncode == 2 and p.stderr, options
    for option in ("--help", "--version"):
        assert subprocess.run([HELPER, option], capture_output=True, timeout=30, check=True).stdout


if __name__ == "__main__":
    main()
