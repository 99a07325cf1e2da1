# SPDX-License-Identifier: MIT
"""Takes a GGUF file apart into a split model, as publishers of large ones do. Knows the format from its specification only."""
import struct

FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


def number(data, at, form):
    return struct.unpack_from("<" + form, data, at)[0], at + struct.calcsize("<" + form)


def after_string(data, at):
    length, at = number(data, at, "Q")
    return at + length


def after_value(data, at, kind):
    if kind == STRING:
        return after_string(data, at)
    if kind != ARRAY:
        return at + FIXED[kind]
    kind, at = number(data, at, "I")
    n, at = number(data, at, "Q")
    if kind in FIXED:
        return at + n * FIXED[kind]
    for _ in range(n):
        at = after_value(data, at, kind)
    return at


def string(text):
    return struct.pack("<Q", len(text)) + text


def align(n):
    return -n % 32


def read(data):
    """The keys as they lie there, how many, and the tensors: (record up to its offset, bytes)."""
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    at = 24
    for _ in range(n_keys):
        at = after_string(data, at)
        kind, at = number(data, at, "I")
        at = after_value(data, at, kind)
    keys, tensors = data[24:at], []
    for _ in range(n_tensors):
        begin = at
        at = after_string(data, at)
        n_dims, at = number(data, at, "I")
        at += 8 * n_dims + 4
        offset, end = number(data, at, "Q")
        tensors.append((data[begin:at], offset))
        at = end
    base = at + align(at)
    ends = sorted([offset for _, offset in tensors] + [len(data) - base])
    return keys, n_keys, [(record, data[base + offset:base + ends[ends.index(offset) + 1]]) for record, offset in tensors]


def write(keys, n_keys, tensors, no, count, n_tensors):
    keys += b"".join(string(key) + value for key, value in (
        (b"split.no", struct.pack("<IH", 2, no)), (b"split.count", struct.pack("<IH", 2, count)),
        (b"split.tensors.count", struct.pack("<Ii", 5, n_tensors))))
    records, body = b"", b""
    for record, content in tensors:
        records += record + struct.pack("<Q", len(body))
        body += content + bytes(align(len(content)))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), n_keys + 3) + keys + records
    return head + bytes(align(len(head))) + body


def split(source, stem, count):
    """Writes STEM-00001-of-0000N.gguf and so on; returns their names."""
    with open(source, "rb") as f:
        keys, n_keys, tensors = read(f.read())
    names = [f"{stem}-{no + 1:05}-of-{count:05}.gguf" for no in range(count)]
    for no, name in enumerate(names):
        mine = tensors[no * len(tensors) // count:(no + 1) * len(tensors) // count]
        with open(name, "wb") as f:
            f.write(write(keys if no == 0 else b"", n_keys if no == 0 else 0, mine, no, count, len(tensors)))
    return names
