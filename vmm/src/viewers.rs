//! Serves the screen to viewers. Only this module uses an async executor, and only while a screen
//! is served.
//!
//! Many clients wait most of the time, each in the middle of a protocol, which is what tasks are
//! good at. The rest of this program uses threads.

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
use screen::rfb::{self, Interfaces, Power, Server};
use screen::web;
use screen::web::routes;
use screen::web::socket::Farewell;
use screen::web::stage::{Button, LocalStage};

const IO_THREADS: usize = 2;
/// Threads that check what the guest drew, besides those that encode pictures: a viewer that needs
/// much encoding does not delay the picture of the others.
const UPDATE_THREADS: usize = 2;
/// Idle time after which blocking threads end.
const THREAD_KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Time limits for the end, regardless of clients: for all tasks, and for the farewell to browsers.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
const FAREWELL_TIMEOUT: Duration = Duration::from_millis(200);

/// Listening sockets that are not served yet.
pub struct Listeners {
    vnc: Vec<rfb::listen::Listener>,
    web: Option<web::listen::Listener>,
}

pub struct Screen {
    runtime: Option<Runtime>,
    server: Arc<Server>,
    farewell: Option<Farewell>,
}

impl Listeners {
    /// Listens, if `--vnc` or `--web` is set. Clients wait until `open`. Fails if a listener that
    /// other hosts can reach is unprotected.
    pub fn new(config: &Config) -> anyhow::Result<Option<Self>> {
        let addresses = config.vnc.iter().map(|vnc| ("vnc", &vnc.address));
        let addresses = addresses.chain(config.web.iter().map(|web| ("web", &web.address)));
        let mut taken: Vec<(&str, &Address)> = Vec::new();
        for (option, address) in addresses {
            let Some(address) = address.as_ref().filter(|it| !it.is_any()) else { continue };
            if let Some((other, _)) = taken.iter().find(|(_, it)| *it == address) {
                bail!(
                    "--{option} {address}: --{other} listens there: choose another address for \
                     one of them"
                );
            }
            taken.push((option, address));
        }
        if !config.is_watched() {
            return Ok(None);
        }
        // Count processors before the jail hides them.
        rfb::processors();
        let vnc = config.vnc.iter().map(rfb::listen::Listener::new);
        let vnc = vnc.collect::<anyhow::Result<_>>()?;
        let web = config.web.as_ref().map(web::listen::Listener::new).transpose()?;
        Ok(Some(Self { vnc, web }))
    }

    pub fn open(self, machine: &Machine, submit: Submit) -> anyhow::Result<Screen> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(rfb::processors().min(IO_THREADS))
            .max_blocking_threads(rfb::encoders() + UPDATE_THREADS)
            .thread_keep_alive(THREAD_KEEP_ALIVE)
            .thread_name("screen")
            .enable_all()
            .build()
            .context("threads for the screen")?;
        let display = machine.shared().screens.first();
        if display.is_none() {
            tracing::warn!("this machine has no display: viewers see an empty picture");
        }
        let asks = submit.clone();
        let ask = Arc::new(move |button: Option<Button>| {
            let command = button.map_or(Command::Status, Command::from);
            Request::ask(command, |request| asks(request))
        });
        let hub = machine.shared().input.clone();
        let layout = machine.config.keyboard.layout()?;
        let canvas = Canvas::new(display, hub.clone());
        let power = Box::new(move |power| {
            let command = match power {
                Power::Off => Command::PowerButton,
                Power::Reset => Command::Reset,
            };
            submit(Request::unanswered(command));
        });
        let sound = machine.shared().sound.clone();
        let clipboard = machine.shared().clipboard.clone();
        let interfaces = Interfaces { hub, layout, clipboard, sound, power };
        let server = Server::new(canvas.clone(), interfaces);
        runtime.spawn(canvas.run());
        for vnc in self.vnc {
            tracing::info!("vnc: listening at {}", vnc.address());
            let server = server.clone();
            let serve = move |rules, stream, who| server.clone().serve(rules, stream, who);
            let run = vnc.run(serve);
            runtime.spawn(async { run.await.inspect_err(|error| log_failure("vnc", error)) });
        }
        let farewell = self.web.as_ref().map(web::listen::Listener::farewell);
        if let Some(web) = self.web {
            tracing::info!("web: listening at {}", web.url());
            let own = LocalStage::new(server.clone(), web.name().to_owned(), ask);
            let run = web.run(Arc::new(own), routes::health());
            runtime.spawn(async { run.await.inspect_err(|error| log_failure("web", error)) });
        }
        Ok(Screen { runtime: Some(runtime), server, farewell })
    }
}

fn log_failure(listener: &str, error: &anyhow::Error) {
    tracing::error!("{listener}: stopped listening: {error:#}");
}

impl Screen {
    /// The connected viewers.
    pub fn status(&self) -> Vec<Value> {
        self.server.status()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            if let Some(farewell) = &self.farewell {
                runtime.block_on(async { timeout(FAREWELL_TIMEOUT, farewell.send()).await.ok() });
            }
            runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
        }
    }
}
