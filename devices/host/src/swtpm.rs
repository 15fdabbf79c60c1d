//! A TPM 2.0 in a process of its own: swtpm(8), as `swtpm socket --tpm2 --ctrl type=unixio,path=…`.
//!
//! There are two sockets. Commands of the control channel are numbers and fields, the highest byte
//! first (swtpm, `tpm_ioctl.h`), each with an answer. Over the other one, which we make and hand
//! over, go commands and responses as the TPM has them (TPM 2.0 Library, Part 1, 18).
//!
//! Threats: swtpm reads what guests write, so it may be anybody's: it may answer with any bytes at
//! any pace, or not at all. Each wait has an end, and each length is looked at before so much is
//! read. The first thing that makes no sense is the end of the connection, since nobody knows where
//! the next answer would begin: it is said once, and from then on the TPM is broken.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use rustix::time::Timespec;

/// The most bytes of a command and of a response.
pub const BUFFER: usize = 0xf80;
/// Tag, size, code: what each command and each response begins with.
pub const HEADER: usize = 10;
/// `TPM_ST_NO_SESSIONS`.
pub const NO_SESSIONS: u16 = 0x8001;

/// `CMD_*` of the control channel.
const GET_CAPABILITY: u32 = 1;
const INIT: u32 = 2;
const SHUTDOWN: u32 = 3;
const SET_LOCALITY: u32 = 5;
const CANCEL: u32 = 9;
const STOP: u32 = 14;
const SET_DATAFD: u32 = 16;
const SET_BUFFERSIZE: u32 = 17;

/// `PTM_CAP_*` of what is asked for here: INIT, SHUTDOWN, SET_LOCALITY, STOP, SET_DATAFD and
/// SET_BUFFERSIZE.
const NEEDED: u32 = 1 | 1 << 1 | 1 << 3 | 1 << 10 | 1 << 12 | 1 << 13;

/// `TPM2_GetCapability(TPM_CAP_TPM_PROPERTIES, 0x100, 1)`. A TPM that is not switched on answers
/// with an error, whose tag says of which kind the TPM is.
const WHICH_TPM: [u8; 22] =
    [0x80, 1, 0, 0, 0, 22, 0, 0, 1, 0x7a, 0, 0, 0, 6, 0, 0, 1, 0, 0, 0, 0, 1];

/// How long it may take to answer at all, with nothing to do.
const GREETING: Duration = Duration::from_secs(10);
/// How long it may take to read its state and to test itself.
const POWER_ON: Duration = Duration::from_secs(30);
/// How long it may take to hear that it is switched off.
const GOODBYE: Duration = Duration::from_secs(1);
/// How long a command of the TPM may take. A key of RSA takes a slow host a minute; and whether it
/// was told to give up, a TPM looks now and then only, or never.
const PATIENCE: Duration = Duration::from_secs(300);

/// A connection to swtpm. Dropping it switches the TPM off, if it was on, which ends its process.
#[derive(Debug)]
pub struct Swtpm {
    path: PathBuf,
    control: UnixStream,
    data: UnixStream,
    patience: Duration,
    on: bool,
    broken: bool,
}

impl Swtpm {
    /// Connects to the control socket at `path`. The TPM stays off.
    ///
    /// # Errors
    ///
    /// When nobody is there, or somebody who is not a TPM 2.0 of swtpm's.
    pub fn connect(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let control = open(path).with_context(|| {
            format!(
                "{shown}: start swtpm first, as in `swtpm socket --tpm2 --tpmstate dir=DIR --ctrl \
                 type=unixio,path={shown}`"
            )
        })?;
        let (data, theirs) = UnixStream::pair().context("a socket for the TPM")?;
        let (path, patience) = (path.to_owned(), PATIENCE);
        let swtpm = Self { path, control, data, patience, on: false, broken: false };
        swtpm.greet(theirs).with_context(|| {
            format!("{shown}: this is no swtpm for a TPM 2.0, or another machine has it")
        })?;
        Ok(swtpm)
    }

    /// Hands over the other end of our socket, and looks whom we talk to.
    fn greet(&self, theirs: UnixStream) -> anyhow::Result<()> {
        let end = Instant::now() + GREETING;
        let fds = [theirs.as_fd()];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut room);
        ensure!(rights.push(SendAncillaryMessage::ScmRights(&fds)), "no room for a socket");
        let bytes = SET_DATAFD.to_be_bytes();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = rustix::net::sendmsg(&self.control, &[IoSlice::new(&bytes)], &mut rights, flags);
        ensure!(sent? == bytes.len(), "it takes no command");
        // Who hangs up has the only other end, so that it is noticed.
        drop(theirs);
        self.answer::<0>("SET_DATAFD", end)?;
        // What was once a number of 64 bits is an error and 32 of them now.
        let has = u32::from_be_bytes(self.ask("GET_CAPABILITY", GET_CAPABILITY, &[], end)?);
        ensure!(has & NEEDED == NEEDED, "it can do {has:#x}, which lacks some of {NEEDED:#x}");
        send(&self.data, &WHICH_TPM, end)?;
        let mut header = [0; HEADER];
        receive(&self.data, &mut header, end)?;
        let left = size(&header)? - HEADER;
        receive(&self.data, &mut vec![0; left], end)?;
        ensure!(header[..2] == NO_SESSIONS.to_be_bytes(), "it is a TPM 1.2: say `--tpm2` to it");
        Ok(())
    }

    /// Switches the TPM on, or off and on: `_TPM_Init`.
    pub fn power_on(&mut self) {
        if self.broken {
            return;
        }
        self.on = true;
        if let Err(error) = self.init() {
            self.give_up(&error.context("power-on"));
        }
    }

    fn init(&self) -> anyhow::Result<()> {
        let end = Instant::now() + POWER_ON;
        self.ask::<0>("STOP", STOP, &[], end)?;
        let wanted = u32::try_from(BUFFER)?;
        let sizes: [u8; 12] =
            self.ask("SET_BUFFERSIZE", SET_BUFFERSIZE, &wanted.to_be_bytes(), end)?;
        let size = number(&sizes);
        ensure!(size == wanted, "it has a buffer of {size} bytes, where {wanted} were asked for");
        // No flags: what a TPM keeps while it is off stays.
        self.ask::<0>("INIT", INIT, &[0; 4], end).context("it cannot use its state")?;
        self.ask::<0>("SET_LOCALITY", SET_LOCALITY, &[0; 4], end)?;
        Ok(())
    }

    /// Whether it will not answer any more.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Has a command carried out: the response, or nothing from a TPM that is broken. It is told
    /// to give up as soon as `cancel`, an event, is there.
    pub fn execute(&mut self, command: &[u8], cancel: &OwnedFd) -> Option<Vec<u8>> {
        if self.broken {
            return None;
        }
        match self.exchange(command, cancel) {
            Ok(response) => Some(response),
            Err(error) => {
                let code = command.get(6..HEADER).map_or(0, number);
                self.give_up(&error.context(format!("command {code:#x}")));
                None
            }
        }
    }

    fn exchange(&self, command: &[u8], cancel: &OwnedFd) -> anyhow::Result<Vec<u8>> {
        let end = Instant::now() + self.patience;
        send(&self.data, command, end)?;
        let (mut response, mut cancelled) = (Vec::new(), false);
        while let Some(missing) = missing(&response)? {
            let mut fds =
                [PollFd::new(&self.data, PollFlags::IN), PollFd::new(cancel, PollFlags::IN)];
            wait(&mut fds, end)?;
            let (came, stop) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
            if stop {
                rustix::io::read(cancel, &mut [0; 8]).ok();
            }
            if stop && !cancelled {
                cancelled = true;
                send(&self.control, &CANCEL.to_be_bytes(), end)?;
            }
            if came {
                let start = response.len();
                response.resize(start + missing, 0);
                let count = take(&self.data, &mut response[start..])?;
                response.truncate(start + count);
            }
        }
        if cancelled {
            // One that carries out commands where it answers us finds that it cannot.
            receive(&self.control, &mut [0; 4], end).context("CANCEL")?;
        }
        Ok(response)
    }

    fn give_up(&mut self, error: &anyhow::Error) {
        self.broken = true;
        tracing::error!(
            "swtpm at {}: {error:#}: the guest's TPM fails from now on, and the machine goes on",
            self.path.display()
        );
    }

    /// Sends a command over the control channel, and reads the answer.
    fn ask<const N: usize>(
        &self,
        name: &str,
        command: u32,
        fields: &[u8],
        end: Instant,
    ) -> anyhow::Result<[u8; N]> {
        let message = [&command.to_be_bytes(), fields].concat();
        send(&self.control, &message, end).with_context(|| name.to_owned())?;
        self.answer(name, end)
    }

    /// An error is all that is answered then.
    fn answer<const N: usize>(&self, name: &str, end: Instant) -> anyhow::Result<[u8; N]> {
        let mut result = [0; 4];
        receive(&self.control, &mut result, end).with_context(|| name.to_owned())?;
        let result = u32::from_be_bytes(result);
        ensure!(result == 0, "{name}: error {result:#x}");
        let mut fields = [0; N];
        receive(&self.control, &mut fields, end).with_context(|| name.to_owned())?;
        Ok(fields)
    }
}

impl Drop for Swtpm {
    fn drop(&mut self) {
        // Who was never switched on can serve the next machine.
        if !self.on || self.broken {
            return;
        }
        let end = Instant::now() + GOODBYE;
        if let Err(error) = self.ask::<0>("SHUTDOWN", SHUTDOWN, &[], end) {
            tracing::warn!("swtpm at {}: {error:#}", self.path.display());
        }
    }
}

/// A socket that does not wait, not even for a listener that accepts nobody.
fn open(path: &Path) -> anyhow::Result<UnixStream> {
    let address = SocketAddrUnix::new(path).context("a path that is too long for a socket")?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    Ok(UnixStream::from(socket))
}

/// The first four bytes.
fn number(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |number| u32::from_be_bytes(*number))
}

/// How long a command or response is that begins so.
///
/// # Errors
///
/// When none is so long.
pub fn size(header: &[u8]) -> anyhow::Result<usize> {
    let size = header.get(2..).map_or(0, number);
    let fits = usize::try_from(size).ok().filter(|size| (HEADER..=BUFFER).contains(size));
    fits.with_context(|| format!("{size} bytes, where {HEADER} to {BUFFER} can be"))
}

/// How much of a response is still to come.
fn missing(response: &[u8]) -> anyhow::Result<Option<usize>> {
    if response.len() < HEADER {
        return Ok(Some(HEADER - response.len()));
    }
    let left = size(response).context("a response")?.saturating_sub(response.len());
    Ok((left > 0).then_some(left))
}

/// Sleeps until one of them is ready.
fn wait(fds: &mut [PollFd<'_>], end: Instant) -> anyhow::Result<()> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        match poll(fds, Some(&Timespec::try_from(left)?)) {
            Ok(0) if left.is_zero() => bail!("it does not answer"),
            Ok(0) | Err(Errno::INTR) => {}
            other => return other.map(drop).context("waiting"),
        }
    }
}

fn send(socket: &UnixStream, mut bytes: &[u8], end: Instant) -> anyhow::Result<()> {
    while !bytes.is_empty() {
        match rustix::net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::AGAIN) => wait(&mut [PollFd::new(socket, PollFlags::OUT)], end)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Reads what is there, if anything.
fn take(socket: &UnixStream, room: &mut [u8]) -> anyhow::Result<usize> {
    match rustix::net::recv(socket, room, RecvFlags::DONTWAIT) {
        Ok((_, 0)) => bail!("it hung up"),
        Ok((_, count)) => Ok(count),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Reads until it is full.
fn receive(socket: &UnixStream, mut room: &mut [u8], end: Instant) -> anyhow::Result<()> {
    while !room.is_empty() {
        wait(&mut [PollFd::new(socket, PollFlags::IN)], end)?;
        let count = take(socket, room)?;
        room = room.get_mut(count..).unwrap_or_default();
    }
    Ok(())
}

#[cfg(test)]
mod test {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::testutil::swtpm::{DEAF, listen, response};

    #[test]
    fn nobody_waits_for_ever_for_one_that_is_silent() {
        let brief = Duration::from_millis(20);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("swtpm");
        let asked = listen(&path, NO_SESSIONS);
        let command = response(NO_SESSIONS, DEAF, &[]);
        for cancelled in [false, true] {
            let mut swtpm = Swtpm::connect(&path).unwrap();
            swtpm.patience = brief;
            swtpm.power_on();
            assert!(!swtpm.is_broken());
            let cancel = eventfd(u32::from(cancelled), EventfdFlags::NONBLOCK).unwrap();
            let start = Instant::now();
            assert_eq!(swtpm.execute(&command, &cancel), None);
            assert!(swtpm.is_broken() && start.elapsed() < PATIENCE);
            assert_eq!(swtpm.execute(&response(NO_SESSIONS, 1, &[]), &cancel), None, "for good");
            swtpm.power_on();
            assert!(swtpm.is_broken());
        }
        asked.wait(CANCEL);
        assert!(!asked.so_far().contains(&SHUTDOWN), "it would not be heard");
    }

    #[test]
    fn nobody_waits_for_one_that_hung_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("swtpm");
        let listener = UnixListener::bind(&path).unwrap();
        let peer = std::thread::spawn(move || {
            let (mut control, _) = listener.accept().unwrap();
            // It takes no socket that comes along, and so closes it.
            control.read_exact(&mut [0; 4]).unwrap();
            control.write_all(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]).unwrap();
            control
        });
        let said = format!("{:#}", Swtpm::connect(&path).unwrap_err());
        assert!(!said.contains("it does not answer"), "{said}");
        peer.join().unwrap();
    }

    #[test]
    fn lengths_are_looked_at_before_so_much_is_read() {
        assert!(missing(&[]).unwrap() == Some(10) && missing(&[0; 9]).unwrap() == Some(1));
        let of = |size: u32| missing(&[&[0x80, 1], &size.to_be_bytes()[..], &[0; 4]].concat());
        assert!(of(10).unwrap().is_none() && of(11).unwrap() == Some(1));
        assert_eq!(of(0xf80).unwrap(), Some(0xf80 - 10));
        for size in [0, 9, 0xf81, u32::MAX] {
            let said = format!("{:#}", of(size).unwrap_err());
            assert!(said.contains(&format!("{size} bytes, where 10 to 3968 can be")), "{said}");
        }
    }
}
