//! The control socket: one JSON object a line each way, and its client.
//!
//! `{"command": "status"}` is answered `{"ok": {...}}` or `{"error": "..."}`; an argument is a
//! further key, as in `{"command": "balloon", "size": "1G"}`. The answer to `screenshot` is
//! followed by the bytes of the picture, as many as its `bytes` says. Only who may open the socket
//! file may speak: it is made for the user that runs the machine.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
pub use host::disk::FileId;
use host::stream::Bound;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt};
use screen::web::stage::Button;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::screenshot::{self, Picture};
use host::keyvalue;
use host::size::Size;
use screen::keys::Combination;

/// How a command is written: its name, what follows, and what it does.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// What follows `vmm ctl`, and the value of `"command"`.
    pub name: &'static str,
    /// What follows that; nothing for a command that stands alone.
    pub value: &'static str,
    /// The keys in JSON of what must follow, in this order.
    pub needed: &'static [&'static str],
    /// And of what may.
    pub free: &'static [&'static str],
    /// What it does.
    pub help: &'static str,
}

impl Usage {
    /// As it is typed: `balloon [SIZE]`.
    pub fn call(&self) -> String {
        format!("{} {}", self.name, self.value).trim_end().to_owned()
    }
}

macro_rules! commands {
    ($(
        $(#[doc = $help:literal])+
        $name:literal $value:literal
        $kind:ident $({ $($needed:ident: $of:ty),*; $($free:ident: $type:ty),* })?,
    )*) => {
        /// What can be asked of a running machine.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(tag = "command", deny_unknown_fields)]
        pub enum Command {
            $(
                $(#[doc = $help])+
                #[serde(rename = $name)]
                $kind $({
                    $(
                        /// Must be said.
                        $needed: $of,
                    )*
                    $(
                        /// If it is said this time.
                        #[serde(default, skip_serializing_if = "Option::is_none")]
                        $free: Option<$type>,
                    )*
                })?,
            )*
        }

        /// The commands, in the order of `--help`.
        pub const COMMANDS: &[Usage] = &[$(Usage {
            name: $name,
            value: $value,
            needed: &[$($(stringify!($needed)),*)?],
            free: &[$($(stringify!($free)),*)?],
            help: concat!($($help),+),
        }),*];
    };
}

commands! {
    /// State, size and number of resets; what the display shows and who looks at it; disks,
    /// networks, USB devices and drives by their names; the keyboard's lights.
    "status" "" Status,
    /// Stop the processors.
    "pause" "" Pause,
    /// Let them run on.
    "resume" "" Resume,
    /// Reset the machine, as its button does.
    "reset" "" Reset,
    /// Press the power button: the guest switches itself off.
    "powerdown" "" PowerButton,
    /// Send a non-maskable interrupt: guests write a crash dump.
    "nmi" "" Nmi,
    /// The registers of all processors.
    "registers" "" Registers,
    /// The guest's memory: what it shall have, what it has, and what it says of it. With a size,
    /// like 1G, that is what it shall have from now on.
    "balloon" "[SIZE]" Balloon {; size: Size },
    /// Make a disk longer and tell its guest: the one with this name (see `status`) or serial
    /// number. Without a size it is as long as its file or device is now.
    "grow" "NAME [SIZE]" Grow { name: String; size: Size },
    /// Pull a network cable or plug it in, or give it another MTU, which a guest sees when it looks
    /// again, at the latest after a reset. With nothing said: how it is.
    "link" "NAME [up|down] [mtu N]" Link { name: String; state: Plug, mtu: u16 },
    /// Write what the display shows to a file. In JSON there is no file: lines of pixels follow the
    /// answer, each pixel 4 bytes: blue, green, red and one that means nothing.
    "screenshot" "FILE.png" Screenshot,
    /// Press keys together and let them go: by their places on a keyboard with English letters, as
    /// in ctrl-alt-delete, or by their scan codes, as in 0xe05b (the left logo key).
    "key" "KEY[-KEY...]" Key { keys: Combination; },
    /// Type a text on the machine's keyboard (see `--keyboard`), with Enter for line feeds;
    /// answered when the guest has fetched all of it. Nothing is typed if that keyboard lacks one
    /// of its characters. UEFI firmware drops keys that it fetched and its shell did not read in
    /// time: give it a few words at a time.
    "type" "TEXT" Type { text: String; },
    /// Move the pointer to a place of the screen: 0 is left and above, 32767 right and below. Bits
    /// of the buttons that are down: 1 left, 2 right, 4 middle; notches of the wheel, away from a
    /// person.
    "pointer" "X Y [buttons N] [wheel N]" Pointer { x: u16, y: u16; buttons: u8, wheel: i32 },
    /// Plug in a USB device: a kind and its keys, as `--device` takes them, like
    /// usb-storage,path=win11.iso. The answer has its name. Paths are as the machine sees them:
    /// whole, or from the folder that it was started in. With `only`, nothing but the file with
    /// these numbers (`stat -c %d:%i FILE`) is opened.
    "attach" "KIND[,KEY=VALUE...] [only DEV:INODE]" Attach { device: String; only: FileId },
    /// Pull out the USB device with this name (see `status`), whatever the guest does with it.
    "detach" "NAME" Detach { name: String; },
    /// Take the medium out of the drive with this name (see `status`). A guest that holds it is
    /// asked to let go; `force` takes it all the same.
    "eject" "NAME [force]" Eject { name: String; force: Force },
    /// Give the guest another VM Generation ID, random unless it is given, and notify it. The guest
    /// then acts as one that was cloned or restored: it takes new random numbers, and a domain
    /// controller gives up the identifiers that its copy could give out, too.
    "vmgenid" "[UUID]" Vmgenid {; id: String },
    /// Put another medium into a drive that is empty; `only` as for `attach`.
    "insert" "NAME PATH [only DEV:INODE]" Insert { name: String, path: PathBuf; only: FileId },
    /// Switch off at once.
    "quit" "" Quit,
}

/// Whether the guest is not asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Force {
    /// It is not.
    Force,
}

/// Whether a cable is plugged in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Plug {
    /// It is.
    Up,
    /// It is not.
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
    /// Reads a command as it is typed: its name, and its arguments.
    ///
    /// # Errors
    ///
    /// When there is no such command, or it does not take what follows.
    pub fn read(words: &[String]) -> anyhow::Result<Self> {
        let Some((name, arguments)) = words.split_first() else {
            bail!("ctl needs a command: `vmm help ctl` lists them");
        };
        let Some(usage) = COMMANDS.iter().find(|usage| usage.name == name) else {
            let names: Vec<_> = COMMANDS.iter().map(|usage| usage.name).collect();
            let near = keyvalue::nearest(name, &names).unwrap_or("status");
            bail!("there is no command {name}: did you mean {near}?");
        };
        let keys = [usage.needed, usage.free].concat();
        let mut arguments = arguments.iter();
        let mut text = name.clone();
        let mut next = 0;
        while let Some(argument) = arguments.next() {
            // What may follow can have its key before it: `mtu 1400`.
            let named = usage.free.iter().position(|key| key == argument);
            let (at, argument) = match named.filter(|_| next >= usage.needed.len()) {
                None => (next, argument),
                Some(at) => match (usage.needed.len() + at, arguments.next()) {
                    (at, Some(value)) => (at, value),
                    // A word that says all by itself: `force`.
                    (at, None) if at == next => (at, argument),
                    _ => bail!("{argument} needs a value: `{}`", usage.call()),
                },
            };
            let Some(key) = keys.get(at) else {
                bail!("{argument} is too much: write `{}`", usage.call());
            };
            text.push_str(&format!(",{key}={}", keyvalue::escaped(argument)));
            next = at + 1;
        }
        ensure!(
            next >= usage.needed.len(),
            "{name} needs to know which one: write `{}`",
            usage.call()
        );
        keyvalue::parse(&text, Some("command"))
    }
}

/// A command, and the way back.
pub struct Request {
    /// What is asked.
    pub command: Command,
    back: Sender<Answer>,
    unwritten: Arc<Unwritten>,
}

/// What is said: a line, and what may follow it. It counts as unwritten until it is dropped.
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

/// The number of answers that were given and did not reach their clients yet.
#[derive(Default)]
struct Unwritten {
    count: Mutex<usize>,
    fewer: Condvar,
}

impl Unwritten {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.count.lock().expect("no client's thread panicked")
    }

    /// Waits until all are written, or for so long.
    fn wait(&self, most: Duration) {
        let left = self.fewer.wait_timeout_while(self.count(), most, |count| *count > 0);
        drop(left.expect("no client's thread panicked"));
    }
}

/// Passes a request on to the machine: whether there is one.
pub type Submit = Arc<dyn Fn(Request) -> bool + Send + Sync>;

impl Request {
    /// A command of somebody who does not wait for the answer.
    pub fn unanswered(command: Command) -> Self {
        Self { command, back: mpsc::channel().0, unwritten: Arc::default() }
    }

    /// Sends a command from within this process, and waits for its answer.
    ///
    /// # Errors
    ///
    /// When the machine refuses, or does not answer in time.
    pub fn ask(command: Command, send: impl FnOnce(Self) -> bool) -> anyhow::Result<Value> {
        let (back, answers) = mpsc::channel();
        let request = Self { command, back, unwritten: Arc::default() };
        ensure!(send(request), "the machine is off");
        let mut answer = answers.recv_timeout(OWN_ANSWER).context("the machine does not answer")?;
        match answer.line.take() {
            Value::Object(mut line) if line.contains_key("ok") => {
                Ok(line.remove("ok").unwrap_or_default())
            }
            line => bail!("{}", line["error"].as_str().unwrap_or("the machine refused")),
        }
    }

    /// Answers it.
    pub fn answer(self, result: anyhow::Result<Value>) {
        let line = match result {
            Ok(value) => json!({ "ok": value }),
            Err(error) => json!({ "error": format!("{error:#}") }),
        };
        // A client that left does not want it any more.
        self.back.send(Answer::new(line, Vec::new(), &self.unwritten)).ok();
    }

    /// Answers it with a picture.
    pub fn show(self, picture: anyhow::Result<(Picture, Vec<u8>)>) {
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

/// Lines longer than this are no command of ours.
const LONGEST: u64 = 64 << 10;
/// And answers longer than this none of ours, but for what follows their line.
pub const LONGEST_ANSWER: u64 = 1 << 20;
/// Bytes of the largest picture: no display has more memory.
const LARGEST: usize = 256 << 20;
/// Commands of this process are answered within.
const OWN_ANSWER: Duration = Duration::from_secs(5);
/// What was answered before the end of the machine is written within.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
/// More clients at once wait in the listener's queue.
const MOST: usize = 16;

/// How long it takes to see that one of them left.
const FULL_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The listening side; its file goes with it.
pub struct Server {
    /// Closing it ends the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    unwritten: Arc<Unwritten>,
}

impl Server {
    /// Accepts clients; `submit` gets their requests.
    ///
    /// # Errors
    ///
    /// When the host has no thread left.
    pub fn new(bound: Bound, submit: Submit) -> anyhow::Result<Self> {
        // The thread ends when the other end of this pipe is closed.
        let (ended, stop) = rustix::pipe::pipe().context("--control")?;
        let unwritten = Arc::<Unwritten>::default();
        let answers = unwritten.clone();
        let body = move || {
            let clients = Arc::new(());
            loop {
                let full = Arc::strong_count(&clients) > MOST;
                let mut fds = vec![PollFd::new(&ended, PollFlags::IN)];
                if !full {
                    fds.push(PollFd::new(bound.listener(), PollFlags::IN));
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
                let Ok((client, _)) = bound.listener().accept() else {
                    // Out of file descriptors, for a while: no reason to spin.
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
        // The end of the process would cut them off.
        self.unwritten.wait(LAST_ANSWERS);
    }
}

/// Talks to one client until it leaves.
fn serve(
    mut client: &UnixStream,
    submit: &Submit,
    unwritten: &Arc<Unwritten>,
) -> anyhow::Result<()> {
    client.set_nonblocking(false)?;
    client.set_read_timeout(Some(Duration::from_secs(60)))?;
    client.set_write_timeout(Some(Duration::from_secs(10)))?;
    let mut lines = BufReader::new(client);
    loop {
        let mut line = String::new();
        if (&mut lines).take(LONGEST).read_line(&mut line)? == 0 {
            return Ok(());
        }
        let answer = match serde_json::from_str(&line) {
            Ok(command) => {
                let (back, coming) = mpsc::channel();
                let unwritten = unwritten.clone();
                let taken = submit(Request { command, back, unwritten });
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

/// A client of the control socket.
pub struct Client {
    stream: BufReader<Stream>,
}

/// The client's end, which waits no longer than until the time that was set.
struct Stream {
    stream: UnixStream,
    /// All is said within, after each question.
    within: Option<Duration>,
    end: Option<Instant>,
}

impl Stream {
    /// What is left of the time.
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

/// What an answer's line says.
///
/// # Errors
///
/// When it is no, or no answer.
pub fn answer(line: &[u8]) -> anyhow::Result<Value> {
    let whole = line.len() as u64 == LONGEST_ANSWER && !line.ends_with(b"\n");
    ensure!(!whole, "an answer longer than {LONGEST_ANSWER} bytes: that is no machine of ours");
    let mut answer: Value = serde_json::from_slice(line).context("the machine is gone")?;
    match answer.get("error").and_then(Value::as_str) {
        Some(error) => bail!("{error}"),
        None => Ok(answer["ok"].take()),
    }
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    ///
    /// When nobody listens there.
    pub fn connect(path: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| nobody(path))?;
        Ok(Self { stream: BufReader::new(Stream { stream, within: None, end: None }) })
    }

    /// Connects; neither that nor any answer is waited for longer than this.
    ///
    /// # Errors
    ///
    /// When nobody listens there, or answers.
    pub fn connect_within(path: &Path, time: Duration) -> anyhow::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // A listener that sleeps takes a few, and the next one would wait for it.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(time))?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?).with_context(|| nobody(path))?;
        let stream = UnixStream::from(socket);
        Ok(Self { stream: BufReader::new(Stream { stream, within: Some(time), end: None }) })
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    ///
    /// When the machine says no, or is gone.
    pub fn ask(&mut self, command: &Command) -> anyhow::Result<Value> {
        let question = format!("{}\n", serde_json::to_string(command)?);
        let stream = self.stream.get_mut();
        stream.end = stream.within.map(|time| Instant::now() + time);
        stream.write_all(question.as_bytes()).context("the machine is gone")?;
        let mut line = Vec::new();
        let mut stream = (&mut self.stream).take(LONGEST_ANSWER);
        stream.read_until(b'\n', &mut line).context("the machine is gone")?;
        answer(&line)
    }
}

fn nobody(path: &Path) -> String {
    format!("{}: no machine listens there (start it with --control)", path.display())
}

impl Client {
    /// Asks for what the display shows: its size, and its pixels.
    ///
    /// # Errors
    ///
    /// When there is no display, or it is off, or the machine is gone.
    pub fn screenshot(&mut self) -> anyhow::Result<(Picture, Vec<u8>)> {
        let answer = self.ask(&Command::Screenshot)?;
        let picture = Picture::deserialize(&answer).context("an answer without a size")?;
        let count = answer["bytes"].as_u64().and_then(|count| usize::try_from(count).ok());
        let count = count.filter(|count| *count <= LARGEST);
        let mut pixels = vec![0; count.context("an answer without a number of bytes")?];
        self.stream.read_exact(&mut pixels).context("the machine is gone")?;
        Ok((picture, pixels))
    }

    /// The same in the format of PNG.
    ///
    /// # Errors
    ///
    /// As `screenshot`.
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
    fn a_client_is_answered_and_a_mistake_does_not_end_the_talk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let (submit, requests) = queue();
        let server = Server::new(Bound::new(&path).unwrap(), submit).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let answers = std::thread::spawn(move || {
            while let Ok(request) = requests.recv() {
                match request.command {
                    Command::Nmi => request.answer(Err(anyhow::anyhow!("no"))),
                    Command::Screenshot => {
                        request.show(Ok((Picture { width: 512, height: 2 }, vec![10; 4096])));
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
        // Its bytes are no lines, and what comes after them is.
        let (picture, pixels) = client.screenshot().unwrap();
        assert_eq!((picture, pixels), (Picture { width: 512, height: 2 }, vec![10; 4096]));
        assert_eq!(client.ask(&Command::Status).unwrap()["state"], "running");
        drop((client, raw, server));
        assert!(!path.exists());
        answers.join().unwrap();
    }

    #[test]
    fn the_end_waits_for_answers_that_are_being_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let (submit, requests) = queue();
        let server = Server::new(Bound::new(&path).unwrap(), submit).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"{\"command\": \"screenshot\"}\n").unwrap();
        let request = requests.recv().expect("a request");
        // More than a socket keeps.
        request.show(Ok((Picture { width: 1024, height: 2048 }, vec![10; 8 << 20])));
        assert_eq!(*server.unwritten.count(), 1);
        server.unwritten.wait(Duration::from_millis(1));
        assert_eq!(*server.unwritten.count(), 1, "nobody has read it");
        let mut lines = BufReader::new(client);
        lines.read_line(&mut String::new()).unwrap();
        lines.read_exact(&mut vec![0; 8 << 20]).unwrap();
        server.unwritten.wait(Duration::MAX);
        assert_eq!(*server.unwritten.count(), 0);
        // Nor does it wait for a question that nobody answered.
        lines.get_mut().write_all(b"{\"command\": \"status\"}\n").unwrap();
        let unanswered = requests.recv().expect("a request");
        drop(server);
        drop(unanswered);
    }

    #[test]
    fn who_has_no_time_waits_for_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let short = Duration::from_millis(100);
        let mut client = Client::connect_within(&path, short).unwrap();
        let error = format!("{:#}", client.ask(&Command::Status).unwrap_err());
        assert!(error.contains("the machine is gone"), "{error}");
        // Nor for a place in the queue of a listener that sleeps.
        let mut waiting = Vec::new();
        let refused = loop {
            match Client::connect_within(&path, short) {
                Ok(client) => waiting.push(client),
                Err(error) => break format!("{error:#}"),
            }
        };
        assert!(refused.contains("no machine listens there"), "{refused}");
        drop((waiting, client));
        // A letter at a time is no answer in time, and an endless line none at all.
        let mut client = loop {
            listener.set_nonblocking(true).unwrap();
            if let Err(error) = listener.accept() {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                break Client::connect_within(&path, short).unwrap();
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
    fn a_command_is_typed_as_it_is_sent() {
        let read = |line: &str| {
            let words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
            Command::read(&words).map_err(|error| format!("{error:#}"))
        };
        let sent = |command: Command| serde_json::to_value(command).unwrap();
        for usage in COMMANDS.iter().filter(|usage| usage.needed.is_empty()) {
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
            ("link mtu up", Some(Plug::Up), None),
            ("link mtu mtu 1400", None, Some(1400)),
            ("link mtu down mtu 0x578", Some(Plug::Down), Some(1400)),
            ("link mtu state down 1400", Some(Plug::Down), Some(1400)),
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
