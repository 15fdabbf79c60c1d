//! What runs in the pod's namespace: the network, and frames between its tap and the guest's.

use std::fs::File;
use std::io::{Read, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::thread;

use anyhow::{Context, ensure};
use container::net::nat::{Nat, Wish};
use container::settings::environment::{Environment, read};
use container::settings::value::Value as _;
use container::status::Failure;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The word that makes this program the pod.
pub(crate) const WORD: &str = "--in-the-pod";

/// `GUEST_NAMESPACE RESOLV NAME=VALUE…`: says `ready` and the guest's card, and ends with its
/// input.
pub(crate) fn main(words: &[String]) -> ExitCode {
    match serve(words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let status = Failure::status(&error).code();
            writeln!(std::io::stderr(), "{status}: {error:#}").ok();
            ExitCode::from(status)
        }
    }
}

fn serve(words: &[String]) -> anyhow::Result<()> {
    let [guest, resolv, settings @ ..] = words else { anyhow::bail!("too few words") };
    let pairs = settings.iter().filter_map(|word| word.split_once('='));
    let environment: Environment = pairs.map(|(name, value)| (name.into(), value.into())).collect();
    let settings = read(&environment)?.settings;
    let wish = Wish { pairs: 1, pod: "pod".into(), resolv: resolv.into() };
    let runtime = tokio::runtime::Runtime::new()?;
    let nat = runtime.block_on(Nat::start(&settings, &wish))?;
    let ours = nat.queues().first().context("no queue")?.try_clone()?;
    let theirs = guest_tap(guest)?;
    thread::spawn(move || lead(&ours, &theirs));
    runtime.block_on(async {
        let ended = tokio::task::spawn_blocking(|| {
            std::io::stdin().read_to_end(&mut Vec::new()).context("input")
        });
        let mut out = std::io::stdout();
        writeln!(out, "ready {}", nat.mac().show())?;
        out.flush()?;
        tokio::select! {
            ended = ended => ended?.map(drop),
            () = nat.serve() => Ok(()),
        }
    })?;
    runtime.block_on(nat.end())
}

/// A tap in the guest's namespace, which takes the place of its card.
fn guest_tap(namespace: &str) -> anyhow::Result<OwnedFd> {
    let file = File::open(Path::new("/run/netns").join(namespace))?;
    let made = thread::spawn(move || {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
        let mut queues = vmm::tap::make("eth0", 1, 1500)?;
        ensure!(queues.len() == 1, "one pair of queues");
        Ok(queues.remove(0))
    });
    made.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Leads frames, with the headers before them, from each to the other.
fn lead(one: &OwnedFd, other: &OwnedFd) {
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
            // What does not fit is lost, as on any cable.
            while let Ok(length) = rustix::io::read(from, &mut frame[..]) {
                rustix::io::write(to, &frame[..length]).ok();
            }
        }
    }
}
