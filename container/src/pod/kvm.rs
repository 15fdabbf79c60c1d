//! Checks that the host's KVM can run the machine, before anything is prepared for it.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::source::Source;
use crate::status::{Failure, Status};

/// Checks this device and the processor.
pub fn check(path: &Path, source: &Source) -> anyhow::Result<()> {
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(path);
    if let Err(error) = opened {
        return Err(open_error(path, &error));
    }
    check_virtualization(path, source, Path::new("/"))
}

/// An operating system needs hardware virtualization. The probe does not.
fn check_virtualization(path: &Path, source: &Source, root: &Path) -> anyhow::Result<()> {
    if *source == Source::Probe || virtualizes(root) {
        return Ok(());
    }
    let sentence = format!(
        "{}: no hardware virtualization (no vmx or svm in /proc/cpuinfo): Windows cannot run here: \
         use another host, or enable nested virtualization if this host is a virtual machine \
         itself, or set VERSION=probe to try the machine without it",
        path.display()
    );
    Err(Failure::new(Status::NoKvm, sentence))
}

/// Whether the processor has VMX or SVM. If that cannot be read, `vmm` will find out.
fn virtualizes(root: &Path) -> bool {
    let Ok(text) = std::fs::read_to_string(root.join("proc/cpuinfo")) else { return true };
    let mut flags = text.lines().filter(|line| line.starts_with("flags")).peekable();
    let has = |line: &str| line.split_ascii_whitespace().any(|it| it == "vmx" || it == "svm");
    flags.peek().is_none() || flags.any(has)
}

fn open_error(path: &Path, error: &std::io::Error) -> anyhow::Error {
    let out = match error.kind() {
        ErrorKind::NotFound => "enable virtualization in the host's firmware, load the module \
                                kvm_intel or kvm_amd, and pass the device to the container with \
                                --device /dev/kvm"
            .to_owned(),
        ErrorKind::PermissionDenied => {
            let (group, mode) = std::fs::metadata(path).map_or((0, 0), |it| (it.gid(), it.mode()));
            let advice = permission_advice(group, mode, Path::new("/"));
            format!("pass it to the container with --device /dev/kvm, and {advice}")
        }
        _ => "check that the host's processor supports virtualization, and that nested \
              virtualization is enabled if this host is a virtual machine itself"
            .to_owned(),
    };
    Failure::new(Status::NoKvm, format!("{}: {error}: {out}", path.display()))
}

/// How to let a process open a device file of this group and mode.
fn permission_advice(group: u32, mode: u32, root: &Path) -> String {
    const GROUP_READS_AND_WRITES: u32 = 0o060;
    if mode & GROUP_READS_AND_WRITES != GROUP_READS_AND_WRITES {
        return "let its group read and write it: on the host, chgrp kvm /dev/kvm and chmod 660 \
                /dev/kvm"
            .to_owned();
    }
    let nobodys = std::fs::read_to_string(root.join("proc/sys/kernel/overflowgid"));
    // The overflow group stands for all groups that the container does not map, such as those of a
    // rootless user.
    if nobodys.is_ok_and(|it| it.trim().parse() == Ok(group)) {
        return "let the process keep its user's groups (--group-add keep-groups, with crun)"
            .to_owned();
    }
    format!("let the process join group {group} (--group-add {group}, or supplementalGroups)")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn missing_kvm_is_reported_with_advice() {
        let folder = tempfile::tempdir().unwrap();
        let error = check(&folder.path().join("kvm"), &Source::Probe).unwrap_err();
        assert_eq!(Status::of(&error), Status::NoKvm);
        assert!(format!("{error:#}").contains("--device /dev/kvm"));
        assert!(check(Path::new("/dev/null"), &Source::Probe).is_ok());
    }

    #[test]
    fn an_emulating_kvm_is_accepted_for_the_probe_only() {
        let (kvm, medium) = (Path::new("/dev/kvm"), Source::Medium("/custom.iso".into()));
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        assert!(check_virtualization(kvm, &medium, root).is_ok(), "it is unknown");
        std::fs::create_dir(root.join("proc")).unwrap();
        let has = |flags: &str| std::fs::write(root.join("proc/cpuinfo"), flags).unwrap();
        has("processor\t: 0\nflags\t\t: fpu vme svmx hypervisor\n");
        let error = check_virtualization(kvm, &medium, root).unwrap_err();
        assert_eq!(Status::of(&error), Status::NoKvm);
        let sentence = error.to_string();
        assert!(sentence.contains("VERSION=probe") && !sentence.contains("--"), "{sentence}");
        assert!(check_virtualization(kvm, &Source::Probe, root).is_ok());
        for flag in ["vmx", "svm"] {
            has(&format!("processor\t: 0\nflags\t\t: fpu {flag} vme\n"));
            assert!(check_virtualization(kvm, &medium, root).is_ok());
        }
    }

    #[test]
    fn advice_names_a_group_missing_in_the_container() {
        let root = tempfile::tempdir().unwrap();
        assert!(permission_advice(65534, 0o660, root.path()).contains("--group-add 65534"));
        std::fs::create_dir_all(root.path().join("proc/sys/kernel")).unwrap();
        std::fs::write(root.path().join("proc/sys/kernel/overflowgid"), "65534\n").unwrap();
        assert!(permission_advice(65534, 0o660, root.path()).contains("--group-add keep-groups"));
        assert!(permission_advice(993, 0o660, root.path()).contains("--group-add 993"));
        assert!(permission_advice(0, 0o600, root.path()).contains("chmod 660"));
    }
}
