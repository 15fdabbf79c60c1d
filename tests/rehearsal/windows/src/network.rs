//! The network connection: the first adapter with a driver, with an address by DHCP.

use std::fs;
use std::thread;

use super::console::say;
use super::tool;

const SCRIPT: &str = "/run/lease.sh";
const LEASE: &str = "#!/bin/sh
case $1 in
  deconfig) ip link set \"$interface\" up ;;
  bound)
    ip addr add \"$ip/$mask\" dev \"$interface\"
    ip route add default via \"$router\"
    echo \"$ip $router\"
    ;;
esac
";

/// Gets an address in the background.
pub(crate) fn start(computer: &str) {
    let host = format!("hostname:{computer}");
    thread::spawn(move || match lease(&host) {
        Ok(said) => say!("network: {said}"),
        Err(error) => say!("network: {error:#}"),
    });
}

fn lease(host: &str) -> anyhow::Result<String> {
    tool::busybox(&["ip", "link", "set", "lo", "up"])?;
    let entries = fs::read_dir("/sys/class/net")?.flatten();
    let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let Some(name) = names.find(|name| name != "lo") else {
        return Ok("no adapter with a driver".into());
    };
    fs::write(SCRIPT, LEASE)?;
    tool::busybox(&["chmod", "755", SCRIPT])?;
    let client = ["udhcpc", "-f", "-q", "-n", "-t", "30", "-T", "2", "-x", host, "-s", SCRIPT];
    tool::busybox(&[&client[..], &["-i", &name]].concat())
}
