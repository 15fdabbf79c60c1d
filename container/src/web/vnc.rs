//! VNC viewers. The pod checks their password, as it does for browsers, so that wrong guesses are
//! counted together. It relays accepted viewers to the machine, whose process has no port.
//!
//! VNC has no TLS here: an eavesdropper sees the screen, and can find the password of eight
//! letters. So viewers have a password of their own, and the pod listens for them only if
//! configured.

use std::sync::Arc;

use anyhow::Context as _;
use screen::web::viewers::{Admission, Auth, Config, Listener, Lobby, Rules, Wire};
use tokio::net::UnixStream;

use super::{WebState, all_addresses};
use crate::pod::doze;
use crate::pod::guard::Guard;
use crate::settings::Settings;
use crate::status::{Failure, Status};

pub(super) fn open(
    settings: &Settings,
    guard: &Guard,
    web: &Arc<WebState>,
) -> anyhow::Result<Option<impl Future<Output = ()> + use<>>> {
    let Some(port) = settings.vnc() else { return Ok(None) };
    let mut config = Config {
        address: Some(all_addresses(port)?),
        display_name: Some(format!("VNC_PORT={port}")),
        ..Config::default()
    };
    match guard {
        Guard::Open => config.auth = Auth::None,
        Guard::Password { vnc, .. } => config.password.clone_from(vnc),
    }
    let listener = Listener::new(&config)
        .map_err(|error| Failure::new(Status::Failed, format!("{error:#}")))?;
    tracing::warn!("VNC_PORT={port}: VNC is not encrypted: use it only in networks that you trust");
    let lobby = Arc::new(Lobby::new(web.login_limiter.clone()));
    let web = web.clone();
    let serve = move |rules: Arc<Rules>, stream, who| {
        let (lobby, web) = (lobby.clone(), web.clone());
        async move { show(&lobby, &web, &rules, stream, who).await }
    };
    Ok(Some(async {
        if let Err(error) = listener.run(serve).await.context("VNC") {
            tracing::error!("the VNC port serves no more clients: {error:#}");
        }
    }))
}

/// Relays an accepted viewer to the machine until one of them disconnects.
async fn show(lobby: &Lobby, web: &WebState, rules: &Rules, stream: Wire, who: Admission) {
    let Some(entrant) = lobby.admit(rules, stream, &who).await else { return };
    doze::wake().await.ok();
    let shown = match UnixStream::connect(web.runtime_folder.screen()).await {
        Ok(machine) => entrant.relay(&who.peer, machine).await,
        Err(error) => Err(error.into()),
    };
    if let Err(error) = shown {
        // Not a warning: clients choose how often this happens.
        tracing::debug!("vnc: {} sees nothing: {error:#}", who.peer);
    }
}
