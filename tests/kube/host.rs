//! A host with Podman and the image, behind a proxy that is Microsoft.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use tempfile::TempDir;
use transom_tests::engine::{self, Engine, IMAGE, Namespace};
use transom_tests::lab;
use transom_tests::program::{Running, said};
use transom_tests::rehearsal::{medium, steps};

/// The image behind the proxy: a site's own image with its proxy, and the proxy's certificate.
pub(crate) const OURS: &str = "localhost/transom-test:site";
/// Containers reach this address of the host through their network's router.
const PROXY: &str = "192.0.2.1:3128";
/// Bytes in a second on each connection, so that a download is seen while it goes on.
const SLOW: &str = "slow=4000000";

/// Control groups of version 1. Without systemd, Podman 4.3 makes a pod's group of version 2 so
/// that no device can be opened in it.
const GROUPS: &str = "set -e
umount --lazy /sys/fs/cgroup
mount -t tmpfs cgroup /sys/fs/cgroup
for name in devices memory pids cpu cpuset freezer blkio; do
  mkdir /sys/fs/cgroup/$name
  mount -t cgroup -o $name $name /sys/fs/cgroup/$name
done";

pub(crate) struct Host {
    pub(crate) engine: Engine,
    pub(crate) space: Namespace,
    pub(crate) folder: TempDir,
    _microsoft: Running,
}

/// Builds the image and the medium, on the host that the lab is on.
pub(crate) fn prepare() -> anyhow::Result<()> {
    if engine::is_here().is_err() {
        return Ok(());
    }
    medium::make()?;
    let archive = archive()?;
    // Podman adds to an archive that is there.
    fs::remove_file(&archive).ok();
    let save = ["save", "--quiet", "--format", "oci-archive", "--output"];
    let engine = Engine::get()?;
    said(engine.podman(&save).arg(&archive).arg(IMAGE)).map(drop)
}

fn archive() -> anyhow::Result<PathBuf> {
    Ok(lab::shared()?.join("image.tar"))
}

impl Host {
    pub(crate) fn new() -> anyhow::Result<Self> {
        if lab::inside() {
            said(Command::new("sh").args(["-c", GROUPS]))?;
        }
        let folder = tempfile::tempdir()?;
        let space = Namespace::make(&format!("transom-{}-site", std::process::id()))?;
        let (address, _) = PROXY.split_once(':').context("an address with a port")?;
        for words in ["link set lo up", &format!("address add {address}/32 dev lo")] {
            said(Command::new("ip").args(["-n", &space.name]).args(words.split(' ')))?;
        }
        let engine = Engine::with_store(&folder.path().join("podman"))?.within(&space);
        let microsoft = lab::vmm()?.with_file_name("fake-microsoft").display().to_string();
        let mut microsoft = space.run(&[&microsoft, PROXY]);
        microsoft.arg(folder.path()).arg(medium::path(steps::CLIENT.medium)?).arg(SLOW);
        let mut microsoft = Running::spawn(&mut microsoft)?;
        microsoft.says("SSL_CERT_FILE", 1)?;
        said(engine.podman(&["load", "--quiet", "--input"]).arg(archive()?))?;
        let recipe = format!(
            "FROM {IMAGE}\nCOPY authority.pem /etc/authority.pem\n\
             ENV HTTPS_PROXY=http://{PROXY} SSL_CERT_FILE=/etc/authority.pem\n"
        );
        fs::write(folder.path().join("Containerfile"), recipe)?;
        fs::write(folder.path().join(".containerignore"), "*\n!authority.pem\n")?;
        said(engine.podman(&["build", "--quiet", "--tag", OURS]).arg(folder.path()))?;
        Ok(Self { engine, space, folder, _microsoft: microsoft })
    }

    /// The log of a container, with all that comes.
    pub(crate) fn log(&self, container: &str) -> anyhow::Result<Running> {
        Running::spawn(&mut self.engine.podman(&["logs", "--follow", container]))
    }

    /// The answer to a GET request to this host, with its head.
    pub(crate) fn page(&self, address: &str) -> anyhow::Result<String> {
        let curl = ["curl", "--silent", "--show-error", "--include", "--max-time", "60"];
        said(self.space.run(&curl).arg(format!("http://{address}")))
    }
}
