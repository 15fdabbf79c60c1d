//! The packet rules of the pod, in the language of nft(8). They are one table, which one
//! transaction creates in place of a killed predecessor's, and another one removes.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::{env, thread};

use anyhow::{Context, bail};
use host::mac::Mac;
use jail::watch::{self, Capabilities};

use super::choice::{KeptPorts, OLD_GATEWAY, Subnet};
use super::ipv6::{MASK, Prefix};
use crate::settings::value::Value as _;
use crate::shared_folder::PORT;
use crate::status::{Failure, Status};

pub(super) struct Rules<'a> {
    pub(super) tap: &'a str,
    pub(super) mac: Mac,
    pub(super) subnet: Subnet,
    /// The guest's IPv6 network, if it has one.
    pub(super) prefix: Option<Prefix>,
    pub(super) kept: &'a KeptPorts,
    /// The shared folder is at the gateway's addresses.
    pub(super) share: bool,
}

/// Neighbor discovery, and questions for a router.
const NEIGHBOR_TYPES: &str = "{ nd-router-solicit, nd-neighbor-solicit, nd-neighbor-advert }";
/// Deletes the table, whether or not a predecessor has left one. (`delete` alone fails without a
/// table.)
pub(super) const REPLACE: &str = "table inet transom\ndelete table inet transom\n";

impl Rules<'_> {
    /// The input for `nft`.
    pub(super) fn text(&self) -> String {
        let parts = [self.guard(), self.translation(), self.limits(), self.ipv6()];
        format!("{REPLACE}table inet transom {{\n{}}}\n", parts.concat())
    }

    /// Drops spoofed packets before all other rules. Packets from outside cannot have the guest's
    /// or the gateway's address. The guest has one MAC address and one IPv4 address, and IPv6 only
    /// if the rules of `ipv6` check it.
    fn guard(&self) -> String {
        let Subnet { guest, gateway, .. } = self.subnet;
        let (tap, mac) = (self.tap, self.mac.show());
        let version = match self.prefix {
            Some(_) => "meta nfproto ipv6 accept\n",
            None => "meta nfproto != ipv4 drop\n",
        };
        format!(
            "chain guard {{
type filter hook prerouting priority raw; policy accept;
iifname != {{ \"{tap}\", \"lo\" }} ip saddr {guest} drop
iifname != {{ \"{tap}\", \"lo\" }} ip daddr {{ {gateway}, {OLD_GATEWAY} }} drop
iifname != \"{tap}\" accept
ether saddr != {mac} drop
{version}ip saddr 0.0.0.0 udp dport 67 accept
ip saddr != {guest} drop
ip daddr 127.0.0.0/8 drop
}}
"
        )
    }

    /// Forwards packets for the pod to the guest, from outside, from the guest and from the pod.
    fn translation(&self) -> String {
        let Subnet { guest, gateway, .. } = self.subnet;
        let to_guest = to_guest(guest, self.kept);
        format!(
            "chain arrive {{
type nat hook prerouting priority dstnat; policy accept;
ip daddr {{ {gateway}, {OLD_GATEWAY} }} return
fib daddr type local goto guest
}}
chain turn {{
type nat hook output priority -100; policy accept;
ip daddr {{ {gateway}, {OLD_GATEWAY} }} return
ip daddr 127.0.0.0/8 return
fib daddr type local goto guest
}}
chain guest {{
{to_guest}}}
chain leave {{
type nat hook postrouting priority srcnat; policy accept;
oifname != \"lo\" ip saddr {guest} masquerade
}}
"
        )
    }

    /// The same for IPv6, where the guest chooses its address in a network of its own. Ports are
    /// not forwarded by IPv6: the pod's relay connects to the guest by IPv4.
    fn ipv6(&self) -> String {
        let Some(prefix) = self.prefix else { return String::new() };
        let (tap, network) = (self.tap, format!("{}/{MASK}", prefix.0));
        format!(
            "chain guard_six {{
type filter hook prerouting priority raw - 1; policy accept;
meta nfproto != ipv6 accept
iifname != {{ \"{tap}\", \"lo\" }} ip6 saddr {network} drop
iifname != {{ \"{tap}\", \"lo\" }} ip6 daddr {network} drop
iifname != \"{tap}\" accept
ip6 saddr {{ ::, fe80::/10 }} icmpv6 type {NEIGHBOR_TYPES} accept
ip6 saddr != {network} drop
ip6 daddr ::1 drop
}}
chain leave_six {{
type nat hook postrouting priority srcnat; policy accept;
oifname != {{ \"{tap}\", \"lo\" }} ip6 saddr {network} masquerade
}}
"
        )
    }

    /// Clamps TCP segments to the MTU, blocks connections to the guest that were not forwarded, and
    /// limits the guest's access to the pod to DHCP, DNS, ping and the shared folder.
    fn limits(&self) -> String {
        let (tap, gateway) = (self.tap, self.subnet.gateway);
        let ipv6 = match self.prefix {
            Some(_) => {
                format!("icmpv6 type {NEIGHBOR_TYPES} accept\nicmpv6 type echo-request accept\n")
            }
            None => String::new(),
        };
        let share = match self.share {
            true => format!("ip daddr {{ {gateway}, {OLD_GATEWAY} }} tcp dport {PORT} accept\n"),
            false => String::new(),
        };
        format!(
            "chain fit {{
type filter hook forward priority mangle; policy accept;
iifname \"{tap}\" tcp flags syn tcp option maxseg size set rt mtu
oifname \"{tap}\" tcp flags syn tcp option maxseg size set rt mtu
}}
chain through {{
type filter hook forward priority filter; policy accept;
oifname != \"{tap}\" accept
ct status dnat accept
ct state new drop
}}
chain inside {{
type filter hook input priority filter; policy accept;
iifname != \"{tap}\" accept
ct state established,related accept
udp dport 67 accept
ip daddr {gateway} udp dport 53 accept
ip daddr {gateway} tcp dport 53 accept
icmp type echo-request accept
{share}{ipv6}reject
}}
"
        )
    }
}

/// The rules that forward all ports except the kept ones to the guest.
fn to_guest(guest: Ipv4Addr, kept: &KeptPorts) -> String {
    let mut text = String::new();
    for (protocol, ports) in [("tcp", &kept.tcp), ("udp", &kept.udp)] {
        let but = match list(ports) {
            None => format!("meta l4proto {protocol}"),
            Some(ports) => format!("{protocol} dport != {{ {ports} }}"),
        };
        writeln!(text, "meta nfproto ipv4 {but} dnat ip to {guest}").expect("a string takes all");
    }
    text
}

fn list(ports: &BTreeSet<u16>) -> Option<String> {
    let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
    (!ports.is_empty()).then(|| ports.join(", "))
}

/// A process that removes the table when we end. It is an `nft` whose input is already written: it
/// acts when its input is closed. So removal needs no privilege of ours, and a pod that is killed
/// leaves no rules behind.
pub(super) struct Table(Option<Child>);

impl Table {
    /// Starts the process. It inherits the socket that marks the owner of the network, so that a
    /// successor waits until the rules are removed.
    pub(super) fn watch(owner: &UnixListener) -> anyhow::Result<Self> {
        let owner = OwnedFd::from(owner.try_clone().context("the socket of the owner")?);
        let start = move || {
            watch::keep_for_programs(Capabilities::NET_ADMIN)?;
            // A terminal's Ctrl-C must not reach it.
            let mut nft = nft();
            nft.stdout(owner).process_group(0).spawn().map_err(not_started)
        };
        let started = thread::Builder::new().name("rules".into()).spawn(start)?.join();
        let mut child = started.map_err(|_| anyhow::anyhow!("a thread for nft"))??;
        let input = child.stdin.as_mut().context("the input of nft")?;
        input.write_all(REPLACE.as_bytes()).context("the input of nft")?;
        Ok(Self(Some(child)))
    }

    pub(super) fn remove(mut self) -> anyhow::Result<()> {
        self.0.take().map_or(Ok(()), finish)
    }
}

impl Drop for Table {
    /// Removes the table after a failed start, whose reason is already reported.
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(finish) {
            tracing::debug!("{error:#}");
        }
    }
}

/// Executes the commands in one transaction.
pub(super) fn apply(text: &str) -> anyhow::Result<()> {
    let mut child = nft().spawn().map_err(not_started)?;
    let input = child.stdin.as_mut().context("the input of nft")?;
    // If it exited already, its own message says more than a broken pipe.
    input.write_all(text.as_bytes()).ok();
    finish(child)
}

fn nft() -> Command {
    let mut nft = Command::new("nft");
    nft.args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    // Our environment has passwords.
    nft.env_clear().envs(env::var_os("PATH").map(|path| ("PATH", path)));
    nft
}

fn not_started(error: io::Error) -> anyhow::Error {
    match error.kind() {
        io::ErrorKind::NotFound => Failure::new(
            Status::Network,
            "there is no program `nft`: install nftables, or set NETWORK=user",
        ),
        _ => anyhow::Error::new(error).context("nft"),
    }
}

/// Closes the input of `child`, and waits for the result.
fn finish(child: Child) -> anyhow::Result<()> {
    let ended = child.wait_with_output().context("nft")?;
    if ended.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    let said = said.lines().next().unwrap_or("nothing").trim();
    if said.contains("Operation not permitted") {
        bail!("nftables: {said}: add --cap-add NET_ADMIN, or set NETWORK=user");
    }
    bail!("nftables refuses the rules: {said}: load nft_nat, nft_masq and nft_fib on the host")
}

#[cfg(test)]
mod test {
    use std::path::Path;

    use super::*;

    #[test]
    fn waits_for_the_removal_of_the_table() {
        for end in [|table: Table| drop(table), |table: Table| table.remove().unwrap()] {
            // Like `nft`, it ends with its input.
            let mut program = Command::new("cat");
            program.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
            let child = program.spawn().unwrap();
            let folder = format!("/proc/{}", child.id());
            end(Table(Some(child)));
            assert!(!Path::new(&folder).exists(), "{folder} is left");
        }
    }
}
