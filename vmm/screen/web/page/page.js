// Parts of the pages of the screen and of the remote desktop, which have the same elements.
const $ = (id) => document.getElementById(id);
// How long a message stays, in milliseconds.
const TOAST_TIME = 6000;
// What the field of a phone's keyboard contains, so that it can be deleted.
const FILL = "\u00a0".repeat(16);

// --- settings that are remembered, unless the browser forbids it
export function remember(key, value) {
  try { localStorage.setItem(`transom.${key}`, value); } catch { /* not remembered */ }
}

export function remembered(key, otherwise) {
  try { return localStorage.getItem(`transom.${key}`) ?? otherwise; } catch { return otherwise; }
}

// Shows a message at the lower edge for a while.
let toastTimer = 0;
export function showToast(text) {
  $("toast").textContent = text;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { $("toast").textContent = ""; }, TOAST_TIME);
}

// The reason why the host refused a request, or did not answer.
export async function refusal(answer) {
  return answer ? (await answer.text()).trim() : "The host cannot be reached.";
}

// Puts a text on the clipboard of this device. Says whether it is there.
export async function keepText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without TLS, browsers have only the old way, shortly after a key or a click.
    const put = (event) => {
      event.preventDefault();
      event.clipboardData.setData("text/plain", text);
    };
    document.addEventListener("copy", put, { once: true });
    const done = document.execCommand("copy");
    document.removeEventListener("copy", put);
    return done;
  }
}

// Connects the button for the full screen, and the handle for the tools there. `focus` gives the
// keyboard back to the picture, also after a menu.
export function fullScreenAndMenus(focus) {
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
    // Sends Escape, Alt-Tab and the like to the machine, where browsers allow it.
    if (full) {
      navigator.keyboard?.lock?.().catch(() => {});
    } else {
      navigator.keyboard?.unlock?.();
    }
    focus();
  });
  $("handle").addEventListener("click", () => document.body.classList.toggle("shown"));
  document.querySelectorAll(".menu").forEach((menu) => menu.addEventListener("toggle", (event) => {
    if (event.newState === "closed" && document.activeElement === document.body) {
      focus();
    }
  }));
}

// Text from a phone's keyboard, which sends changes of a text instead of keys.
export function phoneKeyboard(field, backspace, type) {
  let before = FILL;
  const clear = () => {
    field.value = FILL;
    before = FILL;
  };
  clear();
  field.addEventListener("blur", clear);
  field.addEventListener("input", (event) => {
    // While a word is being composed, the machine gets each change of it.
    const after = field.value;
    let same = 0;
    while (same < before.length && before[same] === after[same]) {
      same += 1;
    }
    for (let count = before.length - same; count > 0; count -= 1) {
      backspace();
    }
    type(after.slice(same));
    before = after;
    if (!event.isComposing && (after.length < 8 || after.length > 200)) {
      clear();
    }
  });
}
