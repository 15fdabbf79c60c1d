//! Podman with a private store, the container image, and network namespaces.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

use crate::lab;
use crate::program::{self, forget_the_test, said};

/// Podman's settings: the default limits exceed those of some hosts; the log is a file, because a
/// host may have no journal; and `podman kube` of Debian 12 ignores terminationGracePeriodSeconds.
const SETTINGS: &str = "[containers]
default_ulimits = [\"nofile=4096:4096\", \"nproc=4096:4096\"]
log_driver = \"k8s-file\"

[engine]
stop_timeout = 120

[network]
network_backend = \"netavark\"
";
pub const IMAGE: &str = "localhost/transom-test";
/// The image for debugging.
pub const DEBUG_IMAGE: &str = "localhost/transom-test:debug";

/// Whether a test of containers can run on this host. Reports it as not run otherwise.
pub fn runs_here(test: &str) -> bool {
    program::runs_here(test, is_here())
}

/// An error with the reason if this host has no usable engine.
pub fn is_here() -> Result<(), &'static str> {
    let says = |program: &str| {
        Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status()
    };
    for (program, why) in [
        ("podman", "there is no podman"),
        ("runc", "there is no runc"),
        ("curl", "there is no curl"),
    ] {
        if says(program).is_err() {
            return Err(why);
        }
    }
    if !rustix::process::geteuid().is_root() {
        return Err("containers with devices need root");
    }
    Ok(())
}

/// Podman, with a store of its own.
pub struct Engine {
    words: Vec<String>,
    settings: PathBuf,
}

impl Engine {
    /// The engine that all tests share; the first call builds the image.
    pub fn get() -> Result<&'static Self> {
        static ENGINE: OnceLock<Result<Engine, String>> = OnceLock::new();
        let made = ENGINE.get_or_init(|| Self::make().map_err(|error| format!("{error:#}")));
        made.as_ref().map_err(|error| anyhow::anyhow!("{error}"))
    }

    fn make() -> Result<Self> {
        let engine = Self::with_store(&lab::temporary()?.join("podman"))?;
        engine.build()?;
        Ok(engine)
    }

    /// An engine whose images, containers and volumes are in this folder.
    pub fn with_store(store: &Path) -> Result<Self> {
        let at = |name: &str| store.join(name).display().to_string();
        let words = [
            "podman",
            "--root",
            &at("root"),
            "--runroot",
            &at("run"),
            "--storage-driver",
            "vfs",
            "--runtime",
            "runc",
            "--cgroup-manager",
            "cgroupfs",
        ];
        fs::create_dir_all(store)?;
        let settings = store.join("containers.conf");
        fs::write(&settings, SETTINGS)?;
        Ok(Self { words: words.map(str::to_owned).to_vec(), settings })
    }

    /// The same engine in a network namespace. It keeps the host's control groups, unlike with
    /// `ip netns exec`.
    pub fn within(&self, space: &Namespace) -> Self {
        let net = format!("--net=/run/netns/{}", space.name);
        let words = [&["nsenter".to_owned(), net], &self.words[..]].concat();
        Self { words, settings: self.settings.clone() }
    }

    /// Builds the image.
    pub fn build(&self) -> Result<()> {
        self.build_with(&[])
    }

    /// Builds the image with further options of the script.
    pub fn build_with(&self, words: &[&str]) -> Result<()> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/image");
        let mut build = Command::new(script);
        build.args(words);
        build.args(["--profile", profile()?, "--podman", &self.words.join(" "), IMAGE]);
        build.env("CONTAINERS_CONF", &self.settings);
        forget_the_test(&mut build);
        said(&mut build).context("the image").map(drop)
    }

    /// ID and digest of the image.
    pub fn image(&self) -> Result<String> {
        said(&mut self.podman(&["image", "inspect", "--format", "{{.Id}} {{.Digest}}", IMAGE]))
    }

    /// The image's metadata (`podman image inspect`).
    pub fn about(&self) -> Result<serde_json::Value> {
        let said = said(&mut self.podman(&["image", "inspect", IMAGE]))?;
        let mut all: Vec<serde_json::Value> = serde_json::from_str(&said)?;
        all.pop().context("no image")
    }

    /// A file of the image, read without starting a container.
    pub fn file(&self, path: &str) -> Result<Vec<u8>> {
        let name = said(&mut self.podman(&["create", IMAGE]))?.trim().to_owned();
        let folder = tempfile::tempdir()?;
        let to = folder.path().join("file");
        let copied =
            said(&mut self.podman(&["cp", &format!("{name}:{path}"), &to.display().to_string()]));
        said(&mut self.podman(&["rm", &name]))?;
        copied?;
        Ok(fs::read(to)?)
    }

    /// The command `podman` with these arguments.
    pub fn podman(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).args(words).env("CONTAINERS_CONF", &self.settings);
        command
    }
}

/// The cargo profile of this test.
fn profile() -> Result<&'static str> {
    let test = std::env::current_exe()?;
    let folder = test.ancestors().nth(2).and_then(Path::file_name).and_then(|it| it.to_str());
    match folder {
        Some("debug") => Ok("dev"),
        Some("release") => Ok("release"),
        Some("test-fast") => Ok("test-fast"),
        other => bail!("{other:?} is not the folder of a profile"),
    }
}

/// A network namespace; dropping it deletes the namespace.
pub struct Namespace {
    pub name: String,
}

impl Namespace {
    pub fn make(name: &str) -> Result<Self> {
        said(Command::new("ip").args(["netns", "add", name]))?;
        Ok(Self { name: name.into() })
    }

    /// A command in this namespace.
    pub fn run(&self, words: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).args(words);
        command
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        said(Command::new("ip").args(["netns", "delete", &self.name])).ok();
    }
}
