// The clipboard of the machine, which an agent in the guest shares.
import { keepText, remember, remembered, showToast } from "./page.js";

const $ = (id) => document.getElementById(id);

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
    there = answer?.ok ? Boolean((await answer.json()).clipboard) : there;
    $("paste").disabled = !there;
    $("no-agent").hidden = there;
    return there;
  }

  // Takes the text that was copied on this device, if the user wants that.
  async function takeOwn() {
    if (!viewer() || !$("share").checked || !await find()) {
      return;
    }
    const text = await navigator.clipboard.readText().catch(() => "");
    if (text && text !== shared) {
      offer(text);
    }
  }

  $("clipboard").addEventListener("beforetoggle", (event) => {
    if (event.newState === "open") {
      tell("");
      find();
    }
  });
  $("paste").addEventListener("click", () => {
    offer($("text").value);
    tell(`Sent to the machine's clipboard: ${shared.length} characters.`);
  });
  $("share").checked = remembered("share", "no") === "yes";
  $("share").parentElement.hidden = !navigator.clipboard?.readText;
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
