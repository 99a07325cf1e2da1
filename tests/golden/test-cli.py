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
import stat
import struct
import subprocess
import sys
import tempfile
import termios
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../sys"))
from rd import BUILD, INTERFACE, MODEL, WAIT, Daemon, Skip, case, eventually, main, slow, user

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
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "RESIDENTD_MODELS")}
        return {**env, "HOME": self.home, "XDG_STATE_HOME": os.path.join(self.home, "state"), "TERM": "xterm",
                "LC_ALL": "C.UTF-8", "RESIDENTD_SOCKET": self.socket, **(more or {})}

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

    def start(self, *args, **kw):
        return subprocess.Popen([os.path.join(BUILD, "resident"), *args], stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment(), **kw)

    def transcript(self):
        with open(self.last, encoding="utf-8") as f:
            return json.load(f)

    def turns(self):
        return [(t["role"], t["content"]) for t in self.transcript()["turns"]]


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

    def prompt(self, before=b""):
        """Waits for the prompt, and for the editor behind it: a Ctrl-D or Ctrl-C before means something else."""
        self.wait_for(before + rb"> ")
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
                     ["model", "add"], ["model", "remove", "x"]):
            u.fails(2, ["residentctl"], *args, program="residentctl")
        os.makedirs(u.directory)
        with open(u.last, "w", encoding="utf-8") as f:
            f.write('{"turns": [')
        u.fails(2, ["resident forget"], *OFF, "-c", QUESTION)
        u.ask("forget")
        assert u.ask(*OFF, "-c", QUESTION)[0] == ANSWER.encode()


@case
def status_1_the_service_refuses(daemon):
    with User(daemon) as u:
        u.fails(1, ["top_p"], "--top-p", "7", QUESTION)
        got = u.json("--top-p", "7", QUESTION, status=1)
        assert got["error"]["code"] == 10005 and "top_p" in got["error"]["message"], got
        assert got["text"] == "" and got["stop_reason"] is None, got


@case
def status_1_the_answer_cannot_be_written(daemon):
    with User(daemon) as u, open("/dev/full", "wb") as full:
        done = subprocess.run([os.path.join(BUILD, "resident"), *OFF, QUESTION], stdin=subprocess.DEVNULL, stdout=full,
                              stderr=subprocess.PIPE, timeout=WAIT, env=u.environment(), check=False)
        assert done.returncode == 1 and b"No space left" in done.stderr, done


@case
def status_3_no_service():
    with User("/nonexistent/socket") as u:
        for args in ([QUESTION], ["-c", QUESTION], ["--complete", QUESTION], ["--json", QUESTION]):
            u.fails(3, ["/nonexistent/socket", "residentd.socket"], *args)
        for command in ("status", "availability", "usage", "interface"):
            u.fails(3, ["/nonexistent/socket", "residentd.socket"], command, program="residentctl")
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
        t.type(b"\x04")
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
        assert list(lines) == ["state", "model", "context", "work", "speed", "memory", "total", "service"], out
        assert err == "", err
        assert lines["state"] == "available" and lines["model"].startswith(NAME), lines
        assert str(daemon.pid) in lines["service"], lines
        assert one_line(u.ctl("--json", "status")[0])["pid"] == daemon.pid
        assert u.ctl("availability") == (f"available: {NAME}\n".encode(), "")
        assert one_line(u.ctl("availability", "--json")[0])["state"] == "available"
        own = one_line(u.ctl("--json", "usage")[0])
        out, _ = u.ctl("usage")
        assert own == daemon.call("GetUsage") and own["requests"] > 0, own
        assert f"requests  {own['requests']}\n" in out.decode(), out
        out, _ = u.ctl("model", "list")
        assert out.startswith(NAME.encode() + b"  qwen35moe, ") and out.count(b"\n") == 1, out
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


def split_part(no, count):
    """Part no (from 0) of a split GGUF file, with one tensor of one f32 number in it."""
    def string(text):
        return struct.pack("<Q", len(text)) + text
    keys = [(b"general.architecture", struct.pack("<I", 8) + string(b"none")), (b"split.no", struct.pack("<IH", 2, no)),
            (b"split.count", struct.pack("<IH", 2, count)), (b"split.tensors.count", struct.pack("<Ii", 5, count))]
    data = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys)) + b"".join(string(key) + value for key, value in keys)
    data += string(b"tensor.%d" % no) + struct.pack("<IQIQ", 1, 1, 0, 0)
    return data + bytes(-len(data) % 32) + struct.pack("<f", 1.0) + bytes(28)


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

            broken = os.path.join(d, "broken.gguf")
            with open(MODEL, "rb") as f, open(broken, "wb") as g:
                g.write(f.read(100_000))
            for path, word in ((broken, "broken.gguf"), (os.path.join(d, "absent.gguf"), "absent.gguf"), (d, d)):
                out, err = add(path, status=1)
                assert out == b"" and word in err, (out, err)
                assert not os.path.exists(models) or os.listdir(models) == [], os.listdir(models)

            out, err = add(MODEL)
            name = os.path.basename(MODEL)
            assert name.encode() in out and b"systemctl reload residentd" in out and err == "", (out, err)
            assert sorted(os.listdir(models)) == ["default.gguf", name], os.listdir(models)
            assert mode(os.path.join(models, name)) == 0o644 and mode(models) == 0o755
            assert os.readlink(default) == name, os.readlink(default)
            with open(MODEL, "rb") as f, open(os.path.join(models, name), "rb") as g:
                assert f.read() == g.read(), "the copy differs"
            daemon.process.send_signal(signal.SIGHUP)
            eventually("the model is loaded", lambda: daemon.call("GetAvailability")["state"] == "available")
            assert u.ask("-n", *OFF, QUESTION)[0] == ANSWER.encode()

            before = sorted(os.listdir(models))
            assert "--replace" in add(MODEL, status=1)[1]
            assert name.encode() in add("--replace", MODEL)[0]
            assert sorted(os.listdir(models)) == before

            other = os.path.join(d, "other")  # without .gguf
            shutil.copy(MODEL, other)
            got = one_line(add("--json", other)[0])
            assert got == {"directory": models, "name": "other.gguf", "bytes": os.path.getsize(MODEL),
                           "default": False}, got
            assert os.readlink(default) == name, "the default is another model now"
            assert one_line(add("--json", "--default", "--replace", other)[0])["default"]
            assert os.readlink(default) == "other.gguf"
            daemon.check_alive()


@case
def split_model_add():
    with tempfile.TemporaryDirectory() as d, User("/nonexistent/socket") as u:
        models = os.path.join(d, "models")
        env = {"RESIDENTD_MODELS": models}
        names = [f"split-0000{i}-of-00002.gguf" for i in (1, 2)]
        for i, name in enumerate(names):
            with open(os.path.join(d, name), "wb") as f:
                f.write(split_part(i, 2))
        u.fails(1, [names[0]], "model", "add", os.path.join(d, names[1]), program="residentctl", env=env)
        got = one_line(u.ctl("--json", "model", "add", os.path.join(d, names[0]), env=env)[0])
        assert got["name"] == names[0] and got["default"], got
        assert sorted(os.listdir(models)) == ["default.gguf", *names], os.listdir(models)
        assert os.readlink(os.path.join(models, "default.gguf")) == names[0]

        os.unlink(os.path.join(d, names[1]))
        u.fails(1, [names[1]], "model", "add", "--replace", os.path.join(d, names[0]), program="residentctl", env=env)
        assert sorted(os.listdir(models)) == ["default.gguf", *names], "a refused model took another with it"


if __name__ == "__main__":
    main(Daemon)
