//! Lets the machine sleep while nobody needs it, and wakes it.
//!
//! Asleep, the machine's process stays, with its ports and the screen, and its guest is as it was
//! suspended: saved on the volume. Before it wakes, the name of its snapshot is removed, as before
//! a suspended machine continues. Whatever ends the pod meanwhile, the next start continues it.
//!
//! Idle means that, for the whole time, nobody looked at the screen, no outside host was connected,
//! nobody gave a command, and neither processors nor disks nor the network did much. Few checks
//! find that out, and none wakes the guest.

mod rule;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep, sleep_until};
use vmm::control::{Command, Then};

use self::rule::{Rule, Sample};
use super::Pod;
use super::child::Child;
use super::doze::{self, Report, Stage};
use super::machine_client;
use super::network::Network;
use super::stop::Budget;
use super::suspend::{self, SuspendFolder};
use super::thread::run_in_thread;
use crate::net::user::link::Traffic;
use crate::story::installation::Stage as Installed;
use crate::story::{Phase, Story};

/// The shortest interval between two checks. A check is a question to the machine.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(5);
/// Checks during the idle time.
const CHECKS: u32 = 20;
/// The shortest time until a machine that could not sleep is tried again.
const RETRY: Duration = Duration::from_secs(600);
/// Pause after the machine did not answer, and after it could not be woken.
const PAUSE: Duration = Duration::from_secs(1);
pub(super) const WAKE_PAUSE: Duration = Duration::from_secs(5);
/// The kernel's unit of processor times in /proc (USER_HZ), the same on all hosts.
const TICKS: u64 = 100;

/// The counters of the network's traffic.
#[derive(Debug, Default)]
pub(super) enum Counters {
    #[default]
    None,
    User(Arc<Traffic>),
    /// An interface of the pod.
    Interface(String),
    /// A card that cannot wake the machine.
    Unwatched,
}

impl Counters {
    pub(super) fn of(network: &Network) -> Self {
        match network {
            Network::None => Self::None,
            Network::User(user) => Self::User(user.traffic.clone()),
            Network::Nat(nat, ..) => Self::Interface(nat.interface().to_owned()),
            Network::Macvtap(..) => Self::Unwatched,
        }
    }

    /// The bytes so far, if they are known.
    fn bytes(&self) -> Option<u64> {
        match self {
            Self::None | Self::Unwatched => Some(0),
            Self::User(traffic) => Some(traffic.bytes()),
            Self::Interface(name) => {
                interface_bytes(&fs::read_to_string("/proc/net/dev").ok()?, name)
            }
        }
    }

    /// Open connections of outside hosts. With address translation they are not known.
    fn connections(&self) -> Option<u64> {
        match self {
            Self::User(traffic) => Some(traffic.connections() as u64),
            Self::None | Self::Interface(_) | Self::Unwatched => None,
        }
    }

    fn set_quiet(&self, quiet: bool) {
        if let Self::User(traffic) = self {
            traffic.set_quiet(quiet);
        }
    }
}

/// Received and sent bytes, from the text of /proc/net/dev.
fn interface_bytes(text: &str, name: &str) -> Option<u64> {
    let line =
        text.lines().find_map(|line| line.trim_start().strip_prefix(name)?.strip_prefix(':'));
    let mut numbers = line?.split_ascii_whitespace().map(|word| word.parse::<u64>().ok());
    let received = numbers.next()??;
    // Seven other numbers are about received packets.
    received.checked_add(numbers.nth(7)??)
}

/// A change that is due.
#[derive(Debug)]
pub(super) enum Event {
    Sleep,
    /// With the reason.
    Wake(&'static str),
}

/// The start and the end of the last change. Signals waited meanwhile.
#[derive(Default)]
pub(super) struct Dozed(Option<(Instant, Instant)>);

/// A signal that waited is taken within this time.
const SIGNAL_TIME: Duration = Duration::from_millis(200);

impl Dozed {
    /// The longest time that a signal has waited which is taken now.
    pub(super) fn hid(&self) -> Duration {
        let last = self.0.filter(|(_, end)| end.elapsed() < SIGNAL_TIME);
        last.map_or(Duration::ZERO, |(start, end)| end - start)
    }
}

/// Watches whether the machine is needed.
pub(super) struct Idle {
    limit: Duration,
    folder: SuspendFolder,
    counters: Arc<Counters>,
    story: Arc<Story>,
    control: PathBuf,
    /// The machine's process.
    id: Option<u32>,
    rule: Rule,
    /// The next check.
    next: Instant,
}

impl Idle {
    /// `None` without IDLE, or if the machine cannot sleep.
    pub(super) fn start(pod: &Pod, child: &Child) -> Option<Self> {
        let limit = pod.plan.input.settings.pod.idle?.0;
        let counters = pod.counters.get().cloned().unwrap_or_default();
        let obstacle = match (pod.suspend_folder(), &*counters) {
            (None, _) => Some("it cannot be saved (the log says why)"),
            (_, Counters::Unwatched) => Some("with DHCP=Y no connection could wake it"),
            (Some(_), _) => None,
        };
        let now = Instant::now();
        if let Some(why) = obstacle {
            tracing::warn!("IDLE: the machine stays awake: {why}");
            let (since, obstacle) = (now.into_std(), Some(why.to_owned()));
            doze::report(Report { limit, since, measures: Vec::new(), obstacle });
            return None;
        }
        let (folder, story) = (pod.suspend_folder()?.clone(), pod.story.clone());
        let control = child.control().to_owned();
        let (rule, next) = (Rule::new(now.into_std()), now + interval(limit));
        Some(Self { limit, folder, counters, story, control, id: child.id(), rule, next })
    }

    /// Waits until the machine is to sleep or to wake. May be canceled.
    pub(super) async fn next(idle: &mut Option<Self>) -> Event {
        let Some(idle) = idle else { return std::future::pending().await };
        match doze::stage() {
            Stage::Awake => idle.watch().await,
            Stage::Waking => Event::Wake("somebody needs it"),
            Stage::Falling | Stage::Asleep => tokio::select! {
                () = doze::requested() => Event::Wake("somebody needs it"),
                () = idle.frame() => Event::Wake("a connection"),
            },
        }
    }

    async fn watch(&mut self) -> Event {
        loop {
            sleep_until(self.next).await;
            let status = machine_client::ask_now(&self.control, Command::Status).await;
            let (now, since) = (Instant::now(), self.next);
            self.next = now + interval(self.limit);
            let Ok(status) = status else { continue };
            let sample = self.sample(&status, since);
            let measures = self.rule.take(now.into_std(), &sample);
            let (limit, since) = (self.limit, self.rule.since());
            doze::report(Report { limit, since, measures, obstacle: None });
            if since.elapsed() >= limit && status["state"] == "running" {
                return Event::Sleep;
            }
        }
    }

    fn sample(&self, status: &Value, checked: Instant) -> Sample {
        let installs = self.story.installation().is_some_and(|it| it.stage != Installed::Ready);
        let since = checked.checked_sub(interval(self.limit)).unwrap_or(checked).into_std();
        Sample {
            viewers: status["viewers"].as_array().map_or(0, Vec::len),
            connections: self.counters.connections(),
            needed: doze::last_needed().is_some_and(|needed| needed >= since),
            installs,
            processors: self.id.and_then(processor_time),
            storage: status["storage_bytes"].as_u64(),
            network: self.counters.bytes(),
        }
    }

    /// Returns when a frame for the guest arrives.
    async fn frame(&self) {
        loop {
            match machine_client::wait_for_frame(&self.control).await {
                Ok(true) => return,
                // Somebody else resumed it, or waits in our place.
                Ok(false) if self.is_awake().await => return,
                Ok(false) => sleep(PAUSE).await,
                Err(error) => {
                    tracing::debug!("waiting for a frame: {error:#}");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    async fn is_awake(&self) -> bool {
        let status = machine_client::ask_now(&self.control, Command::Status).await;
        status.is_ok_and(|status| status["state"] != "asleep")
    }
}

fn interval(limit: Duration) -> Duration {
    (limit / CHECKS).max(SHORTEST_INTERVAL)
}

/// The processor time that a process has used.
fn processor_time(id: u32) -> Option<Duration> {
    used(&fs::read_to_string(format!("/proc/{id}/stat")).ok()?)
}

/// The user and system time, from the text of /proc/PID/stat.
fn used(text: &str) -> Option<Duration> {
    // The name may contain anything, but no number that follows it does.
    let mut words = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace().skip(11);
    let mut ticks = || words.next()?.parse::<u64>().ok();
    let all = ticks()?.checked_add(ticks()?)?;
    Some(Duration::from_millis(all.checked_mul(1000 / TICKS)?))
}

impl Pod {
    /// Lets the machine sleep, or wakes it.
    pub(super) async fn doze(&self, event: Event, child: &Child, idle: &mut Option<Idle>) -> Dozed {
        let start = Instant::now();
        let Some(idle) = idle else { return Dozed::default() };
        match event {
            Event::Sleep => self.fall_asleep(child, idle).await,
            Event::Wake(why) => {
                self.wake_up(child, why).await;
                let (limit, since) = (idle.limit, Instant::now().into_std());
                doze::report(Report { limit, since, measures: Vec::new(), obstacle: None });
            }
        }
        // Its own work is not the guest's.
        idle.rule = Rule::new(Instant::now().into_std());
        if !doze::is_asleep() {
            idle.next = idle.next.max(Instant::now() + interval(idle.limit));
        }
        Dozed(Some((start, Instant::now())))
    }

    async fn fall_asleep(&self, child: &Child, idle: &mut Idle) {
        // A guest whose file systems are frozen must not be saved.
        let Some(_turn) = self.freezer.exclude() else { return };
        let app = self.plan.name();
        tracing::info!("{app} was idle for {} s: it falls asleep", idle.limit.as_secs());
        // A signal waits until the machine is saved.
        let limit = Budget::of(self.plan.input.settings.pod.timeout.0).ask / 2;
        doze::falls_asleep(limit);
        idle.counters.set_quiet(true);
        match idle.folder.save(child, limit, Then::Sleep).await {
            Ok(()) => {
                doze::fell_asleep();
                let how = "a connection, a viewer or a command wakes it";
                self.story.enter(Phase::Asleep, &format!("{app} is asleep: {how}"));
            }
            Err(why) => {
                let pause = RETRY.max(idle.limit);
                let minutes = pause.as_secs() / 60;
                self.story.warn(&format!(
                    "{app} stays awake: {why:#}. It is tried again in {minutes} min"
                ));
                let (limit, since) = (idle.limit, idle.rule.since());
                let obstacle = Some(format!("{why:#}"));
                doze::report(Report { limit, since, measures: Vec::new(), obstacle });
                // The machine may have been saved before its client failed.
                self.go_on(child).await;
                idle.next = Instant::now() + pause;
            }
        }
    }

    /// Wakes a machine that is asleep, or tries to.
    pub(super) async fn wake_up(&self, child: &Child, why: &str) {
        if self.go_on(child).await {
            self.story.enter(Phase::Running, &format!("{} wakes up: {why}", self.plan.name()));
            let agent = self.agent.clone();
            tokio::spawn(async move { suspend::set_clock(&agent).await });
        }
    }

    /// Removes the snapshot, and lets the guest run again. Returns whether it does. It does not
    /// while the snapshot could continue an older machine.
    async fn go_on(&self, child: &Child) -> bool {
        let Some(folder) = self.suspend_folder().cloned() else { return false };
        let removed = run_in_thread("suspend", move || folder.remove()).await;
        let resumed = match removed {
            Ok(()) => child.ask(Command::Resume).await.map(drop),
            Err(error) => Err(error),
        };
        match resumed {
            Ok(()) => {
                if let Some(counters) = self.counters.get() {
                    counters.set_quiet(false);
                }
                doze::set(Stage::Awake);
                true
            }
            Err(error) => {
                tracing::warn!("{} does not wake: {error:#}", self.plan.name());
                doze::set(Stage::Waking);
                sleep(WAKE_PAUSE).await;
                false
            }
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn bytes_of_an_interface_are_those_of_both_directions() {
        let text = "Inter-|   Receive                            |  Transmit\n\
             face |bytes packets errs drop fifo frame compressed multicast|bytes packets\n    \
             lo: 10 1 0 0 0 0 0 0 10 1 0 0 0 0 0 0\n vm0: 4000 9 0 0 0 0 0 0 500 7 0 0 0 0 0 0\n";
        assert_eq!(interface_bytes(text, "vm0"), Some(4500));
        assert_eq!(interface_bytes(text, "lo"), Some(20));
        assert_eq!(interface_bytes(text, "vm"), None);
        assert_eq!(interface_bytes("vm0: 1 2", "vm0"), None);
    }

    #[test]
    fn processor_times_are_read_behind_any_name() {
        let text = "7 (a) 9 (b) R 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0 3 0 99";
        assert_eq!(used(text), Some(Duration::from_secs(2)));
        assert!(processor_time(std::process::id()).is_some());
        assert_eq!(used("7 (a) R 1"), None);
    }

    #[test]
    fn checks_are_few() {
        assert_eq!(interval(Duration::from_secs(1800)), Duration::from_secs(90));
        assert_eq!(interval(Duration::from_secs(10)), SHORTEST_INTERVAL);
    }
}
