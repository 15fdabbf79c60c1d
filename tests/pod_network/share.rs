//! The shared folder at the gateway's addresses, with Samba's `smbclient` as the guest.

use std::fs;

use anyhow::ensure;

use crate::town::{Town, fails, run};

/// `smbclient` with an account, at an address.
fn client(account: &str, address: &str, command: &str) -> String {
    format!("smbclient //host.lan/Data -I {address} -U {account} -c {command}")
}

pub(crate) fn is_at_the_gateway() -> anyhow::Result<()> {
    let town = Town::new()?;
    let folder = town.volume(9, "shared");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("there"), "from the host")?;
    let mut pod = town.pod(9, &[("USERNAME", "bill"), ("PASSWORD", "secret")])?;
    pod.lease()?;
    for address in ["172.30.0.1", "20.20.20.1"] {
        let said = pod.guest(&client("bill%secret", address, "ls"))?;
        ensure!(said.contains("there"), "{address}: {said}");
    }
    pod.guest(&client("bill%secret", "172.30.0.1", "mkdir\tmade"))?;
    ensure!(folder.join("made").is_dir(), "a folder that the guest made is not on the host");
    for account in ["bill%wrong", "docker%secret", "%"] {
        fails(&pod.guest_ns(), &client(account, "172.30.0.1", "ls"))?;
    }
    fails(&pod.guest_ns(), &client("bill%secret", "172.30.0.1", "ls -m NT1"))?;
    // The pod's own address has no share, neither for the guest nor for outside hosts.
    fails(&pod.guest_ns(), "nc -nz -w 5 10.77.0.9 445")?;
    fails(&town.ns(), "nc -nz -w 5 10.77.0.9 445")?;
    run(&town.ns(), "ip route add 172.30.0.0/24 via 10.77.0.9")?;
    fails(&town.ns(), "nc -nz -w 5 172.30.0.1 445")?;
    fails(&pod.guest_ns(), "nc -nz -w 5 172.30.0.1 139")?;
    pod.end()?;
    // Without a folder, the port is closed.
    fs::remove_dir_all(&folder)?;
    let mut pod = town.pod(9, &[])?;
    pod.lease()?;
    fails(&pod.guest_ns(), "nc -nz -w 5 172.30.0.1 445")?;
    pod.end()
}
