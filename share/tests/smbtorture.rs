//! The server judged by Samba's `smbtorture`. Tests that fail are listed, each with the reason; one
//! that passes must leave the list.

mod loopback;

use std::process::Command;

use anyhow::{Context, ensure};
use loopback::ACCOUNT;
use tempfile::TempDir;

/// Suites that always run.
const SHORT: [&str; 10] = [
    "smb2.connect",
    "smb2.credits",
    "smb2.delete-on-close-perms",
    "smb2.lock",
    "smb2.mkdir",
    "smb2.read",
    "smb2.rename",
    "smb2.rw",
    "smb2.sharemode",
    "smb2.tcon",
];
/// Suites that run with `TRANSOM_TESTS=all`.
const LONG: [&str; 6] = [
    "smb2.compound",
    "smb2.compound_find",
    "smb2.create",
    "smb2.dir",
    "smb2.getinfo",
    "smb2.setinfo",
];

const ACL: &str = "access control lists are fixed";
const CREATED: &str = "the time of creation cannot be set";

/// Tests of these suites that fail, with the reason.
const FAILING: &[(&str, &str)] = &[
    ("smb2.compound.related3", "files have no object ids"),
    ("smb2.compound.related4", ACL),
    ("smb2.compound.related7", ACL),
    ("smb2.compound.compound-padding", "there are no named streams"),
    ("smb2.compound.invalid2", "a wrong session has the error of an unknown one"),
    ("smb2.compound_find.compound_find_close", "answers have at most 1 MiB"),
    ("smb2.create.blob", "no space is reserved by a context of CREATE"),
    ("smb2.create.gentest", "a few invalid options have other errors"),
    ("smb2.create.open", CREATED),
    ("smb2.create.aclfile", ACL),
    ("smb2.create.acldir", ACL),
    ("smb2.create.nulldacl", ACL),
    ("smb2.create.dosattr_tmp_dir", "the attribute `temporary` cannot be set"),
    ("smb2.create.quota-fake-file", "there are no quotas"),
    ("smb2.delete-on-close-perms.OVERWRITE_IF Existing", ACL),
    ("smb2.delete-on-close-perms.CREATE_IF Existing", ACL),
    ("smb2.dir.one", CREATED),
    ("smb2.dir.modify", CREATED),
    ("smb2.getinfo.complex", CREATED),
    ("smb2.getinfo.fsinfo", "there are no quotas"),
    ("smb2.getinfo.qfs_buffercheck", "files have no object ids"),
    ("smb2.getinfo.qfile_buffercheck", "there are no extended attributes"),
    ("smb2.getinfo.normalized", "there are no named streams"),
    ("smb2.getinfo.getinfo_access", "there are no short names"),
    ("smb2.lock.replay_broken_windows", "there are no resilient handles"),
    ("smb2.lock.replay_smb3_specification_durable", "there are no leases"),
    ("smb2.rw.invalid", "the host has larger files than NTFS"),
    ("smb2.setinfo.setinfo", CREATED),
];

struct Net {
    port: u16,
    _root: TempDir,
    local: TempDir,
}

impl Net {
    fn start() -> anyhow::Result<Self> {
        let root = tempfile::tempdir()?;
        let port = loopback::start(root.path(), false)?;
        Ok(Self { port, _root: root, local: tempfile::tempdir()? })
    }
}

/// Runs a suite of `smbtorture`. Returns the names of its tests that passed, and that failed.
fn torture(net: &Net, suite: &str) -> anyhow::Result<(Vec<String>, Vec<String>)> {
    let port = format!("--option=smb ports={}", net.port);
    let mut command = Command::new("timeout");
    command.args(["60", "smbtorture", "//127.0.0.1/Data", "-U", ACCOUNT, &port, suite]);
    let output = command.current_dir(net.local.path()).output().context("smbtorture")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let (mut passed, mut failed) = (Vec::new(), Vec::new());
    let mut lines = said.lines().peekable();
    while let Some(line) = lines.next() {
        let Some((kind, name)) = line.split_once(": ") else { continue };
        let test = format!("{suite}.{}", name.trim_end_matches(" ["));
        match kind {
            "success" => passed.push(test),
            "failure" | "error" => failed.push(format!("{test}: {:?}", lines.peek())),
            _ => (),
        }
    }
    if output.status.code() == Some(124) {
        failed.push(format!("{suite}: not finished in time"));
    }
    Ok((passed, failed))
}

fn judge(suites: &[&str]) -> anyhow::Result<()> {
    let (mut failed, mut passed) = (Vec::new(), 0);
    for suite in suites {
        let net = Net::start()?;
        let (good, bad) = torture(&net, suite)?;
        ensure!(!good.is_empty() || !bad.is_empty(), "{suite} did not run");
        passed += good.len();
        failed.extend(bad);
    }
    let is = |test: &str, name: &str| test.strip_prefix(name).is_some_and(|it| it.starts_with(':'));
    let is_listed = |test: &&String| FAILING.iter().any(|(name, _)| is(test, name));
    let new: Vec<_> = failed.iter().filter(|test| !is_listed(test)).collect();
    ensure!(new.is_empty(), "{passed} passed; these fail and are not listed: {new:#?}");
    let ran = |name: &str| suites.iter().any(|suite| name.starts_with(&format!("{suite}.")));
    let fails = |name: &str| failed.iter().any(|test| is(test, name));
    let listed = FAILING.iter().map(|(name, _)| *name).filter(|name| ran(name));
    let good: Vec<_> = listed.filter(|name| !fails(name)).collect();
    ensure!(good.is_empty(), "{passed} passed; these are listed and pass: {good:#?}");
    ensure!(passed > 0, "no test passed");
    Ok(())
}

#[test]
fn locks_names_and_share_modes_are_those_of_windows() -> anyhow::Result<()> {
    judge(&SHORT)
}

#[test]
fn listings_information_and_compounds_are_those_of_windows() -> anyhow::Result<()> {
    let test = "listings_information_and_compounds_are_those_of_windows";
    if std::env::var_os("TRANSOM_TESTS").is_none_or(|value| value != "all") {
        skip::not_run(test, "TRANSOM_TESTS is not all");
        return Ok(());
    }
    judge(&LONG)
}
