//! Events of the machine. The machine does not report changes, so its status is read once a second
//! while a client listens, and after each command that changes it. Without a client nothing runs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::broadcast::{Receiver, Sender};
use tokio::sync::{Mutex, Notify};
use tokio::time::{sleep, timeout};

use super::protocol;
use crate::pod::machine_client::Status;

const INTERVAL: Duration = Duration::from_secs(1);
/// Events that a client has not received yet. A client that falls behind is disconnected.
const MAX_PENDING: usize = 64;
/// How long the pod's end waits for clients that receive the last event.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// The part of the machine's status that events report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    runs: bool,
    guest_resets: u64,
    commanded_resets: u64,
}

impl State {
    fn of(status: &Value) -> Self {
        let count = |name: &str| status[name].as_u64().unwrap_or_default();
        let commanded_resets = count("commanded_resets");
        let guest_resets = count("resets").saturating_sub(commanded_resets);
        Self { runs: runs(status), guest_resets, commanded_resets }
    }
}

/// An event for all clients, and whether it is the last one.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) line: Arc<str>,
    pub(super) last: bool,
}

pub(super) struct Events {
    status: Status,
    sender: Sender<Event>,
    seen: Mutex<Option<State>>,
    subscribed: Notify,
}

impl Events {
    pub(super) fn new(control: PathBuf) -> Self {
        Self {
            status: Status::new(control),
            sender: Sender::new(MAX_PENDING),
            seen: Mutex::default(),
            subscribed: Notify::new(),
        }
    }

    /// The machine's status; `None` before its start and after its end.
    pub(super) async fn status(&self) -> Option<Value> {
        self.status.get().await
    }

    pub(super) async fn subscribe(&self) -> Receiver<Event> {
        let receiver = self.sender.subscribe();
        self.observe().await;
        self.subscribed.notify_one();
        receiver
    }

    /// Reports changes since the last call.
    pub(super) async fn observe(&self) {
        if self.sender.receiver_count() == 0 {
            return;
        }
        let mut seen = self.seen.lock().await;
        let Some(status) = self.status().await else { return };
        let now = State::of(&status);
        let Some(before) = seen.replace(now) else { return };
        if now.guest_resets > before.guest_resets {
            self.send("RESET", json!({ "guest": true, "reason": "guest-reset" }));
        }
        if now.commanded_resets > before.commanded_resets {
            self.send("RESET", json!({ "guest": false, "reason": "host-qmp-system-reset" }));
        }
        match (before.runs, now.runs) {
            (true, false) => self.send("STOP", Value::Null),
            (false, true) => self.send("RESUME", Value::Null),
            _ => {}
        }
    }

    /// Reads the machine's status while a client listens.
    pub(super) async fn watch(&self) {
        loop {
            let listens = {
                // Under the lock, so that the state of a new client is not forgotten.
                let mut seen = self.seen.lock().await;
                let listens = self.sender.receiver_count() > 0;
                if !listens {
                    *seen = None;
                }
                listens
            };
            if listens {
                sleep(INTERVAL).await;
                self.observe().await;
            } else {
                self.subscribed.notified().await;
            }
        }
    }

    pub(super) fn send(&self, name: &str, data: Value) {
        let line = protocol::event(name, data).into();
        // Without a client, there is no receiver.
        self.sender.send(Event { line, last: false }).ok();
    }

    /// Reports the end of the machine, and waits for a moment until clients have received it.
    pub(super) async fn end(&self, guest: bool, reason: &str) {
        let data = json!({ "guest": guest, "reason": reason });
        let line = protocol::event("SHUTDOWN", data).into();
        if self.sender.send(Event { line, last: true }).is_ok() {
            timeout(END_TIMEOUT, self.sender.closed()).await.ok();
        }
    }
}

pub(super) fn runs(status: &Value) -> bool {
    status["state"] == "running"
}
