#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""residentctl without a service (policy and configuration from files), with one on a private bus, and the completions."""
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../sys"))
from rd import BUILD, ROOT, WAIT, Daemon, Skip, case, eventually, main

CTL = os.path.join(BUILD, "residentctl")
NO_BUS = "unix:path=/nonexistent/bus"
BUS_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>custom</type><listen>unix:path={}/bus</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*"/><allow receive_sender="*"/><allow own="*"/></policy></busconfig>
"""


def ctl(*args, status=0, bus=NO_BUS):
    """Returns standard output and standard error."""
    env = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": bus, "RESIDENTD_SOCKET": "/nonexistent/socket", "LC_ALL": "C.UTF-8"}
    done = subprocess.run([CTL, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT, env=env,
                          check=False)
    assert done.returncode == status, f"{args}: {done.returncode}, expected {status}: {done.stdout!r} {done.stderr!r}"
    return done.stdout, done.stderr


@contextlib.contextmanager
def tree(**files):
    """A root directory with files: usr_lib__10_a is usr/lib/residentd/policy.d/10-a.conf; conf is etc/.../residentd.conf."""
    with tempfile.TemporaryDirectory(prefix="rd-ctl-") as root:
        for name, text in files.items():
            layer, _, base = name.partition("__")
            path = os.path.join(root, layer.replace("_", "/"), "residentd",
                                base.replace("_", "-") + ".conf" if layer == "etc" and base == "residentd"
                                else os.path.join("policy.d", base.replace("_", "-") + ".conf"))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)
        yield root


def rows(text):
    """Key -> (value, source)."""
    return {key: (value, source) for key, value, source in (line.split() for line in text.splitlines())}


# ---- files ----

@case
def policy_show_says_where_a_value_was_set():
    with tree(usr_lib__10_a="[Default]\nWeight=50\nSessions=4\n", etc__20_b="[User root]\nWeight=300\nTokensPerDay=2M\n",
              run__30_c="[User daemon]\nWeight=7\n", var_lib__90_set="[User root]\nClass=idle\n") as root:
        out, err = ctl("policy", "show", "root", "--root", root)
        got = rows(out)
        assert err == "", err
        assert got["Weight"] == ("300", f"{root}/etc/residentd/policy.d/20-b.conf:2"), got
        assert got["TokensPerDay"][1].endswith("20-b.conf:3"), got
        assert got["Sessions"] == ("4", f"{root}/usr/lib/residentd/policy.d/10-a.conf:3"), got
        assert got["Class"] == ("idle", f"{root}/var/lib/residentd/policy.d/90-set.conf:2"), got
        assert got["QueueMax"] == ("32", "default"), got
        assert rows(ctl("policy", "show", "--root", root + "///", "0")[0]) == got
        assert rows(ctl("policy", "show", "daemon", "--root", root)[0])["Weight"][0] == "7"
        limits = json.loads(ctl("--json", "policy", "show", "root", "--root", root)[0])
        assert limits["user"] == "root" and limits["from"] == "files", limits
        assert {k: (v["value"] or "-", v["source"]) for k, v in limits["limits"].items()} == got


@case
def policy_show_without_a_bus_says_so():
    out, err = ctl("policy", "show")
    assert "from the files" in err and rows(out)["Weight"][0].isdigit(), (out, err)
    _, err = ctl("policy", "show", "no-such-user-here", "--root", "/nonexistent", status=2)
    assert "no such user" in err, err


@case
def group_section_applies_to_its_members():
    with tree(etc__g="[Group daemon]\nWeight=9\n") as root:
        assert rows(ctl("policy", "show", "daemon", "--root", root)[0])["Weight"][0] == "9"
        assert rows(ctl("policy", "show", "nobody", "--root", root)[0])["Weight"] == ("100", "default")


@case
def checks_of_good_files_are_silent():
    with tree(etc__residentd="[Service]\nQueueMax=7\n", etc__a="[Default]\nWeight=5\n") as root:
        for command in ("policy", "config"):
            assert ctl(command, "check", "--root", root) == ("", "")
            assert json.loads(ctl("--json", command, "check", "--root", root)[0]) == {"warnings": []}
    assert ctl("config", "check", "--root", "/nonexistent") == ("", "")


@case
def checks_name_file_and_line():
    with tree(etc__residentd="[Service]\nQueueMax=0\n\nNonsense\n", etc__a="[Default]\nWeight=5\nWeight=0\n[Sausage]\n",
              run__b="[User no-such-user-here]\nWeight=1\n") as root:
        config = f"{root}/etc/residentd/residentd.conf"
        policy = [f"{root}/etc/residentd/policy.d/a.conf:3: ", f"{root}/etc/residentd/policy.d/a.conf:4: ",
                  f"{root}/run/residentd/policy.d/b.conf:1: "]
        out, err = ctl("policy", "check", "--root", root, status=1)
        lines = err.splitlines()
        assert out == "" and len(lines) == 3 and all(a.startswith(b) for a, b in zip(lines, policy)), err
        out, err = ctl("config", "check", "--root", root, status=1)
        lines = err.splitlines()
        assert len(lines) == 5 and lines[0].startswith(config + ":2: ") and lines[1].startswith(config + ":4: "), err
        assert json.loads(ctl("--json", "config", "check", "--root", root, status=1)[0])["warnings"] == lines
        # What is wrong is ignored, and the rest counts.
        out, err = ctl("policy", "show", "root", "--root", root)
        assert rows(out)["Weight"][0] == "5" and err.count("\n") == 3, (out, err)


@case
def unreadable_policy_is_a_warning():
    with tree() as root:
        os.makedirs(os.path.join(root, "etc/residentd/policy.d/x.conf"))
        _, err = ctl("policy", "check", "--root", root, status=1)
        assert "policy.d/x.conf" in err, err


# ---- arguments and exit codes ----

@case
def wrong_arguments():
    for args in ((), ("sausage",), ("policy",), ("policy", "sausage"), ("policy", "show", "a", "b"), ("policy", "set", "root"),
                 ("policy", "set", "root", "Weight"), ("policy", "set", "root", "=3"), ("policy", "check", "x"), ("config",),
                 ("model", "load"), ("model", "unload", "x"), ("holds", "x"), ("reload", "x"), ("sessions", "x"),
                 ("yield-gpu", "--bytes", "many"), ("--sausage",)):
        out, err = ctl(*args, status=2)
        assert out == "" and "residentctl" in err, (args, out, err)


@case
def without_a_bus():
    for args in (("holds",), ("sessions",), ("hold",), ("hold", "--", "true"), ("yield-gpu", "--bytes", "1G"), ("reload",),
                 ("model", "load", "x"), ("model", "unload"), ("policy", "set", "root", "Weight=3")):
        out, err = ctl(*args, status=3)
        assert out == "" and "system bus" in err, (args, out, err)


# ---- a service on a bus of its own ----

@contextlib.contextmanager
def private_bus():
    if not shutil.which("dbus-daemon"):
        raise Skip("dbus-daemon is not installed")
    with tempfile.TemporaryDirectory(prefix="rd-ctl-", dir="/tmp") as d:
        with open(os.path.join(d, "conf"), "w", encoding="utf-8") as f:
            f.write(BUS_CONFIG.format(d))
        with subprocess.Popen(["dbus-daemon", f"--config-file={d}/conf", "--nofork"], stderr=subprocess.DEVNULL) as p:
            try:
                eventually("the bus is there", lambda: os.path.exists(d + "/bus") or p.poll() is not None)
                yield "unix:path=" + d + "/bus"
            finally:
                p.kill()


@contextlib.contextmanager
def service():
    """The address of a bus with a residentd on it, and the daemon."""
    if os.getuid() != 0:
        raise Skip("only root may do everything on a bus without polkit")
    with private_bus() as bus, tree() as root:
        env = {"DBUS_SYSTEM_BUS_ADDRESS": bus, "RESIDENTD_ROOT": root, "STATE_DIRECTORY": root + "/var/lib/residentd",
               "RUNTIME_DIRECTORY": root + "/run/residentd"}
        for name in ("STATE_DIRECTORY", "RUNTIME_DIRECTORY"):
            os.makedirs(env[name])
        with Daemon(env=env) as daemon:
            eventually("residentd is on the bus", lambda: has_name(bus))
            yield bus, daemon


def has_name(bus):
    env = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": bus}
    return subprocess.run([CTL, "holds"], env=env, capture_output=True, check=False).returncode == 0


@case
def nobody_on_the_bus():
    with private_bus() as bus:
        for args in (("holds",), ("hold",), ("reload",), ("policy", "set", "root", "Weight=3")):
            _, err = ctl(*args, status=3, bus=bus)
            assert "residentd" in err, err
        out, err = ctl("policy", "show", bus=bus)
        assert "from the files" in err and rows(out)["Allow"][0] == "yes", (out, err)


@case
def commands_on_the_bus():
    with service() as (bus, daemon):
        assert ctl("sessions", bus=bus) == ("no session is open\n", "")
        with daemon.client() as c:
            c.call("OpenSession")
            out, _ = ctl("sessions", bus=bus)
            assert re.fullmatch(r"/org/residentd1/session/\S+  root, 0 tokens\n", out), out
            listed = json.loads(ctl("--json", "sessions", bus=bus)[0])["sessions"]
            assert len(listed) == 1 and listed[0]["uid"] == 0 and listed[0]["busy"] is False, listed
        assert ctl("reload", bus=bus) == ("", "")
        assert "anew" in daemon.log() or "reloaded" in daemon.log(), daemon.log()
        _, err = ctl("model", "load", "no-such-model", status=1, bus=bus)
        assert "no-such-model" in err, err
        assert ctl("model", "unload", bus=bus) == ("", "")


@case
def holds_last_as_long_as_the_command():
    with service() as (bus, _):
        assert ctl("holds", bus=bus) == ("nothing is held\n", "")
        assert json.loads(ctl("--json", "holds", bus=bus)[0]) == {"holds": []}
        out, _ = ctl("hold", "--who", "me", "--why", "a test", "--", CTL, "holds", bus=bus)
        assert re.fullmatch(r"hold       root, process \d+, for \d s: me, a test\n", out), out
        out, _ = ctl("yield-gpu", "--bytes", "1G", "--", CTL, "--json", "holds", bus=bus)
        held = json.loads(out)["holds"]
        assert [h["kind"] for h in held] == ["yield-gpu"] and held[0]["who"] == "residentctl", held
        assert held[0]["why"] == CTL and held[0]["uid"] == 0, held
        eventually("nothing is held", lambda: ctl("holds", bus=bus)[0] == "nothing is held\n")


@case
def hold_returns_what_the_command_returns():
    with service() as (bus, _):
        ctl("hold", "--", "sh", "-c", "exit 7", status=7, bus=bus)
        ctl("hold", "--", "sh", "-c", "kill -TERM $$", status=128 + signal.SIGTERM, bus=bus)
        ctl("hold", "--", "/nonexistent/command", status=127, bus=bus)
        ctl("hold", "--", "/dev/null", status=126, bus=bus)
        # The lease is not inherited: only the standard streams are open.
        out, _ = ctl("hold", "--", "sh", "-c", "ls /proc/self/fd", bus=bus)
        assert out.split()[:3] == ["0", "1", "2"] and len(out.split()) == 4, out


@case
def hold_without_a_command():
    with service() as (bus, daemon):
        def held():
            return ctl("holds", bus=bus)[0].startswith("hold ")
        env = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": bus}
        with subprocess.Popen([CTL, "hold"], env=env, stdin=subprocess.DEVNULL) as p:
            eventually("the hold is there", held)
            p.send_signal(signal.SIGINT)
            assert p.wait(WAIT) == -signal.SIGINT
        eventually("the hold is gone", lambda: not held())
        with subprocess.Popen([CTL, "hold"], env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as p:
            eventually("the hold is there", held)
            daemon.stop()
            assert p.wait(WAIT) == 3
            assert "has ended" in p.stderr.read()


@case
def command_ends_with_its_hold():
    with service() as (bus, _), tempfile.TemporaryDirectory() as d:
        env = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": bus}
        script = f'echo $$ >{d}/new; mv {d}/new {d}/pid; exec sleep 1000'
        with subprocess.Popen([CTL, "hold", "--", "sh", "-c", script], env=env, stdin=subprocess.DEVNULL) as p:
            eventually("the command runs", lambda: os.path.exists(d + "/pid"))
            with open(d + "/pid", encoding="ascii") as f:
                pid = int(f.read())
            p.kill()
        eventually("the command has ended", lambda: not os.path.exists(f"/proc/{pid}") or zombie(pid))


def zombie(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@case
def policy_set_changes_what_applies():
    with service() as (bus, _):
        before = rows(ctl("policy", "show", "daemon", bus=bus)[0])
        for runtime in ((), ("--runtime",)):
            assert ctl("policy", "set", "daemon", "Weight=300", "Models=a* b*", *runtime, bus=bus) == ("", "")
            got = json.loads(ctl("--json", "policy", "show", "daemon", bus=bus)[0])
            assert got["from"] == "service" and got["limits"]["Weight"]["value"] == "300", got
            assert got["limits"]["Models"]["value"] == "a* b*", got
            assert "90-set.conf:" in got["limits"]["Weight"]["source"], got
            assert ctl("policy", "set", "daemon", "Weight=", "Models=", *runtime, bus=bus) == ("", "")
            assert rows(ctl("policy", "show", "daemon", bus=bus)[0]) == before
        for bad in ("Weight=0", "Sausage=1"):
            _, err = ctl("policy", "set", "daemon", "Sessions=3", bad, status=1, bus=bus)
            assert bad.partition("=")[0] in err, err
        assert rows(ctl("policy", "show", "daemon", bus=bus)[0]) == before


# ---- completions ----

PROGRAMS = ("resident", "residentctl", "residentd")


def completion(name):
    return os.path.join(ROOT, "packaging/completions", name)


def bash(script):
    done = subprocess.run(["bash", "--norc", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=WAIT, check=False)
    assert done.returncode == 0 and done.stderr == "", done
    return done.stdout


@case
def completions_are_well_formed():
    if not shutil.which("bash"):
        raise Skip("bash is not installed")
    for program in PROGRAMS:
        path = completion(program + ".bash")
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0, path
        assert bash(f". {path}; complete -p {program}") == f"complete -F _{program} {program}\n"


@case
def zsh_completions_are_well_formed():
    for program in PROGRAMS:
        with open(completion("_" + program), encoding="utf-8") as f:
            assert f.readline() == f"#compdef {program}\n"
    if not shutil.which("zsh"):
        raise Skip("zsh is not installed")
    for program in PROGRAMS:
        assert subprocess.run(["zsh", "-n", completion("_" + program)], check=False).returncode == 0, program


@case
def completions_know_every_option_and_command():
    for program in PROGRAMS:
        summary = subprocess.run([os.path.join(BUILD, program), "--help"], capture_output=True, text=True, check=True).stdout
        words = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", summary))
        if program == "residentctl":
            words |= {w for line in re.findall(r"^  ([a-z].*?)(?:  |\[|[A-Z])", summary, re.M) for w in line.split()}
        for name in (program + ".bash", "_" + program):
            with open(completion(name), encoding="utf-8") as f:
                text = f.read()
            missing = [w for w in sorted(words) if not re.search(rf"(?<![\w-]){re.escape(w)}(?![\w-])", text)]
            assert not missing, f"{name} does not have {missing}"


@case
def residentctl_completes():
    if not shutil.which("bash"):
        raise Skip("bash is not installed")
    cases = {"": "availability", "po": "policy", "policy ": "show set check", "--json model l": "list load",
             "policy set root W": "Weight=", "policy set ro": "root", "hold --w": "--who --why", "policy show --r": "--root",
             "model unload ": "", "hold --who x -- tru": "true"}
    for line, expected in cases.items():
        words = " ".join(f"'{w}'" for w in ["residentctl", *line.split(" ")])
        got = bash(f". {completion('residentctl.bash')}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
                   '_residentctl; echo "${COMPREPLY[@]}"').split()
        assert set(expected.split()) <= set(got) and (expected or not got), f"{line!r}: {got}"


if __name__ == "__main__":
    main()
