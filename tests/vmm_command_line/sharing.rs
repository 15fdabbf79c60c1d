//! Disks that several machines open at the same time, and images of which a part is missing.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use transom_tests::image::qemu_img;
use transom_tests::program::{Running, not_run, vmm};

use crate::{FAILED, refusal};

/// A loop device on a file; dropping it detaches the device.
struct Loop(PathBuf);

impl Loop {
    fn on(file: &Path) -> Option<Self> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let device = output.status.success().then(|| String::from_utf8(output.stdout).ok())??;
        Some(Self(device.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        Command::new("losetup").arg("--detach").arg(&self.0).status().ok();
    }
}

/// A folder with `disk.img`, `disk.qcow2`, `base.img`, and `one.qcow2` and `two.qcow2`, whose
/// backing file is `base.img`.
fn disks() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    for name in ["disk.img", "base.img"] {
        File::create(path(name)).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    }
    qemu_img(&["create", "-q", "-f", "qcow2"], &path("disk.qcow2"), &["1M"]).expect("an image");
    for name in ["one.qcow2", "two.qcow2"] {
        let words = ["create", "-q", "-f", "qcow2", "-b", "base.img", "-F", "raw"];
        qemu_img(&words, &path(name), &[]).expect("an image");
    }
    folder
}

/// Starts a machine with these disks.
fn machine(folder: &Path, disks: &[&str]) -> Running {
    let mut command = Command::new(vmm());
    command.args(["run", "--cmdline", "checks=none then=halt"]).current_dir(folder);
    for disk in disks {
        command.args(["--device", disk]);
    }
    let mut machine = Running::spawn(&mut command).expect("vmm");
    machine.says("]}\n", 1).expect("a guest");
    machine
}

/// The error of a machine that must not open these disks.
fn refused(folder: &Path, disks: &[&str]) -> String {
    let mut words = vec!["run", "--control", "c"];
    for disk in disks {
        words.extend(["--device", disk]);
    }
    refusal(folder, &words, FAILED)
}

fn has(machine: &Running, disk: &str) -> String {
    format!("{disk} is in use by process {} (vmm)", machine.pid().as_raw_nonzero())
}

/// Whether this host has a KVM for the first machine; otherwise the test is reported as not run.
fn runs_here(test: &str) -> bool {
    let here = vmm::kvm::KvmSupport::of_this_host() != vmm::kvm::KvmSupport::None;
    if !here {
        not_run(test, "there is no usable /dev/kvm");
    }
    here
}

#[test]
fn a_second_machine_is_refused_with_the_process_using_the_disk() {
    if !runs_here("a_second_machine_is_refused_with_the_process_using_the_disk") {
        return;
    }
    let folder = disks();
    let (one, other) = ("virtio-blk", "nvme");
    for (name, one, other) in [("disk.img", one, other), ("disk.qcow2", other, one)] {
        let first = machine(folder.path(), &[&format!("{one},path={name}")]);
        for second in [one, other] {
            for options in ["", ",readonly", ",overlay"] {
                let said = refused(folder.path(), &[&format!("{second},path={name}{options}")]);
                assert!(said.starts_with(second) && said.contains(&has(&first, name)), "{said}");
            }
        }
        drop(first);
        machine(folder.path(), &[&format!("{other},path={name}")]);
    }
}

#[test]
fn read_only_machines_share_a_disk() {
    if !runs_here("read_only_machines_share_a_disk") {
        return;
    }
    let folder = disks();
    for name in ["disk.img", "disk.qcow2"] {
        let readers = [
            machine(folder.path(), &[&format!("virtio-blk,path={name},readonly")]),
            machine(folder.path(), &[&format!("nvme,path={name},readonly")]),
            machine(folder.path(), &[&format!("nvme,path={name},overlay")]),
        ];
        let said = refused(folder.path(), &[&format!("nvme,path={name}")]);
        assert!(readers.iter().any(|it| said.contains(&has(it, name))), "{said}");
        drop(readers);
        machine(folder.path(), &[&format!("nvme,path={name}")]);
    }
}

#[test]
fn a_backing_file_is_shared_for_reading_and_never_written() {
    if !runs_here("a_backing_file_is_shared_for_reading_and_never_written") {
        return;
    }
    let folder = disks();
    let tops = [
        machine(folder.path(), &["virtio-blk,path=one.qcow2"]),
        machine(folder.path(), &["nvme,path=two.qcow2"]),
        machine(folder.path(), &["nvme,path=base.img,readonly"]),
    ];
    for kind in ["virtio-blk", "nvme"] {
        let said = refused(folder.path(), &[&format!("{kind},path=base.img")]);
        assert!(tops.iter().any(|it| said.contains(&has(it, "base.img"))), "{said}");
        let said = refused(folder.path(), &[&format!("{kind},path=one.qcow2")]);
        assert!(said.contains(&has(&tops[0], "one.qcow2")), "{said}");
    }
    drop(tops);
    let writer = machine(folder.path(), &["nvme,path=base.img"]);
    for kind in ["virtio-blk", "nvme"] {
        for options in ["", ",readonly", ",overlay"] {
            let said = refused(folder.path(), &[&format!("{kind},path=one.qcow2{options}")]);
            assert!(said.contains("one.qcow2: its backing file"), "{said}");
            assert!(said.contains(&has(&writer, "base.img")), "{said}");
        }
    }
}

#[test]
fn a_disk_can_be_attached_only_once() {
    let folder = disks();
    std::os::unix::fs::symlink("disk.img", folder.path().join("link.img")).expect("a link");
    fs::hard_link(folder.path().join("disk.img"), folder.path().join("same.img")).expect("a name");
    for (disks, second, name) in [
        (["nvme,path=disk.img", "nvme,path=disk.img"], "nvme.2:", "disk.img"),
        (["nvme,path=disk.img", "virtio-blk,path=link.img"], "virtio-blk:", "link.img"),
        (["virtio-blk,path=disk.img", "nvme,path=same.img,readonly"], "nvme:", "same.img"),
        (["virtio-blk,path=disk.qcow2", "nvme,path=disk.qcow2"], "nvme:", "disk.qcow2"),
        (["virtio-blk,path=one.qcow2", "nvme,path=base.img"], "nvme:", "base.img"),
        (["nvme,path=base.img", "virtio-blk,path=one.qcow2"], "virtio-blk:", "base.img"),
    ] {
        let said = refused(folder.path(), &disks);
        let whole = said.starts_with(second) && said.contains(&format!("{name} is in use by "));
        assert!(whole && said.ends_with("(vmm)"), "{disks:?}: {said}");
    }
    if runs_here("a_disk_can_be_attached_only_once") {
        machine(folder.path(), &["nvme,path=disk.img,readonly", "nvme,path=same.img,overlay"]);
        machine(folder.path(), &["nvme,path=one.qcow2", "virtio-blk,path=two.qcow2"]);
    }
}

#[test]
fn refuses_images_with_missing_parts() {
    let folder = disks();
    let path = |name: &str| folder.path().join(name);
    let whole = fs::read(path("disk.qcow2")).expect("an image");
    fs::write(path("cut.qcow2"), &whole[..100]).expect("a file");
    fs::write(path("half.qcow2"), &whole[..70_000]).expect("a file");
    fs::write(path("foreign.img"), b"KDMV").expect("a file");
    let stand = |name: &str, below: &str, format: &str| {
        let words = ["create", "-q", "-u", "-f", "qcow2", "-b", below, "-F", format];
        qemu_img(&words, &path(name), &["1M"]).expect("an image");
    };
    stand("on-gone.qcow2", "gone.img", "raw");
    stand("on-cut.qcow2", "cut.qcow2", "qcow2");
    stand("on-half.qcow2", "half.qcow2", "qcow2");
    stand("on-raw.qcow2", "base.img", "qcow2");
    stand("on-vmdk.qcow2", "foreign.img", "vmdk");
    let cases: [(&str, &[&str]); 7] = [
        ("cut.qcow2", &["is cut off"]),
        ("half.qcow2", &["damaged", "beyond the end of the file", "qemu-img check"]),
        ("on-gone.qcow2", &["its backing file", "gone.img", "No such file"]),
        ("on-cut.qcow2", &["its backing file", "/cut.qcow2", "is cut off"]),
        ("on-half.qcow2", &["its backing file", "/half.qcow2", "damaged"]),
        ("on-raw.qcow2", &["its backing file", "base.img", "not a qcow2 image"]),
        ("on-vmdk.qcow2", &["its backing file", "foreign.img", "vmdk"]),
    ];
    for (name, parts) in cases {
        for kind in ["virtio-blk", "nvme"] {
            for options in ["", ",readonly", ",overlay"] {
                let said = refused(folder.path(), &[&format!("{kind},path={name}{options}")]);
                for part in parts.iter().chain([&name]) {
                    assert!(said.contains(part), "{name}{options}: no {part:?} in: {said}");
                }
            }
        }
    }
}

#[test]
fn block_devices_in_use_are_refused_like_files() {
    let test = "block_devices_in_use_are_refused_like_files";
    let folder = disks();
    let path = |name: &str| folder.path().join(name);
    let (Some(device), true) = (Loop::on(&path("disk.img")), runs_here(test)) else {
        return not_run(test, "loop devices need root and /dev/loop-control");
    };
    let name = device.0.display().to_string();
    // A second node of the same device, as in another container.
    let numbers = fs::read_to_string(format!("/sys/block/{}/dev", &name["/dev/".len()..]));
    let numbers = numbers.expect("its numbers");
    let numbers: Vec<_> = numbers.trim().split(':').collect();
    let node = Command::new("mknod").arg(path("node")).arg("b").args(numbers).status();
    assert!(node.expect("mknod").success());
    let first = machine(folder.path(), &[&format!("virtio-blk,path={name}")]);
    for second in [&name, "node"] {
        for kind in ["virtio-blk", "nvme"] {
            let said = refused(folder.path(), &[&format!("{kind},path={second}")]);
            assert!(said.contains(&has(&first, second)), "{said}");
        }
    }
    for options in [",readonly", ",overlay"] {
        let said = refused(folder.path(), &[&format!("nvme,path={name}{options}")]);
        assert!(said.contains(&has(&first, &name)), "{said}");
    }
    let twice = format!("nvme,path={name}");
    drop(first);
    let said = refused(folder.path(), &[&twice, "virtio-blk,path=node"]);
    assert!(said.contains("node is in use by") && said.ends_with("(vmm)"), "{said}");
    let readers = [(); 2].map(|()| machine(folder.path(), &[&format!("{twice},readonly")]));
    let said = refused(folder.path(), &[&twice]);
    assert!(readers.iter().any(|it| said.contains(&has(it, &name))), "{said}");
    drop(readers);
    // A device that the host has mounted is refused.
    let make = Command::new("mkfs.ext2").arg("-q").arg(&device.0).status();
    fs::create_dir(path("mounted")).expect("a folder");
    let script = "mount \"$1\" mounted && exec \"$2\" run --device \"nvme,path=$1\"";
    let mut mounted = Command::new("unshare");
    mounted.args(["--mount", "sh", "-ec", script, "sh", &name]).arg(vmm());
    assert!(make.expect("mkfs.ext2").success());
    let ended = transom_tests::program::finish(mounted.current_dir(folder.path()));
    let said = crate::one_line(&ended.expect("unshare"), script, FAILED);
    assert!(said.contains(&format!("{name} is in use by the host")), "{said}");
    fs::write(path("foreign.img"), [&b"KDMV"[..], &[0; 508]].concat()).expect("a file");
    let foreign = Loop::on(&path("foreign.img")).expect("a loop device");
    for (name, part) in [
        (foreign.0.display().to_string(), "a VMware image"),
        ("/dev/loop-that-is-gone".to_owned(), "does not exist"),
    ] {
        let said = refused(folder.path(), &[&format!("nvme,path={name}")]);
        assert!(said.contains(&name) && said.contains(part), "{said}");
    }
    drop(device);
    let said = refused(folder.path(), &["nvme,path=node"]);
    assert!(said.contains("node is a device of 0 bytes"), "{said}");
}
