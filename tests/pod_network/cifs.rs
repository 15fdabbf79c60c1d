//! The shared folder at the gateway under Linux' cifs, signed. The guest is user-mode Linux, a
//! kernel of Debian that is a program, with its network card on the pod's tap.
//!
//! Tests of others that fail are listed in `cifs/`, each with the reason; one that passes must
//! leave its list. Their sources are checkouts that variables name, in which `make` has run.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use tempfile::TempDir;
use transom_tests::compare::expected;
use transom_tests::{fsx, lab, say};

use crate::town::Town;

/// The files of each job: the first process, the script of udhcpc, and functions of jobs.
const FILES: [(&str, &str); 3] = [
    ("init", include_str!("cifs/init")),
    ("lease", include_str!("cifs/lease")),
    ("begin", include_str!("cifs/begin")),
];

/// Writes files with programs that verify them. The host must have the same ones.
pub(crate) fn keeps_files() -> anyhow::Result<()> {
    if !lab::everything() {
        let test = "the_shared_folder_keeps_what_linux_writes";
        skip::not_run(test, lab::THOROUGH);
        return Ok(());
    }
    let town = Town::new()?;
    let tree = lab::repository().join("tests");
    let variables = [("FSX", fsx::build()?), ("TREE", tree.clone())];
    let linux = Linux { town: &town, variables: &variables, seconds: 300 };
    linux.run(include_str!("cifs/programs"))?;
    let copy = town.volume(9, "shared/work/tree");
    let output = Command::new("diff").arg("-r").args([tree, copy]).output().context("diff")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    Ok(())
}

/// Connectathon's tests of network file systems.
pub(crate) fn passes_connectathon() -> anyhow::Result<()> {
    const TEST: &str = "the_shared_folder_passes_connectathons_tests";
    let Some(sources) = sources(TEST, "TRANSOM_CTHON", "lock/tlock64") else { return Ok(()) };
    let town = Town::new()?;
    let linux = Linux { town: &town, variables: &[("SOURCES", sources)], seconds: 900 };
    judge(&linux.run(include_str!("cifs/cthon"))?, include_str!("cifs/cthon.txt"))
}

/// The quick tests of xfstests.
pub(crate) fn passes_xfstests() -> anyhow::Result<()> {
    const TEST: &str = "the_shared_folder_passes_xfstests";
    let Some(sources) = sources(TEST, "TRANSOM_XFSTESTS", "ltp/fsx") else { return Ok(()) };
    let town = Town::new()?;
    // Tests that fill the file system do not fill this host's.
    let _volume = Memory::mount(town.volume(9, ""))?;
    let linux = Linux { town: &town, variables: &[("SOURCES", sources)], seconds: 14_400 };
    judge(&linux.run(include_str!("cifs/xfstests"))?, include_str!("cifs/xfstests.txt"))
}

/// The checkout that a variable names. It has this program when it is built.
fn sources(test: &str, variable: &str, program: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable).and_then(|path| fs::canonicalize(path).ok());
    let path = path.filter(|path| path.join(program).exists());
    if path.is_none() {
        skip::not_run(test, &format!("set {variable} to a checkout in which `make` has run"));
    }
    path
}

/// Compares the lines `NAME passed`, `NAME failed: …` and `NAME skipped: …` with the list of tests
/// that fail.
fn judge(said: &str, list: &str) -> anyhow::Result<()> {
    let with = |what: &str| {
        let names = said.lines().filter_map(|line| line.split_once(what)).map(|it| it.0.to_owned());
        names.filter(|name| !name.contains(' ')).collect::<Vec<_>>()
    };
    let [passed, failed, skipped] = [" passed", " failed", " skipped"].map(with);
    say!("{} passed, {} failed, {} skipped", passed.len(), failed.len(), skipped.len());
    ensure!(!passed.is_empty(), "no test passed: {said}");
    expected::check(&failed, &expected::read(list)?).with_context(|| said.to_owned())
}

/// A Linux in the place of a pod's guest.
struct Linux<'a> {
    town: &'a Town,
    variables: &'a [(&'static str, PathBuf)],
    /// The time for its job.
    seconds: u32,
}

impl Linux<'_> {
    /// Runs a script, and returns its output.
    fn run(&self, script: &str) -> anyhow::Result<String> {
        fs::create_dir_all(self.town.volume(9, "shared"))?;
        let mut pod = self.town.pod(9, &[("USERNAME", "ada"), ("PASSWORD", "secret")])?;
        let work = TempDir::new()?;
        let path = |name: &str| work.path().join(name);
        for (name, text) in FILES {
            fs::write(path(name), text)?;
            fs::set_permissions(path(name), fs::Permissions::from_mode(0o755))?;
        }
        let words = self.variables.iter().map(|(name, it)| format!("{name}='{}'\n", it.display()));
        let words = words.collect::<String>();
        fs::write(path("job"), format!("{words}. /run/work/begin\n{script}"))?;
        let mut command = self.command(&pod.guest_ns(), work.path());
        let console = command.arg(format!("transom.mac={}", pod.card.0)).output();
        let console = console.context("linux.uml of the package user-mode-linux")?.stdout;
        let [said, status] =
            ["out", "status"].map(|name| fs::read_to_string(path(name)).unwrap_or_default());
        let console = String::from_utf8_lossy(&console);
        ensure!(status.trim() == "0", "status {status:?}: {said}\nconsole: {console}");
        say!("{said}");
        pod.end()?;
        Ok(said)
    }

    /// The program without the word for its MAC address. Its root is ours, read-only.
    fn command(&self, space: &str, work: &Path) -> Command {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", &self.seconds.to_string(), "ip", "netns", "exec", space]);
        command.args(["linux.uml", "mem=1536M", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"]);
        command.args(["con=null", "con0=null,fd:1", "vec0:transport=raw,ifname=eth0"]);
        let work = work.display();
        command.arg(format!("uml_dir={work}")).arg(format!("init={work}/init"));
        command.arg(format!("transom.work={work}"));
        command
    }
}

/// A file system in memory, until it is dropped.
struct Memory(PathBuf);

impl Memory {
    fn mount(path: PathBuf) -> anyhow::Result<Self> {
        fs::create_dir_all(&path)?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=4g", "shared"]).arg(&path);
        ensure!(mount.status()?.success(), "mount {}", path.display());
        Ok(Self(path))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        Command::new("umount").arg("--lazy").arg(&self.0).status().ok();
    }
}
