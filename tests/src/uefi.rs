//! UEFI firmware as a guest, used through its shell.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;

use crate::guest::{Guest, Running};

const PROMPT: &str = "Shell> ";
/// The shell counts down before its first prompt, and shows how to skip that.
const COUNTDOWN: &str = "to skip startup.nsh";

/// Copies the package's variable store into a folder, for one machine.
pub fn store(of: &Path, folder: &Path) -> anyhow::Result<PathBuf> {
    let copy = folder.join("vars.fd");
    let bytes = fs::read(of).with_context(|| of.display().to_string())?;
    fs::write(&copy, bytes).with_context(|| copy.display().to_string())?;
    Ok(copy)
}

/// The firmware's shell on the serial port.
pub struct Shell {
    pub running: Running,
}

impl Shell {
    /// Starts a guest and waits for the prompt.
    pub fn start(guest: &Guest, within: Duration) -> anyhow::Result<Self> {
        let mut shell = Self { running: guest.start()? };
        shell.prompt(within)?;
        Ok(shell)
    }

    /// Waits for the prompt, after a start or a reset.
    pub fn prompt(&mut self, within: Duration) -> anyhow::Result<()> {
        if self.running.expect_any(&[PROMPT, COUNTDOWN], within)?.0 == 1 {
            self.running.console().type_keys("\x1b")?;
            self.running.expect(PROMPT, within)?;
        }
        Ok(())
    }

    /// Runs a command, waits for the next prompt, and returns the output.
    pub fn run(&mut self, command: &str, within: Duration) -> anyhow::Result<String> {
        self.running.send(command)?;
        let said = self.running.expect(PROMPT, within)?;
        // The shell echoes the command first.
        Ok(said.split_once('\n').map_or(String::new(), |(_, answer)| answer.to_owned()))
    }
}
