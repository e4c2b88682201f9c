"""System calls that fail on request: no disk here does, so the kernel is asked to say that one did (seccomp)."""

from __future__ import annotations

import ctypes
import platform

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2
LOAD_NUMBER, EQUAL_OR_SKIP, RETURN = 0x20, 0x15, 0x06
ERRNO, ALLOW = 0x00050000, 0x7FFF0000
COPY_FILE_RANGE = {"x86_64": 326, "aarch64": 285}
PREADV, PREADV2 = {"x86_64": 295, "aarch64": 69}, {"x86_64": 327, "aarch64": 286}
"""Their numbers by machine. Source: asm/unistd.h."""


class _Instruction(ctypes.Structure):
    """`struct sock_filter` of linux/filter.h."""

    _fields_ = (("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    """`struct sock_fprog` of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def fail(call: dict[str, int], errno: int) -> None:
    """Let a system call fail with an error number from now on, in this process for good.

    Raises:
        OSError: the kernel has no such filters.
    """
    steps = [(LOAD_NUMBER, 0, 0, 0), (EQUAL_OR_SKIP, 0, 1, call[platform.machine()])]
    steps += [(RETURN, 0, 0, ERRNO | errno), (RETURN, 0, 0, ALLOW)]
    filters = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(_Program(len(steps), filters)), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
