//! Missing rights: no /dev/kvm, no right to open it, read-only files, and locked files.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use host::lock;
use tempfile::TempDir;
use transom_tests::flash;
use transom_tests::program::{Running, finish, not_run, vmm};

use crate::{FAILED, NO_KVM, listing, one_line};

/// Whether this test may hide devices and change its user.
fn may_change_the_world(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    let tries = Command::new("unshare").args(["--mount", "true"]).output();
    if root && tries.is_ok_and(|output| output.status.success()) {
        return true;
    }
    not_run(test, "it needs root, and unshare(1) with mounts of its own");
    false
}

/// A folder that every user may enter, with a copy of the program.
fn open_folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("its owner");
    let program = folder.path().join("vmm");
    fs::copy(vmm(), &program).expect("a copy of the program");
    (folder, program)
}

/// Runs a shell script with its own mounts; `$1` is the program.
fn in_a_world_of_its_own(script: &str, folder: &Path, status: i32) -> String {
    let before = listing(folder);
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-ec", script, "sh"]).arg(vmm()).current_dir(folder);
    let said = one_line(&finish(&mut command).expect("unshare"), script, status);
    assert_eq!(listing(folder), before, "{script} left something behind");
    said
}

#[test]
fn explains_how_to_get_kvm_when_it_is_missing() {
    if !may_change_the_world("explains_how_to_get_kvm_when_it_is_missing") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    // With an empty folder over /dev, the program reaches only files that it has open.
    let hide = "mount -t tmpfs none /dev && exec \"$1\"";
    let script = format!("{hide} run --control c < /proc/version");
    let said = in_a_world_of_its_own(&script, folder.path(), NO_KVM);
    for part in ["/dev/kvm does not exist", "kvm_intel", "--device /dev/kvm"] {
        assert!(said.contains(part), "{said}");
    }
    let said = in_a_world_of_its_own(&format!("{hide} inspect"), folder.path(), NO_KVM);
    assert!(said.contains("/dev/kvm does not exist"), "{said}");
    let mut doctor = Command::new("unshare");
    doctor.args(["--mount", "sh", "-ec", &format!("{hide} doctor"), "sh"]).arg(vmm());
    let ended = finish(&mut doctor).expect("unshare");
    assert_eq!((ended.status, ended.stderr.as_str()), (NO_KVM, ""));
    assert!(ended.stdout.contains("/dev/kvm does not exist"), "{}", ended.stdout);
    // A device that is not KVM.
    let script = "mount --bind /dev/null /dev/kvm && exec \"$1\" run";
    if Path::new("/dev/kvm").exists() {
        let said = in_a_world_of_its_own(script, folder.path(), NO_KVM);
        assert!(said.contains("/dev/kvm"), "{said}");
    }
}

#[test]
fn explains_how_to_get_permission_for_kvm() {
    if !may_change_the_world("explains_how_to_get_permission_for_kvm") {
        return;
    }
    let (folder, program) = open_folder();
    // In the place of /dev/kvm, a file that only its owner may open.
    let script = "mount -t tmpfs none /dev && touch /dev/kvm && chmod 600 /dev/kvm && \
                  exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$1\" run \
                  < /proc/version";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-ec", script, "sh"]).arg(program);
    let ended = finish(command.current_dir(folder.path())).expect("unshare");
    let said = one_line(&ended, "vmm run as nobody", NO_KVM);
    assert!(said.contains("/dev/kvm may not be opened") && said.contains("usermod"), "{said}");
}

#[test]
fn reports_a_read_only_variable_store() {
    if !may_change_the_world("reports_a_read_only_variable_store") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    flash::write(folder.path());
    let script = "mount --bind vars.fd vars.fd && mount -o remount,bind,ro vars.fd && \
                  exec \"$1\" run --firmware code.fd --vars vars.fd";
    let said = in_a_world_of_its_own(script, folder.path(), FAILED);
    for part in ["vars.fd is not writable", "copy"] {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn reports_the_process_that_holds_a_variable_store() {
    if !Path::new("/dev/kvm").exists() {
        not_run("reports_the_process_that_holds_a_variable_store", "there is no /dev/kvm");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    flash::write(folder.path());
    let device = "flash,code=code.fd,vars=vars.fd";
    let mut holder = Command::new(vmm());
    holder.args(["run", "--device", device, "--cmdline", "then=halt"]).current_dir(folder.path());
    let mut holder = Running::spawn(&mut holder).expect("vmm");
    holder.says("transom probe", 1).expect("the probe");
    let words = ["run", "--firmware", "code.fd", "--vars", "vars.fd"];
    let said = crate::refusal(folder.path(), &words, FAILED);
    let pid = holder.pid().as_raw_nonzero().to_string();
    for part in ["vars.fd is in use by", &pid, "vmm"] {
        assert!(said.contains(part), "{said}");
    }
    // The lock ends with its holder, however the holder ends.
    drop(holder);
    let path = folder.path().join("vars.fd");
    let file = File::options().read(true).write(true).open(&path).expect("a file");
    lock::exclusive(&file, &path).expect("the lock is free");
}
