// The page around noVNC's RFB: it connects by itself, comes back by itself, and has what a keyboard
// or a finger cannot do otherwise. Addresses are relative to the page, whatever path it is at.
import RFB from "./novnc/core/rfb.js";
import keysyms from "./novnc/core/input/keysymdef.js";
import XK from "./novnc/core/input/keysym.js";

const $ = (id) => document.getElementById(id);
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 10000;
// A connection that lasts no longer than this was none.
const LASTING = 5000;
// Nobody needs to read what is over at once.
const SOON = 700;
// Between looks at a line that is full, and bytes that may wait on it.
const LOOK = 20;
const FULL = 16384;
// How long a message is read, and between looks at a machine that is paused.
const MESSAGE = 6000;
const PAUSED = 3000;
// By then a window is as large as it will be.
const SETTLED = 500;

// As the host says it.
const OFF = "The machine is off.";

let rfb = null;
let pause = FIRST_PAUSE;
let timer = 0;
let looks = false;
// What the host said when it closed the line.
let farewell = "";
// The connection, and what the host says of the machine: keys, clipboard, how to start it again.
let line = null;
let machine = { characters: "", keyboard: "", clipboard: false, again: "" };

// --- what is remembered; a browser may forbid it
const remember = (key, value) => {
  try { localStorage.setItem(`transom.${key}`, value); } catch { /* then not */ }
};
const remembered = (key, otherwise) => {
  try { return localStorage.getItem(`transom.${key}`) ?? otherwise; } catch { return otherwise; }
};

function show(state, text) {
  document.body.dataset.state = state;
  $("state").textContent = text;
  // While it tries again, what can be touched stays where it is.
  if (state !== "connecting") {
    $("again").hidden = state === "connected";
  }
  $("hope").hidden = state === "connected";
  $("resume").hidden = true;
  if (state === "connected") {
    say("");
  }
}

// What is to be read over the picture.
function say(text, how = "") {
  $("reason").textContent = text;
  $("how").textContent = how;
  $("how").hidden = !how;
  $("cover").hidden = !text;
}

// What passes: a message at the lower edge.
let passing = 0;
function tell(text) {
  $("toast").textContent = text;
  clearTimeout(passing);
  passing = setTimeout(() => { $("toast").textContent = ""; }, MESSAGE);
}

// The last picture stays in sight, dimmed.
function keep(picture) {
  if (!picture?.width || !picture.height) {
    return;
  }
  $("last")?.remove();
  const last = document.createElement("canvas");
  last.id = "last";
  last.ariaHidden = "true";
  last.width = picture.width;
  last.height = picture.height;
  last.getContext("2d").drawImage(picture, 0, 0);
  $("screen").append(last);
}

// --- the connection
async function connect() {
  clearTimeout(timer);
  if (rfb) {
    return;
  }
  show("connecting", "connecting");
  setTimeout(() => {
    if (document.body.dataset.state === "connecting" && $("cover").hidden) {
      say("Connecting…");
      $("hope").hidden = true;
    }
  }, SOON);
  let session;
  try {
    session = await fetch("session", { cache: "no-store" });
  } catch {
    return later(farewell || "The machine is off, or its host cannot be reached.", machine.again);
  }
  if (session.status === 401) {
    location.replace("login");
    return;
  }
  if (!session.ok) {
    return later(await session.text());
  }
  const { access, logout, ...about } = await session.json();
  machine = about;
  if (rfb) {
    return;
  }
  looks = access === "view";
  $("looks").hidden = !looks;
  $("out").hidden = !logout;
  document.body.classList.toggle("looking", looks);
  const url = new URL("websockify", location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  open(url.href);
}

function open(url) {
  line = new WebSocket(url, ["binary"]);
  line.addEventListener("close", (event) => { farewell = event.reason; });
  asked = null;
  rfb = new RFB($("screen"), line, { shared: true });
  rfb.viewOnly = looks;
  rfb.focusOnClick = !typing();
  rfb.background = "#000";
  arrange();
  let reason = "The connection was lost.";
  let picture = null;
  let since = Infinity;
  rfb.addEventListener("connect", () => {
    since = Date.now();
    picture = $("screen").querySelector("div canvas");
    $("last")?.remove();
    show("connected", "connected");
    zoom();
    state();
    rfb.focus({ preventScroll: true });
  });
  rfb.addEventListener("securityfailure", (event) => { reason = event.detail.reason || reason; });
  rfb.addEventListener("disconnect", () => {
    rfb = null;
    held.forEach((button) => button.setAttribute("aria-pressed", "false"));
    held.clear();
    $("buttons").hidden = true;
    document.querySelectorAll(".menu:popover-open").forEach((menu) => menu.hidePopover());
    keep(picture);
    if (Date.now() - since > LASTING) {
      pause = FIRST_PAUSE;
    }
    clearTimeout(paused);
    later(farewell || reason, farewell === OFF ? machine.again : "");
  });
  rfb.addEventListener("desktopname", (event) => {
    $("name").textContent = event.detail.name;
    document.title = event.detail.name;
  });
  rfb.addEventListener("clipboard", (event) => { $("text").value = event.detail.text; });
  rfb.addEventListener("clippingviewport", (event) => { $("drag").hidden = !event.detail; });
  rfb.addEventListener("capabilities", (event) => {
    $("buttons").hidden = looks || !event.detail.capabilities.power;
  });
}

function later(reason, how = "") {
  show("waiting", "not connected");
  say(reason.trim(), how);
  clearTimeout(timer);
  timer = setTimeout(connect, pause);
  pause = Math.min(2 * pause, LONGEST_PAUSE);
}

function now() {
  if (!rfb && document.body.dataset.state === "waiting") {
    pause = FIRST_PAUSE;
    connect();
  }
}

$("again").addEventListener("click", now);
addEventListener("online", now);
document.addEventListener("visibilitychange", () => document.hidden || now());
addEventListener("pageshow", (event) => event.persisted && location.reload());

// --- how it is shown
function arrange() {
  const size = remembered("size", "fit");
  const quality = remembered("quality", "6");
  document.querySelectorAll("input[name=size]").forEach((it) => { it.checked = it.value === size; });
  document.querySelectorAll("input[name=quality]").forEach((it) => { it.checked = it.value === quality; });
  if (!rfb) {
    return;
  }
  rfb.scaleViewport = size !== "real";
  rfb.resizeSession = size === "follow" && !looks;
  rfb.clipViewport = size === "real";
  rfb.dragViewport = size === "real" && $("drags").checked;
  rfb.qualityLevel = Number(quality);
  zoom();
}

// --- a wide picture on an upright phone: as high as there is room, and a finger moves it
let zoomed = false;
function zoom() {
  const [pane, canvas] = [$("pane"), $("screen").querySelector("div canvas")];
  const wide = canvas?.height ? pane.clientHeight * canvas.width / canvas.height : 0;
  const useful = Boolean(rfb) && rfb.scaleViewport && !rfb.resizeSession && wide > 1.5 * pane.clientWidth;
  const on = zoomed && useful;
  $("zoom").hidden = !useful;
  $("zoom").setAttribute("aria-pressed", String(on));
  $("move").hidden = !on;
  document.body.classList.toggle("zoomed", on);
  document.body.classList.toggle("moving", on && $("move").ariaPressed === "true");
  $("screen").style.width = on ? `${Math.round(wide)}px` : "";
}
$("zoom").addEventListener("click", () => {
  zoomed = !zoomed;
  $("move").setAttribute("aria-pressed", "true");
  zoom();
  if (zoomed) {
    tell("A finger moves the picture.");
  }
});
$("move").addEventListener("click", () => {
  const moves = $("move").ariaPressed !== "true";
  $("move").setAttribute("aria-pressed", String(moves));
  tell(moves ? "A finger moves the picture." : "A finger is the mouse.");
  zoom();
});
new ResizeObserver(zoom).observe($("pane"));

for (const key of ["size", "quality"]) {
  document.querySelectorAll(`input[name=${key}]`).forEach((it) => it.addEventListener("change", () => {
    remember(key, it.value);
    arrange();
  }));
}
$("drags").addEventListener("change", arrange);

// noVNC asks for no size while the answer to another one is on its way, nor for the size that the picture
// has; so the machine could be left with the wish for a window that is no more.
let asked = null;
let settled = 0;
const { setDesktopSize } = RFB.messages;
RFB.messages.setDesktopSize = (...words) => {
  asked = words;
  setDesktopSize(...words);
};
new ResizeObserver(() => {
  clearTimeout(settled);
  settled = setTimeout(() => {
    const { clientWidth, clientHeight } = $("screen");
    if (!rfb?.resizeSession || !asked) {
      return;
    }
    const [line, width, height, ...rest] = asked;
    if (width !== clientWidth || height !== clientHeight) {
      RFB.messages.setDesktopSize(line, clientWidth, clientHeight, ...rest);
    }
  }, SETTLED);
}).observe($("screen"));

$("full").addEventListener("click", () => {
  const end = document.fullscreenElement;
  const change = end ? document.exitFullscreen() : document.documentElement.requestFullscreen?.();
  change?.catch(() => {});
});
$("full").hidden = !document.documentElement.requestFullscreen;
document.addEventListener("fullscreenchange", () => {
  const full = Boolean(document.fullscreenElement);
  $("full").setAttribute("aria-pressed", String(full));
  document.body.classList.remove("shown");
  // So that Escape, Alt-Tab and the like are the machine's, where browsers allow it.
  if (full) {
    navigator.keyboard?.lock?.().catch(() => {});
  } else {
    navigator.keyboard?.unlock?.();
  }
  rfb?.focus();
});
$("handle").addEventListener("click", () => document.body.classList.toggle("shown"));

document.querySelectorAll(".menu").forEach((menu) => menu.addEventListener("toggle", (event) => {
  if (event.newState === "closed" && document.activeElement === document.body) {
    rfb?.focus();
  }
}));

// --- keys
const KEYS = {
  Ctrl: [XK.XK_Control_L, "ControlLeft"], Alt: [XK.XK_Alt_L, "AltLeft"], Shift: [XK.XK_Shift_L, "ShiftLeft"],
  Win: [XK.XK_Super_L, "MetaLeft"], AltGr: [XK.XK_ISO_Level3_Shift, "AltRight"],
  Esc: [XK.XK_Escape, "Escape"], Tab: [XK.XK_Tab, "Tab"], Enter: [XK.XK_Return, "Enter"],
  Del: [XK.XK_Delete, "Delete"], Ins: [XK.XK_Insert, "Insert"],
  "←": [XK.XK_Left, "ArrowLeft"], "↑": [XK.XK_Up, "ArrowUp"], "↓": [XK.XK_Down, "ArrowDown"],
  "→": [XK.XK_Right, "ArrowRight"],
  Home: [XK.XK_Home, "Home"], End: [XK.XK_End, "End"],
  PgUp: [XK.XK_Prior, "PageUp"], PgDn: [XK.XK_Next, "PageDown"],
  Print: [XK.XK_Print, "PrintScreen"], R: [XK.XK_r, "KeyR"], L: [XK.XK_l, "KeyL"],
};
for (let number = 1; number <= 12; number += 1) {
  KEYS[`F${number}`] = [XK.XK_F1 + number - 1, `F${number}`];
}
const NAMES = { "←": "Left", "↑": "Up", "↓": "Down", "→": "Right" };
const HELD = ["Ctrl", "Alt", "Shift", "Win", "AltGr"];
const STRIP = [
  "Esc", "Tab", ...HELD, "←", "↑", "↓", "→", "Del", "Ins", "Home", "End", "PgUp", "PgDn",
  ...Object.keys(KEYS).filter((it) => /^F\d+$/.test(it)),
];
const CHORDS = [
  "Ctrl-Alt-Del", "Ctrl-Shift-Esc", "Alt-Tab", "Alt-F4", "Win", "Win-R", "Win-L", "Print", "Ctrl-Esc",
  "Ctrl-Alt-F1", "Ctrl-Alt-F2", "Ctrl-Alt-F7",
];
const held = new Map();

function press(name, down) {
  rfb?.sendKey(...KEYS[name], down);
}

function chord(names) {
  names.forEach((name) => press(name, true));
  names.toReversed().forEach((name) => press(name, false));
}

function toggle(name, button) {
  const down = !held.has(name);
  press(name, down);
  button.setAttribute("aria-pressed", String(down));
  if (down) {
    held.set(name, button);
  } else {
    held.delete(name);
  }
}

function key(parent, name, work) {
  const button = document.createElement("button");
  button.textContent = name;
  button.type = "button";
  if (NAMES[name]) {
    button.setAttribute("aria-label", NAMES[name]);
  }
  // A phone's keyboard stays where it is.
  button.addEventListener("pointerdown", (event) => event.preventDefault());
  button.addEventListener("click", () => work(button));
  parent.append(button);
  return button;
}

for (const name of STRIP) {
  if (HELD.includes(name)) {
    key($("strip"), name, (button) => toggle(name, button)).setAttribute("aria-pressed", "false");
  } else {
    key($("strip"), name, () => chord([name]));
  }
}
for (const name of CHORDS) {
  key($("chords"), name, () => chord(name.split("-")));
}
$("cad").addEventListener("click", () => {
  chord(["Ctrl", "Alt", "Del"]);
  rfb?.focus();
});

// A phone's keyboard is wanted; a touch of the picture must not take it away.
function typing() {
  return !$("strip").hidden && matchMedia("(pointer: coarse)").matches;
}

$("board").addEventListener("click", () => {
  const on = $("strip").hidden;
  $("strip").hidden = !on;
  $("board").setAttribute("aria-pressed", String(on));
  if (rfb) {
    rfb.focusOnClick = !typing();
  }
  if (typing()) {
    $("typed").focus({ preventScroll: true });
  } else {
    if (!on) {
      [...held].forEach(([name, button]) => toggle(name, button));
    }
    rfb?.focus();
  }
});

// --- what a phone's keyboard types, which has no keys: texts come and go
const FILL = "\u00a0".repeat(16);
const typed = $("typed");
typed.value = FILL;

// Characters that the machine's keyboard has no key for.
function lacking(text) {
  return [...new Set(text)].filter((it) => !"\r\n\t".includes(it) && !machine.characters.includes(it));
}

function noKey(lacks) {
  const some = lacks.slice(0, 20).join(" ") + (lacks.length > 20 ? " …" : "");
  return `The machine's keyboard (${machine.keyboard}) has no key for: ${some}`;
}

function letters(text) {
  const lacks = lacking(text);
  if (lacks.length > 0) {
    tell(noKey(lacks));
  }
  for (const letter of text) {
    if (letter === "\n") {
      press("Enter", true);
      press("Enter", false);
    } else if (letter === "\t") {
      chord(["Tab"]);
    } else {
      rfb?.sendKey(keysyms.lookup(letter.codePointAt(0)), null);
    }
  }
}

function backspace() {
  rfb?.sendKey(XK.XK_BackSpace, "Backspace");
}

let before = FILL;
typed.addEventListener("input", (event) => {
  // The machine sees what a word turns into while it is still being put together.
  const after = typed.value;
  let same = 0;
  while (same < before.length && before[same] === after[same]) {
    same += 1;
  }
  for (let count = before.length - same; count > 0; count -= 1) {
    backspace();
  }
  letters(after.slice(same));
  before = after;
  if (!event.isComposing && (after.length < 8 || after.length > 200)) {
    typed.value = FILL;
    before = FILL;
  }
});
typed.addEventListener("blur", () => {
  typed.value = FILL;
  before = FILL;
});

// --- the clipboard
let asks = false;
function told(text) {
  $("told").textContent = text;
}

$("text").addEventListener("input", () => {
  told("");
  asks = false;
  $("type").textContent = "Type it";
});
$("paste").addEventListener("click", () => {
  const text = $("text").value;
  if (!machine.clipboard) {
    told("Not sent: no agent in the machine takes text. “Type it” presses its keys instead.");
    return;
  }
  rfb?.clipboardPasteFrom(text);
  told(`Sent to the machine's clipboard: ${text.length} characters.`);
});
$("type").addEventListener("click", async () => {
  const text = [...$("text").value.replaceAll("\r\n", "\n")];
  const lacks = lacking(text);
  if (lacks.length > 0 && !asks) {
    told(`${noKey(lacks)}. Nothing was typed.`);
    asks = true;
    $("type").textContent = "Type the rest";
    return;
  }
  asks = false;
  $("type").textContent = "Type it";
  told("");
  $("clipboard").hidePopover();
  const [own, typed] = [rfb, text.filter((it) => !lacks.includes(it))];
  let count = 0;
  for (const letter of typed) {
    // The host reads no more when the machine is far behind.
    while (rfb === own && line.bufferedAmount > FULL) {
      tell(`Typing: ${count} of ${typed.length} characters…`);
      await new Promise((done) => { setTimeout(done, LOOK); });
    }
    if (!own || rfb !== own) {
      tell(`The connection ended: ${count} of ${typed.length} characters were typed.`);
      return;
    }
    letters(letter);
    count += 1;
  }
  const left = lacks.length > 0 ? `, without ${lacks.join(" ")}` : "";
  tell(`Typed ${count} characters${left}.`);
});

// --- buttons of the machine
const SURE = {
  reset: "Reset the machine? What it has not written to its disks is lost.",
  off: "Switch the machine off at once? What it has not written to its disks is lost.",
};
const DONE = {
  shutdown: "The guest was asked to shut down.",
  reset: "The machine starts anew.",
  resume: "The machine runs on.",
  off: "The machine is switched off.",
};
let paused = 0;

// Whether the machine is paused; others may pause it, too.
async function state(answer) {
  clearTimeout(paused);
  const found = await (answer ?? fetch("machine", { cache: "no-store" })).catch(() => null);
  if (!rfb || document.body.dataset.state !== "connected" || !found?.ok) {
    return;
  }
  const still = (await found.json()).state === "paused";
  $("pause").dataset.press = still ? "resume" : "pause";
  $("pause").textContent = still ? "Resume" : "Pause";
  $("pause").title = still ? "Let the machine run on" : "Stop the machine where it is";
  $("state").textContent = still ? "paused" : "connected";
  $("resume").hidden = !still || looks;
  document.body.classList.toggle("still", still);
  say(still ? "The machine is paused." : "");
  if (still) {
    paused = setTimeout(state, PAUSED);
  }
}

async function push(button) {
  if (SURE[button] && !confirm(SURE[button])) {
    return;
  }
  $("power-told").textContent = "";
  const answer = await fetch(`machine/${button}`, { method: "POST" }).catch(() => null);
  if (!answer?.ok) {
    $("power-told").textContent = answer ? (await answer.text()).trim() : "The host cannot be reached.";
    return;
  }
  $("power").hidePopover();
  tell(DONE[button] ?? "");
  state(Promise.resolve(answer));
}

document.querySelectorAll("[data-press]").forEach((button) => {
  button.addEventListener("click", () => push(button.dataset.press));
});
$("resume").addEventListener("click", () => push("resume"));
$("power").addEventListener("beforetoggle", (event) => {
  $("power-told").textContent = "";
  if (event.newState === "open") {
    state();
  }
});

// --- more keys than there is room for: the edge says so
const strip = $("strip");
function edges() {
  const end = strip.scrollWidth - strip.clientWidth - strip.scrollLeft;
  strip.classList.toggle("before", strip.scrollLeft > 4);
  strip.classList.toggle("after", end > 4);
}
strip.addEventListener("scroll", edges, { passive: true });
new ResizeObserver(edges).observe(strip);

arrange();
connect();
