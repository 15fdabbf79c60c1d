//! The shared folder, used by Linux' own client (cifs) in the guest.

use std::fs;

use anyhow::ensure;
use transom_tests::lab::everything;
use transom_tests::network::checksum;

use super::has_nothing;
use super::pod::{OWNER, Pod};
use super::town::{Town, data};

/// Mounts the share with these options, and runs a script in it.
fn mounted(options: &str, script: &str) -> String {
    format!(
        "host=$(nslookup host.lan | sed -n 's/^Address: //p' | tail -n 1); mkdir -p /mnt; \
         mount -t cifs //$host/Data /mnt -o \"username=ada,iocharset=utf8,{options}\" || exit; \
         cd /mnt; {script}; cd /; umount /mnt"
    )
}

pub(crate) fn works(town: &Town, pod: &Pod, _: &str) -> anyhow::Result<()> {
    const PASSWORD: &str = "password=a long word";
    let folder = pod.volume.join("shared");
    let data = data();
    fs::write(folder.join("There.bin"), &data)?;
    let dialects = [("vers=3.1.1,seal", "a"), ("vers=3.1.1", "b"), ("vers=2.1", "c")];
    let refused = ["password=wrong,vers=3.1.1", "sec=none,vers=3.1.1", "vers=1.0"];
    // The suite `shared_folder` has all of them.
    let count = if everything() { 3 } else { 1 };
    for (more, name) in &dialects[..count] {
        let script = format!(
            "md5sum < there.BIN; cp There.bin {name}; mkdir Folder{name}; \
             mv {name} Folder{name}/größer; echo Folder{name}/*"
        );
        let said = pod.guest(town, &mounted(&format!("{PASSWORD},{more}"), &script))?;
        ensure!(said.starts_with(&checksum(&data)?), "{more}: {said}");
        ensure!(said.trim().ends_with("größer"), "{more}: {said}");
        let moved = folder.join(format!("Folder{name}/größer"));
        ensure!(fs::read(moved)? == data, "{more}: the host has other data");
    }
    fs::write(pod.volume.join("secret"), "not for the guest")?;
    std::os::unix::fs::symlink("../secret", folder.join("out"))?;
    let said = pod.guest(town, &mounted(&format!("{PASSWORD},vers=3.1.1"), "ls; cat out"))?;
    ensure!(said.contains("There.bin") && !said.contains("not for"), "a link leads out: {said}");
    for refused in &refused[..count] {
        let said = pod.guest(town, &mounted(refused, "echo mounted"))?;
        ensure!(!said.contains("mounted"), "{refused}: {said}");
    }
    // The server, started by the process that keeps it.
    has_nothing(pod.child_of(pod.child("transom")?, "transom")?, OWNER)
}
