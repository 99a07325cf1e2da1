#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""resident and residentctl as their manual pages promise them: streams, exit codes, transcript, prompt, models.

The test model answers in milliseconds. What has to happen in the middle of an answer therefore happens while residentd
is stopped (SIGSTOP): frozen() lets it run in slices until something has come, and no case depends on how fast it is.
"""
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../sys"))
from rd import BUILD, INTERFACE, MODEL, WAIT, Daemon, Skip, case, eventually, main, slow, user
from splitgguf import split

QUESTION = "What is 17 x 23?"
ANSWER = "17 x 23 = 391."
OFF = ("-t", "0", "--think", "off")
NAME = "Tiny Qwen35MoE stories"
ERASE = b"\r\x1b[K"

# At this temperature all tokens are about equally likely, so that it is the seed that says how long an answer gets,
# whatever the kernels: one of 1942 tokens, one that fills the context, a short one that has an ESC in it.
WILD = ("--think", "off", "-t", "100", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed")
LONG = (*WILD, "36")
STORY = "Tell me a story."


class User:
    """Somebody with a home of his own, who uses the service at this socket."""

    def __init__(self, path):
        self.socket = path.socket if isinstance(path, Daemon) else path

    def __enter__(self):
        self.home = tempfile.mkdtemp(prefix="rd-cli-", dir="/tmp")
        self.directory = os.path.join(self.home, "state", "resident")
        self.last = os.path.join(self.directory, "last.json")
        return self

    def __exit__(self, *_):
        with contextlib.suppress(AssertionError):  # the service may be gone
            self.ask("forget")
        shutil.rmtree(self.home)

    def environment(self, more=None):
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "RESIDENTD_IMPORT")}
        return {**env, "HOME": self.home, "XDG_STATE_HOME": os.path.join(self.home, "state"), "TERM": "xterm",
                "LC_ALL": "C.UTF-8", "RESIDENTD_SOCKET": self.socket,
                "RESIDENTD_MODELS": os.path.join(self.home, "models"), **(more or {})}

    def run(self, program, *args, stdin=b"", status=0, env=None, umask=-1):
        """Returns standard output (bytes) and standard error (text)."""
        done = subprocess.run([os.path.join(BUILD, program), *args], input=stdin, capture_output=True, timeout=WAIT,
                              env=self.environment(env), umask=umask, check=False)
        assert done.returncode == status, f"{program} {args}: {done.returncode}, expected {status}: {done.stderr!r}"
        return done.stdout, done.stderr.decode()

    def ask(self, *args, **kw):
        return self.run("resident", *args, **kw)

    def ctl(self, *args, **kw):
        return self.run("residentctl", *args, **kw)

    def json(self, *args, **kw):
        """The object of --json, which has to be one line."""
        out, _ = self.ask("--json", *args, **kw)
        return one_line(out)

    def fails(self, status, words, *args, program="resident", **kw):
        out, err = self.run(program, *args, status=status, **kw)
        assert out == b"", f"{args}: an error on standard output: {out!r}"
        for word in words:
            assert word in err, f"{args}: no {word!r} in {err!r}"

    def redirected(self, redirection, *args, program="resident"):
        """Runs it with what a shell makes of the redirection; returns the status, standard output and error."""
        done = subprocess.run(["sh", "-c", f'exec "$@" {redirection}', "sh", os.path.join(BUILD, program), *args],
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=WAIT, env=self.environment(),
                              check=False)
        return done.returncode, done.stdout, done.stderr.decode()

    def start(self, *args, **kw):
        return subprocess.Popen([os.path.join(BUILD, "resident"), *args], stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment(), **kw)

    def transcript(self):
        with open(self.last, encoding="utf-8") as f:
            return json.load(f)

    def turns(self):
        return [(t["role"], t["content"]) for t in self.transcript()["turns"]]


class Fake:
    """A service that answers every call with the same reply, or (None) never."""

    def __init__(self, reply):
        self.reply = reply
        self.called = threading.Event()
        self.connections = []

    def __enter__(self):
        self.directory = tempfile.mkdtemp(prefix="rd-fake-", dir="/tmp")
        self.socket = os.path.join(self.directory, "s")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.socket)
        self.listener.listen()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()
        return self

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                c, _ = self.listener.accept()
                self.connections.append(c)
                while data := c.recv(1 << 16):
                    self.called.set()
                    if self.reply is not None and data.endswith(b"\0"):
                        c.sendall(json.dumps({"parameters": self.reply}).encode() + b"\0")

    def __exit__(self, *_):
        for s in (self.listener, *self.connections):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()
        self.thread.join()
        shutil.rmtree(self.directory)


class Terminal:
    """A program with a terminal: as all its standard streams, or as those that are not given."""

    def __init__(self, u, *args, program="resident", env=None, **streams):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
        self.seen = b""
        self.mark = 0
        self.process = subprocess.Popen(
            [os.path.join(BUILD, program), *args], env=u.environment(env), start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
            **{"stdin": slave, "stdout": slave, "stderr": slave, **streams})
        os.close(slave)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        os.close(self.master)

    def take(self, seconds):
        """Reads what comes; False at the end."""
        try:
            if select.select([self.master], [], [], seconds)[0]:
                data = os.read(self.master, 1 << 16)
                self.seen += data
                return bool(data)
        except OSError:  # EIO: the other side is closed
            return False
        return True

    def shows(self, pattern):
        """Is it on the screen, after what was waited for before?"""
        self.take(0)
        return re.search(pattern, self.seen[self.mark:])

    def wait_for(self, pattern):
        end = time.monotonic() + WAIT
        while not (m := self.shows(pattern)):
            alive = self.take(0.1)
            if time.monotonic() > end or (not alive and not self.shows(pattern)):
                raise AssertionError(f"never on the screen: {pattern!r} in {self.seen[self.mark:]!r}")
        self.mark += m.end()

    def prompt(self, before=b"", mark=rb"> "):
        """Waits for the prompt, and for the editor behind it: a Ctrl-D or Ctrl-C before means something else."""
        self.wait_for(before + mark)
        eventually("the editor reads", lambda: not termios.tcgetattr(self.master)[3] & termios.ICANON)

    def type(self, text):
        os.write(self.master, text)

    def finish(self, status=0):
        end = time.monotonic() + WAIT
        while self.take(0.1):
            assert time.monotonic() < end, f"does not end: {self.seen!r}"
        got = self.process.wait(WAIT)
        assert got == status, f"status {got}, expected {status}: {self.seen!r}"
        return self.seen


def one_line(out):
    assert out.endswith(b"\n") and out.count(b"\n") == 1, f"not one line: {out!r}"
    got = json.loads(out)
    assert isinstance(got, dict), got
    return got


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


def readable(file):
    return bool(select.select([file], [], [], 0)[0])


@contextlib.contextmanager
def stopped(daemon):
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def frozen(daemon, condition):
    """Lets the daemon run in slices until the condition holds; in the block it is stopped."""
    with stopped(daemon):
        end = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < end, "what the daemon was to be frozen at does not happen"
            daemon.process.send_signal(signal.SIGCONT)
            time.sleep(0.002)
            daemon.process.send_signal(signal.SIGSTOP)
            time.sleep(0.01)
        yield


@contextlib.contextmanager
def mid_answer(daemon, u, *args):
    """A resident whose answer has begun to come; residentd is stopped."""
    p = u.start(*args)
    try:
        with frozen(daemon, lambda: readable(p.stdout)):
            yield p
    finally:
        p.kill()
        p.communicate()


# ---- input, output, options ----


@case
def instruction_and_standard_input(daemon):
    with User(daemon) as u:
        for args, stdin, sent in ((["What", "is", "17 x 23?"], b"", QUESTION),
                                  ([], QUESTION.encode(), QUESTION),
                                  (["Which  number", "is it?"], b"17 x 23\n", "Which  number is it?\n\n17 x 23\n")):
            u.ask(*OFF, "--", *args, stdin=stdin)
            assert u.turns()[0] == ("user", sent), (args, stdin, u.turns())


@case
def standard_output_has_the_answer_alone(daemon):
    with User(daemon) as u:
        assert u.ask(*OFF, QUESTION) == (ANSWER.encode(), "")
        assert u.ask(*OFF, "--show-thinking", QUESTION) == (ANSWER.encode(), "")


@case
def help_and_version(daemon):
    with User(daemon) as u:
        for program in ("resident", "residentctl"):
            assert u.run(program, "--help") == u.run(program, "-h")
            assert u.run(program, "--help")[0].startswith(b"usage: " + program.encode())
            version = daemon.status()["version"]
            assert u.run(program, "-V") == (f"{program} {version}\n".encode(), "")


@case
def json_object(daemon):
    with User(daemon) as u:
        got = u.json("-t", "0", QUESTION)
        assert set(got) == {"text", "thought", "tool_calls", "stop_reason", "usage", "timings", "model", "error"}, got
        assert got["text"] == ANSWER and "340 + 51" in got["thought"] and got["tool_calls"] == [], got
        assert got["stop_reason"] == "eos" and got["error"] is None and got["model"] == NAME, got
        assert set(got["usage"]) == {"prompt_tokens", "cached_tokens", "answer_tokens", "thought_tokens"}, got
        assert set(got["timings"]) == {"queue_us", "prefill_us", "decode_us"}, got
        assert all(got["usage"][k] > 0 for k in ("prompt_tokens", "answer_tokens", "thought_tokens")), got
        assert got["timings"]["prefill_us"] > 0 and got["timings"]["decode_us"] > 0, got
        got = u.json(*WILD, "48", "--complete", "Once")  # quotes, control characters, U+FFFD: still one line
        assert got["text"], got


@case
def thinking(daemon):
    with User(daemon) as u:
        whole = u.json("-t", "0", QUESTION)
        off = u.json("-t", "0", "--think", "off", QUESTION)
        assert off["thought"] == "" and off["usage"]["thought_tokens"] == 0 and off["text"] == ANSWER, off
        some = u.json("-t", "0", "--think", "3", QUESTION)
        assert some["thought"] and whole["thought"].startswith(some["thought"]), (some, whole)
        assert 0 < some["usage"]["thought_tokens"] < whole["usage"]["thought_tokens"], (some, whole)
        out, err = u.ask("-t", "0", "--show-thinking", QUESTION)
        assert out == ANSWER.encode() and err.strip() == whole["thought"].strip() and "\x1b" not in err, (out, err)


@case
def system_text(daemon):
    with User(daemon) as u:
        plain = u.json(*OFF, QUESTION)
        got = u.json(*OFF, "-s", "You are a cat.", QUESTION)
        assert got["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"], (got, plain)
        assert u.turns() == [("system", "You are a cat."), ("user", QUESTION), ("assistant", got["text"])], u.turns()
        u.fails(2, ["--continue"], "-c", "-s", "Another one.", QUESTION)


@case
def ends_of_an_answer(daemon):
    with User(daemon) as u:
        got = u.json(*OFF, "--stop", "9", "--stop", " =", QUESTION)
        assert got["text"] == "17 x 23" and got["stop_reason"] == "stop", got
        # An answer may end its sentence, a completion may not.
        got = u.json(*LONG, "--max-tokens", "40", STORY)
        assert got["stop_reason"] == "length" and 40 <= got["usage"]["answer_tokens"] <= 40 + 64, got
        whole, _ = u.ask("-t", "0", "--complete", "Once upon a time")
        got = u.json("-t", "0", "--max-tokens", "4", "--complete", "Once upon a time")
        assert got["usage"]["answer_tokens"] == 4 and got["stop_reason"] == "length", got
        assert whole.decode().startswith(got["text"]) and 0 < len(got["text"]) < len(whole), got
        assert u.ask("-t", "0", "--max-tokens", "4", "--complete", "Once upon a time") == (got["text"].encode(), "")


@case
def seed(daemon):
    with User(daemon) as u:
        def story(n):
            return u.ask("-t", "1", "--think", "off", "--max-tokens", "60", "--seed", str(n), STORY)[0]
        assert story(1) == story(1)
        assert len({story(n) for n in range(1, 5)}) > 1, "four seeds give the same story"


@case
def completion_keeps_nothing(daemon):
    with User(daemon) as u:
        out, _ = u.ask("-t", "0", "--max-tokens", "12", "--complete", "Once upon a time")
        assert out.startswith(b", there was"), out
        assert not os.path.exists(u.last)


@case
def input_has_to_be_text(daemon):
    with User(daemon) as u:
        u.fails(2, ["NUL"], *OFF, "What is this?", stdin=b"ab\0cd")
        assert not os.path.exists(u.last)
        out, err = u.ask(*OFF, stdin=b"What is \xff17 x 23?")
        assert out and "UTF-8" in err, (out, err)
        assert u.turns()[0][1] == "What is \ufffd17 x 23?", u.turns()
        u.fails(2, ["UTF-8"], *OFF, "-s", b"a\xff", QUESTION)


# ---- exit status ----


@case
def status_2_wrong_options_or_input(daemon):
    with User(daemon) as u:
        for args in (["--no-such-option", "x"], ["-t", "warm", "x"], ["--max-tokens", "", "x"], ["--think", "on", "x"],
                     [], ["--complete", "-c", "x"], ["--complete", "-s", "x", "x"], ["--seed"],
                     [*["--stop", "x"] * 17, "x"]):
            u.fails(2, ["resident"], *args)
        for args in ([], ["no-such-command"], ["status", "x"], ["--no-such-option"], ["tokenize"], ["model"],
                     ["model", "add"], ["model", "rename", "x"], ["model", "remove"]):
            u.fails(2, ["residentctl"], *args, program="residentctl")
        os.makedirs(u.directory)
        with open(u.last, "w", encoding="utf-8") as f:
            f.write('{"turns": [')
        u.fails(2, ["resident forget"], *OFF, "-c", QUESTION)
        u.ask("forget")
        assert u.ask(*OFF, "-c", QUESTION)[0] == ANSWER.encode()


@case
def status_2_the_service_refuses_an_option(daemon):
    with User(daemon) as u:
        for option, word in (("--top-p=7", "top_p"), ("--top-p=0", "top_p"), ("--min-p=-1", "min_p"), ("-t101", "temperature"),
                             ("--top-k=-1", "top_k"), ("--max-tokens=0", "max_tokens"), ("--seed=-1", "seed"),
                             ("--think=-1", "max_thinking_tokens"), ("--stop=", "stop"), ("--want=gpt", "want")):
            u.fails(2, [f"options.{word}"], option, QUESTION)
        u.fails(2, ["'hi' is not a number or off"], "--think", "hi")
        got = u.json("--top-p", "7", QUESTION, status=2)
        assert got["error"]["code"] == 10005 and "top_p" in got["error"]["message"], got
        assert got["text"] == "" and got["stop_reason"] is None, got


@case
def status_1_the_answer_cannot_be_written(daemon):
    with User(daemon) as u, open("/dev/full", "wb") as full:
        done = subprocess.run([os.path.join(BUILD, "resident"), *OFF, QUESTION], stdin=subprocess.DEVNULL, stdout=full,
                              stderr=subprocess.PIPE, timeout=WAIT, env=u.environment(), check=False)
        assert done.returncode == 1 and b"No space left" in done.stderr, done


def output_fails(u, redirection, words, *args, **kw):
    status, out, err = u.redirected(redirection, *args, **kw)
    assert status == 1 and out == b"" and words in err, (redirection, args, status, out, err)


@case
def status_1_the_output_cannot_be_written(daemon):
    with User(daemon) as u:
        for args in (["--help"], ["-V"], ["--json", *OFF, QUESTION]):
            output_fails(u, ">/dev/full", "cannot", *args)
        for args in (["--help"], ["-V"], ["status"], ["--json", "status"], ["usage"], ["availability"], ["interface"],
                     ["tokenize", "x"], ["model", "list"], ["--json", "model", "list"]):
            output_fails(u, ">/dev/full", "No space left", *args, program="residentctl")


@case
def closed_standard_streams(daemon):
    """They are not filled by the connection to the service, which would then get what is printed."""
    with User(daemon) as u:
        for redirection in (">&-", "<&- >&-"):
            output_fails(u, redirection, "Bad file descriptor", *OFF, QUESTION)
            output_fails(u, redirection, "Bad file descriptor", "--help")
            output_fails(u, redirection, "Bad file descriptor", "status", program="residentctl")
        for redirection in ("<&-", "2>&-", "<&- 2>&-"):
            assert u.redirected(redirection, *OFF, "--show-thinking", QUESTION) == (0, ANSWER.encode(), "")
            status, out, err = u.redirected(redirection, "--json", "usage", program="residentctl")
            assert status == 0 and err == "" and one_line(out)["requests"] > 0, (status, out, err)
        assert u.redirected("<&- >&- 2>&-", *OFF, QUESTION) == (1, b"", "")


@case
def status_3_no_service():
    with User("/nonexistent/socket") as u:
        for args in ([QUESTION], ["-c", QUESTION], ["--complete", QUESTION], ["--json", QUESTION]):
            u.fails(3, ["/nonexistent/socket", "residentd.socket"], *args)
        for command in ("status", "availability", "usage", "interface"):
            u.fails(3, ["/nonexistent/socket", "residentd.socket"], command, program="residentctl")
        u.fails(2, ["unknown command"], "foo", program="residentctl")
        u.fails(2, ["number of arguments"], "status", "x", program="residentctl")
        assert not os.path.exists(u.last)


@case
def status_4_no_model():
    with tempfile.TemporaryDirectory() as models, Daemon(model=None, env={"RESIDENTD_MODELS": models}) as daemon:
        with User(daemon) as u:
            u.fails(4, ["residentctl model add"], QUESTION)
            u.fails(4, ["residentctl model add"], "-c", QUESTION)
            got = u.json(QUESTION, status=4)
            assert got["error"]["code"] == 10001 and got["model"] is None, got
            assert "residentctl model add" in got["error"]["message"], got
            with Terminal(u) as t:
                t.wait_for(rb"residentctl model add")
                t.finish(4)
            out, _ = u.ctl("availability", status=4)
            assert out.startswith(b"unavailable: ") and b"residentctl model add" in out, out
            assert one_line(u.ctl("--json", "availability")[0])["state"] == "unavailable"
            assert b"residentctl model add" in u.ctl("model", "list")[0]
            assert b"unavailable" in u.ctl("status")[0]
            u.fails(4, ["residentctl model add"], "tokenize", "x", program="residentctl")


@case
def status_4_the_model_is_for_something_else():
    with tempfile.TemporaryDirectory() as root:
        os.makedirs(os.path.join(root, "etc/residentd/models.d"))
        with open(os.path.join(root, "etc/residentd/models.d/10.conf"), "w", encoding="ascii") as f:
            f.write("[code]\nModels=*Coder*\n[chat]\nModels=Tiny*\n")
        with Daemon(env={"RESIDENTD_ROOT": root}) as daemon, User(daemon) as u:
            assert u.ask("--want", "chat", *OFF, QUESTION)[0] == ANSWER.encode()
            u.fails(4, ["wanted"], "--want", "code", QUESTION)
            assert u.json("--want", "code", QUESTION, status=4)["error"]["code"] == 10018


@case
def status_5_busy():
    with Daemon(conf={"Service": {"QueueMax": 1}}) as daemon, User(daemon) as u, daemon.client() as other:
        def refused():
            # The answer may be over before resident gets to ask, on a busy machine.
            other.send("Chat", {"messages": user(STORY), "options": slow()}, more=True)
            other.reply()
            done = subprocess.run([os.path.join(BUILD, "resident"), "--json", *OFF, QUESTION], capture_output=True,
                                  stdin=subprocess.DEVNULL, timeout=WAIT, env=u.environment(), check=False)
            for _ in other.frames():
                pass
            return done if done.returncode else None

        done = eventually("a full queue", refused)
        got = one_line(done.stdout)
        assert done.returncode == 5 and b"try again in" in done.stderr, done
        assert got["error"]["code"] == 10010 and got["error"]["retry_after_ms"] > 0, got


@case
def status_6_context_full(daemon):
    with User(daemon) as u:
        u.fails(6, ["context"], *OFF, "Count the words.", stdin=b"word " * 3000)
        assert not os.path.exists(u.last)
        got = u.json(*WILD, "24", "--complete", "Once", status=6)
        assert got["stop_reason"] == "context" and got["text"], got
        out, err = u.ask(*WILD, "24", "--complete", "Once", status=6)
        assert out.decode() == got["text"] and "context" in err, err


@case
def status_130_interrupted(daemon):
    with User(daemon) as u:
        with mid_answer(daemon, u, *LONG, STORY) as p:
            p.send_signal(signal.SIGINT)
            daemon.process.send_signal(signal.SIGCONT)
            out, err = p.communicate(timeout=WAIT)
        assert p.returncode == 130 and out and err == b"", (p.returncode, out, err)
        assert len(out) < 7000, "the whole answer came"
        (_, question), (_, answer) = u.turns()
        assert question == STORY and answer.encode().startswith(out), u.turns()


@case
def status_130_interrupted_twice_ends_at_once(daemon):
    with User(daemon) as u:
        with mid_answer(daemon, u, *LONG, STORY) as p:
            p.send_signal(signal.SIGINT)
            end = time.monotonic() + WAIT
            while p.poll() is None and time.monotonic() < end:  # two that come at once are one
                time.sleep(0.05)
                p.send_signal(signal.SIGINT)
            assert p.returncode == 130, "residentd is stopped, and resident waits for it"


@case
def status_130_interrupted_twice_in_a_call():
    """A service that never answers OpenSession: nobody looks at the first SIGINT."""
    with Fake(None) as service, User(service.socket) as u:
        p = u.start("-c", QUESTION)
        assert service.called.wait(WAIT), "resident calls nothing"
        p.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert p.poll() is None, "the first asks, it does not end"
        begin = time.monotonic()
        p.send_signal(signal.SIGINT)
        p.communicate(timeout=WAIT)
        assert p.returncode == 130 and time.monotonic() - begin < 20, p.returncode
        os.unlink(service.socket)  # for the `forget` of the end


@case
def status_141_nobody_reads(daemon):
    with User(daemon) as u:
        with mid_answer(daemon, u, *LONG, STORY) as p:
            p.stdout.close()
            # At once, without another token; a shell shows a death by SIGPIPE as 141, too.
            status = p.wait(WAIT)
            p.stdout = None
        assert status in (141, -signal.SIGPIPE), status
        eventually("the request has ended", lambda: daemon.status()["running"] == 0)


@case
def service_killed_in_the_middle():
    for args in ([], ["-c"], ["--json"]):
        with Daemon() as daemon, User(daemon) as u:
            daemon.expected_status = -signal.SIGKILL
            p = u.start(*args, *LONG, STORY)
            if args == ["--json"]:
                # Its output comes at the end; that the answer has begun is seen at the service.
                eventually("it is being answered", lambda: p.poll() is not None or daemon.status()["running"] == 1)
            else:
                with frozen(daemon, lambda p=p: readable(p.stdout)):
                    daemon.process.kill()
            daemon.process.kill()
            daemon.process.wait()
            out, err = p.communicate(timeout=WAIT)
            assert out, (args, err)
            if args == ["--json"]:
                got = one_line(out)
                if p.returncode == 0:
                    raise Skip("the answer came before residentd was killed")
                assert got["error"] and got["error"]["code"] < 10000 and got["error"]["message"], got
            assert p.returncode == 1 and b"closed the connection" in err, (args, p.returncode, err)
            assert not os.path.exists(u.last), "half a turn was kept"


# ---- the transcript ----


@case
def continued_conversation():
    with tempfile.TemporaryDirectory() as d, User(os.path.join(d, "s")) as u:
        with Daemon(path=u.socket) as daemon:
            first = u.json(*OFF, "-c", QUESTION, umask=0)
            assert mode(u.last) == 0o600 and mode(u.directory) == 0o700, "others can read the transcript"
            assert first["usage"]["cached_tokens"] == 0, first
            second = u.json(*OFF, "-c", "What is 2 + 2?")
            assert second["text"] == "2 + 2 = 4." and second["usage"]["cached_tokens"] > 0, second
            assert daemon.status()["sessions"] == 1
            before = u.turns()
            assert before == [("user", QUESTION), ("assistant", ANSWER), ("user", "What is 2 + 2?"),
                              ("assistant", "2 + 2 = 4.")], before
            session = u.transcript()["session"]
        with Daemon(path=u.socket) as daemon:
            third = u.json(*OFF, "-c", "What is 7 x 8?")
            assert third["usage"]["cached_tokens"] == 0, "what a new service cannot know"
            assert third["usage"]["prompt_tokens"] > second["usage"]["prompt_tokens"], (second, third)
            assert u.turns()[:4] == before and len(u.turns()) == 6, u.turns()
            assert u.transcript()["session"] != session

            # Something else uses the session: its turn is not part of this conversation.
            session = u.transcript()["session"]
            with daemon.client() as c:
                c.call("OpenSession", {"session": session})
                c.call("Send", {"session": session, "messages": user("Hello"), "options": slow(8)})
            fourth = u.json(*OFF, "-c", "What is 100 - 37?")
            assert fourth["usage"]["cached_tokens"] == 0 and u.transcript()["session"] != session, fourth
            assert len(u.turns()) == 8 and daemon.status()["sessions"] == 1

            u.ask("forget")
            assert not os.path.exists(u.last) and daemon.status()["sessions"] == 0
            u.ask("forget")
            u.ask(*OFF, "-c", QUESTION)
            assert len(u.turns()) == 2, u.turns()


@case
def plain_question_and_its_continuation(daemon):
    with User(daemon) as u:
        u.ask(*OFF, QUESTION)
        assert daemon.status()["sessions"] == 0, "a plain question leaves a session behind"
        assert u.turns() == [("user", QUESTION), ("assistant", ANSWER)], u.turns()
        u.ask(*OFF, "-n", "Hello")
        u.ask(*OFF, "-c", "-n", "Hello")
        assert len(u.turns()) == 2, "-n has changed the transcript"
        u.ask(*OFF, "-c", "Hello")
        assert len(u.turns()) == 4 and daemon.status()["sessions"] == 1
        u.ask(*OFF, QUESTION)
        assert len(u.turns()) == 2 and daemon.status()["sessions"] == 0, "the old session stays"
        u.ask(*OFF, "--", "forget")
        assert u.turns()[0] == ("user", "forget"), u.turns()


# ---- terminals ----


@case
def control_characters(daemon):
    with User(daemon) as u:
        args = (*WILD, "48", "--complete", "Once")
        piped, _ = u.ask(*args)
        if b"\x1b" not in piped:
            raise Skip("this seed gives no ESC here")
        for raw in (False, True):
            with Terminal(u, *args, *["--raw"][:raw], env={"TERM": "dumb"}, stdin=subprocess.DEVNULL) as t:
                screen = t.finish()
            assert (b"\x1b" in screen) == raw and (b"\\x1b" in screen) != raw, (raw, screen)


@case
def json_on_a_terminal():
    """Also with a DEL, which JSON allows as it is and a terminal does not get."""
    reply = {"tokens": [1], "pieces": ["a\x7f\x9b\u202e\n\x1b"]}
    with Fake(reply) as service, User(service.socket) as u:
        with Terminal(u, "--json", "tokenize", "x", program="residentctl") as t:
            screen = t.finish()
        os.unlink(service.socket)  # for the `forget` of the end
    assert not re.search(rb"[\x7f\x1b]|\xc2\x9b|\xe2\x80", screen), screen
    assert one_line(screen.replace(b"\r\n", b"\n")) == reply, screen


@case
def progress_is_shown_and_erased(daemon):
    with User(daemon) as u:
        with stopped(daemon), Terminal(u, *OFF, QUESTION, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as t:
            t.wait_for(rb"waiting")
            daemon.process.send_signal(signal.SIGCONT)
            out = t.process.stdout.read()
            screen = t.finish()
        assert out == ANSWER.encode(), out
        assert screen.endswith(ERASE), screen

        others = [daemon.client() for _ in range(4)]
        for c in others:
            c.send("Chat", {"messages": user(STORY), "options": slow()}, more=True)
            c.reply()
        with Terminal(u, *OFF, QUESTION, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as t:
            with frozen(daemon, lambda: t.shows(rb"waiting: \d before this")):
                pass
            for c in others:
                c.close()
            assert t.process.stdout.read() == ANSWER.encode()
            assert t.finish().endswith(ERASE)


@case
def plain_terminals(daemon):
    with User(daemon) as u:
        for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": ""}):
            with stopped(daemon), \
                    Terminal(u, "-t", "0", "--show-thinking", QUESTION, env=env, stdin=subprocess.DEVNULL) as t:
                t.wait_for(rb"waiting[^\r\n]*\r\n")
                daemon.process.send_signal(signal.SIGCONT)
                screen = t.finish()
            assert b"\x1b" not in screen and b"\r" not in screen.replace(b"\r\n", b""), (env, screen)
            assert screen.endswith(ANSWER.encode() + b"\r\n") and b"340 + 51" in screen, (env, screen)
        with Terminal(u, "-t", "0", "--show-thinking", QUESTION, stdin=subprocess.DEVNULL) as t:
            assert b"\x1b[2m1" in t.finish(), t.seen


# ---- the prompt ----

HELP_END = rb"begins with a slash\."
DUMB = {"TERM": "dumb"}


@case
def conversation_at_the_prompt(daemon):
    with User(daemon) as u, Terminal(u, *OFF, env=DUMB) as t:
        t.prompt(NAME.encode() + rb".*\n")
        t.type(b"What is 17 x 23?\r")
        t.wait_for(rb"17 x 23 = 391\.\r\n")
        t.type(b"What is \\\r2 + 2?\r")
        t.wait_for(rb"\. ")
        eventually("the second turn is kept", lambda: t.take(0.05) and len(u.turns()) == 4)
        assert u.turns()[2] == ("user", "What is \n2 + 2?"), u.turns()
        t.type(b"/help\r")
        t.wait_for(HELP_END)
        t.type(b"/nonsense\r")
        t.wait_for(rb"no such command")
        saved = os.path.join(u.home, "saved")
        t.type(b"/save " + saved.encode() + b"\r")
        t.type(b"/save " + saved.encode() + b"\r")
        t.wait_for(rb"saved: File exists")
        with open(saved, encoding="utf-8") as f:
            assert ANSWER in f.read() and mode(saved) == 0o600
        t.type(b"/new\r")
        t.wait_for(rb"a new conversation\r\n")
        t.type(b"/system You are a cat.\r")
        t.wait_for(rb"with this system text")
        t.type(b"/paste\r")
        t.wait_for(rb"ends it")
        t.type(b"What is\r7 x 8?\r.\r")
        eventually("the pasted message is answered",
                   lambda: t.take(0.05) and u.turns()[0] == ("system", "You are a cat.") and len(u.turns()) == 3)
        assert u.turns()[1] == ("user", "What is\n7 x 8?\n"), u.turns()
        t.type(b"//quit\r")
        eventually("a line with a slash is sent", lambda: t.take(0.05) and len(u.turns()) == 5)
        assert u.turns()[3] == ("user", "/quit"), u.turns()
        t.type(b"/quit\r")
        t.finish()
        history = os.path.join(u.directory, "history")
        assert mode(history) == 0o600 and mode(u.last) == 0o600
        with open(history, encoding="utf-8") as f:
            assert "17" in f.read()
        assert daemon.status()["sessions"] == 1, "the session of the last conversation is kept for -c"
        assert u.json(*OFF, "-c", "Hello")["usage"]["cached_tokens"] > 0
        u.ask("forget")


@case
def prompt_takes_letters_that_are_not_ascii(daemon):
    with User(daemon) as u, Terminal(u, *OFF, env={**DUMB, "LC_ALL": "C"}) as t:
        t.prompt()
        t.type("Gr\u00fc\u00dfe, \u4f60\u597d\r".encode())
        eventually("the turn is kept", lambda: t.take(0.05) and os.path.exists(u.last))
        assert u.turns()[0] == ("user", "Gr\u00fc\u00dfe, \u4f60\u597d"), u.turns()
        t.type(b"/quit\r")
        t.finish()


@case
def end_of_file_on_a_continuation_line(daemon):
    """It sends what there is, and the prompt comes again."""
    with User(daemon) as u, Terminal(u, *OFF, env=DUMB) as t:
        t.prompt()
        t.type(b"What is 17 x 23?\\\r")
        t.prompt(mark=rb"\. ")
        t.type(b"\x04")
        t.prompt()
        assert u.turns()[0] == ("user", "What is 17 x 23?\n"), u.turns()
        t.type(b"\x04")
        t.finish()


@case
def interrupt_at_the_prompt(daemon):
    with User(daemon) as u, Terminal(u, *LONG, env=DUMB) as t:
        t.prompt()
        t.type(b"this is dropped")
        t.wait_for(rb"dropped")
        t.type(b"\x03")
        t.prompt()
        t.type(STORY.encode() + b"\r")
        t.wait_for(rb"story\.\s*\n")
        with frozen(daemon, lambda: t.shows(rb"[^\s]")):
            t.type(b"\x03")
        t.type(b"/help\r")
        t.prompt(HELP_END + rb"\r\n")
        (_, question), (_, answer) = u.turns()
        assert question == STORY and 0 < len(answer.encode()) < 7000, u.turns()
        for _ in range(100):  # however fast they come, here they do not end the program
            t.type(b"\x03")
            time.sleep(0.0005)
        # The last of them may have dropped the first of these.
        eventually("it ends", lambda: t.type(b"/quit\r") or not t.take(0.2))
        t.finish()


@case
def prompt_continues_and_saves_nothing_when_told(daemon):
    with User(daemon) as u:
        u.ask(*OFF, QUESTION)
        with Terminal(u, *OFF, "-c", env=DUMB) as t:
            t.prompt()
            t.type(b"Hello\r")
            t.prompt(rb"help you\?\r\n")
            t.type(b"\x04")
            t.finish()
        before = u.transcript()
        assert len(before["turns"]) == 4, before
        with Terminal(u, *OFF, "-n", env=DUMB) as t:
            t.prompt()
            t.type(b"Thank you\r")
            t.prompt(rb"welcome!\r\n")
            t.type(b"\x04")
            t.finish()
        assert u.transcript() == before
        assert daemon.status()["sessions"] == 1
        u.ask("forget")


# ---- residentctl ----


@case
def ctl_status_and_usage(daemon):
    with User(daemon) as u:
        u.ask("-n", *OFF, QUESTION)
        out, err = u.ctl("status")
        lines = dict(re.findall(r"^ *(\w+)  (.*)$", out.decode(), re.M))
        assert list(lines) == ["state", "model", "context", "work", "speed", "memory", "experts", "budget", "total",
                               "service", "GPU"], out
        assert err == "", err
        assert lines["state"] == "available" and lines["model"].startswith(NAME), lines
        assert str(daemon.pid) in lines["service"], lines
        assert lines["experts"].startswith("unmanaged: "), lines
        assert one_line(u.ctl("--json", "status")[0])["pid"] == daemon.pid
        assert u.ctl("availability") == (f"available: {NAME}\n".encode(), "")
        assert one_line(u.ctl("availability", "--json")[0])["state"] == "available"
        own = one_line(u.ctl("--json", "usage")[0])
        out, _ = u.ctl("usage")
        assert own == daemon.call("GetUsage") and own["requests"] > 0, own
        assert f"requests  {own['requests']}\n" in out.decode(), out
        out, _ = u.ctl("model", "list")
        assert out.startswith(NAME.encode() + b"  qwen35moe, ") and b"elsewhere" in out and out.count(b"\n") == 1, out
        assert one_line(u.ctl("--json", "model", "list")[0])["models"][0]["name"] == NAME


@case
def ctl_tokenize_and_interface(daemon):
    with User(daemon) as u:
        for args, special in (([], False), (["--special"], True)):
            text = "Hello\n<|im_end|>"
            expected = daemon.call("Tokenize", {"text": text, "special": special})
            out, _ = u.ctl("tokenize", *args, "--", text)
            got = [line.split(None, 1) for line in out.decode().splitlines()]
            assert [int(n) for n, _ in got] == expected["tokens"], (out, expected)
            assert [json.loads(piece) for _, piece in got] == expected["pieces"], (out, expected)
            assert one_line(u.ctl("--json", *args, "tokenize", text)[0]) == expected
        with open(INTERFACE, "rb") as f:
            assert u.ctl("interface") == (f.read(), "")


@case
def ctl_replies_of_the_wrong_type():
    usage = {k: 1 for k in ("requests", "prompt_tokens", "cached_tokens", "answer_tokens", "thought_tokens", "engine_us")}
    model = {"name": "m", "architecture": "a", "parameters": 1, "weight_bytes": 1}
    right = {("usage",): usage, ("tokenize", "x"): {"tokens": [1], "pieces": ["x"]}, ("interface",): {"description": "x"},
             ("model", "list"): {"models": [model]}}
    wrong = {("usage",): [{}, {**usage, "requests": "1"}, {**usage, "engine_us": 1.5}, {**usage, "cached_tokens": -1}],
             ("tokenize", "x"): [{}, {"tokens": [1]}, {"tokens": [1], "pieces": []}, {"tokens": ["1"], "pieces": ["x"]},
                                 {"tokens": [1], "pieces": [1]}, {"tokens": 1, "pieces": "x"}],
             ("interface",): [{}, {"description": 1}, {"description": None}],
             ("model", "list"): [{}, {"models": {}}, {"models": [1]}, {"models": [{**model, "name": 1}]},
                                 {"models": [{**model, "weight_bytes": "1"}]}]}
    with Fake({}) as service, User(service.socket) as u:
        for args, replies in wrong.items():
            service.reply = right[args]
            assert u.ctl(*args)[0]
            for service.reply in replies:
                u.fails(1, ["does not speak the protocol"], *args, program="residentctl")
        os.unlink(service.socket)  # for the `forget` of the end


@case
def names_that_are_not_utf8():
    with tempfile.TemporaryDirectory() as d, User("/nonexistent/socket") as u:
        env = {"RESIDENTD_MODELS": os.path.join(d, "models")}
        file = os.path.join(os.fsencode(d), b"m\xff.gguf")
        shutil.copy(MODEL, file)
        got = one_line(u.ctl("--json", "model", "add", "--name", b"n\xff", file, env=env)[0])
        assert got["file"].startswith("n-") and got["default"], got
        # One that somebody has copied there by hand.
        shutil.copy(MODEL, os.path.join(os.fsencode(env["RESIDENTD_MODELS"]), b"z\xff.gguf"))
        assert b"z\xff  8.4 MB" in u.ctl("model", "list", env=env)[0]
        for status, *args in ((1, "list"), (1, "show", b"z\xff"), (2, "default", b"z\xff"), (2, "remove", b"z\xff")):
            u.fails(status, ["UTF-8"], "--json", "model", *args, program="residentctl", env=env)
        u.ctl("model", "remove", b"z\xff", env=env)
        assert len(one_line(u.ctl("--json", "model", "list", env=env)[0])["models"]) == 1


@case
def model_add():
    with tempfile.TemporaryDirectory() as d:
        models = os.path.join(d, "models")
        env = {"RESIDENTD_MODELS": models}
        default = os.path.join(models, "default.gguf")

        def add(*args, **kw):
            return u.ctl("model", "add", *args, env=env, umask=0o077, **kw)

        with Daemon(model=None, env=env) as daemon, User(daemon) as u:
            u.ask(QUESTION, status=4)
            assert b"model add FILE" in u.ctl("model", "list", env=env)[0]

            broken = os.path.join(d, "broken.gguf")
            with open(MODEL, "rb") as f, open(broken, "wb") as g:
                g.write(f.read(100_000))
            for path, word in ((broken, "broken.gguf"), (os.path.join(d, "absent.gguf"), "absent.gguf"), (d, d)):
                out, err = add(path, status=1)
                assert out == b"" and word in err and models not in err, (out, err)
                assert not os.path.exists(models) or os.listdir(models) == [], os.listdir(models)

            out, err = add(MODEL)
            name = re.search(rb"Tiny-Qwen35MoE-stories-Q8_0-[0-9a-f]{12}\.gguf", out)[0].decode()
            record = name.replace(".gguf", ".json")
            assert b"systemctl reload residentd" in out and err == "", (out, err)
            assert sorted(os.listdir(models)) == [name, record, "default.gguf"], os.listdir(models)
            assert mode(os.path.join(models, name)) == mode(os.path.join(models, record)) == 0o644
            assert mode(models) == 0o755
            assert os.readlink(default) == name, os.readlink(default)
            with open(MODEL, "rb") as f, open(os.path.join(models, name), "rb") as g:
                assert f.read() == g.read(), "the copy differs"
            daemon.process.send_signal(signal.SIGHUP)
            eventually("the model is loaded", lambda: daemon.call("GetAvailability")["state"] == "available")
            assert u.ask("-n", *OFF, QUESTION)[0] == ANSWER.encode()

            other = os.path.join(d, "other")  # the same content
            shutil.copy(MODEL, other)
            assert name.encode() in add(other)[0] and len(os.listdir(models)) == 3
            with open(other, "rb") as f:
                data = f.read()
            with open(other, "wb") as f:
                f.write(data.replace(b"Toy model", b"My  model", 1))
            got = one_line(add("--json", "--name", "other", other)[0])
            assert got["bytes"] == len(data) and got["file"].startswith("other-") and not got["default"], got
            assert os.readlink(default) == name, "the default is another model now"
            got = one_line(add("--json", "--default", other)[0])
            assert got["default"] and got["existed"], got
            assert os.readlink(default) == got["file"]
            daemon.check_alive()


@case
def model_commands():
    with tempfile.TemporaryDirectory() as d:
        env = {"RESIDENTD_MODELS": os.path.join(d, "models")}
        with Daemon() as daemon, User(daemon) as u:
            u.ctl("model", "add", "--name", "First", MODEL, env=env)
            out, _ = u.ctl("model", "list", env=env)
            assert re.fullmatch(rb"First-[0-9a-f]{12}  8\.4 MB, licence other, default, loaded\n", out), out
            got = one_line(u.ctl("--json", "model", "list", env=env)[0])["models"]
            assert len(got) == 1 and got[0]["title"] == NAME and got[0]["loaded"], got
            lines = dict(re.findall(r"^ *(\w+)  (.*)$", u.ctl("model", "show", "First", env=env)[0].decode(), re.M))
            assert lines["title"] == NAME and lines["sha256"] == got[0]["sha256"] and lines["loaded"] == "yes", lines
            u.fails(1, ["Second"], "model", "show", "Second", program="residentctl", env=env)
            u.fails(1, ["loaded", "--force"], "model", "remove", "First", program="residentctl", env=env)
            assert b"default model now" in u.ctl("model", "default", got[0]["file"], env=env)[0]
            out, _ = u.ctl("model", "remove", "--force", "First", env=env)
            assert b"removed" in out and os.listdir(env["RESIDENTD_MODELS"]) == [], out
            u.fails(2, ["number of arguments"], "model", "remove", program="residentctl", env=env)


@case
def split_model_add():
    with tempfile.TemporaryDirectory() as d, User("/nonexistent/socket") as u:
        models = os.path.join(d, "models")
        env = {"RESIDENTD_MODELS": models}
        paths = split(MODEL, os.path.join(d, "split"), 2)
        names = [os.path.basename(p) for p in paths]
        u.fails(1, [names[0]], "model", "add", paths[1], program="residentctl", env=env)
        got = one_line(u.ctl("--json", "model", "add", "--name", "s", paths[0], env=env)[0])
        first = got["file"]
        assert re.fullmatch(r"s-[0-9a-f]{12}-00001-of-00002\.gguf", first) and got["default"], got
        expected = sorted([first, first.replace("-00001-", "-00002-"), first[:14] + ".json", "default.gguf"])
        assert sorted(os.listdir(models)) == expected, os.listdir(models)
        assert os.readlink(os.path.join(models, "default.gguf")) == first
        with Daemon(model=os.path.join(models, first)) as daemon:
            daemon.check_alive()

        os.unlink(paths[1])
        u.fails(1, [names[1]], "model", "add", paths[0], program="residentctl", env=env)
        assert sorted(os.listdir(models)) == expected, "a refused model took another with it"


@case
def interrupted_model_add():
    with tempfile.TemporaryDirectory() as d, User("/nonexistent/socket") as u:
        models = os.path.join(d, "models")
        path = shutil.copy(MODEL, os.path.join(d, "large.gguf"))
        os.truncate(path, 3 << 30)
        with Terminal(u, "model", "add", path, program="residentctl", env={"RESIDENTD_MODELS": models},
                      stdin=subprocess.DEVNULL) as t:
            t.wait_for(rb"(needs .* available|shares the blocks)[^%]*(copying|reading)")
            t.process.send_signal(signal.SIGINT)
            while t.take(WAIT):
                pass
            assert t.process.wait(WAIT) == 1 and b"interrupted" in t.seen, t.seen
        assert os.listdir(models) == [], os.listdir(models)


if __name__ == "__main__":
    main(Daemon)
