//! The guest's end of SPICE's agent protocol, as `spice-vdagentd` behaves.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::clipboard::{Hub, Port};

/// Capabilities of Linux' agent, and those of Windows'.
pub const LINUX: u32 = 1 << 5 | 1 << 6 | 1 << 8 | 1 << 10;
pub const WINDOWS: u32 = 1 << 5 | 1 << 9 | 1 << 10;

pub struct GuestAgent {
    port: Port,
    capabilities: u32,
    /// The text that a program in the guest copied.
    own: Vec<u8>,
    /// Texts that the host sent.
    pub texts: VecDeque<String>,
    /// The types of all messages of the host.
    pub kinds: Vec<u32>,
    received: Vec<u8>,
}

impl GuestAgent {
    /// Opens the port of a hub, and announces what the agent can do.
    pub fn start(hub: &Arc<Hub>, capabilities: u32) -> Self {
        let port = hub.port().expect("the only port");
        port.set_open(true);
        let (own, received) = (Vec::new(), Vec::new());
        let (texts, kinds) = (VecDeque::new(), Vec::new());
        let mut agent = Self { port, capabilities, own, texts, kinds, received };
        agent.serve();
        agent
    }

    /// A program in the guest copies a text.
    pub fn copy(&mut self, text: &[u8]) {
        self.own = text.to_vec();
        self.send(7, &1_u32.to_le_bytes());
        self.serve();
    }

    /// Sends these bytes, closes the port, and opens it again, as a new agent.
    pub fn restart_after(&mut self, bytes: &[u8]) {
        self.port.write(bytes);
        self.port.set_open(false);
        self.received.clear();
        self.port.set_open(true);
        self.serve();
    }

    /// Handles all messages of the host.
    pub fn serve(&mut self) {
        loop {
            let mut buffer = [0; 700];
            let count = self.port.read(&mut buffer);
            if count == 0 {
                return;
            }
            self.received.extend(&buffer[..count]);
            while let Some((kind, body)) = self.next() {
                self.kinds.push(kind);
                self.handle(kind, &body);
            }
        }
    }

    /// The next whole message. Its chunks follow each other.
    fn next(&mut self) -> Option<(u32, Vec<u8>)> {
        let (mut message, mut at) = (Vec::new(), 0);
        loop {
            let size = number(self.received.get(at + 4..)?)? as usize;
            message.extend(self.received.get(at + 8..at + 8 + size)?);
            at += 8 + size;
            let body = number(message.get(16..)?)? as usize;
            if message.len() == 20 + body {
                break;
            }
        }
        self.received.drain(..at);
        let kind = number(&message[4..])?;
        Some((kind, message.split_off(20 + self.selection(kind).len())))
    }

    /// The number of the clipboard of Ctrl-C, if messages of this type have one.
    fn selection(&self, kind: u32) -> &'static [u8] {
        let selects = matches!(kind, 4 | 7..=9) && self.capabilities & 1 << 6 != 0;
        if selects { &[0; 4] } else { &[] }
    }

    fn handle(&mut self, kind: u32, body: &[u8]) {
        match kind {
            4 => self.texts.push_back(String::from_utf8(body[4..].to_vec()).expect("UTF-8")),
            6 if body[0] == 1 => {
                let own = [0_u32.to_le_bytes(), self.capabilities.to_le_bytes()].concat();
                self.send(6, &own);
            }
            7 => self.send(8, &1_u32.to_le_bytes()),
            8 => {
                let text = [&1_u32.to_le_bytes()[..], &self.own].concat();
                self.send(4, &text);
            }
            _ => {}
        }
    }

    /// Sends a message to the host, which is about the clipboard of Ctrl-C.
    pub fn send(&mut self, kind: u32, body: &[u8]) {
        self.send_as_is(kind, &[self.selection(kind), body].concat());
    }

    pub fn send_as_is(&mut self, kind: u32, body: &[u8]) {
        let words = [1, kind, 0, 0, u32::try_from(body.len()).expect("a short one")];
        let message = [&words.map(u32::to_le_bytes).concat(), body].concat();
        for part in message.chunks(2048) {
            let size = u32::try_from(part.len()).expect("a short one");
            self.port.write(&[1_u32.to_le_bytes(), size.to_le_bytes()].concat());
            self.port.write(part);
        }
    }
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|it| u32::from_le_bytes(*it))
}
