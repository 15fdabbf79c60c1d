// The clipboard of the machine, which an agent in the guest shares.
import { keepText, remember, remembered, showToast } from "./page.js";

const $ = (id) => document.getElementById(id);
// As MAX_TEXT_BYTES of the host.
const MAX_BYTES = 1 << 20;

// Connects the menu. `viewer` gives noVNC's connection, or null while nothing can be sent.
export function agentClipboard(viewer, tell) {
  // The text that both sides have.
  let shared = "";
  function offer(text) {
    shared = text;
    viewer()?.clipboardPasteFrom(text);
  }

  // The agent may have come or gone.
  let there = false;
  async function find() {
    const answer = await fetch("machine", { cache: "no-store" }).catch(() => null);
    const state = answer?.ok ? (await answer.json()).clipboard : there;
    there = state === true;
    $("paste").disabled = !there;
    $("no-agent").hidden = there || state === null;
    $("no-port").hidden = state !== null;
    return there;
  }

  // Takes the text that was copied on this device, if the user wants that.
  async function takeOwn() {
    if (!viewer() || !$("share").checked || !await find()) {
      return;
    }
    const text = await navigator.clipboard.readText().catch(() => null);
    if (text === null) {
      tell("The browser does not let this page read the clipboard: paste the text here, and press “Send”.");
    } else if (text && text !== shared) {
      offer(text);
    }
  }

  $("clipboard").addEventListener("beforetoggle", (event) => {
    if (event.newState === "open") {
      tell("");
      find();
    }
  });
  $("paste").addEventListener("click", async () => {
    const text = $("text").value;
    if (new TextEncoder().encode(text).length > MAX_BYTES) {
      tell("Not sent: the text is longer than 1 MiB.");
    } else if (!await find() || !viewer()) {
      tell("Not sent: the machine does not take it now.");
    } else {
      offer(text);
      tell(`Sent to the machine's clipboard: ${[...text].length} characters.`);
    }
  });
  // Firefox and Safari have no such permission: they ask for a click at each text that a page reads.
  navigator.permissions?.query({ name: "clipboard-read" }).then(() => {
    $("share").checked = remembered("share", "no") === "yes";
    $("share").parentElement.hidden = !navigator.clipboard?.readText;
  }, () => {});
  $("share").addEventListener("change", () => {
    remember("share", $("share").checked ? "yes" : "no");
    takeOwn();
  });
  addEventListener("focus", takeOwn);

  // The machine has copied a text.
  async function copied(text) {
    $("text").value = text;
    shared = text;
    const kept = await keepText(text);
    showToast(kept ? "Copied in the machine: paste it here." : "Copied in the machine: “Clipboard” above has the text.");
  }
  return { copied };
}
