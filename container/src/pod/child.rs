//! The process of the machine: `vmm run`, with its configuration on standard input.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child as Process, ChildStderr, ChildStdin, Command};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::Level;
use vmm::config::Config;
use vmm::control;

use super::console::{self, BootEvent, Console};
use super::guest_log::{GuestLog, LoggedLines};
use super::lines::line;
use super::machine_client;
use super::reports::Reports;
use super::setup::PluggedDisk;
use super::share::ShareServer;
use super::tpm::Tpm;
use crate::log::bucket::{BOOT_MESSAGES, Bucket, PROGRAM};
use crate::log::printable;
use crate::settings::Settings;
use crate::settings::translate::Serial;
use crate::source::Source;
use crate::story::Story;
use crate::story::log_layer::RECORDED;

/// How long the rest of the process' standard error is read after its end.
const LAST_LINES_TIMEOUT: Duration = Duration::from_secs(1);
/// Capacity of the queue of boot events. The guest can write as many such lines as it likes.
const MAX_EVENTS: usize = 64;

pub struct Child {
    process: Process,
    control: PathBuf,
    /// Where the configuration is written, once.
    input: Option<ChildStdin>,
    /// Ends with the machine.
    tpm: Option<Tpm>,
    /// Ends with the machine.
    share: Option<ShareServer>,
    setup_disk: Option<PluggedDisk>,
    /// Copies the process' standard error to the log.
    reader: Option<JoinHandle<()>>,
    last: LastError,
}

type LastError = Arc<Mutex<Option<String>>>;

#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    pub level: &'a str,
    /// The time zone of the guest's clock; the container's if not set.
    pub zone: Option<&'a str>,
    pub logged: LoggedLines,
    /// The guest does not boot, but goes on.
    pub continues: bool,
}

impl<'a> Options<'a> {
    pub fn of(settings: &'a Settings, source: &Source, continues: bool) -> Self {
        let level = match (settings.pod.trace, settings.pod.debug) {
            (true, _) => "trace",
            (_, true) => "debug",
            _ => "info",
        };
        let zone = settings.machine.zone.as_ref().map(|zone| zone.0.as_str());
        let logged = match (source, &settings.machine.serial.value) {
            (_, Serial::None) => LoggedLines::Nothing,
            (Source::Probe, _) => LoggedLines::Probe,
            _ => LoggedLines::Lines,
        };
        Self {
            level,
            zone: if settings.has_utc_clock() { Some("UTC") } else { zone },
            logged,
            continues,
        }
    }
}

/// Boot events of the firmware, each with the last lines of the serial port.
pub type BootEvents = mpsc::Receiver<(BootEvent, String)>;

impl Child {
    /// The process waits for its configuration.
    pub fn start(
        control: PathBuf,
        story: &Arc<Story>,
        options: Options<'_>,
    ) -> anyhow::Result<(Self, BootEvents)> {
        let program = program();
        let mut process = Command::new(&program)
            .args(["run", "--config", "-"])
            // The environment is the pod's, and has passwords.
            .env_clear()
            .env("VMM_LOG", options.level)
            .env("VMM_LOG_FORMAT", "json")
            .envs(options.zone.map(|zone| ("TZ", zone)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A Ctrl-C at the terminal is for the pod, which shuts the guest down.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| program.display().to_string())?;
        let input = process.stdin.take();
        let (sender, events) = mpsc::channel(MAX_EVENTS);
        let output = process.stdout.take().context("no standard output")?;
        let guest_log = GuestLog::new(story.clone(), options.logged);
        let reports = Reports::new(story.clone(), options.continues);
        tokio::spawn(listen(output, guest_log, reports, sender));
        let errors = process.stderr.take().context("no standard error")?;
        let last = LastError::default();
        let reader = tokio::spawn(repeat(errors, story.clone(), last.clone()));
        let reader = Some(reader);
        let (tpm, share, setup_disk) = (None, None, None);
        let child = Self { process, control, input, tpm, share, setup_disk, reader, last };
        Ok((child, events))
    }

    /// Works only once.
    pub async fn configure(&mut self, config: &Config) -> anyhow::Result<()> {
        let mut input = self.input.take().context("no standard input")?;
        let text = serde_json::to_string(config)?;
        // If the process ended early, its own error says why.
        input.write_all(text.as_bytes()).await.ok();
        Ok(())
    }

    /// Makes the TPM live as long as the machine.
    pub fn attach_tpm(&mut self, tpm: Option<Tpm>) {
        self.tpm = tpm;
    }

    /// Makes the server of the shared folders live as long as the machine.
    pub fn attach_share(&mut self, share: Option<ShareServer>) {
        self.share = share;
    }

    pub fn attach_setup_disk(&mut self, disk: Option<PluggedDisk>) {
        self.setup_disk = disk;
    }

    /// Pulls the set-up disk out, if there is one. The guest runs on meanwhile.
    pub fn unplug_setup_disk(&mut self) {
        if let Some(disk) = self.setup_disk.take() {
            tokio::spawn(disk.unplug());
        }
    }

    pub async fn end(&mut self) -> io::Result<ExitStatus> {
        self.process.wait().await
    }

    /// Call it after the end of the process.
    pub async fn last_error(&mut self) -> Option<String> {
        if let Some(reader) = self.reader.take() {
            // Another process may still have its standard error open.
            timeout(LAST_LINES_TIMEOUT, reader).await.ok();
        }
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn has_ended(&mut self) -> bool {
        !matches!(self.process.try_wait(), Ok(None))
    }

    /// Whether the guest has the set-up disk.
    pub fn has_setup_disk(&self) -> bool {
        self.setup_disk.is_some()
    }

    pub fn id(&self) -> Option<u32> {
        self.process.id()
    }

    /// The process IDs of the machine, of its TPM and of the server of the shared folders.
    pub fn ids(&self) -> Vec<u32> {
        let tpm = self.tpm.as_ref().and_then(Tpm::id);
        let share = self.share.as_ref().and_then(ShareServer::id);
        [self.id(), tpm, share].into_iter().flatten().collect()
    }

    pub fn control(&self) -> &Path {
        &self.control
    }

    /// Asks the machine as it is, asleep or not.
    pub async fn ask(&self, command: control::Command) -> anyhow::Result<Value> {
        machine_client::ask_now(&self.control, command).await
    }

    /// Works even before the control socket is open.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    fn signal(&self, signal: Signal) {
        let pid = self.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        if let Some(pid) = pid {
            // The process may have ended.
            kill_process(pid, signal).ok();
        }
    }
}

/// The program `vmm` beside ours, or else the one in `PATH`.
pub fn program() -> PathBuf {
    let beside = std::env::current_exe().ok().map(|path| path.with_file_name("vmm"));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| "vmm".into())
}

/// Reads the serial port. Boot events are recognized in every line, logged or not. Their number is
/// limited, since the guest can imitate them.
pub(super) async fn listen(
    mut output: impl AsyncRead + Unpin,
    mut guest_log: GuestLog,
    mut reports: Reports,
    sender: mpsc::Sender<(BootEvent, String)>,
) {
    let (mut console, mut marks) = (Console::default(), Bucket::new(BOOT_MESSAGES));
    let mut bytes = vec![0; 4096];
    loop {
        let count = tokio::select! {
            read = output.read(&mut bytes) => read.unwrap_or(0),
            () = guest_log.report_when_due() => continue,
            () = reports.warn_when_due() => continue,
        };
        if count == 0 {
            break;
        }
        for line in console.take(&bytes[..count]) {
            if !reports.take(&line) {
                guest_log.handle(&line);
            }
            if let Some(event) = console::boot_event(&line)
                && marks.take(line.len(), Instant::now()).is_some()
            {
                reports.on_boot(&event);
                // At the machine's end there is no receiver; events that do not fit are dropped.
                sender.try_send((event, console.last())).ok();
            }
        }
    }
    guest_log.end();
}

/// Copies the log of the process to ours, limited by a bucket: the guest may cause some of it, or
/// may have taken over the process.
async fn repeat(errors: ChildStderr, story: Arc<Story>, last: LastError) {
    let mut errors = BufReader::new(errors);
    let [mut mistakes, mut others] = [(); 2].map(|()| Bucket::new(PROGRAM));
    while let Ok(Some(line)) = line(&mut errors).await {
        let (level, text) = event(&line).unwrap_or((Level::ERROR, line));
        let text = printable(&text);
        if level == Level::ERROR {
            *last.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.clone());
        }
        let bucket = if level == Level::ERROR { &mut mistakes } else { &mut others };
        let Some(before) = bucket.take(text.len(), Instant::now()) else { continue };
        if before > 0 {
            tracing::warn!("{before} lines of the machine's process are left out here");
        }
        match level {
            Level::ERROR => tracing::error!(target: RECORDED, "{text}"),
            Level::WARN => tracing::warn!(target: RECORDED, "{text}"),
            Level::INFO => tracing::info!(target: RECORDED, "{text}"),
            Level::DEBUG => tracing::debug!(target: RECORDED, "{text}"),
            _ => tracing::trace!(target: RECORDED, "{text}"),
        }
        if level <= Level::INFO {
            story.record(level, &text);
        }
    }
    let missing = mistakes.missing() + others.missing();
    if missing > 0 {
        tracing::warn!("{missing} lines of the machine's process are left out here");
    }
}

/// Reads an event of the process' log: its level and text. Another line, such as the final error,
/// is no event.
fn event(line: &str) -> Option<(Level, String)> {
    let event: Value = serde_json::from_str(line).ok()?;
    let level = event["level"].as_str()?.parse().ok()?;
    let mut text = event["fields"]["message"].as_str()?.to_owned();
    for (name, value) in event["fields"].as_object()?.iter().filter(|(name, _)| *name != "message")
    {
        match value.as_str() {
            Some(value) => write!(text, " {name}={value}").ok()?,
            None => write!(text, " {name}={value}").ok()?,
        }
    }
    Some((level, text))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_log_line_keeps_its_level_and_fields() {
        let line = r#"{"level":"WARN","fields":{"message":"nvme","size":5,"disk":"/a b"}}"#;
        assert_eq!(event(line), Some((Level::WARN, "nvme disk=/a b size=5".into())));
        assert_eq!(event("vmm: --disk x: no such file"), None);
        assert_eq!(event("{}"), None);
    }

    #[tokio::test]
    async fn unread_events_do_not_accumulate() {
        let said = "BdsDxe: starting Boot0001 \"x\" from PciRoot(0x0)\r\n".repeat(10 * MAX_EVENTS);
        let (sender, mut events) = mpsc::channel(MAX_EVENTS);
        let story = Story::new();
        let guest_log = GuestLog::new(story.clone(), LoggedLines::Nothing);
        listen(said.as_bytes(), guest_log, Reports::new(story, false), sender).await;
        let mut count = 0;
        while let Some((BootEvent::Starts { .. }, _)) = events.recv().await {
            count += 1;
        }
        assert_eq!(count, MAX_EVENTS);
    }

    #[tokio::test]
    async fn a_serial_flood_does_not_hide_firmware_messages() {
        let story = Story::new();
        let line = "x".repeat(99);
        let flood = format!("{line}\n").repeat(500_000);
        let said = format!("{flood}BdsDxe: No bootable option or device was found.\n{flood}");
        let (sender, mut events) = mpsc::channel(MAX_EVENTS);
        let guest_log = GuestLog::new(story.clone(), LoggedLines::Lines);
        listen(said.as_bytes(), guest_log, Reports::new(story.clone(), false), sender).await;
        assert!(matches!(events.recv().await, Some((BootEvent::Nothing, _))));
        let (lines, count) = story.lines(0);
        assert!(count < 2600, "{count} of a million lines");
        let last = &lines.last().unwrap().text;
        assert!(last.ends_with(" lines of the guest are left out here"), "{last}");
    }
}
