"""An nbdkit plugin: a block device in memory that logs its writes and flushes, and fails on request.

Run by nbdkit's own interpreter, without this project's packages. Parameters: image (a file with its first contents and
size), log (a file to append to: see `blocklog`), switch (a file; while it exists, each of its lines "read FIRST LAST",
"write" or "flush" makes such requests fail with EIO, reads only where they touch bytes FIRST to LAST).
"""

# mypy: ignore-errors

import builtins
import errno
import struct

import nbdkit

API_VERSION = 2

_parameters = {}
_state = {}


def config(key, value):
    if key not in ("image", "log", "switch"):
        raise RuntimeError(f"unknown parameter {key}; known: image, log, switch")
    _parameters[key] = value


def config_complete():
    if "image" not in _parameters:
        raise RuntimeError("the parameter image is missing")


def get_ready():
    with builtins.open(_parameters["image"], "rb") as image:
        _state["disk"] = bytearray(image.read())
    log = _parameters.get("log")
    _state["log"] = builtins.open(log, "ab", buffering=0) if log else None  # noqa: SIM115 - as long as the process


def thread_model():
    return nbdkit.THREAD_MODEL_SERIALIZE_ALL_REQUESTS


def open(readonly):
    return 1


def get_size(handle):
    return len(_state["disk"])


def can_flush(handle):
    return True


def can_fua(handle):
    return nbdkit.FUA_EMULATE


def pread(handle, buffer, offset, flags):
    _fail("read", offset, len(buffer))
    buffer[:] = _state["disk"][offset : offset + len(buffer)]


def pwrite(handle, buffer, offset, flags):
    _fail("write", offset, len(buffer))
    _state["disk"][offset : offset + len(buffer)] = buffer
    _log(b"W", offset, bytes(buffer))


def flush(handle, flags):
    _fail("flush", 0, 0)
    _log(b"F", 0, b"")


def _log(kind, offset, data):
    if _state["log"] is not None:
        _state["log"].write(struct.pack("<cQI", kind, offset, len(data)) + data)


def _fail(kind, offset, length):
    if "switch" not in _parameters:
        return
    try:
        with builtins.open(_parameters["switch"]) as switch:
            lines = switch.read().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        word, *limits = line.split()
        if word != kind:
            continue
        if limits and not (offset < int(limits[1]) and offset + length > int(limits[0])):
            continue
        nbdkit.set_error(errno.EIO)
        raise RuntimeError(f"{kind} fails on request")
