# SPDX-License-Identifier: MIT
"""A small D-Bus in Python: what the tests of the bus need to be a client, stand-ins for other services, and a nuisance.

Written from the D-Bus specification alone, so that neither sd-bus nor libdbus is on both sides of a test. Values: a
variant is a pair (signature, value), a dictionary a dict or a list of pairs, a descriptor an int that the receiver owns.
"""
import array
import contextlib
import os
import select
import socket
import struct
import threading
import time

CALL, RETURN, ERROR, SIGNAL = 1, 2, 3, 4
NO_REPLY, NO_AUTO_START, INTERACTIVE = 1, 2, 4
FIXED = {"y": "B", "n": "h", "q": "H", "i": "i", "u": "I", "x": "q", "t": "Q", "d": "d", "b": "I", "h": "I"}
ALIGN = {"y": 1, "n": 2, "q": 2, "i": 4, "u": 4, "x": 8, "t": 8, "d": 8, "b": 4, "h": 4, "s": 4, "o": 4, "g": 1, "a": 4,
         "v": 1, "(": 8, "{": 8}
FIELDS = {1: "o", 2: "s", 3: "s", 4: "s", 5: "u", 6: "s", 7: "s", 8: "g", 9: "u"}


class BusError(Exception):
    def __init__(self, name, message):
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message


class Left(Exception):
    """The bus closed the connection."""


def split(signature):
    """The complete types of a signature."""
    types, i = [], 0
    while i < len(signature):
        begin = i
        while signature[i] == "a":
            i += 1
        if signature[i] in "({":
            depth = 0
            while True:
                depth += (signature[i] in "({") - (signature[i] in ")}")
                i += 1
                if depth == 0:
                    break
        else:
            i += 1
        types.append(signature[begin:i])
    return types


class Writer:
    def __init__(self):
        self.data = bytearray()
        self.fds = []

    def pad(self, n):
        self.data += bytes(-len(self.data) % n)

    def put(self, kind, value):
        self.pad(ALIGN[kind[0]])
        if kind == "h":
            self.fds.append(value)
            value = len(self.fds) - 1
        if kind in FIXED:
            self.data += struct.pack("<" + FIXED[kind], value)
        elif kind in "sog":
            data = value if isinstance(value, bytes) else value.encode()
            self.data += struct.pack("<B" if kind == "g" else "<I", len(data)) + data + b"\0"
        elif kind == "v":
            self.put("g", value[0])
            self.put(value[0], value[1])
        elif kind[0] == "a":
            self.put_array(kind[1:], value.items() if isinstance(value, dict) else value)
        else:
            for k, v in zip(split(kind[1:-1]), value):
                self.put(k, v)

    def put_array(self, kind, values):
        at = len(self.data)
        self.data += bytes(4)
        self.pad(ALIGN[kind[0]])
        begin = len(self.data)
        for v in values:
            self.put(kind, v)
        self.data[at:at + 4] = struct.pack("<I", len(self.data) - begin)


class Reader:
    def __init__(self, data, fds, order="<"):
        self.data, self.fds, self.order, self.at = data, fds, order, 0

    def pad(self, n):
        self.at += -self.at % n

    def get(self, kind):
        self.pad(ALIGN[kind[0]])
        if kind in FIXED:
            value, = struct.unpack_from(self.order + FIXED[kind], self.data, self.at)
            self.at += struct.calcsize(FIXED[kind])
            return bool(value) if kind == "b" else self.fds[value] if kind == "h" else value
        if kind in "sog":
            n = self.get("y" if kind == "g" else "u")
            self.at += n + 1
            return self.data[self.at - n - 1:self.at - 1].decode()
        if kind == "v":
            return self.get(self.get("g"))
        if kind[0] != "a":
            return tuple(self.get(k) for k in split(kind[1:-1]))
        n = self.get("u")
        self.pad(ALIGN[kind[1]])
        end, values = self.at + n, []
        while self.at < end:
            values.append(self.get(kind[1:]))
        return dict(values) if kind[1] == "{" else values


class Message:
    """kind, flags, serial, the header's fields by name, body: a tuple, and fds."""

    NAMES = {1: "path", 2: "interface", 3: "member", 4: "error", 5: "reply_serial", 6: "destination", 7: "sender",
             8: "signature"}

    def __init__(self, kind, serial, flags=0, body=(), **fields):
        self.kind, self.serial, self.flags, self.body = kind, serial, flags, body
        for name in self.NAMES.values():
            setattr(self, name, fields.get(name))

    def pack(self):
        body, header = Writer(), Writer()
        for k, v in zip(split(self.signature or ""), self.body):
            body.put(k, v)
        fields = [(n, (FIELDS[n], getattr(self, name))) for n, name in self.NAMES.items() if getattr(self, name)]
        if body.fds:
            fields.append((9, ("u", len(body.fds))))
        header.put("(yyyyuua(yv))", (ord("l"), self.kind, self.flags, 1, len(body.data), self.serial, fields))
        header.pad(8)
        return bytes(header.data + body.data), body.fds

    @classmethod
    def unpack(cls, data, fds):
        """The first message of data and its length; None when it is not whole."""
        if len(data) < 16:
            return None
        order = "<" if data[:1] == b"l" else ">"
        n_body, _, n_fields = struct.unpack_from(order + "III", data, 4)
        begin = 16 + n_fields + -n_fields % 8
        if len(data) < begin + n_body:
            return None
        r = Reader(data[:begin], [], order)
        _, kind, flags, _, _, serial, fields = r.get("(yyyyuua(yv))")
        fields = dict(fields)
        m = cls(kind, serial, flags, **{name: fields.get(n) for n, name in cls.NAMES.items()})
        own, fds[:fields.get(9, 0)] = fds[:fields.get(9, 0)], []
        r = Reader(data[begin:begin + n_body], own, order)
        m.body = tuple(r.get(k) for k in split(m.signature or ""))
        return m, begin + n_body


class Bus:
    """A connection, with the identity of uid and groups (only root can choose)."""

    def __init__(self, path, uid=None, groups=(), timeout=30):
        self.timeout = timeout
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(timeout)
        self.data, self.fds, self.inbox, self.serial = b"", [], [], 0
        self.lock = threading.Lock()
        own, own_groups = os.geteuid(), os.getgroups()
        uid = own if uid is None else uid
        if uid != own:
            os.setgroups(groups)
            os.seteuid(uid)
        try:
            self.sock.connect(path)  # the kernel notes who we are now
        finally:
            if uid != own:
                os.seteuid(own)
                os.setgroups(own_groups)
        self.sock.sendall(b"\0AUTH EXTERNAL " + str(uid).encode().hex().encode() + b"\r\n")
        self.expect(b"OK ")
        self.sock.sendall(b"NEGOTIATE_UNIX_FD\r\n")
        self.expect(b"AGREE_UNIX_FD")
        self.sock.sendall(b"BEGIN\r\n")
        self.name = self.driver("Hello")

    def expect(self, what):
        line = b""
        while not line.endswith(b"\r\n"):
            got = self.sock.recv(1)
            if not got:
                raise Left
            line += got
        assert line.startswith(what), line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.sock.close()

    def send(self, kind, flags=0, body=(), **fields):
        with self.lock:
            self.serial += 1
            data, fds = Message(kind, self.serial, flags, body, **fields).pack()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            sent = self.sock.sendmsg([data], rights)
            self.sock.sendall(data[sent:])
            return self.serial

    def receive(self, timeout):
        """One more message from the socket; None when none came in time."""
        end = time.monotonic() + timeout
        while not (got := Message.unpack(self.data, self.fds)):
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.sock], [], [], left)[0]:
                return None
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 64)
            except ConnectionError as e:
                raise Left from e
            if not data:
                raise Left
            self.data += data
            self.fds += fds
        self.data = self.data[got[1]:]
        return got[0]

    def start(self, destination, path, interface, member, signature="", *body, flags=0):
        """Sends a call and returns what finish() takes."""
        return self.send(CALL, flags, body, path=path, interface=interface, member=member, destination=destination,
                         signature=signature)

    def finish(self, serial, timeout=None):
        end = time.monotonic() + (self.timeout if timeout is None else timeout)
        while True:
            for m in self.inbox:
                if m.kind in (RETURN, ERROR) and m.reply_serial == serial:
                    self.inbox.remove(m)
                    if m.kind == ERROR:
                        raise BusError(m.error, m.body[0] if m.body else "")
                    return m.body[0] if len(m.body) == 1 else m.body or None
            left = end - time.monotonic()
            m = self.receive(left) if left > 0 else None
            if not m:
                raise TimeoutError
            self.inbox.append(m)

    def call(self, *args, timeout=None, **kw):
        return self.finish(self.start(*args, **kw), timeout)

    def driver(self, member, signature="", *body):
        return self.call("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", member, signature, *body)

    def add_match(self, rule):
        self.driver("AddMatch", "s", rule)

    def signals(self, member, seconds=0.0):
        """Takes the signals of this name that came, and come within the time."""
        end = time.monotonic() + seconds
        while m := self.receive(max(end - time.monotonic(), 0)):
            self.inbox.append(m)
        found = [m for m in self.inbox if m.kind == SIGNAL and m.member == member]
        self.inbox = [m for m in self.inbox if m not in found]
        return found

    def signal(self, member, seconds=30.0):
        """The next signal of this name."""
        end = time.monotonic() + seconds
        while not (found := [m for m in self.inbox if m.kind == SIGNAL and m.member == member]):
            m = self.receive(max(end - time.monotonic(), 0))
            if not m:
                raise AssertionError(f"no signal {member} within {seconds} s")
            self.inbox.append(m)
        self.inbox.remove(found[0])
        return found[0]


class Polkit(threading.Thread):
    """Stands in for polkitd. answers: action -> True, False, "never", "error" or seconds to wait before True."""

    NAME = "org.freedesktop.PolicyKit1"

    def __init__(self, path):
        super().__init__(daemon=True)
        self.bus = Bus(path)
        assert self.bus.driver("RequestName", "su", self.NAME, 4) == 1
        self.answers, self.asked, self.cancelled = {}, [], []
        self.start()

    def run(self):
        with contextlib.suppress(Left, OSError, ValueError):
            while True:
                m = self.bus.receive(3600)
                if m and m.kind == CALL and m.member == "CheckAuthorization":
                    self.check(m)
                elif m and m.kind == CALL:
                    self.cancelled.append(m.body[0])
                    self.bus.send(RETURN, reply_serial=m.serial, destination=m.sender)

    def check(self, m):
        (kind, subject), action, _, flags, cancellation = m.body
        assert kind == "system-bus-name", kind
        self.asked.append((subject["name"], action, flags, cancellation))
        answer = self.answers.get(action, False)
        if answer == "never":
            return
        if answer == "error":
            self.bus.send(ERROR, body=("no idea",), signature="s", reply_serial=m.serial, destination=m.sender,
                          error="org.freedesktop.PolicyKit1.Error.Failed")
            return
        if isinstance(answer, float):
            timer = threading.Timer(answer, self.answer, (m, True))
            timer.daemon = True
            timer.start()
            return
        self.answer(m, answer)

    def answer(self, m, allowed):
        with contextlib.suppress(OSError):
            self.bus.send(RETURN, body=((allowed, False, {}),), signature="(bba{ss})", reply_serial=m.serial,
                          destination=m.sender)

    def stop(self):
        with contextlib.suppress(OSError):
            self.bus.sock.shutdown(socket.SHUT_RDWR)
        self.join()
        self.bus.close()


class Logind(threading.Thread):
    """Stands in for systemd-logind. asked: the arguments of Inhibit; locks: our ends of what was given out."""

    NAME, PATH, MANAGER = "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager"

    def __init__(self, path, refuses=False):
        super().__init__(daemon=True)
        self.bus = Bus(path)
        self.refuses, self.asked, self.locks = refuses, [], []
        assert self.bus.driver("RequestName", "su", self.NAME, 4) == 1
        self.start()

    def run(self):
        with contextlib.suppress(Left, OSError, ValueError):
            while True:
                m = self.bus.receive(3600)
                if m and m.kind == CALL and m.member == "Inhibit":
                    self.inhibit(m)

    def inhibit(self, m):
        self.asked.append(m.body)
        if self.refuses:
            self.bus.send(ERROR, body=("not for you",), signature="s", reply_serial=m.serial, destination=m.sender,
                          error="org.freedesktop.DBus.Error.AccessDenied")
        else:
            ours, theirs = os.pipe()
            self.locks.append(ours)
            self.bus.send(RETURN, body=(theirs,), signature="h", reply_serial=m.serial, destination=m.sender)
            os.close(theirs)

    def n_held(self):
        """How many locks are not closed."""
        return len(self.locks) - len(select.select(self.locks, [], [], 0)[0])

    def prepare_for_sleep(self, begins):
        self.bus.send(SIGNAL, body=(begins,), path=self.PATH, interface=self.MANAGER, member="PrepareForSleep", signature="b")

    def stop(self):
        with contextlib.suppress(OSError):
            self.bus.sock.shutdown(socket.SHUT_RDWR)
        self.join()
        self.bus.close()
        for fd in self.locks:
            os.close(fd)


class PowerProfiles(threading.Thread):
    """Stands in for power-profiles-daemon, under the name and path that it is told."""

    def __init__(self, path, name):
        super().__init__(daemon=True)
        self.bus = Bus(path)
        self.name, self.profile = name, "balanced"
        assert self.bus.driver("RequestName", "su", name, 4) == 1
        self.start()

    def run(self):
        with contextlib.suppress(Left, OSError, ValueError):
            while True:
                m = self.bus.receive(3600)
                if not m or m.kind != CALL:
                    continue
                reply = {"reply_serial": m.serial, "destination": m.sender}
                if m.member == "Get" and m.body == (self.name, "ActiveProfile"):
                    self.bus.send(RETURN, body=(("s", self.profile),), signature="v", **reply)
                else:  # gdbus asks for introspection first
                    self.bus.send(ERROR, error="org.freedesktop.DBus.Error.UnknownMethod", **reply)

    def set(self, profile):
        self.profile = profile
        self.bus.send(SIGNAL, body=(self.name, {"ActiveProfile": ("s", profile)}, []), signature="sa{sv}as",
                      path="/" + self.name.replace(".", "/"), interface="org.freedesktop.DBus.Properties",
                      member="PropertiesChanged")

    def stop(self):
        with contextlib.suppress(OSError):
            self.bus.sock.shutdown(socket.SHUT_RDWR)
        self.join()
        self.bus.close()
