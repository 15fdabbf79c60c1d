//! The server used by Samba's `smbclient`: every dialect, signed and encrypted.

mod loopback;

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use loopback::ACCOUNT;
use tempfile::TempDir;

/// Protection of a connection, as `smbclient` names it.
const SIGNED: &str = "sign";
const ENCRYPTED: &str = "encrypt";

struct Net {
    port: u16,
    root: TempDir,
    local: TempDir,
}

impl Net {
    fn start(read_only: bool) -> anyhow::Result<Self> {
        let root = tempfile::tempdir()?;
        let port = loopback::start(root.path(), read_only)?;
        Ok(Self { port, root, local: tempfile::tempdir()? })
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.root.path().join(name)
    }

    /// Runs commands of `smbclient` with a user, and returns its output.
    fn client(&self, user: &str, arguments: &[&str]) -> anyhow::Result<(bool, String)> {
        let mut command = Command::new("smbclient");
        command.args(["-p", &self.port.to_string(), "-U", user]).args(arguments);
        let output = command.current_dir(self.local.path()).output().context("smbclient")?;
        let said = [output.stdout, output.stderr].concat();
        Ok((output.status.success(), String::from_utf8_lossy(&said).into_owned()))
    }

    fn run(&self, dialect: &str, protection: &str, commands: &str) -> anyhow::Result<String> {
        let protection = format!("--client-protection={protection}");
        let share = ["//127.0.0.1/Data", "-m", dialect, &protection, "-c", commands];
        let (success, said) = self.client(ACCOUNT, &share)?;
        ensure!(success && !said.contains("NT_STATUS"), "{dialect} {protection}: {said}");
        Ok(said)
    }
}

/// Bytes that do not repeat.
fn noise(path: &Path, length: usize) -> anyhow::Result<Vec<u8>> {
    let mut state = 1_u64;
    let bytes: Vec<u8> = (0..length.div_ceil(8))
        .flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()
        })
        .collect();
    fs::write(path, &bytes)?;
    Ok(bytes)
}

#[test]
fn files_go_both_ways_in_every_dialect() -> anyhow::Result<()> {
    let net = Net::start(false)?;
    let data = noise(&net.local.path().join("big"), 40 << 20)?;
    fs::write(net.local.path().join("Grüße 🦀.txt"), "hello")?;
    for (dialect, protection) in [
        ("SMB2_10", SIGNED),
        ("SMB3_00", SIGNED),
        ("SMB3_00", ENCRYPTED),
        ("SMB3_02", ENCRYPTED),
        ("SMB3_11", SIGNED),
        ("SMB3_11", ENCRYPTED),
    ] {
        let put = r#"mkdir dir; cd dir; put big; put "Grüße 🦀.txt"; rename big BIG2; ls"#;
        let said = net.run(dialect, protection, put)?;
        ensure!(said.contains("Grüße 🦀.txt") && said.contains("BIG2"), "{said}");
        ensure!(fs::read(net.path("dir/BIG2"))? == data, "{dialect}: written otherwise");
        let get = r#"cd DIR; get bIg2 back; get "gRÜße 🦀.TXT" small; del BIG2; del "Grüße*""#;
        net.run(dialect, protection, get)?;
        ensure!(fs::read(net.local.path().join("back"))? == data, "{dialect}: read otherwise");
        ensure!(fs::read(net.local.path().join("small"))? == b"hello");
        net.run(dialect, protection, "rmdir dir")?;
        ensure!(fs::read_dir(net.root.path())?.count() == 0, "{dialect}: something is left");
    }
    Ok(())
}

#[test]
fn shares_are_listed() -> anyhow::Result<()> {
    let net = Net::start(false)?;
    let (success, said) = net.client(ACCOUNT, &["-L", "127.0.0.1"])?;
    ensure!(success && said.contains("Data") && said.contains("IPC$"), "{said}");
    Ok(())
}

#[test]
fn strangers_guests_and_smb_1_are_refused() -> anyhow::Result<()> {
    let net = Net::start(false)?;
    fs::write(net.path("file"), "x")?;
    for (user, options) in [
        ("docker%wrong", &[][..]),
        ("other%secret", &[]),
        ("%", &[]),
        (ACCOUNT, &["-m", "NT1", "--option=client min protocol=NT1"]),
        (ACCOUNT, &["-m", "SMB2_02"]),
    ] {
        let share = [&["//127.0.0.1/Data", "-c", "ls"], options].concat();
        let (success, said) = net.client(user, &share)?;
        ensure!(!success && !said.contains("file"), "{user} {options:?}: {said}");
    }
    net.run("SMB3_11", SIGNED, "ls")?;
    Ok(())
}

#[test]
fn a_read_only_share_is_only_read() -> anyhow::Result<()> {
    let net = Net::start(true)?;
    fs::write(net.path("file"), "x")?;
    fs::write(net.local.path().join("new"), "y")?;
    net.run("SMB3_11", SIGNED, "get file")?;
    for change in ["put new", "del file", "mkdir dir", "rename file other"] {
        ensure!(net.run("SMB3_11", SIGNED, change).is_err(), "{change}");
    }
    ensure!(fs::read_dir(net.root.path())?.count() == 1 && fs::read(net.path("file"))? == b"x");
    Ok(())
}

#[test]
fn names_that_windows_cannot_have_are_reachable() -> anyhow::Result<()> {
    let net = Net::start(false)?;
    fs::write(net.path("a:b?"), "odd")?;
    fs::write(net.path("ends."), "odd")?;
    std::os::unix::fs::symlink("/etc/passwd", net.path("link"))?;
    let said = net.run("SMB3_11", SIGNED, "ls")?;
    ensure!(said.contains("a\u{f022}b\u{f025}") && said.contains("ends\u{f029}"), "{said}");
    ensure!(!said.contains("link"), "{said}");
    let get = "get a\u{f022}b\u{f025} odd; rename ends\u{f029} plain";
    net.run("SMB3_11", SIGNED, get)?;
    ensure!(fs::read(net.local.path().join("odd"))? == b"odd" && net.path("plain").exists());
    ensure!(net.run("SMB3_11", SIGNED, "get link stolen").is_err());
    Ok(())
}
