"""A program that uses vncdotool as its users do, for the tests: each line of standard input is a
request.

Arguments: ADDRESS ENCODING, the encoding as a number. Name and password are in the environment:
VNC_USER, VNC_PASSWORD. Requests:

  picture PATH    requests the whole picture, and writes it there (PPM)
  type TEXT       types a text
  press KEY       presses a key, by vncdotool's name
  move X Y
  down BUTTON, up BUTTON
"""

import os
import sys

from vncdotool import api
from vncdotool.client import VNCDoToolClient
from vncdotool.const import Encoding

address, encoding = sys.argv[1:]
VNCDoToolClient.encoding = Encoding(int(encoding))
if not address.startswith("/"):
    address = address.replace(":", "::")
options = {"username": os.environ.get("VNC_USER"), "timeout": 100}
with api.connect(address, os.environ.get("VNC_PASSWORD"), **options) as client:
    # A refused client ends here.
    client.pause(0)
    print("connected", flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "picture":
            client.captureScreen(rest[0], format="PPM")
        elif word == "type":
            for key in rest[0]:
                client.keyPress(key)
        elif word == "press":
            client.keyPress(rest[0])
        elif word == "move":
            client.mouseMove(int(rest[0]), int(rest[1]))
        elif word == "down":
            client.mouseDown(int(rest[0]))
        elif word == "up":
            client.mouseUp(int(rest[0]))
        else:
            sys.exit(f"`{line}` was not done")
        print("done", flush=True)
api.shutdown()
