//! Byte streams: a terminal, a file, a Unix socket, or nothing.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, Builder, JoinHandle};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Stream {
    /// No input; output is discarded.
    #[default]
    None,
    /// Standard output and input. In a terminal, Ctrl-A x quits and Ctrl-A a sends a Ctrl-A.
    Stdio,
    /// A file that is created, or truncated unless the machine goes on from elsewhere; no input.
    File(PathBuf),
    /// A listening Unix socket, for one client at a time.
    Socket(PathBuf),
    /// The viewers' clipboard. Only virtio-serial leads there.
    Clipboard,
}

impl TryFrom<String> for Stream {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let path = |path: &str, of: fn(PathBuf) -> Self| {
            if path.is_empty() {
                Err(format!("`{text}` names no path"))
            } else {
                Ok(of(path.into()))
            }
        };
        match text.split_once(':') {
            None if text == "stdio" => Ok(Self::Stdio),
            None if text == "none" => Ok(Self::None),
            None if text == "clipboard" => Ok(Self::Clipboard),
            Some(("file", rest)) => path(rest, Self::File),
            Some(("socket", rest)) => path(rest, Self::Socket),
            _ => Err(format!(
                "`{text}` is not a stream: write `stdio`, `file:PATH`, `socket:PATH` or `none`"
            )),
        }
    }
}

impl From<Stream> for String {
    fn from(stream: Stream) -> Self {
        match stream {
            Stream::None => "none".into(),
            Stream::Stdio => "stdio".into(),
            Stream::File(path) => format!("file:{}", path.display()),
            Stream::Socket(path) => format!("socket:{}", path.display()),
            Stream::Clipboard => "clipboard".into(),
        }
    }
}

pub type Output = Box<dyn Write + Send>;

pub enum Input {
    Stdin(Escape),
    Socket(ListeningSocket, Client),
}

/// The client of a socket, shared by both halves.
pub type Client = Arc<Mutex<Option<UnixStream>>>;

const BACKLOG: i32 = 128;

/// A listening socket. Dropping it deletes its file, if this process created it.
pub struct ListeningSocket {
    pub listener: UnixListener,
    path: Option<PathBuf>,
}

impl TryFrom<UnixListener> for ListeningSocket {
    type Error = io::Error;

    /// Takes over an inherited socket. Its file stays.
    fn try_from(listener: UnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path: None })
    }
}

impl ListeningSocket {
    /// Sets mode 0600. Replaces an abandoned socket file: one that refuses connections.
    pub fn new(path: &Path) -> anyhow::Result<Self> {
        let name = || format!("socket {}", path.display());
        let folder = path.parent().filter(|it| !it.as_os_str().is_empty());
        let folder = File::open(folder.unwrap_or(Path::new("."))).with_context(name)?;
        lock_folder(&folder);
        let found = fs::symlink_metadata(path).ok();
        if found.is_some_and(|it| !it.file_type().is_socket()) {
            bail!("{} is not a socket: remove it, or choose another path", path.display());
        }
        if path.exists()
            && UnixStream::connect(path)
                .is_err_and(|it| it.kind() == io::ErrorKind::ConnectionRefused)
        {
            fs::remove_file(path).with_context(name)?;
        }
        let listener = listen(path).map_err(|error| match error {
            Errno::ADDRINUSE => {
                anyhow::anyhow!("socket {} is in use by another process", path.display())
            }
            Errno::NAMETOOLONG => anyhow::anyhow!(
                "socket {}: the path is too long: choose one of at most 107 bytes",
                path.display()
            ),
            _ => anyhow::anyhow!("socket {}: {error}", path.display()),
        })?;
        Ok(Self { listener, path: Some(path.to_owned()) })
    }
}

/// Waits for the lock on the folder, so that a second process that starts at this moment does not
/// take our new file for an abandoned one. Gives up after a second: in a folder that others share,
/// a process that never releases the lock must not stop us.
fn lock_folder(folder: &File) {
    for _ in 0..100 {
        if flock(folder, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK) {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn listen(path: &Path) -> rustix::io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file takes the mode of its socket, so other users can never connect.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            fs::remove_file(path).ok();
        }
    }
}

struct SocketOutput(Client);

impl Write for SocketOutput {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let mut client = self.0.lock().expect("no stream panicked");
        if let Some(stream) = client.as_mut()
            && let Err(error) = stream.write_all(buffer)
            && error.kind() != io::ErrorKind::WouldBlock
        {
            *client = None;
        }
        Ok(buffer.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A file for output, which keeps what it has if the machine `goes_on`, from a snapshot or another
/// process. Opening a FIFO without a reader fails instead of blocking.
pub fn output_file(path: &Path, goes_on: bool) -> io::Result<File> {
    let mut how = OpenOptions::new();
    let how = if goes_on { how.append(true) } else { how.write(true).truncate(true) };
    how.create(true).mode(0o644).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)
}

/// See `output_file` about a machine that `goes_on`.
pub fn open(stream: &Stream, goes_on: bool) -> anyhow::Result<(Output, Option<Input>)> {
    Ok(match stream {
        Stream::None => (Box::new(io::sink()), None),
        Stream::Stdio => {
            make_raw();
            (Box::new(Unbuffered(rustix::stdio::stdout())), Some(Input::Stdin(Escape::default())))
        }
        Stream::File(path) => {
            let file = output_file(path, goes_on);
            let file = file.with_context(|| format!("file {}", path.display()))?;
            (Box::new(Unbuffered(file)), None)
        }
        Stream::Socket(path) => {
            let client = Client::default();
            let input = Input::Socket(ListeningSocket::new(path)?, client.clone());
            (Box::new(SocketOutput(client)), Some(input))
        }
        Stream::Clipboard => {
            bail!("`clipboard` cannot be used here: write `--device virtio-serial,to=clipboard`")
        }
    })
}

/// Fails for a socket, because the input half accepts its client.
pub fn output(stream: &Stream, goes_on: bool) -> anyhow::Result<Output> {
    match stream {
        // There is no reader of keys, so the terminal's mode stays as it is.
        Stream::Stdio => Ok(Box::new(Unbuffered(rustix::stdio::stdout()))),
        Stream::Socket(_) => bail!(
            "`{}` cannot be used for output only: write `stdio`, `file:PATH` or `none`",
            String::from(stream.clone())
        ),
        Stream::None | Stream::File(_) | Stream::Clipboard => Ok(open(stream, goes_on)?.0),
    }
}

/// An unbuffered file (a prompt has no line end) whose writes a signal interrupts.
///
/// While the other end does not read, the guest waits, as with any slow line. A signal means that
/// the vCPU has to stop, which must not wait: the bytes of the interrupted write are lost.
struct Unbuffered<F>(F);

impl<F: AsFd> Write for Unbuffered<F> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        if poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], None).is_err() {
            return Ok(buffer.len());
        }
        Ok(rustix::io::write(&self.0, buffer)?)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

static TERMINAL: OnceLock<Termios> = OnceLock::new();

/// Switches the terminal to raw mode, so that the guest receives each key as it is typed.
pub(super) fn make_raw() {
    let stdin = rustix::stdio::stdin();
    if !isatty(stdin) {
        return;
    }
    let Ok(before) = tcgetattr(stdin) else { return };
    let mut raw = before.clone();
    raw.make_raw();
    // Output stays as it was: our own messages end lines with a bare newline.
    raw.output_modes = before.output_modes;
    if tcsetattr(stdin, OptionalActions::Now, &raw).is_ok() {
        TERMINAL.set(before).ok();
    }
}

/// Must be called before the process ends.
pub fn restore_terminal() {
    if let Some(before) = TERMINAL.get() {
        tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, before).ok();
    }
}

/// The state of escape sequences: Ctrl-A and the key after it.
#[derive(Default)]
pub struct Escape {
    seen: bool,
    /// Standard input is at its end. It would always poll as readable.
    pub(super) ended: bool,
}

const CTRL_A: u8 = 1;

impl Escape {
    /// Reads typed keys into `typed`, without escape sequences. Ctrl-A x sends this process
    /// SIGTERM, for an orderly end.
    pub(super) fn read(&mut self, buffer: &mut [u8], typed: &mut Vec<u8>) {
        let count = match rustix::io::read(rustix::stdio::stdin(), &mut *buffer) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            result => result.unwrap_or(0),
        };
        self.ended = count == 0;
        typed.extend(&buffer[..count]);
        if self.filter(typed) {
            let us = rustix::process::getpid();
            rustix::process::kill_process(us, rustix::process::Signal::TERM).ok();
        }
    }

    /// Removes the escape sequences from `typed`; true when the user wants to quit.
    fn filter(&mut self, typed: &mut Vec<u8>) -> bool {
        let mut quit = false;
        let filter = |key| {
            let escaped = std::mem::replace(&mut self.seen, false);
            match (escaped, key) {
                (true, b'x' | b'X') => quit = true,
                (true, b'a') => return Some(CTRL_A),
                (false, CTRL_A) => self.seen = true,
                _ => return Some(key),
            }
            None
        };
        *typed = typed.drain(..).filter_map(filter).collect();
        quit
    }
}

pub struct InputThread {
    wake: Arc<OwnedFd>,
    state: Arc<State>,
    thread: Option<JoinHandle<Input>>,
}

#[derive(Default)]
struct State {
    stop: AtomicBool,
    /// The device did not take all input.
    full: AtomicBool,
}

impl InputThread {
    /// Starts a thread that passes input to `feed`, which returns the number of bytes that the
    /// device took.
    pub fn spawn(
        name: &str,
        mut input: Input,
        mut feed: impl FnMut(&[u8]) -> usize + Send + 'static,
    ) -> anyhow::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let state = Arc::<State>::default();
        let (wake_too, state_too) = (wake.clone(), state.clone());
        let body = move || {
            let mut waiting = Vec::new();
            while !state_too.stop.load(Ordering::Acquire) {
                if !waiting.is_empty() {
                    state_too.full.store(true, Ordering::Release);
                    let taken = feed(&waiting);
                    waiting.drain(..taken);
                }
                state_too.full.store(!waiting.is_empty(), Ordering::Release);
                input.wait(wake_too.as_fd(), &mut waiting);
            }
            input
        };
        let thread = Builder::new().name(format!("{name}-input")).spawn(body)?;
        Ok(Self { wake, state, thread: Some(thread) })
    }

    /// Wakes the thread because the device has room again.
    pub fn room(&self) {
        if self.state.full.load(Ordering::Acquire) {
            rustix::io::write(&*self.wake, &1_u64.to_ne_bytes()).ok();
        }
    }

    pub fn stop(mut self) -> Input {
        self.join().expect("a reader is stopped once")
    }

    fn join(&mut self) -> Option<Input> {
        let thread = self.thread.take()?;
        self.state.stop.store(true, Ordering::Release);
        rustix::io::write(&*self.wake, &1_u64.to_ne_bytes()).ok();
        Some(thread.join().expect("a panic ends the process"))
    }
}

impl Drop for InputThread {
    /// Ends the thread, which owns the listener and thereby the socket's file.
    fn drop(&mut self) {
        self.join();
    }
}

impl Input {
    /// Sleeps until there is input or `wake` is signaled. Reads no input while some is `waiting`.
    fn wait(&mut self, wake: BorrowedFd<'_>, waiting: &mut Vec<u8>) {
        let client = match self {
            Self::Stdin(_) => None,
            Self::Socket(_, client) => {
                let client = client.lock().expect("no stream panicked");
                client.as_ref().and_then(|it| it.try_clone().ok())
            }
        };
        let stdin = rustix::stdio::stdin();
        let source: Option<BorrowedFd<'_>> = match (&*self, &client) {
            _ if !waiting.is_empty() => None,
            (Self::Stdin(escape), _) => (!escape.ended).then_some(stdin),
            (Self::Socket(..), Some(client)) => Some(client.as_fd()),
            (Self::Socket(bound, _), None) => Some(bound.listener.as_fd()),
        };
        let mut fds = vec![PollFd::from_borrowed_fd(wake, PollFlags::IN)];
        fds.extend(source.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        if poll(&mut fds, None).is_err() {
            return;
        }
        let came = fds.get(1).is_some_and(|fd| !fd.revents().is_empty());
        if !fds[0].revents().is_empty() {
            rustix::io::read(wake, &mut [0; 8]).ok();
        }
        if came {
            self.take(client, waiting);
        }
    }

    /// Reads input, or accepts a client. After the end of standard input, only `wake` is polled.
    fn take(&mut self, client: Option<UnixStream>, waiting: &mut Vec<u8>) {
        let mut buffer = [0; 64];
        match (self, client) {
            (Self::Stdin(escape), _) => escape.read(&mut buffer, waiting),
            (Self::Socket(_, shared), Some(mut client)) => match client.read(&mut buffer) {
                Ok(count) if count > 0 => waiting.extend(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                _ => *shared.lock().expect("no stream panicked") = None,
            },
            (Self::Socket(bound, shared), None) => {
                if let Ok((client, _)) = bound.listener.accept() {
                    // A client that does not read must not stop the guest: it loses output.
                    client.set_nonblocking(true).ok();
                    *shared.lock().expect("no stream panicked") = Some(client);
                }
            }
        }
    }
}

#[cfg(test)]
mod test {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_stream_reads_back_as_printed() {
        for text in ["stdio", "none", "clipboard", "file:/tmp/a:b", "socket:/tmp/s"] {
            let stream = Stream::try_from(text.to_owned()).unwrap();
            assert_eq!(String::from(stream), text);
        }
        for bad in ["", "file:", "tcp:1", "Stdio"] {
            assert!(Stream::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn ctrl_a_x_quits_and_ctrl_a_a_types_ctrl_a() {
        let mut escape = Escape::default();
        let mut typed = b"a\x01ab".to_vec();
        assert!(!escape.filter(&mut typed));
        assert_eq!(typed, b"a\x01b");
        let mut typed = b"\x01".to_vec();
        assert!(!escape.filter(&mut typed) && typed.is_empty());
        let mut typed = b"x".to_vec();
        assert!(escape.filter(&mut typed));
    }

    #[test]
    fn a_machine_that_goes_on_adds_to_its_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let to = Stream::File(file.path().to_owned());
        for (goes_on, wanted) in [(false, "new "), (true, "new new "), (false, "new ")] {
            open(&to, goes_on).unwrap().0.write_all(b"new ").unwrap();
            assert_eq!(fs::read_to_string(file.path()).unwrap(), wanted);
        }
    }

    #[test]
    fn a_socket_serves_one_client_at_a_time_and_removes_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serial");
        let (mut output, input) = open(&Stream::Socket(path.clone()), false).unwrap();
        assert!(open(&Stream::Socket(path.clone()), false).is_err(), "in use");
        let (came, coming) = mpsc::channel();
        let feed = move |bytes: &[u8]| {
            came.send(bytes.to_vec()).unwrap();
            bytes.len()
        };
        let reader = InputThread::spawn("test", input.unwrap(), feed).unwrap();
        for word in ["one", "two"] {
            let mut client = UnixStream::connect(&path).unwrap();
            client.write_all(word.as_bytes()).unwrap();
            let got = coming.recv_timeout(Duration::from_secs(10)).unwrap();
            assert_eq!(got, word.as_bytes());
            output.write_all(b"back").unwrap();
            let mut back = [0; 4];
            client.read_exact(&mut back).unwrap();
            assert_eq!(&back, b"back");
        }
        drop(reader.stop());
        assert!(!path.exists());
    }
}
