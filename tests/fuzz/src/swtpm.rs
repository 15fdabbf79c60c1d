//! The TPM's registers under a hostile guest, with a swtpm behind them that gives arbitrary
//! answers.

use std::io::{IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;

use devices::device::Kind;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::hostile::{Actions, Guest};
use host::testutil::swtpm::response;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::json;

/// Locality 0 (PTP 6.2), and some of its registers.
const BASE: u64 = 0xfed4_0000;
const STATUS: u64 = BASE + 0x44;
const CANCEL: u64 = BASE + 0x48;
const START: u64 = BASE + 0x4c;
const BUFFER: u64 = BASE + 0x80;
/// The tag of a command without sessions.
const NO_SESSIONS: u16 = 0x8001;
/// The time after which a peer with an incomplete answer hangs up.
const SILENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// Runs the input. Its first byte is the share of the other bytes that the peer uses.
pub(crate) fn run(folder: &Path, bytes: &[u8]) {
    let Some((share, bytes)) = bytes.split_first() else { return };
    let (peers, guests) = bytes.split_at(bytes.len() * usize::from(*share) / 256);
    let path = folder.join("tpm");
    std::fs::remove_file(&path).ok();
    let listener = UnixListener::bind(&path).expect("a socket");
    let peer = Peer { bytes: peers.to_vec(), next: 0, valid: true };
    let peer = thread::spawn(move || peer.serve(&listener));
    live(&path, guests);
    // Connect, in case the peer still waits for a client.
    drop(UnixStream::connect(&path));
    peer.join().expect("a peer does not panic");
}

/// Runs a machine with this TPM from its power-on to its end.
fn live(path: &Path, bytes: &[u8]) {
    let config = Config::of_kind("tpm", json!({ "path": path })).expect("it is in the registry");
    let config = config.expect("a path is all it takes");
    let mut bench = Bench::new(4096);
    // A peer that does not behave like swtpm is refused.
    if bench.board.add("tpm", |place| config.build(place)).is_err() {
        return;
    }
    if bench.board.run(Vec::new()).is_err() {
        return;
    }
    let mut bytes = bytes.iter().copied();
    while let Some(what) = bytes.next() {
        match what {
            0..80 => {
                let mut guest = Guest::new(&bench, bytes.by_ref().take(usize::from(what)));
                while guest.step() {}
            }
            80..200 => command(&bench, &mut Actions::new(bytes.by_ref(), 4096)),
            200..215 => bench.write(Kind::Memory, CANCEL, &[bytes.next().unwrap_or(1), 0, 0, 0]),
            215..225 => thread::yield_now(),
            // A hostile peer may refuse, and a command may take too long.
            225..235 => drop(bench.board.gather()),
            235..245 => {
                let saved = bench.board.park();
                bench.board.run(saved).expect("what was just saved");
            }
            _ => bench.board.reset().expect("power-on again"),
        }
        let [status, start] = [STATUS, START].map(|at| bench.read::<4>(Kind::Memory, at));
        assert!(status[0] <= 3 && status[1..] == [0; 3], "status {status:?}");
        assert!(start[0] <= 1 && start[1..] == [0; 3], "start {start:?}");
    }
}

/// Writes a command, whose length may be wrong, and waits a while for its end.
fn command(bench: &Bench, actions: &mut Actions<impl Iterator<Item = u8>>) {
    let (Some(length), Some(code), Some(odd)) = (actions.byte(), actions.word(), actions.byte())
    else {
        return;
    };
    let mut bytes = response(NO_SESSIONS, code, &vec![odd; usize::from(length)]);
    if odd > 200 {
        bytes[2 + usize::from(odd % 4)] = length;
    }
    for (at, bytes) in (0..).step_by(8).zip(bytes.chunks(8)) {
        bench.write(Kind::Memory, BUFFER + at, bytes);
    }
    bench.write(Kind::Memory, START, &[1, 0, 0, 0]);
    for _ in 0..odd {
        if bench.read::<4>(Kind::Memory, START) == [0; 4] {
            break;
        }
        thread::yield_now();
    }
}

/// A peer in place of swtpm.
struct Peer {
    bytes: Vec<u8>,
    next: usize,
    /// Whether all answers so far had the right length.
    valid: bool,
}

impl Peer {
    fn byte(&mut self) -> Option<u8> {
        let byte = self.bytes.get(self.next).copied();
        self.next += 1;
        byte
    }

    /// Serves one client until one of them ends.
    fn serve(mut self, listener: &UnixListener) {
        let Ok((control, _)) = listener.accept() else { return };
        let mut data = None;
        while self.turn(&control, &mut data).is_some() {}
    }

    /// Answers the next command.
    fn turn(&mut self, control: &UnixStream, data: &mut Option<UnixStream>) -> Option<()> {
        let other = data.as_ref().unwrap_or(control);
        let mut fds = [control, other].map(|it| PollFd::new(it, PollFlags::IN));
        // After an incomplete answer, the device waits for the rest.
        let patience = if self.valid { None } else { Some(&SILENCE) };
        if poll(&mut fds, patience).ok()? == 0 {
            return None;
        }
        let [asked, commanded] = fds.map(|fd| !fd.revents().is_empty());
        match data {
            Some(data) if commanded => {
                let mut room = [0; 0x1000];
                let count = data.read(&mut room).ok().filter(|count| *count > 0)?;
                let rest = room.get(10..count).unwrap_or_default();
                let answer = response(NO_SESSIONS, 0, &rest[..rest.len().min(64)]);
                self.say(data, answer)
            }
            _ if asked => {
                let answer = Self::ask(control, data)?;
                self.say(&mut { control }, answer)
            }
            _ => Some(()),
        }
    }

    /// swtpm's answer to a command of the control channel.
    fn ask(control: &UnixStream, data: &mut Option<UnixStream>) -> Option<Vec<u8>> {
        let mut bytes = [0; 64];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = RecvAncillaryBuffer::new(&mut room);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let came = recvmsg(control, &mut parts, &mut rights, RecvFlags::CMSG_CLOEXEC);
        let count = came.ok().map(|it| it.bytes).filter(|count| *count >= 4)?;
        for message in rights.drain() {
            if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                *data = fds.next().map(UnixStream::from);
            }
        }
        let fields: &[u8] = match bytes[..count].first_chunk().map(|it| u32::from_be_bytes(*it))? {
            1 => &[0, 0, 0xff, 0xff],
            12 => &[0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 4, 1, 2, 3, 4],
            17 => &[0, 0, 0xf, 0x80, 0, 0, 0xa, 0xf8, 0, 0, 0x10, 0],
            _ => &[],
        };
        Some([&[0; 4], fields].concat())
    }

    /// Sends an answer, sometimes a wrong one.
    fn say(&mut self, to: &mut impl std::io::Write, mut answer: Vec<u8>) -> Option<()> {
        match self.byte()? {
            0..190 => {}
            190..220 => {
                let at = usize::from(self.byte()?) % answer.len();
                answer[at] = self.byte()?;
                self.valid = false;
            }
            220..230 => {
                answer.truncate(usize::from(self.byte()?) % answer.len());
                self.valid = false;
            }
            230..245 => {
                let more = usize::from(self.byte()?) * 64;
                answer.resize(answer.len() + more, self.byte()?);
                self.valid = false;
            }
            _ => return None,
        }
        to.write_all(&answer).ok()
    }
}
