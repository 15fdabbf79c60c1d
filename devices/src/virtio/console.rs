//! virtio-serial: a console or a named port (VIRTIO 1.3, 5.3). Each device has one port.
//!
//! A console is port 0, which also works with drivers that support a single port only. A named port
//! is port 1, as in QEMU: port 0 is reserved for a console, and this device has none. The guest
//! learns whether a client is connected to a named port. A console is always open.
//!
//! **A client that does not read.** For a named port the guest's buffers are held until the client
//! has room or disconnects, so the writing program in the guest blocks. A console holds them for
//! [`CONSOLE_TIMEOUT`] and then drops the data: Linux holds a lock while it waits, so a stopped
//! terminal would stop the whole guest. QEMU drops it as well, without waiting.
//!
//! Threats: a guest that sends more than the client reads runs out of buffers, and nothing is
//! stored here. If the guest does not read, the bytes stay in the host's socket. Pending control
//! messages are a few flags, however often the guest asks for them and however seldom it reads. One
//! pass moves at most [`BATCH`] buffers each way, at most [`MAX_TRANSFER`] bytes at a time, and
//! never waits for the client, so resets and pauses are not delayed.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Chain, Identity, Queue, Virtio, length, next, on_pci};
use crate::device::{Device, Saved};
use crate::grants::{Build, Grants, HostSide};
use crate::pci::Address;
use host::channel::{Channel, is_retryable};
use host::clipboard;
use host::memory::Piece;
use host::stream::Stream;

/// `--device virtio-serial,name=org.qemu.guest_agent.0,to=socket:/run/agent`
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// PCI slot. Defaults to the first free one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
    /// Name by which programs in the guest find the port. Without a name the port is a console.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Host side of the port: `stdio`, `file:PATH`, `socket:PATH`, `none`, or `clipboard`: text is
    /// copied and pasted between viewers and SPICE's agent in the guest (`spice-vdagent`), which
    /// looks for the name `com.redhat.spice.0`. That is the name by default then.
    #[serde(default)]
    pub to: Stream,
}

/// Feature bits (5.3.3).
const MULTIPORT: u64 = 1 << 1;

/// Entries of each queue, as in QEMU.
const ENTRIES: u16 = 128;
/// Queue numbers (5.3.2): 0 and 1 carry data of port 0, `CONTROL` and the next one control
/// messages, `PORT_1` and the next one data of port 1. The first of each pair leads to the guest.
const CONTROL: u16 = 2;
const PORT_1: u16 = 4;

/// Control messages (5.3.6.2).
const DEVICE_READY: u16 = 0;
const DEVICE_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const CONSOLE_PORT: u16 = 4;
const PORT_OPEN: u16 = 6;
const PORT_NAME: u16 = 7;
/// Bytes of a control message: port, event, value.
const MESSAGE_SIZE: usize = 8;

const MAX_NAME: usize = 128;
/// Maximum number of bytes moved at once.
const MAX_TRANSFER: usize = 4096;
/// How long a console waits for a client that does not read.
const CONSOLE_TIMEOUT: Duration = Duration::from_millis(100);
/// Buffers that are moved before the thread checks whether it must stop.
const BATCH: usize = 32;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let agent = (self.to == Stream::Clipboard).then(|| clipboard::PORT.to_owned());
        let name = self.name.or(agent);
        if let Some(name) = &name {
            let plain = name.chars().all(|letter| letter.is_ascii_graphic() && letter != '/');
            ensure!(
                plain && (1..=MAX_NAME).contains(&name.len()),
                "name={name}: a port's name has 1 to {MAX_NAME} printable ASCII characters \
                 other than spaces and `/`"
            );
        }
        let clipboard = &grants.shared().clipboard;
        let device = Console {
            channel: Some(Channel::open(&self.to, clipboard, grants.goes_on())?),
            name,
            state: State::default(),
            thread: None,
        };
        on_pci(device, self.slot, grants)
    }

    fn host_side(&self) -> HostSide<'_> {
        HostSide::Stream(&self.to)
    }

    fn detach_host_side(&mut self) {
        self.to = Stream::None;
    }
}

/// Saved state: what the driver did, and which control messages are pending.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    /// DEVICE_ADD is pending.
    add: bool,
    /// The port's name or type is pending.
    describe: bool,
    /// The driver sent PORT_READY.
    ready: bool,
    /// The last PORT_OPEN reported a connected client.
    told: bool,
    /// A program in the guest has opened the port.
    open: bool,
    /// Head of the partly sent buffer, and number of bytes already sent.
    taken: Option<(u16, u32)>,
}

struct Console {
    /// None while the thread runs, which owns it.
    channel: Option<Channel>,
    name: Option<String>,
    state: State,
    thread: Option<Thread>,
}

impl Console {
    /// Number of ports reported to the driver, including an unused port 0.
    fn ports(&self) -> u16 {
        if self.name.is_some() { 2 } else { 1 }
    }
}

impl Virtio for Console {
    fn identity(&self) -> Identity {
        let queues = 2 * usize::from(self.ports() + 1);
        Identity {
            id: 3,
            name: "virtio-serial",
            class: 0x07_8000,
            queues: vec![ENTRIES; queues],
            features: MULTIPORT,
        }
    }

    fn config(&self) -> Vec<u8> {
        // Columns and rows (not offered), number of ports, emergency write register (not offered).
        let (none, ports) = ([0; 4], u32::from(self.ports()).to_le_bytes());
        [none, ports, none].concat()
    }

    fn start(&mut self, queues: Vec<Queue>, negotiated: u64) -> anyhow::Result<()> {
        let channel = self.channel.take().context("the port's host side is lost")?;
        let (multiport, name) = (negotiated & MULTIPORT != 0, self.name.clone());
        let port = if name.is_some() { PORT_1 } else { 0 };
        let find = |number: u16| queues.iter().position(|queue| queue.number == number);
        // Without control queues only port 0 exists.
        let exists = multiport || name.is_none();
        let control = |number| find(number).filter(|_| multiport);
        let data = |number| find(number).filter(|_| exists);
        let mut server = Server {
            control_to_guest: control(CONTROL),
            control_from_guest: control(CONTROL + 1),
            input: data(port),
            output: data(port + 1),
            multiport,
            name,
            channel,
            state: std::mem::take(&mut self.state),
            held: None,
            full: false,
            stalled_since: None,
            guest_has_room: false,
            queues,
        };
        server.resume();
        self.thread = Some(Thread::spawn(server)?);
        Ok(())
    }

    fn stop(&mut self) -> Vec<Queue> {
        let Some(thread) = self.thread.take() else { return Vec::new() };
        let mut server = thread.stop();
        server.pause();
        (self.channel, self.state) = (Some(server.channel), server.state);
        server.queues
    }

    fn save(&self) -> Saved {
        Saved::of(&self.state)
    }

    fn restore(&mut self, saved: Saved) -> anyhow::Result<()> {
        let saved: Option<State> = saved.take()?;
        self.state = saved.unwrap_or_default();
        if let Some(channel) = &self.channel {
            channel.guest_listens(self.state.open);
        }
        Ok(())
    }
}

struct Thread {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<Server>>,
}

impl Thread {
    fn spawn(mut server: Server) -> anyhow::Result<Self> {
        let stop = Arc::new(EventFd::new(EFD_NONBLOCK).context("an event for a port")?);
        let epoll = Epoll::new().context("an epoll for a port")?;
        let bells = server.queues.iter().map(|queue| queue.bell.as_raw_fd());
        for fd in bells.chain([stop.as_raw_fd()]) {
            let rings = EpollEvent::new(EventSet::IN, 0);
            epoll.ctl(ControlOperation::Add, fd, rings).context("an event for a port")?;
        }
        let stopped = stop.clone();
        let body = move || {
            server.run(&epoll, &stopped);
            server
        };
        let builder = Builder::new().name("virtio-serial".into());
        Ok(Self { stop, thread: Some(builder.spawn(body).context("a thread for a port")?) })
    }

    fn stop(mut self) -> Server {
        self.join().expect("a port is stopped once")
    }

    fn join(&mut self) -> Option<Server> {
        let thread = self.thread.take()?;
        self.stop.write(1).expect("an eventfd takes a 1");
        Some(thread.join().expect("a panic ends the process"))
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.join();
    }
}

struct Server {
    queues: Vec<Queue>,
    /// Indices in `queues` of the control queues.
    control_to_guest: Option<usize>,
    control_from_guest: Option<usize>,
    /// Indices in `queues` of the data queues: to the guest, and from the guest.
    input: Option<usize>,
    output: Option<usize>,
    multiport: bool,
    name: Option<String>,
    channel: Channel,
    state: State,
    /// The guest's buffer that is being sent, without the part that was sent already.
    held: Option<Chain>,
    /// The client has no room.
    full: bool,
    /// When the client stopped reading.
    stalled_since: Option<Instant>,
    guest_has_room: bool,
}

impl Server {
    fn run(&mut self, epoll: &Epoll, stop: &EventFd) {
        loop {
            let wait = if self.serve() { 0 } else { self.timeout() };
            let others =
                self.channel.poll_events(self.guest_has_room && self.guest_reads(), self.full);
            for (fd, what) in &others {
                // Fails for plain files, which are always ready.
                epoll.ctl(ControlOperation::Add, *fd, EpollEvent::new(*what, 0)).ok();
            }
            // A signal may end the wait early. This is harmless.
            epoll.wait(wait, &mut [EpollEvent::default()]).ok();
            for (fd, _) in others {
                epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default()).ok();
            }
            if stop.read().is_ok() {
                return;
            }
            for queue in &self.queues {
                queue.bell.read().ok();
            }
            self.channel.accept_or_drop(self.guest_reads());
        }
    }

    /// Milliseconds until buffers are dropped, or -1 for no limit.
    fn timeout(&self) -> i32 {
        let since = self.stalled_since.filter(|_| self.full && self.name.is_none());
        since.map_or(-1, |since| {
            let left = CONSOLE_TIMEOUT.saturating_sub(since.elapsed());
            i32::try_from(left.as_millis()).map_or(-1, |left| left + 1)
        })
    }

    /// Returns true if there may be more to move.
    fn serve(&mut self) -> bool {
        let handled = self.control_from_guest.is_some_and(|at| self.handle_messages(at));
        let sent = self.output.is_some_and(|at| self.send(at));
        let received = self.input.is_some_and(|at| self.receive(at));
        // Last, because the client may have disconnected.
        let announced = self.control_to_guest.is_some_and(|at| self.send_messages(at));
        handled || sent || received || announced
    }

    fn guest_reads(&self) -> bool {
        self.state.open || !self.multiport
    }

    fn handle_messages(&mut self, at: usize) -> bool {
        for _ in 0..BATCH {
            let queue = &mut self.queues[at];
            let Some(mut chain) = next(queue) else {
                queue.notify();
                return false;
            };
            let message = chain.take::<MESSAGE_SIZE>(&queue.memory);
            queue.push(chain, 0);
            // Messages that are too short or outside of memory are ignored.
            if let Ok([a, b, c, d, event_low, event_high, value @ ..]) = message {
                let (port, event) = ([a, b, c, d], [event_low, event_high]);
                let value = u16::from_le_bytes(value) != 0;
                self.handle_message(u32::from_le_bytes(port), u16::from_le_bytes(event), value);
            }
        }
        self.queues[at].notify();
        true
    }

    fn handle_message(&mut self, port: u32, event: u16, value: bool) {
        let ours = port == self.port();
        match event {
            DEVICE_READY => self.state.add = value,
            PORT_READY if ours && value => {
                (self.state.describe, self.state.ready, self.state.told) = (true, true, false);
            }
            PORT_READY if ours => (self.state.describe, self.state.ready) = (false, false),
            PORT_OPEN if ours => {
                self.state.open = value;
                self.channel.guest_listens(value);
            }
            _ => {}
        }
    }

    fn port(&self) -> u32 {
        u32::from(self.name.is_some())
    }

    /// The next pending control message: event, value, and data.
    fn next_message(&self) -> Option<(u16, bool, &[u8])> {
        let open = self.name.is_none() || self.channel.is_open();
        match (&self.state, &self.name) {
            (State { add: true, .. }, _) => Some((DEVICE_ADD, true, &[])),
            (State { describe: true, .. }, None) => Some((CONSOLE_PORT, true, &[])),
            (State { describe: true, .. }, Some(name)) => Some((PORT_NAME, true, name.as_bytes())),
            (State { ready: true, told, .. }, _) if *told != open => Some((PORT_OPEN, open, &[])),
            _ => None,
        }
    }

    fn send_messages(&mut self, at: usize) -> bool {
        for _ in 0..BATCH {
            let Some((event, value, more)) = self.next_message() else { break };
            let mut bytes = self.port().to_le_bytes().to_vec();
            bytes.extend(event.to_le_bytes());
            bytes.extend(u16::from(value).to_le_bytes());
            bytes.extend(more);
            if event == PORT_NAME {
                // 5.3.6.2 has no zero at the end, but QEMU sends one, and Windows' driver cuts off
                // the last byte when a program asks for the name.
                bytes.push(0);
            }
            let queue = &mut self.queues[at];
            let Some(chain) = next(queue) else { break };
            let fits = length(&chain.writable) >= bytes.len() as u64
                && queue.memory.scatter(&chain.writable, &bytes).is_ok();
            queue.push(chain, if fits { u32::try_from(bytes.len()).unwrap_or(0) } else { 0 });
            if fits {
                match event {
                    DEVICE_ADD => self.state.add = false,
                    PORT_OPEN => self.state.told = value,
                    _ => self.state.describe = false,
                }
            }
        }
        self.queues[at].notify();
        false
    }

    /// Moves bytes from the guest to the client.
    fn send(&mut self, at: usize) -> bool {
        self.full = false;
        let mut buffer = [0; MAX_TRANSFER];
        for _ in 0..BATCH {
            let queue = &mut self.queues[at];
            let Some(chain) = self.held.take().or_else(|| next(queue)) else {
                queue.notify();
                return false;
            };
            let count =
                usize::try_from(length(&chain.readable)).unwrap_or(MAX_TRANSFER).min(MAX_TRANSFER);
            let read = queue.memory.gather(&chain.readable, &mut buffer[..count]);
            let written = match read {
                // Without a client, or with a buffer outside of memory, the data is dropped.
                _ if !self.channel.is_open() => None,
                Err(_) => None,
                Ok(()) if count == 0 => None,
                Ok(()) => match self.channel.write(&buffer[..count]) {
                    Ok(written) => Some(written),
                    Err(error) if is_retryable(&error) => Some(0),
                    Err(_) => None,
                },
            };
            self.account(at, chain, written);
            if self.full {
                break;
            }
        }
        self.queues[at].notify();
        !self.full
    }

    /// Keeps the rest of a partly sent buffer, or returns the buffer to the guest.
    fn account(&mut self, at: usize, mut chain: Chain, written: Option<usize>) {
        let Some(written) = written else {
            (self.state.taken, self.stalled_since) = (None, None);
            self.queues[at].push(chain, 0);
            return;
        };
        self.stalled_since =
            (written == 0).then(|| self.stalled_since.unwrap_or_else(Instant::now));
        let impatient = |since: Instant| self.name.is_none() && since.elapsed() >= CONSOLE_TIMEOUT;
        if self.stalled_since.is_some_and(impatient) {
            self.state.taken = None;
            self.queues[at].push(chain, 0);
            return;
        }
        let written = u32::try_from(written).unwrap_or(u32::MAX);
        cut(&mut chain.readable, written);
        if chain.readable.is_empty() {
            self.state.taken = None;
            self.queues[at].push(chain, 0);
            return;
        }
        let before = self.state.taken.map_or(0, |(_, taken)| taken);
        self.state.taken = Some((chain.head, before.saturating_add(written)));
        // If nothing was taken, wait until the client reads.
        self.full = written == 0;
        self.held = Some(chain);
    }

    /// Moves bytes from the client to the guest.
    fn receive(&mut self, at: usize) -> bool {
        self.guest_has_room = false;
        if !self.guest_reads() {
            return false;
        }
        let mut buffer = [0; MAX_TRANSFER];
        for _ in 0..BATCH {
            let queue = &mut self.queues[at];
            let Some(chain) = next(queue) else {
                queue.notify();
                return false;
            };
            let room =
                usize::try_from(length(&chain.writable)).unwrap_or(MAX_TRANSFER).min(MAX_TRANSFER);
            if room == 0 {
                queue.push(chain, 0);
                continue;
            }
            let Ok(count) = self.channel.read(&mut buffer[..room]) else {
                queue.return_chain(chain);
                queue.notify();
                self.guest_has_room = true;
                return false;
            };
            // If the guest's buffer is outside of memory, the data is lost.
            let fits = queue.memory.scatter(&chain.writable, &buffer[..count]).is_ok();
            queue.push(chain, if fits { u32::try_from(count).unwrap_or(0) } else { 0 });
        }
        self.queues[at].notify();
        true
    }

    /// Continues a partly sent buffer after a pause, if the driver still offers it.
    fn resume(&mut self) {
        let (Some(at), Some((head, taken))) = (self.output, self.state.taken.take()) else {
            return;
        };
        let queue = &mut self.queues[at];
        if !queue.ring().held.contains(&head) {
            return;
        }
        if let Some(mut chain) = queue.pop() {
            cut(&mut chain.readable, taken);
            self.state.taken = Some((head, taken));
            self.held = Some(chain);
        }
    }

    fn pause(&mut self) {
        match (self.output, self.held.take()) {
            (Some(at), Some(chain)) => self.queues[at].return_chain(chain),
            _ => self.state.taken = None,
        }
    }
}

/// Removes the first `bytes` bytes of these pieces.
fn cut(pieces: &mut Vec<Piece>, mut bytes: u32) {
    pieces.retain_mut(|piece| {
        let off = bytes.min(piece.length);
        bytes -= off;
        piece.address = piece.address.wrapping_add(u64::from(off));
        piece.length -= off;
        piece.length > 0
    });
}

#[cfg(test)]
mod test;
