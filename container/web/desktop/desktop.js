// The page of the remote desktop: it signs in, reconnects by itself, and follows the window. The
// client is IronRDP; the pod's gateway connects it with the guest. All URLs are relative to the page.
import { Backend, displayControl, init } from "./ironrdp/iron-remote-desktop-rdp.js";
import { clipboardOf, filesOf, printerExtensions } from "./clipboard.js";
import { inputOf } from "./input.js";
import { fullScreenAndMenus, refusal, remember, remembered, showToast } from "./page.js";
import { soundButton } from "./sound.js";

const $ = (id) => document.getElementById(id);
const { DesktopSize, SessionBuilder } = Backend;
// Times are in milliseconds. Between attempts to connect; the delay doubles after each.
const FIRST_DELAY = 500;
const MAX_DELAY = 10000;
const MAX_CONNECTING = 30000;
// A session that ends sooner counts as a failed attempt.
const MIN_LIFETIME = 5000;
// A window that has not changed for this long has its final size.
const SETTLED = 300;
// A server that has not changed its size for this long is asked again, so many times.
const ANSWERED = 1500;
const MAX_ATTEMPTS = 4;
const MAX_FAILURES = 1;
// Limits of a desktop's size (MS-RDPEDISP 2.2.2.2.1).
const [MIN_SIDE, MAX_SIDE] = [200, 8192];
// Kinds of errors of the client.
const [WRONG_PASSWORD, LOGON_FAILURE, ACCESS_DENIED, GATEWAY, NO_SOCKET] = [1, 2, 3, 4, 5];
const NEGOTIATION_FAILURE = 6;
const CERTIFICATE_CHANGED = 409;
// The card for another certificate than the known one, and for one of a server without CredSSP.
const CHANGED = [
  "The remote desktop has another certificate than before.",
  "Windows renews its own twice a year, and a new installation has a new one. Otherwise, somebody else may answer.",
];
const UNPROVEN = [
  "The remote desktop asks for the password, and does not prove that it knows it.",
  "Windows proves it. Trust this certificate only if the machine has another server, such as xrdp.",
];
// Sentences for the gateway's refusals, by status.
const REFUSALS = {
  403: "With view-only access, there is no desktop.",
  501: "Port 3389 of the machine does not speak RDP.",
  502: "The remote desktop does not answer.",
  503: "Too many desktops are open.",
  504: "The remote desktop does not answer in time.",
  525: "The remote desktop does not speak TLS 1.2. Windows 7 needs its updates for that.",
};

let session = null;
let ready = null;
let delay = FIRST_DELAY;
let timer = 0;
// The account that signs in: the machine's own, or the one of the form.
let account = null;
let facts = {};

// The client makes its WebSocket itself. The page needs its end, and the host's last words.
let socket = null;
window.WebSocket = class extends WebSocket {
  constructor(...words) {
    super(...words);
    if (String(words[0]).endsWith("/desktop/socket")) {
      socket = this;
      this.farewell = "";
      this.addEventListener("close", (event) => { this.farewell = event.reason; });
    }
  }
};

// Shows the state, and a card over the picture with the parts named in `offers`.
function show(state, word, reason = "", how = "", offers = []) {
  document.body.dataset.state = state;
  $("state").textContent = word;
  $("reason").textContent = reason;
  $("how").textContent = how;
  $("how").hidden = !how;
  for (const part of ["login", "trust", "prints", "again", "back"]) {
    $(part).hidden = !offers.includes(part) || (part === "back" && !facts.console);
  }
  $("again").textContent = offers.includes("trust") ? "Try again" : "Connect";
  $("cover").hidden = !reason;
}

const getSession = () => session;
const input = inputOf($("screen"), $("typed"), getSession, () => remembered("desktop-keys", "place") === "letter");
const clipboard = clipboardOf({
  canvas: $("screen"), session: getSession, paste: input.paste, say: showToast,
  show: (text) => { $("text").value = text; },
  upload,
});
let files = null;
function upload(list) {
  if (session) {
    files.upload(list);
  } else {
    showToast("The desktop is not connected.");
  }
}

// --- the size of the desktop
// A desktop has as many pixels as the window shows, so that letters are sharp.
function wanted() {
  const side = (length) => Math.min(Math.max(Math.round(length * devicePixelRatio), MIN_SIDE), MAX_SIDE);
  const { clientWidth, clientHeight } = $("pane");
  // The width must be even.
  return [side(clientWidth) & ~1, side(clientHeight)];
}

let settled = 0;
let sent = "";
let attempts = 0;
function resize() {
  attempts = MAX_ATTEMPTS;
  clearTimeout(settled);
  settled = setTimeout(sendSize, SETTLED);
}

// A server ignores a size that comes before its channel for sizes is open, or while it changes.
function sendSize() {
  const [width, height] = wanted();
  const scale = Math.min(Math.max(Math.round(devicePixelRatio * 100), 100), 500);
  const size = `${width}x${height}@${scale}`;
  const follows = remembered("desktop-size", "follow") === "follow";
  const fits = sent === size && document.body.dataset.size === `${width}x${height}`;
  if (!session || !follows || fits || attempts === 0) {
    return;
  }
  attempts -= 1;
  sent = size;
  session.resize(width, height, scale);
  clearTimeout(settled);
  settled = setTimeout(sendSize, ANSWERED);
}
new ResizeObserver(resize).observe($("pane"));

// --- the connection
let busy = false;
async function connect() {
  clearTimeout(timer);
  if (session || busy) {
    return;
  }
  busy = true;
  try {
    await attempt();
  } finally {
    busy = false;
  }
}

async function attempt() {
  show("connecting", "connecting", "Connecting…");
  const answer = await fetch("desktop/session", { cache: "no-store" }).catch(() => null);
  if (answer?.status === 401) {
    try { sessionStorage.setItem("transom.page", "desktop"); } catch { /* returns to the console */ }
    location.replace("login");
    return;
  }
  if (!answer?.ok) {
    retryLater(answer ? await answer.text() : "The machine is off, or its host cannot be reached.");
    return;
  }
  facts = await answer.json();
  $("name").textContent = facts.name;
  document.title = `${facts.name}: desktop`;
  $("sound").hidden = !facts.sound;
  $("console").hidden = !facts.console;
  account ??= facts.login;
  if (facts.certificate && !triesAgain) {
    askForTrust();
  } else if (facts.why) {
    retryLater(`There is no remote desktop yet: ${facts.why}.`);
  } else if (!account) {
    askForLogin("Sign in to Windows");
  } else if (facts.connected.length > 0 && !takesOver) {
    show("waiting", "in use", `Somebody is using the desktop, from ${facts.connected.join(", ")}.`,
      "Windows disconnects that person if you sign in with the same account.", ["again", "back"]);
    takesOver = true;
  } else {
    await signIn();
  }
}
let takesOver = false;
// The user wants to see whether the known certificate is back.
let triesAgain = false;
// Attempts in a row that ended for an unknown reason while signing in.
let failures = 0;

async function signIn() {
  takesOver = false;
  triesAgain = false;
  const began = Date.now();
  socket = null;
  // A server that says nothing more would keep the page connecting for ever.
  const limit = setTimeout(() => socket?.close(), MAX_CONNECTING);
  try {
    ready ??= init("warn");
    await ready;
    session = await build().connect();
  } catch (error) {
    files?.provider.dispose();
    refused(error);
    return;
  } finally {
    clearTimeout(limit);
  }
  failures = 0;
  files.provider.setSession(session);
  show("connected", "connected");
  const running = session.run();
  // The client gives the canvas its size as soon as it runs.
  setTimeout(() => {
    measure();
    sent = `${document.body.dataset.size}@100`;
    resize();
  });
  $("screen").focus({ preventScroll: true });
  let reason = "The connection was lost.";
  let ended = false;
  try {
    reason = (await running).reason();
    ended = true;
  } catch (error) {
    console.warn(error.backtrace?.() ?? error);
    reason = socket?.farewell || reason;
  }
  session = null;
  // After an error, the client leaves its WebSocket open.
  socket?.close();
  files.provider.dispose();
  if (Date.now() - began > MIN_LIFETIME) {
    delay = FIRST_DELAY;
  }
  if (ended) {
    show("waiting", "not connected", "The desktop was closed.", reason, ["again", "back"]);
  } else {
    // The host may count the lost connection for a while.
    takesOver = true;
    retryLater(reason);
  }
}

function build() {
  const url = new URL("desktop/socket", location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  const [width, height] = wanted();
  files = filesOf({ said: showTransfer, listed: listFiles });
  const builder = new SessionBuilder()
    .username(account.user)
    .password(account.password)
    // The gateway knows where the machine is, and the cookie says who asks.
    .destination("machine:3389")
    .authToken("cookie")
    .serverDomain("")
    .proxyAddress(url.href)
    .desktopSize(new DesktopSize(width, height))
    .renderCanvas($("screen"))
    .setCursorStyleCallbackContext(null)
    .setCursorStyleCallback(showCursor)
    .canvasResizedCallback(measure)
    .remoteClipboardChangedCallback(clipboard.copied)
    .forceClipboardUpdateCallback(clipboard.again)
    .extension(displayControl(true));
  const more = [...files.provider.getBuilderExtensions(), ...printerExtensions(showToast)];
  more.forEach((extension) => builder.extension(extension));
  return builder;
}

function measure() {
  const { width, height } = $("screen");
  document.body.dataset.size = `${width}x${height}`;
}

function showCursor(kind, data, x, y) {
  const image = data === undefined ? "default" : `url(${data}) ${Math.round(x)} ${Math.round(y)}, default`;
  $("screen").style.cursor = kind === "hidden" ? "none" : image;
}

// The client's errors have a kind.
function refused(error) {
  const kind = error.kind?.();
  console.warn(error.backtrace?.() ?? error);
  if (kind === WRONG_PASSWORD || kind === LOGON_FAILURE) {
    askForLogin("Windows does not know this name or password.");
  } else if (kind === ACCESS_DENIED) {
    askForLogin("Windows does not let this user sign in by remote desktop.");
  } else if (kind === NEGOTIATION_FAILURE) {
    show("waiting", "not connected", "The remote desktop asks for another kind of sign-in.", "", ["again", "back"]);
  } else if (kind === GATEWAY) {
    const status = error.rdcleanpathDetails?.()?.httpStatusCode;
    if (status === CERTIFICATE_CHANGED) {
      connectAgain();
    } else {
      retryLater(REFUSALS[status] ?? "The remote desktop does not answer.");
    }
  } else if (kind === NO_SOCKET) {
    retryLater("The connection to the host does not open. A proxy in between must pass WebSockets on.");
  } else if (failures < MAX_FAILURES) {
    failures += 1;
    retryLater("The connection to the remote desktop failed.");
  } else {
    // Servers do not always say that it is the password, and Windows locks an account after several.
    failures = 0;
    askForLogin("The sign-in failed. Is the password right?");
  }
}

function retryLater(reason) {
  show("waiting", "not connected", reason.trim(), "Trying again…", ["again", "back"]);
  clearTimeout(timer);
  timer = setTimeout(connect, delay);
  delay = Math.min(2 * delay, MAX_DELAY);
}

// Another attempt, once this one is over.
function connectAgain() {
  clearTimeout(timer);
  timer = setTimeout(connect, 0);
}

function retryNow() {
  if (!session && document.body.dataset.state === "waiting" && $("login").hidden) {
    delay = FIRST_DELAY;
    connect();
  }
}

$("again").addEventListener("click", () => {
  triesAgain = true;
  retryNow();
});
addEventListener("online", () => $("how").textContent === "Trying again…" && retryNow());
addEventListener("pageshow", (event) => event.persisted && location.reload());

// --- the card's questions
function askForLogin(reason) {
  show("waiting", "sign in", reason, "", ["login", "back"]);
  $("user").value = account?.user ?? "";
  $("password").value = "";
  account = null;
  $($("user").value ? "password" : "user").focus();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  account = { user: $("user").value, password: $("password").value };
  delay = FIRST_DELAY;
  connect();
});

function askForTrust() {
  const { kept, shown } = facts.certificate;
  const [reason, how] = kept ? CHANGED : UNPROVEN;
  show("waiting", "not connected", reason, how, ["trust", "prints", "again", "back"]);
  $("prints").textContent = kept ? `New: ${shown}\nKnown: ${kept}` : shown;
}

$("trust").addEventListener("click", async () => {
  const body = JSON.stringify({ fingerprint: facts.certificate.shown });
  const head = { method: "POST", headers: { "Content-Type": "application/json" }, body };
  const answer = await fetch("desktop/trust", head).catch(() => null);
  if (!answer?.ok) {
    showToast(await refusal(answer));
  }
  connect();
});

// --- tools
$("cad").addEventListener("click", () => {
  input.chord("ControlLeft", "AltLeft", "Delete");
  $("screen").focus();
});
$("win").addEventListener("click", () => {
  input.chord("MetaLeft");
  $("screen").focus();
});
$("board").addEventListener("click", () => $("typed").focus({ preventScroll: true }));
soundButton($("sound"), showToast, () => $("screen").focus());

fullScreenAndMenus(() => $("screen").focus());

for (const [key, otherwise] of [["desktop-size", "follow"], ["desktop-keys", "place"]]) {
  document.querySelectorAll(`input[name=${key}]`).forEach((it) => {
    it.checked = it.value === remembered(key, otherwise);
    it.addEventListener("change", () => {
      remember(key, it.value);
      resize();
    });
  });
}

// --- clipboard and files
function tell(text) {
  $("told").textContent = text;
}
$("text").addEventListener("input", () => tell(""));
$("paste").addEventListener("click", async () => {
  if (!session) {
    tell("Not sent: the desktop is not connected.");
    return;
  }
  await clipboard.offerText($("text").value);
  tell("Sent to the machine's clipboard: paste it there.");
});
$("type").addEventListener("click", () => {
  input.type($("text").value.replaceAll("\r\n", "\n"));
  $("clipboard").hidePopover();
});
$("copy").addEventListener("click", () => {
  $("text").select();
  tell(document.execCommand("copy") ? "Copied." : "The browser does not allow that: press Ctrl-C.");
});

function showTransfer(text, part) {
  $("transfer").textContent = text;
  $("moved").hidden = part === undefined;
  $("moved").value = part ?? 0;
  if (!$("files").matches(":popover-open")) {
    showToast(text);
  }
}

function listFiles(list) {
  const plain = list.map((file, at) => [file, at]).filter(([file]) => !file.isDirectory);
  $("offered").replaceChildren(...plain.map(([file, at]) => {
    const [line, name, button] = ["li", "span", "button"].map((it) => document.createElement(it));
    name.textContent = `${file.path ? `${file.path}\\` : ""}${file.name} (${file.size.toLocaleString()} bytes)`;
    button.textContent = "Download";
    button.addEventListener("click", () => files.download(file, at));
    line.append(name, button);
    return line;
  }));
  $("all").hidden = plain.length < 2;
  $("all").onclick = async () => {
    for (const [file, at] of plain) {
      await files.download(file, at);
    }
  };
  if (plain.length > 0) {
    showToast(`${plain.length === 1 ? "1 file was" : `${plain.length} files were`} copied in the machine: “Files” above downloads.`);
  }
}

$("choose").addEventListener("click", () => $("chosen").click());
$("chosen").addEventListener("change", () => {
  upload([...$("chosen").files]);
  $("chosen").value = "";
});
addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("over");
});
addEventListener("dragleave", () => document.body.classList.remove("over"));
addEventListener("drop", async (event) => {
  event.preventDefault();
  document.body.classList.remove("over");
  if (session) {
    upload(await files.provider.handleDrop(event));
  }
});

connect();
