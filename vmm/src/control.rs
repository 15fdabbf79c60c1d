//! The control socket and its client. Each request and each answer is one line that holds a JSON
//! object.
//!
//! The answer to `{"command": "status"}` is `{"ok": {...}}` or `{"error": "..."}`. An argument is a
//! further key, as in `{"command": "balloon", "size": "1G"}`. The answer to `screenshot` is
//! followed by the bytes of the picture; `bytes` in the answer is their number. Open files are
//! passed with `attach` and `snapshot` (`passing.rs`). The socket file is accessible only to the
//! user that runs the machine.

pub mod host_usb;
mod passing;
pub mod snapshot;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
pub use host::disk::FileId;
use host::stream::ListeningSocket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt};
use screen::web::stage::Button;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::screenshot::{self, Picture};
pub use crate::snapshot::Then;
pub use crate::status::Status;
use host::keyvalue;
use host::size::Size;
use screen::keys::Combination;

/// The usage of a command, for the help and for parsing.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// The word after `vmm ctl`, and the value of `"command"`.
    pub name: &'static str,
    /// Syntax of the arguments. Empty for a command without arguments.
    pub value: &'static str,
    /// JSON keys of the required arguments, in the order in which they are typed.
    pub required: &'static [&'static str],
    /// JSON keys of the optional arguments, in the order in which they are typed.
    pub optional: &'static [&'static str],
    pub help: &'static str,
}

impl Usage {
    /// Usage as typed: `balloon [SIZE]`.
    pub fn call(&self) -> String {
        format!("{} {}", self.name, self.value).trim_end().to_owned()
    }
}

macro_rules! commands {
    ($(
        $(#[doc = $help:literal])+
        $name:literal $value:literal
        $kind:ident $({ $($required:ident: $of:ty),*; $($optional:ident: $type:ty),* })?,
    )*) => {
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(tag = "command", deny_unknown_fields)]
        pub enum Command {
            $(
                $(#[doc = $help])+
                #[serde(rename = $name)]
                $kind $({
                    $(
                        $required: $of,
                    )*
                    $(
                        #[serde(default, skip_serializing_if = "Option::is_none")]
                        $optional: Option<$type>,
                    )*
                })?,
            )*
        }

        /// Ordered as in the help.
        pub const COMMANDS: &[Usage] = &[$(Usage {
            name: $name,
            value: $value,
            required: &[$($(stringify!($required)),*)?],
            optional: &[$($(stringify!($optional)),*)?],
            help: concat!($($help),+),
        }),*];
    };
}

commands! {
    /// Show the state of the machine: size, number of resets, display, viewers, disks, networks,
    /// USB devices and drives with their names, and the lights of the keyboard.
    "status" "" Status,
    /// Stop the processors.
    "pause" "" Pause,
    /// Stop the processors and the devices, and make the disks whole and durable, so that their
    /// files can be copied until `resume`.
    "settle" "" Settle,
    /// Resume the processors.
    "resume" "" Resume,
    /// Reset the machine, like its reset button.
    "reset" "" Reset,
    /// Press the power button: the guest shuts down.
    "powerdown" "" PowerButton,
    /// Send a non-maskable interrupt (NMI). Many guests then write a crash dump.
    "nmi" "" Nmi,
    /// Show the registers of all processors.
    "registers" "" Registers,
    /// Show the target and the actual size of the guest's memory, and the guest's statistics. A
    /// size, such as 1G, sets a new target.
    "balloon" "[SIZE]" Balloon {; size: Size },
    /// Extend a disk and notify the guest. The disk is given by its name (see `status`) or serial
    /// number. Without a size, the disk takes the current length of its file or device.
    "grow" "NAME [SIZE]" Grow { name: String; size: Size },
    /// Plug in or unplug a network cable, or set the MTU. The guest sees a new MTU when it reads
    /// the MTU again, at the latest after a reset. Without arguments: show the state of the link.
    "link" "NAME [up|down] [mtu N]" Link { name: String; state: LinkState, mtu: u16 },
    /// Save the screen as a PNG file. In JSON there is no file: rows of pixels follow the answer,
    /// with 4 bytes for each pixel: blue, green, red and an unused byte.
    "screenshot" "FILE.png" Screenshot,
    /// Press keys together and release them. Keys have the names of a US keyboard, as in
    /// ctrl-alt-delete, or are scan codes, as in 0xe05b (the left logo key).
    "key" "KEY[-KEY...]" Key { keys: Combination; },
    /// Type a text on the machine's keyboard (see `--keyboard`), with Enter for line feeds. The
    /// answer is sent when the guest has read all keys. If the keyboard lacks one of the
    /// characters, nothing is typed. UEFI firmware drops keys that its shell does not read in time:
    /// send a few words at a time.
    "type" "TEXT" Type { text: String; },
    /// Move the pointer: 0 is the left or upper edge of the screen, 32767 the right or lower edge.
    /// `buttons` is the sum of the buttons that are pressed: 1 left, 2 right, 4 middle. `wheel` is
    /// the number of notches that the wheel turns, positive away from the user.
    "pointer" "X Y [buttons N] [wheel N]" Pointer { x: u16, y: u16; buttons: u8, wheel: i32 },
    /// Plug in a USB device, written like the value of `--device`, as in
    /// usb-storage,path=win11.iso. The answer holds its name. Paths are absolute, or relative to
    /// the folder in which the machine was started. With `only`, the file is opened only if it has
    /// these numbers (`stat -c %d:%i FILE`). A device of this host, as in
    /// usb-host,vendorid=0x0403,productid=0x6001, is opened by `vmm ctl` and passed on; it does not
    /// come back when it was unplugged at the host, as it does with `vmm usb`.
    "attach" "KIND[,KEY=VALUE...] [only DEV:INODE]" Attach { device: String; only: FileId },
    /// Unplug the USB device with this name (see `status`), even if the guest uses it.
    "detach" "NAME" Detach { name: String; },
    /// Eject the medium of the drive with this name (see `status`). If the guest has locked the
    /// drive, it is asked to release it; `force` ejects the medium anyway.
    "eject" "NAME [force]" Eject { name: String; force: Force },
    /// Change the VM Generation ID, to a random one by default, and notify the guest. The guest
    /// then behaves as after a clone or a restored snapshot: it reseeds its random numbers, and a
    /// domain controller discards identifiers that its copy could also assign.
    "vmgenid" "[UUID]" Vmgenid {; id: String },
    /// Save the whole machine in a new folder, from which `vmm run --restore DIR` continues. Then
    /// it runs on (`resume`, the default), stays paused, so that its disks can be copied, ends
    /// (`quit`), or is asleep (`sleep`) until `resume`: its process stays, and gives the guest's
    /// memory back to the host. A snapshot is of use only with the disks as they were: a disk file
    /// that has changed since is refused. Remove the folder before a machine that is asleep
    /// resumes. A machine with a USB device of this host is not saved. With `within`, a snapshot
    /// that takes longer fails, and the machine continues. With `key`, the snapshot is encrypted,
    /// and only `--restore DIR,key=FILE` continues from it: the file has 32 random bytes, or a
    /// passphrase of at least 12 bytes. In JSON, two open files for `machine.json` and `memory` are
    /// passed in this order, and with `key` a third, with 32 bytes of salt and 32 of a new key.
    "snapshot" "DIR [then resume|pause|quit|sleep] [within SECONDS] [key FILE]" Snapshot {
        dir: PathBuf; then: Then, within: u16, key: PathBuf
    },
    /// Wait until a frame arrives for a machine that is asleep, or until it is not asleep any more.
    /// A tap then drops all frames that are sent to many receivers, but for the questions for an
    /// address (ARP and neighbour solicitations). The frame waits for the guest. Only one client
    /// waits: a second one ends the waiting of the first.
    "await" "" Await,
    /// Move the running machine to a `vmm run --incoming SOCKET`, which must wait already, perhaps
    /// on another host: `ssh -fNT -L SOCKET:SOCKET HOST` forwards its socket. Memory is sent while
    /// the machine runs; then it stands, for about `pause` milliseconds at most (300 by default),
    /// and runs there. A guest that writes faster than its memory is sent is slowed. This process
    /// ends with status 79 when the machine has moved. If the connection is cut, it never runs
    /// twice, and with disks that are files, it always runs at one end. `status` shows the
    /// progress. With `within`, a migration that takes longer fails, and the machine stays. The
    /// migration goes on if this command is interrupted. In JSON, the connected socket is passed
    /// as an open file.
    "migrate" "SOCKET [pause MILLISECONDS] [within SECONDS]" Migrate {
        to: PathBuf; pause: u32, within: u16
    },
    /// End a migration that is under way: the machine stays. In the last moment, while it stands,
    /// it is too late.
    "migrate-cancel" "" MigrateCancel,
    /// Insert a medium into an empty drive. `only` works as for `attach`.
    "insert" "NAME PATH [only DEV:INODE]" Insert { name: String, path: PathBuf; only: FileId },
    /// Switch the machine off at once, without a shutdown of the guest.
    "quit" "" Quit,
}

/// Whether to override the guest's lock on a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Force {
    Force,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkState {
    Up,
    Down,
}

impl From<Button> for Command {
    fn from(button: Button) -> Self {
        match button {
            Button::Shutdown => Self::PowerButton,
            Button::Reset => Self::Reset,
            Button::Pause => Self::Pause,
            Button::Resume => Self::Resume,
            Button::Off => Self::Quit,
        }
    }
}

impl Command {
    pub fn read(words: &[String]) -> anyhow::Result<Self> {
        let Some((name, arguments)) = words.split_first() else {
            bail!("ctl needs a command: `vmm help ctl` lists them");
        };
        let Some(usage) = COMMANDS.iter().find(|usage| usage.name == name) else {
            let names: Vec<_> = COMMANDS.iter().map(|usage| usage.name).collect();
            let near = keyvalue::nearest(name, &names).unwrap_or("status");
            bail!("there is no command {name}: did you mean {near}?");
        };
        let keys = [usage.required, usage.optional].concat();
        let mut arguments = arguments.iter();
        let mut text = name.clone();
        let mut next = 0;
        while let Some(argument) = arguments.next() {
            // An optional argument may follow its key: `mtu 1400`.
            let named = usage.optional.iter().position(|key| key == argument);
            let (at, argument) = match named.filter(|_| next >= usage.required.len()) {
                None => (next, argument),
                Some(at) => match (usage.required.len() + at, arguments.next()) {
                    (at, Some(value)) => (at, value),
                    // A key that is its own value: `force`.
                    (at, None) if at == next => (at, argument),
                    _ => bail!("{argument} needs a value: `{}`", usage.call()),
                },
            };
            let Some(key) = keys.get(at) else {
                bail!("unexpected argument {argument}: write `{}`", usage.call());
            };
            text.push_str(&format!(",{key}={}", keyvalue::escaped(argument)));
            next = at + 1;
        }
        ensure!(next >= usage.required.len(), "{name} needs an argument: write `{}`", usage.call());
        keyvalue::parse(&text, Some("command"))
    }
}

pub struct Request {
    pub command: Command,
    /// The open files that the client passed with the command.
    pub files: Vec<OwnedFd>,
    back: Sender<Answer>,
    unwritten: Arc<Unwritten>,
}

/// A line, and the bytes that follow it. The answer counts as unwritten until it is dropped.
struct Answer {
    line: Value,
    bytes: Vec<u8>,
    unwritten: Arc<Unwritten>,
}

impl Answer {
    fn new(line: Value, bytes: Vec<u8>, unwritten: &Arc<Unwritten>) -> Self {
        *unwritten.count() += 1;
        Self { line, bytes, unwritten: unwritten.clone() }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        *self.unwritten.count() -= 1;
        self.unwritten.fewer.notify_all();
    }
}

/// The number of answers that have not reached their clients yet.
#[derive(Default)]
struct Unwritten {
    count: Mutex<usize>,
    fewer: Condvar,
}

impl Unwritten {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.count.lock().expect("no client's thread panicked")
    }

    /// Waits until all answers are written, for at most `timeout`.
    fn wait(&self, timeout: Duration) {
        let left = self.fewer.wait_timeout_while(self.count(), timeout, |count| *count > 0);
        drop(left.expect("no client's thread panicked"));
    }
}

/// Passes a request to the machine. Returns false if the machine is gone.
pub type Submit = Arc<dyn Fn(Request) -> bool + Send + Sync>;

impl Request {
    /// A command whose sender ignores the answer.
    pub fn unanswered(command: Command) -> Self {
        Self { command, files: Vec::new(), back: mpsc::channel().0, unwritten: Arc::default() }
    }

    /// Sends a command from within this process, and waits for its answer.
    pub fn ask(command: Command, send: impl FnOnce(Self) -> bool) -> anyhow::Result<Value> {
        let (back, answers) = mpsc::channel();
        let request = Self { command, files: Vec::new(), back, unwritten: Arc::default() };
        ensure!(send(request), "the machine is off");
        let answer = answers.recv_timeout(INTERNAL_TIMEOUT);
        let mut answer = answer.context("the machine does not answer")?;
        match answer.line.take() {
            Value::Object(mut line) if line.contains_key("ok") => {
                Ok(line.remove("ok").unwrap_or_default())
            }
            line => bail!("{}", line["error"].as_str().unwrap_or("the machine refused")),
        }
    }

    pub fn answer(self, result: anyhow::Result<Value>) {
        let line = match result {
            Ok(value) => json!({ "ok": value }),
            Err(error) => json!({ "error": format!("{error:#}") }),
        };
        // The client may have disconnected.
        self.back.send(Answer::new(line, Vec::new(), &self.unwritten)).ok();
    }

    pub fn answer_picture(self, picture: anyhow::Result<(Picture, Vec<u8>)>) {
        match picture {
            Err(error) => self.answer(Err(error)),
            Ok((Picture { width, height }, bytes)) => {
                let count = bytes.len();
                let line = json!({"ok": {"width": width, "height": height, "bytes": count}});
                self.back.send(Answer::new(line, bytes, &self.unwritten)).ok();
            }
        }
    }
}

const MAX_REQUEST_BYTES: u64 = 64 << 10;
/// Limit for an answer's line. Pictures follow the line and do not count.
pub const MAX_ANSWER_BYTES: u64 = 1 << 20;
/// No display has more memory.
const MAX_PICTURE_BYTES: usize = 256 << 20;
/// Limit for answers to commands that this process itself sends.
const INTERNAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for writing pending answers when the machine ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// Further clients wait in the listener's queue.
const MAX_CLIENTS: usize = 16;

/// Interval at which a full server looks whether a client has disconnected.
const FULL_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Dropping it removes the socket file.
pub struct Server {
    /// Closing it ends the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    unwritten: Arc<Unwritten>,
}

impl Server {
    /// Accepts clients, and passes their requests to `submit`.
    pub fn new(bound: ListeningSocket, submit: Submit) -> anyhow::Result<Self> {
        // The thread ends when the other end of this pipe is closed.
        let (ended, stop) = rustix::pipe::pipe().context("--control")?;
        let unwritten = Arc::<Unwritten>::default();
        let answers = unwritten.clone();
        let body = move || {
            let clients = Arc::new(());
            loop {
                let full = Arc::strong_count(&clients) > MAX_CLIENTS;
                let mut fds = vec![PollFd::new(&ended, PollFlags::IN)];
                if !full {
                    fds.push(PollFd::new(&bound.listener, PollFlags::IN));
                }
                if poll(&mut fds, full.then_some(&FULL_PAUSE)).is_err() {
                    continue;
                }
                if !fds[0].revents().is_empty() {
                    return;
                }
                if full {
                    continue;
                }
                let Ok((client, _)) = bound.listener.accept() else {
                    // Out of file descriptors: wait instead of spinning.
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                };
                let (submit, count, answers) = (submit.clone(), clients.clone(), answers.clone());
                let serve = move || {
                    if let Err(error) = serve(&client, &submit, &answers) {
                        tracing::debug!("control: {error:#}");
                    }
                    drop(count);
                };
                Builder::new().name("control-client".into()).spawn(serve).ok();
            }
        };
        let thread = Builder::new().name("control".into()).spawn(body).context("--control")?;
        Ok(Self { stop: Some(stop), thread: Some(thread), unwritten })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            thread.join().expect("a panic ends the process");
        }
        // Exiting now would cut pending answers off.
        self.unwritten.wait(FLUSH_TIMEOUT);
    }
}

fn serve(
    mut client: &UnixStream,
    submit: &Submit,
    unwritten: &Arc<Unwritten>,
) -> anyhow::Result<()> {
    client.set_nonblocking(false)?;
    client.set_read_timeout(Some(Duration::from_secs(60)))?;
    client.set_write_timeout(Some(Duration::from_secs(10)))?;
    let mut lines = BufReader::new(passing::Incoming::new(client));
    loop {
        let mut line = String::new();
        if (&mut lines).take(MAX_REQUEST_BYTES).read_line(&mut line)? == 0 {
            return Ok(());
        }
        let answer = match serde_json::from_str(&line) {
            Ok(command) => {
                let (back, coming) = mpsc::channel();
                let (files, unwritten) = (lines.get_mut().take_files(), unwritten.clone());
                let taken = submit(Request { command, files, back, unwritten });
                ensure!(taken, "the machine is gone");
                coming.recv().context("the machine is gone")?
            }
            Err(error) => {
                let line = json!({ "error": keyvalue::explain(error).to_string() });
                Answer::new(line, Vec::new(), unwritten)
            }
        };
        writeln!(client, "{}", answer.line)?;
        client.write_all(&answer.bytes)?;
    }
}

pub struct Client {
    stream: BufReader<Stream>,
}

/// The client's end of the connection, with a deadline.
struct Stream {
    stream: UnixStream,
    /// Time limit for each request and its answer.
    timeout: Option<Duration>,
    end: Option<Instant>,
}

impl Stream {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.end.map(|end| end.saturating_duration_since(Instant::now()));
        match left {
            Some(Duration::ZERO) => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(left),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An answer that reports an error becomes `Err`.
pub fn parse_answer(line: &[u8]) -> anyhow::Result<Value> {
    let whole = line.len() as u64 == MAX_ANSWER_BYTES && !line.ends_with(b"\n");
    ensure!(!whole, "answer longer than {MAX_ANSWER_BYTES} bytes: not a machine of this program");
    let mut answer: Value = serde_json::from_slice(line).context("the machine is gone")?;
    answer.get("error").and_then(Value::as_str).map_or(Ok(()), |error| bail!("{error}"))?;
    Ok(answer.get_mut("ok").map(Value::take).unwrap_or_default())
}

impl Command {
    /// Whether it relies on the machine's memory, which must be sound.
    pub fn saves(&self) -> bool {
        matches!(self, Self::Snapshot { .. } | Self::Settle | Self::Migrate { .. })
    }
}

impl Client {
    /// Connects, and waits without a time limit.
    pub fn connect(path: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| not_listening(path))?;
        Ok(Self { stream: BufReader::new(Stream { stream, timeout: None, end: None }) })
    }

    /// `time` limits the connection attempt, and each request with its answer.
    pub fn connect_timeout(path: &Path, time: Duration) -> anyhow::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // A listener that does not accept queues a few clients. Further ones would wait in
        // `connect`.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(time))?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
            .with_context(|| not_listening(path))?;
        let stream = UnixStream::from(socket);
        Ok(Self { stream: BufReader::new(Stream { stream, timeout: Some(time), end: None }) })
    }

    pub fn ask(&mut self, command: &Command) -> anyhow::Result<Value> {
        self.ask_with(command, &[])
    }

    /// Passes open files with the command. If that needs it, waits first until the machine's memory
    /// is checked.
    pub fn ask_with(
        &mut self,
        command: &Command,
        files: &[BorrowedFd<'_>],
    ) -> anyhow::Result<Value> {
        if command.saves() {
            self.await_check(None)?;
        }
        self.pass(command, files)
    }

    /// Like [`ask_with`](Self::ask_with), for a caller that has waited.
    pub(super) fn pass(
        &mut self,
        command: &Command,
        files: &[BorrowedFd<'_>],
    ) -> anyhow::Result<Value> {
        let question = format!("{}\n", serde_json::to_string(command)?);
        let stream = self.stream.get_mut();
        stream.end = stream.timeout.map(|time| Instant::now() + time);
        let mut question = question.as_bytes();
        if !files.is_empty() {
            let sent = passing::send(&stream.stream, question, files);
            let sent = sent.context("the machine is gone")?;
            question = question.get(sent..).unwrap_or_default();
        }
        stream.write_all(question).context("the machine is gone")?;
        let mut line = Vec::new();
        let mut stream = (&mut self.stream).take(MAX_ANSWER_BYTES);
        stream.read_until(b'\n', &mut line).context("the machine is gone")?;
        parse_answer(&line)
    }
}

fn not_listening(path: &Path) -> String {
    format!("{}: no machine listens there (start it with --control)", path.display())
}

impl Client {
    /// Fails if there is no display, or if it is off.
    pub fn screenshot(&mut self) -> anyhow::Result<(Picture, Vec<u8>)> {
        let answer = self.ask(&Command::Screenshot)?;
        let picture = Picture::deserialize(&answer).context("an answer without a size")?;
        let count = answer["bytes"].as_u64().and_then(|count| usize::try_from(count).ok());
        let count = count.filter(|count| *count <= MAX_PICTURE_BYTES);
        let mut pixels = vec![0; count.context("an answer without a number of bytes")?];
        self.stream.read_exact(&mut pixels).context("the machine is gone")?;
        Ok((picture, pixels))
    }

    /// Like `screenshot`, as a PNG file.
    pub fn png(&mut self) -> anyhow::Result<Vec<u8>> {
        let (picture, pixels) = self.screenshot()?;
        let mut png = Vec::new();
        screenshot::encode(picture, pixels, &mut png)?;
        Ok(png)
    }
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn queue() -> (Submit, mpsc::Receiver<Request>) {
        let (sender, requests) = mpsc::channel();
        (Arc::new(move |request| sender.send(request).is_ok()), requests)
    }

    #[test]
    fn a_client_gets_answers_and_an_error_keeps_the_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let (submit, requests) = queue();
        let server = Server::new(ListeningSocket::new(&path).unwrap(), submit).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let answers = std::thread::spawn(move || {
            while let Ok(request) = requests.recv() {
                match request.command {
                    Command::Nmi => request.answer(Err(anyhow::anyhow!("no"))),
                    Command::Screenshot => {
                        request.answer_picture(Ok((
                            Picture { width: 512, height: 2 },
                            vec![10; 4096],
                        )));
                    }
                    _ => request.answer(Ok(json!({ "state": "running" }))),
                }
            }
        });
        let mut raw = UnixStream::connect(&path).unwrap();
        raw.write_all(b"{\"command\": \"stauts\"}\n").unwrap();
        let mut line = String::new();
        BufReader::new(&raw).read_line(&mut line).unwrap();
        assert!(line.contains("did you mean `status`"), "{line}");
        let mut client = Client::connect(&path).unwrap();
        assert_eq!(client.ask(&Command::Status).unwrap()["state"], "running");
        assert_eq!(client.ask(&Command::Nmi).unwrap_err().to_string(), "no");
        // The pixels contain line feeds. The line after them is read as a line again.
        let (picture, pixels) = client.screenshot().unwrap();
        assert_eq!((picture, pixels), (Picture { width: 512, height: 2 }, vec![10; 4096]));
        assert_eq!(client.ask(&Command::Status).unwrap()["state"], "running");
        drop((client, raw, server));
        assert!(!path.exists());
        answers.join().unwrap();
    }

    #[test]
    fn shutdown_waits_for_answers_being_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let (submit, requests) = queue();
        let server = Server::new(ListeningSocket::new(&path).unwrap(), submit).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"{\"command\": \"screenshot\"}\n").unwrap();
        let request = requests.recv().expect("a request");
        // More than fits the socket's buffer.
        request.answer_picture(Ok((Picture { width: 1024, height: 2048 }, vec![10; 8 << 20])));
        assert_eq!(*server.unwritten.count(), 1);
        server.unwritten.wait(Duration::from_millis(1));
        assert_eq!(*server.unwritten.count(), 1, "the client has not read it");
        let mut lines = BufReader::new(client);
        lines.read_line(&mut String::new()).unwrap();
        lines.read_exact(&mut vec![0; 8 << 20]).unwrap();
        server.unwritten.wait(Duration::MAX);
        assert_eq!(*server.unwritten.count(), 0);
        // A request without an answer does not delay the end.
        lines.get_mut().write_all(b"{\"command\": \"status\"}\n").unwrap();
        let unanswered = requests.recv().expect("a request");
        drop(server);
        drop(unanswered);
    }

    #[test]
    fn a_client_with_a_timeout_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let short = Duration::from_millis(100);
        let mut client = Client::connect_timeout(&path, short).unwrap();
        let error = format!("{:#}", client.ask(&Command::Status).unwrap_err());
        assert!(error.contains("the machine is gone"), "{error}");
        // The same holds for a full queue of a listener that does not accept.
        let mut waiting = Vec::new();
        let refused = loop {
            match Client::connect_timeout(&path, short) {
                Ok(client) => waiting.push(client),
                Err(error) => break format!("{error:#}"),
            }
        };
        assert!(refused.contains("no machine listens there"), "{refused}");
        drop((waiting, client));
        // An answer that arrives byte by byte is too late, and an endless line is an error.
        let mut client = loop {
            listener.set_nonblocking(true).unwrap();
            if let Err(error) = listener.accept() {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                break Client::connect_timeout(&path, short).unwrap();
            }
        };
        let (mut machine, _) = listener.accept().unwrap();
        let drips = std::thread::spawn(move || {
            while machine.write_all(b" ").is_ok() {
                std::thread::sleep(short / 20);
            }
        });
        client.ask(&Command::Status).unwrap_err();
        drop(client);
        drips.join().unwrap();
        let mut client = Client::connect(&path).unwrap();
        let (mut machine, _) = listener.accept().unwrap();
        let pours = std::thread::spawn(move || while machine.write_all(&[b'x'; 4096]).is_ok() {});
        let error = client.ask(&Command::Status).unwrap_err().to_string();
        assert!(error.contains("longer than 1048576 bytes"), "{error}");
        drop(client);
        pours.join().unwrap();
    }

    #[test]
    fn a_command_line_becomes_its_command() {
        let read = |line: &str| {
            let words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
            Command::read(&words).map_err(|error| format!("{error:#}"))
        };
        let sent = |command: Command| serde_json::to_value(command).unwrap();
        for usage in COMMANDS.iter().filter(|usage| usage.required.is_empty()) {
            assert_eq!(sent(read(usage.name).unwrap()), json!({ "command": usage.name }));
        }
        let size = Some(Size(1 << 30));
        assert_eq!(read("balloon 1G"), Ok(Command::Balloon { size }));
        assert_eq!(
            sent(Command::Balloon { size }),
            json!({"command": "balloon", "size": "1G"}),
            "as the module says"
        );
        let name = "1,2=3".to_owned();
        assert_eq!(read("grow 1,2=3 1G"), Ok(Command::Grow { name, size }));
        for (line, state, mtu) in [
            ("link mtu", None, None),
            ("link mtu up", Some(LinkState::Up), None),
            ("link mtu mtu 1400", None, Some(1400)),
            ("link mtu down mtu 0x578", Some(LinkState::Down), Some(1400)),
            ("link mtu state down 1400", Some(LinkState::Down), Some(1400)),
        ] {
            let name = "mtu".to_owned();
            assert_eq!(read(line), Ok(Command::Link { name, state, mtu }), "{line}");
        }
        let device = "usb-storage,path=a,,b.iso,cdrom".to_owned();
        assert_eq!(read(&format!("attach {device}")), Ok(Command::Attach { device, only: None }));
        let name = "usb-storage".to_owned();
        let path = PathBuf::from("a,b.iso");
        let only = Some(FileId { device: 7, inode: 12 });
        let insert = Command::Insert { name, path, only };
        assert_eq!(read("insert usb-storage a,b.iso only 7:12"), Ok(insert));
        for (line, force) in [("eject cd", None), ("eject cd force", Some(Force::Force))] {
            assert_eq!(read(line), Ok(Command::Eject { name: "cd".into(), force }), "{line}");
        }
        for (line, word) in [
            ("insert cd", "insert NAME PATH"),
            ("eject cd now", "`force`"),
            ("", "help ctl"),
            ("stauts", "status"),
            ("quit now", "now"),
            ("balloon 1G 2G", "balloon [SIZE]"),
            ("balloon 1GB", "1GB"),
            ("grow", "grow NAME [SIZE]"),
            ("grow nvme lots", "lots"),
            ("grow nvme 1G 2G", "2G"),
            ("link", "link NAME"),
            ("link net upp", "did you mean `up`?"),
            ("link net mtu", "mtu needs a value"),
            ("link net mtu 70000", "from 0 to 65535"),
        ] {
            let error = read(line).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
        let typo = r#"{"command": "balloon", "szie": "1G"}"#;
        let error = serde_json::from_str::<Command>(typo).unwrap_err();
        let error = keyvalue::explain(error).to_string();
        assert!(error.contains("szie") && error.contains("size"), "{error}");
    }
}
