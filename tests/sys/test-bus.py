#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Control over D-Bus: a private bus with the rules of a system bus and policy/org.residentd1.conf, stand-ins for polkit and others.

What of other users is shown, and what is denied to them, needs root here: only root can be several users.
"""
import contextlib
import grp
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET

import rd
from dbuswire import INTERACTIVE, SIGNAL, Bus, BusError, Logind, Polkit, PowerProfiles
from rd import BUILD, MODEL, OURS, ROOT, Client, Daemon, Skip, case, eventually, user

NAME = "org.residentd1"
PATH = "/org/residentd1"
MANAGER = NAME + ".Manager"
FAILED = NAME + ".Error."
INVALID = "org.freedesktop.DBus.Error.InvalidArgs"
DENIED = "org.freedesktop.DBus.Error.AccessDenied"
PROPERTIES = "org.freedesktop.DBus.Properties"
OBJECTS = "org.freedesktop.DBus.ObjectManager"
ACTIONS = [NAME + "." + a for a in ("use", "hold", "yield-gpu", "load-model", "set-policy", "inspect-users")]
EMULATOR = os.path.join(BUILD, "tests/libcuda-emu.so")
# Users that every system has: dbus-daemon lets in nobody without a name.
ALICE, BOB = (pwd.getpwnam(name).pw_uid for name in ("daemon", "bin"))

# The rules that /usr/share/dbus-1/system.conf has: nothing is owned or called that is not allowed.
CONF = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/><deny own="*"/><deny send_type="method_call"/><allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/><allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/><allow receive_type="method_return"/><allow receive_type="error"/>
    <allow receive_type="signal"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus"/>
  </policy>
  <policy user="{uid}">
    <allow own="org.freedesktop.PolicyKit1"/><allow send_destination="org.freedesktop.PolicyKit1"/>
    <allow own="org.freedesktop.login1"/><allow send_destination="org.freedesktop.login1"/>
    <allow own="net.hadess.PowerProfiles"/><allow send_destination="net.hadess.PowerProfiles"/>
    <allow own="org.freedesktop.UPower.PowerProfiles"/><allow send_destination="org.freedesktop.UPower.PowerProfiles"/>
  </policy>
  <include>{root}/policy/org.residentd1.conf</include>
  <policy user="{uid}"><allow own="org.residentd1"/><allow send_destination="org.residentd1"/></policy>
</busconfig>
"""


class Machine:
    """A bus, a polkit, a residentd."""

    def __init__(self, polkit=True, model=MODEL, bus=True, conf=None, env=None):
        self.dir = tempfile.mkdtemp(prefix="rdbus-", dir="/tmp")
        os.chmod(self.dir, 0o755)
        self.path = os.path.join(self.dir, "bus")
        self.state = os.path.join(self.dir, "state")
        self.runtime = os.path.join(self.dir, "root/run/residentd")
        self.models = os.path.join(self.dir, "models")
        for d in (self.state, self.runtime, self.models):
            os.makedirs(d)
        self.bus_process = self.polkit = None
        if bus:
            self.start_bus(polkit)
        self.daemon = Daemon(model=model, conf=conf, env={
            "DBUS_SYSTEM_BUS_ADDRESS": "unix:path=" + self.path, "STATE_DIRECTORY": self.state,
            "RUNTIME_DIRECTORY": self.runtime, "RESIDENTD_ROOT": os.path.join(self.dir, "root"),
            "RESIDENTD_MODELS": self.models, **(env or {})})
        if bus:
            self.wait_for_name()

    def start_bus(self, polkit):
        conf = os.path.join(self.dir, "bus.conf")
        with open(conf, "w", encoding="utf-8") as f:
            f.write(CONF.format(path=self.path, root=ROOT, uid=os.geteuid()))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        with open(os.path.join(self.dir, "bus.log"), "ab") as log:
            self.bus_process = subprocess.Popen(["dbus-daemon", "--config-file=" + conf, "--nofork", "--nopidfile"],
                                                stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def up():
            assert self.bus_process.poll() is None, "dbus-daemon ended at its start"
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as s:
                s.connect(self.path)
                return True
            return False
        eventually("dbus-daemon listens", up)
        if polkit:
            self.polkit = Polkit(self.path)
            self.polkit.answers = {a: True for a in ACTIONS}

    def stop_bus(self):
        if self.polkit:
            self.polkit.stop()
            self.polkit = None
        if self.bus_process:
            self.bus_process.kill()
            self.bus_process.wait()
            self.bus_process = None

    def wait_for_name(self):
        with self.client() as b:
            eventually("the name is owned", lambda: b.driver("NameHasOwner", "s", NAME))

    def client(self, uid=None, groups=()):
        return Peer(self.path, uid, groups)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        try:
            self.daemon.__exit__(*args)
        finally:
            self.stop_bus()
            shutil.rmtree(self.dir, ignore_errors=True)

    # What rd.main() asks of a shared daemon.
    def check_alive(self):
        self.daemon.check_alive()
        self.polkit.answers = {a: True for a in ACTIONS}
        with self.client() as b:
            assert b.manager("GetAvailability")["state"] == "available"
            eventually("nothing is held any more", lambda: b.get("Holds") == 0)

    def log(self):
        return self.daemon.log()


class Peer(Bus):
    def manager(self, member, signature="", *body, **kw):
        return self.call(NAME, PATH, MANAGER, member, signature, *body, **kw)

    def get(self, name, path=PATH, interface=MANAGER):
        return self.call(NAME, path, PROPERTIES, "Get", "ss", interface, name)

    def introspect(self, path=PATH):
        return ET.fromstring(self.call(NAME, path, "org.freedesktop.DBus.Introspectable", "Introspect"))

    def objects(self):
        return self.call(NAME, PATH, OBJECTS, "GetManagedObjects")

    def refuse(self, error, *args, **kw):
        """The call of the manager fails with this error; returns its message."""
        try:
            got = self.manager(*args, **kw)
        except BusError as e:
            assert e.name == error, f"{args[:1]}: {e}, expected {error}"
            if error.startswith(FAILED):
                assert re.search(r"\(error \d+(, retry after \d+ ms)?\)$", e.message), e.message
            return e.message
        raise AssertionError(f"{args[:1]}: answered {str(got)[:200]}, expected {error}")


class Line(Client):
    """The protocol of the socket over a descriptor from OpenSession."""

    def __init__(self, fd):  # pylint: disable=super-init-not-called
        self.sock = socket.socket(fileno=fd)
        self.sock.settimeout(rd.WAIT)
        self.pending = b""


def need_root():
    if os.geteuid() != 0:
        raise Skip("only root can be several users")


def members(interface):
    """What an interface's XML says, as a set."""
    found = set()
    for m in interface:
        if m.tag == "property":
            emits = [a.get("value") for a in m.findall("annotation")
                     if a.get("name") == "org.freedesktop.DBus.Property.EmitsChangedSignal"]
            found.add(("property", m.get("name"), m.get("type"), m.get("access"), (emits or ["true"])[0]))
        elif m.tag in ("method", "signal"):
            args = tuple((a.get("name"), a.get("type"), a.get("direction", "out" if m.tag == "signal" else "in"))
                         for a in m.findall("arg"))
            found.add((m.tag, m.get("name"), args))
    return found


def spec():
    with open(os.path.join(ROOT, "policy/org.residentd1.xml"), encoding="utf-8") as f:
        text = f.read()
    # Several documents' roots in one file, as the specification is read from top to bottom.
    text = re.sub(r"<!DOCTYPE.*?>", "", text, count=1, flags=re.S)
    return {i.get("name"): members(i) for i in ET.fromstring(f"<all>{text}</all>").iter("interface")}


def ask(line, session):
    return line.call("Send", {"session": session, "messages": user("What is 17 x 23?"),
                              "options": {"temperature": 0, "max_thinking_tokens": 0}})["text"]


@case
def introspection_is_the_specification(m):
    want = spec()
    assert set(want) == {NAME + "." + i for i in ("Manager", "Model", "Session", "User")}, want.keys()
    with m.client() as b:
        path, fd = b.manager("OpenSession", "a{sv}", {})
        with Line(fd) as line:
            ask(line, path.rpartition("/")[2])
            objects = {i: p for p, interfaces in b.objects().items() for i in interfaces}
            objects[MANAGER] = PATH
            for interface, spelled in want.items():
                found = [i for i in b.introspect(objects[interface]).findall("interface") if i.get("name") == interface]
                assert len(found) == 1, f"{objects[interface]} has no {interface}"
                assert members(found[0]) == spelled, members(found[0]) ^ spelled


@case
def availability_is_that_of_the_socket(m):
    with m.client() as b:
        got, want = b.manager("GetAvailability"), m.daemon.call("GetAvailability")
        assert got["state"] == want["state"] == b.get("State") == "available"
        assert got["model"] == want["model"]["name"] and "reason" not in got and b.get("Reason") == ""
        assert (got["queued"], got["sessions"]) == (want["queued"], want["sessions"])
        assert b.get("Version") == m.daemon.status()["version"]
        model = b.call(NAME, b.get("Model"), PROPERTIES, "GetAll", "s", NAME + ".Model")
        wire = want["model"]
        assert model == {"Name": wire["name"], "Architecture": wire["architecture"], "Parameters": wire["parameters"],
                         "WeightBytes": wire["weight_bytes"], "ContextMax": wire["context_max"]}, model


@case
def other_programs_of_the_bus_agree(m):
    address = "unix:path=" + m.path
    commands = {
        "busctl": ["--address=" + address, "call", NAME, PATH, MANAGER, "GetAvailability"],
        "gdbus": ["call", "--address", address, "--dest", NAME, "--object-path", PATH, "--method",
                  MANAGER + ".GetAvailability"],
        "dbus-send": ["--bus=" + address, "--print-reply", "--dest=" + NAME, PATH, MANAGER + ".GetAvailability"],
    }
    ran = 0
    for program, arguments in commands.items():
        if shutil.which(program):
            ran += 1
            out = subprocess.run([program] + arguments, capture_output=True, text=True, timeout=60, check=False)
            # gdbus does not say Hello on an address of its own, and a bus wants that.
            if program == "gdbus" and "Hello" in out.stderr + out.stdout:
                continue
            assert out.returncode == 0 and "available" in out.stdout, f"{program}: {out.stdout} {out.stderr}"
    if not ran:
        raise Skip("none of busctl, gdbus, dbus-send is installed")


@case
def bus_policy_lets_through_what_is_named(m):
    need_root()
    with m.client(ALICE) as b:
        assert b.manager("GetAvailability")["state"] == "available"
        b.introspect()
        b.refuse(DENIED, "SomethingNew")
        for interface, member in ((PROPERTIES, "Set"), ("org.freedesktop.LogControl1", "Set"), (MANAGER, "Get")):
            try:
                b.call(NAME, PATH, interface, member)
            except BusError as e:
                assert e.name == DENIED, e
            else:
                raise AssertionError(f"{interface}.{member} came through")
        try:
            b.driver("RequestName", "su", NAME, 0)
        except BusError as e:
            assert e.name == DENIED, e
        else:
            raise AssertionError("a user may own the service's name")


@case
def log_level_is_set_by_root(m):
    log = "/org/freedesktop/LogControl1"
    with m.client() as b:
        assert b.get("SyslogIdentifier", log, "org.freedesktop.LogControl1") == "residentd"
        assert b.get("LogTarget", log, "org.freedesktop.LogControl1") == "console"
        if os.geteuid() != 0:
            raise Skip("only root may set it")
        for level in ("debug", "info"):
            b.call(NAME, log, PROPERTIES, "Set", "ssv", "org.freedesktop.LogControl1", "LogLevel", ("s", level))
            assert b.get("LogLevel", log, "org.freedesktop.LogControl1") == level
        try:
            b.call(NAME, log, PROPERTIES, "Set", "ssv", "org.freedesktop.LogControl1", "LogLevel", ("s", "loud"))
        except BusError as e:
            assert e.name == INVALID, e
        else:
            raise AssertionError("a log level that does not exist was taken")


@case
def hold_lasts_as_long_as_its_descriptor(m):
    with m.client() as b:
        b.add_match(f"type='signal',path='{PATH}',interface='{PROPERTIES}'")
        fd = b.manager("Hold", "ss", "test", "why not: ünïcode")
        assert b.signal("PropertiesChanged").body == (MANAGER, {"Holds": 1}, [])
        (kind, uid, who, why, pid, since), = b.manager("ListHolds")
        assert (kind, uid, who, why, pid) == ("hold", os.geteuid(), "test", "why not: ünïcode", os.getpid())
        assert abs(since / 1e6 - time.time()) < 60
        copy = os.dup(fd)
        os.close(fd)
        time.sleep(0.2)
        assert b.get("Holds") == 1, "a copy of the descriptor is still open"
        # Nothing is read from a lease, so nothing can be put into it.
        with contextlib.suppress(BrokenPipeError):
            os.write(copy, b"x")
            raise AssertionError("a lease takes bytes")
        os.close(copy)
        assert b.signal("PropertiesChanged").body == (MANAGER, {"Holds": 0}, [])
        assert b.manager("ListHolds") == []
        fd = b.manager("YieldGpu", "ssa{sv}", "game", "playing", {"bytes": ("t", 1 << 30)})
        assert [h[0] for h in b.manager("ListHolds")] == ["yield-gpu"]
        os.close(fd)


@case
def a_hold_is_not_tied_to_the_bus(m):
    with m.client() as b:
        fd = b.manager("Hold", "ss", "test", "")
    with m.client() as b:
        assert b.get("Holds") == 1
        os.close(fd)
        eventually("the lease ends", lambda: b.get("Holds") == 0)


@case
def holds_are_bounded(m):
    fds = []
    with m.client() as b:
        for _ in range(64):
            fds.append(b.manager("Hold", "ss", "test", ""))
        b.refuse(FAILED + "TooManySessions", "Hold", "ss", "test", "")
        for fd in fds:
            os.close(fd)
        eventually("they end", lambda: b.get("Holds") == 0)
        os.close(b.manager("Hold", "ss", "test", ""))


@case
def bad_arguments_are_refused_before_anybody_is_asked(m):
    many = "Sessions=1"
    with m.client() as b:
        m.polkit.asked.clear()
        for args in (
                ("Hold", "ss", "", "why"), ("Hold", "ss", "x" * 257, ""), ("Hold", "ss", "x", "y" * 257),
                ("Hold", "ss", "a\nb", ""), ("Hold", "ss", "x", "\x1b[2J"), ("Hold", "ss", "x", "\x7f"),
                ("Hold", "ss", "x", "\u009b2J"), ("Hold", "ss", "z" * (1 << 20), ""),
                ("Hold", "s", "x"), ("Hold", "sss", "x", "y", "z"), ("Hold", "uu", 1, 2),
                ("YieldGpu", "ssa{sv}", "x", "", {"bytes": ("u", 1)}), ("YieldGpu", "ssa{sv}", "x", "", {"more": ("t", 1)}),
                ("OpenSession", "a{sv}", {"keep": ("s", "yes")}), ("OpenSession", "a{sv}", {"kept": ("b", True)}),
                ("OpenSession", "a{sv}", {"a" * 5000: ("b", True)}),
                ("LoadModel", "sa{sv}", "../x", {}), ("LoadModel", "sa{sv}", "/etc/passwd", {}), ("LoadModel", "sa{sv}", "", {}),
                ("LoadModel", "sa{sv}", "." , {}), ("LoadModel", "sa{sv}", "x\n", {}), ("LoadModel", "sa{sv}", "x" * 300, {}),
                ("SetUserLimits", "sa{ss}a{sv}", "root", {}, {}), ("SetUserLimits", "sa{ss}a{sv}", "root", {"Wait": "1"}, {}),
                ("SetUserLimits", "sa{ss}a{sv}", "root", {"Weight": "many"}, {}),
                ("SetUserLimits", "sa{ss}a{sv}", "root", {"Weight": "100\n[User x]"}, {}),
                ("SetUserLimits", "sa{ss}a{sv}", "root", [("Weight", "1"), ("Weight", "2")], {}),
                ("SetUserLimits", "sa{ss}a{sv}", "root", {many: "1"}, {}),
                ("SetUserLimits", "sa{ss}a{sv}", "ro\not", {"Weight": "1"}, {}),
                ("SetUserLimits", "sa{ss}a{sv}", "root", {"Weight": "1"}, {"runtime": ("s", "")}),
                ("GetUserLimits", "s", ""), ("GetUserLimits", "s", "x" * 300)):
            message = b.refuse(INVALID, *args)
            assert message and "\n" not in message and len(message) < 400, message
        assert not m.polkit.asked, m.polkit.asked
        b.refuse("org.freedesktop.DBus.Error.UnknownMethod", "NoSuchThing")


@case
def polkit_says_no(m):
    need_root()
    m.polkit.answers = {}
    with m.client(ALICE) as b:
        m.polkit.asked.clear()
        for action, args in (("use", ("OpenSession", "a{sv}", {})), ("hold", ("Hold", "ss", "x", "")),
                             ("yield-gpu", ("YieldGpu", "ssa{sv}", "x", "", {})), ("load-model", ("UnloadModel",)),
                             ("load-model", ("LoadModel", "sa{sv}", "x", {})), ("set-policy", ("Reload",)),
                             ("set-policy", ("SetUserLimits", "sa{ss}a{sv}", "root", {"Weight": "1"}, {})),
                             ("inspect-users", ("DumpByFileDescriptor",)), ("inspect-users", ("GetUserLimits", "s", "root"))):
            message = b.refuse(FAILED + "NotAuthorized", *args, flags=INTERACTIVE)
            assert "(error 13" in message and NAME + "." + action in message, message
            name, asked, flags, _ = m.polkit.asked.pop()
            assert (name, asked, flags) == (b.name, NAME + "." + action, 1), args
        # A dialog is only for a caller that said so, and never for a list of sessions.
        b.refuse(FAILED + "NotAuthorized", "Hold", "ss", "x", "")
        assert m.polkit.asked.pop()[2] == 0
        assert b.manager("ListSessions", flags=INTERACTIVE) == []
        assert m.polkit.asked.pop()[1:3] == (NAME + ".inspect-users", 0)
        assert b.manager("GetUserLimits", "s", pwd.getpwuid(ALICE).pw_name)["Allow"] == ("yes", "default")
        assert not m.polkit.asked, "what applies to himself everybody may know"
        assert b.get("State") == "available" and b.get("Holds") == 0


@case
def slow_polkit_holds_nobody_up(m):
    m.polkit.answers[NAME + ".hold"] = 1.0
    with m.client() as slow, m.client() as other:
        serial = slow.start(NAME, PATH, MANAGER, "Hold", "ss", "slow", "")
        begin = time.monotonic()
        assert other.manager("GetAvailability")["state"] == "available"
        m.daemon.check_alive()
        os.close(other.manager("YieldGpu", "ssa{sv}", "x", "", {}))
        assert slow.get("Holds") == 0 or time.monotonic() - begin > 0.9
        os.close(slow.finish(serial))


@case
def polkit_that_never_answers_holds_nobody_up(m):
    m.polkit.answers[NAME + ".hold"] = "never"
    with m.client() as b, m.client() as other:
        first = [b.start(NAME, PATH, MANAGER, "Hold", "ss", str(i), "") for i in range(16)]
        message = b.refuse(FAILED + "QueueFull", "Hold", "ss", "one more", "")
        assert "retry after" in message, message
        begin = time.monotonic()
        assert other.manager("GetAvailability")["state"] == "available"
        assert time.monotonic() - begin < 5
        assert len(first) == 16
    # Who left is forgotten: there is room again, and no answer.
    m.polkit.answers[NAME + ".hold"] = True
    with m.client() as b:
        eventually("the questions of who left are dropped", lambda: try_hold(b))


def try_hold(b):
    with contextlib.suppress(BusError):
        os.close(b.manager("Hold", "ss", "x", ""))
        return True
    return False


@case
def a_dialog_ends_with_who_caused_it(m):
    m.polkit.answers[NAME + ".hold"] = "never"
    m.polkit.asked.clear()
    m.polkit.cancelled.clear()
    with m.client() as b:
        b.start(NAME, PATH, MANAGER, "Hold", "ss", "x", "", flags=INTERACTIVE)
        eventually("polkit is asked", lambda: m.polkit.asked)
    eventually("the dialog is cancelled", lambda: m.polkit.cancelled == [m.polkit.asked[-1][3]])


@case
def who_left_meanwhile_holds_nothing(m):
    m.polkit.answers[NAME + ".hold"] = 0.3
    with m.client() as b:
        b.start(NAME, PATH, MANAGER, "Hold", "ss", "x", "")
        eventually("polkit is asked", lambda: m.polkit.asked)
    with m.client() as b:
        time.sleep(0.6)
        assert b.get("Holds") == 0 and b.manager("ListHolds") == []


@case
def polkit_that_fails_is_a_no(m):
    m.polkit.answers[NAME + ".hold"] = m.polkit.answers[NAME + ".inspect-users"] = "error"
    with m.client() as b:
        assert "cannot ask polkit" in b.refuse(FAILED + "NotAuthorized", "Hold", "ss", "x", "")
        path, fd = b.manager("OpenSession", "a{sv}", {})
        assert [s[0] for s in b.manager("ListSessions")] == [path]
        os.close(fd)


@case
def without_polkit_root_and_the_group_decide():
    need_root()
    with Machine(polkit=False) as m:
        with m.client() as root, m.client(ALICE) as alice:
            os.close(root.manager("Hold", "ss", "x", ""))
            assert "org.residentd1.hold" in alice.refuse(FAILED + "NotAuthorized", "Hold", "ss", "x", "")
            alice.refuse(FAILED + "NotAuthorized", "Reload")
            path, fd = alice.manager("OpenSession", "a{sv}", {})
            with Line(fd) as line:
                assert ask(line, path.rpartition("/")[2]) == "17 x 23 = 391."
            eventually("the session ends", lambda: alice.manager("ListSessions") == [])
            try:
                group = grp.getgrnam("residentd").gr_gid
            except KeyError:
                raise Skip("members of group residentd: there is no such group here; root and others were tried") from None
            with m.client(ALICE, [group]) as member:
                os.close(member.manager("Hold", "ss", "x", ""))
                member.manager("Reload")


@case
def the_descriptor_of_a_session_speaks_the_socket(m):
    with m.client() as b:
        path, fd = b.manager("OpenSession", "a{sv}", {})
        name = path.rpartition("/")[2]
        with Line(fd) as line:
            assert ask(line, name) == "17 x 23 = 391."
            (listed, uid, used, busy), = b.manager("ListSessions")
            assert (listed, uid, busy) == (path, os.geteuid(), False) and used > 0
            values = b.call(NAME, path, PROPERTIES, "GetAll", "s", NAME + ".Session")
            assert values == {"User": os.geteuid(), "Keep": False, "Busy": False, "ContextUsed": used}, values
        eventually("it ends with its descriptor", lambda: b.manager("ListSessions") == [])
        try:
            b.get("User", path, NAME + ".Session")
        except BusError as e:
            assert e.name in ("org.freedesktop.DBus.Error.UnknownObject", "org.freedesktop.DBus.Error.UnknownInterface",
                              "org.freedesktop.DBus.Error.UnknownMethod"), e
        else:
            raise AssertionError("a session that ended is still there")


@case
def a_kept_session_ends_with_the_name_on_the_bus(m):
    with m.client() as watcher:
        watcher.manager("ListSessions")
        with m.client() as b:
            path, fd = b.manager("OpenSession", "a{sv}", {"keep": ("b", True)})
            os.close(fd)
            time.sleep(0.2)
            assert [s[0] for s in b.manager("ListSessions")] == [path]
            assert b.get("Keep", path, NAME + ".Session") is True
        eventually("it ends when its owner leaves", lambda: watcher.manager("ListSessions") == [])
        with m.client() as b:
            _, fd = b.manager("OpenSession", "a{sv}", {})
        eventually("also while the descriptor is open", lambda: watcher.manager("ListSessions") == [])
        os.close(fd)


@case
def a_session_is_closed_over_the_bus(m):
    with m.client() as b:
        path, fd = b.manager("OpenSession", "a{sv}", {})
        assert b.signal("SessionNew").body == (path, os.geteuid())
        added, = [s.body for s in b.signals("InterfacesAdded", 0.2) if s.body[0] == path]
        assert added[1][NAME + ".Session"]["User"] == os.geteuid()
        b.call(NAME, path, NAME + ".Session", "Close")
        assert b.signal("SessionRemoved").body == (path, os.geteuid())
        assert path in [s.body[0] for s in b.signals("InterfacesRemoved", 0.2)]
        with Line(fd) as line:
            line.expect(OURS + "NoSuchSession", "Send", {"session": path.rpartition("/")[2], "messages": user("x")})


def sees(b, path):
    """How often this caller finds the object."""
    found = int(path in b.objects())
    found += path.rpartition("/")[2] in [n.get("name") for n in b.introspect(path.rpartition("/")[0]).findall("node")]
    for interface in (NAME + ".Session", NAME + ".User"):
        with contextlib.suppress(BusError):
            found += bool(b.call(NAME, path, PROPERTIES, "GetAll", "s", interface))
    return found + (path in [s[0] for s in b.manager("ListSessions")])


@case
def users_do_not_see_each_other(m):
    need_root()
    m.polkit.answers[NAME + ".inspect-users"] = False
    with m.client(ALICE) as alice, m.client(BOB) as bob, m.client() as root:
        bob.add_match(f"type='signal',sender='{NAME}'")
        bob.manager("ListSessions")
        bob.objects()
        path, fd = alice.manager("OpenSession", "a{sv}", {})
        with Line(fd) as line:
            ask(line, path.rpartition("/")[2])
            assert alice.get("User", path, NAME + ".Session") == ALICE
            person = f"{PATH}/user/{ALICE}"
            assert sees(alice, path) == 4 and sees(alice, person) == 3
            assert sees(bob, path) == 0 and sees(bob, person) == 0
            assert sees(root, path) >= 3 and sees(root, person) == 3
            try:
                bob.call(NAME, path, NAME + ".Session", "Close")
            except BusError as e:
                assert e.name.startswith("org.freedesktop.DBus.Error.Unknown"), e
            else:
                raise AssertionError("another user's session was closed")
            # Who may look does, from then on; but not touch.
            m.polkit.answers[NAME + ".inspect-users"] = True
            assert [s[:2] for s in bob.manager("ListSessions")] == [(path, ALICE)]
            assert sees(bob, path) == 4
            try:
                bob.call(NAME, path, NAME + ".Session", "Close")
            except BusError as e:
                assert e.name == FAILED + "NotAuthorized", e
            else:
                raise AssertionError("another user's session was closed")
            m.polkit.answers[NAME + ".inspect-users"] = False
            assert bob.manager("ListSessions") == [] and sees(bob, path) == 0
        eventually("it ends", lambda: alice.manager("ListSessions") == [])
        got = [s.member for s in bob.signals("SessionNew", 0.3) + bob.signals("SessionRemoved") +
               bob.signals("InterfacesAdded") + bob.signals("InterfacesRemoved")]
        assert not got, f"another user's session was announced: {got}"


@case
def sessions_belong_to_the_caller(m):
    need_root()
    with m.client(ALICE) as alice, m.client(BOB) as bob:
        path, fd = alice.manager("OpenSession", "a{sv}", {})
        _, other = bob.manager("OpenSession", "a{sv}", {})
        with Line(fd) as line, Line(other) as stranger:
            stranger.expect(OURS + "NoSuchSession", "Send", {"session": path.rpartition("/")[2], "messages": user("x")})
            assert ask(line, path.rpartition("/")[2]) == "17 x 23 = 391."


@case
def limits_of_a_user_are_set_and_shown(m):
    with m.client() as b:
        value, source = b.manager("GetUserLimits", "s", "daemon")["Weight"]
        assert (value, source) == ("100", "default")
        b.manager("SetUserLimits", "sa{ss}a{sv}", "daemon", {"Weight": "300", "Sessions": "2"}, {})
        value, source = b.manager("GetUserLimits", "s", "daemon")["Weight"]
        assert value == "300" and source.startswith(m.state), (value, source)
        assert b.manager("GetUserLimits", "s", "1") == b.manager("GetUserLimits", "s", "daemon"), "uid 1 is daemon"
        b.manager("SetUserLimits", "sa{ss}a{sv}", "daemon", {"Weight": ""}, {})
        limits = b.manager("GetUserLimits", "s", "daemon")
        assert limits["Weight"] == ("100", "default") and limits["Sessions"][0] == "2", limits
        b.manager("SetUserLimits", "sa{ss}a{sv}", "daemon", {"Weight": "7"}, {"runtime": ("b", True)})
        value, source = b.manager("GetUserLimits", "s", "daemon")["Weight"]
        assert value == "7" and source.startswith(m.runtime), (value, source)
        b.refuse(INVALID, "SetUserLimits", "sa{ss}a{sv}", "no-such-user-here", {"Weight": "1"}, {})
        b.refuse(INVALID, "GetUserLimits", "s", "no-such-user-here")


@case
def a_denied_user_gets_no_session(m):
    need_root()
    with m.client(BOB) as b:
        m.client().manager("SetUserLimits", "sa{ss}a{sv}", "bin", {"Allow": "no"}, {})
        assert "policy" in b.refuse(FAILED + "NotAuthorized", "OpenSession", "a{sv}", {})
        assert b.manager("GetUserLimits", "s", "bin")["Allow"][0] == "no"
        b.manager("ListSessions")
        m.client().manager("SetUserLimits", "sa{ss}a{sv}", "bin", {"Allow": ""}, {})
        os.close(b.manager("OpenSession", "a{sv}", {})[1])


@case
def models_are_loaded_and_unloaded():
    with Machine(model=None) as m, m.client() as b:
        os.symlink(MODEL, os.path.join(m.models, "tiny.gguf"))
        b.add_match(f"type='signal',sender='{NAME}'")
        assert b.get("State") == "unavailable" and b.get("Reason") and b.get("Model") == "/"
        b.refuse(FAILED + "NoModel", "OpenSession", "a{sv}", {})
        b.refuse(FAILED + "NoSuchModel", "LoadModel", "sa{sv}", "nothing", {})
        b.manager("LoadModel", "sa{sv}", "tiny", {})
        eventually("it is loaded", lambda: b.get("State") == "available")
        path = b.get("Model")
        assert path != "/" and path in b.objects()
        states = [s.body[0] for s in b.signals("StateChanged", 0.2)]
        assert states[-1] == "available" and "loading" in states, states
        assert [s.body[0] for s in b.signals("InterfacesAdded")] == [path]
        assert os.path.islink(os.path.join(m.models, "default.gguf")) is False
        b.manager("UnloadModel")
        eventually("it is unloaded", lambda: b.get("Model") == "/")
        assert b.signal("InterfacesRemoved").body[0] == path and path not in b.objects()
        b.manager("LoadModel", "sa{sv}", "tiny", {"default": ("b", True)})
        eventually("it is loaded again", lambda: b.get("Model") == path)
        assert os.path.realpath(os.path.join(m.models, "default.gguf")) == os.path.realpath(MODEL)
        # As the import names them: by the name alone while that is clear, else in full.
        os.symlink(MODEL, os.path.join(m.models, "toy-0123456789ab.gguf"))
        b.manager("LoadModel", "sa{sv}", "toy", {})
        eventually("it is loaded once more", lambda: b.get("State") == "available")
        os.symlink(MODEL, os.path.join(m.models, "toy-ba9876543210.gguf"))
        b.refuse(FAILED + "InvalidRequest", "LoadModel", "sa{sv}", "toy", {})
        b.refuse(FAILED + "NoSuchModel", "LoadModel", "sa{sv}", "to", {})
        b.manager("LoadModel", "sa{sv}", "toy-ba9876543210", {})
        eventually("and again", lambda: b.get("State") == "available")


@case
def a_reload_undoes_no_choice():
    with Machine(model=None) as m, m.client() as b:
        for name in ("default", "other"):
            shutil.copy(MODEL, os.path.join(m.models, name + ".gguf"))
        b.manager("Reload")
        eventually("the default is loaded", lambda: b.get("State") == "available")
        b.manager("LoadModel", "sa{sv}", "other", {})
        eventually("the other is mapped", lambda: "other.gguf" in open(f"/proc/{m.daemon.pid}/maps", encoding="ascii").read())
        eventually("it is loaded", lambda: b.get("State") == "available")
        n = m.log().count("residentd: model ")
        b.manager("Reload")
        eventually("it was reloaded", lambda: m.log().count("configuration reloaded") >= 2)
        m.daemon.check_alive()
        assert m.log().count("residentd: model ") == n, "the reload has loaded a model"
        b.manager("UnloadModel")
        eventually("it is unloaded", lambda: b.get("Model") == "/")
        b.manager("Reload")
        eventually("it was reloaded again", lambda: m.log().count("configuration reloaded") >= 3)
        assert b.get("State") == "unavailable"


@case
def reload_and_dump(m):
    with m.client() as b:
        b.manager("Reload")
        eventually("it was reloaded", lambda: "configuration reloaded" in m.log())
        held = b.manager("Hold", "ss", "dump", "test")
        fd = b.manager("DumpByFileDescriptor")
        with open(fd, encoding="utf-8") as f:
            text = f.read()
        os.close(held)
        assert "state: available" in text and "lease hold" in text and "dump: test" in text, text


@case
def usage_has_an_object(m):
    with m.client() as b:
        path = f"{PATH}/user/{os.geteuid()}"
        m.daemon.check_alive()
        before = b.call(NAME, path, PROPERTIES, "GetAll", "s", NAME + ".User")
        m.daemon.check_alive()
        after = b.call(NAME, path, PROPERTIES, "GetAll", "s", NAME + ".User")
        assert after["Uid"] == os.geteuid() and after["Requests"] == before["Requests"] + 1
        for key in ("GeneratedTokens", "EngineUSec", "TokensToday"):
            assert after[key] > before[key], (key, before, after)


@case
def a_flood_of_calls_that_nobody_reads(m):
    with m.client() as flood, m.client() as b:
        flood.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for i in range(20000):
                flood.start(NAME, PATH, OBJECTS if i % 2 else MANAGER, "GetManagedObjects" if i % 2 else "ListHolds")
        assert b.manager("GetAvailability", timeout=60)["state"] == "available"
    assert m.daemon.process.poll() is None


@case
def the_bus_comes_late_and_goes():
    with Machine(bus=False) as m:
        m.daemon.check_alive()
        assert m.log().count("no control over D-Bus") == 1, m.log()
        m.start_bus(polkit=True)
        m.wait_for_name()
        assert "control over D-Bus is back" in m.log()
        b = m.client()
        _, kept = b.manager("OpenSession", "a{sv}", {"keep": ("b", True)})
        path, fd = b.manager("OpenSession", "a{sv}", {})
        held = b.manager("Hold", "ss", "x", "")
        m.polkit.answers[NAME + ".hold"] = "never"
        b.start(NAME, PATH, MANAGER, "Hold", "ss", "still being asked", "")
        b.get("State")
        m.stop_bus()
        b.close()
        eventually("it notices", lambda: m.log().count("no control over D-Bus") == 2)
        with Line(fd) as line:
            assert ask(line, path.rpartition("/")[2]) == "17 x 23 = 391.", "a session that is held lives on"
            eventually("the kept one ended", lambda: m.daemon.status()["sessions"] == 1)
            m.start_bus(polkit=True)
            m.wait_for_name()
        with m.client() as b:
            assert b.get("Holds") == 1, "a hold needs no bus"
            os.close(held)
            eventually("it ends", lambda: b.get("Holds") == 0)
        os.close(kept)
        assert m.log().count("no control over D-Bus") == 2, m.log()


@case
def it_ends_while_polkit_is_silent():
    with Machine() as m, m.client() as b:
        m.polkit.answers[NAME + ".hold"] = "never"
        b.start(NAME, PATH, MANAGER, "Hold", "ss", "x", "")
        b.manager("ListSessions")
        eventually("polkit is asked", lambda: m.polkit.asked)
        path, fd = b.manager("OpenSession", "a{sv}", {"keep": ("b", True)})
        assert m.daemon.stop() < 10
        os.close(fd)
        b.signals("SessionRemoved")
        assert not b.driver("NameHasOwner", "s", NAME), path


@contextlib.contextmanager
def logind(m, **kw):
    stand_in = Logind(m.path, **kw)
    try:
        yield stand_in
    finally:
        stand_in.stop()


class CardMachine(Machine):
    """... whose GPU is the emulator."""

    def __init__(self, **kw):
        if not os.path.exists(EMULATOR):
            raise Skip("the emulator of the GPU was not built")
        super().__init__(env={"RESIDENTD_CUDA_LIBRARY": EMULATOR}, **kw)

    def __enter__(self):
        if self.card() == "none":
            said = json.dumps(self.daemon.status().get("gpu"))
            self.__exit__(None)
            raise Skip("the emulated GPU is not used: " + said)
        return self

    def card(self):
        return self.daemon.status().get("gpu", {"state": "none"})["state"]


@case
def without_a_card_no_sleep_is_delayed():
    with Machine(conf={"Log": {"Level": "debug"}}) as m:
        def heard():
            return m.log().count("the machine is about to sleep")
        with logind(m) as l:
            eventually("it hears of sleep", lambda: l.prepare_for_sleep(True) or heard())
            l.prepare_for_sleep(False)
            m.daemon.check_alive()
            assert not l.asked, l.asked
        with logind(m) as l:
            n = heard()
            eventually("it hears of sleep from the next logind", lambda: l.prepare_for_sleep(True) or heard() > n)
        m.stop_bus()
        m.start_bus(polkit=True)
        m.wait_for_name()
        with logind(m) as l:
            n = heard()
            eventually("it hears of sleep on the next bus", lambda: l.prepare_for_sleep(True) or heard() > n)
            assert not l.asked, l.asked
        m.daemon.check_alive()


@case
def only_logind_says_that_the_machine_sleeps():
    need_root()
    with Machine(conf={"Log": {"Level": "debug"}}) as m, m.client(ALICE) as b, logind(m) as l:
        service = b.driver("GetNameOwner", "s", NAME)
        for destination in (service, NAME, None):
            b.send(SIGNAL, body=(True,), path=l.PATH, interface=l.MANAGER, member="PrepareForSleep", signature="b",
                   destination=destination)
        # Behind them on the same connection: what they did is done.
        assert b.get("State") == "available"
        assert "about to sleep" not in m.log(), m.log()
        eventually("logind is heard", lambda: l.prepare_for_sleep(True) or "about to sleep" in m.log())


@case
def a_card_is_given_up_before_sleep():
    with CardMachine() as m:
        assert m.card() == "active"
        with logind(m) as l:
            eventually("sleep waits for us", lambda: l.n_held() == 1)
            assert l.asked[0][:2] == ("sleep", "residentd") and l.asked[0][3] == "delay", l.asked
            for i in range(2, 5):
                l.prepare_for_sleep(True)
                eventually("sleep may begin", lambda: l.n_held() == 0)
                assert m.card() == "degraded"
                m.daemon.check_alive()
                l.prepare_for_sleep(False)
                eventually("the next sleep waits for us again", lambda n=i: l.n_held() == 1 and len(l.asked) == n)
                eventually("the card is used again", lambda: m.card() == "active")
                m.daemon.check_alive()
            # Somebody changes his mind.
            for begins in (True, False, True, False, True):
                l.prepare_for_sleep(begins)
            eventually("sleep may begin", lambda: l.n_held() == 0)
            assert m.card() == "degraded"
        # Nobody is left who would say that it is over.
        eventually("the card is used again", lambda: m.card() == "active")
        with logind(m, refuses=True) as l:
            eventually("logind was asked", lambda: l.asked)
            l.prepare_for_sleep(True)
            eventually("the card is given up all the same", lambda: m.card() == "degraded")
            m.stop_bus()
        eventually("without a bus the card is used again", lambda: m.card() == "active")
        m.start_bus(polkit=True)
        with logind(m) as l:
            m.wait_for_name()
            eventually("the next sleep waits for us", lambda: l.n_held() == 1)
            m.daemon.check_alive()
        assert "GPU: used again" in m.log() and "emulator" in m.log(), m.log()


@case
def a_lease_takes_experts_off_the_card():
    with CardMachine() as m, m.client() as b:
        def slots():
            return m.daemon.call("GetResidency")["vram"]["slot_bytes"]

        def fixed():
            return m.daemon.call("GetResidency")["vram"]["fixed_bytes"]
        before, trunk = eventually("experts are on the card", lambda: m.daemon.check_alive() or slots()), fixed()
        lease = b.manager("YieldGpu", "ssa{sv}", "game", "", {})
        eventually("all slots are left to others", lambda: slots() == 0, 3 if not rd.sanitized() else rd.WAIT)
        assert fixed() == trunk and m.card() == "active"
        m.daemon.check_alive()
        os.close(lease)
        # But for what nobody ever used.
        eventually("they are taken again", lambda: m.daemon.check_alive() or slots() >= before * 0.9)


@case
def idle_work_waits_on_power_saver():
    """The example, on both names of power-profiles-daemon, before it is there, and when it goes."""
    if not shutil.which("gdbus"):
        raise Skip("gdbus is not installed")
    with Machine() as m, contextlib.ExitStack() as stack:
        def shown(value):
            return b.manager("GetUserLimits", "s", "root")["PauseIdle"][0] == value
        b = stack.enter_context(m.client())
        script = os.path.join(ROOT, "policy/examples/residentd-power-profile")
        env = dict(os.environ, DBUS_SYSTEM_BUS_ADDRESS="unix:path=" + m.path, RESIDENTD_PID=str(m.daemon.pid),
                   RESIDENTD_POLICY=os.path.join(m.runtime, "policy.d"))
        watcher = subprocess.Popen([script], env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        stack.callback(watcher.wait)
        stack.callback(os.killpg, watcher.pid, signal.SIGTERM)
        for name in ("net.hadess.PowerProfiles", "org.freedesktop.UPower.PowerProfiles"):
            profiles = PowerProfiles(m.path, name)
            try:
                profiles.set("performance")
                # Set again until it is seen: the watcher may not have begun.
                eventually("idle ones wait", lambda p=profiles: p.set("power-saver") or time.sleep(0.2) or shown("yes"))
                assert watcher.poll() is None
                profiles.set("balanced")
                eventually("they do not any more", lambda: shown("no"))
                profiles.set("power-saver")
                eventually("they wait again", lambda: shown("yes"))
            finally:
                profiles.stop()
            eventually("without the daemon they do not wait", lambda: shown("no"))
        with open(os.path.join(env["RESIDENTD_POLICY"], "60-power-saver.conf"), "w", encoding="ascii") as f:
            f.write("[Default]\nPauseIdle=yes\n")
        subprocess.run([script, "off"], env=env, check=True)
        assert not os.listdir(env["RESIDENTD_POLICY"])


if __name__ == "__main__":
    if not shutil.which("dbus-daemon"):
        print("skip - the bus: dbus-daemon is not installed")
        sys.exit(0)
    rd.main(Machine)
