"""A viewer for the tests, made with gtk-vnc's library: it saves its picture on request.

Arguments and requests are those of libvnc.c, with these differences: ENCODINGS are numbers, which
include QUALITY and COMPRESSION, and SECURITY is the number of a type, or TYPE.SUBTYPE.
"""

import ctypes
import os
import socket
import sys

import gi

gi.require_version("GVnc", "1.0")
from gi.repository import GLib, GObject, GVnc  # noqa: E402

LITTLE, BIG = 1234, 4321
# No movement, where pointer events are relative.
STILL = 0x7FFF
CREDENTIALS = {0: "VNC_PASSWORD", 1: "VNC_USER", 2: "VNC_CLIENT"}


def pixel_format(bits, order):
    depth, red, green, blue = {
        32: (24, (255, 16), (255, 8), (255, 0)),
        16: (16, (31, 11), (63, 5), (31, 0)),
        8: (8, (7, 0), (7, 3), (3, 6)),
    }[bits]
    it = GVnc.PixelFormat.new()
    it.bits_per_pixel, it.depth, it.byte_order, it.true_color_flag = bits, depth, order, 1
    it.red_max, it.red_shift = red
    it.green_max, it.green_shift = green
    it.blue_max, it.blue_shift = blue
    return it


class Viewer:
    def __init__(self, address, encodings, bits, order, security):
        self.encodings = [int(it) for it in encodings.split(",")]
        self.format = pixel_format(int(bits), BIG if order == "big" else LITTLE)
        self.security = [int(it) for it in security.split(".")]
        self.loop = GLib.MainLoop()
        self.error = None
        self.last = (0, 0)
        self.cursor = None
        self.line = GVnc.Connection.new()
        self.line.set_shared(True)
        for name, work in [
            ("vnc-auth-choose-type", self.choose_type),
            ("vnc-auth-choose-subtype", self.choose_subtype),
            ("vnc-auth-credential", self.credential),
            ("vnc-auth-failure", self.fail),
            ("vnc-auth-unsupported", self.fail),
            ("vnc-error", self.fail),
            ("vnc-initialized", self.initialized),
            ("vnc-framebuffer-update", self.updated),
            ("vnc-desktop-resize", self.resized),
            ("vnc-cursor-changed", self.pointed),
            ("vnc-disconnected", self.disconnected),
        ]:
            self.line.connect(name, work)
        if address.startswith("/"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(address)
            self.line.open_fd(self.socket.detach())
        else:
            host, _, port = address.rpartition(":")
            self.line.open_host(host, port)
        GLib.io_add_watch(0, GLib.PRIORITY_DEFAULT, GLib.IO_IN | GLib.IO_HUP, self.listen)

    def choose_type(self, line, types):
        line.set_auth_type(self.security[0])

    def choose_subtype(self, line, kind, types):
        line.set_auth_subtype(self.security[1])

    def credential(self, line, wanted):
        for index in range(wanted.n_values):
            kind = int(wanted.get_nth(index))
            line.set_credential(kind, os.environ.get(CREDENTIALS[kind], "test"))

    def fail(self, line, *words):
        self.error = " ".join(str(it) for it in words)

    def disconnected(self, line):
        print(f"the line is gone: {self.error}", file=sys.stderr)
        self.loop.quit()

    def initialized(self, line):
        line.set_pixel_format(self.format)
        line.set_encodings(self.encodings)
        self.resized(line, line.get_width(), line.get_height())
        print("connected", flush=True)

    def resized(self, line, width, height):
        self.size = (width, height)
        self.pixels = ctypes.create_string_buffer(4 * width * height)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
        capsule = new(ctypes.addressof(self.pixels), None, None)
        self.frame_buffer = GObject.new(
            GVnc.BaseFramebuffer,
            buffer=capsule,
            width=width,
            height=height,
            rowstride=4 * width,
            local_format=pixel_format(32, LITTLE),
            remote_format=self.format,
        )
        line.set_framebuffer(self.frame_buffer)
        line.framebuffer_update_request(False, 0, 0, width, height)

    def updated(self, line, x, y, width, height):
        # This is called for each rectangle; one request is enough for a whole update.
        line.framebuffer_update_request(True, 0, 0, *self.size)

    def pointed(self, line, cursor):
        self.cursor = line.get_cursor()

    def listen(self, channel, condition):
        request = sys.stdin.readline()
        if not request:
            self.loop.quit()
            return False
        word, *rest = request.split()
        if word == "picture":
            with open(rest[0], "wb") as file:
                file.write(self.pixels.raw)
            print("picture", *self.size, flush=True)
            return True
        if word == "cursor":
            it = self.cursor
            if it is not None:
                count = it.get_width() * it.get_height()
                # Each pixel has four bytes; the last is its opacity.
                pixels = ctypes.string_at(it.props.data, 4 * count)
                seen = sum(alpha != 0 for alpha in pixels[3::4])
                print("cursor", it.get_width(), it.get_height(), seen, flush=True)
            else:
                print("cursor none", flush=True)
            return True
        numbers = [int(it) for it in rest]
        if word == "key":
            symbol, down = numbers
            self.line.key_event(bool(down), symbol, 0)
        elif word == "pointer":
            x, y, buttons = numbers
            way = (x - self.last[0] + STILL, y - self.last[1] + STILL)
            self.last = (x, y)
            self.line.pointer_event(buttons, *((x, y) if self.line.get_abs_pointer() else way))
        elif word == "size":
            self.line.set_size(*numbers)
        else:
            sys.exit(f"`{request}` was not done")
        print("done", flush=True)
        return True


viewer = Viewer(*sys.argv[1:])
viewer.loop.run()
