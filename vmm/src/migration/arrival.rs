//! The other end of a migration: a machine arrives here.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use host::listen::UnixAddress;
use host::stream::ListeningSocket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;

use super::Hello;
use super::parts::Parts;
use super::stream::{Message, Reader, Writer};
use crate::config::{Config, Options};
use crate::machine;
use crate::ram;
use crate::signals;
use crate::snapshot::{self, Saved, Snapshot};

/// The interval at which signals are noticed.
const INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// How long the source may be silent: when it has connected, and later.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);

/// A source that has said what its machine is.
pub struct Arrival {
    from: Reader<UnixStream>,
    to: Writer<UnixStream>,
    pub hello: Hello,
    /// The source waits for an answer.
    asked: bool,
}

/// Waits for a source. Returns nothing if a signal or the end of the parent ends the waiting.
pub fn wait(address: &UnixAddress, parent: Option<&OwnedFd>) -> anyhow::Result<Option<Arrival>> {
    let socket = address.listen().context("--incoming")?;
    loop {
        let Some(stream) = accept(&socket, parent)? else { return Ok(None) };
        match Arrival::new(stream) {
            Ok(arrival) => return Ok(Some(arrival)),
            // It may have been somebody else.
            Err(error) => tracing::warn!("--incoming: {error:#}"),
        }
    }
}

fn accept(
    socket: &ListeningSocket,
    parent: Option<&OwnedFd>,
) -> anyhow::Result<Option<UnixStream>> {
    while signals::arrived().is_none() {
        let mut fds = vec![PollFd::new(&socket.listener, PollFlags::IN)];
        fds.extend(parent.map(|parent| PollFd::new(parent, PollFlags::IN)));
        if poll(&mut fds, Some(&INTERVAL)).is_ok_and(|count| count > 0) {
            if fds.get(1).is_some_and(|parent| !parent.revents().is_empty()) {
                return Ok(None);
            }
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
        stream.set_read_timeout(Some(HELLO_TIMEOUT))?;
        stream.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
        let mut from = Reader::new(stream.try_clone()?);
        let Message::Hello(bytes) = from.receive()? else { bail!("a stream without a machine") };
        let hello: Hello = serde_json::from_slice(bytes).context("the machine's description")?;
        stream.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
        Ok(Self { from, to: Writer::new(stream)?, hello, asked: true })
    }

    /// Receives the machine's memory, and its state. Returns the options with it, too.
    pub fn receive(
        &mut self,
        config: Config,
        options: Options,
    ) -> anyhow::Result<(Config, Snapshot)> {
        let format = self.hello.format;
        ensure!(
            format == snapshot::FORMAT,
            "its state has format {format}, and this version reads format {}: use the same version \
             of vmm at both ends",
            snapshot::FORMAT
        );
        let config = match options {
            Options::Saved => config.over(&self.hello.config)?,
            Options::Given => config,
        };
        let ranges = machine::expect(config.clone(), &self.hello.cpuid)?;
        let ram = ram::map(&config.memory, &ranges, None)?;
        let mut parts = Parts::new(ram, &self.hello.parts)?;
        self.answer(None)?;
        tracing::info!("a machine arrives, with {} of memory", config.memory.size);
        loop {
            ensure!(signals::arrived().is_none(), "a signal has ended the process");
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
    pub fn take_over(&mut self, owned: bool) -> anyhow::Result<()> {
        let told = self.answer(None).and_then(|()| Ok(self.from.receive()? == Message::Go));
        // The source waits for the last answer.
        self.asked = true;
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

    pub fn tell_that_it_runs(&mut self) {
        tracing::info!("the machine has arrived");
        // Without the source, it runs as well.
        self.answer(None).ok();
    }
}
