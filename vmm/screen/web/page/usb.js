// The USB devices of the host, which are attached to the machine and detached.
import { refusal } from "./page.js";

const API = "api/v1/usb";

// Fills the menu whenever it opens.
export function usbMenu(menu) {
  const [list, told] = [menu.querySelector("ul"), menu.querySelector(".told")];

  async function ask(order) {
    const post = order && { method: "POST", body: JSON.stringify(order), headers: { "Content-Type": "application/json" } };
    const answer = await fetch(API, { cache: "no-store", ...post }).catch(() => null);
    if (!answer?.ok) {
      told.textContent = reason(await refusal(answer));
      return null;
    }
    return answer.json();
  }

  function row(device, entry) {
    const item = document.createElement("li");
    const [name, button] = [document.createElement("span"), document.createElement("button")];
    name.textContent = device.name || `${hex(device.vendor)}:${hex(device.product)}`;
    name.title = `${hex(device.vendor)}:${hex(device.product)}, bus ${device.bus}, port ${device.port}`;
    button.textContent = entry ? "Detach" : "Attach";
    button.addEventListener("click", async () => {
      told.textContent = "";
      button.disabled = true;
      // The port tells two devices of one kind apart.
      const words = `hostbus=${device.bus},hostport=${device.port}`;
      await ask(entry ? { detach: { name: entry.device } } : { attach_host: { device: words } });
      await show();
    });
    item.append(name, button);
    return item;
  }

  async function show() {
    const found = await ask();
    if (!found) {
      return;
    }
    const at = ({ bus, address }) => found.configured.find((entry) => entry.at?.[0] === bus && entry.at?.[1] === address);
    const rows = found.host.map((device) => row(device, at(device)));
    list.replaceChildren(...rows);
    menu.querySelector(".none").hidden = rows.length > 0;
  }

  menu.addEventListener("beforetoggle", (event) => {
    if (event.newState === "open") {
      told.textContent = "";
      show();
    }
  });
}

// The API refuses with JSON, the gate with text.
function reason(text) {
  try {
    return JSON.parse(text).error ?? text;
  } catch {
    return text;
  }
}

function hex(number) {
  return number.toString(16).padStart(4, "0");
}
