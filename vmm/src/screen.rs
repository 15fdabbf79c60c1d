//! The screen's front: the one place with an executor, and only while a screen is served.
//!
//! Many clients wait most of the time, and each in the middle of something: that is what tasks are
//! for. Everything else of this program is threads.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::available_parallelism;
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

use crate::config::Config;
use crate::control::{Command, Request};
use crate::machine::Machine;
use crate::rfb::canvas::Canvas;
use crate::rfb::listen::Listener;
use crate::rfb::{Outside, Power, Server};
use crate::run::Notice;

/// Threads that carry bytes.
const CARRIERS: usize = 2;
/// Threads at most that encode pictures, and how long they wait for more to do.
const ENCODERS: usize = 4;
const IDLE: Duration = Duration::from_secs(5);
/// Whatever clients do, the end does not wait longer for them.
const END: Duration = Duration::from_secs(1);

/// Sockets that listen, with nobody behind them yet.
pub struct Closed {
    listener: Listener,
}

/// A screen that is served.
pub struct Screen {
    runtime: Option<Runtime>,
    server: Arc<Server>,
}

impl Closed {
    /// Listens, if anything of the kind was asked for; clients wait until `open`.
    ///
    /// # Errors
    ///
    /// One sentence: what is in use, or what would let everybody in.
    pub fn new(config: &Config) -> anyhow::Result<Option<Self>> {
        let listener = config.vnc.as_ref().map(Listener::new).transpose()?;
        Ok(listener.map(|listener| Self { listener }))
    }

    /// Shows a machine.
    ///
    /// # Errors
    ///
    /// When the host has no threads left.
    pub fn open(mut self, machine: &Machine, tell: Sender<Notice>) -> anyhow::Result<Screen> {
        let processors = available_parallelism().map_or(1, usize::from);
        let runtime = Builder::new_multi_thread()
            .worker_threads(processors.min(CARRIERS))
            .max_blocking_threads(processors.min(ENCODERS))
            .thread_keep_alive(IDLE)
            .thread_name("screen")
            .enable_all()
            .build()
            .context("threads for the screen")?;
        let display = machine.screens().first();
        if display.is_none() {
            tracing::warn!("this machine has no display: viewers see an empty picture");
        }
        let hub = machine.input().clone();
        let layout = machine.config().keyboard.layout()?;
        let canvas = Canvas::new(display, hub.clone());
        let power = Box::new(move |wish| {
            let command = match wish {
                Power::Off => Command::PowerButton,
                Power::Reset => Command::Reset,
            };
            tell.send(Notice::Control(Request::unanswered(command))).ok();
        });
        let outside = Outside { hub, layout, clipboard: None, power };
        let server = Server::new(canvas.clone(), self.listener.rules(), outside);
        tracing::info!("vnc: listening at {}", self.listener.place());
        runtime.spawn(canvas.run());
        let (listener, shown) = (self.listener, server.clone());
        runtime.spawn(async move {
            if let Err(error) = listener.run(shown).await {
                tracing::error!("vnc: nobody can come in: {error:#}");
            }
        });
        Ok(Screen { runtime: Some(runtime), server })
    }
}

impl Screen {
    /// Who looks.
    pub fn status(&self) -> Vec<Value> {
        self.server.status()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(END);
        }
    }
}
