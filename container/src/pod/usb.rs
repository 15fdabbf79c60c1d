//! USB devices of the host: opens them and passes them to the machine, when they are configured and
//! whenever they are plugged in.
//!
//! Threats: the machine's process has only the devices that were passed to it, and can open no
//! other. One thread of the pod can open any that the container has, and nothing else; it takes
//! requests from clients that logged in, and from sockets in the container.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::Builder;
use std::time::Instant;

use anyhow::{Context as _, bail};
use host::usb::{self, NODES};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use vmm::control::host_usb::{HostUsb, INTERVAL};

use super::doze;
use crate::jail;

/// The maximum number of requests that wait.
const MAX_REQUESTS: usize = 16;

static REQUESTS: OnceLock<SyncSender<(Request, oneshot::Sender<Answer>)>> = OnceLock::new();

type Answer = anyhow::Result<Value>;

#[derive(Debug)]
pub enum Request {
    /// The devices of the host, those that are configured, and those that wait.
    List,
    /// A device in the words of `usb-host`: `vendorid=0x0403,productid=0x6001`.
    Attach(String),
    /// The words, or the machine's name of the device.
    Detach(String),
    /// Attach the configured devices that wait.
    AttachConfigured,
}

/// Starts the thread. `devices` are those that [`attach_configured`] attaches. Must be called while
/// the pod has its rights.
pub fn start(control: PathBuf, devices: &[String]) -> anyhow::Result<()> {
    let mut checked = HostUsb::new(control.clone());
    for device in devices {
        checked.add(device).with_context(|| format!("ARGUMENTS: usb-host,{device}"))?;
    }
    let (host, held) = (HostUsb::new(control.clone()), devices.to_vec());
    if !devices.is_empty() && !Path::new(NODES).is_dir() {
        tracing::warn!("{}", no_folder());
    }
    let (sender, requests) = sync_channel(MAX_REQUESTS);
    let body = move || {
        jail::open_usb();
        serve(host, held, &control, &requests);
    };
    Builder::new().name("usb".into()).spawn(body).context("a thread for USB")?;
    REQUESTS.get_or_init(|| sender);
    Ok(())
}

/// Wakes the machine first, if it is asleep and its devices change.
pub async fn ask(request: Request) -> Answer {
    if matches!(request, Request::Attach(_) | Request::Detach(_)) {
        doze::wake().await?;
    }
    let (sender, answer) = oneshot::channel();
    let requests = REQUESTS.get().context("there is no machine yet")?;
    if requests.try_send((request, sender)).is_err() {
        bail!("too many requests for USB devices: try again later");
    }
    answer.await.context("the pod ends")?
}

/// Attaches the configured devices, if that has not been done. Must not be called while Windows
/// Setup runs by itself: it erases a disk by its number, and a USB disk would change the numbers.
pub async fn attach_configured() {
    if let Err(error) = ask(Request::AttachConfigured).await {
        tracing::warn!("USB devices of the host: {error:#}");
    }
}

fn serve(
    mut host: HostUsb,
    mut held: Vec<String>,
    control: &Path,
    requests: &Receiver<(Request, oneshot::Sender<Answer>)>,
) {
    let mut next = Instant::now();
    loop {
        let request = if host.entries().is_empty() {
            requests.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            // Requests do not delay the next step.
            requests.recv_timeout(next.saturating_duration_since(Instant::now()))
        };
        match request {
            Ok((request, sender)) => {
                // The client may have gone.
                sender.send(answer(&mut host, &mut held, request)).ok();
            }
            Err(RecvTimeoutError::Timeout) => {
                next = Instant::now() + INTERVAL;
                if control.exists()
                    && let Err(error) = host.step()
                {
                    tracing::debug!("USB devices of the host: {error:#}");
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn answer(host: &mut HostUsb, held: &mut Vec<String>, request: Request) -> Answer {
    match request {
        Request::AttachConfigured => {
            for device in held.drain(..) {
                if let Err(error) = host.add(&device) {
                    tracing::warn!("{device}: {error:#}");
                }
            }
            Ok(json!({}))
        }
        Request::List => {
            let found = usb::list()?.into_iter().filter(|it| !it.is_hub()).collect::<Vec<_>>();
            Ok(json!({ "host": found, "configured": host.entries(), "waiting": held }))
        }
        Request::Attach(device) => {
            if !Path::new(NODES).is_dir() {
                bail!("{}", no_folder());
            }
            host.add(&device)?;
            let stepped = host.step().map_err(|error| format!("{error:#}"));
            let entry = host.entries().last().context("it was just added")?.clone();
            if let Some(error) = stepped.err().or(entry.error) {
                host.remove(&device).ok();
                bail!("{device}: {error}");
            }
            Ok(json!({ "name": entry.name, "device": entry.device }))
        }
        Request::Detach(device) => {
            match held.iter().position(|it| *it == device) {
                Some(at) => drop(held.remove(at)),
                None => host.remove(&device)?,
            }
            Ok(json!({}))
        }
    }
}

/// Whether the name is that of a device that this thread attached, or can attach.
pub fn is_host_device(name: &str) -> bool {
    name.starts_with("usb-host") || name.contains('=')
}

fn no_folder() -> String {
    format!(
        "this container has no {NODES}: mount the host's folder there and allow its devices, as \
         in docs/usb.md"
    )
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn configured_devices_wait_until_they_may_be_attached() {
        let folder = tempfile::tempdir().unwrap();
        let mut host = HostUsb::new(folder.path().join("vmm.sock"));
        let [one, two] = ["vendorid=0x0403,productid=0x6001", "hostbus=1,hostport=1.4"];
        let mut held = vec![one.to_owned(), two.to_owned()];
        answer(&mut host, &mut held, Request::Detach(two.to_owned())).unwrap();
        assert_eq!((&held[..], host.entries().len()), (&[one.to_owned()][..], 0));
        for _ in 0..2 {
            answer(&mut host, &mut held, Request::AttachConfigured).unwrap();
            assert_eq!((held.len(), host.entries().len()), (0, 1));
        }
        answer(&mut host, &mut held, Request::Detach(one.to_owned())).unwrap();
        answer(&mut host, &mut held, Request::Detach(two.to_owned())).unwrap_err();
    }
}
