//! Keyboard and mouse actions at a client, and their effects on the probe's page.

use anyhow::{Context, Result};
use transom_tests::print::{PAGES, Picture, Print, find};
use vmm::control::Command;

use crate::eye::{settle, stir};
use crate::machine::{Machine, until};
use crate::picture::Near;

/// A client that shows the machine and sends keys and pointer.
pub(crate) trait Client {
    /// The picture that it shows now.
    fn picture(&mut self, machine: &Machine) -> Result<Picture>;
    /// Sends a key or the pointer.
    fn send(&mut self, what: Hand) -> Result<()>;
    /// Requests this size of the guest's display.
    fn ask_for(&mut self, width: u16, height: u16) -> Result<()>;
}

/// An action that a client sends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Hand {
    /// A key, by its X symbol: pressed and released.
    Key(u32),
    /// The pointer: x, y, and the button mask of the protocol.
    Pointer(u16, u16, u8),
}

/// The X symbols of x, y, 1 and F5.
const WORD: [u32; 4] = [0x78, 0x79, 0x31, 0xffc2];

/// Types and points at a client, and checks the effects on the page. The mouse must not have moved
/// before.
fn hands(client: &mut dyn Client, machine: &mut Machine) -> Result<()> {
    says(machine, "Keys", "type something")?;
    WORD.iter().try_for_each(|symbol| client.send(Hand::Key(*symbol)))?;
    says(machine, "Text", "xy1")?;
    says(machine, "Keys", "X Y 1 F5")?;
    // The mouse begins in the corner. Each of its packets moves it at most 255 pixels.
    client.send(Hand::Pointer(400, 300, 0))?;
    says(machine, "Mouse", "at 400, 300 ")?;
    client.send(Hand::Pointer(600, 90, 1))?;
    says(machine, "Mouse", "at 600, 90 ")?;
    client.send(Hand::Pointer(600, 90, 0))
}

/// Checks that a client shows the page, that its keys and pointer arrive, that it shows the changes
/// and, if `wish` is given, that the guest takes the requested size. The machine must show its page
/// and must not have had a client before.
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
    // The guest takes the size when it starts again.
    until("a display of the requested size", || {
        machine.reset()?;
        let status = machine.ask(&Command::Status)?;
        Ok((status["display"]["mode"] == format!("{width}x{height}")).then_some(()))
    })?;
    settle(machine, near, |machine| client.picture(machine)).map(drop)
}

/// Rows of the page's last panel, which shows the input.
const ROWS: usize = 4;

/// Waits until the page shows `text` after `label`.
pub(crate) fn says(machine: &mut Machine, label: &str, text: &str) -> Result<()> {
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ") + " ";
    until(&format!("{label} {text}"), || {
        let picture = machine.screenshot()?;
        let height = picture.pixels.len() / 4 / picture.width;
        let page = PAGES.iter().find(|it| it.0 == (picture.width, height));
        let (_, _, body) = page.with_context(|| format!("{} x {height}", picture.width))?;
        // The margin at the bottom is as wide as the left one.
        let rows = (height - body.y - body.x) / body.line;
        let panel = Print { y: body.y + (rows - ROWS) * body.line, ..*body };
        let lines = picture.all(panel);
        Ok(find(&lines, label).filter(|line| words(line).contains(text)).map(|_| ()))
    })
}
