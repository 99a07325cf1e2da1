# SPDX-License-Identifier: MIT
"""A memory control group with a limit, in either version of control groups, for one test or measurement.

Knows the two interfaces from the kernel's documentation only. Raises Unavailable with a reason where a group cannot be
made: not root, no memory controller, or none that may be handed on to a child.
"""
import contextlib
import os
import re
import time


class Unavailable(Exception):
    pass


def read(*path):
    with open(os.path.join(*path), encoding="ascii") as f:
        return f.read()


def write(value, *path):
    with open(os.path.join(*path), "w", encoding="ascii") as f:
        f.write(str(value))


def own_group(v1):
    """As /proc/self/cgroup has it, or None."""
    for line in read("/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") if v1 else number == "0":
            return path
    return None


def mount_of(v1):
    """Where the hierarchy is mounted, and which group that shows; or (None, None)."""
    for line in read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if (kind == "cgroup" and "memory" in options.split(",")) if v1 else kind == "cgroup2":
            _, _, _, root, point = left.split(" ")[:5]
            return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), point), root
    return None, None


def own_directory(v1):
    """(the directory of the group that this process is in, the mount point), or (None, None)."""
    group = own_group(v1)
    point, root = mount_of(v1)
    if group is None or point is None:
        return None, None
    rest = os.path.relpath(group, root)
    return (point if rest.startswith("..") or rest == "." else os.path.join(point, rest)), point


def parent_directory():
    """A directory in which a group with a memory limit can be made, and whether it is of version 1."""
    if os.geteuid() != 0:
        raise Unavailable("not root: no memory control group can be made")
    own, point = own_directory(True)
    if own:
        return own, True
    own, point = own_directory(False)
    # A group that holds processes hands no controller on; one above it may.
    while own and own.startswith(point):
        with contextlib.suppress(OSError):
            if "memory" in read(own, "cgroup.subtree_control").split():
                return own, False
        own = os.path.dirname(own)
    raise Unavailable("no memory control group can be made here: no memory controller, or none that is handed on")


class MemoryGroup:
    def __init__(self, limit, name="residentd-test"):
        parent, self.v1 = parent_directory()
        self.path = os.path.join(parent, f"{name}-{os.getpid()}")
        try:
            os.mkdir(self.path)
        except OSError as e:
            raise Unavailable(f"{self.path}: {e.strerror}") from e
        try:
            self.home = own_directory(self.v1)[0]
            write(limit, self.path, "memory.limit_in_bytes" if self.v1 else "memory.max")
            with contextlib.suppress(OSError):  # without swap accounting there is nothing to forbid
                write(0, self.path, "memory.swappiness" if self.v1 else "memory.swap.max")
        except OSError as e:
            os.rmdir(self.path)
            raise Unavailable(f"{self.path}: {e.strerror}") from e
        self.limit = limit

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # The last process may be a moment away from being gone.
        for _ in range(100):
            try:
                os.rmdir(self.path)
                return
            except OSError:
                time.sleep(0.05)
        raise OSError(f"{self.path} cannot be removed: {read(self.path, 'cgroup.procs').split()} are in it")

    @contextlib.contextmanager
    def joined(self):
        """Processes that are started meanwhile are in the group; what this one allocates then is charged to it too."""
        write(0, self.path, "cgroup.procs")
        try:
            yield
        finally:
            write(0, self.home, "cgroup.procs")

    def usage(self):
        return int(read(self.path, "memory.usage_in_bytes" if self.v1 else "memory.current"))

    def peak(self):
        """Since it was made; None where the kernel does not keep it (v2 before 5.19)."""
        with contextlib.suppress(OSError):
            return int(read(self.path, "memory.max_usage_in_bytes" if self.v1 else "memory.peak"))
        return None

    def times_full(self):
        """How often something had to be reclaimed because the limit was reached."""
        return int(read(self.path, "memory.failcnt")) if self.v1 else self.number("memory.events", "max")

    def n_killed(self):
        return self.number("memory.oom_control" if self.v1 else "memory.events", "oom_kill")

    def number(self, file, key):
        for line in read(self.path, file).splitlines():
            if line.split(" ")[0] == key:
                return int(line.split(" ")[1])
        return 0
