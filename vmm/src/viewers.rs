//! The screen's front: the one place with an executor, and only while a screen is served.
//!
//! Many clients wait most of the time, and each in the middle of something: that is what tasks are
//! for. Everything else of this program is threads.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use crate::config::Config;
use crate::control::{Command, Request, Submit};
use crate::machine::Machine;
use host::listen::Address;
use screen::rfb::canvas::Canvas;
use screen::rfb::{self, Outside, Power, Server};
use screen::web;
use screen::web::routes;
use screen::web::socket::Farewell;
use screen::web::stage::{Button, Own};

/// Threads that carry bytes.
const CARRIERS: usize = 2;
/// Besides those that encode pictures, threads that look at what the guest drew: nobody who wants
/// much makes the picture old for the others.
const LOOKERS: usize = 2;
/// How long they all wait for more to do.
const IDLE: Duration = Duration::from_secs(5);
/// Whatever clients do, the end does not wait longer for them, nor for a word of parting.
const END: Duration = Duration::from_secs(1);
const PARTING: Duration = Duration::from_millis(200);

/// Sockets that listen, with nobody behind them yet.
pub struct Closed {
    vnc: Vec<rfb::listen::Listener>,
    web: Option<web::listen::Listener>,
}

/// A screen that is served.
pub struct Screen {
    runtime: Option<Runtime>,
    server: Arc<Server>,
    farewell: Option<Farewell>,
}

impl Closed {
    /// Listens, if anything of the kind was asked for; clients wait until `open`.
    ///
    /// # Errors
    ///
    /// One sentence: what is in use, or what would let everybody in.
    pub fn new(config: &Config) -> anyhow::Result<Option<Self>> {
        let places = config.vnc.iter().map(|vnc| ("vnc", &vnc.to));
        let places = places.chain(config.web.iter().map(|web| ("web", &web.to)));
        let mut taken: Vec<(&str, &Address)> = Vec::new();
        for (option, place) in places {
            let Some(place) = place.as_ref().filter(|place| !place.is_any()) else { continue };
            if let Some((other, _)) = taken.iter().find(|(_, it)| *it == place) {
                bail!(
                    "--{option} {place}: --{other} listens there: choose another place for one of \
                     them"
                );
            }
            taken.push((option, place));
        }
        if !config.is_watched() {
            return Ok(None);
        }
        // Before the jail, in which it is not seen.
        rfb::processors();
        let vnc = config.vnc.iter().map(rfb::listen::Listener::new);
        let vnc = vnc.collect::<anyhow::Result<_>>()?;
        let web = config.web.as_ref().map(web::listen::Listener::new).transpose()?;
        Ok(Some(Self { vnc, web }))
    }

    /// Shows a machine.
    ///
    /// # Errors
    ///
    /// When the host has no threads left.
    pub fn open(self, machine: &Machine, submit: Submit) -> anyhow::Result<Screen> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(rfb::processors().min(CARRIERS))
            .max_blocking_threads(rfb::encoders() + LOOKERS)
            .thread_keep_alive(IDLE)
            .thread_name("screen")
            .enable_all()
            .build()
            .context("threads for the screen")?;
        let display = machine.screens().first();
        if display.is_none() {
            tracing::warn!("this machine has no display: viewers see an empty picture");
        }
        let asks = submit.clone();
        let ask = Arc::new(move |button: Option<Button>| {
            let command = button.map_or(Command::Status, Command::from);
            Request::ask(command, |request| asks(request))
        });
        let hub = machine.input().clone();
        let layout = machine.config().keyboard.layout()?;
        let canvas = Canvas::new(display, hub.clone());
        let power = Box::new(move |wish| {
            let command = match wish {
                Power::Off => Command::PowerButton,
                Power::Reset => Command::Reset,
            };
            submit(Request::unanswered(command));
        });
        let outside = Outside { hub, layout, clipboard: None, power };
        let server = Server::new(canvas.clone(), outside);
        runtime.spawn(canvas.run());
        for vnc in self.vnc {
            tracing::info!("vnc: listening at {}", vnc.place());
            let server = server.clone();
            let serve = move |rules, stream, who| server.clone().serve(rules, stream, who);
            let run = vnc.run(serve);
            runtime.spawn(async { run.await.inspect_err(|error| nobody("vnc", error)) });
        }
        let farewell = self.web.as_ref().map(web::listen::Listener::farewell);
        if let Some(web) = self.web {
            tracing::info!("web: listening at {}", web.place());
            let own = Own::new(server.clone(), web.name().to_owned(), ask);
            let run = web.run(Arc::new(own), routes::health());
            runtime.spawn(async { run.await.inspect_err(|error| nobody("web", error)) });
        }
        Ok(Screen { runtime: Some(runtime), server, farewell })
    }
}

fn nobody(door: &str, error: &anyhow::Error) {
    tracing::error!("{door}: nobody can come in: {error:#}");
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
            if let Some(farewell) = &self.farewell {
                runtime.block_on(async { timeout(PARTING, farewell.say()).await.ok() });
            }
            runtime.shutdown_timeout(END);
        }
    }
}
