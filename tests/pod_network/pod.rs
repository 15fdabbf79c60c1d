//! The program in the pod's namespace: it makes the network, and copies frames between its tap and
//! the guest's.

use std::fs::File;
use std::io::{Read, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, ExitCode};
use std::thread;

use anyhow::{Context, ensure};
use container::net::macvtap::{self, Macvtap};
use container::net::nat::{self, Nat};
use container::settings::Settings;
use container::settings::environment::{Environment, read};
use container::settings::value::Value as _;
use container::shared_folder::{self, Config, Connector, Shares};
use container::status::Status;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use transom_tests::program;

/// The first argument that makes this program the pod.
pub(crate) const WORD: &str = "--in-the-pod";

/// Arguments: `GUEST_NAMESPACE ETC NAME=VALUE…`. Prints `ready` with the guest's MAC address and
/// MTU, and ends when its input ends.
pub(crate) fn main(words: &[String]) -> ExitCode {
    match serve(words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let status = Status::of(&error).code();
            writeln!(std::io::stderr(), "{status}: {error:#}").ok();
            ExitCode::from(status)
        }
    }
}

fn serve(words: &[String]) -> anyhow::Result<()> {
    let [guest, etc, settings @ ..] = words else { anyhow::bail!("too few arguments") };
    let pairs = settings.iter().filter_map(|word| word.split_once('='));
    let environment: Environment = pairs.map(|(name, value)| (name.into(), value.into())).collect();
    let settings = read(&environment)?.settings;
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        match settings.network.dhcp {
            true => beside(&settings, guest).await,
            false => behind(&settings, guest, etc).await,
        }
    })
}

/// The guest is behind the pod (NAT).
async fn behind(settings: &Settings, guest: &str, etc: &str) -> anyhow::Result<()> {
    let (_server, share) = server(settings)?.unzip();
    let parameters = nat::Parameters { pairs: 1, pod: "pod".into(), etc: etc.into(), share };
    let mut nat = Nat::start(settings, &parameters).await?;
    let queue = nat.take_queues().pop().context("no queue")?;
    attach(queue, guest)?;
    say(&format!("ready {} {}", nat.mac().show(), nat.mtu()))?;
    for note in nat.notes() {
        say(&format!("note {note}"))?;
    }
    tokio::select! {
        ended = input() => ended?,
        () = nat.serve() => {}
    }
    nat.end().await
}

/// The server of the folders that the pod shares.
fn server(settings: &Settings) -> anyhow::Result<Option<(Child, Connector)>> {
    let folders = Shares::of(settings, Path::new("/")).folders;
    if folders.is_empty() {
        return Ok(None);
    }
    let config = Config {
        user: settings.account.user.0.clone(),
        password: settings.account.password.0.clone(),
        read_only: settings.shares.read_only,
        folders,
        debug: false,
    };
    let (mut command, connector) = shared_folder::command(program::transom(), &config)?;
    Ok(Some((command.spawn()?, connector)))
}

/// The guest is on the pod's network (macvtap).
async fn beside(settings: &Settings, guest: &str) -> anyhow::Result<()> {
    let folder = settings.storage.folder.clone();
    let parameters = macvtap::Parameters { pairs: 1, pod: "pod".into(), folder };
    let mut card = Macvtap::start(settings, &parameters).await?;
    let queue = card.take_queues().pop().context("no queue")?;
    attach(queue, guest)?;
    say(&format!("ready {} {}", card.mac().show(), card.mtu()))?;
    for note in card.notes() {
        say(&format!("note {note}"))?;
    }
    let learned = async {
        let Some(mut learned) = card.learned_address() else { return std::future::pending().await };
        while learned.changed().await.is_ok() {
            let address = *learned.borrow_and_update();
            say(&format!("heard {}", address.context("no address")?))?;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        ended = input() => ended?,
        learned = learned => learned?,
        () = card.serve() => {}
    }
    card.end().await
}

fn say(line: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// Waits for the end of the input.
async fn input() -> anyhow::Result<()> {
    let read = || std::io::stdin().read_to_end(&mut Vec::new()).context("input").map(drop);
    tokio::task::spawn_blocking(read).await?
}

/// Starts to copy frames between a queue and the guest.
fn attach(ours: OwnedFd, guest: &str) -> anyhow::Result<()> {
    let theirs = guest_tap(guest)?;
    thread::spawn(move || copy_frames(&ours, &theirs));
    Ok(())
}

/// A tap in the guest's namespace that stands for the guest's network card.
fn guest_tap(namespace: &str) -> anyhow::Result<OwnedFd> {
    let file = File::open(Path::new("/run/netns").join(namespace))?;
    let made = thread::spawn(move || {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
        let mut queues = host::net::tap::create("eth0", 1, 1500)?;
        ensure!(queues.len() == 1, "one pair of queues");
        Ok(queues.remove(0))
    });
    made.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Copies frames with their virtio headers in both directions.
fn copy_frames(one: &OwnedFd, other: &OwnedFd) {
    let mut frame = vec![0; 70_000];
    loop {
        let mut ends = [PollFd::new(one, PollFlags::IN), PollFd::new(other, PollFlags::IN)];
        if poll(&mut ends, None).is_err() {
            return;
        }
        let ready = ends.map(|end| end.revents());
        for (from, to, events) in [(one, other, ready[0]), (other, one, ready[1])] {
            if events.contains(PollFlags::ERR) {
                return;
            }
            // A frame that does not fit the queue is lost, as on any cable.
            while let Ok(length) = rustix::io::read(from, &mut frame[..]) {
                rustix::io::write(to, &frame[..length]).ok();
            }
        }
    }
}
