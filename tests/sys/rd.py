# SPDX-License-Identifier: MIT
"""A residentd of one's own, a plain Varlink client, and a list of cases: what the scripts in tests/sys and tests/golden share.

The client is written from policy/org.residentd.varlink alone and shares no code with libresident. Each script registers
cases with @case and ends with main(); a case passes by returning, fails by raising, is skipped by raising Skip(reason).
"""
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
BUILD = os.path.join(ROOT, os.environ.get("O", "build"))
MODEL = os.path.join(ROOT, "tests/models/tiny-qwen35moe-stories-q8_0.gguf")
INTERFACE = os.path.join(ROOT, "policy/org.residentd.varlink")
RESIDENTD = os.path.join(BUILD, "residentd")
OURS = "org.residentd.Inference."
SERVICE = "org.varlink.service."
WAIT = 60  # seconds for anything that must happen; generous, because sanitizer builds on busy machines are slow

# An answer that takes its time: end-of-turn and end-of-text are forbidden, so only the length ends it.
END_TOKENS = {"2043": -1000.0, "2045": -1000.0}


class Skip(Exception):
    pass


def sanitized():
    with open(RESIDENTD, "rb") as f:
        return b"__asan_init" in f.read()


def user(text):
    return [{"role": "user", "content": text}]


def slow(max_tokens=1500, **options):
    return {"max_tokens": max_tokens, "max_thinking_tokens": 0, "temperature": 0.8, "seed": 1,
            "logit_bias": END_TOKENS, **options}


def eventually(what, condition, seconds=WAIT):
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)
    return value


class Error(Exception):
    """An error reply."""

    def __init__(self, name, parameters):
        super().__init__(f"{name} {parameters}")
        self.name = name
        self.parameters = parameters


class Closed(Exception):
    """The daemon closed the connection."""


class Torn(Closed):
    """... in the middle of a frame."""


class Client:
    def __init__(self, path, timeout=WAIT):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(timeout)
        self.sock.connect(path)
        self.pending = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.sock.close()

    def send_bytes(self, data):
        self.sock.sendall(data)

    def send(self, method, parameters=None, more=False, oneway=False):
        call = {"method": method if "." in method else OURS + method, "parameters": parameters or {}}
        if more:
            call["more"] = True
        if oneway:
            call["oneway"] = True
        self.send_bytes(json.dumps(call).encode() + b"\0")

    def frame(self):
        """The next message as it is: a dict. Raises Closed at the end of the stream."""
        while b"\0" not in self.pending:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError as e:
                raise Closed from e
            if not data:
                if self.pending:
                    raise Torn(f"{self.pending[:200]!r}")
                raise Closed
            self.pending += data
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)

    def reply(self):
        """The parameters of the next message and whether more follow; raises Error for an error reply."""
        message = self.frame()
        if "error" in message:
            raise Error(message["error"], message.get("parameters", {}))
        return message.get("parameters", {}), message.get("continues", False)

    def call(self, method, parameters=None):
        self.send(method, parameters)
        parameters, continues = self.reply()
        assert not continues, "an answer to a call without `more` says that it continues"
        return parameters

    def stream(self, method, parameters):
        """Sends with `more` and yields the frames as they come."""
        self.send(method, parameters, more=True)
        yield from self.frames()

    def frames(self):
        continues = True
        while continues:
            parameters, continues = self.reply()
            yield parameters

    def expect(self, error, method, parameters=None):
        """The call must fail with this error; returns the error's parameters."""
        try:
            got = self.call(method, parameters)
        except Error as e:
            assert e.name == error, f"{method}: {e.name} {e.parameters}, expected {error}"
            if error.startswith(OURS):
                check_error(e)
            return e.parameters
        raise AssertionError(f"{method}: answered {str(got)[:200]}, expected {error}")


def check_error(e):
    """Every error of the interface has its number and a message for people."""
    number, message = e.parameters.get("number"), e.parameters.get("message")
    assert isinstance(number, int) and 1 <= number <= 18, f"{e.name} without its number: {e.parameters}"
    assert isinstance(message, str) and message, f"{e.name} without a message: {e.parameters}"


def text_of(frames, channel="answer"):
    return "".join(f.get("text") or "" for f in frames if (f.get("channel") or "answer") == channel)


class Daemon:
    """A private residentd; leaves nothing behind. conf: lines of residentd.conf by section; args: more options."""

    def __init__(self, model=MODEL, conf=None, env=None, wait=True, sockets=None, path=None, args=()):
        # A short path: a socket's name has 108 bytes.
        self.dir = tempfile.mkdtemp(prefix="rd-", dir="/tmp")
        os.chmod(self.dir, 0o755)
        self.socket = path or os.path.join(self.dir, "s")
        self.conf = os.path.join(self.dir, "residentd.conf")
        self.log_path = os.path.join(self.dir, "log")
        self.expected_status = 0
        self.write_conf(conf or {})
        command = [RESIDENTD, "--config", self.conf, *args]
        if model:
            command += ["--model", model]
        if sockets is None:
            command += ["--socket", self.socket]
        environment = {k: v for k, v in os.environ.items()
                       if k not in ("NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC",
                                    "WATCHDOG_PID", "JOURNAL_STREAM")}
        if sanitized():  # freed memory that ASan keeps would look like a leak to the cases that watch the size
            environment["ASAN_OPTIONS"] = environment.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=4"
        # A private service has no business on the machine's bus.
        environment["DBUS_SYSTEM_BUS_ADDRESS"] = "unix:path=/nonexistent"
        # What others use of the memory must not decide what is cached.
        environment["MEMORY_PRESSURE_WATCH"] = "/dev/null"
        environment.update(env or {})
        if sockets is not None:
            # The number of the process that will be residentd is known to itself only.
            script = 'i=3; for fd; do [ "$fd" = -- ] && break; eval "exec $i<&$fd"; i=$((i+1)); shift; done; ' \
                     'shift; LISTEN_PID=$$ exec "$@"'
            environment["LISTEN_FDS"] = str(len(sockets))
            command = ["sh", "-c", script, "sh"] + [str(s.fileno()) for s in sockets] + ["--"] + command
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, pass_fds=[s.fileno() for s in sockets or []])
        self.pid = self.process.pid
        if wait:
            try:
                self.wait_until_up()
            except BaseException:
                self.__exit__(*sys.exc_info())
                raise

    def write_conf(self, conf):
        with open(self.conf, "w", encoding="utf-8") as f:
            for section, values in conf.items():
                f.write(f"[{section}]\n")
                f.writelines(f"{key}={value}\n" for key, value in values.items())

    def wait_until_up(self):
        def up():
            if self.process.poll() is not None:
                raise AssertionError(f"residentd ended with {self.process.returncode} at its start:\n{self.log()}")
            with contextlib.suppress(OSError, Closed):
                with Client(self.socket) as c:
                    return c.call("GetAvailability")["state"] != "loading"
            return False
        eventually("residentd answers and has loaded", up)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if self.process.poll() is None:
                self.stop()
            status = self.process.returncode
            if kind is None and status != self.expected_status:
                raise AssertionError(f"residentd ended with status {status}:\n{self.log()[-6000:]}")
            if kind is not None:
                print("---- residentd's log:\n" + self.log()[-6000:] + "----")
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            shutil.rmtree(self.dir, ignore_errors=True)

    def stop(self, seconds=WAIT):
        """SIGTERM; returns how long it took."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"residentd ignores SIGTERM for {seconds} s:\n{self.log()[-6000:]}") from None
        return time.monotonic() - begin

    def client(self, **kw):
        return Client(self.socket, **kw)

    def call(self, method, parameters=None):
        with self.client() as c:
            return c.call(method, parameters)

    def status(self):
        return self.call("GetStatus")

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as f:
            return f.read()

    def check_alive(self):
        """Another client gets an answer from the model, and nothing of earlier requests is left in the queue."""
        assert self.process.poll() is None, f"residentd is gone, status {self.process.returncode}:\n{self.log()[-6000:]}"
        answer = self.call("Chat", {"messages": user("What is 17 x 23?"),
                                    "options": {"temperature": 0, "max_thinking_tokens": 0}})
        assert answer["text"] == "17 x 23 = 391.", answer

    def rss_anon(self):
        with open(f"/proc/{self.pid}/status", encoding="ascii") as f:
            for line in f:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon in /proc/PID/status")

    def n_fds(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))


CASES = []


def case(function):
    CASES.append(function)
    return function


def main(shared=None):
    """Runs the cases; those with a parameter get the shared daemon, which must answer another client after each."""
    only = sys.argv[1:]
    failed = False
    if not os.access(RESIDENTD, os.X_OK):
        sys.exit(f"{RESIDENTD} is not built")
    try:
        with (shared() if shared else contextlib.nullcontext()) as daemon:
            for function in CASES:
                name = function.__name__.replace("_", " ")
                if only and function.__name__ not in only:
                    continue
                try:
                    if function.__code__.co_argcount:
                        function(daemon)
                        daemon.check_alive()
                    else:
                        function()
                    print(f"ok - {name}", flush=True)
                except Skip as e:
                    print(f"skip - {name}: {e}", flush=True)
                except Exception as e:
                    failed = True
                    traceback.print_exc(file=sys.stdout)
                    print(f"not ok - {name}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}", flush=True)
            if daemon and failed:
                print("---- the shared residentd's log:\n" + daemon.log()[-6000:] + "----")
    except AssertionError as e:
        print(f"not ok - the shared residentd: {e}")
        failed = True
    sys.exit(1 if failed else 0)
