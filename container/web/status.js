// Shows the progress of the pod, and reloads for the viewer when there is a screen.
const part = (id) => document.getElementById(id);
const seen = ["booting", "running", "asleep"];
// Steps of an installation, each with the stages that belong to it.
const steps = [
  ["Copy Windows to the disk", ["windows-pe", "find-image", "partition", "apply-image", "boot", "copy"]],
  ["Adapt Windows to the machine", ["applied", "specialize"]],
  ["Install drivers and log on", ["setup-complete", "logged-on"]],
  ["Run install.bat, if there is one", ["install-bat"]],
  ["Ready", ["ready"]],
];
let shown = 0;
let busy = false;
let account;

// Formats a number of seconds.
function span(seconds) {
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

// Fetches new lines of the log. It needs a login; without one the log stays hidden.
async function lines(count) {
  if (busy || count <= shown) return;
  busy = true;
  try {
    const answer = await fetch(`log?after=${shown}`, { redirect: "error" });
    if (!answer.ok) return;
    const log = await answer.json();
    const box = part("lines");
    const end = box.scrollTop + box.clientHeight >= box.scrollHeight - 20;
    box.append(log.lines.map((line) => `${line}\n`).join(""));
    if (end) box.scrollTop = box.scrollHeight;
    shown = log.count;
    part("log").hidden = false;
  } catch {
    // The next event tries again.
  } finally {
    busy = false;
  }
}

function code(text) {
  const element = document.createElement("code");
  element.textContent = text;
  return element;
}

// Shows the password that was made for Windows. It needs a login, too.
async function logon(done) {
  const get = () => fetch("account", { redirect: "error" }).then((it) => it.ok ? it.json() : null, () => null);
  if (done) account ??= get();
  const made = done ? await account : null;
  part("account").hidden = !made;
  if (!made) return;
  part("account").replaceChildren("Log on to Windows as ", code(made.user), " with the password ", code(made.password));
}

// Marks as code: names of variables with their values, and text in backticks.
const variables = new Set(document.body.dataset.variables.split(" "));
function sentence(text) {
  const words = text.split(/(`[^`]+`|\b[A-Z][A-Z0-9_]*\b(?:=(?:"[^"]*"|[^\s:;,)]+))?)/);
  return words.map((word, index) => {
    const bare = word.replaceAll("`", "");
    if (index % 2 === 0 || (bare === word && !variables.has(word.split("=")[0]))) return word;
    return code(bare);
  });
}

// Shows the steps of an installation. Returns whether it goes on.
function install(installation) {
  const list = part("steps");
  list.hidden = installation === undefined;
  if (installation?.failed === undefined) delete document.body.dataset.install;
  if (installation === undefined) return false;
  const { stage, failed, install_status: status } = installation;
  const now = steps.findIndex(([, stages]) => stages.includes(stage));
  const ready = stage === "ready";
  list.replaceChildren(...steps.map(([text, stages], index) => {
    const item = document.createElement("li");
    const ended = stages.includes("install-bat") && status !== undefined;
    item.textContent = ended ? `Run install.bat: it ended with status ${status}` : text;
    if (index < now || ready) item.className = ended && status !== 0 ? "bad" : "done";
    else if (index === now) item.setAttribute("aria-current", "step");
    return item;
  }));
  if (failed !== undefined && document.body.dataset.install !== "failed") {
    document.body.dataset.install = "failed";
    part("log").open = true;
  }
  return failed === undefined && !ready;
}

// Tells people that they need not stay.
function hint({ transfer }, installs) {
  part("hint").hidden = transfer === undefined && !installs;
  part("hint").textContent = `You can close this page: the ${installs ? "installation" : "download"} goes on.`;
}

function fail(scene) {
  const name = document.title;
  document.body.dataset.phase = "failed";
  part("bar").hidden = true;
  part("steps").hidden = true;
  part("open").hidden = true;
  part("hint").hidden = true;
  part("mark").removeAttribute("hidden");
  part("title").textContent = scene.phase === "running" ? `${name} has stopped` : `${name} did not start`;
  part("doing").replaceChildren(...sentence(scene.failed));
  part("left").textContent = "This page updates automatically when the container is started again.";
  part("log").open = true;
  lines(scene.lines);
}

function show(scene) {
  if (scene.failed !== undefined) {
    fail(scene);
    return;
  }
  if (document.body.dataset.screen === "yes" && seen.includes(scene.phase)) {
    location.reload();
    return;
  }
  document.body.dataset.phase = scene.phase;
  part("mark").setAttribute("hidden", "");
  part("title").textContent = document.title;
  const busy = install(scene.installation);
  const still = ["running", "asleep"].includes(scene.phase) && !busy;
  hint(scene, busy);
  logon(still && scene.installation?.failed === undefined);
  part("bar").hidden = still;
  part("left").hidden = still;
  part("open").hidden = document.body.dataset.link !== "yes" || !seen.includes(scene.phase);
  part("doing").textContent = scene.doing || "Starting…";
  const bar = part("bar");
  if (scene.thousandths === undefined) bar.removeAttribute("value");
  else bar.value = scene.thousandths / 1000;
  const percent = scene.thousandths === undefined ? "" : `${(scene.thousandths / 10).toFixed(1)} %`;
  const left = scene.seconds_left === undefined ? "" : `about ${span(scene.seconds_left)} left`;
  // Lines end between the figures only.
  const figures = [percent, ...rate(scene.transfer), left].filter(Boolean);
  part("left").textContent = figures.map((it) => it.replaceAll(" ", "\u00a0")).join(", ");
  lines(scene.lines);
}

// As in "1.2 of 7.7 GB" and "45.6 MB/s".
function rate(transfer) {
  if (transfer === undefined) return [];
  const giga = (bytes) => (bytes / 1e9).toFixed(1);
  const speed = (transfer.bytes_per_second / 1e6).toFixed(1);
  return [`${giga(transfer.bytes)} of ${giga(transfer.of)} GB`, `${speed} MB/s`];
}

function listen() {
  const events = new EventSource("events");
  events.onmessage = (event) => show(JSON.parse(event.data));
  events.onerror = () => {
    // The error stays visible until the container is started again.
    if (document.body.dataset.phase !== "failed") {
      document.body.dataset.phase = "lost";
      part("left").textContent = "The connection is lost; trying again…";
    }
    // Browsers do not reconnect after an error status, such as for too many clients.
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 10000);
  };
}

// The scene when the page was made.
show(JSON.parse(document.body.dataset.scene));
listen();
