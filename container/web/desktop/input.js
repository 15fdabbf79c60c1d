// Keyboard, mouse and fingers for the remote desktop.
import XtScancode from "./novnc/core/input/xtscancodes.js";
import { Backend } from "./ironrdp/iron-remote-desktop-rdp.js";
import { phoneKeyboard } from "./page.js";

const { DeviceEvent, InputTransaction } = Backend;
// Times are in milliseconds, distances in pixels of the page.
const LONG_PRESS = 500;
const SLOP = 10;
// Buttons of DOM events.
const [LEFT, RIGHT] = [0, 2];
const MODIFIERS = ["Control", "Alt", "Meta"];

// `session()` is the session, or null. `byLetter()`: letters instead of scan codes are sent.
export function inputOf(canvas, typed, session, byLetter) {
  const send = (...events) => {
    const own = session();
    if (!own) {
      return;
    }
    const transaction = new InputTransaction();
    events.forEach((event) => transaction.addEvent(event));
    own.applyInputs(transaction);
  };
  const chord = (...codes) => {
    send(...codes.map((code) => DeviceEvent.keyPressed(XtScancode[code])));
    send(...codes.toReversed().map((code) => DeviceEvent.keyReleased(XtScancode[code])));
  };
  const type = (text) => {
    for (const letter of text) {
      if (letter === "\n") {
        chord("Enter");
      } else if (letter === "\t") {
        chord("Tab");
      } else {
        send(DeviceEvent.unicodePressed(letter));
        send(DeviceEvent.unicodeReleased(letter));
      }
    }
  };

  const held = listenToKeys(canvas, session, send, byLetter);
  // Presses Ctrl-V alone, whichever keys the user holds for it, and then those again.
  const paste = () => {
    session()?.releaseAllInputs();
    chord("ControlLeft", "KeyV");
    send(...[...held].map((code) => DeviceEvent.keyPressed(XtScancode[code])));
  };
  listenToMouse(canvas, send);
  listenToFingers(canvas, send);
  phoneKeyboard(typed, () => chord("Backspace"), type);
  return { chord, paste, type };
}

function listenToKeys(canvas, session, send, byLetter) {
  // The letter that each pressed key sent, by its code; and the modifiers that are held.
  const letters = new Map();
  const held = new Set();
  const clear = () => {
    letters.clear();
    held.clear();
  };
  const key = (event) => {
    if (!session()) {
      // The keys are the browser's.
      clear();
      return;
    }
    const down = event.type === "keydown";
    if (/^(Control|Meta|Shift|Alt)/.test(event.code)) {
      held[down ? "add" : "delete"](event.code);
    }
    const code = XtScancode[event.code];
    // The browser's own paste event follows, and then the key (clipboard.js).
    const pastes = event.code === "KeyV" && (event.ctrlKey || event.metaKey) && !event.altKey && down;
    if (pastes) {
      if (event.repeat) {
        event.preventDefault();
      }
      return;
    }
    event.preventDefault();
    if (letters.has(event.code) && !down) {
      send(DeviceEvent.unicodeReleased(letters.get(event.code)));
      letters.delete(event.code);
      return;
    }
    const plain = !MODIFIERS.some((it) => event.getModifierState(it)) || event.getModifierState("AltGraph");
    if (down && byLetter() && plain && [...event.key].length === 1) {
      letters.set(event.code, event.key);
      send(DeviceEvent.unicodePressed(event.key));
    } else if (code) {
      send(down ? DeviceEvent.keyPressed(code) : DeviceEvent.keyReleased(code));
    }
  };
  canvas.addEventListener("keydown", key);
  canvas.addEventListener("keyup", key);
  const locks = (event) => {
    const is = (name) => event.getModifierState(name);
    session()?.synchronizeLockKeys(is("ScrollLock"), is("NumLock"), is("CapsLock"), is("KanaMode"));
  };
  canvas.addEventListener("pointerdown", locks);
  // Keys that are held while the page loses the focus would stay pressed.
  canvas.addEventListener("blur", () => {
    clear();
    session()?.releaseAllInputs();
  });
  return held;
}

// Where a point of the page is on the desktop. The picture is centred, and keeps its proportions.
function place(canvas, event) {
  const box = canvas.getBoundingClientRect();
  const scale = Math.min(box.width / canvas.width, box.height / canvas.height);
  const at = (point, start, length, pixels) => {
    const value = Math.round((point - start - (length - pixels * scale) / 2) / scale);
    return Math.min(Math.max(value, 0), pixels - 1);
  };
  return DeviceEvent.mouseMove(
    at(event.clientX, box.left, box.width, canvas.width),
    at(event.clientY, box.top, box.height, canvas.height),
  );
}

function listenToMouse(canvas, send) {
  const mouse = (work) => (event) => {
    if (event.pointerType === "mouse" || event.pointerType === "pen") {
      work(event);
    }
  };
  canvas.addEventListener("pointermove", mouse((event) => send(place(canvas, event))));
  canvas.addEventListener("pointerdown", mouse((event) => canvas.setPointerCapture(event.pointerId)));
  // Pointer events report the first button of several only.
  canvas.addEventListener("mousedown", (event) => {
    event.preventDefault();
    canvas.focus({ preventScroll: true });
    send(place(canvas, event), DeviceEvent.mouseButtonPressed(event.button));
  });
  canvas.addEventListener("mouseup", (event) => {
    event.preventDefault();
    send(place(canvas, event), DeviceEvent.mouseButtonReleased(event.button));
  });
  canvas.addEventListener("contextmenu", (event) => event.preventDefault());
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const vertical = event.deltaY !== 0;
    const amount = vertical ? -event.deltaY : event.deltaX;
    send(DeviceEvent.wheelRotations(vertical, amount, event.deltaMode));
  }, { passive: false });
}

// A tap is a click, a long press the right button; a finger that moves drags; two fingers scroll.
function listenToFingers(canvas, send) {
  const fingers = new Map();
  let [timer, start, dragging, scrolled] = [0, null, false, false];
  const click = (event, button) => {
    send(place(canvas, event), DeviceEvent.mouseButtonPressed(button));
    send(DeviceEvent.mouseButtonReleased(button));
  };
  const finger = (work) => (event) => {
    if (event.pointerType === "touch") {
      event.preventDefault();
      work(event);
    }
  };
  canvas.addEventListener("pointerdown", finger((event) => {
    fingers.set(event.pointerId, event);
    canvas.setPointerCapture(event.pointerId);
    clearTimeout(timer);
    if (fingers.size > 1) {
      scrolled = true;
      return;
    }
    [start, dragging, scrolled] = [event, false, false];
    timer = setTimeout(() => {
      click(event, RIGHT);
      start = null;
    }, LONG_PRESS);
  }));
  canvas.addEventListener("pointermove", finger((event) => {
    const last = fingers.get(event.pointerId);
    if (!last) {
      return;
    }
    if (fingers.size > 1) {
      send(DeviceEvent.wheelRotations(true, event.clientY - last.clientY, 0));
      fingers.set(event.pointerId, event);
      return;
    }
    const far = start && Math.hypot(event.clientX - start.clientX, event.clientY - start.clientY) > SLOP;
    if (far && !dragging && !scrolled) {
      clearTimeout(timer);
      dragging = true;
      send(place(canvas, start), DeviceEvent.mouseButtonPressed(LEFT));
    }
    if (dragging) {
      send(place(canvas, event));
    }
  }));
  const end = finger((event) => {
    clearTimeout(timer);
    const was = fingers.delete(event.pointerId);
    if (dragging) {
      dragging = false;
      send(place(canvas, event), DeviceEvent.mouseButtonReleased(LEFT));
    } else if (was && start && !scrolled && event.type === "pointerup") {
      click(event, LEFT);
    }
    start = null;
  });
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
}
