//! A client of QEMU's machine protocol.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

use crate::http::connect;

const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// QEMU's machine protocol.
pub struct Monitor(BufReader<UnixStream>);

impl Monitor {
    pub fn connect(path: &Path) -> Result<Self> {
        let mut monitor = Self(BufReader::new(connect(path)?));
        monitor.read()?;
        monitor.ask("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        ensure!(self.0.read_line(&mut line)? > 0, "QEMU has ended");
        Ok(serde_json::from_str(&line)?)
    }

    /// Skips events.
    pub fn ask(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let question = json!({ "execute": command, "arguments": arguments });
        writeln!(self.0.get_mut(), "{question}")?;
        loop {
            let mut answer = self.read()?;
            if let Some(error) = answer.get("error") {
                bail!("{command}: {error}");
            }
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }

    /// Sends the machine to this address, and returns what QEMU tells of it at the end.
    pub fn migrate(&mut self, to: &str) -> Result<Value> {
        self.ask("migrate", &json!({ "uri": to }))?;
        loop {
            let answer = self.ask("query-migrate", &json!({}))?;
            match answer["status"].as_str() {
                Some("completed") => return Ok(answer),
                Some("failed") => bail!("{answer}"),
                _ => sleep(POLL_INTERVAL),
            }
        }
    }
}
