//! The other end of a migration: a machine arrives here.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use host::listen::UnixAddress;
use host::ram::{GuestMemoryMmap, MmapRegion, PAGE};
use host::stream::ListeningSocket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;
use vm_memory::{GuestMemoryBackend as _, VolatileMemory as _};

use super::Hello;
use super::stream::{Message, Place, Reader, Writer};
use crate::config::{Config, Options};
use crate::machine;
use crate::ram;
use crate::signals;
use crate::snapshot::{Received, Saved, Snapshot};

/// The interval at which signals are noticed.
const INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// How long the source may be silent.
const PATIENCE: Duration = Duration::from_secs(30);
/// Limits for the memory of devices.
const MAX_PARTS: usize = 64;
const MAX_DEVICE_MEMORY: u64 = 1 << 30;

/// A source that has said what its machine is.
pub struct Arrival {
    from: Reader<UnixStream>,
    to: Writer<UnixStream>,
    pub hello: Hello,
    /// The source waits for an answer.
    asked: bool,
}

/// Waits for a source. Returns nothing if a signal ends the waiting.
pub fn wait(address: &UnixAddress) -> anyhow::Result<Option<Arrival>> {
    let socket = address.listen().context("--incoming")?;
    loop {
        let Some(stream) = accept(&socket)? else { return Ok(None) };
        match Arrival::new(stream) {
            Ok(arrival) => return Ok(Some(arrival)),
            // Somebody else may have connected, such as a probe of the port.
            Err(error) => tracing::warn!("--incoming: {error:#}"),
        }
    }
}

fn accept(socket: &ListeningSocket) -> anyhow::Result<Option<UnixStream>> {
    while signals::arrived().is_none() {
        let mut fds = [PollFd::new(&socket.listener, PollFlags::IN)];
        if poll(&mut fds, Some(&INTERVAL)).is_ok_and(|count| count > 0) {
            match socket.listener.accept() {
                Ok((stream, _)) => return Ok(Some(stream)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("--incoming"),
            }
        }
    }
    Ok(None)
}

impl Arrival {
    fn new(stream: UnixStream) -> anyhow::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut from = Reader::new(stream.try_clone()?);
        let Message::Hello(bytes) = from.receive()? else { bail!("a stream without a machine") };
        let hello: Hello = serde_json::from_slice(bytes).context("the machine's description")?;
        Ok(Self { from, to: Writer::new(stream)?, hello, asked: true })
    }

    /// Receives the machine's memory, and its state. Returns the options with it, too.
    pub fn receive(
        &mut self,
        config: Config,
        options: Options,
    ) -> anyhow::Result<(Config, Snapshot)> {
        let config = match options {
            Options::Saved => config.over(&self.hello.config)?,
            Options::Given => config,
        };
        let ranges = machine::expect(config.clone(), &self.hello.cpuid)?;
        let ram = ram::map(&config.memory, &ranges, None)?;
        let mut parts = Parts::new(ram, &self.hello.parts)?;
        self.answer(None)?;
        loop {
            match self.from.receive()? {
                Message::Pages { place, bytes } => parts.write(place, bytes)?,
                Message::Zeros { place, length } => parts.clear(place, length)?,
                Message::Sync => {
                    self.asked = true;
                    self.answer(None)?;
                }
                Message::State(bytes) => {
                    let saved: Saved = serde_json::from_slice(bytes).context("the state")?;
                    self.asked = true;
                    return Ok((config, Snapshot::received(saved, parts.received)));
                }
                Message::Hello(_) | Message::Go | Message::Answer(_) => {
                    bail!("an unexpected message: the stream is damaged")
                }
            }
        }
    }

    fn answer(&mut self, error: Option<&anyhow::Error>) -> anyhow::Result<()> {
        let line = match error {
            None => json!({ "ok": {} }),
            Some(error) => json!({ "error": format!("{error:#}") }),
        };
        self.asked = false;
        self.to.send(&Message::Answer(line.to_string().as_bytes()))
    }

    /// Tells the source why the machine stays there, if it waits for that.
    pub fn refuse(mut self, error: &anyhow::Error) {
        if self.asked {
            self.answer(Some(error)).ok();
        }
    }

    /// The machine is ready. `owned`: it has the locks of its disks, so that it cannot run at the
    /// other end. Otherwise the source must let it go.
    pub fn take_over(mut self, owned: bool) -> anyhow::Result<()> {
        let told = self.answer(None).and_then(|()| Ok(self.from.receive()? == Message::Go));
        match told {
            Ok(true) => Ok(()),
            _ if owned => {
                tracing::warn!("the connection was cut at the end: the machine runs here");
                Ok(())
            }
            Ok(false) => bail!("an unexpected message: the stream is damaged"),
            Err(error) => Err(error.context("the machine stays at the other end")),
        }
    }
}

/// The memory that is received.
struct Parts {
    received: Received,
    /// The lengths of the devices' memory.
    devices: Vec<u64>,
}

impl Parts {
    fn new(ram: Arc<GuestMemoryMmap>, lengths: &[u64]) -> anyhow::Result<Self> {
        let regions: Vec<_> = ram.iter().map(|it| it.size() as u64).collect();
        let others = lengths.strip_prefix(&regions[..]);
        let others =
            others.context("its memory has other parts than here: use the same options")?;
        let total = others.iter().fold(0, |sum: u64, it| sum.saturating_add(*it));
        ensure!(
            others.len() <= MAX_PARTS && total <= MAX_DEVICE_MEMORY,
            "its devices have {total} bytes of memory, more than a machine has"
        );
        let devices = vec![BTreeMap::new(); others.len()];
        Ok(Self { received: Received { ram, devices }, devices: others.to_vec() })
    }

    fn write(&mut self, place: Place, bytes: &[u8]) -> anyhow::Result<()> {
        let (part, offset) = self.find(place, bytes.len())?;
        match part {
            Part::Ram(region) => {
                region.as_volatile_slice().subslice(offset, bytes.len())?.copy_from(bytes);
            }
            Part::Device(pages) => {
                for (at, page) in (offset..).step_by(PAGE).zip(bytes.chunks(PAGE)) {
                    pages.insert(at, page.to_vec());
                }
            }
        }
        Ok(())
    }

    fn clear(&mut self, place: Place, length: u64) -> anyhow::Result<()> {
        let length = usize::try_from(length)?;
        let (part, offset) = self.find(place, length)?;
        match part {
            Part::Ram(region) => {
                let whole = region.as_volatile_slice();
                for at in (offset..offset + length).step_by(PAGE) {
                    let count = PAGE.min(offset + length - at);
                    whole.subslice(at, count)?.copy_from(&[0; PAGE][..count]);
                }
            }
            Part::Device(pages) => pages.retain(|at, _| !(offset..offset + length).contains(at)),
        }
        Ok(())
    }

    /// The part of a place, if it has this number of bytes from there on.
    fn find(&mut self, place: Place, length: usize) -> anyhow::Result<(Part<'_>, usize)> {
        let Place { part, offset } = place;
        let outside = || format!("pages at offset {offset} of part {part} are outside of memory");
        let end = offset.checked_add(length as u64).with_context(outside)?;
        let (part, regions) = (part as usize, self.received.ram.num_regions());
        let (found, size) = if part < regions {
            let region = self.received.ram.iter().nth(part).with_context(outside)?;
            (Part::Ram(region), region.size() as u64)
        } else {
            let pages = self.received.devices.get_mut(part - regions).with_context(outside)?;
            (Part::Device(pages), self.devices[part - regions])
        };
        ensure!(end <= size, outside());
        Ok((found, usize::try_from(offset)?))
    }
}

enum Part<'a> {
    Ram(&'a MmapRegion),
    Device(&'a mut BTreeMap<usize, Vec<u8>>),
}
