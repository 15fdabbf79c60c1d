// The page around noVNC's RFB: it connects and reconnects by itself, and offers what a keyboard or
// a finger cannot do. All URLs are relative to the page, so it works below any path.
import RFB from "./novnc/core/rfb.js";
import keysyms from "./novnc/core/input/keysymdef.js";
import XK from "./novnc/core/input/keysym.js";
import { agentClipboard } from "./clipboard.js";
import { fullScreenAndMenus, phoneKeyboard, refusal, remember, remembered, showToast } from "./page.js";
import { soundButton } from "./sound.js";
import { usbMenu } from "./usb.js";

const $ = (id) => document.getElementById(id);
// Times are in milliseconds. Between attempts to connect; the delay doubles after each.
const FIRST_DELAY = 500;
const MAX_DELAY = 10000;
// A connection that ends sooner counts as a failed attempt.
const MIN_LIFETIME = 5000;
// The message about connecting is shown only if it takes longer than this.
const SHOW_CONNECTING = 700;
// While text is typed: no more than MAX_BUFFERED bytes are queued, which is checked at this interval.
const POLL = 20;
const MAX_BUFFERED = 16384;
// How often the state of a paused machine is read.
const PAUSED_POLL = 3000;
// How often a guest without a remote desktop is asked for it.
const DESKTOP_POLL = 15000;
// A window that has not changed for this long has its final size.
const SETTLED = 500;

// The reason in the close frame of the server (socket.rs).
const OFF = "The machine is off.";

let rfb = null;
let delay = FIRST_DELAY;
let timer = 0;
let viewOnly = false;
// The reason that the host gave when it closed the connection.
let farewell = "";
// The WebSocket, and facts about the machine from the host: keys, how to start it again.
let line = null;
let machine = { characters: "", keyboard: "", sound: false, resizes: false, again: "", progress: false, desktop: false, usb: false };

function show(state, text) {
  document.body.dataset.state = state;
  $("state").textContent = text;
  // The button stays where it is during another attempt.
  if (state !== "connecting") {
    $("again").hidden = state === "connected";
  }
  $("hope").hidden = state === "connected";
  $("resume").hidden = true;
  if (state === "connected") {
    showCover("");
  }
}

// Shows a message over the picture.
function showCover(text, how = "") {
  $("reason").textContent = text;
  $("how").textContent = how;
  $("how").hidden = !how;
  $("cover").hidden = !text;
}

// Keeps the last picture in sight, dimmed.
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
      showCover("Connecting…");
      $("hope").hidden = true;
    }
  }, SHOW_CONNECTING);
  let session;
  try {
    session = await fetch("session", { cache: "no-store" });
  } catch {
    return retryLater(farewell || "The machine is off, or its host cannot be reached.", machine.again);
  }
  if (session.status === 401) {
    location.replace("login");
    return;
  }
  if (!session.ok) {
    return retryLater(await session.text());
  }
  const { access, logout, ...about } = await session.json();
  machine = about;
  if (rfb) {
    return;
  }
  viewOnly = access === "view";
  $("looks").hidden = !viewOnly;
  $("out").hidden = !logout;
  $("sound").hidden = !machine.sound;
  $("devices").hidden = !machine.usb || viewOnly;
  $("later").hidden = machine.resizes;
  document.body.classList.toggle("looking", viewOnly);
  follow();
  askForDesktop();
  const url = new URL("websockify", location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  open(url.href);
}

function open(url) {
  line = new WebSocket(url, ["binary"]);
  line.addEventListener("close", (event) => { farewell = event.reason; });
  requested = null;
  rfb = new RFB($("screen"), line, { shared: true });
  rfb.viewOnly = viewOnly;
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
    showState();
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
    if (Date.now() - since > MIN_LIFETIME) {
      delay = FIRST_DELAY;
    }
    clearTimeout(paused);
    retryLater(farewell || reason, farewell === OFF ? machine.again : "");
  });
  rfb.addEventListener("desktopname", (event) => {
    $("name").textContent = event.detail.name;
    document.title = event.detail.name;
  });
  rfb.addEventListener("clipboard", (event) => agent.copied(event.detail.text));
  rfb.addEventListener("clippingviewport", (event) => { $("drag").hidden = !event.detail; });
  rfb.addEventListener("capabilities", (event) => {
    $("buttons").hidden = viewOnly || !event.detail.capabilities.power;
  });
}

function retryLater(reason, how = "") {
  show("waiting", "not connected");
  showCover(reason.trim(), how);
  clearTimeout(timer);
  timer = setTimeout(connect, delay);
  delay = Math.min(2 * delay, MAX_DELAY);
}

function retryNow() {
  if (!rfb && document.body.dataset.state === "waiting") {
    delay = FIRST_DELAY;
    connect();
  }
}

$("again").addEventListener("click", retryNow);
addEventListener("online", retryNow);
document.addEventListener("visibilitychange", () => document.hidden || retryNow());
addEventListener("pageshow", (event) => event.persisted && location.reload());

// --- progress of an installation, which the host reports
let events = null;
function follow() {
  // Browsers allow few connections to a host, so hidden pages have none.
  if (!machine.progress || document.hidden) {
    events?.close();
    events = null;
    return;
  }
  events ??= new EventSource("events");
  events.onmessage = (event) => showProgress(JSON.parse(event.data));
}
document.addEventListener("visibilitychange", follow);

function showProgress({ doing, installation, thousandths, seconds_left: left }) {
  const link = $("progress");
  const [bar, text] = link.children;
  const ready = installation?.stage === "ready";
  link.hidden = installation === undefined || ready;
  if (ready) {
    machine.progress = false;
    follow();
    showToast(doing);
    return;
  }
  const known = thousandths !== undefined;
  bar.hidden = !known;
  bar.value = (thousandths ?? 0) / 1000;
  const percent = known ? `${Math.floor(thousandths / 10)} %` : "";
  const minutes = left > 90 ? `${Math.ceil(left / 60)} min left` : "";
  const failed = installation?.failed !== undefined;
  text.textContent = [percent, failed ? "The installation failed: see why" : doing, minutes].filter(Boolean).join(" · ");
  link.classList.toggle("wrong", failed);
  link.title = failed ? "Show the failed step and the log" : "Show all steps of the installation";
}

// --- the guest's remote desktop, which is offered once it answers
let asking = 0;
async function askForDesktop() {
  clearTimeout(asking);
  if (!machine.desktop || viewOnly || document.hidden || !$("desktop").hidden) {
    return;
  }
  const answer = await fetch("desktop/session", { cache: "no-store" }).catch(() => null);
  const answers = answer?.ok && (await answer.json()).why === null;
  $("desktop").hidden = !answers;
  clearTimeout(asking);
  if (!answers) {
    asking = setTimeout(askForDesktop, DESKTOP_POLL);
  }
}
document.addEventListener("visibilitychange", askForDesktop);

// --- size and quality of the picture
function arrange() {
  const size = remembered("size", machine.resizes && !viewOnly ? "follow" : "fit");
  const quality = remembered("quality", "6");
  document.querySelectorAll("input[name=size]").forEach((it) => { it.checked = it.value === size; });
  document.querySelectorAll("input[name=quality]").forEach((it) => { it.checked = it.value === quality; });
  if (!rfb) {
    return;
  }
  rfb.scaleViewport = size !== "real";
  rfb.resizeSession = size === "follow" && !viewOnly;
  rfb.clipViewport = size === "real";
  rfb.dragViewport = size === "real" && $("drags").checked;
  rfb.qualityLevel = Number(quality);
  zoom();
}

// --- zoom for a wide picture on an upright phone: it gets the full height, and a finger moves it
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
    showToast("A finger moves the picture.");
  }
});
$("move").addEventListener("click", () => {
  const moves = $("move").ariaPressed !== "true";
  $("move").setAttribute("aria-pressed", String(moves));
  showToast(moves ? "A finger moves the picture." : "A finger is the mouse.");
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

// noVNC requests no size while the answer to another request is pending, and never the current size
// of the picture. Without the observer below, the machine could keep the size of an earlier window.
let requested = null;
let settled = 0;
const { setDesktopSize } = RFB.messages;
RFB.messages.setDesktopSize = (...args) => {
  requested = args;
  setDesktopSize(...args);
};
new ResizeObserver(() => {
  clearTimeout(settled);
  settled = setTimeout(() => {
    const { clientWidth, clientHeight } = $("screen");
    if (!rfb?.resizeSession || !requested) {
      return;
    }
    const [line, width, height, ...rest] = requested;
    if (width !== clientWidth || height !== clientHeight) {
      RFB.messages.setDesktopSize(line, clientWidth, clientHeight, ...rest);
    }
  }, SETTLED);
}).observe($("screen"));

fullScreenAndMenus(() => rfb?.focus());

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
  // Without this, the tap would hide a phone's keyboard.
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

// Whether a phone's keyboard is open. A touch of the picture must not close it then.
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

// --- text that is typed for the user
// The characters that the machine's keyboard has no key for.
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
    showToast(noKey(lacks));
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

phoneKeyboard($("typed"), () => rfb?.sendKey(XK.XK_BackSpace, "Backspace"), letters);

// --- the clipboard
const agent = agentClipboard(() => (viewOnly ? null : rfb), clipboardStatus);
let confirmed = false;
function clipboardStatus(text) {
  $("told").textContent = text;
}

$("text").addEventListener("input", () => {
  clipboardStatus("");
  confirmed = false;
  $("type").textContent = "Type it";
});
$("type").addEventListener("click", async () => {
  const text = [...$("text").value.replaceAll("\r\n", "\n")];
  const lacks = lacking(text);
  if (lacks.length > 0 && !confirmed) {
    clipboardStatus(`${noKey(lacks)}. Nothing was typed.`);
    confirmed = true;
    $("type").textContent = "Type the rest";
    return;
  }
  confirmed = false;
  $("type").textContent = "Type it";
  clipboardStatus("");
  $("clipboard").hidePopover();
  const [own, typed] = [rfb, text.filter((it) => !lacks.includes(it))];
  let count = 0;
  for (const letter of typed) {
    // The host stops reading when the machine is far behind.
    while (rfb === own && line.bufferedAmount > MAX_BUFFERED) {
      showToast(`Typing: ${count} of ${typed.length} characters…`);
      await new Promise((done) => { setTimeout(done, POLL); });
    }
    if (!own || rfb !== own) {
      showToast(`The connection ended: ${count} of ${typed.length} characters were typed.`);
      return;
    }
    letters(letter);
    count += 1;
  }
  const left = lacks.length > 0 ? `, without ${lacks.join(" ")}` : "";
  showToast(`Typed ${count} characters${left}.`);
});

// --- buttons of the machine
const QUESTIONS = {
  reset: "Reset the machine? Data that it has not written to its disks is lost.",
  off: "Switch the machine off at once? Data that it has not written to its disks is lost.",
};
const RESULTS = {
  shutdown: "The guest was asked to shut down.",
  reset: "The machine restarts.",
  resume: "The machine continues.",
  off: "The machine is switched off.",
};
let paused = 0;

// Shows whether the machine is paused. Others may pause it, too.
async function showState(answer) {
  clearTimeout(paused);
  const found = await (answer ?? fetch("machine", { cache: "no-store" })).catch(() => null);
  if (!rfb || document.body.dataset.state !== "connected" || !found?.ok) {
    return;
  }
  const still = (await found.json()).state === "paused";
  $("pause").dataset.press = still ? "resume" : "pause";
  $("pause").textContent = still ? "Resume" : "Pause";
  $("pause").title = still ? "Continue the machine" : "Stop the machine until it is resumed";
  $("state").textContent = still ? "paused" : "connected";
  $("resume").hidden = !still || viewOnly;
  document.body.classList.toggle("still", still);
  showCover(still ? "The machine is paused." : "");
  if (still) {
    paused = setTimeout(showState, PAUSED_POLL);
  }
}

async function pressButton(button) {
  if (QUESTIONS[button] && !confirm(QUESTIONS[button])) {
    return;
  }
  $("power-told").textContent = "";
  const answer = await fetch(`machine/${button}`, { method: "POST" }).catch(() => null);
  if (!answer?.ok) {
    $("power-told").textContent = await refusal(answer);
    return;
  }
  $("power").hidePopover();
  showToast(RESULTS[button] ?? "");
  showState(Promise.resolve(answer));
}

document.querySelectorAll("[data-press]").forEach((button) => {
  button.addEventListener("click", () => pressButton(button.dataset.press));
});
$("resume").addEventListener("click", () => pressButton("resume"));
$("power").addEventListener("beforetoggle", (event) => {
  $("power-told").textContent = "";
  if (event.newState === "open") {
    showState();
  }
});

soundButton($("sound"), showToast, () => rfb?.focus());
usbMenu($("usb"));

// --- arrows at the edges show that there are more keys than fit
const strip = $("strip");
function edges() {
  const end = strip.scrollWidth - strip.clientWidth - strip.scrollLeft;
  strip.classList.toggle("before", strip.scrollLeft > 4);
  strip.classList.toggle("after", end > 4);
}
strip.addEventListener("scroll", edges, { passive: true });
new ResizeObserver(edges).observe(strip);

// Somebody who had to log in again returns to the page where it happened.
let returns = null;
try {
  returns = sessionStorage.getItem("transom.page");
  sessionStorage.removeItem("transom.page");
} catch { /* stays here */ }
if (returns === "desktop") {
  location.replace("desktop");
} else {
  arrange();
  connect();
}
