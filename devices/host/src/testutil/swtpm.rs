//! A fake swtpm. It answers as swtpm does; commands with special codes make it misbehave.

use std::io::IoSliceMut;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

/// Code of a command without a response until it is canceled; then it is `TPM_RC_CANCELED`.
pub const SLOW: u32 = 0x2000_0001;
/// Code of a command that makes the fake hang up.
pub const GONE: u32 = 0x2000_0002;
/// Code of a command whose response claims a length above the buffer's.
pub const LONG: u32 = 0x2000_0003;
/// Code of a command whose response claims a length below the header's.
pub const SHORT: u32 = 0x2000_0004;
/// Code of a command whose response is sent byte by byte.
pub const DRIP: u32 = 0x2000_0005;
/// Code of a command that makes the fake hang up in the middle of the response.
pub const HALF: u32 = 0x2000_0006;

/// Code of a command whose response comes [`LATE_DELAY`] after it was canceled.
pub const LATE: u32 = 0x2000_0008;
pub const LATE_DELAY: Duration = Duration::from_secs(1);

/// Code of a command that is never answered.
pub const DEAF: u32 = 0x2000_0007;

/// Code of a command whose response has the content of the last ordinary command.
pub const RECALL: u32 = 0x2000_0009;
/// Codes of commands after which the fake refuses to hand out its state: with an error and fields,
/// with an error alone, and with a length that is too large.
pub const UNWILLING: u32 = 0x2000_000a;
pub const CURT: u32 = 0x2000_000b;
pub const BOASTFUL: u32 = 0x2000_000c;

/// All that swtpm 0.7 has.
const CAPABILITIES: u16 = 0xffff;

/// `TPM_RC_CANCELED`
pub const CANCELED: u32 = 0x909;

const MAX_NOTED: usize = 4096;

/// How long tests wait for an expected command.
const LIMIT: Duration = Duration::from_secs(60);

/// A record of the numbers of control commands, and of the codes of TPM commands that are answered
/// late or never.
#[derive(Clone, Default)]
pub struct CommandLog(Arc<(Mutex<Vec<u32>>, Condvar)>);

impl CommandLog {
    fn note(&self, command: u32) {
        let mut asked = self.0.0.lock().unwrap();
        // Bounds memory: long tests send any number of commands.
        if asked.len() < MAX_NOTED {
            asked.push(command);
        }
        self.0.1.notify_all();
    }

    pub fn commands(&self) -> Vec<u32> {
        self.0.0.lock().unwrap().clone()
    }

    /// Waits at most a minute.
    pub fn wait(&self, command: u32) {
        let (asked, changed) = &*self.0;
        let end = Instant::now() + LIMIT;
        let mut asked = asked.lock().unwrap();
        while !asked.contains(&command) {
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{command} was not asked for: {asked:?}");
            asked = changed.wait_timeout(asked, left).unwrap().0;
        }
    }
}

/// Listens at `path`, and serves all clients in one thread. All responses have the tag `tag`.
pub fn listen(path: &Path, tag: u16) -> CommandLog {
    listen_with(path, tag, CAPABILITIES)
}

/// As `listen`, with these capabilities.
pub fn listen_with(path: &Path, tag: u16, capabilities: u16) -> CommandLog {
    let listener = UnixListener::bind(path).unwrap();
    let asked = CommandLog::default();
    let noted = asked.clone();
    std::thread::spawn(move || {
        let mut peers = Vec::<Peer>::new();
        loop {
            let mut fds = vec![PollFd::new(&listener, PollFlags::IN)];
            for peer in &peers {
                // A peer without a data socket gets its control socket twice.
                let data = peer.data.as_ref().unwrap_or(&peer.control);
                fds.extend([&peer.control, data].map(|it| PollFd::new(it, PollFlags::IN)));
            }
            if poll(&mut fds, None).is_err() {
                continue;
            }
            let ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            let mut each = ready[1..].chunks(2);
            peers
                .retain_mut(|peer| each.next().is_none_or(|it| peer.serve(it[0], it[1]).is_some()));
            if ready[0]
                && let Ok((control, _)) = listener.accept()
            {
                let (data, slow, asked) = (None, None, noted.clone());
                let state = State { capabilities, volatile: Vec::new(), refuses: 0 };
                peers.push(Peer { control, data, tag, slow, asked, state });
            }
        }
    });
    asked
}

struct Peer {
    control: UnixStream,
    data: Option<UnixStream>,
    tag: u16,
    /// A command waits to be canceled; its response comes this long afterwards.
    slow: Option<Duration>,
    asked: CommandLog,
    state: State,
}

/// Flags and content of the permanent state.
const PERMANENT: (u32, &[u8]) = (2, b"keys");

struct State {
    capabilities: u16,
    /// The content of the last ordinary command.
    volatile: Vec<u8>,
    /// The code of a command after which no state is handed out; 0 if it is.
    refuses: u32,
}

impl State {
    /// The answer to GET_STATEBLOB.
    fn get(&self, kind: u32) -> Vec<u8> {
        let (flags, part) = if kind == 1 { PERMANENT } else { (0, &self.volatile[..]) };
        let length = u32::try_from(part.len()).unwrap_or(u32::MAX);
        let answer = |result: u32, length: u32| {
            [result, flags, length, length].map(u32::to_be_bytes).concat()
        };
        match self.refuses {
            UNWILLING => answer(0x800, 0),
            CURT => vec![0, 0, 0, 10],
            BOASTFUL => answer(0, 0x4_0001),
            _ => [&answer(0, length), part].concat(),
        }
    }

    /// Takes the fields and the rest of SET_STATEBLOB from the client.
    fn set(&mut self, mut from: impl Read) -> Option<u32> {
        let mut fields = [[0; 4]; 3];
        from.read_exact(fields.as_flattened_mut()).ok()?;
        let [flags, kind, length] = fields.map(u32::from_be_bytes);
        let mut part = vec![0; usize::try_from(length).ok()?];
        from.read_exact(&mut part).ok()?;
        match kind {
            1 if (flags, &part[..]) == PERMANENT => {}
            2 => self.volatile = part,
            _ => return Some(3),
        }
        Some(0)
    }
}

impl Peer {
    /// Handles one command; `None` when the client or the fake hangs up.
    fn serve(&mut self, control: bool, data: bool) -> Option<()> {
        match (control, data) {
            // A command comes before the CANCEL for it.
            (_, true) if self.data.is_some() => self.command(),
            (true, _) => self.control(),
            _ => Some(()),
        }
    }

    fn control(&mut self) -> Option<()> {
        let mut command = [0; 4];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = RecvAncillaryBuffer::new(&mut room);
        let mut parts = [IoSliceMut::new(&mut command)];
        let came =
            rustix::net::recvmsg(&self.control, &mut parts, &mut rights, RecvFlags::CMSG_CLOEXEC);
        if came.ok()?.bytes != 4 {
            return None;
        }
        for message in rights.drain() {
            if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                self.data = fds.next().map(|fd: OwnedFd| UnixStream::from(fd));
            }
        }
        let command = u32::from_be_bytes(command);
        let answer = self.answer(command)?;
        self.control.write_all(&answer).ok()?;
        self.asked.note(command);
        if command == 9
            && let Some(time) = self.slow.take()
        {
            std::thread::sleep(time);
            let response = response(self.tag, CANCELED, &[]);
            self.data.as_mut()?.write_all(&response).ok()?;
        }
        (command != 3).then_some(())
    }

    /// Reads the rest of a control command. Returns the answer.
    fn answer(&mut self, command: u32) -> Option<Vec<u8>> {
        let mut number = || {
            let mut field = [0; 4];
            self.control.read_exact(&mut field).ok()?;
            Some(u32::from_be_bytes(field))
        };
        let mut result = 0;
        let mut fields = Vec::new();
        match command {
            1 => fields = u32::from(self.state.capabilities).to_be_bytes().to_vec(),
            2 => {
                let keeps = number()? == 1;
                self.state.volatile.truncate(if keeps { usize::MAX } else { 0 });
            }
            5 => drop(number()?),
            17 => {
                number()?;
                fields = vec![0, 0, 0xf, 0x80, 0, 0, 0xa, 0xf8, 0, 0, 0x10, 0];
            }
            12 => {
                let [_, kind, _] = [number()?, number()?, number()?];
                return Some(self.state.get(kind));
            }
            13 => result = self.state.set(&self.control)?,
            _ => {}
        }
        Some([&u32::to_be_bytes(result)[..], &fields].concat())
    }

    /// Echoes a command as its response, unless its code says otherwise.
    fn command(&mut self) -> Option<()> {
        let tag = self.tag;
        let data = self.data.as_mut()?;
        let mut header = [0; 10];
        data.read_exact(&mut header).ok()?;
        let number = |at: usize| header[at..].first_chunk().map_or(0, |it| u32::from_be_bytes(*it));
        let mut rest = vec![0; usize::try_from(number(2)).ok()?.checked_sub(10)?];
        data.read_exact(&mut rest).ok()?;
        let mut response = response(tag, 0, &rest);
        match number(6) {
            RECALL => response = self::response(tag, 0, &self.state.volatile),
            refuses @ (UNWILLING | CURT | BOASTFUL) => self.state.refuses = refuses,
            ..=0xffff => (self.state.volatile, self.state.refuses) = (rest, 0),
            SLOW => self.slow = Some(Duration::ZERO),
            LATE => self.slow = Some(LATE_DELAY),
            GONE => return None,
            LONG => response[2..6].copy_from_slice(&0xf81_u32.to_be_bytes()),
            SHORT => response[2..6].copy_from_slice(&9_u32.to_be_bytes()),
            DRIP => response.iter().try_for_each(|byte| data.write_all(&[*byte])).ok()?,
            HALF => {
                data.write_all(response.get(..11)?).ok()?;
                return None;
            }
            _ => {}
        }
        if matches!(number(6), SLOW | LATE | DEAF) {
            self.asked.note(number(6));
        }
        if !matches!(number(6), SLOW | LATE | DRIP | DEAF) {
            data.write_all(&response).ok()?;
        }
        Some(())
    }
}

/// A response or a command: both have the same format.
pub fn response(tag: u16, code: u32, rest: &[u8]) -> Vec<u8> {
    let size = u32::try_from(10 + rest.len()).unwrap_or(u32::MAX);
    [&tag.to_be_bytes()[..], &size.to_be_bytes(), &code.to_be_bytes(), rest].concat()
}
