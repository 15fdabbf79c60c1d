//! A client in a process of its own: it answers each request line with a line, and saves the
//! picture that it shows.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use transom_tests::print::Picture;
use transom_tests::program::PATIENCE;
use vmm::control;

use crate::hands::{Client, Hand};
use crate::machine::{Machine, until};
use crate::picture::{self, Near};

/// The answer for an invisible pointer: 1 by 1 pixels, none of them visible.
pub(crate) const NO_POINTER: &str = "cursor 1 1 0";

/// A connected program; dropping it ends the program.
pub(crate) struct Eye {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
    what: String,
}

impl Eye {
    /// Starts the program, and waits until it is connected.
    pub(crate) fn open(command: &mut Command) -> Result<Self> {
        let what = format!("{command:?}");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| what.clone())?;
        let orders = child.stdin.take().context("a pipe")?;
        let answers = BufReader::new(child.stdout.take().context("a pipe")?);
        let (tell, hear) = channel();
        thread::spawn(move || {
            answers.lines().map_while(Result::ok).try_for_each(|line| tell.send(line))
        });
        let mut eye = Self { child, orders, answers: hear, what };
        let first = eye.hear()?;
        ensure!(first == "connected", "{}: {first}", eye.what);
        Ok(eye)
    }

    /// Starts a program that must be refused; returns its output.
    pub(crate) fn refused(command: &mut Command) -> Result<String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
        // Its input stays open, so that it ends only because of the refusal.
        let orders = child.stdin.take();
        let output = child.wait_with_output()?;
        drop(orders);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(!said.contains("connected"), "{command:?} was let in");
        Ok(said + &String::from_utf8_lossy(&output.stderr))
    }

    fn hear(&mut self) -> Result<String> {
        if let Ok(answer) = self.answers.recv_timeout(PATIENCE) {
            return Ok(answer);
        }
        self.child.kill().ok();
        let mut said = String::new();
        if let Some(mut errors) = self.child.stderr.take() {
            errors.read_to_string(&mut said).ok();
        }
        bail!("{} does not answer; its errors: {said}", self.what);
    }

    /// Sends a request; returns the answer.
    pub(crate) fn ask(&mut self, request: &str) -> Result<String> {
        writeln!(self.orders, "{request}").and_then(|()| self.orders.flush()).ok();
        self.hear().with_context(|| request.to_owned())
    }

    /// Waits until it shows the machine's picture.
    pub(crate) fn settle(&mut self, machine: &mut Machine, near: Near) -> Result<Picture> {
        settle(machine, near, |machine| self.picture(machine)).with_context(|| self.what.clone())
    }
}

impl Client for Eye {
    fn picture(&mut self, machine: &Machine) -> Result<Picture> {
        let path = machine.path("seen");
        let said = self.ask(&format!("picture {}", path.display()))?;
        let width = said.split(' ').nth(1).and_then(|it| it.parse().ok());
        picture::plain(&path, width.with_context(|| said.clone())?)
    }

    fn send(&mut self, what: Hand) -> Result<()> {
        match what {
            Hand::Key(symbol) => {
                self.ask(&format!("key {symbol} 1"))?;
                self.ask(&format!("key {symbol} 0"))
            }
            Hand::Pointer(x, y, buttons) => self.ask(&format!("pointer {x} {y} {buttons}")),
        }
        .map(drop)
    }

    fn ask_for(&mut self, width: u16, height: u16) -> Result<()> {
        self.ask(&format!("size {width} {height}")).map(drop)
    }
}

impl Drop for Eye {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Waits until a client shows the machine's picture.
pub(crate) fn settle(
    machine: &mut Machine,
    near: Near,
    mut look: impl FnMut(&mut Machine) -> Result<Picture>,
) -> Result<Picture> {
    let mut last = None;
    let found = until("the picture", || {
        let seen = look(machine)?;
        let wanted = machine.screenshot()?;
        match near.check(&seen, &wanted) {
            Ok(()) => return Ok(Some(seen)),
            Err(error) => last = Some(error),
        }
        Ok(None)
    });
    found.with_context(|| last.map_or_else(|| "it shows no picture".into(), |it| it.to_string()))
}

/// Types a text, so that the guest draws small parts of its page for a while.
pub(crate) fn stir(machine: &mut Machine) -> Result<()> {
    let text = "The quick brown fox 12345".into();
    machine.ask(&control::Command::Type { text }).map(|_| ())
}

/// Whether a program exists and succeeds with these arguments.
pub(crate) fn is_here(program: impl AsRef<Path>, words: &[&str]) -> bool {
    let mut command = Command::new(program.as_ref());
    command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|it| it.success())
}
