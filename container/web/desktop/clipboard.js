// The clipboard of the remote desktop: text, HTML, pictures; and files by the same channel.
import { Backend, PrinterDriverName, RdpFileTransferProvider, printJobStreamCallbacks, printerDriverName, printerName } from "./ironrdp/iron-remote-desktop-rdp.js";
import { keepText } from "./page.js";

const { ClipboardData } = Backend;
// Formats of text, the plain one first, and the one for pictures.
const TEXTS = ["text/plain", "text/html"];
const PICTURE = "image/png";
const PRINTER = "Browser";
// How long the browser keeps the content of a download at least, in milliseconds.
const KEPT = 60000;

// Connects the page's clipboard with that of a session. `parts` are elements and functions of the page.
export function clipboardOf({ canvas, session, paste, say, show, upload }) {
  // What was sent last: the machine may ask for it again.
  let last = null;

  async function offer(data) {
    last = data;
    await session()?.onClipboardPaste(data);
  }

  // Puts a text on the machine's clipboard.
  async function offerText(text) {
    const data = new ClipboardData();
    data.addText(TEXTS[0], text.replaceAll("\r\n", "\n"));
    await offer(data);
  }

  // The machine has copied something.
  async function copied(data) {
    const items = Object.fromEntries(data.items().map((item) => [item.mimeType(), item.value()]));
    const text = items[TEXTS[0]];
    if (text !== undefined) {
      show(text);
    }
    if (Object.keys(items).length === 0 || await keep(items)) {
      return;
    }
    say(text === undefined ? "The browser does not allow pictures to be copied here." : "Copied in the machine: “Clipboard” above has the text.");
  }

  // Pastes are those of the browser, which need no permission.
  addEventListener("paste", async (event) => {
    if (document.activeElement !== canvas || !session()) {
      return;
    }
    event.preventDefault();
    const { clipboardData } = event;
    const files = [...clipboardData.files].filter((file) => file.type !== PICTURE || clipboardData.types.includes("text/uri-list"));
    if (files.length > 0) {
      upload(files);
      return;
    }
    const data = new ClipboardData();
    for (const kind of TEXTS) {
      const text = clipboardData.getData(kind);
      if (text) {
        data.addText(kind, text.replaceAll("\r\n", "\n"));
      }
    }
    const picture = [...clipboardData.files].find((file) => file.type === PICTURE);
    if (picture) {
      data.addBinary(PICTURE, new Uint8Array(await picture.arrayBuffer()));
    }
    if (!data.isEmpty()) {
      await offer(data);
    }
    paste();
  });

  const again = () => session()?.onClipboardPaste(last ?? new ClipboardData());
  return { again, copied, offerText };
}

// Puts what the machine copied on the clipboard of this device. Says whether it is there.
async function keep(items) {
  try {
    const known = Object.entries(items).filter(([kind]) => TEXTS.includes(kind) || kind === PICTURE);
    const blobs = Object.fromEntries(known.map(([kind, value]) => [kind, new Blob([value], { type: kind })]));
    await navigator.clipboard.write([new ClipboardItem(blobs)]);
    return true;
  } catch {
    const text = items[TEXTS[0]];
    return text !== undefined && keepText(text);
  }
}

// A download of the browser.
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), KEPT);
}

// Files in both directions. `said` shows a sentence and a part of 1; `listed` the files that the machine offers.
export function filesOf({ said, listed }) {
  const provider = new RdpFileTransferProvider();
  provider.on("files-available", listed);
  provider.on("download-progress", (it) => said(`${it.fileName}: ${Math.floor(it.percentage)} %`, it.percentage / 100));
  provider.on("upload-progress", (it) => said(`${it.fileName}: ${Math.floor(it.percentage)} %`, it.percentage / 100));
  provider.on("upload-complete", (file) => said(`${file.name} is in the machine.`));
  provider.on("error", (it) => said(`${it.fileName ?? "The transfer"}: ${it.message}`));
  const upload = (files) => {
    const count = files.length;
    if (count === 0) {
      return;
    }
    try {
      provider.uploadFiles(files).completion.catch((error) => said(error.message));
    } catch {
      said("The files before still wait: paste them in the machine first, or reload this page.");
      return;
    }
    said(`${count === 1 ? "1 file is" : `${count} files are`} on the machine's clipboard: paste in a folder there.`);
  };
  const download = async (file, at) => {
    try {
      save(await provider.downloadFile(file, at).completion, file.name);
      said(`${file.name} is downloaded.`);
    } catch (error) {
      said(error.message);
    }
  };
  return { provider, upload, download };
}

// A printer whose jobs are downloads.
export function printerExtensions(say) {
  const jobs = new Map();
  const callbacks = {
    onJobStart: (id) => jobs.set(id, []),
    onJobData: (id, chunk) => jobs.get(id)?.push(chunk.slice()),
    onJobError: (id) => {
      jobs.delete(id);
      say("The print job ended with an error.");
    },
    onJobComplete: (id) => {
      const chunks = jobs.get(id) ?? [];
      jobs.delete(id);
      save(new Blob(chunks, { type: "application/pdf" }), "print.pdf");
      say("The print job is downloaded.");
    },
  };
  return [printerName(PRINTER), printerDriverName(PrinterDriverName.MicrosoftPrintToPdf), printJobStreamCallbacks(callbacks)];
}
