"""stop_thread.py NAME: reads the number of a process, and stops its thread of this name until the input ends.

The other threads of the process go on.
"""

import ctypes
import os
import sys
import threading
import time

PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def trace(request, thread):
    if libc.ptrace(request, thread, None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def find(process, name):
    folder = f"/proc/{process}/task"
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for thread in os.listdir(folder):
            try:
                with open(f"{folder}/{thread}/comm") as comm:
                    if comm.read().strip() == name:
                        return int(thread)
            except (FileNotFoundError, ProcessLookupError):
                pass
    sys.exit(f"process {process} has no thread {name}")


print("ready", flush=True)
thread = find(int(sys.stdin.readline()), sys.argv[1])
trace(PTRACE_SEIZE, thread)
trace(PTRACE_INTERRUPT, thread)
os.waitpid(thread, 0x40000000)  # __WALL
print("stopped", flush=True)
# The kernel lets the thread go on when this process ends.
reader = threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)))
reader.start()
# If the thread's process ends, it waits for this.
os.waitpid(thread, 0x40000000)  # __WALL
reader.join()
