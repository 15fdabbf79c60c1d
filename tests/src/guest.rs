//! A guest on our machine, or the same guest on QEMU's q35 for comparison.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use vmm::control::{self, Client};
use vmm::screenshot::Picture;

use crate::console::Console;
use crate::patience::Patience;
use crate::{lab, standstill};

/// Time for a guest to go on after its processors were stopped for a moment.
const AFTER_A_KICK: Duration = Duration::from_secs(5);
const LOST_WAKEUP: &str = "it went on after its processors were stopped once: a wakeup was lost";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    Transom,
    /// QEMU's q35 with KVM.
    Qemu,
}

/// Values have the format of `vmm run`'s options, for both machines.
#[derive(Clone, Debug)]
pub struct Guest {
    machine: Machine,
    cpus: String,
    memory: String,
    kernel: Option<PathBuf>,
    initrd: Option<PathBuf>,
    cmdline: String,
    display: String,
    firmware: Option<(PathBuf, PathBuf)>,
    /// The option `--restore` or `--incoming` with its value, which replaces all that is above.
    from: Option<(&'static str, String)>,
    words: Vec<OsString>,
}

impl Guest {
    /// A guest on Transom with one processor and 512 MiB.
    pub fn transom() -> Self {
        Self::on(Machine::Transom)
    }

    /// A guest on Transom that goes on from a snapshot: a folder, and keys.
    pub fn restored(from: impl Into<String>) -> Self {
        Self { from: Some(("--restore", from.into())), ..Self::transom() }
    }

    /// A guest on Transom that goes on when it arrives at this socket.
    pub fn arriving(socket: &Path) -> Self {
        Self { from: Some(("--incoming", socket.display().to_string())), ..Self::transom() }
    }

    /// The same guest on QEMU, from the asset `QEMU`.
    pub fn qemu() -> Self {
        Self::on(Machine::Qemu)
    }

    pub fn on(machine: Machine) -> Self {
        Self {
            machine,
            cpus: "1".into(),
            memory: "512M".into(),
            kernel: None,
            initrd: None,
            cmdline: String::new(),
            display: "none".into(),
            firmware: None,
            from: None,
            words: Vec::new(),
        }
    }

    /// Such as `8,sockets=2,cores=2,threads=2`.
    pub fn cpus(mut self, cpus: &str) -> Self {
        self.cpus = cpus.into();
        self
    }

    /// Such as `3G`.
    pub fn memory(mut self, memory: &str) -> Self {
        self.memory = memory.into();
        self
    }

    /// Gives our machine a display: `1920x1080`. It has no display by default, because firmware
    /// that writes to two screens is slow on an emulated processor.
    pub fn display(mut self, display: &str) -> Self {
        self.display = display.into();
        self
    }

    pub fn kernel(mut self, path: impl Into<PathBuf>) -> Self {
        self.kernel = Some(path.into());
        self
    }

    pub fn initrd(mut self, path: impl Into<PathBuf>) -> Self {
        self.initrd = Some(path.into());
        self
    }

    pub fn cmdline(mut self, words: &str) -> Self {
        self.cmdline = words.into();
        self
    }

    pub fn firmware(mut self, code: impl Into<PathBuf>, vars: impl Into<PathBuf>) -> Self {
        self.firmware = Some((code.into(), vars.into()));
        self
    }

    /// `path` is the control socket of a swtpm.
    pub fn tpm(self, path: &Path) -> Self {
        let path = path.display();
        match self.machine {
            Machine::Transom => self.word("--tpm").word(path.to_string()),
            Machine::Qemu => self
                .word("-chardev")
                .word(format!("socket,id=tpm-control,path={path}"))
                .word("-tpmdev")
                .word("emulator,id=tpm,chardev=tpm-control")
                .word("-device")
                .word("tpm-crb,tpmdev=tpm"),
        }
    }

    /// Adds a command-line word for this machine's program.
    pub fn word(mut self, word: impl Into<OsString>) -> Self {
        self.words.push(word.into());
        self
    }

    pub fn machine(&self) -> Machine {
        self.machine
    }

    pub fn start(&self) -> anyhow::Result<Running> {
        self.start_as(Ok)
    }

    /// Starts the guest with a command made from its own, to run elsewhere or as another user.
    pub fn start_as(
        &self,
        made: impl FnOnce(Command) -> anyhow::Result<Command>,
    ) -> anyhow::Result<Running> {
        let folder = tempfile::tempdir().context("a folder for the guest")?;
        let control = folder.path().join("control");
        let mut command = match self.machine {
            Machine::Transom => self.transom_command(&control)?,
            Machine::Qemu => self.qemu_command(&control)?,
        };
        command.args(&self.words);
        let mut command = made(command)?;
        let complaints = File::create(folder.path().join("stderr"))?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(complaints);
        let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
        let output = child.stdout.take().context("no output")?;
        let keys = child.stdin.take().context("no input")?;
        let (console, machine) = (Console::new(output, keys), self.machine);
        Ok(Running { machine, child, console, control, folder })
    }

    fn transom_command(&self, control: &Path) -> anyhow::Result<Command> {
        let mut command = Command::new(lab::vmm()?);
        if let Some((option, value)) = &self.from {
            command.args(["run", option, value, "--control"]).arg(control);
            return Ok(command);
        }
        command.args(["run", "--cpus", &self.cpus, "--memory", &self.memory, "--control"]);
        command.arg(control).args(["--display", &self.display]);
        if let Some((code, vars)) = &self.firmware {
            command.arg("--firmware").arg(code).arg("--vars").arg(vars);
        }
        if let Some(kernel) = &self.kernel {
            command.arg("--kernel").arg(kernel).args(["--cmdline", &self.cmdline]);
        }
        if let Some(initrd) = &self.initrd {
            command.arg("--initrd").arg(initrd);
        }
        Ok(command)
    }

    fn qemu_command(&self, control: &Path) -> anyhow::Result<Command> {
        let mut command = qemu()?;
        command.args(["-M", "q35,usb=off", "-accel", "kvm", "-cpu", "host", "-nodefaults"]);
        command.args(["-no-user-config", "-display", "none", "-serial", "stdio"]);
        command.args(["-smp", &self.cpus, "-m", &self.memory, "-qmp"]);
        command.arg(format!("unix:{},server=on,wait=off", control.display()));
        if let Some((code, vars)) = &self.firmware {
            let drive = |unit, path: &Path, more| {
                let path = path.display();
                ["-drive".into(), format!("if=pflash,format=raw,unit={unit},file={path}{more}")]
            };
            command.args(drive(0, code, ",readonly=on")).args(drive(1, vars, ""));
        }
        if let Some(kernel) = &self.kernel {
            command.arg("-kernel").arg(kernel).args(["-append", &self.cmdline]);
        }
        if let Some(initrd) = &self.initrd {
            command.arg("-initrd").arg(initrd);
        }
        Ok(command)
    }
}

/// Dropping it kills the process.
pub struct Running {
    machine: Machine,
    child: Child,
    console: Console,
    control: PathBuf,
    folder: TempDir,
}

impl Running {
    /// The first serial port.
    pub fn console(&mut self) -> &mut Console {
        &mut self.console
    }

    /// Waits for words on the console, and returns the output before them. The error has the end of
    /// the output and the program's standard error.
    pub fn expect(&mut self, words: &str, within: Duration) -> anyhow::Result<String> {
        self.expect_any(&[words], within).map(|(_, before)| before)
    }

    pub fn expect_any(
        &mut self,
        words: &[&str],
        within: Duration,
    ) -> anyhow::Result<(usize, String)> {
        let found = self.console.expect_any(words, within);
        found.map_err(|error| {
            let position = self.position();
            let late = self.console.expect_any(words, AFTER_A_KICK);
            let verdict = if late.is_ok() { LOST_WAKEUP } else { "it stands still" };
            error.context(format!("{}\n{verdict}\n{position}", self.stderr()))
        })
    }

    /// The host's activity, and the guest's registers if it still answers. These are read twice, so
    /// that a loop is visible. Reading them stops the processors for a moment.
    fn position(&self) -> String {
        let activity = standstill::watch();
        let ask = || {
            let registers = self.ask(&control::Command::Registers).ok()?;
            let all = registers["registers"].as_array()?;
            Some(all.iter().filter_map(Value::as_str).collect::<Vec<_>>().join("\n"))
        };
        let seen = [Some(activity), ask(), ask()];
        seen.into_iter().flatten().collect::<Vec<_>>().join("\n---\n")
    }

    /// Types a line on the console.
    pub fn send(&mut self, line: &str) -> anyhow::Result<()> {
        self.console.send(line).with_context(|| self.stderr())
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The control socket.
    pub fn control(&self) -> &Path {
        &self.control
    }

    pub fn stderr(&self) -> String {
        let text = fs::read_to_string(self.folder.path().join("stderr")).unwrap_or_default();
        format!("{:?} wrote to standard error: {}", self.machine, text.trim_end())
    }

    pub fn ask(&self, command: &control::Command) -> anyhow::Result<Value> {
        ensure!(self.machine == Machine::Transom, "QEMU has no control socket of ours");
        Client::connect(&self.control)?.ask(command).with_context(|| self.stderr())
    }

    /// Fails if the machine has no display, or the display is off.
    pub fn screenshot(&self) -> anyhow::Result<(Picture, Vec<u8>)> {
        Client::connect(&self.control)?.screenshot().with_context(|| self.stderr())
    }

    pub fn resets(&self) -> anyhow::Result<u64> {
        let status = self.ask(&control::Command::Status)?;
        ensure!(status["pid"] == self.pid(), "another process answers: {status}");
        status["resets"].as_u64().with_context(|| format!("no number of resets: {status}"))
    }

    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        Ok(kill_process(pid.context("a process has a number")?, signal)?)
    }

    /// Sends SIGKILL after a delay, whatever the process does then.
    pub fn kill_after(&self, time: Duration) {
        // The process ID stays reserved until `wait` has collected the status.
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        spawn(move || {
            sleep(time);
            pid.map(|pid| kill_process(pid, Signal::KILL))
        });
    }

    /// Sends SIGKILL and waits for the end of the process. Fails if the process had ended by
    /// itself.
    pub fn kill(mut self) -> anyhow::Result<()> {
        let ended = self.child.try_wait()?;
        ensure!(ended.is_none(), "the process had ended by itself: {ended:?}\n{}", self.stderr());
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    pub fn wait(&mut self, within: Duration) -> anyhow::Result<ExitStatus> {
        let mut patience = Patience::new(within);
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if patience.until_next_look().is_zero() {
                let position = self.position();
                sleep(AFTER_A_KICK);
                let late = self.child.try_wait()?.is_some();
                let verdict = if late { LOST_WAKEUP } else { "it stands still" };
                let seen = [self.stderr(), position, self.console.tail()].join("\n");
                bail!("still running after {within:?}; {verdict}\n{seen}");
            }
            sleep(Duration::from_millis(10));
        }
    }

    /// Waits for the end of the process, and checks its status.
    pub fn ends_with(&mut self, status: i32, within: Duration) -> anyhow::Result<()> {
        let ended = self.wait(within)?;
        let tail = || format!("{}\n{}", self.stderr(), self.console.tail());
        ensure!(ended.code() == Some(status), "{ended}, not {status}\n{}", tail());
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// QEMU from its unpacked packages, with its own libraries: the program and its first arguments.
pub fn qemu() -> anyhow::Result<Command> {
    let tree = lab::asset("QEMU")?;
    let mut command = lab::unpacked("QEMU", "usr/bin/qemu-system-x86_64")?;
    command.env("QEMU_MODULE_DIR", tree.join("usr/lib/x86_64-linux-gnu/qemu"));
    for folder in ["usr/share/qemu", "usr/share/seabios"] {
        command.arg("-L").arg(tree.join(folder));
    }
    Ok(command)
}
