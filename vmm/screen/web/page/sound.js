// The button for sound: frames of 16 bits, two channels, in little-endian order.
const RATE = 48000;
// In seconds: how far ahead frames are scheduled, and how far at most before some are left out.
const LEAD = 0.15;
const MAX_LEAD = 0.6;
// How long the browser may take to start playing before the user gets an explanation, in
// milliseconds.
const MAX_STARTING = 5000;

// Calls `say` with a message, and `after` when the button was pressed.
export function soundButton(button, say, after) {
  // The audio context, its socket, the time at which the next frames begin, and for those who look
  // for a fault: the frames that were scheduled, and how often they came too late or too early.
  let sound = null;

  function stop() {
    const last = sound;
    sound = null;
    last?.socket.close();
    last?.context.close();
    button.setAttribute("aria-pressed", "false");
  }

  function start() {
    const context = new AudioContext({ sampleRate: RATE, latencyHint: "interactive" });
    const url = new URL("audio", location.href);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url);
    socket.binaryType = "arraybuffer";
    sound = { context, socket, next: 0, frames: 0, gaps: 0 };
    const own = sound;
    socket.onmessage = (event) => play(own, event.data);
    socket.onclose = () => {
      if (sound === own) {
        stop();
        say("The sound has ended.");
      }
    };
    // Firefox waits for ever on a device without a sound card. A headset may only be slow.
    setTimeout(() => {
      if (sound === own && context.state !== "running") {
        say("The browser plays no sound yet: this device may have no output for it.");
      }
    }, MAX_STARTING);
    button.setAttribute("aria-pressed", "true");
  }

  // Schedules frames right behind those before. After a silence, they begin a moment from now.
  function play(own, bytes) {
    const count = Math.floor(bytes.byteLength / 4);
    const { context } = own;
    if (sound !== own || count === 0 || context.state !== "running") {
      return;
    }
    const now = context.currentTime;
    if (own.next < now) {
      own.gaps += own.next > 0 ? 1 : 0;
      own.next = now + LEAD;
    } else if (own.next > now + MAX_LEAD) {
      own.gaps += 1;
      return;
    }
    const [view, buffer] = [new DataView(bytes), context.createBuffer(2, count, RATE)];
    for (let channel = 0; channel < 2; channel += 1) {
      const samples = buffer.getChannelData(channel);
      for (let at = 0; at < count; at += 1) {
        samples[at] = view.getInt16(4 * at + 2 * channel, true) / 32768;
      }
    }
    const source = context.createBufferSource();
    source.buffer = buffer;
    source.connect(context.destination);
    source.start(own.next);
    own.next += count / RATE;
    own.frames += count;
    Object.assign(button.dataset, { frames: own.frames, gaps: own.gaps });
  }

  button.addEventListener("click", () => {
    if (sound) {
      stop();
    } else {
      start();
    }
    after();
  });
}
