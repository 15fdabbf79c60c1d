"""Drives a pod with QEMU's own client of QMP. Prints a line for each step, and fails at the first wrong answer.

The arguments are a folder that the pod may write to, and the port of a listener that other hosts can reach.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys

from qemu.qmp import ExecuteError, QMPClient

FOLDER, EXPOSED = sys.argv[1], int(sys.argv[2])
ADDRESS = ("127.0.0.1", 4444)
# Not of the loopback, so that its connections are those of another host.
STRANGER = "192.0.2.1"
PATIENCE = 240
# A device that no host has plugged in.
DEVICE = {"driver": "usb-host", "id": "1133:49970", "vendorid": 1133, "productid": 49970}


async def refusal(client, command, arguments=None):
    """The class and the text of an error."""
    try:
        answer = await client.execute(command, arguments)
    except ExecuteError as error:
        return error.error_class, str(error)
    raise AssertionError(f"{command} is answered with {answer}")


async def event(listener, name):
    """The next event, which must have this name."""
    found = await asyncio.wait_for(listener.get(), PATIENCE)
    assert found["event"] == name, found
    assert found["timestamp"]["seconds"] > 1_000_000_000, found
    return found.get("data")


async def line(client, text):
    return await client.execute("human-monitor-command", {"command-line": text})


async def control(client, events):
    assert (await client.execute("query-status"))["running"]
    names = [it["name"] for it in await client.execute("query-commands")]
    assert {"stop", "device_add", "screendump"} <= set(names), names
    assert "transom" in (await client.execute("query-version"))["package"]
    await client.execute("stop")
    await event(events, "STOP")
    assert await client.execute("query-status") == {"running": False, "status": "paused"}
    assert await line(client, "info status") == "VM status: paused\r\n"
    await client.execute("cont")
    await event(events, "RESUME")
    assert (await client.execute("query-status"))["status"] == "running"
    print("paused and resumed", flush=True)


async def pictures(client, mark):
    """Takes pictures until the test has made a file with this name."""
    while not os.path.exists(f"{FOLDER}/{mark}"):
        try:
            await client.execute("screendump", {"filename": f"{FOLDER}/screen.ppm"})
        except ExecuteError as error:
            assert "the display is off" in str(error), error
        await asyncio.sleep(0.2)


async def look(client):
    """Types a word once the guest waits for keys. The test reads the pictures."""
    await pictures(client, "ready")
    for key in "qmp":
        await client.execute("send-key", {"keys": [{"type": "qcode", "data": key}]})
    await line(client, "sendkey 1")
    print("typed", flush=True)
    await pictures(client, "seen")
    await client.execute("screendump", {"filename": f"{FOLDER}/screen.png", "format": "png"})
    with open(f"{FOLDER}/screen.png", "rb") as picture:
        assert picture.read(8) == b"\x89PNG\r\n\x1a\n"
    for path in (f"{FOLDER}/data.img", "/etc/screen.ppm", f"{FOLDER}/../../etc/screen.ppm"):
        kind, text = await refusal(client, "screendump", {"filename": path})
        assert kind == "GenericError", (kind, text)
    print("seen", flush=True)


async def devices(client):
    usb = await line(client, "info usb")
    assert "Product QEMU USB Tablet, ID: " in usb, usb
    tree = await line(client, "info qtree")
    assert "dev: usb-tablet, id " in tree and "usb-host" not in tree, tree
    assert (await refusal(client, "device_del", {"id": DEVICE["id"]}))[0] == "DeviceNotFound"
    if os.path.isdir("/dev/bus/usb"):
        # It is attached as soon as it is plugged in.
        await client.execute("device_add", DEVICE)
        await client.execute("device_del", {"id": DEVICE["id"]})
    else:
        kind, text = await refusal(client, "device_add", DEVICE)
        assert kind == "GenericError" and "/dev/bus/usb" in text, (kind, text)
    assert (await refusal(client, "blockdev-add", {}))[0] == "CommandNotFound"
    print("devices listed", flush=True)


async def exposed():
    client = QMPClient("exposed")
    await client.connect((STRANGER, EXPOSED))
    assert (await client.execute("query-status"))["running"]
    for command in ("system_powerdown", "system_reset", "stop", "quit"):
        kind, text = await refusal(client, command)
        assert kind == "GenericError" and "not allowed here" in text, (command, kind, text)
    kind, text = await refusal(client, "device_add", DEVICE)
    assert kind == "GenericError" and "transom usb" in text, (kind, text)
    crowd = [socket.create_connection((STRANGER, EXPOSED), timeout=PATIENCE) for _ in range(3)]
    served = [it for it in crowd if await asyncio.to_thread(greets, it)]
    assert len(served) == 1, f"{len(served)} more clients of one host"
    # Nobody keeps others out.
    with socket.create_connection(("127.0.0.1", EXPOSED), timeout=PATIENCE) as other:
        assert greets(other)
    for it in crowd:
        it.close()
    await client.disconnect()
    print("refused to strangers", flush=True)


def greets(stream):
    try:
        return b"QMP" in stream.recv(65536)
    except ConnectionError:
        return False


def winboat():
    """Asks as WinBoat does: no line feed, one answer per piece of data."""
    with socket.create_connection(("127.0.0.1", EXPOSED), timeout=PATIENCE) as stream:
        assert "QMP" in json.loads(stream.recv(65536))

        def ask(request):
            stream.sendall(json.dumps(request, separators=(",", ":")).encode())
            return json.loads(stream.recv(65536))["return"]

        assert ask({"execute": "qmp_capabilities"}) == {}
        assert all("name" in it for it in ask({"execute": "query-commands"}))
        assert ask({"execute": "query-status"})["running"]
        arguments = {"command-line": "info qtree"}
        tree = ask({"execute": "human-monitor-command", "arguments": arguments})
        assert 'usb-host, id "1133:49970"' not in tree
    print("as WinBoat asks", flush=True)


async def end(client, events):
    await client.execute("system_reset")
    reset = await event(events, "RESET")
    assert reset == {"guest": False, "reason": "host-qmp-system-reset"}, reset
    print("reset", flush=True)
    # The guest ignores the button until it has started again.
    while True:
        await client.execute("system_powerdown")
        await event(events, "POWERDOWN")
        try:
            last = await asyncio.wait_for(events.get(), 2)
            break
        except asyncio.TimeoutError:
            pass
    assert last["event"] == "SHUTDOWN", last
    assert last["data"] == {"guest": True, "reason": "guest-shutdown"}, last
    print("off", flush=True)


def script():
    """Asks as shell scripts do: strings in apostrophes, and the first line after a request is its answer."""
    with socket.create_connection(ADDRESS, timeout=PATIENCE) as stream, stream.makefile("rw", newline="") as lines:
        assert "QMP" in json.loads(lines.readline())
        for command in ("qmp_capabilities", "query-status", "system_reset"):
            lines.write("{ 'execute': '" + command + "' }\n")
            lines.flush()
            assert "return" in json.loads(lines.readline()), command
    print("as scripts ask", flush=True)


async def main():
    client = QMPClient("test")
    await client.connect(ADDRESS)
    with client.listener() as events:
        await control(client, events)
        await look(client)
        await devices(client)
        await exposed()
        await asyncio.to_thread(winboat)
        await asyncio.to_thread(script)
        await event(events, "RESET")
        await end(client, events)
    # The pod has closed the connection.
    with contextlib.suppress(EOFError, ConnectionError):
        await client.disconnect()


asyncio.run(main())
