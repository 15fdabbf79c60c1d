//! A guest on our machine, or the same guest on QEMU's q35, for comparison.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use vmm::control::{self, Client};
use vmm::screenshot::Picture;

use crate::console::Console;
use crate::{lab, standstill};

/// Whose machine it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// Ours.
    Transom,
    /// QEMU's q35 with KVM.
    Qemu,
}

/// A guest to be started. The values are the words of `vmm run`, for either machine.
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
    words: Vec<OsString>,
}

impl Guest {
    /// A guest of our machine: one processor, 512 MiB.
    pub fn transom() -> Self {
        Self::on(Machine::Transom)
    }

    /// The same guest on QEMU: its asset is `QEMU`.
    pub fn qemu() -> Self {
        Self::on(Machine::Qemu)
    }

    /// A guest of that machine.
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
            words: Vec::new(),
        }
    }

    /// Processors: `8,sockets=2,cores=2,threads=2`.
    pub fn cpus(mut self, cpus: &str) -> Self {
        self.cpus = cpus.into();
        self
    }

    /// Memory: `3G`.
    pub fn memory(mut self, memory: &str) -> Self {
        self.memory = memory.into();
        self
    }

    /// Our machine's display: `1920x1080`. There is none otherwise: firmware that writes to two
    /// screens is slow where a processor is emulated.
    pub fn display(mut self, display: &str) -> Self {
        self.display = display.into();
        self
    }

    /// A Linux kernel.
    pub fn kernel(mut self, path: impl Into<PathBuf>) -> Self {
        self.kernel = Some(path.into());
        self
    }

    /// Its initial RAM disk.
    pub fn initrd(mut self, path: impl Into<PathBuf>) -> Self {
        self.initrd = Some(path.into());
        self
    }

    /// Its command line.
    pub fn cmdline(mut self, words: &str) -> Self {
        self.cmdline = words.into();
        self
    }

    /// UEFI firmware, and the store of variables that it writes to.
    pub fn firmware(mut self, code: impl Into<PathBuf>, vars: impl Into<PathBuf>) -> Self {
        self.firmware = Some((code.into(), vars.into()));
        self
    }

    /// A TPM, at the control socket of a swtpm.
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

    /// A further word for this machine's own program.
    pub fn word(mut self, word: impl Into<OsString>) -> Self {
        self.words.push(word.into());
        self
    }

    /// Whose machine it is.
    pub fn machine(&self) -> Machine {
        self.machine
    }

    /// Switches it on.
    ///
    /// # Errors
    ///
    /// When the program cannot be started.
    pub fn start(&self) -> anyhow::Result<Running> {
        self.start_as(Ok)
    }

    /// Switches it on by the command that is made of its own: where else it runs, or as whom.
    ///
    /// # Errors
    ///
    /// When there is no such command, or it cannot be started.
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
        let tree = lab::asset("QEMU")?;
        let libraries = tree.join("usr/lib/x86_64-linux-gnu");
        // From its unpacked packages, with its own libraries.
        let mut command = Command::new(tree.join("lib64/ld-linux-x86-64.so.2"));
        command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        command.arg("--library-path").arg(libraries);
        command.arg(tree.join("usr/bin/qemu-system-x86_64"));
        for folder in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(tree.join(folder));
        }
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

/// A guest that was started. It ends with this value.
pub struct Running {
    machine: Machine,
    child: Child,
    console: Console,
    control: PathBuf,
    folder: TempDir,
}

impl Running {
    /// Its first serial port.
    pub fn console(&mut self) -> &mut Console {
        &mut self.console
    }

    /// Waits for words on the console; the answer is what came before them.
    ///
    /// # Errors
    ///
    /// When they do not come in time, with the last that came and what the program complained of.
    pub fn expect(&mut self, words: &str, within: Duration) -> anyhow::Result<String> {
        self.expect_any(&[words], within).map(|(_, before)| before)
    }

    /// Waits for the first of several words.
    ///
    /// # Errors
    ///
    /// When none comes in time.
    pub fn expect_any(
        &mut self,
        words: &[&str],
        within: Duration,
    ) -> anyhow::Result<(usize, String)> {
        let found = self.console.expect_any(words, within);
        found.with_context(|| format!("{}\n{}", self.complaints(), self.place()))
    }

    /// Where the guest is, if it can still be asked: twice, so that a loop looks like one; and what
    /// its host did between the two.
    fn place(&self) -> String {
        let ask = || {
            let registers = self.ask(&control::Command::Registers).ok()?;
            let all = registers["registers"].as_array()?;
            Some(all.iter().filter_map(Value::as_str).collect::<Vec<_>>().join("\n"))
        };
        let seen = [ask(), Some(standstill::watch()), ask()];
        seen.into_iter().flatten().collect::<Vec<_>>().join("\n---\n")
    }

    /// Types a line on the console.
    ///
    /// # Errors
    ///
    /// When the program is gone.
    pub fn send(&mut self, line: &str) -> anyhow::Result<()> {
        self.console.send(line).with_context(|| self.complaints())
    }

    /// The number of its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What the program wrote to standard error.
    pub fn complaints(&self) -> String {
        let text = fs::read_to_string(self.folder.path().join("stderr")).unwrap_or_default();
        format!("{:?} said: {}", self.machine, text.trim_end())
    }

    /// Asks our machine at its control socket.
    ///
    /// # Errors
    ///
    /// When it says no, or is not ours.
    pub fn ask(&self, command: &control::Command) -> anyhow::Result<Value> {
        ensure!(self.machine == Machine::Transom, "QEMU does not speak our language");
        Client::connect(&self.control)?.ask(command).with_context(|| self.complaints())
    }

    /// What our machine's display shows.
    ///
    /// # Errors
    ///
    /// When it has none, or it is off.
    pub fn screenshot(&self) -> anyhow::Result<(Picture, Vec<u8>)> {
        Client::connect(&self.control)?.screenshot().with_context(|| self.complaints())
    }

    /// How often the machine was reset.
    ///
    /// # Errors
    ///
    /// When it does not answer.
    pub fn resets(&self) -> anyhow::Result<u64> {
        let status = self.ask(&control::Command::Status)?;
        ensure!(status["pid"] == self.pid(), "another process answers: {status}");
        status["resets"].as_u64().with_context(|| format!("no number of resets: {status}"))
    }

    /// Sends a signal.
    ///
    /// # Errors
    ///
    /// When the process is gone.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        Ok(kill_process(pid.context("a process has a number")?, signal)?)
    }

    /// Kills the process after that time, as `kill -9` does, whatever it does then.
    pub fn kill_after(&self, time: Duration) {
        // The number stays this process's until `wait` has seen its end.
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        spawn(move || {
            sleep(time);
            pid.map(|pid| kill_process(pid, Signal::KILL))
        });
    }

    /// Ends the process at once, as `kill -9` does, and waits until it is gone.
    ///
    /// # Errors
    ///
    /// When it had ended by itself.
    pub fn kill(mut self) -> anyhow::Result<()> {
        let ended = self.child.try_wait()?;
        ensure!(ended.is_none(), "it had ended: {ended:?}\n{}", self.complaints());
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// When it does not end in time.
    pub fn wait(&mut self, within: Duration) -> anyhow::Result<ExitStatus> {
        let end = Instant::now() + within;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > end {
                bail!("no end within {within:?}\n{}\n{}", self.complaints(), self.console.tail());
            }
            sleep(Duration::from_millis(10));
        }
    }

    /// Waits for its end, which must be with this status.
    ///
    /// # Errors
    ///
    /// When it ends otherwise, or not in time.
    pub fn ends_with(&mut self, status: i32, within: Duration) -> anyhow::Result<()> {
        let ended = self.wait(within)?;
        let tail = || format!("{}\n{}", self.complaints(), self.console.tail());
        ensure!(ended.code() == Some(status), "{ended}, not {status}\n{}", tail());
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // That it is gone already is fine.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
