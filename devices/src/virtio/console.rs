//! virtio-serial: a console, or a named port (VIRTIO 1.3, 5.3), one to a device.
//!
//! A console is port 0, which drivers that know of no other use too. A named port is port 1, as in
//! QEMU: 0 is kept for a console, and this device has none. The guest is told whether somebody is
//! at the other end of a named port; a console is always open.
//!
//! **An end that does not read.** Of a named port the guest's buffers are held until there is room,
//! or until who is there leaves: that stops the program that writes. A console's are held for
//! [`PATIENCE`], and lost then: Linux waits for them with a lock held, so that a terminal which
//! somebody stopped would stop the whole guest. QEMU does the same, without the patience.
//!
//! Threats: a guest that sends more than the other end takes has no buffers left, and we keep none;
//! one that does not read leaves the bytes in the host's socket. What it should be told is kept as
//! a few flags, however often it asks and however seldom it listens. One round moves at most
//! [`ROUND`] buffers each way, of at most [`PIECE`] bytes at a time, and never waits for the other
//! end, so that a reset or a pause does not either.

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
use host::channel::{Channel, is_later};
use host::memory::Piece;
use host::stream::Stream;

/// `--device virtio-serial,name=org.qemu.guest_agent.0,to=socket:/run/agent`
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Its PCI slot; the first that is free if there is none given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
    /// The port's name, by which programs in the guest find it; a console if there is none given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The host side: `stdio`, `file:PATH`, `socket:PATH` or `none`.
    #[serde(default)]
    pub to: Stream,
}

/// Features (5.3.3).
const MULTIPORT: u64 = 1 << 1;

/// Entries of a queue, as in QEMU.
const ENTRIES: u16 = 128;
/// Queues (5.3.2): of port 0 to the guest and from it, of control messages, and of port 1.
const CONTROL: u16 = 2;
const PORT_1: u16 = 4;

/// Control messages (5.3.6.2).
const DEVICE_READY: u16 = 0;
const DEVICE_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const CONSOLE_PORT: u16 = 4;
const PORT_OPEN: u16 = 6;
const PORT_NAME: u16 = 7;
/// Bytes of one: port, event, value.
const MESSAGE: usize = 8;

/// Longest name of a port.
const NAME: usize = 128;
/// Bytes that are moved at once.
const PIECE: usize = 4096;
/// How long a console waits for an end that does not read.
const PATIENCE: Duration = Duration::from_millis(100);
/// Buffers that are moved before it is asked whether to stop.
const ROUND: usize = 32;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        if let Some(name) = &self.name {
            let plain = name.chars().all(|letter| letter.is_ascii_graphic() && letter != '/');
            ensure!(
                plain && (1..=NAME).contains(&name.len()),
                "name={name}: a port's name has 1 to {NAME} letters, digits, dots and the like"
            );
        }
        let device = Console {
            channel: Some(Channel::open(&self.to)?),
            name: self.name,
            state: State::default(),
            thread: None,
        };
        on_pci(device, self.slot, grants)
    }

    fn host_side(&self) -> HostSide<'_> {
        HostSide::Stream(&self.to)
    }

    fn leave_host_alone(&mut self) {
        self.to = Stream::None;
    }
}

/// What a driver did, and has to be told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    /// It must hear of the port.
    add: bool,
    /// It must hear what the port is.
    describe: bool,
    /// It knows the port.
    ready: bool,
    /// It was told that somebody is at the other end.
    told: bool,
    /// A program of the guest has the port.
    open: bool,
    /// How much was taken of the buffer that is held, and which one that is.
    taken: Option<(u16, u32)>,
}

struct Console {
    /// With the thread while that runs.
    channel: Option<Channel>,
    name: Option<String>,
    state: State,
    thread: Option<Thread>,
}

impl Console {
    /// Ports that there may be, from 0 on.
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
        // Columns and rows, which are not offered; ports; the register for emergencies, neither.
        let (none, ports) = ([0; 4], u32::from(self.ports()).to_le_bytes());
        [none, ports, none].concat()
    }

    fn start(&mut self, queues: Vec<Queue>, negotiated: u64) -> anyhow::Result<()> {
        let channel = self.channel.take().context("the port's other end is lost")?;
        let (multiport, name) = (negotiated & MULTIPORT != 0, self.name.clone());
        let port = if name.is_some() { PORT_1 } else { 0 };
        let find = |number: u16| queues.iter().position(|queue| queue.number() == number);
        // Without control queues there is port 0 alone.
        let exists = multiport || name.is_none();
        let control = |number| find(number).filter(|_| multiport);
        let data = |number| find(number).filter(|_| exists);
        let mut desk = Desk {
            tells: control(CONTROL),
            hears: control(CONTROL + 1),
            input: data(port),
            output: data(port + 1),
            multiport,
            name,
            channel,
            state: std::mem::take(&mut self.state),
            held: None,
            full: false,
            since: None,
            hungry: false,
            queues,
        };
        desk.resume();
        self.thread = Some(Thread::spawn(desk)?);
        Ok(())
    }

    fn stop(&mut self) -> Vec<Queue> {
        let Some(thread) = self.thread.take() else { return Vec::new() };
        let mut desk = thread.stop();
        desk.pause();
        (self.channel, self.state) = (Some(desk.channel), desk.state);
        desk.queues
    }

    fn save(&self) -> Saved {
        Saved::of(&self.state)
    }

    fn restore(&mut self, saved: Saved) -> anyhow::Result<()> {
        let saved: Option<State> = saved.take()?;
        self.state = saved.unwrap_or_default();
        Ok(())
    }
}

/// The thread of a port: it waits for the guest and for the other end at once.
struct Thread {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<Desk>>,
}

impl Thread {
    fn spawn(mut desk: Desk) -> anyhow::Result<Self> {
        let stop = Arc::new(EventFd::new(EFD_NONBLOCK).context("an event for a port")?);
        let epoll = Epoll::new().context("an epoll for a port")?;
        let bells = desk.queues.iter().map(|queue| queue.bell().as_raw_fd());
        for fd in bells.chain([stop.as_raw_fd()]) {
            let rings = EpollEvent::new(EventSet::IN, 0);
            epoll.ctl(ControlOperation::Add, fd, rings).context("an event for a port")?;
        }
        let told = stop.clone();
        let body = move || {
            desk.run(&epoll, &told);
            desk
        };
        let builder = Builder::new().name("virtio-serial".into());
        Ok(Self { stop, thread: Some(builder.spawn(body).context("a thread for a port")?) })
    }

    fn stop(mut self) -> Desk {
        self.join().expect("a port is stopped once")
    }

    fn join(&mut self) -> Option<Desk> {
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

/// What the thread has.
struct Desk {
    queues: Vec<Queue>,
    /// Which of the queues carry control messages to the guest and from it.
    tells: Option<usize>,
    hears: Option<usize>,
    /// Which carry bytes to the guest and from it.
    input: Option<usize>,
    output: Option<usize>,
    multiport: bool,
    name: Option<String>,
    channel: Channel,
    state: State,
    /// What is being sent: a buffer of the guest's without what was taken of it.
    held: Option<Chain>,
    /// The other end has no room.
    full: bool,
    /// Since when it has taken nothing.
    since: Option<Instant>,
    /// The guest has room.
    hungry: bool,
}

impl Desk {
    fn run(&mut self, epoll: &Epoll, stop: &EventFd) {
        loop {
            let wait = if self.serve() { 0 } else { self.patience() };
            let others = self.channel.awaits(self.hungry && self.listens(), self.full);
            for (fd, what) in &others {
                // Refused for plain files, which are always ready.
                epoll.ctl(ControlOperation::Add, *fd, EpollEvent::new(*what, 0)).ok();
            }
            // A signal makes it look again, which is no harm.
            epoll.wait(wait, &mut [EpollEvent::default()]).ok();
            for (fd, _) in others {
                epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default()).ok();
            }
            if stop.read().is_ok() {
                return;
            }
            for queue in &self.queues {
                queue.bell().read().ok();
            }
            self.channel.heed(self.listens());
        }
    }

    /// Milliseconds until something has to be given up; -1 is never.
    fn patience(&self) -> i32 {
        let since = self.since.filter(|_| self.full && self.name.is_none());
        since.map_or(-1, |since| {
            let left = PATIENCE.saturating_sub(since.elapsed());
            i32::try_from(left.as_millis()).map_or(-1, |left| left + 1)
        })
    }

    /// Moves what can be moved; true when there may be more.
    fn serve(&mut self) -> bool {
        let heard = self.hears.is_some_and(|at| self.hear(at));
        let sent = self.output.is_some_and(|at| self.send(at));
        let received = self.input.is_some_and(|at| self.receive(at));
        // Last: somebody may have left.
        let told = self.tells.is_some_and(|at| self.tell(at));
        heard || sent || received || told
    }

    /// Whether a program of the guest reads.
    fn listens(&self) -> bool {
        self.state.open || !self.multiport
    }

    /// Takes what the driver says.
    fn hear(&mut self, at: usize) -> bool {
        for _ in 0..ROUND {
            let queue = &mut self.queues[at];
            let Some(mut chain) = next(queue) else {
                queue.notify();
                return false;
            };
            let message = chain.take::<MESSAGE>(queue.memory());
            queue.push(chain, 0);
            // What is too short, or not in memory, says nothing.
            if let Ok([a, b, c, d, event_low, event_high, value @ ..]) = message {
                let (port, event) = ([a, b, c, d], [event_low, event_high]);
                let value = u16::from_le_bytes(value) != 0;
                self.heed(u32::from_le_bytes(port), u16::from_le_bytes(event), value);
            }
        }
        self.queues[at].notify();
        true
    }

    fn heed(&mut self, port: u32, event: u16, value: bool) {
        let ours = port == self.port();
        match event {
            DEVICE_READY => self.state.add = value,
            PORT_READY if ours && value => {
                (self.state.describe, self.state.ready, self.state.told) = (true, true, false);
            }
            PORT_READY if ours => (self.state.describe, self.state.ready) = (false, false),
            PORT_OPEN if ours => self.state.open = value,
            _ => {}
        }
    }

    fn port(&self) -> u32 {
        u32::from(self.name.is_some())
    }

    /// What the driver has to hear next: event, value, and what follows.
    fn news(&self) -> Option<(u16, bool, &[u8])> {
        let open = self.name.is_none() || self.channel.is_open();
        match (&self.state, &self.name) {
            (State { add: true, .. }, _) => Some((DEVICE_ADD, true, &[])),
            (State { describe: true, .. }, None) => Some((CONSOLE_PORT, true, &[])),
            (State { describe: true, .. }, Some(name)) => Some((PORT_NAME, true, name.as_bytes())),
            (State { ready: true, told, .. }, _) if *told != open => Some((PORT_OPEN, open, &[])),
            _ => None,
        }
    }

    /// Tells the driver what it has to hear.
    fn tell(&mut self, at: usize) -> bool {
        for _ in 0..ROUND {
            let Some((event, value, more)) = self.news() else { break };
            let mut bytes = self.port().to_le_bytes().to_vec();
            bytes.extend(event.to_le_bytes());
            bytes.extend(u16::from(value).to_le_bytes());
            bytes.extend(more);
            let queue = &mut self.queues[at];
            let Some(chain) = next(queue) else { break };
            let fits = length(&chain.writable) >= bytes.len() as u64
                && queue.memory().scatter(&chain.writable, &bytes).is_ok();
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

    /// Carries bytes from the guest to the other end.
    fn send(&mut self, at: usize) -> bool {
        self.full = false;
        let mut buffer = [0; PIECE];
        for _ in 0..ROUND {
            let queue = &mut self.queues[at];
            let Some(chain) = self.held.take().or_else(|| next(queue)) else {
                queue.notify();
                return false;
            };
            let count = usize::try_from(length(&chain.readable)).unwrap_or(PIECE).min(PIECE);
            let read = queue.memory().gather(&chain.readable, &mut buffer[..count]);
            let written = match read {
                // Nobody is there to hear it, or it is not in memory: it is gone.
                _ if !self.channel.is_open() => None,
                Err(_) => None,
                Ok(()) if count == 0 => None,
                Ok(()) => match self.channel.write(&buffer[..count]) {
                    Ok(written) => Some(written),
                    Err(error) if is_later(&error) => Some(0),
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

    /// Keeps what is left of a buffer, or gives it back.
    fn account(&mut self, at: usize, mut chain: Chain, written: Option<usize>) {
        let Some(written) = written else {
            (self.state.taken, self.since) = (None, None);
            self.queues[at].push(chain, 0);
            return;
        };
        self.since = (written == 0).then(|| self.since.unwrap_or_else(Instant::now));
        let impatient = |since: Instant| self.name.is_none() && since.elapsed() >= PATIENCE;
        if self.since.is_some_and(impatient) {
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
        self.state.taken = Some((chain.head(), before.saturating_add(written)));
        // An end that takes nothing is waited for.
        self.full = written == 0;
        self.held = Some(chain);
    }

    /// Carries bytes from the other end to the guest.
    fn receive(&mut self, at: usize) -> bool {
        self.hungry = false;
        if !self.listens() {
            return false;
        }
        let mut buffer = [0; PIECE];
        for _ in 0..ROUND {
            let queue = &mut self.queues[at];
            let Some(chain) = next(queue) else {
                queue.notify();
                return false;
            };
            let room = usize::try_from(length(&chain.writable)).unwrap_or(PIECE).min(PIECE);
            if room == 0 {
                queue.push(chain, 0);
                continue;
            }
            let Ok(count) = self.channel.read(&mut buffer[..room]) else {
                queue.undo(chain);
                queue.notify();
                self.hungry = true;
                return false;
            };
            // A buffer outside of memory loses what it was for.
            let fits = queue.memory().scatter(&chain.writable, &buffer[..count]).is_ok();
            queue.push(chain, if fits { u32::try_from(count).unwrap_or(0) } else { 0 });
        }
        self.queues[at].notify();
        true
    }

    /// Goes on where the device was stopped: in the middle of a buffer, if that is still there.
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
            (Some(at), Some(chain)) => self.queues[at].undo(chain),
            _ => self.state.taken = None,
        }
    }
}

/// Takes so many bytes off the front.
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
