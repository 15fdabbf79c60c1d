//! Linux as a guest: it boots into a shell that runs a test's commands, line by line.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use crate::guest::{Guest, Running};
use crate::lab;

/// The script of the guest's first process. Two marks enclose a command's output.
const LOOP: &str = include_str!("../lab/guest-loop");

/// Only emergencies are printed on the console, between the commands' output; `dmesg` has the rest.
const CMDLINE: &str = "console=ttyS0 loglevel=1";

/// A Linux guest to be started: its machine, and the contents of its initial RAM disk.
#[derive(Clone, Debug)]
pub struct Linux {
    guest: Guest,
    words: String,
    first: String,
    modules: Vec<String>,
    files: Vec<(String, String)>,
}

impl Linux {
    pub fn new(guest: Guest, kernel: &Path) -> Self {
        let guest = guest.kernel(kernel);
        let (words, first) = Default::default();
        Self { guest, words, first, modules: Vec::new(), files: Vec::new() }
    }

    pub fn cmdline(mut self, words: &str) -> Self {
        self.words = format!("{}{words} ", self.words);
        self
    }

    /// Adds a shell line that the guest runs before it reports that it is ready.
    pub fn first(mut self, line: &str) -> Self {
        self.first = format!("{}{line}\n", self.first);
        self
    }

    /// Loads modules, given by the folder of the asset `MODULES` and their names.
    pub fn modules(mut self, folder: &Path, names: &[&str]) -> Self {
        self.modules = vec!["--kernel-modules".into(), folder.display().to_string()];
        self.modules.extend(names.iter().map(|&name| name.to_owned()));
        self
    }

    pub fn add(mut self, host: &Path, guest: &str) -> Self {
        self.modules.extend(["--add".into(), format!("{}:{guest}", host.display())]);
        self
    }

    /// Copies a program of this host, and its libraries, into the guest.
    pub fn program(mut self, path: &str) -> anyhow::Result<Self> {
        let output = Command::new("ldd").arg(path).output().context("ldd")?;
        ensure!(output.status.success(), "ldd {path}: {}", output.status);
        let lines = String::from_utf8(output.stdout).context("ldd")?;
        let libraries = lines.split_whitespace().filter(|word| word.starts_with('/'));
        for file in libraries.chain([path]) {
            self = self.add(Path::new(file), file);
        }
        Ok(self)
    }

    pub fn file(mut self, name: &str, text: &str) -> Self {
        self.files.push((name.trim_start_matches('/').into(), text.into()));
        self
    }

    /// Starts the guest and waits until it takes commands.
    pub fn boot(&self, within: Duration) -> anyhow::Result<Booted> {
        let mut booted = Booted { running: self.guest()?.start()? };
        booted.ready(within)?;
        Ok(booted)
    }

    /// The guest with its initial RAM disk and its command line.
    pub fn guest(&self) -> anyhow::Result<Guest> {
        let cmdline = format!("{CMDLINE} {}", self.words);
        Ok(self.guest.clone().initrd(self.initrd()?).cmdline(cmdline.trim_end()))
    }

    /// The initial RAM disk. The slow part is made once; the test's own files are appended as a
    /// second archive, which Linux reads too.
    pub fn initrd(&self) -> anyhow::Result<PathBuf> {
        let shared = lab::shared()?;
        fs::create_dir_all(&shared).with_context(|| shared.display().to_string())?;
        let first = shared.join(format!("{:016x}.initrd", number_of(&self.modules)));
        if !first.exists() {
            let mut command = Command::new(lab::repository().join("tests/lab/initrd"));
            command.arg(&first).args(&self.modules).arg("--busybox").arg(lab::asset("BUSYBOX")?);
            let status = command.status().context("tests/lab/initrd")?;
            ensure!(status.success(), "tests/lab/initrd: {status}");
        }
        let mut files = self.files.clone();
        files.push(("run.sh".into(), format!("{}{LOOP}", self.first)));
        let mut bytes = fs::read(&first).with_context(|| first.display().to_string())?;
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes.extend(archive(&files));
        let whole = first.with_extension(format!("{:016x}", number_of(&files)));
        // Another lab may be reading the same file at this moment.
        let mut new = tempfile::NamedTempFile::new_in(&shared)?;
        new.write_all(&bytes)?;
        new.persist(&whole).with_context(|| whole.display().to_string())?;
        Ok(whole)
    }
}

fn number_of(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

/// A cpio archive of plain files, in the format that Linux unpacks (`newc`).
fn archive(files: &[(String, String)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let end = ("TRAILER!!!".to_owned(), String::new());
    for (index, (name, text)) in files.iter().chain([&end]).enumerate() {
        let mode = 0o100_644;
        let numbers = [index + 1, mode, 0, 0, 1, 0, text.len(), 0, 0, 0, 0, name.len() + 1, 0];
        bytes.extend(b"070701");
        numbers.iter().for_each(|number| bytes.extend(format!("{number:08x}").bytes()));
        bytes.extend(name.bytes().chain([0]));
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes.extend(text.bytes());
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub output: String,
    pub status: i32,
}

pub struct Booted {
    pub running: Running,
}

impl Booted {
    /// Waits until the guest takes commands, after a boot.
    pub fn ready(&mut self, within: Duration) -> anyhow::Result<()> {
        let words = [">>>transom ready\n", "Kernel panic"];
        match self.running.expect_any(&words, within)? {
            (0, _) => Ok(()),
            _ => bail!("the guest's kernel panicked\n{}", self.running.console().tail()),
        }
    }

    /// Runs a command and returns its result, whether it succeeds or not.
    pub fn try_run(&mut self, command: &str, within: Duration) -> anyhow::Result<Answer> {
        self.begin(command)?;
        self.finish(command, within)
    }

    /// Begins a command without waiting for it.
    pub fn begin(&mut self, command: &str) -> anyhow::Result<()> {
        self.running.send(command)
    }

    /// Waits for the end of a command that `begin` started.
    pub fn finish(&mut self, command: &str, within: Duration) -> anyhow::Result<Answer> {
        self.running.expect(">>>transom output\n", within)?;
        let output = self.running.expect(">>>transom done ", within)?;
        let status = self.running.expect("\n", within)?;
        let status = status.trim().parse().with_context(|| format!("{command}: {status:?}"))?;
        Ok(Answer { output, status })
    }

    /// Runs a command that must succeed, and returns its output.
    pub fn run(&mut self, command: &str, within: Duration) -> anyhow::Result<String> {
        let Answer { output, status } = self.try_run(command, within)?;
        ensure!(status == 0, "{command} ended with {status}: {output}");
        Ok(output)
    }

    /// Seconds since the guest's boot, by the guest's clock.
    pub fn uptime(&mut self, within: Duration) -> anyhow::Result<f64> {
        let said = self.run("cut -d ' ' -f 1 /proc/uptime", within)?;
        said.trim().parse().with_context(|| format!("/proc/uptime: {said}"))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn cpio_reads_the_archive() {
        use std::io::Write;
        let folder = tempfile::tempdir().unwrap();
        let mut cpio = Command::new("cpio")
            .args(["-i", "--quiet"])
            .current_dir(folder.path())
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let files = [("a".into(), "one\n".into()), ("bc".into(), "12345".into())];
        cpio.stdin.take().unwrap().write_all(&archive(&files)).unwrap();
        assert!(cpio.wait().unwrap().success());
        assert_eq!(fs::read_to_string(folder.path().join("a")).unwrap(), "one\n");
        assert_eq!(fs::read_to_string(folder.path().join("bc")).unwrap(), "12345");
    }
}
