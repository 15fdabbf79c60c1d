//! What a person does at a client, and how it is found on the probe's page.

use anyhow::{Context, Result};
use transom_tests::print::{PAGES, Picture, Print, find};
use vmm::control::Command;

use crate::eye::{settle, stir};
use crate::machine::{Machine, until};
use crate::picture::Near;

/// A client that shows the machine, and has hands.
pub(crate) trait Client {
    /// What it shows now.
    fn picture(&mut self, machine: &Machine) -> Result<Picture>;
    /// It does that.
    fn send(&mut self, what: Hand) -> Result<()>;
    /// It wishes the guest's display to be as large.
    fn ask_for(&mut self, width: u16, height: u16) -> Result<()>;
}

/// Something that a client shall send.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Hand {
    /// A key, by its symbol, pressed and let go.
    Key(u32),
    /// The pointer: its place, and the buttons as the protocol numbers them.
    Pointer(u16, u16, u8),
}

/// The symbols of X, Y, 1 and F5.
const WORD: [u32; 4] = [0x78, 0x79, 0x31, 0xffc2];

/// Has a client type and point, and reads from the page that it arrived. Nobody has pointed before.
fn hands(client: &mut dyn Client, machine: &mut Machine) -> Result<()> {
    says(machine, "Keys", "type something")?;
    WORD.iter().try_for_each(|symbol| client.send(Hand::Key(*symbol)))?;
    says(machine, "Text", "xy1")?;
    says(machine, "Keys", "X Y 1 F5")?;
    // The mouse begins in the corner. Its packets take it no further than 255 pixels at once.
    client.send(Hand::Pointer(400, 300, 0))?;
    says(machine, "Mouse", "at 400, 300 ")?;
    client.send(Hand::Pointer(600, 90, 1))?;
    says(machine, "Mouse", "at 600, 90 ")?;
    client.send(Hand::Pointer(600, 90, 0))
}

/// A client shows what there is, its hands arrive, it shows what is drawn then, and what there is
/// when the guest took the size that it asked for, if it can. The machine shows its page, and to
/// nobody before.
pub(crate) fn follows(
    client: &mut dyn Client,
    machine: &mut Machine,
    near: Near,
    wish: Option<(u16, u16)>,
) -> Result<()> {
    settle(machine, near, |machine| client.picture(machine))?;
    hands(client, machine)?;
    stir(machine)?;
    settle(machine, near, |machine| client.picture(machine))?;
    let Some((width, height)) = wish else { return Ok(()) };
    client.ask_for(width, height)?;
    // As it does when it starts again.
    until("the wish arrives", || {
        machine.reset()?;
        let status = machine.ask(&Command::Status)?;
        Ok((status["display"]["mode"] == format!("{width}x{height}")).then_some(()))
    })?;
    settle(machine, near, |machine| client.picture(machine)).map(drop)
}

/// Rows of the page's last panel, which shows them.
const ROWS: usize = 4;

/// Waits until the page says that after a label.
pub(crate) fn says(machine: &mut Machine, label: &str, text: &str) -> Result<()> {
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ") + " ";
    until(&format!("{label} {text}"), || {
        let picture = machine.screenshot()?;
        let height = picture.pixels.len() / 4 / picture.width;
        let page = PAGES.iter().find(|it| it.0 == (picture.width, height));
        let (_, _, body) = page.with_context(|| format!("{} x {height}", picture.width))?;
        // As wide as the margin at the left is the one below.
        let rows = (height - body.y - body.x) / body.line;
        let panel = Print { y: body.y + (rows - ROWS) * body.line, ..*body };
        let lines = picture.all(panel);
        Ok(find(&lines, label).filter(|line| words(line).contains(text)).map(|_| ()))
    })
}
