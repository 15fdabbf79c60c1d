//! A TPM 2.0 in a process of its own: swtpm(8), as `swtpm socket --tpm2 --ctrl type=unixio,path=…`.
//!
//! There are two sockets. Commands of the control channel are big-endian numbers and fields (swtpm,
//! `tpm_ioctl.h`), each with an answer. The data channel is a socket that we create and send to
//! swtpm. It carries commands and responses in the TPM's own format (TPM 2.0 Library, Part 1, 18).
//!
//! Threats: swtpm parses bytes from the guest, so a guest may have taken it over. It may answer
//! with any bytes at any pace, or not at all. Each wait has a deadline, and each length is checked
//! before that many bytes are read. The first invalid answer ends the connection, because the start
//! of the next one is unknown: one error is logged, and the TPM is broken from then on.

mod state;

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

pub use state::State;

/// In bytes, for commands and responses.
pub const MAX_MESSAGE: usize = 0xf80;
/// Tag, size, code.
pub const HEADER_LENGTH: usize = 10;
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

/// `PTM_CAP_*` bits of the commands used here: INIT, SHUTDOWN, SET_LOCALITY, STOP, SET_DATAFD and
/// SET_BUFFERSIZE.
const NEEDED: u32 = 1 | 1 << 1 | 1 << 3 | 1 << 10 | 1 << 12 | 1 << 13;

/// `TPM2_GetCapability(TPM_CAP_TPM_PROPERTIES, 0x100, 1)`. A TPM that is not switched on answers
/// with an error, whose tag tells a TPM 2.0 from a TPM 1.2.
const WHICH_TPM: [u8; 22] =
    [0x80, 1, 0, 0, 0, 22, 0, 0, 1, 0x7a, 0, 0, 0, 6, 0, 0, 1, 0, 0, 0, 0, 1];

/// Time limit for the first answers, when swtpm has no work to do.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for power-on: swtpm reads its state and tests itself.
const POWER_ON_TIMEOUT: Duration = Duration::from_secs(30);
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for a TPM command. An RSA key takes a slow host a minute, and a TPM checks for a
/// cancellation only now and then, or never.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(300);

/// A connection to swtpm. Dropping it switches the TPM off, if it was on, which ends swtpm.
#[derive(Debug)]
pub struct Swtpm {
    path: PathBuf,
    control: UnixStream,
    data: UnixStream,
    timeout: Duration,
    capabilities: u32,
    on: bool,
    pub broken: bool,
}

impl Swtpm {
    /// The TPM stays off. Fails if the peer is not an swtpm with a TPM 2.0.
    pub fn connect(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let control = open(path).with_context(|| {
            format!(
                "{shown}: start swtpm first, as in `swtpm socket --tpm2 --tpmstate dir=DIR --ctrl \
                 type=unixio,path={shown}`"
            )
        })?;
        let (data, theirs) = UnixStream::pair().context("a socket for the TPM")?;
        let (path, timeout) = (path.to_owned(), COMMAND_TIMEOUT);
        let (on, broken) = (false, false);
        let mut swtpm = Self { path, control, data, timeout, capabilities: 0, on, broken };
        swtpm.capabilities = swtpm.handshake(theirs).with_context(|| {
            format!("{shown}: not an swtpm with a TPM 2.0, or another machine uses it")
        })?;
        Ok(swtpm)
    }

    /// Sends swtpm its end of the data channel, then checks its capabilities and its TPM version.
    /// Returns the capabilities.
    fn handshake(&self, theirs: UnixStream) -> anyhow::Result<u32> {
        let end = Instant::now() + CONNECT_TIMEOUT;
        let fds = [theirs.as_fd()];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut room);
        ensure!(rights.push(SendAncillaryMessage::ScmRights(&fds)), "no room for a socket");
        let bytes = SET_DATAFD.to_be_bytes();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = rustix::net::sendmsg(&self.control, &[IoSlice::new(&bytes)], &mut rights, flags);
        ensure!(sent? == bytes.len(), "it accepts no command");
        // The peer must have the only other end, or we would not notice when it hangs up.
        drop(theirs);
        self.answer::<0>("SET_DATAFD", end)?;
        // Old versions answer with 64 bits of flags, new ones with an error and 32 bits of flags.
        let has = u32::from_be_bytes(self.ask("GET_CAPABILITY", GET_CAPABILITY, &[], end)?);
        ensure!(
            has & NEEDED == NEEDED,
            "its capabilities {has:#x} lack some of {NEEDED:#x}: use a newer swtpm"
        );
        send(&self.data, &WHICH_TPM, end)?;
        let mut header = [0; HEADER_LENGTH];
        receive(&self.data, &mut header, end)?;
        let left = size(&header)? - HEADER_LENGTH;
        receive(&self.data, &mut vec![0; left], end)?;
        ensure!(
            header[..2] == NO_SESSIONS.to_be_bytes(),
            "it is a TPM 1.2: start swtpm with `--tpm2`"
        );
        Ok(has)
    }

    /// If the TPM is on, switches it off first. Does `_TPM_Init`.
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
        let end = Instant::now() + POWER_ON_TIMEOUT;
        self.switch_off(end)?;
        // No flags: the TPM keeps its stored state.
        self.switch_on(0, end)
    }

    /// Switches the TPM off, which allows changes of its buffer and its state.
    fn switch_off(&self, end: Instant) -> anyhow::Result<()> {
        self.ask::<0>("STOP", STOP, &[], end)?;
        let wanted = u32::try_from(MAX_MESSAGE)?;
        let sizes: [u8; 12] =
            self.ask("SET_BUFFERSIZE", SET_BUFFERSIZE, &wanted.to_be_bytes(), end)?;
        let size = number(&sizes);
        ensure!(size == wanted, "it has a buffer of {size} bytes, but {wanted} bytes are needed");
        Ok(())
    }

    fn switch_on(&self, flags: u32, end: Instant) -> anyhow::Result<()> {
        let flags = flags.to_be_bytes();
        self.ask::<0>("INIT", INIT, &flags, end).context("it cannot use its state")?;
        self.ask::<0>("SET_LOCALITY", SET_LOCALITY, &[0; 4], end)?;
        Ok(())
    }

    /// Executes a TPM command and returns the response, or `None` when the TPM is broken. When the
    /// eventfd `cancel` is signaled, asks the TPM to cancel the command.
    pub fn execute(&mut self, command: &[u8], cancel: &OwnedFd) -> Option<Vec<u8>> {
        if self.broken {
            return None;
        }
        match self.exchange(command, cancel) {
            Ok(response) => Some(response),
            Err(error) => {
                let code = command.get(6..HEADER_LENGTH).map_or(0, number);
                self.give_up(&error.context(format!("command {code:#x}")));
                None
            }
        }
    }

    fn exchange(&self, command: &[u8], cancel: &OwnedFd) -> anyhow::Result<Vec<u8>> {
        let end = Instant::now() + self.timeout;
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
            // Any result is fine: an swtpm that serves both channels in one thread reads CANCEL
            // after the command has ended, and answers with an error.
            receive(&self.control, &mut [0; 4], end).context("CANCEL")?;
        }
        Ok(response)
    }

    fn give_up(&mut self, error: &anyhow::Error) {
        self.broken = true;
        tracing::error!(
            "swtpm at {}: {error:#}: the guest's TPM fails from now on; the machine keeps running",
            self.path.display()
        );
    }

    /// Uses the control channel. `name` is for errors.
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

    /// Reads the answer to a command: a result, then `N` bytes of fields if the result is 0.
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
        // An swtpm that was never switched on can serve the next machine.
        if !self.on || self.broken {
            return;
        }
        let end = Instant::now() + SHUTDOWN_TIMEOUT;
        if let Err(error) = self.ask::<0>("SHUTDOWN", SHUTDOWN, &[], end) {
            tracing::warn!("swtpm at {}: {error:#}", self.path.display());
        }
    }
}

/// Connects without blocking, also when the listener accepts no clients.
fn open(path: &Path) -> anyhow::Result<UnixStream> {
    let address = SocketAddrUnix::new(path).context("the path is too long for a socket")?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    Ok(UnixStream::from(socket))
}

/// The first four bytes as a big-endian number; 0 if there are fewer.
fn number(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |number| u32::from_be_bytes(*number))
}

/// The length of a command or response, from its header. Fails below the header's length and above
/// [`MAX_MESSAGE`].
pub fn size(header: &[u8]) -> anyhow::Result<usize> {
    let size = header.get(2..).map_or(0, number);
    let fits =
        usize::try_from(size).ok().filter(|size| (HEADER_LENGTH..=MAX_MESSAGE).contains(size));
    fits.with_context(|| {
        format!("{size} bytes, which is not from {HEADER_LENGTH} to {MAX_MESSAGE}")
    })
}

/// The number of bytes that complete the header, or then the response; `None` at its end.
fn missing(response: &[u8]) -> anyhow::Result<Option<usize>> {
    if response.len() < HEADER_LENGTH {
        return Ok(Some(HEADER_LENGTH - response.len()));
    }
    let left = size(response).context("a response")?.saturating_sub(response.len());
    Ok((left > 0).then_some(left))
}

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

/// Returns 0 if no bytes are available.
fn take(socket: &UnixStream, room: &mut [u8]) -> anyhow::Result<usize> {
    match rustix::net::recv(socket, room, RecvFlags::DONTWAIT) {
        Ok((_, 0)) => bail!("it hung up"),
        Ok((_, count)) => Ok(count),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

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
    fn a_silent_swtpm_times_out() {
        let brief = Duration::from_millis(20);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("swtpm");
        let asked = listen(&path, NO_SESSIONS);
        let command = response(NO_SESSIONS, DEAF, &[]);
        for cancelled in [false, true] {
            let mut swtpm = Swtpm::connect(&path).unwrap();
            swtpm.timeout = brief;
            swtpm.power_on();
            assert!(!swtpm.broken);
            let cancel = eventfd(u32::from(cancelled), EventfdFlags::NONBLOCK).unwrap();
            let start = Instant::now();
            assert_eq!(swtpm.execute(&command, &cancel), None);
            assert!(swtpm.broken && start.elapsed() < COMMAND_TIMEOUT);
            assert_eq!(swtpm.execute(&response(NO_SESSIONS, 1, &[]), &cancel), None, "for good");
            swtpm.power_on();
            assert!(swtpm.broken);
        }
        asked.wait(CANCEL);
        assert!(!asked.commands().contains(&SHUTDOWN), "it would not be heard");
    }

    #[test]
    fn a_closed_swtpm_connection_fails_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("swtpm");
        let listener = UnixListener::bind(&path).unwrap();
        let peer = std::thread::spawn(move || {
            let (mut control, _) = listener.accept().unwrap();
            // A plain read discards the socket that comes with the command, which closes it.
            control.read_exact(&mut [0; 4]).unwrap();
            control.write_all(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]).unwrap();
            control
        });
        let said = format!("{:#}", Swtpm::connect(&path).unwrap_err());
        assert!(!said.contains("it does not answer"), "{said}");
        peer.join().unwrap();
    }

    #[test]
    fn lengths_are_checked_before_reading() {
        assert!(missing(&[]).unwrap() == Some(10) && missing(&[0; 9]).unwrap() == Some(1));
        let of = |size: u32| missing(&[&[0x80, 1], &size.to_be_bytes()[..], &[0; 4]].concat());
        assert!(of(10).unwrap().is_none() && of(11).unwrap() == Some(1));
        assert_eq!(of(0xf80).unwrap(), Some(0xf80 - 10));
        for size in [0, 9, 0xf81, u32::MAX] {
            let said = format!("{:#}", of(size).unwrap_err());
            let wanted = format!("{size} bytes, which is not from 10 to 3968");
            assert!(said.contains(&wanted), "{said}");
        }
    }
}
